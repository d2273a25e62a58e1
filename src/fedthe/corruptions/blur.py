"""Defocus, glass, motion and zoom blur."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from scipy.sparse import diags, kron
from torch import Tensor

from .mixing import make_mix, mix_pixels, read, streak
from .shared import ItemDraws, gaussian, mirror, to_bytes, zoom_places


def defocus_blur(x: Tensor, draws: ItemDraws, radius: float, rim: float) -> Tensor:
    return to_bytes(mix_pixels(x, _make_defocus(x.shape[1], x.shape[2], radius, rim)))


@lru_cache(maxsize=8)
def _make_defocus(h: int, w: int, radius: float, rim: float) -> Tensor:
    """A disk, softened at its rim by a 3 x 3 Gaussian; the image is reflected at its border pixels."""
    from scipy.ndimage import convolve1d

    reach = np.arange(-3, 4)
    disk = (reach[:, None] ** 2 + reach**2 <= radius**2).astype(float)
    edge = np.exp(-0.5 / rim**2)
    soft = np.array([edge, 1, edge]) / (1 + 2 * edge)
    kernel = convolve1d(convolve1d(disk / disk.sum(), soft, 0), soft, 1)
    down, across = ([read(mirror(torch.arange(n) + d, n, 0).numpy()) for d in reach.tolist()] for n in (h, w))
    return make_mix(kernel[i, j] * kron(down[i], across[j], format="csr") for i, j in np.argwhere(kernel > 0))


def glass_blur(x: Tensor, draws: ItemDraws, sigma: float, passes: int) -> Tensor:
    """Each pixel takes the value of a neighbour above or to the left, between two light blurs.

    The loop of CIFAR-10-C means to swap two pixels but assigns NumPy views, so it copies one onto the other. It runs
    backwards through the image, so the source has not changed yet, and one pass is a single gather.
    """
    n, h, w, c = x.shape
    smooth = _make_glass(h, w, sigma)
    draw = draws.words("shuffle", h * w).view(n, h, w)
    rows, columns = torch.arange(h, device=x.device)[:, None], torch.arange(w, device=x.device)
    moved = (rows > 1) & (columns > 1)
    place = (rows * w + columns).flatten()
    source = place.expand(n, -1)
    for i in reversed(range(passes)):  # the last pass reads from the result of the one before
        up, left = draw >> 31 - 2 * i & 1, draw >> 30 - 2 * i & 1
        source = (place - ((up * w + left) * moved).flatten(1)).gather(1, source)
    pixels = to_bytes(mix_pixels(x, smooth)).reshape(n * h * w, c)
    first = torch.arange(n, device=x.device)[:, None] * (h * w)
    return to_bytes(mix_pixels(pixels.index_select(0, (source + first).flatten()).view(x.shape), smooth))


@lru_cache(maxsize=8)
def _make_glass(h: int, w: int, sigma: float) -> Tensor:
    """A Gaussian truncated at four sigma; outside the image, its border pixels are repeated."""
    weights = gaussian(sigma, 4)
    reach = len(weights) // 2
    down, across = (
        sum(weight * read(np.clip(np.arange(n) + i - reach, 0, n - 1)) for i, weight in enumerate(weights))
        for n in (h, w)
    )
    return make_mix([kron(down, across, format="csr")])


def motion_blur(x: Tensor, draws: ItemDraws, radius: int, sigma: float) -> Tensor:
    return streak(x, draws.words("angle", 1)[:, 0], radius, sigma, -45)


def zoom_blur(x: Tensor, draws: ItemDraws, end: float) -> Tensor:
    return to_bytes(mix_pixels(x, _make_zoom(x.shape[1], x.shape[2], end)))


@lru_cache(maxsize=8)
def _make_zoom(h: int, w: int, end: float) -> Tensor:
    """The mean of the image and its enlargements by 1 (the image again), 1.01 and so on, below `end`."""
    factors = np.arange(1, end, 0.01)

    def enlarge(n: int, factor: float) -> Any:
        low, high, part = zoom_places(n, factor)
        return diags(1 - part) @ read(low) + diags(part) @ read(high)

    share = 1 / (len(factors) + 1)
    return make_mix(share * kron(enlarge(h, z), enlarge(w, z), format="csr") for z in (1.0, *factors))
