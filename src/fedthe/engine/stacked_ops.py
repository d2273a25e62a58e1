"""Convolution, pooling, norms and linear layers for many clients at once, put under a loss that was written for one.

    with StackedOps(torch.bfloat16):
        losses = torch.func.vmap(loss)(params, batches)

`vmap` makes of a convolution with a weight per client a grouped one, which is slow everywhere. Here it becomes
one kernel over all clients on a card, and a loop over the clients on the CPU. A client's result has the same bits
however many others are stacked with it.

Convolution is linear in the image and in the weight, so three functions hold all its derivatives of any order: the
convolution, its gradient by the image and its gradient by the weight. All three take stacked tensors, images
[S, n, c, h, w] and weights [S, o, c, kh, kw]; a level of `vmap` adds to S. Images are of the mode's type, weights
float32. Memory is [S, n, h, w, c] throughout: elementwise functions keep that, so nothing is copied between layers.
A linear layer is a convolution of images with one pixel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..data.augment import has_triton
from ..nets.layers import (
    add_positions,
    add_positions_plainly,
    attend,
    attend_plainly,
    conv_beside,
    conv_beside_plainly,
    linear_add,
    linear_add_plainly,
    norm_relu,
    norm_relu_plainly,
)

Pair = tuple[int, int]
Dim = int | None

TYPES = (torch.bfloat16, torch.float32)
FULL = "tf32x3"  # float32 products on tensor cores, as three of tf32; "ieee" is exact and many times slower
FAST = "tf32"

interpreting = False  # tests set this to run the kernels on the CPU, in Triton's interpreter


def use_kernels(x: Tensor) -> bool:
    return (x.is_cuda and has_triton()) or interpreting


def _run(function: type[Function], *inputs: Any) -> Any:
    return function.apply(*inputs)


def _kernels() -> Any:
    from . import kernels  # only here: there is no Triton on Windows, nor need of it on any CPU

    return kernels


@dataclass(frozen=True)
class Geometry:
    """Of a convolution. `size` is the image's (h, w); `precision` is that of float32 products on a card."""

    kernel: Pair
    stride: Pair
    padding: Pair
    size: Pair
    precision: str = FULL
    bias: bool = False  # there is one

    @property
    def out(self) -> Pair:
        return _out(self.size, self.kernel, self.stride, self.padding)


@dataclass(frozen=True)
class Pool:
    kernel: Pair
    stride: Pair
    padding: Pair
    size: Pair

    @property
    def out(self) -> Pair:
        return _out(self.size, self.kernel, self.stride, self.padding)


@dataclass(frozen=True)
class Norm:
    groups: int
    eps: float
    shared: bool = False  # all groups have the same weights
    beside: bool = False  # something is added to what was normalised
    relu: bool = False


@dataclass(frozen=True)
class Attention:
    heads: int
    width: int  # of a head
    precision: str = FULL


def _out(size: Pair, kernel: Pair, stride: Pair, padding: Pair) -> Pair:
    h, w = ((size[i] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in (0, 1))
    return h, w


# ---------------------------------------------------------------------------------------------------------------------
# Convolution
# ---------------------------------------------------------------------------------------------------------------------


class Convolve(Function):
    """x [S, n, c, h, w], w [S, o, c, kh, kw] -> [S, n, o, oh, ow]

    Plus a bias, float32 [S, o], and something beside, like the result, where these are not None.
    """

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, beside: Tensor | None, how: Geometry) -> Tensor:
        if use_kernels(x):
            return _kernels().conv(x, w, how, bias=bias, beside=beside)  # type: ignore[no-any-return]

        def one(x: Tensor, w: Tensor) -> Tensor:
            # Not torch.conv2d: a backward may run within the mode, which would send that here again.
            return torch.ops.aten.convolution(  # type: ignore[no-any-return]
                x, w, None, how.stride, how.padding, (1, 1), False, (0, 0), 1
            )

        y = _each(one, x, w)
        y = y if bias is None else y + bias[:, None, :, None, None]
        return (y if beside is None else y + beside).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, *_, ctx.how = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        by_x, by_w, by_bias, by_beside, _ = ctx.needs_input_grad
        slopes = (*_run(WeightGrad, x, g, ctx.how), None) if by_w or by_bias else (None, None)
        back = _run(InputGrad, g, w, None, ctx.how) if by_x else None
        return back, slopes[0], slopes[1], g if by_beside else None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Dim, ...], *inputs: Any) -> tuple[Tensor, int]:
        (y,), axis = _lift_by_weight(Convolve, info.batch_size, in_dims, inputs, images=(0, 3))
        return y, axis


