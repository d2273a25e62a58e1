"""Shapes and options of operations, sizes of grids and blocks, and tensors in the layout that kernels read."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Pair = tuple[int, int]

FULL = "tf32x3"  # float32 products on tensor cores, each as three in tf32; "ieee" is exact and many times slower
FAST = "tf32"


@dataclass(frozen=True)
class Windows:
    """Windows that slide over images of `size` (h, w)."""

    kernel: Pair
    stride: Pair
    padding: Pair
    size: Pair

    @property
    def out(self) -> Pair:
        """The size (h, w) of the result: one pixel per window."""
        h, w = ((self.size[i] + 2 * self.padding[i] - self.kernel[i]) // self.stride[i] + 1 for i in (0, 1))
        return h, w


@dataclass(frozen=True)
class Geometry(Windows):
    """A convolution's windows. `precision` is that of float32 products on a GPU."""

    precision: str = FULL
    bias: bool = False  # whether it has one


@dataclass(frozen=True)
class Norm:
    groups: int
    eps: float
    shared: bool = False  # all groups have the same weights
    residual: bool = False  # one is added after the norm
    relu: bool = False


@dataclass(frozen=True)
class Attention:
    heads: int
    width: int  # of a head


def pair(value: Any) -> Pair:
    """A pair as torch takes it: one number for both, or a list."""
    if isinstance(value, int):
        return value, value
    first, *rest = (int(v) for v in value)
    return first, rest[0] if rest else first


def window_constants(*pairs: tuple[int, ...]) -> dict[str, int]:
    """A kernel's constants: the size of the image and of the result, and the windows' kernel, stride and padding."""
    names = ("H", "W", "OUT_H", "OUT_W", "KH", "KW", "STRIDE_Y", "STRIDE_X", "PAD_Y", "PAD_X")
    return dict(zip(names, itertools.chain(*pairs), strict=True))


def power_of_two(value: int, least: int = 1, most: int | None = None) -> int:
    """The smallest power of two that is not below value, clipped to [least, most]."""
    power = 1 << (value - 1).bit_length()
    return max(least, power if most is None else min(most, power))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def contiguous_rows(t: Tensor) -> tuple[Tensor, int]:
    """t [S, c] with contiguous rows, and the stride from one client to the next: 0 if all share one row."""
    if len(t) > 1 and t.stride(0) == 0:
        return t[0].contiguous(), 0
    return t.contiguous(), t.shape[1]


def channels_last(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
    """t [S, a, c, h, w] as memory [S, a, h, w, c] of that type, and the stride from one client to the next.

    Copies at most once. A tensor expanded over the clients stays one, with stride 0.
    """
    t = t.permute(0, 1, 3, 4, 2)
    one = len(t) > 1 and t.stride(0) == 0
    if one:
        t = t[:1]
    if t.dtype != dtype or not t.is_contiguous():
        t = torch.empty(t.shape, dtype=dtype, device=t.device).copy_(t)
    return t, 0 if one else t[0].numel()
