"""Layers made of several of torch's, which an engine may run as one kernel.

Each is a plain function of tensors. Like torch's own functions, it first lets an active mode take over the call:
`engine.ops.mode` does, on a GPU.
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

PLAIN: dict[Callable[..., Any], Callable[..., Any]] = {}  # by layer: the function that asks no mode


def _overridable(plain: Callable[..., Made]) -> Callable[..., Made]:
    @wraps(plain)
    def layer(*args: Any, **kwargs: Any) -> Made:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if has_torch_function(tensors):  # also if any mode is active
            return handle_torch_function(layer, tensors, *args, **kwargs)
        return plain(*args, **kwargs)

    PLAIN[layer] = plain
    return layer


@_overridable
def conv_residual(x: Tensor, weight: Tensor, stride: int = 1, padding: int = 0) -> tuple[Tensor, Tensor]:
    """A convolution of x, and x itself as the residual: a kernel can then add up both gradients of x."""
    return F.conv2d(x, weight, stride=stride, padding=padding), x


@_overridable
def norm_relu(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, residual: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """The ReLU of the group norm of x [n, c, h, w], plus a residual before the ReLU."""
    y = F.group_norm(x, groups, weight, bias, eps)
    return F.relu(y if residual is None else y + residual)


@_overridable
def add_positions(x: Tensor, positions: Tensor) -> Tensor:
    """Tokens x [n, tokens, dim] plus the parameters of their positions, [tokens, dim]"""
    return x + positions


@_overridable
def linear_add(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return residual + F.linear(x, weight, bias)


@_overridable
def attend(qkv: Tensor, heads: int) -> Tensor:
    """Self-attention: queries, keys and values [n, tokens, 3 * dim] -> [n, tokens, dim]"""
    # Written out: fused attention has no vmap rule on the CPU. Head by head: their slices of q, k and v are views that
    # a matrix product takes without a copy.
    width = qkv.shape[-1] // (3 * heads)
    parts = qkv.split(width, -1)  # each [n, tokens, width]
    mixed = []
    for q, k, v in zip(parts[:heads], parts[heads : 2 * heads], parts[2 * heads :], strict=True):
        scores = (q @ k.transpose(-1, -2)) * width**-0.5  # [n, tokens, tokens]
        mixed.append(scores.softmax(-1) @ v)
    return torch.cat(mixed, -1)