class ConvolveBeside(Function):
    """As `Convolve`, without more to add; and x once more, so that both gradients by x come here to be added."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, how: Geometry) -> tuple[Tensor, Tensor]:
        return Convolve.forward(x, w, None, None, how), x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Geometry], output: tuple[Tensor, Tensor]) -> None:
        x, w, ctx.how = inputs
        ctx.save_for_backward(x, w)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, beside: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        x, w = ctx.saved_tensors
        by_x, by_w = ctx.needs_input_grad[:2]
        if g is None:
            return beside, None, None
        back = _run(InputGrad, g, w, beside, ctx.how) if by_x else None
        return back, _run(WeightGrad, x, g, ctx.how)[0] if by_w else None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Dim, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], Pair]:
        both, axis = _lift_by_weight(ConvolveBeside, info.batch_size, in_dims, inputs, images=(0,))
        return both, (axis, axis)


class InputGrad(Function):
    """g [S, n, o, oh, ow], w [S, o, c, kh, kw] -> [S, n, c, h, w]; plus something beside, like that, if not None"""

    @staticmethod
    def forward(g: Tensor, w: Tensor, beside: Tensor | None, how: Geometry) -> Tensor:
        if use_kernels(g):
            return _kernels().conv_input_grad(g, w, how, beside=beside)  # type: ignore[no-any-return]

        def one(g: Tensor, w: Tensor) -> Tensor:
            like = g.new_empty((len(g), *how.size, w.shape[1])).permute(0, 3, 1, 2)
            return _backward(g, like, w, how, 0)

        back = _each(one, g, w)
        return (back if beside is None else back + beside).to(g.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        g, w, _, ctx.how = inputs
        ctx.save_for_backward(g, w)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        g, w = ctx.saved_tensors
        by_g, by_w, by_beside, _ = ctx.needs_input_grad
        return (
            _run(Convolve, v, w, None, None, replace(ctx.how, bias=False)) if by_g else None,
            _run(WeightGrad, v, g, replace(ctx.how, bias=False))[0] if by_w else None,
            v if by_beside else None,
            None,
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Dim, ...], *inputs: Any) -> tuple[Tensor, int]:
        (back,), axis = _lift_by_weight(InputGrad, info.batch_size, in_dims, inputs, images=(0, 2))
        return back, axis


class WeightGrad(Function):
    """x [S, n, c, h, w], g [S, n, o, oh, ow] -> float32 [S, o, c, kh, kw]; and [S, o] by the bias, if there is one"""

    @staticmethod
    def forward(x: Tensor, g: Tensor, how: Geometry) -> tuple[Tensor, ...]:
        if use_kernels(x):
            return _kernels().conv_weight_grad(x, g, how)  # type: ignore[no-any-return]

        def one(x: Tensor, g: Tensor) -> Tensor:
            like = g.new_empty((g.shape[1], *how.kernel, x.shape[1])).permute(0, 3, 1, 2)
            return _backward(g, x, like, how, 1)

        return _each(one, x, g), *([g.float().sum((1, 3, 4))] if how.bias else [])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Geometry], output: tuple[Tensor, ...]) -> None:
        x, g, ctx.how = inputs
        ctx.save_for_backward(x, g)

    @staticmethod
    def backward(ctx: Any, u: Tensor, by_bias: Tensor | None = None) -> tuple[Tensor | None, Tensor | None, None]:
        x, g = ctx.saved_tensors
        by_x, by_g = ctx.needs_input_grad[:2]
        return (
            _run(InputGrad, g, u, None, ctx.how) if by_x else None,
            _run(Convolve, x, u, by_bias, None, ctx.how) if by_g else None,
            None,
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Dim, ...], x: Tensor, g: Tensor, how: Geometry) -> tuple[Any, tuple[int, ...]]:
        slopes = _lift(WeightGrad, info.batch_size, in_dims, (x, g), how)
        return slopes, (0,) * len(slopes)


def _lift(
    function: Any, size: int, in_dims: Sequence[Dim], tensors: Sequence[Tensor | None], how: Any
) -> tuple[Tensor, ...]:
    """The new axis and the stack that is there already become one stack."""
    folded = [t if t is None else _fold(t, dim, size) for t, dim in zip(tensors, in_dims, strict=False)]
    made = _run(function, *folded, how)
    return tuple(t.unflatten(0, (size, -1)) for t in (made if isinstance(made, tuple) else (made,)))


def _fold(t: Tensor, dim: Dim, size: int) -> Tensor:
    t = t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
    t = t.flatten(0, 1)
    # In this order of memory already here, not only in the kernel: what is saved for the backward is then the copy.
    return _images_last(t) if t.ndim == 5 and dim is not None and use_kernels(t) else t


def _lift_by_weight(
    function: Any, size: int, in_dims: Sequence[Dim], inputs: Sequence[Any], images: tuple[int, ...]
) -> tuple[tuple[Tensor, ...], int]:
    """As `_lift`; but weights that all share see the new axis as more images. images: which inputs are such.

    The other inputs are weights, and the last one tells how. Also gives where the new axis is.
    """
    *tensors, how = inputs
    own = any(dim is not None for i, dim in enumerate(in_dims) if i not in images)
    if in_dims[0] is None or own:
        return _lift(function, size, in_dims, tensors, how), 0

    def more(t: Tensor, dim: Dim) -> Tensor:
        t = t[None].expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
        return t.transpose(0, 1).flatten(1, 2)

    arranged = [more(t, in_dims[i]) if i in images and t is not None else t for i, t in enumerate(tensors)]
    made = _run(function, *arranged, how)
    return tuple(t.unflatten(1, (size, -1)) for t in (made if isinstance(made, tuple) else (made,))), 1


def _images_last(t: Tensor) -> Tensor:
    """[S, n, c, h, w] as memory [S, n, h, w, c]; copies only what lies otherwise."""
    return t.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def _each(one: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """one(a[s], b[s]) for every s, in float32. Layouts are the same for every S, since they choose the CPU's algorithm.

    Whole stacks are laid out at once; a row is then channels-last, which the CPU's convolutions like best.
    """
    rows = zip(_images_last(a.float()), _images_last(b.float()), strict=True)
    return torch.stack([one(x, y).permute(0, 2, 3, 1) for x, y in rows]).permute(0, 1, 4, 2, 3)


def _backward(g: Tensor, x: Tensor, w: Tensor, how: Geometry, which: int) -> Tensor:
    """The gradient by x (which = 0) or by w (1); the other one then only tells its shape, or nothing."""
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
    beside: Tensor | None = None,
) -> Tensor:
    """x [n, c, h, w], w [o, c, kh, kw] -> [n, o, oh, ow] of `dtype`; sums are float32.

    w is cast within, not before: its gradient then comes out in float32, not rounded to `dtype` on the way.
    """
    how = Geometry(_pair(w.shape[2:]), stride, padding, _pair(x.shape[2:]), precision, bias is not None)
    x, w = x.to(dtype), w.float()
    if use_kernels(x) and x.shape[1] % 4 and how.kernel != (1, 1):
        x, w = _fill_channels(x), _fill_channels(w)
    bias = bias if bias is None else bias.float()[None]
    beside = beside if beside is None else beside[None]
    y: Tensor = _run(Convolve, x[None], w[None], bias, beside, how)
    return y.squeeze(0)  # not y[0]: the way back through that fills a tensor with zeros first


def _fill_channels(t: Tensor) -> Tensor:
    """t [n, c, h, w] with channels of zeros up to a multiple of four: loads of 8 bytes take a third of the time."""
    return F.pad(t.permute(0, 2, 3, 1), (0, -t.shape[1] % 4)).permute(0, 3, 1, 2)


def empty_rows(shape: Sequence[int], like: Tensor) -> Tensor:
    """An empty stack of parameters, weights of convolutions in the order of memory that kernels read."""
    if len(shape) != 5:
        return like.new_empty(shape)
    s, o, c, h, w = shape
    return like.new_empty((s, o, h, w, c)).permute(0, 1, 4, 2, 3)


# ---------------------------------------------------------------------------------------------------------------------
# Max-pooling, on a card only: the CPU's own has all it takes
# ---------------------------------------------------------------------------------------------------------------------


class MaxPool(Function):
    """x [n, c, h, w] -> the largest of each window, and uint8 which place of the window that was: [n, c, oh, ow]"""

    @staticmethod
    def forward(x: Tensor, pool: Pool) -> tuple[Tensor, Tensor]:
        return _kernels().max_pool(x, pool)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Pool], output: tuple[Tensor, Tensor]) -> None:
        _, ctx.pool = inputs
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # no zeros for the places

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: Any) -> tuple[Tensor | None, None]:
        if g is None:
            return None, None
        return _run(PoolScatter, g, *ctx.saved_tensors, ctx.pool), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], x: Tensor, pool: Pool) -> tuple[tuple[Tensor, ...], Pair]:
        both = _run(MaxPool, x.movedim(in_dims[0], 0).flatten(0, 1), pool)
        return tuple(t.unflatten(0, (info.batch_size, -1)) for t in both), (0, 0)


class PoolScatter(Function):
    """g [n, c, oh, ow] and which places were taken -> [n, c, h, w]: the gradient of `MaxPool`, and of `PoolPick`"""

    @staticmethod
    def forward(g: Tensor, index: Tensor, pool: Pool) -> Tensor:
        return _kernels().max_pool_scatter(g, index, pool)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Pool], output: Tensor) -> None:
        _, index, ctx.pool = inputs
        ctx.save_for_backward(index)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, None, None]:
        return _run(PoolPick, v, *ctx.saved_tensors, ctx.pool), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Dim, Dim, None], g: Tensor, index: Tensor, pool: Pool) -> tuple[Tensor, int]:
        return _lift(PoolScatter, info.batch_size, in_dims, (g, index), pool)[0], 0


class PoolPick(Function):
    """x [n, c, h, w] at the places that were taken -> [n, c, oh, ow]"""

    @staticmethod
    def forward(x: Tensor, index: Tensor, pool: Pool) -> Tensor:
        return _kernels().max_pool_pick(x, index, pool)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Pool], output: Tensor) -> None:
        _, index, ctx.pool = inputs
        ctx.save_for_backward(index)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return _run(PoolScatter, g, *ctx.saved_tensors, ctx.pool), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Dim, Dim, None], x: Tensor, index: Tensor, pool: Pool) -> tuple[Tensor, int]:
        return _lift(PoolPick, info.batch_size, in_dims, (x, index), pool)[0], 0


# ---------------------------------------------------------------------------------------------------------------------
# Group and layer norm, on a card only
# ---------------------------------------------------------------------------------------------------------------------


class GroupNorm(Function):
    """x [S, n, c, h, w], weight and bias float32 [S, c] -> the same as x; and mean and 1 / deviation [S, n, groups]

    Where groups share their weights, weight and bias are [S, c / groups]. What is beside is like x, or None.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, beside: Tensor | None, how: Norm) -> tuple[Tensor, ...]:
        return _kernels().group_norm(x, weight, bias, beside, how)  # type: ignore[no-any-return]

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
        slopes = (*_run(GroupNormGrad, g, *ctx.saved_tensors, ctx.how), None)[:4]
        return *(t if asked else None for t, asked in zip(slopes, ctx.needs_input_grad, strict=False)), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Dim, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        outs = _lift(GroupNorm, info.batch_size, in_dims, inputs[:-1], inputs[-1])
        return outs, (0,) * len(outs)


