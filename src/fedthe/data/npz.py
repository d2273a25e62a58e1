"""An npz file as a dataset, or as a natural shift of another one: images, labels and, if you like, classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..errors import InputError
from ..store import read_npz
from .folder import fit_images
from .pool import Dataset, Pool
from .source import check_labels, find_classes

MOST_CLASSES = 100_000  # a label above is a mistake, and would be given as many class names


def load(path: Path, size: int | None = None) -> Dataset:
    images, labels, classes = read_arrays(path)
    if classes is None:
        classes = [str(number) for number in range(int(labels.max()) + 1)]
    shape = images.shape[1:] if size is None else (size, size, images.shape[3])
    return Dataset(Pool(path.stem, fit_images(images, shape), labels, tuple(classes)))


def load_shift(path: Path, pool: Pool) -> Pool:
    """Labels count in the pool's classes or, where the file names its own classes, in those; some may be absent."""
    images, labels, classes = read_arrays(path)
    if classes is None:
        check_labels(path, labels, len(images), 0, len(pool.classes) - 1)
    else:
        labels = find_classes(path, classes, pool)[labels]
    return Pool(path.stem, fit_images(images, pool.images.shape[1:]), labels, pool.classes)


def read_arrays(path: Path) -> tuple[np.ndarray, np.ndarray, list[str] | None]:
    """images uint8 [n, h, w, 1 or 3], labels [n], and the names of the classes where the file has them."""
    arrays = read_npz(path)
    for name in ("images", "labels"):
        if name not in arrays:
            has = ", ".join(arrays) or "nothing"
            raise InputError(f"{path} has no array {name!r} (it has {has}); save it with images=... and labels=...")
    images, labels = arrays["images"], arrays["labels"]
    if images.ndim == 3:
        images = images[..., None]
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3) or 0 in images.shape:
        raise InputError(
            f"{path}: images must be uint8 [n, height, width] or [n, height, width, 1 or 3] and not empty, "
            f"but they are {images.dtype} {list(images.shape)}."
        )
    if "classes" not in arrays:
        check_labels(path, labels, len(images), 0, MOST_CLASSES - 1)
        return images, labels, None
    classes = arrays["classes"]
    if classes.dtype.kind != "U" or classes.ndim != 1 or len(set(classes.tolist())) != len(classes):
        raise InputError(f"{path}: classes must be a list of different names, but is {classes.dtype} {classes.shape}.")
    check_labels(path, labels, len(images), 0, len(classes) - 1)
    return images, labels, [str(name) for name in classes]
