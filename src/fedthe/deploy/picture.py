"""From what a caller has to a sample as the model was trained on: an array, a picture of Pillow, a file, a tensor."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data.decode import BYTES
from ..data.folder import fit_picture, read_image
from ..errors import InputError
from ..foreign import read_file, show_path
from ..text import quote
from .bundle import Input

SIDE = 20_000  # pixels of an array; a larger one is a mistake


def take_sample(value: Any, takes: Input) -> np.ndarray:
    """One sample of the input's dtype and shape. Pictures of another size are resized as files are."""
    if not takes.is_picture:
        return _take_numbers(value, takes)
    if isinstance(value, str | Path):
        path = Path(value)
        if not path.exists():
            raise InputError(f"{show_path(path)} does not exist.")
        return read_image(show_path(path), partial(read_file, path, BYTES), takes.shape, takes.square)
    if isinstance(value, bytes):
        return read_image("the image", lambda: value, takes.shape, takes.square)
    if _is_pillow(value):
        return fit_picture("the image", value, takes.shape, takes.square)
    return _take_pixels(_to_array(value), takes)


def _take_pixels(pixels: np.ndarray, takes: Input) -> np.ndarray:
    """uint8 [h, w] or [h, w, channels]; a tensor may also be [channels, h, w]."""
    if pixels.dtype != np.uint8:
        raise InputError(f"a picture must have pixels of uint8 from 0 to 255, not {pixels.dtype}.")
    if pixels.shape == takes.shape:
        return pixels
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3) and pixels.shape[2] not in (1, 3, 4):
        pixels = np.moveaxis(pixels, 0, -1)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    of_picture = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4))
    if not of_picture or not all(1 <= side <= SIDE for side in pixels.shape[:2]):
        raise InputError(f"a picture must have the shape [height, width, 1 or 3], not {list(pixels.shape)}.")
    from PIL import Image

    return fit_picture("the image", Image.fromarray(np.ascontiguousarray(pixels)), takes.shape, takes.square)


def _take_numbers(value: Any, takes: Input) -> np.ndarray:
    """Features or tokens."""
    numbers = _to_array(value)
    if numbers.shape != takes.shape:
        raise InputError(f"a sample must have the shape {list(takes.shape)}, not {list(numbers.shape)}.")
    kinds = "fiu" if takes.dtype.startswith("float") else "iu"
    if numbers.dtype.kind not in kinds:
        raise InputError(f"a sample must hold numbers like {takes.dtype}, not {numbers.dtype}.")
    taken = numbers.astype(takes.dtype)
    if not np.isfinite(taken).all():
        raise InputError("a sample must hold finite numbers only.")
    return taken


def _to_array(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, list | tuple):
        try:
            return np.asarray(value)
        except ValueError:
            raise InputError("a sample must be an array of numbers of one shape.") from None
    raise InputError(f"a sample must be an array, a picture, a tensor or the path of a file, not {quote(value)}.")


def _is_pillow(value: Any) -> bool:
    from PIL import Image

    return isinstance(value, Image.Image)
