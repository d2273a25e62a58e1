"""What several corruptions share: random draws, batch sizes, levels, luma, borders and weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import rng

LUMA = (0.299, 0.587, 0.114)
CACHED = 128 * 32 * 32 * 3  # values: so many stay in the processor's cache
GROUPED = 64 * CACHED  # values, for corruptions that handle images with the same draw together


def values_at_a_time(device: torch.device) -> int:
    return CACHED if device.type == "cpu" else 16 * CACHED


def in_cache(work: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`work` over the rows of `tensors`, a few at a time."""
    step = max(1, values_at_a_time(tensors[0].device) // tensors[0][0].numel())
    return torch.cat([work(*rows) for rows in zip(*(torch.split(tensor, step) for tensor in tensors), strict=True)])


class ItemDraws(NamedTuple):
    """Draws for each image, keyed by `path` and the image's item. `what` says what they are for."""

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
    """Truncate to whole levels, as CIFAR-10-C does; the small addend keeps 254.99998, meant as 255, at 255."""
    return (levels + 2e-4).clamp_(0, 255).to(torch.uint8)


def luma(x: Tensor) -> Tensor:
    """Luma of float [..., channels] as [..., 1]; a single channel is its own luma."""
    if x.shape[-1] == 1:
        return x.clone()
    red, green, blue = (channel * weight for channel, weight in zip(x.unbind(-1), LUMA, strict=True))
    return torch.add(red, green).add_(blue)[..., None]


def mirror(index: Tensor, size: int, repeat: int) -> Tensor:
    """Fold an index less than `size` outside back in; the border pixel comes twice if `repeat` is 1, once if 0."""
    inside = torch.maximum(index, -repeat - index)
    return torch.minimum(inside, 2 * size - 2 + repeat - inside)


def gaussian(sigma: float, cut: float) -> np.ndarray:
    """Weights of a Gaussian that is cut at `cut` sigmas."""
    reach = np.arange(int(cut * sigma + 0.5) + 1)
    half = np.exp(-0.5 * (reach / sigma) ** 2)
    weights = np.concatenate((half[:0:-1], half))
    return np.asarray(weights / weights.sum())


def zoom_places(n: int, factor: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where each of n pixels reads in a row whose middle is enlarged: the pixel before, the one after, how far on."""
    cut = int(np.ceil(n / factor))
    grown = round(cut * factor)
    place = (np.arange(n) + (grown - n) // 2) * ((cut - 1) / (grown - 1))
    low = np.minimum(place.astype(np.int64), cut - 1)
    return low + (n - cut) // 2, np.minimum(low + 1, cut - 1) + (n - cut) // 2, place - low
