"""Group norm with weights per client, alone or with a residual and a ReLU, and its gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .compiler import Block, constexpr, jit, tl
from .shapes import Norm, cdiv, channels_last, contiguous_rows, power_of_two

IMAGES_BLOCK = 32  # images at a time when the weights' gradients are summed over images


class NormTiles(NamedTuple):
    pixels: int  # of an image at a time; a power of two. An image that fits whole is read only once
    warps: int


def norm_tiles(pixels: int, c: int, grad: bool) -> NormTiles:
    """For `group_norm` and `group_norm_grad`; c counts channels with each group padded to a power of two.

    The gradient holds so many values per thread that with a whole large image, one program would fill a multiprocessor;
    it reads such an image twice, the second time from the L1 cache.
    """
    block = power_of_two(pixels, 1, max(1, (4096 if grad else 16384) // c))
    each = 16 if grad else 32  # values per thread
    return NormTiles(block, power_of_two(block * c // (32 * each), 2, 16))  # two warps: see `pool._pool_launch`


@jit
def _norm_kernel(
    x: Block,
    weight: Block,
    bias: Block,
    residual: Block,
    out: Block,
    mean: Block,
    rstd: Block,
    images: Block,
    x_step: Block,
    w_step: Block,
    b_step: Block,
    residual_step: Block,
    eps: Block,
    PIXELS: constexpr,
    GROUPS: constexpr,
    EACH: constexpr,
    SHARED: constexpr,
    RELU: constexpr,
    BP: constexpr,
    BG: constexpr,
    BC: constexpr,
) -> None:
    """One program: one image. EACH channels to a group; SHARED: all groups have the same EACH weights.

    Blocks are loaded as [pixels, channels], so that a warp's loads are contiguous, and then viewed as [pixels, groups,
    channels of a group], for which nothing moves. residual, if not None, is added after the norm and before the ReLU.
    If one block holds the image, the compiler merges the three loads into one.
    """
    pid = tl.program_id(0).to(tl.int64)
    s = pid // images
    pixel = tl.arange(0, BP)
    group = tl.arange(0, BG)
    c = tl.arange(0, BC)
    column = tl.arange(0, BG * BC)
    channel = column if BC == EACH else column // BC * EACH + column % BC
    place = pixel[:, None] * (GROUPS * EACH) + channel[None, :]
    known = ((column // BC < GROUPS) & (column % BC < EACH))[None, :]
    real = (group < GROUPS)[:, None] & (c < EACH)[None, :]
    weights = c[None, :] if SHARED else group[:, None] * EACH + c[None, :]
    wanted = (c < EACH)[None, :] if SHARED else real
    source = x + s * x_step + pid % images * (PIXELS * GROUPS * EACH)
    blocks: constexpr = (PIXELS + BP - 1) // BP

    total = tl.zeros((BP, BG * BC), dtype=tl.float32)
    for block in range(blocks):
        ok = known & (block * BP + pixel < PIXELS)[:, None]
        total += tl.load(source + (block * (BP * GROUPS * EACH) + place), mask=ok, other=0.0).to(tl.float32)
    # Channels first: a thread holds several of them, and pixels are spread over threads.
    middle = tl.sum(tl.sum(tl.reshape(total, (BP, BG, BC)), 2), 0)[None, :, None] / (PIXELS * EACH)

    total = tl.zeros((BP, BG, BC), dtype=tl.float32)
    for block in range(blocks):
        ok = known & (block * BP + pixel < PIXELS)[:, None]
        value = tl.load(source + (block * (BP * GROUPS * EACH) + place), mask=ok, other=0.0).to(tl.float32)
        centered = tl.reshape(value, (BP, BG, BC)) - middle
        centered = tl.where(real[None, :, :] & (block * BP + pixel < PIXELS)[:, None, None], centered, 0.0)
        total += centered * centered
    variance = tl.sum(tl.sum(total, 2), 0)[None, :, None] / (PIXELS * EACH)
    scale = 1 / tl.sqrt(variance + eps)

    a = tl.load(weight + s * w_step + weights, mask=wanted, other=0.0)[None, :, :] * scale
    b = tl.load(bias + s * b_step + weights, mask=wanted, other=0.0)[None, :, :]
    for block in range(blocks):
        ok = known & (block * BP + pixel < PIXELS)[:, None]
        value = tl.load(source + (block * (BP * GROUPS * EACH) + place), mask=ok, other=0.0).to(tl.float32)
        value = (tl.reshape(value, (BP, BG, BC)) - middle) * a + b
        value = tl.reshape(value, (BP, BG * BC))
        if residual is not None:
            at = residual + s * residual_step + pid % images * (PIXELS * GROUPS * EACH)
            value += tl.load(at + (block * (BP * GROUPS * EACH) + place), mask=ok, other=0.0).to(tl.float32)
        if RELU:
            value = tl.where(value < 0, 0.0, value)  # NaN stays, as in torch
        to = out + (pid * (PIXELS * GROUPS * EACH) + (block * (BP * GROUPS * EACH) + place))
        tl.store(to, value.to(out.dtype.element_ty), mask=ok)
    which = pid * GROUPS + group
    tl.store(mean + which, tl.reshape(middle, (BG,)), mask=group < GROUPS)
    tl.store(rstd + which, tl.reshape(scale, (BG,)), mask=group < GROUPS)


@jit
def _norm_grad_kernel(
    g: Block,
    x: Block,
    weight: Block,
    bias: Block,
    mean: Block,
    rstd: Block,
    made: Block,
    out: Block,
    out_residual: Block,
    parts: Block,
    images: Block,
    g_step: Block,
    x_step: Block,
    w_step: Block,
    b_step: Block,
    PIXELS: constexpr,
    GROUPS: constexpr,
    EACH: constexpr,
    SHARED: constexpr,
    RELU: constexpr,
    BP: constexpr,
    BG: constexpr,
    BC: constexpr,
) -> None:
    """One program: one image. parts [S, images, 2, weights] get its sums for the gradients of weight and bias.

    With h = (x - mean) rstd and u = weight g, the gradient of x is rstd (u - mean of u - h mean of (h u)), with means
    over the group; both are sums over channels of what parts get. RELU: g counts only where the ReLU's result is not 0.
    That result is made or, if made is None, recomputed from x, which saves a read. out_residual, if not None, gets
    this g.
    """
    pid = tl.program_id(0).to(tl.int64)
    s = pid // images
    pixel = tl.arange(0, BP)
    group = tl.arange(0, BG)
    c = tl.arange(0, BC)
    column = tl.arange(0, BG * BC)
    channel = column if BC == EACH else column // BC * EACH + column % BC
    place = pixel[:, None] * (GROUPS * EACH) + channel[None, :]
    known = ((column // BC < GROUPS) & (column % BC < EACH))[None, :]
    real = (group < GROUPS)[:, None] & (c < EACH)[None, :]
    weights = c[None, :] if SHARED else group[:, None] * EACH + c[None, :]
    wanted = (c < EACH)[None, :] if SHARED else real
    image = pid % images * (PIXELS * GROUPS * EACH)
    first = pid * (PIXELS * GROUPS * EACH)  # value of this image among all
    source = x + s * x_step + image
    grads = g + s * g_step + image
    blocks: constexpr = (PIXELS + BP - 1) // BP
    middle = tl.load(mean + (pid * GROUPS + group), mask=group < GROUPS, other=0.0)[None, :, None]
    scale = tl.load(rstd + (pid * GROUPS + group), mask=group < GROUPS, other=0.0)[None, :, None]
    w = tl.load(weight + s * w_step + weights, mask=wanted, other=0.0)[None, :, :]
    a = w * scale
    b = tl.load(bias + s * b_step + weights, mask=wanted, other=0.0)[None, :, :]

    by_weight = tl.zeros((BP, BG, BC), dtype=tl.float32)
    by_bias = tl.zeros((BP, BG, BC), dtype=tl.float32)
    for block in range(blocks):
        ok = known & (block * BP + pixel < PIXELS)[:, None]
        at = block * (BP * GROUPS * EACH) + place
        grad = tl.load(grads + at, mask=ok, other=0.0).to(tl.float32)
        if made is not None:
            grad = tl.where(tl.load(made + (first + at), mask=ok, other=0.0) <= 0, 0.0, grad)
        grad = tl.reshape(grad, (BP, BG, BC))
        centered = tl.reshape(tl.load(source + at, mask=ok, other=0.0).to(tl.float32), (BP, BG, BC)) - middle
        if RELU and made is None:
            grad = tl.where(centered * a + b <= 0, 0.0, grad)
        by_weight += grad * (centered * scale)
        by_bias += grad
    by_weight, by_bias = tl.split(tl.sum(tl.join(by_weight, by_bias), 0, keep_dims=True))  # one reduction for both
    lean = tl.sum(by_weight * w, 2, keep_dims=True) / (PIXELS * EACH)
    shift = tl.sum(by_bias * w, 2, keep_dims=True) / (PIXELS * EACH)

    for block in range(blocks):
        ok = known & (block * BP + pixel < PIXELS)[:, None]
        at = block * (BP * GROUPS * EACH) + place
        grad = tl.load(grads + at, mask=ok, other=0.0).to(tl.float32)
        if made is not None:
            grad = tl.where(tl.load(made + (first + at), mask=ok, other=0.0) <= 0, 0.0, grad)
        if out_residual is not None:
            tl.store(out_residual + (first + at), grad.to(out.dtype.element_ty), mask=ok)
        grad = tl.reshape(grad, (BP, BG, BC))
        centered = tl.reshape(tl.load(source + at, mask=ok, other=0.0).to(tl.float32), (BP, BG, BC)) - middle
        if RELU and made is None:
            grad = tl.where(centered * a + b <= 0, 0.0, grad)
        by_x = (grad * w - shift - centered * scale * lean) * scale
        tl.store(out + (first + at), tl.reshape(by_x, (BP, BG * BC)).to(out.dtype.element_ty), mask=ok)
    if SHARED:
        to = parts + (pid * (2 * EACH) + c)
        tl.store(to, tl.sum(tl.sum(by_weight, 0), 0), mask=c < EACH)
        tl.store(to + EACH, tl.sum(tl.sum(by_bias, 0), 0), mask=c < EACH)
    else:
        to = parts + (pid * (2 * GROUPS * EACH) + weights)
        tl.store(to, tl.sum(by_weight, 0), mask=real)  # over an axis of one
        tl.store(to + GROUPS * EACH, tl.sum(by_bias, 0), mask=real)


@jit
def _sum_images_kernel(
    parts: Block, out: Block, images: Block, stack: Block, BLOCKS: constexpr, C: constexpr, BI: constexpr, BV: constexpr
) -> None:
    """out[i, s, c] = the sum of parts[s, image, i, c] over images, in BLOCKS blocks of BI; i is 0 or 1."""
    tiles = (2 * C + BV - 1) // BV
    pid = tl.program_id(0)
    s = (pid // tiles).to(tl.int64)
    at = pid % tiles * BV + tl.arange(0, BV)  # i and c
    source = parts + s * images * (2 * C)
    total = tl.zeros((BI, BV), dtype=tl.float32)
    for block in range(BLOCKS):
        image = block * BI + tl.arange(0, BI)[:, None]
        ok = (image < images) & (at < 2 * C)[None, :]
        total += tl.load(source + (image * (2 * C) + at[None, :]), mask=ok, other=0.0)
    tl.store(out + ((at // C * stack + s) * C + at % C), tl.sum(total, 0), mask=at < 2 * C)


def group_norm(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, how: Norm, tiles: NormTiles | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x [S, n, c, h, w], weight and bias float32 [S, c] -> y like x; and the mean and 1 / standard deviation.

    Those two are float32 [S, n, groups]. If groups share them, weight and bias are [S, c / groups]. A residual, shaped
    like x, is added before the ReLU.
    """
    stack, n = x.shape[:2]
    shape = _norm_shape(x, how, tiles, grad=False)
    weight, w_step = contiguous_rows(weight)
    bias, b_step = contiguous_rows(bias)
    residual, residual_step = (None, 0) if residual is None else channels_last(residual, x.dtype)
    x, x_step = channels_last(x, x.dtype)
    out = x.new_empty((stack, *x.shape[1:]))
    mean, rstd = (x.new_empty((stack, n, how.groups), dtype=torch.float32) for _ in range(2))
    steps = (x_step, w_step, b_step, residual_step)
    with torch.cuda.device_of(x):
        _norm_kernel[(stack * n,)](x, weight, bias, residual, out, mean, rstd, n, *steps, how.eps, **shape)
    return out.permute(0, 1, 4, 2, 3), mean, rstd


