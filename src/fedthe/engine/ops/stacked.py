"""Stacks of tensors: types, memory layout, and functions of stacks under `vmap`, where a new axis adds to the stack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ...kernels import use_kernels

TYPES = (torch.bfloat16, torch.float32)  # that the operations take


def type_of_result(dtype: torch.dtype, x: Tensor) -> torch.dtype:
    """The type of a layer's result: `dtype` for tokens x [n, tokens, d], float32 for vectors, since logits are such."""
    return dtype if x.ndim > 2 else torch.float32


def channels_last(t: Tensor) -> Tensor:
    """[S, n, c, h, w] as memory [S, n, h, w, c]; copies only other layouts."""
    return t.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def empty_rows(shape: Sequence[int], like: Tensor) -> Tensor:
    """An empty stack of parameters, with weights of convolutions in the layout that kernels read."""
    if len(shape) != 5:
        return like.new_empty(shape)
    s, o, c, h, w = shape
    return like.new_empty((s, o, h, w, c)).permute(0, 1, 4, 2, 3)


def run(function: type[Function], *inputs: Any) -> Any:
    return function.apply(*inputs)


class Stacked(Function):
    """The new axis and the stack become one stack. The last input holds options, no tensor.

    If some inputs are `images` and all others (the weights) are shared, the new axis adds to the images instead.
    """

    images: tuple[int, ...] = ()
    saved: tuple[int, ...] = ()  # inputs for the backward

    @classmethod
    def setup_context(cls, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*(inputs[i] for i in cls.saved))
        ctx.how = inputs[-1]

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        *tensors, how = inputs
        size = info.batch_size
        own = any(dim is not None for i, dim in enumerate(in_dims) if i not in cls.images)
        axis = 0 if in_dims[0] is None or own else 1
        if axis == 0:
            folded = [t if t is None else _fold(t, in_dims[i], size) for i, t in enumerate(tensors)]
        else:
            more = [i for i in cls.images if tensors[i] is not None]
            folded = [_append(t, in_dims[i], size) if i in more else t for i, t in enumerate(tensors)]
        made = run(cls, *folded, how)
        if isinstance(made, Tensor):
            return made.unflatten(axis, (size, -1)), axis
        return tuple(t.unflatten(axis, (size, -1)) for t in made), (axis,) * len(made)


def _fold(t: Tensor, dim: int | None, size: int) -> Tensor:
    t = _to_front(t, dim, size).flatten(0, 1)
    # Not left to the kernel: the copy in this layout is then what is saved for the backward.
    return channels_last(t) if t.ndim == 5 and dim is not None and use_kernels(t) else t


def _append(t: Tensor, dim: int | None, size: int) -> Tensor:
    return _to_front(t, dim, size).transpose(0, 1).flatten(1, 2)


def _to_front(t: Tensor, dim: int | None, size: int) -> Tensor:
    return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
