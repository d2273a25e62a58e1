"""Arrays that people pass to `fedthe.head_ensemble` and `fedthe.regime_ensemble`: taken as they are, or refused."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError

LARGEST = 1e100  # the largest magnitude of an input: sums of squares of such numbers still fit into float64


def is_whole(value: object) -> bool:
    return isinstance(value, Integral)


def is_within(value: object, low: float, high: float) -> bool:
    try:
        return isinstance(value, Real) and low <= float(value) <= high
    except OverflowError:
        return False


def widen(value: Tensor) -> Tensor:
    wide: Tensor = _Widen.apply(value)  # type: ignore[no-untyped-call]
    return wide


class _Widen(torch.autograd.Function):
    """float64 on the way in; on the way back the type given, and finite."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor) -> Tensor:
        return value.to(torch.float64, copy=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        limit = torch.finfo(ctx.dtype).max
        return gradient.nan_to_num(nan=0.0).clamp(-limit, limit).to(ctx.dtype)


def take(who: str, name: str, value: object) -> Tensor:
    """A dense tensor as it is, or an array as a tensor. `who` needs it, and calls it `name`."""
    if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        native = value.dtype.newbyteorder("=")
        if native not in (np.float32, np.float64):
            raise InputError(_say_types(who, f"{name} is {value.dtype}"))
        # torch knows no other byte order and no negative stride, and warns of what is read-only: so a copy
        return torch.from_numpy(np.array(value, native, order="C"))
    if not isinstance(value, Tensor):
        raise InputError(
            f"{who} needs torch tensors or NumPy arrays, but {name} is a {type(value).__name__}; "
            f"convert it, for example with torch.tensor({name})."
        )
    if value.layout != torch.strided or value.is_nested:
        raise InputError(f"{who} needs dense tensors, but {name} is sparse or nested; pass a dense copy.")
    if value.is_meta:
        raise InputError(f"{who} needs numbers, but {name} is on the meta device and holds none.")
    return value


def check_alike(who: str, given: Mapping[str, Tensor], wide: Collection[str] = ()) -> None:
    """Refuse types and devices that differ from the first one's, and numbers that are not finite or too large.

    Those named in `wide` may be float32 or float64, whatever the first one is.
    """
    name_of_first, first = next(iter(given.items()))
    for name, value in given.items():
        if value.dtype not in (torch.float32, torch.float64):
            raise InputError(_say_types(who, f"{name} is {_name(value)}"))
        if value.dtype != first.dtype and name not in wide:
            raise InputError(_say_types(who, f"{name_of_first} is {_name(first)} and {name} {_name(value)}"))
        if value.device != first.device:
            raise InputError(
                f"{who} needs everything on one device, but {name_of_first} is on {first.device} and {name} on "
                f"{value.device}; move it, for example with .to({name_of_first}.device)."
            )
    for name, value in given.items():
        size = float(value.detach().abs().amax())
        if not math.isfinite(size):
            raise InputError(f"{who} needs finite numbers, but {name} holds inf or nan.")
        if size > LARGEST:
            raise InputError(f"{who} needs numbers of at most {LARGEST:g}, but {name} holds one of {size:g}.")


def show_shapes(given: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(value.shape)}" for name, value in given.items())


def _say_types(who: str, fault: str) -> str:
    way_out = 'use .float(), or .astype("float32") in NumPy'
    return f"{who} needs float32 or float64, the same throughout, but {fault}; {way_out}."


def _name(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
