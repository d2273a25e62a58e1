"""Convolution, and its derivatives of any order; linear layers are convolutions of images with one pixel.

A convolution is linear in the image and in the weight, so three functions are enough: the convolution, the image's
gradient and the weight's. All three take stacked tensors, images [S, n, c, h, w] and weights [S, o, c, kh, kw]; a level
of `vmap` adds to S. Images are of the mode's type, weights float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...kernels import use_kernels
from ...kernels.shapes import FAST, FULL, Geometry, Pair, pair
from .stacked import TYPES, Stacked, channels_last, run, type_of_result


class Convolve(Stacked):
    """x [S, n, c, h, w], w [S, o, c, kh, kw] -> [S, n, o, oh, ow]

    Plus a bias, float32 [S, o], and a residual, like the result, unless these are None.
    """

    images = (0, 3)
    saved = (0, 1)

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, how: Geometry) -> Tensor:
        if use_kernels(x):
            from ...kernels.conv import conv

            return conv(x, w, how, bias=bias, residual=residual)

        def one(x: Tensor, w: Tensor) -> Tensor:
            # Not torch.conv2d: a backward may run within the mode, which would dispatch that here again.
            return torch.ops.aten.convolution(  # type: ignore[no-any-return]
                x, w, None, how.stride, how.padding, (1, 1), False, (0, 0), 1
            )

        y = _each(one, x, w)
        y = y if bias is None else y + bias[:, None, :, None, None]
        return (y if residual is None else y + residual).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        by_x, by_w, by_bias, by_residual, _ = ctx.needs_input_grad
        gradients = (*run(WeightGrad, x, g, ctx.how), None) if by_w or by_bias else (None, None)
        back = run(InputGrad, g, w, None, ctx.how) if by_x else None
        return back, gradients[0], gradients[1], g if by_residual else None, None


class ConvolveResidual(Stacked):
    """A convolution of x, and x itself as the residual, so that the backward adds up both gradients of x."""

    images = (0,)

    @staticmethod
    def forward(x: Tensor, w: Tensor, how: Geometry) -> tuple[Tensor, Tensor]:
        return Convolve.forward(x, w, None, None, how), x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Geometry], output: tuple[Tensor, Tensor]) -> None:
        x, w, ctx.how = inputs
        ctx.save_for_backward(x, w)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, residual: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        x, w = ctx.saved_tensors
        by_x, by_w = ctx.needs_input_grad[:2]
        if g is None:
            return residual, None, None
        back = run(InputGrad, g, w, residual, ctx.how) if by_x else None
        return back, run(WeightGrad, x, g, ctx.how)[0] if by_w else None, None


class InputGrad(Stacked):
    """g [S, n, o, oh, ow], w [S, o, c, kh, kw] -> [S, n, c, h, w]; plus a residual of that shape, unless None"""

    images = (0, 2)
    saved = (0, 1)

    @staticmethod
    def forward(g: Tensor, w: Tensor, residual: Tensor | None, how: Geometry) -> Tensor:
        if use_kernels(g):
            from ...kernels.conv import conv_input_grad

            return conv_input_grad(g, w, how, residual=residual)

        def one(g: Tensor, w: Tensor) -> Tensor:
            like = g.new_empty((len(g), *how.size, w.shape[1])).permute(0, 3, 1, 2)
            return _backward(g, like, w, how, 0)

        back = _each(one, g, w)
        return (back if residual is None else back + residual).to(g.dtype)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        g, w = ctx.saved_tensors
        by_g, by_w, by_residual, _ = ctx.needs_input_grad
        return (
            run(Convolve, v, w, None, None, replace(ctx.how, bias=False)) if by_g else None,
            run(WeightGrad, v, g, replace(ctx.how, bias=False))[0] if by_w else None,
            v if by_residual else None,
            None,
        )


class WeightGrad(Stacked):
    """x [S, n, c, h, w], g [S, n, o, oh, ow] -> float32 [S, o, c, kh, kw]; and the bias's gradient [S, o], if any"""

    saved = (0, 1)

    @staticmethod
    def forward(x: Tensor, g: Tensor, how: Geometry) -> tuple[Tensor, ...]:
        if use_kernels(x):
            from ...kernels.conv_weight_grad import conv_weight_grad

            return conv_weight_grad(x, g, how)

        def one(x: Tensor, g: Tensor) -> Tensor:
            like = g.new_empty((g.shape[1], *how.kernel, x.shape[1])).permute(0, 3, 1, 2)
            return _backward(g, x, like, how, 1)

        return _each(one, x, g), *([g.float().sum((1, 3, 4))] if how.bias else [])

    @staticmethod
    def backward(ctx: Any, u: Tensor, by_bias: Tensor | None = None) -> tuple[Tensor | None, Tensor | None, None]:
        x, g = ctx.saved_tensors
        by_x, by_g = ctx.needs_input_grad[:2]
        return (
            run(InputGrad, g, u, None, ctx.how) if by_x else None,
            run(Convolve, x, u, by_bias, None, ctx.how) if by_g else None,
            None,
        )