class GroupNormGrad(Function):
    """g, x [S, n, c, h, w], weight and bias [S, c], mean and 1 / deviation [S, n, groups] -> by x, weight and bias

    made: what a relu after the norm gave, or None. The gradient by what was beside comes last, if there was something.
    """

    @staticmethod
    def forward(
        g: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        rstd: Tensor,
        made: Tensor | None,
        how: Norm,
    ) -> tuple[Tensor, ...]:
        return _kernels().group_norm_grad(g, x, weight, bias, mean, rstd, made, how)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        g, x, weight, *_, made, ctx.how = inputs
        ctx.save_for_backward(g, x, weight, made)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        """Few methods come here, so this is torch's own work; the mean and deviation are seen as functions of x."""
        *inputs, made = ctx.saved_tensors
        back: Any = torch.func.vjp(lambda g, x, weight: _group_norm_grads(g, x, weight, made, ctx.how), *inputs)[1]
        return *back(slopes), None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Dim, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        outs = _lift(GroupNormGrad, info.batch_size, in_dims, inputs[:-1], inputs[-1])
        return outs, (0,) * len(outs)


def _group_norm_grads(g: Tensor, x: Tensor, weight: Tensor, made: Tensor | None, how: Norm) -> tuple[Tensor, ...]:
    """`GroupNormGrad` in plain torch."""
    split, dims = (how.groups, -1), (3, 4, 5)  # of [S, n, groups, c / groups, h, w]
    g = g if made is None else torch.where(made <= 0, 0, g)
    slope, value = (t.float().unflatten(2, split) for t in (g, x))
    apart = value - value.mean(dims, keepdim=True)
    scale = (apart.square().mean(dims, keepdim=True) + how.eps).rsqrt()
    hat = apart * scale
    u = slope * weight.unflatten(1, (1 if how.shared else how.groups, -1))[:, None, :, :, None, None]
    by_x = scale * (u - u.mean(dims, keepdim=True) - hat * (u * hat).mean(dims, keepdim=True))
    over = (1, 2, 4, 5) if how.shared else (1, 4, 5)
    by_weight, by_bias = (t.sum(over).flatten(1) for t in (slope * hat, slope))
    return by_x.flatten(2, 3).to(x.dtype), by_weight, by_bias, *([g.to(x.dtype)] if how.beside else [])


