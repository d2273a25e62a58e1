"""Crafted images and arrays as datasets: what is no picture is refused, and harms nobody."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .trial import Ground, Kind, Verdict, judge_words, say

CLEAN = ("--clients", "3", "--dirichlet", "1", "--size", "16", "--out", "shown", "--json")
Craft = Callable[[Path, random.Random], None]  # puts it below this folder
Make = Callable[[random.Random], bytes]
ROW = b"\0" + b"\x30" * 48  # of a PNG, 16 pixels
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\n(%pipe%touch pwned) (w) file\nshowpage\n"


def attempt(ground: Ground, rng: random.Random, number: int, place: Path) -> tuple[str, Verdict]:
    work = place / "work"
    work.mkdir()
    crafts = list(IMAGES) + list(ARRAYS)
    name = crafts[number % len(crafts)]
    of_images = name in IMAGES
    expect, craft = (IMAGES if of_images else ARRAYS)[name]
    (_save_images if of_images else _save)(work)
    words = ["data", "show", "folder:photos" if of_images else "npz:mine.npz", *CLEAN]
    right = _read(say(words, work).out) if expect == "same" else None  # what the plain file gives
    craft(work, rng)
    said = say(words, work)
    verdict = judge_words(said)
    if (work / "pwned").exists():
        verdict = Verdict("silent", "the file was executed")
    elif verdict is None:
        if expect == "refused":
            verdict = Verdict("silent", "it was taken as data")
        elif expect == "same" and _read(said.out) != right:
            verdict = Verdict("silent", "it gives another dataset than the plain file")
    elif verdict.outcome == "refused" and expect == "same":
        verdict = Verdict("lost", f"a good file is refused: {verdict.why}")
    return f"{'an image' if of_images else 'an npz file'}: {name}", verdict or Verdict("same")


def _read(printed: str) -> Any:
    """Who holds which rows, as `fedthe data show --json` says it."""
    try:
        value = json.loads(printed)
        return {name: value[name] for name in ("clients", "tests", "manifest_hash")}
    except (ValueError, LookupError, TypeError):
        return printed


def _save_images(work: Path) -> None:
    from PIL import Image

    draws = np.random.default_rng(0)
    for label, name in enumerate(("cat", "dog", "hen")):
        folder = work / "photos" / name
        folder.mkdir(parents=True)
        for i in range(12):
            pixels = draws.integers(0, 90, (16, 16, 3)) + 70 * label
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i:02}.png")


def _save(work: Path, **changed: Any) -> None:
    """mine.npz with some arrays changed; one that is None is left out."""
    np.savez(work / "mine.npz", **{name: each for name, each in (_arrays() | changed).items() if each is not None})


def _arrays() -> dict[str, Any]:
    labels = np.arange(60) % 3
    noise = np.random.default_rng(1).integers(0, 90, (60, 16, 16, 3))
    return {"images": (noise + 70 * labels[:, None, None, None]).astype(np.uint8), "labels": labels}


def _write(name: str, held: bytes | Make) -> Craft:
    def craft(work: Path, rng: random.Random) -> None:
        (work / "photos" / "dog" / name).write_bytes(held if isinstance(held, bytes) else held(rng))

    return craft


def _encode(mode: str, size: tuple[int, int], format: str, **more: Any) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new(mode, size).save(file, format, **more)
    return file.getvalue()


def _chunk(name: bytes, held: bytes) -> bytes:
    return struct.pack(">I", len(held)) + name + held + struct.pack(">I", zlib.crc32(name + held))


def _make_png(width: int, height: int, data: bytes, *more: bytes) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [_chunk(b"IHDR", head), *more, _chunk(b"IDAT", data), _chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _bomb_png(side: int) -> Make:
    """One row of pixels that says it is a square of this side."""
    return lambda rng: _make_png(side, side, zlib.compress(ROW))


def _png_with_text(rng: random.Random) -> bytes:
    """Whose comment unpacks to 64 MB."""
    return _make_png(16, 16, zlib.compress(ROW * 16), _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 26))))


def _flipped_png(rng: random.Random) -> bytes:
    """With one bit of its pixels flipped."""
    held = bytearray(_noisy("PNG"))
    held[rng.randrange(60, len(held) - 30)] ^= 1 << rng.randrange(8)
    return bytes(held)


def _cut(format: str) -> Make:
    def cut(rng: random.Random) -> bytes:
        held = _noisy(format)
        return held[: rng.randrange(1, len(held) - 20)]

    return cut


def _noisy(format: str) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    pixels = np.random.default_rng(2).integers(0, 256, (40, 40, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(file, format)
    return file.getvalue()


def _place(name: str, make: Callable[[Path], object]) -> Craft:
    def craft(work: Path, rng: random.Random) -> None:
        make(work / "photos" / "dog" / name)

    return craft


def _name_class(name: str) -> Craft:
    return _place("", lambda path: path.rename(path.with_name(name)))


SVG = b"<svg xmlns='http://www.w3.org/2000/svg'><image href='/etc/passwd'/></svg>"
CODE = "__import__('os').system('touch pwned')"
IMAGES: dict[str, tuple[str, Craft]] = {
    "EPS in a .jpg": ("refused", _write("x.jpg", EPS)),
    "random bytes": ("refused", _write("x.png", lambda rng: rng.randbytes(500))),
    "an empty file": ("refused", _write("x.png", b"")),
    "a bomb of 50,000 x 50,000 pixels": ("refused", _write("x.png", _bomb_png(50_000))),
    "a bomb within Pillow's limit": ("refused", _write("x.png", _bomb_png(9_400))),
    "a cut PNG": ("refused", _write("x.png", _cut("PNG"))),
    "a cut JPEG": ("refused", _write("x.jpg", _cut("JPEG"))),
    "a cut GIF": ("refused", _write("x.gif", _cut("GIF"))),
    "a PNG with a compressed text of 64 MB": ("any", _write("x.png", _png_with_text)),
    "a PNG with a bit flipped": ("refused", _write("x.png", _flipped_png)),
    "SVG in a .png": (
        "refused",
        _write("x.png", b"<svg xmlns='http://www.w3.org/2000/svg'><image href='/etc/passwd'/></svg>"),
    ),
    "floating-point pixels": ("refused", _write("x.tif", lambda rng: _encode("F", (16, 16), "TIFF"))),
    "one pixel": ("any", _write("x.png", lambda rng: _encode("RGB", (1, 1), "PNG"))),
    "one row of 10,000 pixels": ("any", _write("x.png", lambda rng: _encode("RGB", (10_000, 1), "PNG"))),
    "a FIFO": ("refused", _place("x.png", lambda path: os.mkfifo(path))),
    "a link to /dev/zero": ("refused", _place("x.png", lambda path: path.symlink_to("/dev/zero"))),
    "a dangling link": ("refused", _place("x.png", lambda path: path.symlink_to("nowhere"))),
    "a link to itself": ("refused", _place("x.png", lambda path: path.symlink_to(path.name))),
    "a folder within a class": ("refused", _place("x", lambda path: path.mkdir())),
    "control characters in the name of a bad file": ("refused", _write("\x1b[31m\x07x.png", b"no image")),
    "control characters in the name of a class": ("any", _name_class("\x1b]0;title\x07dog")),
    "line breaks in the name of a class": ("any", _name_class("a\nfedthe: b\r")),
    "the name of a class is not UTF-8": ("any", _name_class(os.fsdecode(b"\xff\xfe"))),
    "markup in the name of a class": ("any", _name_class("[bold]dog[")),
}


def _npz(**changed: Any) -> Craft:
    return lambda work, rng: _save(work, **changed)


def _header(descr: str, shape: str, order: str = "False") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def _lie(images: bytes | None = None, labels: bytes | None = None) -> Craft:
    """Headers of arrays that say other than what follows."""

    def craft(work: Path, rng: random.Random) -> None:
        held = _arrays()
        with zipfile.ZipFile(work / "mine.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("images.npy", (images or _header("'|u1'", "(60, 16, 16, 3)")) + held["images"].tobytes())
            archive.writestr("labels.npy", (labels or _header("'<i8'", "(60,)")) + held["labels"].tobytes())

    return craft


def _bomb(work: Path, rng: random.Random) -> None:
    """16 GB of zeros in a small file: one compressed block, repeated."""
    press = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = press.compress(bytes(1 << 24)) + press.flush(zlib.Z_FULL_FLUSH)
    rows = 1024 * (1 << 24) // (16 * 16 * 3)
    head = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = head.compress(_header("'|u1'", f"({rows}, 16, 16, 3)")) + head.flush(zlib.Z_FULL_FLUSH)
    body = first + block * 1024 + zlib.compressobj(9, zlib.DEFLATED, -15).flush()
    name, size = b"images.npy", 0xFFFFFFFE
    local = struct.pack("<IHHHHHIIIHH", 0x04034B50, 20, 0, 8, 0, 0x21, 0, len(body), size, len(name), 0) + name
    entry = struct.pack(
        "<IHHHHHHIIIHHHHHII", 0x02014B50, 20, 20, 0, 8, 0, 0x21, 0, len(body), size, len(name), 0, 0, 0, 0, 0, 0
    )
    entry += name
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 1, 1, len(entry), len(local) + len(body), 0)
    (work / "mine.npz").write_bytes(local + body + entry + end)
    with zipfile.ZipFile(work / "mine.npz", "a") as archive:
        file = io.BytesIO()
        np.save(file, np.zeros(rows, dtype=np.uint8))
        archive.writestr("labels.npy", file.getvalue(), zipfile.ZIP_DEFLATED)


def _flip(work: Path, rng: random.Random) -> None:
    held = bytearray((work / "mine.npz").read_bytes())
    held[rng.randrange(200, 40_000)] ^= 1 << rng.randrange(8)
    (work / "mine.npz").write_bytes(held)


def _cut_npz(work: Path, rng: random.Random) -> None:
    held = (work / "mine.npz").read_bytes()
    (work / "mine.npz").write_bytes(held[: rng.randrange(len(held))])


def _instead(make: Callable[[Path], object]) -> Craft:
    def craft(work: Path, rng: random.Random) -> None:
        (work / "mine.npz").unlink()
        make(work / "mine.npz")

    return craft


def _double(work: Path, rng: random.Random) -> None:
    file = io.BytesIO()
    np.save(file, np.zeros(60, dtype=np.int64))
    import warnings

    with warnings.catch_warnings(), zipfile.ZipFile(work / "mine.npz", "a") as archive:
        warnings.simplefilter("ignore")
        archive.writestr("labels.npy", file.getvalue())


def _labels(**changed: Any) -> np.ndarray:
    labels = np.arange(60) % 3
    labels[7] = changed.get("one", labels[7])
    return labels.astype(changed.get("dtype", np.int64))


def _named(name: str) -> np.ndarray:
    return np.array([name, "b", "c"])


ARRAYS: dict[str, tuple[str, Craft]] = {
    "a pickle within": ("refused", _npz(labels=np.array([{}] * 60, dtype=object))),
    "a bit flipped": ("refused", _flip),
    "cut off": ("refused", _cut_npz),
    "a header of 10^13 rows": ("refused", _lie(images=_header("'|u1'", "(10000000000000, 16, 16, 3)"))),
    "a header of -1 rows": ("refused", _lie(images=_header("'|u1'", "(-1, 16, 16, 3)"))),
    "headers of fewer rows than there are": (
        "refused",
        _lie(_header("'|u1'", "(40, 16, 16, 3)"), _header("'<i8'", "(40,)")),
    ),
    "a header of more rows than there are": ("refused", _lie(_header("'|u1'", "(90, 16, 16, 3)"))),
    "a header that is no literal": (
        "refused",
        _lie(_header(CODE, "(60, 16, 16, 3)")),
    ),
    "a header with 500 brackets": ("refused", _lie(_header("'|u1'", "(" * 500 + "60" + ",)" * 500))),
    "16 GB in 16 MB": ("refused", _bomb),
    "labels that are not whole": ("refused", _npz(labels=np.linspace(0, 2, 60))),
    "labels that are not numbers": ("refused", _npz(labels=np.array(["a"] * 60))),
    "a label of -1": ("refused", _npz(labels=_labels(one=-1))),
    "a label of 2^40": ("refused", _npz(labels=_labels(one=2**40))),
    "fewer labels than images": ("refused", _npz(labels=_labels()[:50])),
    "no labels": ("refused", _npz(labels=None)),
    "images of 16 bits": ("refused", _npz(images=_arrays()["images"].astype(np.uint16))),
    "images of floats": ("refused", _npz(images=_arrays()["images"] / 255)),
    "images of one dimension": ("refused", _npz(images=np.zeros(60, np.uint8))),
    "images in Fortran's order": ("same", _npz(images=np.asfortranarray(_arrays()["images"]))),
    "labels in the other byte order": ("same", _npz(labels=_labels(dtype=">i8"))),
    "two arrays of one name": ("refused", _double),
    "a class twice": ("refused", _npz(classes=_named("b"))),
    "control characters in a class": ("any", _npz(classes=_named("\x1b[31m\x07"))),
    "a class of 100,000 letters": ("any", _npz(classes=_named("a" * 100_000))),
    "a folder": ("refused", _instead(lambda path: path.mkdir())),
    "a FIFO in its place": ("refused", _instead(lambda path: os.mkfifo(path))),
    "a link to /dev/zero in its place": ("refused", _instead(lambda path: path.symlink_to("/dev/zero"))),
    "an .npy file": ("refused", _instead(lambda path: path.write_bytes(_header("'<i8'", "(60,)") + bytes(480)))),
}

KIND = Kind("images", 80, 8, attempt)
