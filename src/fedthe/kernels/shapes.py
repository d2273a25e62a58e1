"""Shapes and options of operations, as kernels and the code that calls them share them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Pair = tuple[int, int]

FULL = "tf32x3"  # float32 products on tensor cores, as three of tf32; "ieee" is exact and many times slower
FAST = "tf32"


@dataclass(frozen=True)
class Windows:
    """That slide over images of `size` (h, w)."""

    kernel: Pair
    stride: Pair
    padding: Pair
    size: Pair

    @property
    def out(self) -> Pair:
        """How many there are: the size (h, w) of the result."""
        h, w = ((self.size[i] + 2 * self.padding[i] - self.kernel[i]) // self.stride[i] + 1 for i in (0, 1))
        return h, w


@dataclass(frozen=True)
class Geometry(Windows):
    """Of a convolution. `precision` is that of float32 products on a GPU."""

    precision: str = FULL
    bias: bool = False  # there is one


@dataclass(frozen=True)
class Norm:
    groups: int
    eps: float
    shared: bool = False  # all groups have the same weights
    beside: bool = False  # a residual is added to what was normalised
    relu: bool = False


@dataclass(frozen=True)
class Attention:
    heads: int
    width: int  # of a head
    precision: str = FULL


def pair(value: Any) -> Pair:
    """Of what torch takes for one: a number for both, or a list."""
    if isinstance(value, int):
        return value, value
    first, *rest = (int(v) for v in value)
    return first, rest[0] if rest else first
