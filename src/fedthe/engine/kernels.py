"""Triton kernels for many clients at once: convolutions and norms with weights per client, pooling, attention, batches.

Images lie in memory as [S, n, h, w, c] and weights as [S, o, kh, kw, c], S being the clients. All functions here take
and give the logical order, [S, n, c, h, w] and [S, o, c, kh, kw], as permuted views of such memory; what lies otherwise
is copied first. A client's result has the same bits whatever S is: tile sizes and splits follow from the shape of one
client's work, sums have a fixed order, and nothing is added by atomics. Everything a kernel needs to know about shapes
is a constant to it, except S and n.

Import this only where Triton is; `stacked_ops` does so when it first meets a tensor on a card.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .stacked_ops import Attention, Geometry, Norm, Pool

# Not `import triton`: types are checked where there is no Triton, and the answer must not depend on that.
triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")
if TYPE_CHECKING:
    constexpr: TypeAlias = Any
    Block: TypeAlias = Any
else:  # Triton reads the annotations of kernels, and takes only names of its own there
    constexpr, Block = tl.constexpr, tl.tensor  # a Block is a pointer, a number, or a block of them

INTERPRETED = bool(triton.knobs.runtime.interpret)  # there tl.dot takes bfloat16 for whole numbers: it is cast first

BATCH_BLOCK = 1024  # values of a batch per program
SUM_BLOCK = 1024  # weights per program when partial gradients are added
IMAGES_BLOCK = 32  # images at a time when gradients of a norm's weights are added over them
ATTEND_WARPS = 4  # of 16 rows each: with eight, two would compute the same rows of a block of 64


class Tiles(NamedTuple):
    """How a matrix product [m, k] x [k, n] is cut; powers of two of at least 16."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    pixels: int = 1  # side by side that are one position; see `_conv_kernel`
    registers: int | None = None  # of a thread, at most

    @property
    def launch(self) -> dict[str, int | None]:
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


# ---------------------------------------------------------------------------------------------------------------------
# Choices to tune: pure functions of one client's shape and the type, never of S
# ---------------------------------------------------------------------------------------------------------------------


def conv_tiles(rows: int, c: int, o: int, taps: int, dtype: torch.dtype, pixels: int = 1) -> Tiles:
    """For `conv` and `conv_input_grad`: m are output positions, n output channels, k taps times input channels.

    A pipeline of several stages loads past the first cache, and holds so much that few programs share a core: where
    windows overlap and channels are few, many programs without one are better.
    """
    if rows <= 64:  # a linear layer on a small batch only reads its weights: many small loads in flight
        return Tiles(_power_of_two(rows, 16, 64), _power_of_two(o, 16, 32), 64 if c % 64 == 0 else 32, 2, 4)
    n = _power_of_two(pixels * o, 16, 128)
    if dtype != torch.bfloat16:
        k = 32 if c % 32 == 0 else _power_of_two(taps * c, 16, 32)
        return Tiles(64, n, k, 8, 3) if n > 64 else Tiles(128, n, k, 4, 3)
    if pixels > 1:
        return _crowded(Tiles(128, n, 64, 8, 1, pixels), 64)
    if c % 8:  # few channels: a step spans taps, so the fewer steps the better
        return Tiles(256, n, _power_of_two(taps * c, 16, 128), 8 if n > 64 else 4, 2)
    if c % 32:
        return Tiles(128, n, _power_of_two(taps * c, 16, 64), 8 if n > 64 else 4, 1)
    if c % 64 == 0:
        return Tiles(128, n, 64, 8 if n > 64 else 4, 3)
    return Tiles(256, n, 32, 8 if n > 64 else 4, 4)


def pixels_in_a_row(c: int, across: Way, dtype: torch.dtype) -> int:
    """For `conv_tiles` and `weight_grad_tiles`.

    Two windows of three taps cover four pixels, a power of two. Many channels fill tiles without that.
    """
    overlap = across.taps == 3 and across.stride == 1 and across.windows % 2 == 0
    return 2 if overlap and c <= 32 and dtype == torch.bfloat16 else 1


