"""Pixels as weighted sums of pixels, with integer weights, so that sums are exact in any order."""

from __future__ import annotations

import warnings
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_matrix, diags
from torch import Tensor

UNIT = 65_520  # the sum of a pixel's weights: times a byte it is below 2**24, and its fifths and ninths are integers
TURNS = 256  # directions of streaks in a quarter circle: enough, because a trail consists of whole pixels
_LOCK = Lock()


def mix_pixels(x: Tensor, mix: Tensor) -> Tensor:
    """Each pixel as a weighted sum of pixels, float [n, h, w, c]; the sparse `mix` [h * w, h * w] is in 1 / UNIT."""
    mixed = torch.sparse.mm(mix.to(x.device), _to_columns(x))
    return _from_columns(_divide_by_unit(mixed), x.shape)


def _divide_by_unit(total: Tensor) -> Tensor:
    """Divide in place by a tensor: by a plain number, CUDA would multiply with its rounded inverse."""
    return total.div_(total.new_tensor(UNIT))


def _to_columns(x: Tensor) -> Tensor:
    """[n, h, w, c] as float [h * w, n * c]: a row holds one pixel of all images."""
    n, h, w, c = x.shape
    return x.view(n, h * w, c).transpose(0, 1).reshape(h * w, n * c).float()


def _from_columns(columns: Tensor, shape: torch.Size) -> Tensor:
    n, h, w, c = shape
    return columns.view(h * w, n, c).transpose(0, 1).reshape(shape)


# Sparse matrices of scipy, which has no types


def read(index: np.ndarray) -> Any:
    """The matrix whose row i reads entry index[i] of a vector as long as the index."""
    n = len(index)
    return csr_matrix((np.ones(n), (np.arange(n), index)), shape=(n, n))


def make_mix(parts: Any) -> Tensor:
    """The sum of `parts` as a sparse tensor whose rows are rounded to integers that add up to UNIT."""
    mix = sum(parts)
    whole = csr_matrix((np.rint(mix.data * UNIT), mix.indices, mix.indptr), shape=mix.shape)
    rest = UNIT - np.asarray(whole.sum(1)).ravel()
    most = np.asarray(whole.argmax(1)).ravel()  # the largest weight takes the rounding error
    whole = (whole + diags(rest) @ read(most)).tocoo()
    whole.sum_duplicates()
    whole.eliminate_zeros()
    index = torch.from_numpy(np.stack((whole.row, whole.col)).astype(np.int64))
    data = torch.from_numpy(whole.data.astype(np.float32))
    with _LOCK, warnings.catch_warnings():  # all threads share the warning filters
        warnings.simplefilter("ignore")  # torch 2.11 warns that it skips checks, even when asked to
        return torch.sparse_coo_tensor(index, data, whole.shape, check_invariants=False, is_coalesced=True)


# Streaks, as ImageMagick's motion blur draws them


def streak(x: Tensor, draw: Tensor, radius: int, sigma: float, first: int) -> Tensor:
    """A one-sided Gaussian trail in a direction from `first` to `first` + 90 degrees; rounded, not truncated.

    draw: int64 [n] in [0, 2**32). Images with the same trail are processed together: each tap is one shifted copy.
    """
    weights, trails, trail_of = _make_trails(radius, sigma, first)
    _, h, w, _ = x.shape
    which = trail_of[(draw >> 24).cpu()]
    order = which.argsort(stable=True)
    kinds, counts = torch.unique(which, return_counts=True)
    done = torch.empty_like(x)
    for kind, members in zip(kinds.tolist(), torch.split(order, counts.tolist()), strict=True):
        trail, start = trails[kind], trails[kind].min(0)
        columns, rows = (
            np.arange(low, side + high).clip(0, side - 1)  # beyond the image, its border pixels are repeated
            for low, high, side in zip(start, trail.max(0), (w, h), strict=True)
        )
        padded_from = torch.from_numpy((rows[:, None] * w + columns).ravel()).to(x.device)
        for some in torch.split(members.to(x.device), 64):
            images = x[some]
            padded = _to_columns(images).index_select(0, padded_from).view(len(rows), len(columns), -1)
            total = torch.full_like(padded[:h, :w], UNIT // 2)
            for weight, (dx, dy) in zip(weights, (trail - start).tolist(), strict=True):
                total.add_(padded[dy : dy + h, dx : dx + w], alpha=weight)
            done[some] = _from_columns(_divide_by_unit(total).to(torch.uint8), images.shape)
    return done


@lru_cache(maxsize=16)
def _make_trails(radius: int, sigma: float, first: int) -> tuple[list[int], np.ndarray, Tensor]:
    """Integer weights [taps] that add up to UNIT, the distinct trails [trails, taps, (x, y)], and each turn's trail."""
    taps = np.arange(2 * radius + 1)
    weights = np.exp(-(taps**2) / (2 * sigma**2))
    whole = np.rint(weights / weights.sum() * UNIT).astype(int)
    whole[0] += UNIT - whole.sum()
    taps = taps[whole > 0]
    angle = np.deg2rad(first + 90 * (np.arange(TURNS) + 0.5) / TURNS)[:, None, None]
    trails = np.ceil(taps[:, None] * np.concatenate((np.cos(angle), np.sin(angle)), axis=2) - 0.5).astype(int)
    trails, trail_of = np.unique(trails, axis=0, return_inverse=True)
    return whole[taps].tolist(), trails, torch.from_numpy(trail_of.reshape(-1))
