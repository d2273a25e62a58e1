"""An npz file of images, labels and, optionally, classes: as a dataset, or as the natural shift of another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import InputError
from ..foreign import Header, read_headers, read_npz, show_path
from ..text import flatten
from .folder import fit_images
from .pool import Dataset, Pool
from .source import check_labels, find_classes

ARRAYS = ("images", "labels", "classes")
MOST_CLASSES = 100_000  # a larger label is a mistake, and would need that many class names


def load(path: Path, size: int | None = None) -> Dataset:
    images, labels, classes = read_arrays(path)
    if classes is None:
        classes = [str(number) for number in range(int(labels.max()) + 1)]
    shape = images.shape[1:] if size is None else (size, size, images.shape[3])
    return Dataset(Pool(path.stem, fit_images(images, shape), labels, tuple(classes), own=True))


def load_shift(path: Path, pool: Pool) -> Pool:
    """Labels index the pool's classes, or the file's own `classes` if it has them; some classes may be absent."""
    images, labels, classes = read_arrays(path)
    if classes is None:
        check_labels(path, labels, len(images), 0, len(pool.classes) - 1)
    else:
        labels = find_classes(path, classes, pool)[labels]
    return Pool(path.stem, fit_images(images, pool.x.shape[1:]), labels, pool.classes, own=True)


def read_arrays(path: Path) -> tuple[np.ndarray, np.ndarray, list[str] | None]:
    """images uint8 [n, h, w, 1 or 3], labels [n], and the names of the classes if the file has them."""
    headers = read_headers(path)
    _check_names(path, list(headers))
    _check_images(path, headers["images"])
    arrays = read_npz(path, headers)
    images, labels = arrays["images"], arrays["labels"]
    if images.ndim == 3:
        images = images[..., None]
    classes = _read_classes(path, arrays["classes"]) if "classes" in arrays else None
    check_labels(path, labels, len(images), 0, (MOST_CLASSES if classes is None else len(classes)) - 1)
    return images, labels, classes


def _check_names(path: Path, names: Sequence[str]) -> None:
    """Refuse a missing array, and one that would have no effect."""
    shown = flatten(", ".join(names), 200) or "nothing"
    for name in ("images", "labels"):
        if name not in names:
            raise InputError(
                f"{show_path(path)} has no array {name!r} (it has {shown}); save it with images=... and labels=..."
            )
    if "clients" in names:
        raise InputError(
            f"{show_path(path)} has an array 'clients', but rows are dealt to clients by their labels; "
            "save it without clients."
        )
    others = [name for name in names if name not in ARRAYS]
    if others:
        raise InputError(
            f"{show_path(path)} has arrays that are not used ({flatten(', '.join(others), 200)}); "
            f"save it with {', '.join(ARRAYS)} only."
        )


def _check_images(path: Path, images: Header) -> None:
    """Checked before they are read: pixels of another type can take many times the memory."""
    grey, colour = len(images.shape) == 3, len(images.shape) == 4 and images.shape[3] in (1, 3)
    if images.dtype != np.uint8 or not (grey or colour) or 0 in images.shape:
        raise InputError(
            f"{show_path(path)}: images must be uint8 [n, height, width] or [n, height, width, 1 or 3] and not empty, "
            f"but they are {images.dtype} {list(images.shape)}."
        )


def _read_classes(path: Path, classes: np.ndarray) -> list[str]:
    try:
        names = [str(name) for name in classes.tolist()] if classes.dtype.kind == "U" and classes.ndim == 1 else []
    except (ValueError, SystemError):  # code points that are no characters
        names = []
    if not 0 < len(names) <= MOST_CLASSES or len(set(names)) != len(names):
        raise InputError(
            f"{show_path(path)}: classes must be a list of 1 to {MOST_CLASSES:,} different names, "
            f"but is {classes.dtype} {list(classes.shape)}."
        )
    return names
