"""Functions of stacked tensors under `vmap`: a new axis adds to the stack."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from ...kernels import use_kernels
from .layout import channels_last


def run(function: type[Function], *inputs: Any) -> Any:
    return function.apply(*inputs)


class Stacked(Function):
    """The new axis and the stack that is there already become one stack. The last input is no tensor: it tells how.

    Where some inputs are `images` and all the others, weights, are shared, the new axis is more images instead.
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
    t = t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
    t = t.flatten(0, 1)
    # In this order of memory already here, not only in the kernel: what is saved for the backward is then the copy.
    return channels_last(t) if t.ndim == 5 and dim is not None and use_kernels(t) else t


def _append(t: Tensor, dim: int | None, size: int) -> Tensor:
    t = t[None].expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
    return t.transpose(0, 1).flatten(1, 2)
