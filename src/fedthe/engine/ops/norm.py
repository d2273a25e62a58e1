"""Group and layer norm, on a GPU only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels import use_kernels
from ...kernels.shapes import Norm
from .stacked import TYPES, Stacked, run, type_of_result

LAYER_BLOCK = 8192  # values that a kernel normalizes at once


class GroupNorm(Stacked):
    """x [S, n, c, h, w], weight and bias float32 [S, c] -> y like x; and mean and 1 / standard deviation [S, n, groups]

    If groups share their weights, weight and bias are [S, c / groups]. A residual is like x, or None.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, how: Norm) -> tuple[Tensor, ...]:
        from ...kernels.norm import group_norm

        return group_norm(x, weight, bias, residual, how)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, _, ctx.how = inputs
        y, mean, rstd = output
        ctx.save_for_backward(x, weight, bias, mean, rstd, y if ctx.how.relu else None)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if g is None:
            return None, None, None, None, None
        gradients = (*run(GroupNormGrad, g, *ctx.saved_tensors, ctx.how), None)[:4]
        return *(t if asked else None for t, asked in zip(gradients, ctx.needs_input_grad, strict=False)), None


class GroupNormGrad(Stacked):
    """g, the inputs and results of `GroupNorm` -> the gradients of x, weight and bias

    made: the result, if it ends with a ReLU, or None. The residual's gradient comes last, if there is one.
    """

    saved = (0, 1, 2, 6)

    @staticmethod
    def forward(
        g: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, made: Tensor | None, how: Norm
    ) -> tuple[Tensor, ...]:
        from ...kernels.norm import group_norm_grad

        return group_norm_grad(g, x, weight, bias, mean, rstd, made, how)

    @staticmethod
    def backward(ctx: Any, *v: Tensor) -> tuple[Tensor | None, ...]:
        """In plain torch: few methods need it. Mean and standard deviation are functions of x here."""
        *inputs, made = ctx.saved_tensors
        back: Any = torch.func.vjp(lambda g, x, weight: _group_norm_grads(g, x, weight, made, ctx.how), *inputs)[1]
        return *back(v), None, None, None, None, None


def _group_norm_grads(g: Tensor, x: Tensor, weight: Tensor, made: Tensor | None, how: Norm) -> tuple[Tensor, ...]:
    """`GroupNormGrad` in plain torch."""
    split, dims = (how.groups, -1), (3, 4, 5)  # of [S, n, groups, c / groups, h, w]
    g = g if made is None else torch.where(made <= 0, 0, g)
    gradient, value = (t.float().unflatten(2, split) for t in (g, x))
    centered = value - value.mean(dims, keepdim=True)
    scale = (centered.square().mean(dims, keepdim=True) + how.eps).rsqrt()
    hat = centered * scale
    u = gradient * weight.unflatten(1, (1 if how.shared else how.groups, -1))[:, None, :, :, None, None]
    by_x = scale * (u - u.mean(dims, keepdim=True) - hat * (u * hat).mean(dims, keepdim=True))
    over = (1, 2, 4, 5) if how.shared else (1, 4, 5)
    by_weight, by_bias = (t.sum(over).flatten(1) for t in (gradient * hat, gradient))
    return by_x.flatten(2, 3).to(x.dtype), by_weight, by_bias, *([g.to(x.dtype)] if how.residual else [])


def group_norm(
    dtype: torch.dtype,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    """In the input's type, computed in float32."""
    return _norm_images(input, weight, bias, None, Norm(num_groups, eps))


def norm_relu(
    dtype: torch.dtype,
    x: Tensor,
    groups: int,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        return NotImplemented
    return _norm_images(x, weight, bias, residual, Norm(groups, eps, residual=residual is not None, relu=True))


def _norm_images(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, how: Norm) -> Any:
    covered = use_kernels(x) and x.ndim == 4 and 0 not in x.shape and x.dtype in TYPES
    if not covered or how.groups < 1 or x.shape[1] % how.groups or x.numel() == how.groups:
        return NotImplemented
    return _norm(x, weight, bias, residual, x.shape[1], how)


def layer_norm(
    dtype: torch.dtype,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    """Computed in float32. Rows are groups of images with one pixel, as many as make a good block."""
    covered = use_kernels(input) and input.ndim > 1 and 0 not in input.shape and input.dtype in TYPES
    width = input.shape[-1] if input.ndim else 0
    if not covered or tuple(normalized_shape) != (width,) or width > LAYER_BLOCK:
        return NotImplemented
    block = 1 << (LAYER_BLOCK // width).bit_length() - 1  # a power of two
    groups = math.gcd(input.numel() // width, block)
    images = input.to(type_of_result(dtype, input)).reshape(-1, groups * width)[:, :, None, None]
    y = _norm(images, weight, bias, None, width, Norm(groups, eps, shared=True))
    return y if y is NotImplemented else y.reshape(input.shape)


def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, width: int, how: Norm) -> Any:
    if any(t is not None and (t.shape != (width,) or t.dtype not in TYPES) for t in (weight, bias)):
        return NotImplemented
    weight = torch.ones(width, device=x.device) if weight is None else weight.float()
    bias = torch.zeros(width, device=x.device) if bias is None else bias.float()
    residual = residual if residual is None else residual[None]
    return run(GroupNorm, x[None], weight[None], bias[None], residual, how)[0].squeeze(0)
