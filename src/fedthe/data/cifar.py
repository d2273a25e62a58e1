"""CIFAR-10 in its `cifar-10-batches-py` layout, and CIFAR-10.1, its natural shift."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..errors import InputError
from ..foreign import explain, read_npy
from .folder import fit_images
from .pool import Dataset, Pool
from .source import check_labels
from .unpickle import load_pickle, read_batch, stack_images

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
FILES = (*BATCHES, "test_batch", "batches.meta")


def load(path: Path, size: int | None = None) -> Dataset:
    """The 50,000 training images alone: BRFL takes each client's train, validation and test rows from these."""
    return Dataset(_read_pool(path, BATCHES, size))


def load_test(path: Path) -> Pool:
    return _read_pool(path, ("test_batch",))


def load_shift(version: str, path: Path, pool: Pool) -> Pool | None:
    for folder in (path / f"cifar10.1-{version}", path, path.parent):  # as fetched, or as users put it
        if (folder / f"cifar10.1_{version}_data.npy").exists():
            images, labels = read_shift(folder, version)
            return Pool(f"cifar10.1-{version}", fit_images(images, pool.x.shape[1:]), labels, pool.classes)
    return None


def list_files(path: Path) -> list[Path]:
    return [_find_file(path, name) for name in FILES]


def read_shift(folder: Path, version: str) -> tuple[np.ndarray, np.ndarray]:
    """CIFAR-10.1: images uint8 [n, 32, 32, 3], labels [n] in CIFAR-10's numbering."""
    file = folder / f"cifar10.1_{version}_data.npy"
    images = _read_npy(file)
    if images.dtype != np.uint8 or images.shape[1:] != (32, 32, 3):
        raise InputError(
            f"{file} must hold bytes [n, 32, 32, 3], but has {images.dtype} {list(images.shape)}; fetch it again."
        )
    file = folder / f"cifar10.1_{version}_labels.npy"
    labels = _read_npy(file)
    check_labels(file, labels, len(images), 0, 9)
    return images, labels


def _read_pool(path: Path, names: tuple[str, ...], size: int | None = None) -> Pool:
    meta = _find_file(path, "batches.meta")
    found = load_pickle(meta).get("label_names")
    if found not in (list(CLASSES), [name.encode() for name in CLASSES]):
        raise InputError(f"{meta} does not name the ten classes of CIFAR-10; run `fedthe data fetch cifar10`.")
    batches = [read_batch(_find_file(path, name), 0, 9) for name in names]
    images = stack_images([rows for rows, _ in batches])
    labels = np.concatenate([labels for _, labels in batches])
    return Pool("cifar10", fit_images(images, (size or 32, size or 32, 3)), labels, CLASSES)


def _find_file(path: Path, name: str) -> Path:
    folder = path / "cifar-10-batches-py"
    file = (folder if folder.is_dir() else path) / name
    if not file.exists():
        raise InputError(f"{file} is missing; run `fedthe data fetch cifar10`.")
    return file


def _read_npy(file: Path) -> np.ndarray:
    with explain(f"{file} is not a readable npy file", "run `fedthe data fetch cifar10.1-v6`"):
        return read_npy(file)
