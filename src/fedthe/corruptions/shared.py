"""What several corruptions share: a check of images, random draws, batch sizes, levels, luma, borders and weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import rng
from ..errors import InputError

LUMA = (0.299, 0.587, 0.114)
CACHED = 128 * 32 * 32 * 3  # values processed at a time, so that they stay in the CPU's cache
GROUPED = 64 * CACHED  # the same for corruptions that handle images with the same draw together


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


def values_at_a_time(device: torch.device) -> int:
    return CACHED if device.type == "cpu" else 16 * CACHED


def in_cache(work: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`work` applied to the rows of `tensors`, a few at a time."""
    step = max(1, values_at_a_time(tensors[0].device) // tensors[0][0].numel())
    return torch.cat([work(*rows) for rows in zip(*(torch.split(tensor, step) for tensor in tensors), strict=True)])


class ItemDraws(NamedTuple):
    """Draws for each image, keyed by `path`, the image's item, and `what` they are for."""

    path: tuple[int | str, ...]
    items: Tensor  # int64 [n]

    def words(self, what: str, count: int) -> Tensor:
        """int64 [n, count] in [0, 2**32)"""
        return self._draw(rng.words, what, count)

    def uniform(self, what: str, count: int) -> Tensor:
        return self._draw(rng.uniform, what, count)

    def normal(self, what: str, count: int) -> Tensor:
        return self._draw(rng.normal, what, count)

    def _draw(self, draw: Callable[[rng.Key, Tensor, int], Tensor], what: str, count: int) -> Tensor:
        key, step = rng.key(*self.path, what), max(1, values_at_a_time(self.items.device) // count)
        return torch.cat([draw(key, items, count) for items in torch.split(self.items, step)])


def to_bytes(levels: Tensor) -> Tensor:
    """Truncate to uint8, as CIFAR-10-C does; the small addend turns 254.99998, a rounded 255, into 255."""
    return (levels + 2e-4).clamp_(0, 255).to(torch.uint8)


def luma(x: Tensor) -> Tensor:
    """Luma of float [..., channels] as [..., 1]; a single channel is its own luma."""
    if x.shape[-1] == 1:
        return x.clone()
    red, green, blue = (channel * weight for channel, weight in zip(x.unbind(-1), LUMA, strict=True))
    return torch.add(red, green).add_(blue)[..., None]


def mirror(index: Tensor, size: int, repeat: int) -> Tensor:
    """Reflect an index less than `size` outside back inside; `repeat` 1 repeats the border pixel, 0 does not."""
    inside = torch.maximum(index, -repeat - index)
    return torch.minimum(inside, 2 * size - 2 + repeat - inside)


def gaussian(sigma: float, cut: float) -> np.ndarray:
    """Weights of a Gaussian truncated at `cut` sigmas."""
    reach = np.arange(int(cut * sigma + 0.5) + 1)
    half = np.exp(-0.5 * (reach / sigma) ** 2)
    weights = np.concatenate((half[:0:-1], half))
    return np.asarray(weights / weights.sum())


def zoom_places(n: int, factor: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Interpolation that enlarges the middle of n pixels: left pixel, right pixel, and weight of the right one."""
    cut = int(np.ceil(n / factor))
    grown = round(cut * factor)
    place = (np.arange(n) + (grown - n) // 2) * ((cut - 1) / (grown - 1))
    low = np.minimum(place.astype(np.int64), cut - 1)
    return low + (n - cut) // 2, np.minimum(low + 1, cut - 1) + (n - cut) // 2, place - low