def weight_grad_tiles(rows: int, c: int, o: int, taps: int, dtype: torch.dtype, pixels: int = 1) -> Tiles:
    """For `conv_weight_grad`: m are taps times input channels, n output channels, k output positions."""
    n = _power_of_two(pixels * o, 16, 128)
    if rows <= 64:
        return Tiles(64, n, _power_of_two(rows, 16, 32), 2, 4)
    if dtype != torch.bfloat16:  # not in stages: positions do not lie last, so float32 is put in order on the way
        return Tiles(64, n, 32, 4, 1)
    if pixels > 1:  # nor here: see `conv_tiles`
        m = _power_of_two(taps * c * 4 // 3, 64, 256) if c <= 16 else 128  # a span of four pixels for three taps
        return _crowded(Tiles(m, n, 64, 8 if m * n > 64 * 64 else 4, 1, pixels), 80 if c <= 16 else 64)
    m = 64 if taps * c > 128 else _power_of_two(taps * c, 16, 128)
    return Tiles(m, n, 64, warps=8 if m * n > 64 * 64 else 4, stages=3)


def weight_grad_splits(rows: int, c: int, o: int, taps: int, tiles: Tiles) -> int:
    """Into how many parts the sum over positions is cut, so that few clients with few weights still fill a card.

    One client alone may have very many positions, namely all images of all clients where they share a weight. The parts
    are written and read again, so they are to be small beside images and gradients. With the large tiles of
    linear layers over tokens, sixteen of them would be as much as these.
    """
    programs = _cdiv(taps * c, tiles.m) * _cdiv(tiles.pixels * o, tiles.n)
    enough = 16 if tiles.m * tiles.n <= 128 * 64 else 4
    wanted = max(enough // programs, min(64, rows >> 15))
    cheap = rows * (c + o) // (4 * taps * c * o)
    return max(1, min(wanted, cheap, _cdiv(rows, tiles.k * tiles.pixels)))


def pool_block(values: int) -> int:
    """Values per program, of one image's `values`: the block that leaves fewest idle. Eight to a thread: see below."""
    return min((1024, 512, 256), key=lambda block: (_cdiv(values, block) * block, -block))


class NormTiles(NamedTuple):
    pixels: int  # of an image at a time; a power of two. An image that fits as a whole is read only once
    warps: int


def norm_tiles(pixels: int, c: int, grad: bool) -> NormTiles:
    """For `group_norm` and `group_norm_grad`; c counts channels with each group filled up to a power of two.

    The gradient has so many values to a thread at once that a whole large image would leave a core to one program; it
    reads such an image twice, the second time from the first cache.
    """
    block = _power_of_two(pixels, 1, max(1, (4096 if grad else 16384) // c))
    each = 16 if grad else 32  # values to a thread
    return NormTiles(block, _power_of_two(block * c // (32 * each), 2, 16))  # two warps: see `_pool_launch`


def _crowded(tiles: Tiles, registers: int) -> Tiles:
    """With few registers to a thread, so that more programs share a core: without stages they mostly wait for memory.

    The compiler fails where the sums alone take most of them.
    """
    sums = tiles.m * tiles.n // (32 * tiles.warps)
    return tiles._replace(registers=registers) if sums <= 32 else tiles


def _power_of_two(value: int, least: int, most: int) -> int:
    return max(least, min(most, 1 << (value - 1).bit_length()))


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


# ---------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------


def _jit(kernel: Callable[..., Any]) -> Any:
    return triton.jit(kernel)


@_jit
def _conv_kernel(
    x: Block,
    w: Block,
    bias: Block,
    beside: Block,
    out: Block,
    rows: Block,
    x_step: Block,
    w_step: Block,
    b_step: Block,
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
    W_FIRST: constexpr,
    W_DOWN: constexpr,
    W_RIGHT: constexpr,
    W_IN: constexpr,
    W_OUT: constexpr,
    TO_H: constexpr,
    TO_W: constexpr,
    TO_Y: constexpr,
    TO_X: constexpr,
    STEP_Y: constexpr,
    STEP_X: constexpr,
    INSIDE: constexpr,
    PRECISION: constexpr,
    WIDEN: constexpr,
    PIXELS: constexpr,
    BM: constexpr,
    BN: constexpr,
    BK: constexpr,
) -> None:
    """out[s, m, o] = sum over taps and c of x[s, where tap meets m, c] w[s, tap, c, o]; m counts (image, y, x).

    A row of the product makes PIXELS pixels side by side, from the span of pixels that all their windows cover: its
    columns are (pixel, o), and a weight is 0 where a pixel's window does not reach. Few channels then fill a tile, and
    windows that overlap are loaded once. (An infinite value makes NaN of its neighbours, too.) bias[s, o], and
    beside, which lies as out does, are added if not None.

    x_step and w_step: values from one client to the next (0: the same for all). W_FIRST: where the first tap's weights
    are; W_DOWN, W_RIGHT, W_IN, W_OUT: values from there to the tap below, beside, to the next input and output channel.
    out has images of TO_H times TO_W pixels, of which only every STEP-th is written, from TO_Y and TO_X on. INSIDE: no
    tap ever falls beside the image.
    """
    ACROSS: constexpr = OUT_W // PIXELS
    SPAN: constexpr = (PIXELS - 1) * STRIDE_X + KW
    LINE: constexpr = SPAN * C  # of one row of taps; contiguous in memory
    tiles_m = tl.cdiv(rows, BM)
    tiles_n = (PIXELS * O + BN - 1) // BN
    pid = tl.program_id(0)
    m = pid % tiles_m * BM + tl.arange(0, BM)
    column = pid // tiles_m % tiles_n * BN + tl.arange(0, BN)
    s = (pid // (tiles_m * tiles_n)).to(tl.int64)  # S n h w c is more than 2**31
    pixel = column // O
    o = column % O if PIXELS > 1 else column

    image = (m // (OUT_H * ACROSS)).to(tl.int64)
    place = m % (OUT_H * ACROSS)
    top = (place // ACROSS * STRIDE_Y - PAD_Y)[:, None]
    left = (place % ACROSS * (PIXELS * STRIDE_X) - PAD_X)[:, None]
    images = (x + s * x_step + image * (H * W * C))[:, None]
    weights = w + s * w_step
    real = (m < rows)[:, None]
    wanted = (column < PIXELS * O)[None, :]

    if STEP_Y == 1 and STEP_X == 1:
        to = (s * rows + m) * PIXELS
    else:
        down = TO_Y + place // ACROSS * STEP_Y
        right = TO_X + place % ACROSS * (PIXELS * STEP_X)
        to = (s * (rows // (OUT_H * ACROSS)) + image) * (TO_H * TO_W) + (down * TO_W + right)
    at = (to * O)[:, None] + (pixel * (STEP_X * O) + o if PIXELS > 1 else o)[None, :]
    known = real if PIXELS * O % BN == 0 else real & wanted

    # What is added comes first: in the end it would lie in registers beside the sums.
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    if beside is not None:
        acc = tl.load(beside + at, mask=known, other=0.0).to(tl.float32)
    if bias is not None:
        acc += tl.load(bias + s * b_step + o, mask=column < PIXELS * O, other=0.0)[None, :]
    for step in range((KH * LINE + BK - 1) // BK):
        if PIXELS == 1 and C % BK == 0:  # one tap per step: addresses are [BM, 1], plus contiguous channels
            tap = step // (C // BK)
            c = step % (C // BK) * BK + tl.arange(0, BK)
            ky = tap // KW
            kx = tap % KW
            y = top + ky
            z = left + kx
            ok = real
        elif LINE % BK == 0:  # a part of one row of taps
            k = step % (LINE // BK) * BK + tl.arange(0, BK)
            c = k % C
            ky = step // (LINE // BK)
            kx = k // C
            y = top + ky
            z = left + kx[None, :]
            ok = real
        else:
            k = step * BK + tl.arange(0, BK)
            c = k % C
            ky = k // LINE
            kx = k // C % SPAN
            y = top + ky[None, :]
            z = left + kx[None, :]
            ok = real & (k < KH * LINE)[None, :]
        if not INSIDE:
            ok = ok & (y >= 0) & (y < H) & (z >= 0) & (z < W)
        a = tl.load(images + ((y * W + z) * C + c[None, :]), mask=ok, other=0.0)

        source = weights + (W_FIRST + ky * W_DOWN + kx * W_RIGHT + c * W_IN)[:, None] + (o * W_OUT)[None, :]
        some = wanted
        if PIXELS > 1:
            of = kx[:, None] - (pixel * STRIDE_X)[None, :]  # the tap that this is to that pixel
            source -= (pixel * (STRIDE_X * W_RIGHT))[None, :]
            some = some & (of >= 0) & (of < KW)
        if LINE % BK != 0:
            some = some & (k < KH * LINE)[:, None]
        whole: constexpr = PIXELS == 1 and LINE % BK == 0 and O % BN == 0
        b = tl.load(source) if whole else tl.load(source, mask=some, other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)

    tl.store(out + at, acc.to(out.dtype.element_ty), mask=known)


@_jit
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
    WIDEN: constexpr,
    PIXELS: constexpr,
    BM: constexpr,
    BN: constexpr,
    BK: constexpr,
) -> None:
    """out[split, s, o, tap, c] = sum over the split's positions m of x[s, where tap meets m, c] g[s, m, o].

    A split has BLOCKS blocks of BK positions, the last one maybe fewer. out_step: values from one split to the next.
    by_bias[split, s, o], if not None, gets the sum of g alone. A position is PIXELS pixels side by side, with one span
    of the image for all their windows, as in `_conv_kernel`; each of these pixels is a split of its own.
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
    # Few masks are quicker than many: what is no tap and no position lies far below the image.
    FAR: constexpr = 1 << 20
    SAME: constexpr = OUT_H == H and OUT_W == W and STRIDE_Y == 1 and STRIDE_X == 1  # windows as there are pixels
    below = tl.where((k < KH * LINE)[:, None], ky, FAR)

    total = tl.zeros((BN,), dtype=tl.float32)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for block in range(BLOCKS):
        m = (split * BLOCKS + block) * BK + tl.arange(0, BK)
        # Not signed: nobody tells the compiler that m is not negative, and it made three times as many instructions.
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
    if by_bias is not None:  # all tiles of taps have the same: the first one says it
        to = by_bias + part * (out_step // (KH * KW * C)) + s * O + o
        tl.store(to, total, mask=(column < PIXELS * O) & (pid % tiles_m == 0))
    tap = kx - (pixel * STRIDE_X)[None, :]
    to = (part * out_step + s * (O * KH * KW * C) + o * (KH * KW * C))[None, :]
    to += (ky * KW + tap) * C + (k % C)[:, None]
    known = (k < KH * LINE)[:, None] & (column < PIXELS * O)[None, :] & (tap >= 0) & (tap < KW)
    tl.store(out + to, acc, mask=known)


@_jit
def _sum_kernel(parts: Block, out: Block, values: Block, SPLITS: constexpr, BLOCK: constexpr) -> None:
    """out[i] = parts[0, i] + parts[1, i] + ..., in that order; torch's own sum may choose another for another S."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts + at, mask=at < values, other=0.0)
    for _ in range(1, SPLITS):
        parts += values
        total += tl.load(parts + at, mask=at < values, other=0.0)
    tl.store(out + at, total, mask=at < values)


@_jit
def _pool_kernel(
    x: Block,
    out: Block,
    index: Block,
    H: constexpr,
    W: constexpr,
    C: constexpr,
    OUT_H: constexpr,
    OUT_W: constexpr,
    KH: constexpr,
    KW: constexpr,
    STRIDE_Y: constexpr,
    STRIDE_X: constexpr,
    PAD_Y: constexpr,
    PAD_X: constexpr,
    INSIDE: constexpr,
    BLOCK: constexpr,
) -> None:
    """The largest of each window and its place in it, ky KW + kx. Ties: the first. NaN: the last, as in torch."""
    tiles = (OUT_H * OUT_W * C + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    image = (pid // tiles).to(tl.int64)
    at = pid % tiles * BLOCK + tl.arange(0, BLOCK)
    real = at < OUT_H * OUT_W * C
    c = at % C
    place = at // C
    top = place // OUT_W * STRIDE_Y - PAD_Y
    left = place % OUT_W * STRIDE_X - PAD_X
    source = x + image * (H * W * C)

    best = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    where = tl.full((BLOCK,), 255, dtype=tl.int32)  # 255: nothing yet; even -inf is taken then
    for ky in tl.static_range(KH):
        for kx in tl.static_range(KW):
            y = top + ky
            z = left + kx
            ok = real
            if not INSIDE:
                ok = ok & (y >= 0) & (y < H) & (z >= 0) & (z < W)
            value = tl.load(source + ((y * W + z) * C + c), mask=ok, other=float("-inf")).to(tl.float32)
            take = ok & ((value > best) | (value != value) | (where == 255))
            best = tl.where(take, value, best)
            where = tl.where(take, ky * KW + kx, where)

    to = image * (OUT_H * OUT_W * C) + at
    tl.store(out + to, best.to(out.dtype.element_ty), mask=real)
    tl.store(index + to, where.to(tl.uint8), mask=real)


@_jit
def _pool_scatter_kernel(
    g: Block,
    index: Block,
    out: Block,
    H: constexpr,
    W: constexpr,
    C: constexpr,
    OUT_H: constexpr,
    OUT_W: constexpr,
    KH: constexpr,
    KW: constexpr,
    STRIDE_Y: constexpr,
    STRIDE_X: constexpr,
    PAD_Y: constexpr,
    PAD_X: constexpr,
    BLOCK: constexpr,
) -> None:
    """out[pixel] = the sum of g over the windows that took this pixel. Each pixel asks its windows: no atomics."""
    tiles = (H * W * C + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    image = (pid // tiles).to(tl.int64)
    at = pid % tiles * BLOCK + tl.arange(0, BLOCK)
    real = at < H * W * C
    c = at % C
    place = at // C
    y = place // W + PAD_Y
    z = place % W + PAD_X
    base = image * (OUT_H * OUT_W * C)

    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for back_y in tl.static_range((KH + STRIDE_Y - 1) // STRIDE_Y):
        for back_x in tl.static_range((KW + STRIDE_X - 1) // STRIDE_X):
            oy = y // STRIDE_Y - back_y
            ox = z // STRIDE_X - back_x
            ky = y - oy * STRIDE_Y
            kx = z - ox * STRIDE_X
            ok = real & (oy >= 0) & (oy < OUT_H) & (ky < KH) & (ox >= 0) & (ox < OUT_W) & (kx < KW)
            window = base + ((oy * OUT_W + ox) * C + c)
            taken = tl.load(index + window, mask=ok, other=255).to(tl.int32)
            grad = tl.load(g + window, mask=ok, other=0.0).to(tl.float32)
            total += tl.where(ok & (taken == ky * KW + kx), grad, 0.0)

    tl.store(out + (image * (H * W * C) + at), total.to(out.dtype.element_ty), mask=real)


@_jit
def _pool_pick_kernel(
    x: Block,
    index: Block,
    out: Block,
    H: constexpr,
    W: constexpr,
    C: constexpr,
    OUT_H: constexpr,
    OUT_W: constexpr,
    KW: constexpr,
    STRIDE_Y: constexpr,
    STRIDE_X: constexpr,
    PAD_Y: constexpr,
    PAD_X: constexpr,
    BLOCK: constexpr,
) -> None:
    """out[window] = x at the place the window took before: what the scatter is the transpose of."""
    tiles = (OUT_H * OUT_W * C + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    image = (pid // tiles).to(tl.int64)
    at = pid % tiles * BLOCK + tl.arange(0, BLOCK)
    real = at < OUT_H * OUT_W * C
    c = at % C
    place = at // C
    to = image * (OUT_H * OUT_W * C) + at
    taken = tl.load(index + to, mask=real, other=0).to(tl.int32)
    y = place // OUT_W * STRIDE_Y - PAD_Y + taken // KW
    z = place % OUT_W * STRIDE_X - PAD_X + taken % KW
    value = tl.load(x + (image * (H * W * C) + ((y * W + z) * C + c)), mask=real, other=0.0)
    tl.store(out + to, value, mask=real)


@_jit
def _norm_kernel(
    x: Block,
    weight: Block,
    bias: Block,
    beside: Block,
    out: Block,
    mean: Block,
    rstd: Block,
    images: Block,
    x_step: Block,
    w_step: Block,
    b_step: Block,
    beside_step: Block,
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

    Blocks are loaded as [pixels, channels], so that a warp reads what lies side by side, and then seen as [pixels,
    groups, channels of a group], for which nothing moves. beside, if not None, is added to what was normalised; RELU:
    what is negative then becomes 0. Where one block holds the image, the compiler makes one of the three loads.
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
    # Channels first: a thread has several of them, and pixels are spread over threads.
    middle = tl.sum(tl.sum(tl.reshape(total, (BP, BG, BC)), 2), 0)[None, :, None] / (PIXELS * EACH)

    total = tl.zeros((BP, BG, BC), dtype=tl.float32)
    for block in range(blocks):
        ok = known & (block * BP + pixel < PIXELS)[:, None]
        value = tl.load(source + (block * (BP * GROUPS * EACH) + place), mask=ok, other=0.0).to(tl.float32)
        apart = tl.reshape(value, (BP, BG, BC)) - middle
        apart = tl.where(real[None, :, :] & (block * BP + pixel < PIXELS)[:, None, None], apart, 0.0)
        total += apart * apart
    spread = tl.sum(tl.sum(total, 2), 0)[None, :, None] / (PIXELS * EACH)
    scale = 1 / tl.sqrt(spread + eps)

    a = tl.load(weight + s * w_step + weights, mask=wanted, other=0.0)[None, :, :] * scale
    b = tl.load(bias + s * b_step + weights, mask=wanted, other=0.0)[None, :, :]
    for block in range(blocks):
        ok = known & (block * BP + pixel < PIXELS)[:, None]
        value = tl.load(source + (block * (BP * GROUPS * EACH) + place), mask=ok, other=0.0).to(tl.float32)
        value = (tl.reshape(value, (BP, BG, BC)) - middle) * a + b
        value = tl.reshape(value, (BP, BG * BC))
        if beside is not None:
            at = beside + s * beside_step + pid % images * (PIXELS * GROUPS * EACH)
            value += tl.load(at + (block * (BP * GROUPS * EACH) + place), mask=ok, other=0.0).to(tl.float32)
        if RELU:
            value = tl.where(value < 0, 0.0, value)  # NaN stays, as in torch
        to = out + (pid * (PIXELS * GROUPS * EACH) + (block * (BP * GROUPS * EACH) + place))
        tl.store(to, value.to(out.dtype.element_ty), mask=ok)
    which = pid * GROUPS + group
    tl.store(mean + which, tl.reshape(middle, (BG,)), mask=group < GROUPS)
    tl.store(rstd + which, tl.reshape(scale, (BG,)), mask=group < GROUPS)


@_jit
def _norm_grad_kernel(
    g: Block,
    x: Block,
    weight: Block,
    bias: Block,
    mean: Block,
    rstd: Block,
    made: Block,
    out: Block,
    out_beside: Block,
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
    """One program: one image. parts [S, images, 2, weights] get its sums for the gradients by weight and bias.

    With h = (x - mean) rstd and u = weight g, the gradient by x is rstd (u - mean of u - h mean of (h u)), the means
    over the group; and both are sums over channels of what parts get. RELU: there was one after the norm, and g counts
    only where its result is not 0. That is made or, if made is None, found once more from x, which saves a read.
    out_beside, if not None, gets this g.
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
    first = pid * (PIXELS * GROUPS * EACH)  # of this image among all
    source = x + s * x_step + image
    slopes = g + s * g_step + image
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
        slope = tl.load(slopes + at, mask=ok, other=0.0).to(tl.float32)
        if made is not None:
            slope = tl.where(tl.load(made + (first + at), mask=ok, other=0.0) <= 0, 0.0, slope)
        slope = tl.reshape(slope, (BP, BG, BC))
        apart = tl.reshape(tl.load(source + at, mask=ok, other=0.0).to(tl.float32), (BP, BG, BC)) - middle
        if RELU and made is None:
            slope = tl.where(apart * a + b <= 0, 0.0, slope)
        by_weight += slope * (apart * scale)
        by_bias += slope
    by_weight, by_bias = tl.split(tl.sum(tl.join(by_weight, by_bias), 0, keep_dims=True))  # both at once
    lean = tl.sum(by_weight * w, 2, keep_dims=True) / (PIXELS * EACH)
    shift = tl.sum(by_bias * w, 2, keep_dims=True) / (PIXELS * EACH)

    for block in range(blocks):
        ok = known & (block * BP + pixel < PIXELS)[:, None]
        at = block * (BP * GROUPS * EACH) + place
        slope = tl.load(slopes + at, mask=ok, other=0.0).to(tl.float32)
        if made is not None:
            slope = tl.where(tl.load(made + (first + at), mask=ok, other=0.0) <= 0, 0.0, slope)
        if out_beside is not None:
            tl.store(out_beside + (first + at), slope.to(out.dtype.element_ty), mask=ok)
        slope = tl.reshape(slope, (BP, BG, BC))
        apart = tl.reshape(tl.load(source + at, mask=ok, other=0.0).to(tl.float32), (BP, BG, BC)) - middle
        if RELU and made is None:
            slope = tl.where(apart * a + b <= 0, 0.0, slope)
        by_x = (slope * w - shift - apart * scale * lean) * scale
        tl.store(out + (first + at), tl.reshape(by_x, (BP, BG * BC)).to(out.dtype.element_ty), mask=ok)
    if SHARED:
        to = parts + (pid * (2 * EACH) + c)
        tl.store(to, tl.sum(tl.sum(by_weight, 0), 0), mask=c < EACH)
        tl.store(to + EACH, tl.sum(tl.sum(by_bias, 0), 0), mask=c < EACH)
    else:
        to = parts + (pid * (2 * GROUPS * EACH) + weights)
        tl.store(to, tl.sum(by_weight, 0), mask=real)  # a sum of one
        tl.store(to + GROUPS * EACH, tl.sum(by_bias, 0), mask=real)


@_jit
def _sum_images_kernel(
    parts: Block,
    out: Block,
    images: Block,
    stack: Block,
    BLOCKS: constexpr,
    C: constexpr,
    BI: constexpr,
    BV: constexpr,
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


@_jit
def _attend_share(q: Block, k: Block, t: Block, TOKENS: constexpr, SCALE: constexpr, PRECISION: constexpr) -> Block:
    """How much each token takes of each other: the softmax of their scores."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * SCALE
    scores = tl.where((t < TOKENS)[None, :], scores, float("-inf"))
    share = tl.exp(scores - tl.max(scores, 1)[:, None])
    return share / tl.sum(share, 1)[:, None]


@_jit
def _attend_kernel(
    qkv: Block,
    out: Block,
    TOKENS: constexpr,
    HEADS: constexpr,
    EACH: constexpr,
    SCALE: constexpr,
    PRECISION: constexpr,
    WIDEN: constexpr,
    BT: constexpr,
    BE: constexpr,
) -> None:
    """One program: one head of one image. qkv [images, TOKENS, 3, HEADS, EACH] to out [images, TOKENS, HEADS, EACH]"""
    pid = tl.program_id(0).to(tl.int64)
    head = pid % HEADS
    t = tl.arange(0, BT)
    e = tl.arange(0, BE)
    ok = (t < TOKENS)[:, None] & (e < EACH)[None, :]
    at = (t * (3 * HEADS * EACH))[:, None] + e[None, :]
    source = qkv + pid // HEADS * (TOKENS * 3 * HEADS * EACH) + head * EACH
    q = tl.load(source + at, mask=ok, other=0.0)
    k = tl.load(source + HEADS * EACH + at, mask=ok, other=0.0)
    v = tl.load(source + 2 * HEADS * EACH + at, mask=ok, other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
        k = k.to(tl.float32)
        v = v.to(tl.float32)

    share = _attend_share(q, k, t, TOKENS, SCALE, PRECISION)
    mixed = tl.dot(share.to(v.dtype), v, input_precision=PRECISION)
    to = out + pid // HEADS * (TOKENS * HEADS * EACH) + head * EACH
    tl.store(to + (t * (HEADS * EACH))[:, None] + e[None, :], mixed.to(out.dtype.element_ty), mask=ok)


@_jit
def _attend_grad_kernel(
    g: Block,
    qkv: Block,
    out: Block,
    TOKENS: constexpr,
    HEADS: constexpr,
    EACH: constexpr,
    SCALE: constexpr,
    PRECISION: constexpr,
    WIDEN: constexpr,
    BT: constexpr,
    BE: constexpr,
) -> None:
    """One program: one head of one image. g is by the result, out by qkv; the shares are computed once more."""
    pid = tl.program_id(0).to(tl.int64)
    head = pid % HEADS
    t = tl.arange(0, BT)
    e = tl.arange(0, BE)
    ok = (t < TOKENS)[:, None] & (e < EACH)[None, :]
    first = pid // HEADS * (TOKENS * 3 * HEADS * EACH) + head * EACH
    at = first + (t * (3 * HEADS * EACH))[:, None] + e[None, :]
    q = tl.load(qkv + at, mask=ok, other=0.0)
    k = tl.load(qkv + HEADS * EACH + at, mask=ok, other=0.0)
    v = tl.load(qkv + 2 * HEADS * EACH + at, mask=ok, other=0.0)
    slopes = g + pid // HEADS * (TOKENS * HEADS * EACH) + head * EACH
    slope = tl.load(slopes + (t * (HEADS * EACH))[:, None] + e[None, :], mask=ok, other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
        k = k.to(tl.float32)
        v = v.to(tl.float32)
        slope = slope.to(tl.float32)

    share = _attend_share(q, k, t, TOKENS, SCALE, PRECISION)
    by_v = tl.dot(tl.trans(share.to(slope.dtype)), slope, input_precision=PRECISION)
    tl.store(out + 2 * HEADS * EACH + at, by_v.to(out.dtype.element_ty), mask=ok)

    by_share = tl.dot(slope, tl.trans(v), input_precision=PRECISION)
    by_score = (share * (by_share - tl.sum(share * by_share, 1)[:, None]) * SCALE).to(q.dtype)
    by_q = tl.dot(by_score, k, input_precision=PRECISION)
    tl.store(out + at, by_q.to(out.dtype.element_ty), mask=ok)
    by_k = tl.dot(tl.trans(by_score), q, input_precision=PRECISION)
    tl.store(out + HEADS * EACH + at, by_k.to(out.dtype.element_ty), mask=ok)


@_jit
def _cut_kernel(
    images: Block,
    rows: Block,
    down: Block,
    right: Block,
    mirrored: Block,
    out: Block,
    step: Block,
    batch: Block,
    H: constexpr,
    W: constexpr,
    C: constexpr,
    PAD: constexpr,
    BLOCK: constexpr,
) -> None:
    """One program: a block of values of one image of the batch."""
    tiles = (H * W * C + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    which = (pid // tiles).to(tl.int64)  # over clients and their batches
    at = pid % tiles * BLOCK + tl.arange(0, BLOCK)
    real = at < H * W * C
    y = at // (W * C) + tl.load(down + which).to(tl.int32) - PAD
    z = at // C % W + tl.load(right + which).to(tl.int32) - PAD
    ok = real & (y >= 0) & (y < H) & (z >= 0) & (z < W)
    z = tl.where(tl.load(mirrored + which) != 0, W - 1 - z, z)  # mirrored first, cut then
    source = images + which // batch * step + tl.load(rows + which).to(tl.int64) * (H * W * C)
    value = tl.load(source + ((y * W + z) * C + at % C), mask=ok, other=0).to(tl.float32)
    value = value * (1 / 127.5) - 1
    tl.store(out + (which * (H * W * C) + at), value.to(out.dtype.element_ty), mask=real)


# ---------------------------------------------------------------------------------------------------------------------
# Launchers
# ---------------------------------------------------------------------------------------------------------------------


def conv(
    x: Tensor,
    w: Tensor,
    how: Geometry,
    tiles: Tiles | None = None,
    bias: Tensor | None = None,
    beside: Tensor | None = None,
) -> Tensor:
    """x [S, n, c, h, w], w [S, o, c, kh, kw] -> [S, n, o, oh, ow] in x's type. w is cast to it, sums are float32.

    A bias, float32 [S, o], and something beside, like the result, are added.
    """
    stack, n, c = x.shape[:3]
    o, (rows, columns) = w.shape[1], how.kernel
    x, x_step = _channels_last(x, x.dtype)
    w, w_step = _channels_last(w, x.dtype)
    out = x.new_empty((stack, n, *how.out, o))
    steps = {"W_FIRST": 0, "W_DOWN": columns * c, "W_RIGHT": c, "W_IN": 1, "W_OUT": rows * columns * c}
    ways = (Way(how.out[i], how.kernel[i], how.stride[i], how.padding[i], 0, 1) for i in (0, 1))
    if beside is not None:
        beside = beside.to(x.dtype).permute(0, 1, 3, 4, 2).contiguous()
    _launch_conv(x, x_step, w, w_step, bias, beside, out, (*ways,), steps, how.precision, tiles)
    return out.permute(0, 1, 4, 2, 3)


def conv_input_grad(
    g: Tensor, w: Tensor, how: Geometry, tiles: Tiles | None = None, beside: Tensor | None = None
) -> Tensor:
    """g [S, n, o, oh, ow], w [S, o, c, kh, kw] -> the gradient by the input, [S, n, c, h, w] in g's type.

    What is beside, like the result, is added.

    A convolution of g with the weights turned round, and, in float32, copied so that the channels it adds up lie last:
    tensor cores take float32 in no other order. With a stride, pixels of the input differ in which taps met them,
    in as many ways as the stride has steps: each is a convolution of its own, with those taps.
    """
    stack, n = g.shape[:2]
    o, c, (rows, columns) = *w.shape[1:3], how.kernel
    g, g_step = _channels_last(g, g.dtype)
    turned = g.dtype == torch.float32
    w, w_step = _channels_last(w.transpose(1, 2) if turned else w, g.dtype)
    last, into, out_of = (o, 1, rows * columns * o) if turned else (c, rows * columns * c, 1)
    down, right = (_ways_back(how, axis) for axis in (0, 1))
    all_met = all(way.taps for way in (*down, *right))
    beside = beside if beside is None else beside.to(g.dtype).permute(0, 1, 3, 4, 2).contiguous()
    if all_met:
        out = g.new_empty((stack, n, *how.size, c))
    else:
        out = g.new_zeros((stack, n, *how.size, c)) if beside is None else beside.clone()
    for one in down:
        for other in right:
            if one.windows and other.windows and one.taps and other.taps:
                # From the last tap of this way, by strides to the first.
                y, z = (_last_tap(way, how, axis) for axis, way in enumerate((one, other)))
                steps = {
                    "W_FIRST": (y * columns + z) * last,
                    "W_DOWN": -how.stride[0] * columns * last,
                    "W_RIGHT": -how.stride[1] * last,
                    "W_IN": into,
                    "W_OUT": out_of,
                }
                _launch_conv(g, g_step, w, w_step, None, beside, out, (one, other), steps, how.precision, tiles)
    return out.permute(0, 1, 4, 2, 3)


class Way(NamedTuple):
    """Along one axis: so many windows of so many taps, and the pixels of the result that they make."""

    windows: int
    taps: int
    stride: int
    padding: int
    first: int  # pixel of the result
    step: int  # from one to the next


def _ways_back(how: Geometry, axis: int) -> list[Way]:
    """Pixel y of the input was met by tap k of window (y + padding - k) / stride, where that is whole."""
    kernel, stride, padding = how.kernel[axis], how.stride[axis], how.padding[axis]
    ways = []
    for first in range(stride):
        tap = (first + padding) % stride  # the first one; then every stride-th
        taps = max(0, _cdiv(kernel - tap, stride))
        reach = (first + padding - tap) // stride - (taps - 1)  # the window that the last tap belongs to
        ways.append(Way(max(0, _cdiv(how.size[axis] - first, stride)), taps, 1, -reach, first, stride))
    return ways


def _last_tap(way: Way, how: Geometry, axis: int) -> int:
    return (way.first + how.padding[axis]) % how.stride[axis] + (way.taps - 1) * how.stride[axis]


def _launch_conv(
    x: Tensor,
    x_step: int,
    w: Tensor,
    w_step: int,
    bias: Tensor | None,
    beside: Tensor | None,
    out: Tensor,
    ways: tuple[Way, ...],
    steps: dict[str, int],
    precision: str,
    tiles: Tiles | None,
) -> None:
    """x [S or 1, n, h, w, c] and w as `_channels_last` gives them, to out [S, n, h, w, o]."""
    down, right = ways
    height, width, c = x.shape[2:]
    stack, n, to_height, to_width, o = out.shape
    if tiles is None:
        pixels = pixels_in_a_row(c, right, x.dtype)
        tiles = conv_tiles(n * down.windows * right.windows, c, o, down.taps * right.taps, x.dtype, pixels)
    if right.windows % tiles.pixels:
        tiles = tiles._replace(pixels=1)
    rows = n * down.windows * right.windows // tiles.pixels
    inside = all(
        way.padding <= 0 and (way.windows - 1) * way.stride - way.padding + way.taps <= size
        for way, size in ((down, height), (right, width))
    )
    bias, b_step = (None, 0) if bias is None else _rows(bias)
    with torch.cuda.device_of(x):
        _conv_kernel[(stack * _cdiv(rows, tiles.m) * _cdiv(tiles.pixels * o, tiles.n),)](
            x,
            w,
            bias,
            beside,
            out,
            rows,
            x_step,
            w_step,
            b_step,
            H=height,
            W=width,
            C=c,
            OUT_H=down.windows,
            OUT_W=right.windows,
            O=o,
            KH=down.taps,
            KW=right.taps,
            STRIDE_Y=down.stride,
            STRIDE_X=right.stride,
            PAD_Y=down.padding,
            PAD_X=right.padding,
            **steps,
            TO_H=to_height,
            TO_W=to_width,
            TO_Y=down.first,
            TO_X=right.first,
            STEP_Y=down.step,
            STEP_X=right.step,
            INSIDE=inside,
            PRECISION=precision,
            WIDEN=INTERPRETED,
            PIXELS=tiles.pixels,
            BM=tiles.m,
            BN=tiles.n,
            BK=tiles.k,
            **tiles.launch,
        )


def conv_weight_grad(
    x: Tensor, g: Tensor, how: Geometry, tiles: Tiles | None = None, splits: int | None = None
) -> tuple[Tensor, ...]:
    """x [S, n, c, h, w], g [S, n, o, oh, ow] -> the gradient by the weight, float32 [S, o, c, kh, kw].

    And that by the bias, float32 [S, o], if there is one.
    """
    stack, n, c, height, width = x.shape
    o, taps = g.shape[2], how.kernel[0] * how.kernel[1]
    positions = n * how.out[0] * how.out[1]
    if tiles is None:
        across = Way(how.out[1], how.kernel[1], how.stride[1], how.padding[1], 0, 1)
        tiles = weight_grad_tiles(positions, c, o, taps, x.dtype, pixels_in_a_row(c, across, x.dtype))
    if how.out[1] % tiles.pixels:
        tiles = tiles._replace(pixels=1)
    rows = positions // tiles.pixels
    blocks = _cdiv(_cdiv(rows, tiles.k), splits or weight_grad_splits(positions, c, o, taps, tiles))
    splits = _cdiv(rows, blocks * tiles.k)  # none is left empty
    span = (tiles.pixels - 1) * how.stride[1] + how.kernel[1]
    programs = _cdiv(how.kernel[0] * span * c, tiles.m) * _cdiv(tiles.pixels * o, tiles.n)
    x, x_step = _channels_last(x, x.dtype)
    g, g_step = _channels_last(g, x.dtype)
    parts = x.new_empty((splits * tiles.pixels, stack, o, *how.kernel, c), dtype=torch.float32)
    by_bias = x.new_empty((splits * tiles.pixels, stack, o), dtype=torch.float32) if how.bias else None
    with torch.cuda.device_of(x):
        _weight_grad_kernel[(stack * splits * programs,)](
            x,
            g,
            parts,
            by_bias,
            rows,
            x_step,
            g_step,
            stack * o * taps * c,
            splits,
            BLOCKS=blocks,
            H=height,
            W=width,
            C=c,
            OUT_H=how.out[0],
            OUT_W=how.out[1],
            O=o,
            KH=how.kernel[0],
            KW=how.kernel[1],
            STRIDE_Y=how.stride[0],
            STRIDE_X=how.stride[1],
            PAD_Y=how.padding[0],
            PAD_X=how.padding[1],
            INSIDE=how.padding == (0, 0),
            PRECISION=how.precision,
            WIDEN=INTERPRETED,
            PIXELS=tiles.pixels,
            BM=tiles.m,
            BN=tiles.n,
            BK=tiles.k,
            **tiles.launch,
        )
    by_weight = _sum_splits(parts).permute(0, 1, 4, 2, 3)
    return (by_weight,) if by_bias is None else (by_weight, _sum_splits(by_bias))


def _sum_splits(parts: Tensor) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    out = torch.empty_like(parts[0])
    with torch.cuda.device_of(parts):
        grid = (_cdiv(out.numel(), SUM_BLOCK),)
        _sum_kernel[grid](parts, out, out.numel(), SPLITS=len(parts), BLOCK=SUM_BLOCK)
    return out


def max_pool(x: Tensor, pool: Pool) -> tuple[Tensor, Tensor]:
    """x [n, c, h, w] -> the largest of each window, and uint8 which of its places that was; both [n, c, oh, ow]."""
    n, c = x.shape[:2]
    x = x.permute(0, 2, 3, 1).contiguous()
    out = x.new_empty((n, *pool.out, c))
    index = torch.empty_like(out, dtype=torch.uint8)
    block = pool_block(pool.out[0] * pool.out[1] * c)
    shape = _pool_shape(pool, c)
    bottom = (pool.out[0] - 1) * pool.stride[0] + pool.kernel[0] <= pool.size[0]
    aside = (pool.out[1] - 1) * pool.stride[1] + pool.kernel[1] <= pool.size[1]
    inside = pool.padding == (0, 0) and bottom and aside
    with torch.cuda.device_of(x):
        grid = (n * _cdiv(pool.out[0] * pool.out[1] * c, block),)
        _pool_kernel[grid](x, out, index, **shape, KH=pool.kernel[0], INSIDE=inside, **_pool_launch(block))
    return out.permute(0, 3, 1, 2), index.permute(0, 3, 1, 2)


def max_pool_scatter(g: Tensor, index: Tensor, pool: Pool) -> Tensor:
    """The gradient by the input: g [n, c, oh, ow] -> [n, c, h, w]."""
    n, c = g.shape[:2]
    g, index = g.permute(0, 2, 3, 1).contiguous(), index.permute(0, 2, 3, 1).contiguous()
    out = g.new_empty((n, *pool.size, c))
    block = pool_block(pool.size[0] * pool.size[1] * c)
    with torch.cuda.device_of(g):
        grid = (n * _cdiv(pool.size[0] * pool.size[1] * c, block),)
        _pool_scatter_kernel[grid](g, index, out, **_pool_shape(pool, c), KH=pool.kernel[0], **_pool_launch(block))
    return out.permute(0, 3, 1, 2)


def max_pool_pick(x: Tensor, index: Tensor, pool: Pool) -> Tensor:
    """x [n, c, h, w] at the places that an earlier pool took -> [n, c, oh, ow]."""
    n, c = x.shape[:2]
    x, index = x.permute(0, 2, 3, 1).contiguous(), index.permute(0, 2, 3, 1).contiguous()
    out = x.new_empty((n, *pool.out, c))
    block = pool_block(pool.out[0] * pool.out[1] * c)
    with torch.cuda.device_of(x):
        grid = (n * _cdiv(pool.out[0] * pool.out[1] * c, block),)
        _pool_pick_kernel[grid](x, index, out, **_pool_shape(pool, c), **_pool_launch(block))
    return out.permute(0, 3, 1, 2)


def _pool_shape(pool: Pool, c: int) -> dict[str, int]:
    return {
        "H": pool.size[0],
        "W": pool.size[1],
        "C": c,
        "OUT_H": pool.out[0],
        "OUT_W": pool.out[1],
        "KW": pool.kernel[1],
        "STRIDE_Y": pool.stride[0],
        "STRIDE_X": pool.stride[1],
        "PAD_Y": pool.padding[0],
        "PAD_X": pool.padding[1],
    }


def _pool_launch(block: int) -> dict[str, int]:
    # Eight values to a thread: 16 bytes of bfloat16. Never one warp: Triton 3.6 on an H200 then got the gradient of a
    # pool over 7 x 9 x 3 wrong, from the 160th value on, where two and four warps were right.
    return {"BLOCK": block, "num_warps": max(2, block // 256)}


def group_norm(
    x: Tensor, weight: Tensor, bias: Tensor, beside: Tensor | None, how: Norm, tiles: NormTiles | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x [S, n, c, h, w], weight and bias float32 [S, c] -> the same shape and type; and mean and 1 / deviation.

    Those two are float32 [S, n, groups]. Where groups share them, weight and bias are [S, c / groups]. What is beside
    has x's shape and is added, before the relu if there is one.
    """
    stack, n = x.shape[:2]
    shape = _norm_shape(x, how, tiles, grad=False)
    weight, w_step = _rows(weight)
    bias, b_step = _rows(bias)
    beside, beside_step = (None, 0) if beside is None else _channels_last(beside, x.dtype)
    x, x_step = _channels_last(x, x.dtype)
    out = x.new_empty((stack, *x.shape[1:]))
    mean, rstd = (x.new_empty((stack, n, how.groups), dtype=torch.float32) for _ in range(2))
    steps = (x_step, w_step, b_step, beside_step)
    with torch.cuda.device_of(x):
        _norm_kernel[(stack * n,)](x, weight, bias, beside, out, mean, rstd, n, *steps, how.eps, **shape)
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
    """g [S, n, c, h, w] by the result -> the gradients by x, in its type, and by weight and bias, float32 as they.

    made: the result itself, if there was a relu. The gradient by what was beside comes last, if there was something.
    """
    stack, n, c = *x.shape[:2], weight.shape[1]
    shape = _norm_shape(x, how, tiles, grad=True)
    weight, w_step = _rows(weight)
    bias, b_step = _rows(bias)
    g, g_step = _channels_last(g, x.dtype)
    made = made.permute(0, 1, 3, 4, 2).contiguous() if made is not None and how.beside else None
    x, x_step = _channels_last(x, x.dtype)
    outs = [x.new_empty((stack, *x.shape[1:])) for _ in range(1 + how.beside)]
    parts = x.new_empty((stack, n, 2, c), dtype=torch.float32)
    sums = x.new_empty((2, stack, c), dtype=torch.float32)  # each as its parameter lies: see `stacked_fit`
    block = _power_of_two(2 * c, 1, 64)
    steps = (g_step, x_step, w_step, b_step)
    to = (outs[0], outs[1] if how.beside else None, parts)
    with torch.cuda.device_of(x):
        _norm_grad_kernel[(stack * n,)](
            g, x, weight, bias, mean.contiguous(), rstd.contiguous(), made, *to, n, *steps, **shape
        )
        _sum_images_kernel[(stack * _cdiv(2 * c, block),)](
            parts, sums, n, stack, BLOCKS=_cdiv(n, IMAGES_BLOCK), C=c, BI=IMAGES_BLOCK, BV=block
        )
    by_x, *by_beside = (out.permute(0, 1, 4, 2, 3) for out in outs)
    return by_x, sums[0], sums[1], *by_beside


def _norm_shape(x: Tensor, how: Norm, tiles: NormTiles | None, grad: bool) -> dict[str, int]:
    pixels, each = x.shape[3] * x.shape[4], x.shape[2] // how.groups
    wide = {"BG": _power_of_two(how.groups, 1, how.groups * 2), "BC": _power_of_two(each, 1, each * 2)}
    tiles = tiles or norm_tiles(pixels, wide["BG"] * wide["BC"], grad)
    shape = {"PIXELS": pixels, "GROUPS": how.groups, "EACH": each, "SHARED": how.shared, "BP": tiles.pixels, **wide}
    launch = {"num_warps": tiles.warps}
    if not grad and tiles.pixels >= pixels:
        launch["maxnreg"] = 64  # it fits within; a few more, and one program of 16 warps had a core for itself
    return shape | {"RELU": how.relu} | launch


def _rows(t: Tensor) -> tuple[Tensor, int]:
    """t [S, c] with each row contiguous, and the step from one client to the next: 0 where all share one."""
    if len(t) > 1 and t.stride(0) == 0:
        return t[0].contiguous(), 0
    return t.contiguous(), t.shape[1]


def attend(qkv: Tensor, how: Attention) -> Tensor:
    """[n, tokens, 3 heads width] -> [n, tokens, heads width] in the same type; softmax and sums are float32."""
    n, tokens, _ = qkv.shape
    out = qkv.new_empty((n, tokens, how.heads * how.width))
    with torch.cuda.device_of(qkv):
        _attend_kernel[(n * how.heads,)](qkv.contiguous(), out, **_attend_launch(tokens, how))
    return out


def attend_grad(g: Tensor, qkv: Tensor, how: Attention) -> Tensor:
    """g [n, tokens, heads width] by the result -> the gradient by qkv, as that."""
    n, tokens, _ = qkv.shape
    out = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(qkv):
        shape = _attend_launch(tokens, how)
        _attend_grad_kernel[(n * how.heads,)](g.to(qkv.dtype).contiguous(), qkv.contiguous(), out, **shape)
    return out


def _attend_launch(tokens: int, how: Attention) -> dict[str, Any]:
    blocks = {"BT": _power_of_two(tokens, 16, 2 * tokens), "BE": _power_of_two(how.width, 16, 2 * how.width)}
    shape = {"TOKENS": tokens, "HEADS": how.heads, "EACH": how.width, "SCALE": how.width**-0.5}
    return {**shape, **blocks, "PRECISION": how.precision, "WIDEN": INTERPRETED, "num_warps": ATTEND_WARPS}


def cut_batches(
    images: Tensor,
    rows: Tensor,
    down: Tensor,
    right: Tensor,
    mirrored: Tensor,
    pad: int,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """uint8 images [S, n, h, w, c] -> batches [S, b, h, w, c] in [-1, 1], bit for bit as `Fit` cuts them for a client.

    All [S, b]: `rows` says which image, `mirrored` which to flip first, `down` and `right` (0 to 2 pad) where to cut it
    from its frame of `pad` black pixels. `out` is filled where given, in its own type; else one of `dtype` is made.
    """
    stack, _, height, width, c = images.shape
    batch = rows.shape[1]
    images = images.contiguous()
    if out is None:
        out = torch.empty((stack, batch, height, width, c), dtype=dtype, device=images.device)
    if not out.is_contiguous() or out.shape != (stack, batch, height, width, c):
        raise ValueError("out must be contiguous [S, b, h, w, c].")
    with torch.cuda.device_of(images):
        _cut_kernel[(stack * batch * _cdiv(height * width * c, BATCH_BLOCK),)](
            images,
            rows.contiguous(),
            down.contiguous(),
            right.contiguous(),
            mirrored.contiguous().view(torch.uint8),
            out,
            images[0].numel(),
            batch,
            H=height,
            W=width,
            C=c,
            PAD=pad,
            BLOCK=BATCH_BLOCK,
            enable_fp_fusion=False,  # the product is rounded before 1 is taken off, as torch does in two steps
        )
    return out


def _channels_last(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
    """t [S, a, c, h, w] as memory [S, a, h, w, c] of that type, and the step from one client to the next.

    At most one copy. What is expanded over the clients stays one, with step 0.
    """
    t = t.permute(0, 1, 3, 4, 2)
    one = len(t) > 1 and t.stride(0) == 0
    if one:
        t = t[:1]
    if t.dtype != dtype or not t.is_contiguous():
        t = torch.empty(t.shape, dtype=dtype, device=t.device).copy_(t)
    return t, 0 if one else t[0].numel()
