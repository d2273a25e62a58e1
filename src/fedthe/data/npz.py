"""An npz file of images (or x) and labels and, optionally, classes, clients and splits: as a dataset, or as the natural
shift of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import InputError
from ..foreign import Header, read_headers, read_npz, show_path
from ..text import flatten
from .folder import Square, fit_images
from .own import MOST_CLASSES, hold_columns
from .pool import Dataset, Pool
from .rows import read_x
from .source import check_labels, find_classes

ARRAYS = ("images", "x", "labels", "classes", "clients", "splits")


@dataclass(frozen=True)
class Columns:
    x: np.ndarray
    labels: np.ndarray
    classes: list[str] | None
    clients: np.ndarray | None
    splits: np.ndarray | None


def load(path: Path, size: int | None = None, square: Square | None = None) -> Dataset:
    found = read_columns(path)
    classes = found.classes or [str(number) for number in range(int(found.labels.max()) + 1)]
    pool = Pool(path.stem, _shape(path, found.x, size, square), found.labels, tuple(classes), own=True)
    if found.clients is None:
        return Dataset(pool)
    return hold_columns(show_path(path), pool, found.clients, found.splits)


def _shape(path: Path, x: np.ndarray, size: int | None, square: Square | None) -> np.ndarray:
    """Pictures of another size, or made square; networks of the user's own may take others."""
    if x.dtype != np.uint8:
        if size is not None or square is not None:
            raise InputError(f"{show_path(path)} has no pictures, so size and square have no effect; leave them out.")
        return x
    if square is not None and size is None:
        size = max(x.shape[1:3]) if square == "pad" else min(x.shape[1:3])
    return x if size is None else fit_images(x, (size, size, x.shape[3]), square, show_path(path))


def load_shift(path: Path, pool: Pool, square: Square | None = None) -> Pool:
    """Labels index the pool's classes, or the file's own `classes` if it has them; some classes may be absent."""
    found = read_columns(path)
    if found.clients is not None:
        raise InputError(f"{show_path(path)} is a natural shift, dealt by class mixes; save it without clients.")
    labels = found.labels
    if found.classes is None:
        check_labels(path, labels, len(labels), 0, len(pool.classes) - 1)
    else:
        labels = find_classes(path, found.classes, pool)[labels]
    x = found.x
    if x.dtype == np.uint8 and pool.is_pictures:
        x = fit_images(x, pool.x.shape[1:], square, show_path(path))
    return Pool(path.stem, x, labels, pool.classes, own=True)


def read_columns(path: Path) -> Columns:
    headers = read_headers(path)
    _check_names(path, list(headers))
    if "images" in headers:
        _check_images(path, headers["images"])
    arrays = read_npz(path, headers)
    x, labels = arrays["images" if "images" in arrays else "x"], arrays["labels"]
    if x.dtype == np.uint8 and x.ndim == 3:
        x = x[..., None]
    if "x" in arrays:
        x = read_x(show_path(path), x)
    classes = _read_classes(path, arrays["classes"]) if "classes" in arrays else None
    check_labels(path, labels, len(x), 0, (MOST_CLASSES if classes is None else len(classes)) - 1)
    return Columns(x, labels, classes, arrays.get("clients"), arrays.get("splits"))


def _check_names(path: Path, names: Sequence[str]) -> None:
    """Refuse a missing array, and one that would have no effect."""
    shown = flatten(", ".join(names), 200) or "nothing"
    if ("images" in names) == ("x" in names):
        what = "both 'images' and 'x'" if "x" in names else "no array 'images'"
        raise InputError(
            f"{show_path(path)} has {what} (it has {shown}); save it with images=... (pictures) or x=... (features or "
            "tokens) and labels=..."
        )
    if "labels" not in names:
        raise InputError(
            f"{show_path(path)} has no array 'labels' (it has {shown}); save it with images=... or x=..., and with "
            "labels=..."
        )
    if "splits" in names and "clients" not in names:
        raise InputError(f"{show_path(path)} has splits without clients; save both, or neither.")
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