# ---------------------------------------------------------------------------------------------------------------------
# Positions of tokens, and attention, on a card only. Attention has no weights: clients are more images
# ---------------------------------------------------------------------------------------------------------------------


class AddPositions(Function):
    """Tokens x [n, tokens, d] plus float32 positions [tokens, d], in x's type

    Torch's own sum would be float32, or else round the gradient by the positions.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, positions: Tensor) -> Tensor:
        return x + positions.to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor | None]:
        return g, g.sum(0, dtype=torch.float32) if ctx.needs_input_grad[1] else None


class Attend(Function):
    """qkv [n, tokens, 3 heads width] -> [n, tokens, heads width]"""

    @staticmethod
    def forward(qkv: Tensor, how: Attention) -> Tensor:
        return _kernels().attend(qkv, how)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Attention], output: Tensor) -> None:
        qkv, ctx.how = inputs
        ctx.save_for_backward(qkv)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _run(AttendGrad, g, *ctx.saved_tensors, ctx.how), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], qkv: Tensor, how: Attention) -> tuple[Tensor, int]:
        return _lift(Attend, info.batch_size, in_dims, (qkv,), how)[0], 0


class AttendGrad(Function):
    """g [n, tokens, heads width] by the result of `Attend`, and its qkv -> the gradient by that"""

    @staticmethod
    def forward(g: Tensor, qkv: Tensor, how: Attention) -> Tensor:
        return _kernels().attend_grad(g, qkv, how)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Attention], output: Tensor) -> None:
        g, qkv, ctx.how = inputs
        ctx.save_for_backward(g, qkv)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        """Few methods come here, so this is torch's own work."""

        def grads(g: Tensor, qkv: Tensor) -> Tensor:
            back: Any = torch.func.vjp(lambda qkv: attend_plainly(qkv.float(), ctx.how.heads), qkv)[1]
            return back(g.float())[0]  # type: ignore[no-any-return]

        back: Any = torch.func.vjp(grads, *ctx.saved_tensors)[1]
        return *back(v), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Dim, ...], g: Tensor, qkv: Tensor, how: Attention) -> tuple[Tensor, int]:
        return _lift(AttendGrad, info.batch_size, in_dims, (g, qkv), how)[0], 0


