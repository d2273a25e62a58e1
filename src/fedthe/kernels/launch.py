"""What launchers share: sizes of grids and blocks, and tensors as kernels read them."""

from __future__ import annotations

import torch
from torch import Tensor


def power_of_two(value: int, least: int = 1, most: int | None = None) -> int:
    """The next one, kept within bounds."""
    power = 1 << (value - 1).bit_length()
    return max(least, power if most is None else min(most, power))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def contiguous_rows(t: Tensor) -> tuple[Tensor, int]:
    """t [S, c] with each row contiguous, and the step from one client to the next: 0 where all share one."""
    if len(t) > 1 and t.stride(0) == 0:
        return t[0].contiguous(), 0
    return t.contiguous(), t.shape[1]


def channels_last(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
    """t [S, a, c, h, w] as memory [S, a, h, w, c] of that type, and the step from one client to the next.

    At most one copy. What is expanded over the clients stays one, with step 0.
    """
    t = t.permute(0, 1, 3, 4, 2)
    one = len(t) > 1 and t.stride(0) == 0
    if one:
        t = t[:1]
    if t.dtype != dtype or not t.is_contiguous():
        t = torch.empty(t.shape, dtype=dtype, device=t.device).copy_(t)
    return t, 0 if one else t[0].numel()
