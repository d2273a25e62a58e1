"""Untrusted files: only regular files are opened, and nothing unpacks to more than fits in memory."""

from __future__ import annotations

import io
import math
import os
import stat
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from .errors import InputError
from .text import clean, flatten

_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}


def show_path(path: Path | str) -> str:
    """A path that is safe to print: file names can hold escape sequences and line breaks."""
    return clean(str(path), 4096)


def say_error(error: BaseException) -> str:
    """What went wrong, in one line without a full stop, to use within a sentence."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return flatten(text, 500).rstrip(".")


@contextmanager
def explain(problem: str, advice: str = "") -> Iterator[None]:
    """Turn any error of the block into the InputError "PROBLEM (its cause); ADVICE."; leave an InputError alone.

    Any, because a damaged file can raise anything in the readers of zips, pickles, arrays and images.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{problem} ({say_error(error)}){f'; {advice}' if advice else ''}.") from None


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading. FIFOs and devices are refused: they could block or never end."""
    _refuse_special(path, os.stat(path).st_mode)  # first, because opening a device can have side effects
    # O_NONBLOCK: if a FIFO has replaced the file since, opening it does not wait for a writer
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        _refuse_special(path, os.fstat(handle).st_mode)
    except InputError:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


def read_file(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise InputError(f"{show_path(path)} has {size:,} bytes, more than the limit of {limit:,}.")
        return file.read(size)


def _refuse_special(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "a device")
        raise InputError(f"{show_path(path)} is {kind}, not a regular file; name a regular file.")


def find_room() -> int:
    """How many bytes a dataset may take: half of the memory of this machine or container."""
    try:
        sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (AttributeError, ValueError, OSError):  # not on Windows
        sizes = [16 << 30]
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such file, or "max"
            sizes.append(int(Path(limit).read_text(encoding="ascii")))
    return min(sizes) // 2


def check_room(what: str, size: int, advice: str) -> None:
    """Refuse `size` bytes before they are allocated, if they are too many."""
    room = find_room()
    if size > room:
        raise InputError(
            f"{what} would take {size / 1e9:,.1f} GB, more than half of this machine's memory ({room / 1e9:,.1f} GB); "
            f"{advice}."
        )


@dataclass(frozen=True)
class Header:
    """Shape and dtype of an array, known before the array is read."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_headers(path: Path) -> dict[str, Header]:
    """The headers of the arrays in an npz file, by name, without unpacking any array."""
    with _open_npz(path) as (archive, entries):
        return {name: _read_header(archive, entry) for name, entry in entries.items()}


def read_npz(path: Path, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """The arrays of an npz file (all, or those in `names`) in C order and native byte order; pickles are refused."""
    with _open_npz(path) as (archive, entries):
        wanted = {name: entries[name] for name in (entries if names is None else names)}
        size = sum(_read_header(archive, entry).size for entry in wanted.values())
        check_room(show_path(path), size, "use a machine with more memory, or save fewer or smaller images")
        return {name: _read_array(archive, entry) for name, entry in wanted.items()}


def read_npy(path: Path) -> np.ndarray:
    """The array of an npy file; pickles are refused. A damaged file can raise any exception."""
    with open_file(path) as file:
        header = _check_header(path.name, file, os.fstat(file.fileno()).st_size)
        check_room(show_path(path), header.size, "use a machine with more memory")
        file.seek(0)
        return np.asarray(npy.read_array(file, allow_pickle=False))


@contextmanager
def _open_npz(path: Path) -> Iterator[tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]]:
    with explain(f"{show_path(path)} is not a readable npz file", "make or fetch it again"):
        if not path.exists():
            raise InputError(f"{show_path(path)} does not exist.")
        with open_file(path) as file, zipfile.ZipFile(file) as archive:
            yield archive, _list_entries(archive)


def _list_entries(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    entries: dict[str, zipfile.ZipInfo] = {}
    for entry in archive.infolist():
        name = entry.filename.removesuffix(".npy")
        if name == entry.filename:
            raise ValueError(f"{clean(name)!r} in it is not an array")
        if name in entries:
            raise ValueError(f"it holds {clean(name)!r} twice")
        if entry.flag_bits & 1:
            raise ValueError(f"{clean(name)!r} in it is encrypted")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{clean(name)!r} in it is compressed in a way that NumPy does not use")
        entries[name] = entry
    return entries


def read_npy_header(name: str, content: bytes) -> Header:
    """The header of the bytes of an npy file, which must match their number."""
    return _check_header(name, io.BytesIO(content), len(content))


def _read_header(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Header:
    with archive.open(entry) as stream:
        return _check_header(clean(entry.filename.removesuffix(".npy")), stream, entry.file_size)


def _check_header(name: str, stream: IO[bytes], size: int) -> Header:
    """The header of an npy file, which must match the file's `size`, so that nothing larger is allocated."""
    version = npy.read_magic(stream)
    if version not in ((1, 0), (2, 0)):  # 3.0 is only for records
        raise ValueError(f"{name!r} is of npy version {version[0]}.{version[1]}")
    shape, _, dtype = (npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(stream)
    header, rest = Header(shape, dtype), size - stream.tell()
    if dtype.kind not in "biufcSU" or dtype.itemsize == 0:
        raise ValueError(f"{name!r} is an array of {'objects' if dtype.hasobject else clean(str(dtype))}")
    if min(shape, default=0) < 0 or header.size != rest:
        raise ValueError(f"the header of {name!r} claims {header.size} bytes, but it has {rest}")
    return header


def _read_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(entry) as stream:
        array = npy.read_array(stream, allow_pickle=False)
        stream.read(1)  # reading to the end checks the checksum
    return np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")
