"""The mode that sends calls of torch's layers to stacked operations, and keeps bfloat16 and float32 apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...nets import layers
from . import attention, conv, linear, norm, pool
from .layout import TYPES

Call = Callable[..., Any]

# An operation takes the mode's type first. It answers NotImplemented to what it does not cover: torch does that ...
OURS: dict[Call, Call] = {
    torch.conv2d: conv.conv2d,
    F.conv2d: conv.conv2d,
    torch.max_pool2d: pool.max_pool2d,
    F.max_pool2d: pool.max_pool2d,
    torch.group_norm: norm.group_norm,
    F.group_norm: norm.group_norm,
    torch.layer_norm: norm.layer_norm,
    F.layer_norm: norm.layer_norm,
    layers.conv_beside: conv.conv_beside,
    layers.norm_relu: norm.norm_relu,
    layers.add_positions: attention.add_positions,
    layers.attend: attention.attend,
}
LINEAR: dict[Call, Call] = {F.linear: linear.linear, layers.linear_add: linear.linear_add}
# ... or, of our networks' own layers, their parts.
PARTS: dict[Call, Call] = {
    layers.conv_beside: layers.conv_beside_plainly,
    layers.norm_relu: layers.norm_relu_plainly,
    layers.add_positions: layers.add_positions_plainly,
    layers.linear_add: layers.linear_add_plainly,
    layers.attend: layers.attend_plainly,
}
SUMS = {torch.sum, torch.mean, Tensor.sum, Tensor.mean}
# On the CPU these ask vmap about channels-last memory, which it cannot say; on a GPU they make the copy themselves.
PLAIN_ORDER = {F.group_norm, torch.group_norm}
KEEP_TYPES = {"grad", "backward", "to", "__setitem__", "__set__", "can_cast", "promote_types", "result_type"}
KEEP_TYPES |= {
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}


class StackedOps(TorchFunctionMode):
    """Within it, the layers named in `OURS` and `LINEAR` are ours. `dtype`: bfloat16 or float32, of images and tokens.

    bfloat16 lives from a convolution to the first function that meets float32 or adds up: there it is cast up. With
    `own_linear` a linear layer on a GPU runs in our kernel: its bits then do not depend on how many are stacked, as
    those of a batched product by cuBLAS may.
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
        if func in PARTS:
            with self:  # off in here, but it has more to say about each part
                return PARTS[func](*args, **kwargs)
        kinds = _kinds([*args, *kwargs.values()])
        if torch.bfloat16 in kinds and torch.float32 in kinds and not _keeps_types(func):
            args, kwargs = _widen(args), {name: _widen(value) for name, value in kwargs.items()}
        if func in SUMS and isinstance(args[0], Tensor) and args[0].dtype == torch.bfloat16:
            kwargs = {"dtype": torch.float32, **kwargs}
        if func in PLAIN_ORDER and args:
            args = (args[0].contiguous(), *args[1:])
        return func(*args, **kwargs)


def _kinds(values: list[Any]) -> set[torch.dtype]:
    """The types of the tensors among the values and in lists of them, no deeper."""
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
    """Of functions that write into an argument, ask for it by identity, or only look at another's type or shape."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in KEEP_TYPES or name.endswith(("_as", "_like")) or name.startswith("_foreach")
