"""Image files: one photograph -> one array, a folder per class -> a pool."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InputError
from ..progress import track
from .pool import Dataset, Pool
from .source import find_classes

if TYPE_CHECKING:
    from PIL.Image import Image

SIZE = 32  # pixels, where nobody asks for another


def load(path: Path, size: int | None = None) -> Dataset:
    names = list_classes(path)
    images, labels = read_folders([path / name for name in names], (size or SIZE, size or SIZE, 3))
    return Dataset(Pool(path.name, images, labels, tuple(names)))


def load_shift(path: Path, pool: Pool) -> Pool:
    """A folder whose class folders carry names of the pool's classes, all of them or some."""
    names = list_classes(path)
    where = find_classes(path, names, pool)
    images, labels = read_folders([path / name for name in names], pool.images.shape[1:])
    return Pool(path.name, images, where[labels], pool.classes)


def list_files(path: Path) -> list[Path]:
    return [file for name in list_classes(path) for file in list_images(path / name)]


def list_classes(path: Path) -> list[str]:
    if not path.is_dir():
        raise InputError(f"{path} is not a folder; name one that holds a folder of images per class.")
    names = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise InputError(
            f"{path} holds no class folders; make one per class, named after it, and put its images there."
        )
    return names


def list_images(folder: Path) -> list[Path]:
    files = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    for file in files:
        if file.is_dir():
            raise InputError(f"{file} is a folder within a class folder; move its images up into {folder}.")
    if not files:
        raise InputError(f"{folder} holds no images; add some or remove the folder.")
    return files


def read_folders(folders: Sequence[Path], shape: tuple[int, ...], crop: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """All images of the folders, in order of name: uint8 [n, *shape], and the position of their folder: int64 [n]."""
    files = [(file, label) for label, folder in enumerate(folders) for file in list_images(folder)]
    images = np.empty((len(files), *shape), dtype=np.uint8)
    for row, (file, _) in enumerate(track("reading images", files)):
        images[row] = read_image(str(file), file.read_bytes, shape, crop)
    return images, np.array([label for _, label in files], dtype=np.int64)


def read_image(name: str, read: Callable[[], bytes], shape: tuple[int, ...], crop: bool = True) -> np.ndarray:
    """One encoded image, upright, without transparency, resized: uint8 [*shape]."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata; the pixels still count
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(read())) as image:
                return fit_image(open_up(image), shape, crop)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise InputError(f"{name} has too many pixels to be opened safely; make it smaller or remove it.") from None
    except Exception as error:  # Pillow's decoders raise whatever a damaged file leads them to
        unknown = isinstance(error, UnidentifiedImageError)  # whose text names an object in memory
        reason = "no image format is recognised" if unknown else " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{name} is not a readable image ({reason}); replace or remove it.") from None


def open_up(image: Image) -> Image:
    """Turned as its EXIF says, in 8 bits, L or RGB; what is transparent becomes white, as on a page."""
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


def fit_image(image: Image, shape: tuple[int, ...], crop: bool) -> np.ndarray:
    """Bilinear to `shape` [height, width, 1 or 3], from the largest centred box of that aspect if `crop`."""
    from PIL.Image import Resampling

    height, width, channels = shape
    image = image.convert("L" if channels == 1 else "RGB")
    scale = min(image.width / width, image.height / height)
    across, down = (width * scale, height * scale) if crop else (image.width, image.height)
    left, top = (image.width - across) / 2, (image.height - down) / 2
    box = (left, top, left + across, top + down)
    return np.asarray(image.resize((width, height), Resampling.BILINEAR, box=box)).reshape(shape)


def fit_images(images: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """uint8 [n, h, w, 1 or 3] -> uint8 [n, *shape]; the same array when it already fits."""
    if images.shape[1:] == tuple(shape):
        return images
    from PIL import Image

    fitted = np.empty((len(images), *shape), dtype=np.uint8)
    for row, image in enumerate(images):
        fitted[row] = fit_image(Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else image), shape, crop=True)
    return fitted