def group_norm_grad(
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    made: Tensor | None,
    how: Norm,
    tiles: NormTiles | None = None,
) -> tuple[Tensor, ...]:
    """g [S, n, c, h, w] -> the gradients of x, in its type, and of weight and bias, in float32.

    made: the result of `group_norm`, if it ends with a ReLU. The residual's gradient comes last, if there is one.
    """
    stack, n, c = *x.shape[:2], weight.shape[1]
    shape = _norm_shape(x, how, tiles, grad=True)
    weight, w_step = contiguous_rows(weight)
    bias, b_step = contiguous_rows(bias)
    g, g_step = channels_last(g, x.dtype)
    made = made.permute(0, 1, 3, 4, 2).contiguous() if made is not None and how.residual else None
    x, x_step = channels_last(x, x.dtype)
    outs = [x.new_empty((stack, *x.shape[1:])) for _ in range(1 + how.residual)]
    parts = x.new_empty((stack, n, 2, c), dtype=torch.float32)
    sums = x.new_empty((2, stack, c), dtype=torch.float32)  # with their parameters' layout: see `stacked_fit`
    block = power_of_two(2 * c, 1, 64)
    steps = (g_step, x_step, w_step, b_step)
    to = (outs[0], outs[1] if how.residual else None, parts)
    with torch.cuda.device_of(x):
        _norm_grad_kernel[(stack * n,)](
            g, x, weight, bias, mean.contiguous(), rstd.contiguous(), made, *to, n, *steps, **shape
        )
        _sum_images_kernel[(stack * cdiv(2 * c, block),)](
            parts, sums, n, stack, BLOCKS=cdiv(n, IMAGES_BLOCK), C=c, BI=IMAGES_BLOCK, BV=block
        )
    by_x, *by_residual = (out.permute(0, 1, 4, 2, 3) for out in outs)
    return by_x, sums[0], sums[1], *by_residual


def _norm_shape(x: Tensor, how: Norm, tiles: NormTiles | None, grad: bool) -> dict[str, int]:
    pixels, each = x.shape[3] * x.shape[4], x.shape[2] // how.groups
    wide = {"BG": power_of_two(how.groups), "BC": power_of_two(each)}
    tiles = tiles or norm_tiles(pixels, wide["BG"] * wide["BC"], grad)
    shape = {"PIXELS": pixels, "GROUPS": how.groups, "EACH": each, "SHARED": how.shared, "BP": tiles.pixels, **wide}
    launch = {"num_warps": tiles.warps}
    if not grad and tiles.pixels >= pixels:
        launch["maxnreg"] = 64  # with a few more, a program of 16 warps has a multiprocessor for itself
    return shape | {"RELU": how.relu} | launch
