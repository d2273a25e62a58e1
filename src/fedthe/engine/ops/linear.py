"""Linear layers: convolutions of images with one pixel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels import use_kernels
from ...kernels.shapes import FAST, FULL
from .conv import convolve
from .layout import TYPES, type_of_result


def linear(
    dtype: torch.dtype, input: Tensor, weight: Tensor, bias: Tensor | None = None, beside: Tensor | None = None
) -> Any:
    covered = use_kernels(input) and weight.ndim == 2 and input.ndim >= 1
    if not covered or input.dtype not in TYPES or weight.dtype not in TYPES or 0 in input.shape:
        return NotImplemented
    if input.shape[-1] != weight.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        return NotImplemented
    made, precision = type_of_result(dtype, input), FAST if dtype == torch.bfloat16 else FULL
    x = input.reshape(-1, input.shape[-1])[:, :, None, None]
    beside = beside if beside is None else beside.to(made).reshape(-1, len(weight))[:, :, None, None]
    y = convolve(x, weight[:, :, None, None], (1, 1), (0, 0), made, precision, bias, beside)
    return y.reshape(*input.shape[:-1], len(weight))


def linear_add(dtype: torch.dtype, beside: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if beside.dtype in (torch.float32, type_of_result(dtype, x)) and beside.shape == (*x.shape[:-1], len(weight)):
        return linear(dtype, x, weight, bias, beside)
    return NotImplemented
