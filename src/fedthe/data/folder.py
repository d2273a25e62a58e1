"""Image files as arrays, and a folder per class as a dataset."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..errors import InputError
from ..foreign import check_room, explain, read_file, show_path
from ..progress.events import track
from .decode import BYTES, decode_image
from .own import hold_columns
from .pool import Dataset, Pool
from .source import find_classes

if TYPE_CHECKING:
    from PIL.Image import Image

SIZE = 32  # pixels per side, by default
Square = Literal["crop", "pad"]  # of a user's pictures that are not square
# How an image gets another shape: the largest centred box of that shape, black bars, or squeezed. None: it must not.
Shaped = Literal["crop", "pad", "stretch"] | None


def load(path: Path, size: int | None = None, square: Square | None = None, by_client: bool = False) -> Dataset:
    """A folder per class, or, by client, a folder per client that has a folder per class."""
    shape = (size or SIZE, size or SIZE, 3)
    if by_client:
        return _load_clients(path, shape, square)
    names = list_classes(path)
    images, labels = read_folders([path / name for name in names], shape, square)
    return Dataset(Pool(path.resolve().name, images, labels, tuple(names), own=True))


def _load_clients(path: Path, shape: tuple[int, ...], square: Square | None) -> Dataset:
    clients = list_classes(path, "client")
    folders = [path / client / name for client in clients for name in list_classes(path / client)]
    classes = sorted({folder.name for folder in folders})
    images, which = read_folders(folders, shape, square)
    labels = np.array([classes.index(folder.name) for folder in folders])[which]
    owners = np.array([folder.parent.name for folder in folders])[which]
    pool = Pool(path.resolve().name, images, labels, tuple(classes), own=True)
    return hold_columns(show_path(path), pool, owners, None)


def load_shift(path: Path, pool: Pool, square: Square | None = None) -> Pool:
    """A folder whose sub-folders are named after classes of the pool, all of them or some."""
    names = list_classes(path)
    where = find_classes(path, names, pool)
    images, labels = read_folders([path / name for name in names], pool.x.shape[1:], square)
    return Pool(path.resolve().name, images, where[labels], pool.classes, own=True)


def list_files(path: Path) -> list[Path]:
    return [file for name in list_classes(path) for file in list_images(path / name)]


def list_classes(path: Path, kind: str = "class") -> list[str]:
    if not path.is_dir():
        raise InputError(f"{show_path(path)} is not a folder; name one that holds a folder of images per {kind}.")
    names = [entry.name for entry in list_visible(path) if entry.is_dir()]
    if not names:
        raise InputError(
            f"{show_path(path)} has no {kind} folders; make one per {kind}, named after it, and put its images there."
        )
    return names


def list_images(folder: Path) -> list[Path]:
    files = list_visible(folder)
    for file in files:
        if file.is_dir():
            raise InputError(
                f"{show_path(file)} is a folder within a class folder; move its images up into {show_path(folder)}, "
                "or set by_client=true if the upper folders are clients."
            )
    if not files:
        raise InputError(f"{show_path(folder)} has no images; add some or remove the folder.")
    return files


def list_visible(folder: Path) -> list[Path]:
    """The entries of a folder, by name, without hidden ones."""
    with explain(f"{show_path(folder)} cannot be read"):
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def make_room(count: int, shape: tuple[int, ...]) -> np.ndarray:
    """An empty array for `count` images, uint8 [count, *shape], if it fits in memory."""
    check_room(f"{count:,} images of {shape[0]} x {shape[1]}", count * math.prod(shape), "set a smaller size")
    return np.empty((count, *shape), dtype=np.uint8)


def read_folders(
    folders: Sequence[Path], shape: tuple[int, ...], shaped: Shaped = "crop"
) -> tuple[np.ndarray, np.ndarray]:
    """All images of the folders, by name: uint8 [n, *shape], and the position of their folder: int64 [n]."""
    files = [(file, label) for label, folder in enumerate(folders) for file in list_images(folder)]
    images = make_room(len(files), shape)
    for row, (file, _) in enumerate(track("reading images", files)):
        images[row] = read_image(show_path(file), partial(read_file, file, BYTES), shape, shaped)
    return images, np.array([label for _, label in files], dtype=np.int64)


def read_image(name: str, read: Callable[[], bytes], shape: tuple[int, ...], shaped: Shaped = "crop") -> np.ndarray:
    """One encoded image, upright, opaque and resized: uint8 [*shape]."""
    return decode_image(name, read, lambda image: fit_picture(name, image, shape, shaped))


def fit_picture(name: str, image: Image, shape: tuple[int, ...], shaped: Shaped = "crop") -> np.ndarray:
    """The same of a picture that is decoded already."""
    return fit_image(name, _normalize(image), shape, shaped)


def _normalize(image: Image) -> Image:
    """Rotated as its EXIF data says, with 8 bits per channel, L or RGB, on a white background."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers of unknown range")
    if image.mode.startswith("I"):  # 16 bits, which convert() would clip at 255 instead of scaling
        return Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image if image.mode in ("L", "RGB") else image.convert("RGB")


def fit_image(name: str, image: Image, shape: tuple[int, ...], shaped: Shaped) -> np.ndarray:
    """Resized bilinearly to `shape` [height, width, 1 or 3]."""
    from PIL import Image as images

    height, width, channels = shape
    image = image.convert("L" if channels == 1 else "RGB")
    if shaped is None and image.width * height != image.height * width:
        wanted = "square" if height == width else f"of {height} x {width}"
        raise InputError(
            f"{name} is {image.height} x {image.width} pixels, not {wanted}; set square=crop to cut out its centre, or "
            "square=pad to add black bars."
        )
    scale = (max if shaped == "pad" else min)(image.width / width, image.height / height)
    if shaped == "pad":
        inside = max(1, round(image.width / scale)), max(1, round(image.height / scale))
        canvas = images.new(image.mode, (width, height))
        canvas.paste(
            image.resize(inside, images.Resampling.BILINEAR), ((width - inside[0]) // 2, (height - inside[1]) // 2)
        )
        return np.asarray(canvas).reshape(shape)
    across, down = (image.width, image.height) if shaped == "stretch" else (width * scale, height * scale)
    left, top = (image.width - across) / 2, (image.height - down) / 2
    box = (left, top, left + across, top + down)
    return np.asarray(image.resize((width, height), images.Resampling.BILINEAR, box=box)).reshape(shape)


def fit_images(
    images: np.ndarray, shape: tuple[int, ...], shaped: Shaped = "crop", name: str = "an image"
) -> np.ndarray:
    """uint8 [n, h, w, 1 or 3] -> uint8 [n, *shape]; the same array if it has that shape already."""
    if images.shape[1:] == tuple(shape):
        return images
    from PIL import Image

    fitted = make_room(len(images), shape)
    for row, image in enumerate(images):
        one = Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else image)
        fitted[row] = fit_image(name, one, shape, shaped)
    return fitted
