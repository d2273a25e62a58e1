"""The mode that dispatches calls of torch's layers to stacked operations, and keeps bfloat16 and float32 apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...nets import layers
from . import attention, conv, norm, pool
from .stacked import TYPES

Call = Callable[..., Any]

# An operation takes the mode's type first. It returns NotImplemented for what it does not cover: plain torch does that.
OURS: dict[Call, Call] = {
    F.conv2d: conv.conv2d,  # the same as torch.conv2d
    torch.max_pool2d: pool.max_pool2d,
    F.max_pool2d: pool.max_pool2d,
    torch.group_norm: norm.group_norm,
    F.group_norm: norm.group_norm,
    torch.layer_norm: norm.layer_norm,
    F.layer_norm: norm.layer_norm,
    layers.conv_residual: conv.conv_residual,
    layers.norm_relu: norm.norm_relu,
    layers.add_positions: attention.add_positions,
    layers.attend: attention.attend,
}
LINEAR: dict[Call, Call] = {F.linear: conv.linear, layers.linear_add: conv.linear_add}
SUMS = {torch.sum, torch.mean, Tensor.sum, Tensor.mean}
# On the CPU these ask about channels-last memory, which vmap cannot answer; on a GPU they copy anyway.
PLAIN_ORDER = {F.group_norm, torch.group_norm}
KEEP_TYPES = {"grad", "backward", "to", "__setitem__", "__set__", "can_cast", "promote_types", "result_type"}
KEEP_TYPES |= {
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}


class StackedOps(TorchFunctionMode):
    """Runs the layers in `OURS` and `LINEAR` as stacked operations. `dtype` of images and tokens: bfloat16 or float32.

    bfloat16 lasts from a convolution to the first function that mixes it with float32 or sums it up; there it is cast
    to float32. With `own_linear`, linear layers on a GPU run in our kernel: their bits then do not depend on the size
    of the stack, as those of cuBLAS's batched products may.
    """

    def __init__(self, dtype: torch.dtype, own_linear: bool = True) -> None:
        super().__init__()
        if dtype not in TYPES:
            raise ValueError(f"dtype must be torch.bfloat16 or torch.float32, not {dtype}.")
        self.dtype = dtype
        self.ours = OURS | LINEAR if own_linear else OURS

    def __torch_function__(
        self, func: Call, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self.ours:
            answer = self.ours[func](self.dtype, *args, **kwargs)
            if answer is not NotImplemented:
                return answer
        if func in layers.PLAIN:
            with self:  # torch switched it off, but it handles the parts, too
                return layers.PLAIN[func](*args, **kwargs)
        kinds = _kinds([*args, *kwargs.values()])
        if torch.bfloat16 in kinds and torch.float32 in kinds and not _keeps_types(func):
            args, kwargs = _widen(args), {name: _widen(value) for name, value in kwargs.items()}
        if func in SUMS and isinstance(args[0], Tensor) and args[0].dtype == torch.bfloat16:
            kwargs = {"dtype": torch.float32, **kwargs}
        if func in PLAIN_ORDER and args:
            args = (args[0].contiguous(), *args[1:])
        return func(*args, **kwargs)


def _kinds(values: list[Any]) -> set[torch.dtype]:
    """The types of tensors among the values and in lists of them, no deeper."""
    kinds = set()
    for value in values:
        if isinstance(value, Tensor):
            kinds.add(value.dtype)
        elif isinstance(value, list | tuple):
            kinds.update(v.dtype for v in value if isinstance(v, Tensor))
    return kinds


def _widen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype == torch.bfloat16 else value
    if type(value) in (list, tuple):
        return type(value)(_widen(v) for v in value)
    return value


def _keeps_types(func: Call) -> bool:
    """True for functions that write into an argument, need its identity, or read only another's type or shape."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in KEEP_TYPES or name.endswith(("_as", "_like")) or name.startswith("_foreach")
