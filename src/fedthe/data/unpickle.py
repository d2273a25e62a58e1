"""Pickled datasets, read without trusting them: no name in a pickle is ever imported."""

from __future__ import annotations

import math
import mmap
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from ..errors import InputError
from ..foreign import explain, open_file
from .source import check_labels


def load_pickle(path: Path) -> dict[str, object]:
    """The dict that a dataset was pickled as, by Python 2 or 3: keys as str, arrays (and lists of them) as arrays.

    np.save pickles a dict too, into an npy file: that is read as well.
    """
    with explain(f"{path} is not a readable pickle of a dataset", "fetch it again"):
        # A mapped file never gives more bytes than it has, whatever lengths the pickle claims.
        with open_file(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            start = _skip_header(content)
            _check_memo(content)
            content.seek(start)
            value = _Reader(path, content).load()
        if start and isinstance(value, _Array):
            value = value.item()
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__} instead of a dict")
        return {_text(key): _arrays(item) for key, item in value.items()}


def read_batch(path: Path, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """A batch of CIFAR or ImageNet-32: rows uint8 [n, 3072] (channel, row, column), labels int64 [n]."""
    batch = load_pickle(path)
    data, labels = batch.get("data"), batch.get("labels")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        raise InputError(f"{path} has no 'data' of bytes [n, 3072]; fetch it again.")
    if not isinstance(labels, np.ndarray):
        if not isinstance(labels, list) or not all(type(label) is int and abs(label) < 1 << 31 for label in labels):
            raise InputError(f"{path} has no 'labels' of whole numbers; fetch it again.")
        labels = np.array(labels, dtype=np.int64)
    check_labels(path, labels, len(data), first, last)
    return data, labels.astype(np.int64)


def stack_images(batches: list[np.ndarray]) -> np.ndarray:
    """Batches of rows uint8 [n, 3072] -> images uint8 [all n, 32, 32, 3]."""
    images = np.empty((sum(map(len, batches)), 32, 32, 3), dtype=np.uint8)
    return np.concatenate([rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1) for rows in batches], out=images)


def _skip_header(content: mmap.mmap) -> int:
    """Move to where the pickle starts: at 0, or behind the header of an npy file."""
    if content[: len(npy.MAGIC_PREFIX)] == npy.MAGIC_PREFIX:
        if npy.read_magic(content) != (1, 0):  # np.save writes 1.0 unless the dtype is long
            raise ValueError("an unusual npy header")
        npy.read_array_header_1_0(content)
    return content.tell()


def _arrays(item: object) -> object:
    """The arrays of one entry of the dict: itself, or the elements of a list."""
    if isinstance(item, list):
        return [part.array() if isinstance(part, _Array) else part for part in item]
    return item.array() if isinstance(item, _Array) else item


def _check_memo(content: mmap.mmap) -> None:
    """Refuse memo numbers that no pickler writes: the unpickler would allocate space for all smaller ones."""
    for count, (opcode, number, _) in enumerate(pickletools.genops(content)):  # type: ignore[arg-type]
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and (number is None or not 0 <= number <= count + 1):
            raise ValueError(f"memo number {number} at step {count}")


class _Reader(pickle.Unpickler):
    def __init__(self, path: Path, content: mmap.mmap) -> None:
        super().__init__(content, encoding="bytes")
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            full = f"{module}.{name}"[:80]
            raise InputError(
                f"{self.path} asks to run {full!r}, which no dataset needs; do not use it, fetch it again."
            )
        return _STAND_INS[module, name]


# Stand-ins for the few names that a pickled array refers to. They only store their arguments, so that no pickle can
# call NumPy (object arrays, sizes without bytes). Each is a class with a __setstate__ of two arguments: BUILD on the
# class itself then fails, where on a plain function it could set attributes.


class _Array:
    def __init__(self, *arguments: object) -> None:  # _reconstruct(ndarray, (0,), b"b"): nothing to keep
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def array(self) -> np.ndarray:
        _, shape, dtype, by_columns, content = self.state
        if not isinstance(dtype, _Dtype) or not isinstance(content, (bytes, bytearray)):
            raise ValueError("an array of something other than numbers")
        if not isinstance(shape, tuple) or not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError("an array without a shape")
        kind = dtype.dtype()
        if math.prod(shape) * kind.itemsize != len(content):
            raise ValueError(f"an array of {list(shape)} with {len(content)} bytes")
        return np.frombuffer(content, dtype=kind).reshape(shape, order="F" if by_columns else "C")

    def item(self) -> object:
        """The only element of a 0-dimensional array of objects."""
        _, shape, _, _, content = self.state
        if shape != () or not isinstance(content, list) or len(content) != 1:
            raise ValueError("an array of objects")
        return content[0]


class _Dtype:
    def __init__(self, code: object, *rest: object) -> None:
        self.code = _text(code)
        self.order = "|"

    def __setstate__(self, state: Any) -> None:
        self.order = _text(state[1])
        if any(part is not None for part in state[2:5]):
            raise ValueError("an array of records")

    def dtype(self) -> np.dtype[Any]:
        if not re.fullmatch("[<>|=][uif][1248]", self.order + self.code):
            raise ValueError(f"an array of {self.code!r}")
        return np.dtype(self.order + self.code)


class _FromBuffer:
    """What protocol 5 writes in place of _reconstruct."""

    def __new__(cls, content: object, dtype: object, shape: object, order: object) -> Any:
        array = _Array()
        array.state = (1, shape, dtype, order == "F", content)
        return array

    def __setstate__(self, state: Any) -> None: ...


class _Encode:
    """_codecs.encode(text, "latin1"): how Python 3 writes bytes in protocol 2."""

    def __new__(cls, text: object, codec: object) -> Any:
        if not isinstance(text, str) or codec != "latin1":
            raise ValueError("an odd encoding")
        return text.encode("latin1")

    def __setstate__(self, state: Any) -> None: ...


_STAND_INS: dict[tuple[str, str], type] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _FromBuffer,
    ("numpy._core.numeric", "_frombuffer"): _FromBuffer,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _Encode,
}


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("latin1")
    if not isinstance(value, str):
        raise ValueError(f"a {type(value).__name__} where a name should be")
    return value
