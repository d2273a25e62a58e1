"""Gaussian, shot and impulse noise."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from .shared import ItemDraws, to_bytes

GUIDE = 11  # leading bits of a draw that usually determine the result


def gaussian_noise(x: Tensor, draws: ItemDraws, scale: float) -> Tensor:
    return to_bytes(draws.normal("noise", x[0].numel()).mul_(255 * scale).view(x.shape).add_(x))


def shot_noise(x: Tensor, draws: ItemDraws, photons: int) -> Tensor:
    """Photon counts: Poisson with mean level / 255 * photons, by the inverse of its distribution function."""
    thresholds, values, guide = (t.to(x.device) for t in _count_photons(photons))
    level, draw = x.flatten().long(), draws.words("noise", x[0].numel()).flatten()
    byte = guide[level << GUIDE | draw >> 32 - GUIDE]
    open_ = (byte < 0).nonzero().flatten()
    draw, level = draw[open_], level[open_]
    byte[open_] = values[torch.searchsorted(thresholds, level << 23 | draw >> 9, right=True)]
    return byte.to(torch.uint8).view(x.shape)


@lru_cache(maxsize=5)
def _count_photons(photons: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each level, which of the 2**23 cells of a uniform draw give which byte.

    thresholds: the first cell of each next count, level after level, as level * 2**23 + cell; int64.
    values: the byte of each count, in the same order; int16.
    guide: int16 [256 * 2**GUIDE]: the byte of all cells with these leading bits, or -1 if they differ.
    """
    from scipy.stats import poisson

    counts = np.arange(2 * photons + 60)
    below = poisson.cdf(counts, np.arange(256)[:, None] * (photons / 255))  # [level, count]
    first = np.floor(below * 2**23 + 0.5).astype(np.int64)  # draws are the centres of cells
    kept = np.concatenate((np.ones((256, 1), dtype=bool), first[:, :-1] < 2**23), axis=1)
    thresholds = ((np.arange(256)[:, None] << 23) + first)[kept]
    values = np.minimum(counts * 255 / photons + 2e-4, 255).astype(np.int16)
    byte = np.broadcast_to(values, kept.shape)[kept]
    start = np.arange(256 << GUIDE) << 23 - GUIDE
    one = np.searchsorted(thresholds, start, side="right")
    two = np.searchsorted(thresholds, start + (1 << 23 - GUIDE) - 1, side="right")
    guide = np.where(one == two, byte[one], np.int16(-1))
    return torch.from_numpy(thresholds), torch.from_numpy(byte.copy()), torch.from_numpy(guide)


def impulse_noise(x: Tensor, draws: ItemDraws, amount: float) -> Tensor:
    """Set a share of the values, each channel independently, to white or black, half of them each."""
    draw = draws.uniform("noise", x[0].numel()).view(x.shape)
    return x.masked_fill(draw < amount, 0).masked_fill_(draw < amount / 2, 255)
