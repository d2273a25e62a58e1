"""The gradients of a convolution's weight and bias, one of each per client."""

from __future__ import annotations

import torch
from torch import Tensor

from .compiler import WIDEN, Block, constexpr, jit, tl
from .conv_tiles import Tiles, conv_constants, pixels_in_a_row, sweeps_of, weight_grad_splits, weight_grad_tiles
from .shapes import Geometry, cdiv, channels_last

SUM_BLOCK = 1024  # weights per program when partial gradients are summed


@jit
def _weight_grad_kernel(
    x: Block,
    g: Block,
    out: Block,
    by_bias: Block,
    rows: Block,
    x_step: Block,
    g_step: Block,
    out_step: Block,
    splits: Block,
    BLOCKS: constexpr,
    H: constexpr,
    W: constexpr,
    C: constexpr,
    OUT_H: constexpr,
    OUT_W: constexpr,
    O: constexpr,  # noqa: E741
    KH: constexpr,
    KW: constexpr,
    STRIDE_Y: constexpr,
    STRIDE_X: constexpr,
    PAD_Y: constexpr,
    PAD_X: constexpr,
    INSIDE: constexpr,
    PRECISION: constexpr,
    PIXELS: constexpr,
    BM: constexpr,
    BN: constexpr,
    BK: constexpr,
) -> None:
    """out[split, s, o, tap, c] = sum over the split's positions m of x[s, where tap meets m, c] g[s, m, o].

    A split has BLOCKS blocks of BK positions; the last one may have fewer. out_step: the stride of splits.
    by_bias[split, s, o], if not None, gets the sum of g. A position is PIXELS pixels side by side, with one span of the
    image for all their windows, as in `conv._conv_kernel`; each of these pixels is a split of its own.
    """
    ACROSS: constexpr = OUT_W // PIXELS
    SPAN: constexpr = (PIXELS - 1) * STRIDE_X + KW
    LINE: constexpr = SPAN * C
    tiles_m = (KH * LINE + BM - 1) // BM
    tiles_n = (PIXELS * O + BN - 1) // BN
    pid = tl.program_id(0)
    k = pid % tiles_m * BM + tl.arange(0, BM)  # a row of the result: tap and channel
    column = pid // tiles_m % tiles_n * BN + tl.arange(0, BN)  # of the result: pixel and output channel
    split = pid // (tiles_m * tiles_n) % splits
    s = (pid // (tiles_m * tiles_n * splits)).to(tl.int64)

    ky = (k // LINE)[:, None]
    kx = (k // C % SPAN)[:, None]
    offset = (ky * W + kx) * C + (k % C)[:, None]
    images = x + s * x_step
    grads = g + s * g_step
    # Few masks are faster than many: put what is no tap or no position far below the image.
    FAR: constexpr = 1 << 20
    SAME: constexpr = OUT_H == H and OUT_W == W and STRIDE_Y == 1 and STRIDE_X == 1  # a window per pixel
    below = tl.where((k < KH * LINE)[:, None], ky, FAR)

    total = tl.zeros((BN,), dtype=tl.float32)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for block in range(BLOCKS):
        m = (split * BLOCKS + block) * BK + tl.arange(0, BK)
        # Unsigned: the compiler does not know that m >= 0 and would emit three times as many instructions.
        image = (m.to(tl.uint32) // (OUT_H * ACROSS)).to(tl.int64)
        place = (m.to(tl.uint32) % (OUT_H * ACROSS)).to(tl.int32)
        top = place // ACROSS * STRIDE_Y - PAD_Y
        left = place % ACROSS * (PIXELS * STRIDE_X) - PAD_X
        if SAME:
            corner = images + (m.to(tl.int64) * (PIXELS * C) - (PAD_Y * W + PAD_X) * C)
        else:
            corner = images + image * (H * W * C) + (top * W + left) * C
        if INSIDE:
            ok = (m < rows)[None, :] & (k < KH * LINE)[:, None]
        else:
            y = tl.where(m < rows, top, FAR)[None, :] + below
            z = left[None, :] + kx
            ok = (y >= 0) & (y < H) & (z >= 0) & (z < W)
        a = tl.load(corner[None, :] + offset, mask=ok, other=0.0)
        at = grads + (m.to(tl.int64) * (PIXELS * O))[:, None] + column[None, :]
        if PIXELS * O % BN == 0:
            b = tl.load(at, mask=(m < rows)[:, None], other=0.0)
        else:
            b = tl.load(at, mask=(m < rows)[:, None] & (column < PIXELS * O)[None, :], other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if by_bias is not None:
            total += tl.sum(b.to(tl.float32), 0)

    pixel = column // O
    o = column % O
    part = split.to(tl.int64) * PIXELS + pixel
    if by_bias is not None:  # the same in all tiles of taps: the first one stores it
        to = by_bias + part * (out_step // (KH * KW * C)) + s * O + o
        tl.store(to, total, mask=(column < PIXELS * O) & (pid % tiles_m == 0))
    tap = kx - (pixel * STRIDE_X)[None, :]
    to = (part * out_step + s * (O * KH * KW * C) + o * (KH * KW * C))[None, :]
    to += (ky * KW + tap) * C + (k % C)[:, None]
    known = (k < KH * LINE)[:, None] & (column < PIXELS * O)[None, :] & (tap >= 0) & (tap < KW)
    tl.store(out + to, acc, mask=known)


@jit
def _sum_kernel(parts: Block, out: Block, values: Block, SPLITS: constexpr, BLOCK: constexpr) -> None:
    """out[i] = parts[0, i] + parts[1, i] + ..., in that order; the order of torch's own sum may depend on S."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts + at, mask=at < values, other=0.0)
    for _ in range(1, SPLITS):
        parts += values
        total += tl.load(parts + at, mask=at < values, other=0.0)
    tl.store(out + at, total, mask=at < values)


def conv_weight_grad(
    x: Tensor, g: Tensor, how: Geometry, tiles: Tiles | None = None, splits: int | None = None
) -> tuple[Tensor, ...]:
    """x [S, n, c, h, w], g [S, n, o, oh, ow] -> the weight's gradient, float32 [S, o, c, kh, kw].

    With a bias, also its gradient, float32 [S, o].
    """
    stack, n, c = x.shape[:3]
    o, taps = g.shape[2], how.kernel[0] * how.kernel[1]
    positions = n * how.out[0] * how.out[1]
    sweeps = sweeps_of(how)
    if tiles is None:
        pixels = pixels_in_a_row(c, sweeps[1], x.dtype)
        tiles = weight_grad_tiles(positions, c, o, taps, x.dtype, pixels)
    if how.out[1] % tiles.pixels:
        tiles = tiles._replace(pixels=1)
    rows = positions // tiles.pixels
    blocks = cdiv(cdiv(rows, tiles.k), splits or weight_grad_splits(positions, c, o, taps, tiles))
    splits = cdiv(rows, blocks * tiles.k)  # none is empty
    span = (tiles.pixels - 1) * how.stride[1] + how.kernel[1]
    programs = cdiv(how.kernel[0] * span * c, tiles.m) * cdiv(tiles.pixels * o, tiles.n)
    x, x_step = channels_last(x, x.dtype)
    g, g_step = channels_last(g, x.dtype)
    parts = x.new_empty((splits * tiles.pixels, stack, o, *how.kernel, c), dtype=torch.float32)
    by_bias = x.new_empty((splits * tiles.pixels, stack, o), dtype=torch.float32) if how.bias else None
    steps = (x_step, g_step, stack * o * taps * c)
    constants = conv_constants(how.size, c, o, sweeps, how.precision, tiles)
    with torch.cuda.device_of(x):
        _weight_grad_kernel[(stack * splits * programs,)](
            x, g, parts, by_bias, rows, *steps, splits, BLOCKS=blocks, **constants
        )
    by_weight = _sum_splits(parts).permute(0, 1, 4, 2, 3)
    return (by_weight,) if by_bias is None else (by_weight, _sum_splits(by_bias))


def _sum_splits(parts: Tensor) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    out = torch.empty_like(parts[0])
    with torch.cuda.device_of(parts):
        grid = (cdiv(out.numel(), SUM_BLOCK),)
        _sum_kernel[grid](parts, out, out.numel(), SPLITS=len(parts), BLOCK=SUM_BLOCK)
    return out
