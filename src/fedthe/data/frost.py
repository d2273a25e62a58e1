"""The frost photographs of CIFAR-10-C, for users who have them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from ..foreign import read_file, show_path
from .decode import BYTES, decode_image
from .folder import list_visible

if TYPE_CHECKING:
    from PIL.Image import Image


COUNT = 5  # photographs that are used: CIFAR-10-C ships six and draws only from the first five


def load_frost(folder: str | Path, count: int = COUNT) -> list[Tensor]:
    """The first `count` photographs of a folder, by name, at a fifth of their size: uint8 [height, width, 3] each."""
    files = list_photographs(folder, count)
    return [decode_image(show_path(file), partial(read_file, file, BYTES), _shrink) for file in files]


def list_photographs(folder: str | Path, count: int = COUNT) -> list[Path]:
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{show_path(folder)} is not a folder; name the one that holds the frost photographs.")
    files = [file for file in list_visible(folder) if file.suffix.lower() in (".png", ".jpg", ".jpeg")][:count]
    if not files:
        raise InputError(f"{show_path(folder)} holds no png or jpg file; put the frost photographs there.")
    return files


def _shrink(image: Image) -> Tensor:
    """A fifth of the size by bilinear sampling without antialiasing, as CIFAR-10-C does: it stays crisp."""
    photograph = torch.from_numpy(np.array(image.convert("RGB")))
    height, width = (max(1, round(side / 5)) for side in photograph.shape[:2])
    planes = photograph.permute(2, 0, 1)[None].float()
    small = torch.nn.functional.interpolate(planes, (height, width), mode="bilinear", align_corners=False)
    return small[0].permute(1, 2, 0).round().clamp(0, 255).to(torch.uint8)
