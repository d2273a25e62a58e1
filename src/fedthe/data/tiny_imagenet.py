"""Tiny-ImageNet in its published layout, with all 200 classes or some of them, as a folder or a zip."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np

from ..errors import InputError
from ..foreign import explain, open_file, read_file, say_error, show_path
from ..progress.events import track
from ..text import clean
from .folder import SIZE, make_room, read_image
from .pool import Dataset, Pool
from .source import name_classes

LIMIT = 1 << 26  # bytes of one file in a zip, so that a small zip cannot fill the memory
Files = dict[str, Callable[[], bytes]]  # name from the top of the layout -> its content


def load(path: Path, size: int | None = None) -> Dataset:
    """Training and validation images together: the benchmark makes its own splits. The test images have no labels."""
    with open_files(path) as files:
        wnids = _read_text(path, files, "wnids.txt").split()
        words = dict(line.split("\t", 1) for line in _read_text(path, files, "words.txt").splitlines() if "\t" in line)
        if not wnids or len(set(wnids)) != len(wnids):
            raise InputError(f"{show_path(path)}: wnids.txt must list each class once; fetch tiny_imagenet again.")
        rows = [*_list_train(path, files, wnids), *_list_val(path, files, wnids)]
        images = make_room(len(rows), (size or SIZE, size or SIZE, 3))
        for row, (name, _) in enumerate(track("reading images", rows)):
            images[row] = read_image(f"{show_path(path)}: {name!r}", files[name], images.shape[1:])
    names = {wnid: text.split(",")[0].strip() for wnid, text in words.items()}
    labels = np.array([label for _, label in rows], dtype=np.int64)
    return Dataset(Pool("tiny_imagenet", images, labels, name_classes(wnids, names)))


@contextmanager
def open_files(path: Path) -> Iterator[Files]:
    """Every file of a folder or zip, by its path from the folder of wnids.txt, which may be the top or lie deeper."""
    if path.is_dir() and not any(path.glob("**/wnids.txt")):
        path = next(iter(sorted(path.glob("*.zip"))), path)
    if path.is_dir():
        found: Files = {
            file.relative_to(path).as_posix(): partial(read_file, file, LIMIT)
            for file in sorted(path.rglob("*"))
            if not file.is_dir()
        }
        yield _from_top(path, found)
        return
    with ExitStack() as stack:
        with explain(f"{show_path(path)} is not a whole folder or zip of Tiny-ImageNet", "fetch it again"):
            archive = stack.enter_context(zipfile.ZipFile(stack.enter_context(open_file(path))))
        listed = [entry for entry in archive.infolist() if not entry.filename.endswith("/")]
        entries = {entry.filename: entry for entry in listed}
        if len(entries) < len(listed):
            raise InputError(f"{show_path(path)} holds two files of the same name; fetch it again.")
        yield _from_top(path, {name: partial(_read_entry, archive, entries[name]) for name in sorted(entries)})


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    if entry.file_size > LIMIT:
        raise ValueError(f"it claims {entry.file_size} bytes")
    try:
        return archive.read(entry)
    except Exception as error:  # of zlib or struct, or about encryption or an unknown compression
        raise ValueError(f"the zip is damaged: {say_error(error)}") from None


def _from_top(path: Path, found: Files) -> Files:
    tops = [name for name in found if PurePosixPath(name).name == "wnids.txt"]
    if not tops:
        raise InputError(f"{show_path(path)} has no wnids.txt; name a folder or zip in the layout of Tiny-ImageNet.")
    top = min(tops, key=lambda name: name.count("/")).removesuffix("wnids.txt")
    return {name.removeprefix(top): read for name, read in found.items() if name.startswith(top)}


def _list_train(path: Path, files: Files, wnids: list[str]) -> list[tuple[str, int]]:
    label = {wnid: position for position, wnid in enumerate(wnids)}
    rows = []
    for name in files:
        match name.split("/"):
            case ["train", wnid, "images", file] if wnid in label and not file.startswith("."):
                rows.append((name, label[wnid]))
    missing = set(range(len(wnids))) - {position for _, position in rows}
    if missing:
        raise InputError(
            f"{show_path(path)} has no images at train/{clean(wnids[min(missing)])}/images; fetch tiny_imagenet again."
        )
    return sorted(rows, key=lambda row: row[1])  # stable: by class, then by name


def _list_val(path: Path, files: Files, wnids: list[str]) -> list[tuple[str, int]]:
    rows = []
    for line in _read_text(path, files, "val/val_annotations.txt").splitlines():
        file, _, rest = line.partition("\t")
        wnid = rest.split("\t")[0]
        if wnid not in wnids:
            continue  # a class that this subset leaves out
        if f"val/images/{file}" not in files:
            raise InputError(
                f"{show_path(path)} has no {'val/images/' + file!r}, which val_annotations.txt names; fetch it again."
            )
        rows.append((f"val/images/{file}", wnids.index(wnid)))
    return rows


def _read_text(path: Path, files: Files, name: str) -> str:
    if name not in files:
        raise InputError(f"{show_path(path)} has no {name}; name a folder or zip in the layout of Tiny-ImageNet.")
    with explain(f"{show_path(path)}: {name} is not readable", "fetch it again"):
        return files[name]().decode("utf-8")
