"""Files made to harm or to confuse their reader: special files, arrays that claim memory, images that are none."""

from __future__ import annotations

import io
import os
import signal
import socket
import struct
import subprocess
import sys
import tracemalloc
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedthe import foreign, store
from fedthe.data import cifar, decode, load_dataset
from fedthe.data.folder import read_image
from fedthe.data.frost import load_frost
from fedthe.data.imagenet32 import read_map
from fedthe.data.unpickle import load_pickle
from helpers import fails

HOSTILE = "a\x1b[2Jb\u202ec\nd\udc80"  # escape sequence, bidi override, line break, lone surrogate


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def save_png(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise(9, 9, 3)).save(file, "PNG")
    return file


# ---------------------------------------------------------------- special files


@pytest.fixture(params=["fifo", "socket", "zero", "null"])
def special(request: pytest.FixtureRequest) -> Iterator[Callable[[Path], Path]]:
    """Puts a special file at a path."""
    if not hasattr(os, "mkfifo"):
        pytest.skip("this system has no special files")
    opened = []
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("waited for a special file"))
    signal.alarm(60)  # a reader that waits would wait forever

    def put(path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if request.param == "fifo":
            os.mkfifo(path)
        elif request.param == "socket":
            opened.append(socket.socket(socket.AF_UNIX))
            short = Path("/tmp") / f"fedthe-{os.getpid()}-{len(opened)}"  # a socket's path has at most 100 characters
            opened[-1].bind(str(short))
            short.rename(path)
        else:
            path.symlink_to(f"/dev/{request.param}")
        return path

    yield put
    signal.alarm(0)
    for each in opened:
        each.close()


def test_special_files_are_refused_and_never_waited_for(special: Callable[[Path], Path], tmp_path: Path) -> None:
    """With the old readers, a FIFO was waited for and /dev/zero filled the memory."""
    file = special(tmp_path / "x.npz")
    for spec in (f"npz:{file}", f"tiny_imagenet:{file}"):
        fails(lambda spec=spec: load_dataset(spec), file, "regular file")
    fails(lambda: load_dataset("digits", natural=f"npz:{file}"), file, "regular file")
    fails(lambda: load_dataset(f"folder:{file}"), file, "not a folder")
    fails(lambda: load_pickle(file), file, "regular file")
    fails(lambda: read_map(file), file, "regular file")
    fails(lambda: foreign.read_npz(file), file, "regular file")

    fails(lambda: load_dataset(f"mnist:{special(tmp_path / 'mnist/train-images-idx3-ubyte').parent}"), "regular file")
    fails(lambda: load_dataset(f"cifar10:{special(tmp_path / 'cifar/batches.meta').parent}"), "regular file")
    fails(lambda: load_dataset(f"tiny_imagenet:{special(tmp_path / 'tiny/wnids.txt').parent}"), "wnids.txt")
    save_png(tmp_path / "folder/cat/a.png")
    picture = special(tmp_path / "folder/cat/b.png")
    fails(lambda: load_dataset(f"folder:{tmp_path / 'folder'}"), picture, "regular file")
    fails(lambda: load_frost(special(tmp_path / "frost/frost1.png").parent), "frost1.png", "regular file")


def test_a_cache_that_is_a_fifo_is_made_again(home: Path) -> None:
    (home / "cache").mkdir(parents=True)
    os.mkfifo(home / "cache" / f"kind-key-{store.SEALED}.npz")
    with pytest.warns(UserWarning, match="is a FIFO"):
        assert store.cached("kind", "key", lambda: {"a": np.arange(3)})["a"].tolist() == [0, 1, 2]
    assert store.cached("kind", "key", lambda: {"a": np.arange(9)})["a"].tolist() == [0, 1, 2]


def test_image_files_are_bounded(tmp_path: Path) -> None:
    file = save_png(tmp_path / "cat/a.png")
    with file.open("rb+") as large:
        large.truncate(1 << 40)  # sparse: a terabyte that takes no room
    fails(lambda: load_dataset(f"folder:{tmp_path}"), file, "bytes")


# ---------------------------------------------------------------- npz


def npy_bytes(header: str, content: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    text = header.encode("latin1")
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    size = struct.pack("<H" if version[0] == 1 else "<I", len(text))
    return b"\x93NUMPY" + version + size + text + content


def header(dtype: str, shape: object, order: bool = False) -> str:
    return f"{{'descr': {dtype!r}, 'fortran_order': {order}, 'shape': {shape!r}, }}"


def write_npz(file: Path, entries: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return file


def good_entries() -> dict[str, bytes]:
    entries = {}
    for name, array in (("images", noise(4, 8, 8, 3)), ("labels", np.array([0, 1, 1, 0]))):
        file = io.BytesIO()
        np.save(file, array)
        entries[f"{name}.npy"] = file.getvalue()
    return entries


@pytest.mark.parametrize(
    "content",
    [
        npy_bytes(header("|u1", (10**12,)), b"x"),
        npy_bytes(header("<f8", (10**6, 10**6, 10**6))),
        npy_bytes(header("|u1", (-5,)), b"xxxxx"),
        npy_bytes(header("<U0", (10**12,))),
        npy_bytes(header("|S0", (10**9, 10**9))),
        npy_bytes(header("|u1", (2,)), b"xyz"),
        npy_bytes(header("|u1", (4,)), b"xyz"),
        npy_bytes(header("|O", (1,)), b"xxxxxxxx"),
        npy_bytes("{'descr': [('a', '|u1')], 'fortran_order': False, 'shape': (1,), }", b"x"),
        npy_bytes("{'descr': ('|u1', (10**9,)), 'fortran_order': False, 'shape': (1,), }", b"x"),
        npy_bytes(header("|V8", (1,)), b"xxxxxxxx"),
        npy_bytes(header("<M8[s]", (1,)), b"xxxxxxxx"),
        npy_bytes(header("|u1", (1,)), b"x", version=b"\x03\x00"),
        npy_bytes(header("|u1", (1,)), b"x", version=b"\x09\x09"),
        npy_bytes("(" * 5000 + ")" * 5000, b"x"),
        npy_bytes("__import__('os').system('true')", b"x"),
        npy_bytes("{" + " " * 60_000 + "}", b"x"),
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff{",
        b"PK\x03\x04",
        b"",
    ],
    ids=lambda content: f"{len(content)} bytes",
)
def test_arrays_cannot_claim_what_they_do_not_have(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.npz"
    for name in ("images.npy", "labels.npy", "classes.npy"):
        write_npz(file, good_entries() | {name: content})
        fails(lambda: load_dataset(f"npz:{file}"), file)
        fails(lambda: foreign.read_npz(file), file)


def test_what_unpacks_to_more_than_the_memory_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bomb.npz"
    np.savez_compressed(file, images=np.zeros((5000, 32, 32, 3), np.uint8), labels=np.zeros(5000, np.int64))
    assert file.stat().st_size < 30_000
    read: list[object] = []
    monkeypatch.setattr(foreign, "_read_array", lambda *arguments: read.append(arguments))
    monkeypatch.setattr(foreign, "find_room", lambda: 15_000_000)
    fails(lambda: load_dataset(f"npz:{file}"), file, "memory")
    assert read == []


def test_a_zip_directory_that_lies_is_found_out(tmp_path: Path) -> None:
    """The directory says that the array is short; what is packed goes on."""
    content = npy_bytes(header("|u1", (50_000_000,)), bytes(50_000_000))
    file = write_npz(tmp_path / "x.npz", good_entries() | {"images.npy": content})
    raw = file.read_bytes()
    size = struct.pack("<I", len(content))
    assert raw.count(size) == 2
    file.write_bytes(raw.replace(size, struct.pack("<I", 1000)))
    fails(lambda: foreign.read_npz(file), file)


def test_npy_files_cannot_claim_memory_either(tmp_path: Path) -> None:
    """CIFAR-10.1's format; NumPy would allocate what the header claims before it looks for the bytes."""
    claim = npy_bytes(header("|u1", (3_000_000, 32, 32, 3)), bytes(100))
    (tmp_path / "cifar10.1_v6_data.npy").write_bytes(claim)
    tracemalloc.start()
    fails(lambda: cifar.read_shift(tmp_path, "v6"), "cifar10.1_v6_data.npy", "claims")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000_000


def test_there_is_room_for_real_datasets() -> None:
    assert foreign.find_room() > 500_000_000  # CIFAR-10 has 150 MB


def test_odd_zips_are_refused(tmp_path: Path) -> None:
    file, good = tmp_path / "x.npz", good_entries()
    inner = write_npz(tmp_path / "inner.npz", good).read_bytes()
    fails(lambda: load_dataset(f"npz:{write_npz(file, good | {'inner.npz': inner})}"), file, "not an array")
    fails(lambda: load_dataset(f"npz:{write_npz(file, good | {'classes': b'x'})}"), file, "not an array")
    fails(lambda: load_dataset(f"npz:{write_npz(file, good, zipfile.ZIP_BZIP2)}"), file, "compressed")
    fails(lambda: load_dataset(f"npz:{write_npz(file, good, zipfile.ZIP_LZMA)}"), file, "compressed")
    with zipfile.ZipFile(file, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("images.npy", "labels.npy", "images.npy"):
            archive.writestr(name, good[name])
    fails(lambda: load_dataset(f"npz:{file}"), file, "'images' twice")
    raw = bytearray(write_npz(file, good).read_bytes())
    for signature, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # the flag of encryption, in both directories
        start = -1
        while (start := raw.find(signature, start + 1)) >= 0:
            raw[start + at] |= 1
    file.write_bytes(raw)
    fails(lambda: load_dataset(f"npz:{file}"), file, "encrypted")


def test_orders_and_dtypes_do_not_change_the_content(tmp_path: Path) -> None:
    images, labels = noise(4, 8, 8, 3), np.array([0, 1, 2, 1])
    np.savez(tmp_path / "a.npz", images=images, labels=labels)
    np.savez(tmp_path / "b.npz", images=np.asfortranarray(images), labels=labels.astype(">i2"))
    a, b = (load_dataset(f"npz:{tmp_path / name}.npz").pool for name in "ab")
    assert a.digest == b.digest
    assert b.x.flags.c_contiguous
    np.savez(tmp_path / "c.npz", x=np.array(7.5, dtype=">f8"), y=np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    read = foreign.read_npz(tmp_path / "c.npz")
    assert read["x"].shape == ()
    assert read["x"].dtype == np.dtype("=f8")
    assert read["x"] == 7.5
    assert read["y"].tolist() == [[0, 1, 2], [3, 4, 5]]
    for change in ({"labels": np.array(3)}, {"images": np.array(3, np.uint8)}, {"classes": np.array("a")}):
        np.savez(tmp_path / "d.npz", **({"images": images, "labels": labels} | change))
        fails(lambda: load_dataset(f"npz:{tmp_path / 'd.npz'}"), tmp_path / "d.npz")


def test_only_the_arrays_that_are_named_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "x.npz", a=np.arange(3), b=np.arange(4), c=np.arange(5))
    read: list[str] = []
    real = foreign._read_array
    monkeypatch.setattr(foreign, "_read_array", lambda a, entry: read.append(entry.filename) or real(a, entry))
    assert list(foreign.read_npz(tmp_path / "x.npz", ["b"])) == ["b"]
    assert read == ["b.npy"]
    assert foreign.read_headers(tmp_path / "x.npz")["c"].shape == (5,)


def test_pixels_of_another_type_are_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "x.npz", images=np.zeros((4, 8, 8, 3)), labels=np.zeros(4, int))
    monkeypatch.setattr(foreign, "_read_array", lambda *arguments: pytest.fail("read"))
    fails(lambda: load_dataset(f"npz:{tmp_path / 'x.npz'}"), "float64")


def test_arrays_that_would_do_nothing_are_refused(tmp_path: Path) -> None:
    file, good = tmp_path / "x.npz", {"images": noise(4, 8, 8, 3), "labels": np.array([0, 1, 1, 0])}
    np.savez(file, **good, clients=np.array([0, 0, 1, 1]))
    fails(lambda: load_dataset("digits", natural=f"npz:{file}"), file, "save it without clients")
    np.savez(file, **good, splits=np.array(["train"] * 4))
    fails(lambda: load_dataset(f"npz:{file}"), file, "splits without clients")
    np.savez(file, **good, x=np.zeros((4, 3)))
    fails(lambda: load_dataset(f"npz:{file}"), file, "both 'images' and 'x'")
    np.savez(file, **good, weights=np.zeros(4))
    fails(lambda: load_dataset(f"npz:{file}"), file, "weights", "images, x, labels, classes, clients, splits only")


def test_names_from_files_reach_no_terminal(tmp_path: Path) -> None:
    file, good = tmp_path / "x.npz", good_entries()
    name = HOSTILE.replace("\udc80", "")
    fails(lambda: load_dataset(f"npz:{write_npz(file, good | {f'{name}.npy': good['labels.npy']})}"), file)
    fails(lambda: load_dataset(f"npz:{write_npz(file, good | {name: b'x'})}"), file)
    fails(lambda: load_dataset(f"npz:{write_npz(file, {f'{name}.npy': good['labels.npy']})}"), file)
    code = np.array([HOSTILE, "b"])
    np.savez(file, images=noise(4, 28, 28), labels=[0, 1, 1, 0], classes=code)
    fails(lambda: load_dataset("digits", natural=f"npz:{file}"), file)
    np.savez(file, images=noise(4, 28, 28), labels=[0, 1, 1, 0], classes=np.array([f"{'x' * 99}\n", "b"]))
    pool = load_dataset(f"npz:{file}").pool
    np.savez(tmp_path / "y.npz", images=noise(4, 28, 28), labels=[0, 1, 1, 0], classes=["b", "c"])
    fails(lambda: load_dataset(f"npz:{file}", natural=f"npz:{tmp_path / 'y.npz'}"), "'c'")
    assert pool.classes[0].endswith("\n")  # the data are as they are
    bad = npy_bytes(header("<U1", (2,)), b"\xff\xff\xff\xff" * 2)  # numbers that are no characters
    fails(lambda: load_dataset(f"npz:{write_npz(file, good | {'classes.npy': bad})}"), file, "classes")
    (tmp_path / "folder").mkdir()
    try:
        save_png(tmp_path / "folder" / HOSTILE / "a.png")
    except (OSError, UnicodeError):
        pytest.skip("this file system takes no such names")
    (tmp_path / "folder" / HOSTILE / f"{HOSTILE}.png").write_bytes(b"x")
    fails(lambda: load_dataset(f"folder:{tmp_path / 'folder'}"), "not a readable image")
    (tmp_path / "folder" / HOSTILE / "more").mkdir()
    fails(lambda: load_dataset(f"folder:{tmp_path / 'folder'}"), "a folder within")
    fails(lambda: load_dataset("digits", natural=f"folder:{tmp_path / 'folder'}"), "has a class")


# ---------------------------------------------------------------- images


def read(content: bytes) -> np.ndarray:
    return read_image("x.jpg", lambda: content, (8, 8, 3))


EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 10 10
%%LanguageLevel: 2
%%Pages: 1
%%EndComments
(marker) print
%%EOF
"""


def test_no_image_starts_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EPS in a file with a JPEG's name: Pillow would hand it to Ghostscript, here played by a small program."""
    ghost, marker = tmp_path / "bin/gs", tmp_path / "marker"
    ghost.parent.mkdir()
    ghost.write_text(f"#!/bin/sh\ntouch {marker}\necho 10.0\n")
    ghost.chmod(0o755)
    for name in ("data/cat/x.jpg", "frost/frost1.jpg"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(EPS)
    code = f"""
from fedthe.data import load_dataset
from fedthe.data.frost import load_frost
from fedthe.errors import InputError
for load in (lambda: load_dataset("folder:{tmp_path}/data"), lambda: load_frost("{tmp_path}/frost")):
    try:
        load()
    except InputError as error:
        print(error)
"""
    path = f"{ghost.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=120
    )
    assert done.stderr == ""
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        f"{tmp_path}/data/cat/x.jpg",
        f"{tmp_path}/frost/frost1.jpg",
    ]
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["EPS", "PDF", "ICNS", "TGA", "PCX", "DDS", "SGI", "MSP", "XBM"])
def test_other_formats_are_not_opened(kind: str) -> None:
    file = io.BytesIO()
    mode = {"MSP": "1", "XBM": "1"}.get(kind, "RGB")
    Image.new(mode, (16, 16)).save(file, kind)
    fails(lambda: read(file.getvalue()), "x.jpg", "JPEG, PNG")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP", "MPO"])
def test_formats_that_datasets_use_are(kind: str) -> None:
    file = io.BytesIO()
    frames = {"save_all": True, "append_images": [Image.new("RGB", (16, 16), "red")]} if kind in ("GIF", "MPO") else {}
    Image.new("RGB", (16, 16), (8, 8, 8)).save(file, kind, **frames)
    assert read(file.getvalue())[4, 4].tolist() == pytest.approx([8, 8, 8], abs=2)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *more: bytes, bits: int = 8, colour: int = 2, pixels: bytes = b"") -> bytes:
    head = chunk(b"IHDR", struct.pack(">2I5B", width, height, bits, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def test_huge_images_are_refused_by_their_header(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for width, height in ((9_000, 9_000), (100_000, 100_000), (2**31 - 1, 2**31 - 1), (80_000_001, 1)):
            fails(lambda width=width, height=height: read(png(width, height)), "x.jpg", "too many pixels")
        bmp = (
            b"BM"
            + struct.pack("<IHHI", 54, 0, 0, 54)
            + struct.pack("<IiiHHIIiiII", 40, 60_000, 60_000, 1, 24, *[0] * 6)
        )
        fails(lambda: read(bmp), "too many pixels")
        fails(lambda: read(b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b",;"), "x.jpg")
        fails(lambda: read(b"P6 99999 99999 255\n"), "too many pixels")


def test_a_limit_that_the_user_has_lifted_does_not_lift_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    fails(lambda: read(png(100_000, 100_000)), "too many pixels")
    monkeypatch.setattr(decode, "PIXELS", 100)
    fails(lambda: read(png(11, 11, pixels=bytes(34 * 11))), "too many pixels")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        png(0, 0),
        png(0, 5),
        png(5, 0),
        png(5, 5),  # no pixels follow
        png(5, 5, pixels=bytes(3)),
        png(5, 5, chunk(b"IHDR", b"short"), pixels=bytes(80)),
        png(5, 5, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 26))), pixels=bytes(80)),  # text of 64 MB
        png(5, 5, chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(1 << 26))), pixels=bytes(80))[:-30],
        png(5, 5, colour=3, pixels=bytes(30))[:40],
        png(5, 5, pixels=bytes(80)).replace(b"IDAT", b"IDAX"),
        b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00" + b"\xff\xc0\x00\x11\x08" + bytes(14),
        b"P6 5 5 255\nshort",
        b"P3 5 5 255 " + b"9" * 1000,
        b"II*\x00\xff\xff\xff\xff",
        b"RIFF\x10\x00\x00\x00WEBPVP8 " + bytes(8),
    ],
    ids=lambda content: f"{len(content)} bytes",
)
def test_crafted_images_are_refused_in_one_sentence(content: bytes) -> None:
    fails(lambda: read(content), "x.jpg")


