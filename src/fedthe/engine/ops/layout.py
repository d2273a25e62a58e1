"""Types and order of memory of stacked tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TYPES = (torch.bfloat16, torch.float32)  # that the operations take


def type_of_result(dtype: torch.dtype, x: Tensor) -> torch.dtype:
    """Of what a layer makes of tokens x [n, tokens, d]; plain vectors stay float32, since logits are such."""
    return dtype if x.ndim > 2 else torch.float32


def channels_last(t: Tensor) -> Tensor:
    """[S, n, c, h, w] as memory [S, n, h, w, c]; copies only what lies otherwise."""
    return t.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def empty_rows(shape: Sequence[int], like: Tensor) -> Tensor:
    """An empty stack of parameters, weights of convolutions in the order of memory that kernels read."""
    if len(shape) != 5:
        return like.new_empty(shape)
    s, o, c, h, w = shape
    return like.new_empty((s, o, h, w, c)).permute(0, 1, 4, 2, 3)
