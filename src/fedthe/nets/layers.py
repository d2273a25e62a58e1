"""Layers that are several of torch's and that an engine may do in one kernel.

Each is a plain function of tensors. As torch's own functions do, it first asks whether a mode wants to take over the
call: `engine.ops.mode` does, on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

Made = TypeVar("Made")


def _offered(plainly: Callable[..., Made]) -> Callable[..., Made]:
    @wraps(plainly)
    def layer(*args: Any, **kwargs: Any) -> Made:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if has_torch_function(tensors):  # also where any mode is on
            return handle_torch_function(layer, tensors, *args, **kwargs)
        return plainly(*args, **kwargs)

    return layer


def conv_beside_plainly(x: Tensor, weight: Tensor, stride: int = 1, padding: int = 0) -> tuple[Tensor, Tensor]:
    """A convolution of x, and x once more, for what goes past it: both gradients by x can then be added in one go."""
    return F.conv2d(x, weight, stride=stride, padding=padding), x


conv_beside = _offered(conv_beside_plainly)


def norm_relu_plainly(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, beside: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """The relu of x [n, c, h, w] normalised in groups, plus what is beside it."""
    y = F.group_norm(x, groups, weight, bias, eps)
    return F.relu(y if beside is None else y + beside)


norm_relu = _offered(norm_relu_plainly)


def add_positions_plainly(x: Tensor, positions: Tensor) -> Tensor:
    """Tokens x [n, tokens, dim] plus a parameter for the position of each, [tokens, dim]"""
    return x + positions


add_positions = _offered(add_positions_plainly)


def linear_add_plainly(beside: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return beside + F.linear(x, weight, bias)


linear_add = _offered(linear_add_plainly)


def attend_plainly(qkv: Tensor, heads: int) -> Tensor:
    """Attention of tokens to each other: queries, keys and values [n, tokens, 3 * dim] -> [n, tokens, dim]"""
    # Written out: the fused attention has no rule for vmap on the CPU. Head by head: their parts of q, k and v are
    # views that a matrix product takes as they lie.
    width = qkv.shape[-1] // (3 * heads)
    parts = qkv.split(width, -1)  # each [n, tokens, width]
    mixed = []
    for q, k, v in zip(parts[:heads], parts[heads : 2 * heads], parts[2 * heads :], strict=True):
        scores = (q @ k.transpose(-1, -2)) * width**-0.5  # [n, tokens, tokens]
        mixed.append(scores.softmax(-1) @ v)
    return torch.cat(mixed, -1)


attend = _offered(attend_plainly)