def test_palettes_beyond_their_end_and_depths_are_read() -> None:
    palette = png(4, 4, chunk(b"PLTE", bytes([9, 9, 9])), colour=3, pixels=bytes(20))
    assert read(palette)[0, 0].tolist() == [9, 9, 9]
    deep = png(4, 4, bits=16, colour=2, pixels=b"".join(b"\0" + b"\x80\x80" * 12 for _ in range(4)))
    assert read(deep)[0, 0].tolist() == [128, 128, 128]


# ---------------------------------------------------------------- room


def test_images_that_the_memory_cannot_hold_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_png(tmp_path / "folder/cat/a.png")
    np.savez(tmp_path / "x.npz", images=noise(4, 8, 8, 3), labels=[0, 1, 1, 0])
    monkeypatch.setattr(foreign, "find_room", lambda: 1_000_000)
    for spec in ("digits", "glyphs", f"folder:{tmp_path / 'folder'}", f"npz:{tmp_path / 'x.npz'}"):
        fails(lambda spec=spec: load_dataset(spec, size=1000), "memory", "smaller size")


def test_absurd_sizes_are_refused() -> None:
    for size in (0, -1, 10**30, 10**5000, 1.5, "32", [3]):
        fails(lambda size=size: load_dataset("digits", size=size), "size")
