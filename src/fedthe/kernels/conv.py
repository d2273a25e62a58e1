"""Convolution with a weight per client, and the gradient of its input."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from .compiler import WIDEN, Block, constexpr, jit, tl
from .conv_tiles import Sweep, Tiles, conv_constants, conv_tiles, pixels_in_a_row, sweeps_of
from .shapes import Geometry, cdiv, channels_last, contiguous_rows


@jit
def _conv_kernel(
    x: Block,
    w: Block,
    bias: Block,
    residual: Block,
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
    PIXELS: constexpr,
    BM: constexpr,
    BN: constexpr,
    BK: constexpr,
) -> None:
    """out[s, m, o] = sum over taps and c of x[s, where tap meets m, c] w[s, tap, c, o]; m counts (image, y, x).

    A row of the product makes PIXELS pixels side by side, from the span of pixels that all their windows cover: its
    columns are (pixel, o), and a weight is 0 where a pixel's window does not reach. Few channels then fill a tile, and
    windows that overlap are loaded once. (An infinite value makes its neighbours NaN, too.) bias[s, o] and residual,
    which has the layout of out, are added if not None.

    x_step and w_step: strides of clients (0: all share one). W_FIRST: the offset of the first tap's weights; W_DOWN,
    W_RIGHT, W_IN, W_OUT: strides of rows and columns of taps and of input and output channels. out has images of TO_H x
    TO_W pixels, of which every STEP-th is written, starting at TO_Y and TO_X. INSIDE: no tap falls outside the image.
    """
    ACROSS: constexpr = OUT_W // PIXELS
    SPAN: constexpr = (PIXELS - 1) * STRIDE_X + KW
    LINE: constexpr = SPAN * C  # one row of taps, contiguous in memory
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

    # Load the addends first: at the end they would take registers in addition to the sums.
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    if residual is not None:
        acc = tl.load(residual + at, mask=known, other=0.0).to(tl.float32)
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
            of = kx[:, None] - (pixel * STRIDE_X)[None, :]  # which tap of that pixel's window this is
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


def conv(
    x: Tensor,
    w: Tensor,
    how: Geometry,
    tiles: Tiles | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """x [S, n, c, h, w], w [S, o, c, kh, kw] -> [S, n, o, oh, ow] in x's type. w is cast to it, sums are float32.

    Plus a bias, float32 [S, o], and a residual, shaped like the result.
    """
    stack, n, c = x.shape[:3]
    o, (rows, columns) = w.shape[1], how.kernel
    x, x_step = channels_last(x, x.dtype)
    w, w_step = channels_last(w, x.dtype)
    out = x.new_empty((stack, n, *how.out, o))
    steps = {"W_FIRST": 0, "W_DOWN": columns * c, "W_RIGHT": c, "W_IN": 1, "W_OUT": rows * columns * c}
    if residual is not None:
        residual = residual.to(x.dtype).permute(0, 1, 3, 4, 2).contiguous()
    _launch_conv(x, x_step, w, w_step, bias, residual, out, sweeps_of(how), steps, how.precision, tiles)
    return out.permute(0, 1, 4, 2, 3)


def conv_input_grad(
    g: Tensor, w: Tensor, how: Geometry, tiles: Tiles | None = None, residual: Tensor | None = None
) -> Tensor:
    """g [S, n, o, oh, ow], w [S, o, c, kh, kw] -> the gradient of the input, [S, n, c, h, w] in g's type.

    Plus a residual, shaped like the result.

    A convolution of g with the flipped weights. In float32 they are copied first, so that the channels summed over come
    last: tensor cores take float32 in no other order. With a stride, the taps that meet a pixel of the input depend on
    its position modulo the stride: each remainder is a convolution of its own, with those taps.
    """
    stack, n = g.shape[:2]
    o, c, (rows, columns) = *w.shape[1:3], how.kernel
    g, g_step = channels_last(g, g.dtype)
    turned = g.dtype == torch.float32
    w, w_step = channels_last(w.transpose(1, 2) if turned else w, g.dtype)
    last, into, out_of = (o, 1, rows * columns * o) if turned else (c, rows * columns * c, 1)
    down, right = (_backward_sweeps(how, axis) for axis in (0, 1))
    residual = residual if residual is None else residual.to(g.dtype).permute(0, 1, 3, 4, 2).contiguous()
    if all(sweep.taps for sweep in (*down, *right)):
        out = g.new_empty((stack, n, *how.size, c))
    else:
        out = g.new_zeros((stack, n, *how.size, c)) if residual is None else residual.clone()
    for sweeps in product(down, right):
        if all(sweep.windows and sweep.taps for sweep in sweeps):
            # From the last tap of this sweep, by strides to the first.
            y, z = (_last_tap(sweep, how, axis) for axis, sweep in enumerate(sweeps))
            steps = {"W_FIRST": (y * columns + z) * last, "W_IN": into, "W_OUT": out_of}
            steps |= {"W_DOWN": -how.stride[0] * columns * last, "W_RIGHT": -how.stride[1] * last}
            _launch_conv(g, g_step, w, w_step, None, residual, out, sweeps, steps, how.precision, tiles)
    return out.permute(0, 1, 4, 2, 3)


def _backward_sweeps(how: Geometry, axis: int) -> list[Sweep]:
    """Tap k meets pixel y of the input in window (y + padding - k) / stride, if that is an integer."""
    kernel, stride, padding = how.kernel[axis], how.stride[axis], how.padding[axis]
    sweeps = []
    for first in range(stride):
        tap = (first + padding) % stride  # the first one; then every stride-th
        taps = max(0, cdiv(kernel - tap, stride))
        reach = (first + padding - tap) // stride - (taps - 1)  # the last tap's window
        sweeps.append(Sweep(max(0, cdiv(how.size[axis] - first, stride)), taps, 1, -reach, first, stride))
    return sweeps


def _last_tap(sweep: Sweep, how: Geometry, axis: int) -> int:
    return (sweep.first + how.padding[axis]) % how.stride[axis] + (sweep.taps - 1) * how.stride[axis]


def _launch_conv(
    x: Tensor,
    x_step: int,
    w: Tensor,
    w_step: int,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    sweeps: tuple[Sweep, Sweep],
    steps: dict[str, int],
    precision: str,
    tiles: Tiles | None,
) -> None:
    """x [S or 1, n, h, w, c] and w as `channels_last` gives them, to out [S, n, h, w, o]."""
    down, right = sweeps
    height, width, c = x.shape[2:]
    stack, n, to_height, to_width, o = out.shape
    if tiles is None:
        pixels = pixels_in_a_row(c, right, x.dtype)
        tiles = conv_tiles(n * down.windows * right.windows, c, o, down.taps * right.taps, x.dtype, pixels)
    if right.windows % tiles.pixels:
        tiles = tiles._replace(pixels=1)
    rows = n * down.windows * right.windows // tiles.pixels
    bias, b_step = (None, 0) if bias is None else contiguous_rows(bias)
    constants = conv_constants((height, width), c, o, sweeps, precision, tiles)
    to = {"TO_H": to_height, "TO_W": to_width, "TO_Y": down.first, "TO_X": right.first}
    to |= {"STEP_Y": down.step, "STEP_X": right.step}
    grid = (stack * cdiv(rows, tiles.m) * cdiv(tiles.pixels * o, tiles.n),)
    with torch.cuda.device_of(x):
        _conv_kernel[grid](x, w, bias, residual, out, rows, x_step, w_step, b_step, **constants, **steps, **to)