def _each(one: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """one(a[s], b[s]) for every s, in float32. The layout picks the CPU's algorithm, so it must not depend on S.

    Whole stacks are laid out at once; rows are then channels-last, with which the CPU's convolutions are fastest.
    """
    rows = zip(channels_last(a.float()), channels_last(b.float()), strict=True)
    return torch.stack([one(x, y).permute(0, 2, 3, 1) for x, y in rows]).permute(0, 1, 4, 2, 3)


def _backward(g: Tensor, x: Tensor, w: Tensor, how: Geometry, which: int) -> Tensor:
    """The gradient of x (which = 0) or w (1), whose values are not read."""
    mask = [which == 0, which == 1, False]
    return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
        g, x, w, None, how.stride, how.padding, (1, 1), False, (0, 0), 1, mask
    )[which]


def convolve(
    x: Tensor,
    w: Tensor,
    stride: Pair,
    padding: Pair,
    dtype: torch.dtype,
    precision: str = FULL,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """x [n, c, h, w], w [o, c, kh, kw] -> [n, o, oh, ow] of `dtype`; sums are float32.

    w is cast inside: its gradient then is float32, never rounded to `dtype`.
    """
    how = Geometry(pair(w.shape[2:]), stride, padding, pair(x.shape[2:]), precision, bias is not None)
    x, w = x.to(dtype), w.float()
    if use_kernels(x) and x.shape[1] % 4 and how.kernel != (1, 1):
        x, w = _fill_channels(x), _fill_channels(w)
    bias = bias if bias is None else bias.float()[None]
    residual = residual if residual is None else residual[None]
    y: Tensor = run(Convolve, x[None], w[None], bias, residual, how)
    return y.squeeze(0)  # not y[0], whose backward first fills a tensor with zeros


def _fill_channels(t: Tensor) -> Tensor:
    """t [n, c, h, w] padded with zero channels to a multiple of four: loads of 8 bytes take a third of the time."""
    return F.pad(t.permute(0, 2, 3, 1), (0, -t.shape[1] % 4)).permute(0, 3, 1, 2)


def conv2d(
    dtype: torch.dtype,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    if isinstance(padding, str) or groups != 1 or pair(dilation) != (1, 1) or not _fits(input, weight):
        return NotImplemented
    how = Geometry(pair(weight.shape[2:]), pair(stride), pair(padding), pair(input.shape[-2:]))
    if input.shape[-3] != weight.shape[1] or min(how.out) < 1:
        return NotImplemented  # torch raises the error
    single = input.ndim == 3
    y = convolve(input[None] if single else input, weight, how.stride, how.padding, dtype)
    if bias is not None:
        y = y + bias[:, None, None]
    return y.squeeze(0) if single else y


def conv_residual(dtype: torch.dtype, x: Tensor, weight: Tensor, stride: int = 1, padding: int = 0) -> Any:
    covered = use_kernels(x) and x.ndim == 4 and _fits(x, weight) and x.dtype == dtype
    how = Geometry(pair(weight.shape[2:]), pair(stride), pair(padding), pair(x.shape[-2:]))
    if not covered or x.shape[1] != weight.shape[1] or x.shape[1] % 4 or min(how.out) < 1:
        return NotImplemented
    return tuple(t.squeeze(0) for t in run(ConvolveResidual, x[None], weight.float()[None], how))


def _fits(input: Tensor, weight: Tensor) -> bool:
    shapes = input.ndim in (3, 4) and weight.ndim == 4 and 0 not in input.shape and 0 not in weight.shape
    return shapes and input.dtype in TYPES and weight.dtype in TYPES


def linear(
    dtype: torch.dtype, input: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Any:
    covered = use_kernels(input) and weight.ndim == 2 and input.ndim >= 1
    if not covered or input.dtype not in TYPES or weight.dtype not in TYPES or 0 in input.shape:
        return NotImplemented
    if input.shape[-1] != weight.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        return NotImplemented
    made, precision = type_of_result(dtype, input), FAST if dtype == torch.bfloat16 else FULL
    x = input.reshape(-1, input.shape[-1])[:, :, None, None]
    residual = residual if residual is None else residual.to(made).reshape(-1, len(weight))[:, :, None, None]
    y = convolve(x, weight[:, :, None, None], (1, 1), (0, 0), made, precision, bias, residual)
    return y.reshape(*input.shape[:-1], len(weight))


def linear_add(dtype: torch.dtype, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if residual.dtype in (torch.float32, type_of_result(dtype, x)) and residual.shape == (*x.shape[:-1], len(weight)):
        return linear(dtype, x, weight, bias, residual)
    return NotImplemented
