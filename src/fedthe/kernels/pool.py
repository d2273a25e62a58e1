"""Max-pooling, its gradient, and the gradient of that."""

from __future__ import annotations

import torch
from torch import Tensor

from .compiler import Block, constexpr, jit, tl
from .shapes import Windows, cdiv, window_constants


@jit
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
    """The maximum of each window and its place in it, ky KW + kx. Ties: the first. NaN: the last, as in torch."""
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
    where = tl.full((BLOCK,), 255, dtype=tl.int32)  # 255: none yet; then even -inf is taken
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


@jit
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
    """out[pixel] = the sum of g over the windows that took this pixel. Each pixel visits its windows: no atomics."""
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


@jit
def _pool_pick_kernel(
    x: Block,
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
    """out[window] = x at the place that the window took: the transpose of the scatter."""
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


def max_pool(x: Tensor, windows: Windows) -> tuple[Tensor, Tensor]:
    """x [n, c, h, w] -> the maximum of each window, and its place in the window, uint8; both [n, c, oh, ow]."""
    n, c = x.shape[:2]
    x = x.permute(0, 2, 3, 1).contiguous()
    out = x.new_empty((n, *windows.out, c))
    index = torch.empty_like(out, dtype=torch.uint8)
    grid, shape = _pool_launch(out, windows)
    with torch.cuda.device_of(x):
        _pool_kernel[grid](x, out, index, **shape, INSIDE=windows.padding == (0, 0))
    return out.permute(0, 3, 1, 2), index.permute(0, 3, 1, 2)


def max_pool_scatter(g: Tensor, index: Tensor, windows: Windows) -> Tensor:
    """The gradient of the input: g [n, c, oh, ow] -> [n, c, h, w]."""
    n, c = g.shape[:2]
    g, index = g.permute(0, 2, 3, 1).contiguous(), index.permute(0, 2, 3, 1).contiguous()
    out = g.new_empty((n, *windows.size, c))
    grid, shape = _pool_launch(out, windows)
    with torch.cuda.device_of(g):
        _pool_scatter_kernel[grid](g, index, out, **shape)
    return out.permute(0, 3, 1, 2)


def max_pool_pick(x: Tensor, index: Tensor, windows: Windows) -> Tensor:
    """x [n, c, h, w] at the places that `max_pool` took -> [n, c, oh, ow]."""
    n, c = x.shape[:2]
    x, index = x.permute(0, 2, 3, 1).contiguous(), index.permute(0, 2, 3, 1).contiguous()
    out = x.new_empty((n, *windows.out, c))
    grid, shape = _pool_launch(out, windows)
    with torch.cuda.device_of(x):
        _pool_pick_kernel[grid](x, index, out, **shape)
    return out.permute(0, 3, 1, 2)


def _pool_launch(out: Tensor, windows: Windows) -> tuple[tuple[int], dict[str, int]]:
    """The grid over blocks of out [n, h, w, c], and the constants of all three kernels."""
    values = out.shape[1:].numel()
    block = min((1024, 512, 256), key=lambda block: (cdiv(values, block) * block, -block))  # leaves fewest idle
    # Eight values per thread: 16 bytes of bfloat16. Never one warp: with it, Triton 3.6 on an H200 got the gradient of
    # a pool over 7 x 9 x 3 wrong, from the 160th value on; with two and four warps it was right.
    launch = {"C": out.shape[3], "BLOCK": block, "num_warps": max(2, block // 256)}
    shape = window_constants(windows.size, windows.out, windows.kernel, windows.stride, windows.padding)
    return (len(out) * cdiv(values, block),), shape | launch