# ---------------------------------------------------------------------------------------------------------------------
# The mode
# ---------------------------------------------------------------------------------------------------------------------


class StackedOps(TorchFunctionMode):
    """Within it torch's layers named in `OURS` are ours. `dtype`: bfloat16 or float32, of images and tokens.

    bfloat16 lives from a convolution to the first function that meets float32 or adds up: there it is cast up. With
    `own_linear` a linear layer on a card runs in our kernel: its bits then do not depend on how many are stacked, as
    those of a batched product by cuBLAS may. What our functions do not cover falls through to torch's.
    """

    def __init__(self, dtype: torch.dtype, own_linear: bool = True) -> None:
        super().__init__()
        if dtype not in TYPES:
            raise ValueError(f"dtype must be torch.bfloat16 or torch.float32, not {dtype}.")
        self.dtype = dtype
        self.own_linear = own_linear

    def type_of(self, x: Tensor) -> torch.dtype:
        """Of what a layer makes of tokens x [n, tokens, d]; plain vectors stay float32, since logits are such."""
        return self.dtype if x.ndim > 2 else torch.float32

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        ours = OURS.get(func)
        if ours is not None:
            answer = ours(self, *args, **kwargs)
            if answer is not NotImplemented:
                return answer
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


def _keeps_types(func: Callable[..., Any]) -> bool:
    """Of functions that write into an argument, ask for it by identity, or only look at another's type or shape."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in KEEP_TYPES or name.endswith(("_as", "_like")) or name.startswith("_foreach")


# On the CPU these ask vmap about channels-last memory, which it cannot say; on a card they make the copy themselves.
PLAIN_ORDER = {F.group_norm, torch.group_norm}
KEEP_TYPES = {"grad", "backward", "to", "__setitem__", "__set__", "can_cast", "promote_types", "result_type"}
KEEP_TYPES |= {
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}


def _conv2d(
    mode: StackedOps,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    if isinstance(padding, str) or groups != 1 or _pair(dilation) != (1, 1) or not _fits(input, weight):
        return NotImplemented
    how = Geometry(_pair(weight.shape[2:]), _pair(stride), _pair(padding), _pair(input.shape[-2:]))
    if input.shape[-3] != weight.shape[1] or min(how.out) < 1:
        return NotImplemented  # torch says what is wrong
    single = input.ndim == 3
    y = convolve(input[None] if single else input, weight, how.stride, how.padding, mode.dtype)
    if bias is not None:
        y = y + bias[:, None, None]
    return y.squeeze(0) if single else y


def _conv_beside(mode: StackedOps, x: Tensor, weight: Tensor, stride: int = 1, padding: int = 0) -> Any:
    covered = use_kernels(x) and x.ndim == 4 and _fits(x, weight) and x.dtype == mode.dtype
    how = Geometry(_pair(weight.shape[2:]), _pair(stride), _pair(padding), _pair(x.shape[-2:]))
    if not covered or x.shape[1] != weight.shape[1] or x.shape[1] % 4 or min(how.out) < 1:
        with mode:  # which is off in here
            return conv_beside_plainly(x, weight, stride, padding)
    return tuple(t.squeeze(0) for t in _run(ConvolveBeside, x[None], weight.float()[None], how))


def _fits(input: Tensor, weight: Tensor) -> bool:
    shapes = input.ndim in (3, 4) and weight.ndim == 4 and 0 not in input.shape and 0 not in weight.shape
    return shapes and input.dtype in TYPES and weight.dtype in TYPES


def _max_pool2d(
    mode: StackedOps,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    covered = use_kernels(input) and input.ndim in (3, 4) and 0 not in input.shape and input.dtype in TYPES
    if not covered or _pair(dilation) != (1, 1) or ceil_mode or return_indices:
        return NotImplemented
    kernel, padding = _pair(kernel_size), _pair(padding)
    stride = kernel if stride is None or stride == [] or stride == () else _pair(stride)
    pool = Pool(kernel, stride, padding, _pair(input.shape[-2:]))
    wide = any(2 * padding[i] > kernel[i] for i in (0, 1))
    if wide or min(pool.out) < 1 or kernel[0] * kernel[1] > 255:  # torch's to refuse; more than a uint8 can tell
        return NotImplemented
    y, _ = _run(MaxPool, input[None] if input.ndim == 3 else input, pool)
    return y.squeeze(0) if input.ndim == 3 else y


def _group_norm(
    mode: StackedOps,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    """In the input's type, with float32 within."""
    return _norm_images(input, weight, bias, None, Norm(num_groups, eps))


