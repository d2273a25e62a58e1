"""What images must be, before pixels are changed."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import InputError


def check_images(images: Tensor, items: Tensor, what_for: str) -> None:
    """Refuse all but uint8 [n, height, width, 1 or 3] of at least 8 x 8 pixels, with one int64 item each."""
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3) or min(images.shape[1:3]) < 8:
        raise InputError(
            f"images to {what_for} must be uint8 [n, height, width, 1 or 3] of at least 8 x 8 pixels, "
            f"but they are {images.dtype} {list(images.shape)}."
        )
    if items.dtype != torch.int64 or items.shape != images.shape[:1]:
        raise InputError(
            f"there must be one int64 item per image, but there are {len(images)} images "
            f"and items {items.dtype} {list(items.shape)}."
        )
