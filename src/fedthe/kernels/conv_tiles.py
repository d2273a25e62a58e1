"""How the matrix products of convolutions are tiled: by one client's shape and type, never by S."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .shapes import Geometry, Pair, cdiv, power_of_two, window_constants


class Tiles(NamedTuple):
    """Tiles of a matrix product [m, k] x [k, n]; powers of two of at least 16."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    pixels: int = 1  # side by side in one position; see `conv._conv_kernel`
    registers: int | None = None  # per thread, at most


class Sweep(NamedTuple):
    """The windows of a convolution along one axis, and the pixels of the result that they write."""

    windows: int
    taps: int  # of each window
    stride: int
    padding: int
    first: int = 0  # pixel of the result
    step: int = 1  # from one to the next


def sweeps_of(how: Geometry) -> tuple[Sweep, Sweep]:
    down, right = zip(how.out, how.kernel, how.stride, how.padding, strict=True)
    return Sweep(*down), Sweep(*right)


def conv_tiles(rows: int, c: int, o: int, taps: int, dtype: torch.dtype, pixels: int = 1) -> Tiles:
    """For `conv` and `conv_input_grad`: m are output positions, n output channels, k taps times input channels.

    A pipeline of several stages bypasses the L1 cache, and needs so much memory that few programs share a
    multiprocessor: if windows overlap and channels are few, many programs without a pipeline are faster.
    """
    if rows <= 64:  # a linear layer on a small batch mostly reads weights: many small loads in flight
        return Tiles(power_of_two(rows, 16, 64), power_of_two(o, 16, 32), 64 if c % 64 == 0 else 32, 2, 4)
    n = power_of_two(pixels * o, 16, 128)
    if dtype != torch.bfloat16:
        k = 32 if c % 32 == 0 else power_of_two(taps * c, 16, 32)
        return Tiles(64, n, k, 8, 3) if n > 64 else Tiles(128, n, k, 4, 3)
    if pixels > 1:
        return _crowded(Tiles(128, n, 64, 8, 1, pixels), 64)
    if c % 8:  # few channels: a step spans several taps, so fewer steps are better
        return Tiles(256, n, power_of_two(taps * c, 16, 128), 8 if n > 64 else 4, 2)
    if c % 32:
        return Tiles(128, n, power_of_two(taps * c, 16, 64), 8 if n > 64 else 4, 1)
    if c % 64 == 0:
        return Tiles(128, n, 64, 8 if n > 64 else 4, 3)
    return Tiles(256, n, 32, 8 if n > 64 else 4, 4)


def pixels_in_a_row(c: int, across: Sweep, dtype: torch.dtype) -> int:
    """How many pixels side by side make one position, for `conv_tiles` and `weight_grad_tiles`.

    Two windows of three taps cover four pixels, a power of two. Many channels fill tiles without it.
    """
    overlap = across.taps == 3 and across.stride == 1 and across.windows % 2 == 0
    return 2 if overlap and c <= 32 and dtype == torch.bfloat16 else 1


def weight_grad_tiles(rows: int, c: int, o: int, taps: int, dtype: torch.dtype, pixels: int = 1) -> Tiles:
    """For `conv_weight_grad`: m are taps times input channels, n output channels, k output positions."""
    n = power_of_two(pixels * o, 16, 128)
    if rows <= 64:
        return Tiles(64, n, power_of_two(rows, 16, 32), 2, 4)
    if dtype != torch.bfloat16:  # no stages: positions are not the last axis, so float32 is transposed on the way
        return Tiles(64, n, 32, 4, 1)
    if pixels > 1:  # no stages: see `conv_tiles`
        m = power_of_two(taps * c * 4 // 3, 64, 256) if c <= 16 else 128  # a span of four pixels for three taps
        return _crowded(Tiles(m, n, 64, 8 if m * n > 64 * 64 else 4, 1, pixels), 80 if c <= 16 else 64)
    m = 64 if taps * c > 128 else power_of_two(taps * c, 16, 128)
    return Tiles(m, n, 64, warps=8 if m * n > 64 * 64 else 4, stages=3)


def weight_grad_splits(rows: int, c: int, o: int, taps: int, tiles: Tiles) -> int:
    """Into how many parts to split the sum over positions, so that few clients with few weights still fill a GPU.

    One client may have very many positions: if clients share a weight, those of all their images. The parts are written
    and read again, so they must be small compared with images and gradients; sixteen parts with the large tiles of
    linear layers over tokens would be as large as these.
    """
    programs = cdiv(taps * c, tiles.m) * cdiv(tiles.pixels * o, tiles.n)
    enough = 16 if tiles.m * tiles.n <= 128 * 64 else 4
    wanted = max(enough // programs, min(64, rows >> 15))
    cheap = rows * (c + o) // (4 * taps * c * o)
    return max(1, min(wanted, cheap, cdiv(rows, tiles.k * tiles.pixels)))


def conv_constants(
    size: Pair, c: int, o: int, sweeps: tuple[Sweep, Sweep], precision: str, tiles: Tiles
) -> dict[str, Any]:
    """Constants of the kernels of `conv` and `conv_weight_grad`. `size` is the image's."""
    windows, taps, strides, paddings, *_ = zip(*sweeps, strict=True)
    inside = (
        sweep.padding <= 0 and (sweep.windows - 1) * sweep.stride - sweep.padding + sweep.taps <= side
        for sweep, side in zip(sweeps, size, strict=True)
    )
    return {
        **window_constants(size, windows, taps, strides, paddings),
        "C": c,
        "O": o,
        "INSIDE": all(inside),
        "PRECISION": precision,
        "PIXELS": tiles.pixels,
        "BM": tiles.m,
        "BN": tiles.n,
        "BK": tiles.k,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        "maxnreg": tiles.registers,
    }


def _crowded(tiles: Tiles, registers: int) -> Tiles:
    """With few registers per thread, so that more programs share a multiprocessor: without stages they wait for memory.

    The compiler fails if the sums alone need most of them.
    """
    sums = tiles.m * tiles.n // (32 * tiles.warps)
    return tiles._replace(registers=registers) if sums <= 32 else tiles