def _norm_relu(
    mode: StackedOps,
    x: Tensor,
    groups: int,
    weight: Tensor,
    bias: Tensor,
    beside: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    y: Any = NotImplemented
    if beside is None or (beside.shape == x.shape and beside.dtype == x.dtype):
        y = _norm_images(x, weight, bias, beside, Norm(groups, eps, beside=beside is not None, relu=True))
    if y is NotImplemented:
        with mode:  # which is off in here, and has more to say about each part
            return norm_relu_plainly(x, groups, weight, bias, beside, eps)
    return y


def _norm_images(x: Tensor, weight: Tensor | None, bias: Tensor | None, beside: Tensor | None, how: Norm) -> Any:
    covered = use_kernels(x) and x.ndim == 4 and 0 not in x.shape and x.dtype in TYPES
    if not covered or how.groups < 1 or x.shape[1] % how.groups or x.numel() == how.groups:
        return NotImplemented
    return _norm(x, weight, bias, beside, x.shape[1], how)


LAYER_BLOCK = 8192  # values of rows that a kernel normalises at once


def _layer_norm(
    mode: StackedOps,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    """With float32 within. Rows are groups of an image with one pixel, as many as make a good block."""
    covered = use_kernels(input) and input.ndim > 1 and 0 not in input.shape and input.dtype in TYPES
    width = input.shape[-1] if input.ndim else 0
    if not covered or tuple(normalized_shape) != (width,) or width > LAYER_BLOCK:
        return NotImplemented
    block = 1 << (LAYER_BLOCK // width).bit_length() - 1  # a power of two
    groups = math.gcd(input.numel() // width, block)
    images = input.to(mode.type_of(input)).reshape(-1, groups * width)[:, :, None, None]
    y = _norm(images, weight, bias, None, width, Norm(groups, eps, shared=True))
    return y if y is NotImplemented else y.reshape(input.shape)


def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, beside: Tensor | None, width: int, how: Norm) -> Any:
    if any(t is not None and (t.shape != (width,) or t.dtype not in TYPES) for t in (weight, bias)):
        return NotImplemented
    weight = torch.ones(width, device=x.device) if weight is None else weight.float()
    bias = torch.zeros(width, device=x.device) if bias is None else bias.float()
    beside = beside if beside is None else beside[None]
    return _run(GroupNorm, x[None], weight[None], bias[None], beside, how)[0].squeeze(0)


def _linear(
    mode: StackedOps, input: Tensor, weight: Tensor, bias: Tensor | None = None, beside: Tensor | None = None
) -> Any:
    covered = mode.own_linear and use_kernels(input) and weight.ndim == 2 and input.ndim >= 1
    if not covered or input.dtype not in TYPES or weight.dtype not in TYPES or 0 in input.shape:
        return NotImplemented
    if input.shape[-1] != weight.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        return NotImplemented
    dtype, precision = mode.type_of(input), FAST if mode.dtype == torch.bfloat16 else FULL
    x = input.reshape(-1, input.shape[-1])[:, :, None, None]
    beside = beside if beside is None else beside.to(dtype).reshape(-1, len(weight))[:, :, None, None]
    y = convolve(x, weight[:, :, None, None], (1, 1), (0, 0), dtype, precision, bias, beside)
    return y.reshape(*input.shape[:-1], len(weight))


def _linear_add(mode: StackedOps, beside: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    y: Any = NotImplemented
    if beside.dtype in (torch.float32, mode.type_of(x)) and beside.shape == (*x.shape[:-1], len(weight)):
        y = _linear(mode, x, weight, bias, beside)
    if y is NotImplemented:
        with mode:
            return linear_add_plainly(beside, x, weight, bias)
    return y


def _add_positions(mode: StackedOps, x: Tensor, positions: Tensor) -> Any:
    covered = use_kernels(x) and x.ndim == 3 and x.shape[1:] == positions.shape
    if covered and x.dtype == mode.dtype == torch.bfloat16 and positions.dtype == torch.float32:
        return _run(AddPositions, x, positions)
    with mode:
        return add_positions_plainly(x, positions)


ATTEND_MOST = 64  # tokens, and values of a head, that a kernel holds at once


def _attend(mode: StackedOps, qkv: Tensor, heads: int) -> Any:
    width = qkv.shape[-1] // (3 * heads)
    covered = use_kernels(qkv) and qkv.ndim == 3 and 0 not in qkv.shape and qkv.dtype in TYPES
    if not covered or qkv.shape[-1] != 3 * heads * width or max(qkv.shape[1], width) > ATTEND_MOST:
        with mode:
            return attend_plainly(qkv, heads)
    return _run(Attend, qkv.to(mode.dtype), Attention(heads, width))


def _pair(value: Any) -> Pair:
    if isinstance(value, int):
        return value, value
    first, *rest = (int(v) for v in value)
    return first, rest[0] if rest else first


SUMS = {torch.sum, torch.mean, Tensor.sum, Tensor.mean}
OURS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.conv2d: _conv2d,
    F.conv2d: _conv2d,
    torch.max_pool2d: _max_pool2d,
    F.max_pool2d: _max_pool2d,
    torch.group_norm: _group_norm,
    F.group_norm: _group_norm,
    torch.layer_norm: _layer_norm,
    F.layer_norm: _layer_norm,
    F.linear: _linear,
    conv_beside: _conv_beside,
    norm_relu: _norm_relu,
    add_positions: _add_positions,
    linear_add: _linear_add,
    attend: _attend,
}
