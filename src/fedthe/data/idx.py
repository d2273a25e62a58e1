"""MNIST and Fashion-MNIST: idx files, raw or gzipped."""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path

import numpy as np

from ..errors import InputError
from ..foreign import explain, open_file, show_path
from .folder import fit_images
from .pool import Dataset, Pool
from .source import check_labels

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
CLASSES = {
    "mnist": tuple("0123456789"),
    "fashion_mnist": (
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
}
LIMIT = 1 << 28  # bytes that one file may decode to; the largest real one has 47 million


def load(name: str, path: Path, size: int | None = None) -> Dataset:
    return Dataset(_read_pool(name, path, "train", size))


def load_test(name: str, path: Path) -> Pool:
    return _read_pool(name, path, "t10k")


def list_files(path: Path) -> list[Path]:
    return [_find_file(path, name) for name in FILES]


def _find_file(path: Path, name: str) -> Path:
    for file in (path / name, path / f"{name}.gz"):
        if file.exists():
            return file
    raise InputError(f"{path / name} is missing, and so is its .gz; fetch the dataset again.")


def _read_pool(name: str, path: Path, part: str, size: int | None = None) -> Pool:
    file = _find_file(path, f"{part}-images-idx3-ubyte")
    images = read_idx(file, dimensions=3)
    if images.shape[1:] != (28, 28) or not len(images):
        raise InputError(f"{file} must hold images of 28x28, but has {list(images.shape)}; fetch it again.")
    file = _find_file(path, f"{part}-labels-idx1-ubyte")
    labels = read_idx(file, dimensions=1)
    check_labels(file, labels, len(images), 0, 9)
    return Pool(name, fit_images(images[..., None], (size or 28, size or 28, 1)), labels, CLASSES[name])


def read_idx(file: Path, dimensions: int) -> np.ndarray:
    """The content of an idx file of bytes: uint8, with `dimensions` dimensions."""
    with explain(f"{show_path(file)} is not a whole idx file", "fetch it again"), open_file(file) as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        with gzip.open(raw) if zipped else raw as stream:
            magic, *shape = struct.unpack(f">{1 + dimensions}I", stream.read(4 + 4 * dimensions))
            if magic != 0x800 + dimensions:
                raise ValueError(f"its magic number is {magic:#x} instead of {0x800 + dimensions:#x}")
            count = math.prod(shape)
            if count > LIMIT:
                raise ValueError(f"its header claims {count} bytes")
            content = stream.read(count + 1)  # one more than it should have
            if len(content) != count:
                more = "more" if len(content) > count else f"only {len(content)}"
                raise ValueError(f"its header claims {count} bytes, but it has {more}")
    return np.frombuffer(bytearray(content), dtype=np.uint8).reshape(shape)  # writable, as torch requires
