"""Augmented views of single images as MEMO makes them, for many images and views at once.

Zhang, Levine and Finn, "MEMO: test time robustness via adaptation and augmentation", NeurIPS 2022,
https://arxiv.org/abs/2110.09506: a random crop and flip, then AugMix (Hendrycks et al., ICLR 2020,
https://arxiv.org/abs/1912.02781) at severity 1. Each operation does what Pillow's does, with uint8 images in between.
Pixels from outside the image are black, as in AugMix; MEMO's code says `fillcolor=128`, which in Pillow is a dark red.

Each view of a sample draws sixteen 32-bit words, keyed by (key_path, "augmix") and the sample's item:

    0        crop and flip: one of 9 offsets down, one of 9 to the right, one of 2 sides
    1        m, the weight of the cropped image in the mix
    2, 3     two points that cut (0, 1) in three: the weights of the three chains, Dirichlet(1, 1, 1)
    4 to 6   the length of each chain, 1 to 3
    7 to 15  chain after chain, three steps each: one of the 9 OPS, one of 2 signs, one of 2**23 levels

A word that decides several things is read as digits (see `_split`). The result for a sample does not depend on the rest
of the batch, and a larger number of views begins with the same views.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample, pad

from .. import rng
from ..corruptions.shared import check_images
from ..errors import InputError
from ..kernels import use_kernels
from ..kernels.augmix_recipe import CHAINS, COSINES, DUST, LEVEL, OPS, PAD, SHEAR, SINES, STEPS, WORDS

_ROTATE, _SHEAR_X, _SHEAR_Y, _POSTERIZE = 2, 4, 5, 8
_KINDS = _EQUALIZE, _STRETCH, _POINT, _WARP = range(4)  # kinds of work: three map levels by tables, one moves pixels
_KIND_OF_OP = np.array((_STRETCH, _EQUALIZE, _WARP, _POINT, _WARP, _WARP, _WARP, _WARP, _POINT))
_CACHED = 192 * 32 * 32 * 3  # values processed at a time, so that they stay in the CPU's cache
_LEVELS, _LIMITS = np.arange(256), 256 - np.arange(26)[:, None]
# uint8 [27, 256]: the levels after solarize by 0 to 25, and after posterize to 4 bits
_POINT_TABLES = np.vstack((np.where(_LEVELS < _LIMITS, _LEVELS, 255 - _LEVELS), _LEVELS & 0xF0)).astype(np.uint8)


def augmix(images: Tensor, key_path: tuple[int | str, ...], items: Tensor, views: int) -> Tensor:
    """`views` augmented views of each image: float32 [n, views, c, h, w] in [-1, 1], channels last in memory.

    images: uint8 [n, h, w, 1 or 3]. items: int64 [n], the sample behind each image. The draws depend only on
    `key_path`, the item and the view.
    """
    _check(images, items, views)
    key = rng.key(*key_path, "augmix")
    if _find_kernel(images) is None:
        return _draw_key(images, key, items, views)
    keys = torch.stack([torch.full_like(items, word, device=images.device) for word in key], 1)  # without a sync
    return augmix_rows(images, keys, items, views)


def augmix_rows(images: Tensor, keys: Tensor, items: Tensor, views: int) -> Tensor:
    """As `augmix`, with a key for each image: int64 [n, 2], the words of `rng.key(*key_path, "augmix")`.

    It augments images of several streams at once: on a GPU with Triton, in one launch without a sync.
    """
    _check(images, items, views)
    if keys.dtype != torch.int64 or keys.shape != (len(images), 2):
        raise InputError(
            f"there must be a key of two int64 words per image, but there are {len(images)} images "
            f"and keys {keys.dtype} {list(keys.shape)}."
        )
    draw_views = _find_kernel(images)
    if draw_views is not None:
        return draw_views(images, keys.to(images.device), items.to(images.device), views).movedim(4, 2)
    n, h, w, c = images.shape
    done = torch.empty((n, views, h, w, c), device=images.device).movedim(4, 2)
    pairs = keys.tolist()
    for first, second in sorted(set(map(tuple, pairs))):
        rows = torch.tensor([row for row, pair in enumerate(pairs) if pair == [first, second]])
        there = rows.to(images.device)
        done[there] = _draw_key(images[there], (first, second), items[rows.to(items.device)], views)
    return done


def _find_kernel(images: Tensor) -> Callable[[Tensor, Tensor, Tensor, int], Tensor] | None:
    """The Triton kernel for such images, or None."""
    if not use_kernels(images):
        return None
    from ..kernels.augmix import LARGEST, draw_views

    return draw_views if max(images.shape[1:3]) <= LARGEST else None


def _draw_key(images: Tensor, key: rng.Key, items: Tensor, views: int) -> Tensor:
    """`augmix` in torch and NumPy: the reference, and the implementation for CPUs."""
    n, h, w, c = images.shape
    names = items.cpu().numpy()
    done = torch.empty((n, views, h, w, c), device=images.device)
    size = max(1, (_CACHED if images.device.type == "cpu" else 32 * _CACHED) // (views * h * w * c))
    for start in range(0, n, size):
        part = slice(start, start + size)
        words = rng.words(key, names[part], views * WORDS).reshape(-1, WORDS)
        mixed = _augment(images[part], read_draws(words))
        done[part] = mixed.view(-1, views, c, h, w).movedim(2, 4)
    return done.movedim(4, 2)


def _check(images: Tensor, items: Tensor, views: int) -> None:
    check_images(images, items, "augment")
    if views < 1:
        raise InputError(f"there must be at least one view of an image, not {views}.")


# Draws and plans are small, and NumPy is fastest on small arrays: they are made on the CPU, for every device.


class Draws(NamedTuple):
    """The random decisions for r views."""

    down: np.ndarray  # int64 [r], 0 to 8
    right: np.ndarray  # int64 [r], 0 to 8
    mirrored: np.ndarray  # int64 [r], 0 or 1
    share: np.ndarray  # float32 [1 + CHAINS, r]: weight in the mix of the cropped image and of each chain
    depth: np.ndarray  # int64 [r, CHAINS], 1 to 3
    op: np.ndarray  # int64 [r, CHAINS, STEPS], into OPS
    negative: np.ndarray  # int64 [r, CHAINS, STEPS], 0 or 1
    level: np.ndarray  # int64 [r, CHAINS, STEPS]: from 0.1 to 1, in units of 1 / LEVEL


def read_draws(words: np.ndarray) -> Draws:
    """words: int64 [r, WORDS], in the layout of this module's docstring."""
    down, rest = _split(words[:, 0], 2 * PAD + 1)
    right, rest = _split(rest, 2 * PAD + 1)
    keep, one, two = ((words[:, 1:4] >> 9) + 0.5).T * 2.0**-23
    low, high = np.minimum(one, two), np.maximum(one, two)
    others = 1 - keep
    share = np.stack((keep, others * low, others * (high - low), others * (1 - high)))
    op, within = _split(words[:, 7:].reshape(-1, CHAINS, STEPS), len(OPS))
    return Draws(
        down=down,
        right=right,
        mirrored=rest >> 31,
        share=share.astype(np.float32),
        depth=1 + _split(words[:, 4:7], STEPS)[0],
        op=op,
        negative=within >> 31,
        level=2**24 + 9 + 18 * (within >> 8 & 2**23 - 1),  # 0.1 + 0.9 u, u the centre of one of 2**23 cells
    )


def _split(word: np.ndarray, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """The first digit, below `parts`, of a 32-bit word as a number in [0, 1); and the digits after it, as a word."""
    product = word * parts
    return product >> 32, product & 2**32 - 1


class Plan(NamedTuple):
    """All tasks in order. A task is one step of one chain of one view.

    All images are kept in a bank: first the r cropped ones, then the result of each task.
    """

    sizes: list[list[int]]  # [step][kind]: number of tasks, which are sorted by step, then kind
    source: np.ndarray  # int64 [tasks]: index of each task's input in the bank
    result: np.ndarray  # int64 [CHAINS, r]: index of each chain's result in the bank
    tables: list[np.ndarray]  # [step], uint8 [points, 1, 256]: the new level of each level (solarize, posterize)
    across: list[np.ndarray]  # [step], float32 [2, warps, 1, w]: see `warp`
    down: list[np.ndarray]  # [step], float32 [2, warps, h, 1]


def make_plan(draws: Draws, h: int, w: int) -> Plan:
    r = len(draws.op)
    op, negative, level = (draw.reshape(-1, STEPS).T.ravel() for draw in (draws.op, draws.negative, draws.level))
    # AugMix: int(level * largest / 10), here in integers, so that rounding plays no part. Shears are not integers, and
    # posterize leaves 4 bits at all levels of severity 1.
    thrice_largest = np.array((0, 0, 3 * 30, 3 * 256, 0, 0, w, h, 0))
    size = level * thrice_largest[op] // (3 * 10 * LEVEL)
    is_shear = (op == _SHEAR_X) | (op == _SHEAR_Y)
    kind = _KIND_OF_OP[op]
    step = np.arange(STEPS)[:, None]
    idle = (draws.depth.ravel() <= step).ravel() | (kind == _WARP) & ~is_shear & (size == 0)
    group = (kind.reshape(STEPS, -1) + len(_KINDS) * step).ravel()
    group[idle] = len(_KINDS) * STEPS
    counts = np.bincount(group, minlength=len(_KINDS) * STEPS)[: len(_KINDS) * STEPS].reshape(STEPS, -1)
    tasks = np.argsort(group, kind="stable")[: counts.sum()]

    chain, source = tasks % (CHAINS * r), np.empty_like(tasks)
    at = np.arange(CHAINS * r) // CHAINS
    end = 0
    for count in counts.sum(1).tolist():
        start, end = end, end + count
        source[start:end] = at[chain[start:end]]
        at[chain[start:end]] = np.arange(r + start, r + end)

    points = tasks[kind[tasks] == _POINT]
    tables = _POINT_TABLES[np.where(op[points] == _POSTERIZE, -1, size[points])]

    warps = tasks[kind[tasks] == _WARP]
    amount = np.where(is_shear[warps], level[warps] * SHEAR, size[warps])
    across, down = _look(op[warps], np.where(negative[warps] > 0, -amount, amount), h, w)
    upto = counts.cumsum(0)[:-1]
    return Plan(
        sizes=counts.tolist(),
        source=source,
        result=at.reshape(r, CHAINS).T,
        tables=np.split(tables[:, None], upto[:, _POINT]),
        across=np.split(across, upto[:, _WARP], axis=1),
        down=np.split(down, upto[:, _WARP], axis=1),
    )


def _look(op: np.ndarray, amount: np.ndarray, h: int, w: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the pixels of t images look: float32 [2, t, 1, w] and [2, t, h, 1], whose sum `warp` takes.

    amount: degrees counter-clockwise, pixels across per pixel down or down per across, or pixels, as `op` says.
    """
    is_rotate = op == _ROTATE
    degrees = np.where(is_rotate, amount, 0).astype(np.int64)
    directions, u, v = _directions(h, w)
    matrix = directions[:, op] * np.where(is_rotate, SINES[degrees], amount)[:, None]
    matrix[0, :, 0] += COSINES[degrees]
    matrix[1, :, 1] += COSINES[degrees]
    by_u, by_v, shift = (matrix[:, :, i : i + 1] for i in range(3))
    return (by_u * u + shift).astype(np.float32)[:, :, None], (by_v * v).astype(np.float32)[..., None]


@lru_cache(maxsize=16)
def _directions(h: int, w: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a unit of each of OPS adds to its affine map, [2, OPS, 3]; and the coordinates of pixels across and down.

    Coordinates go from -1 to 1 between the outer edges. A map takes (u, v, 1) to where a pixel at (u, v) looks.
    """
    none, tall, wide = (0, 0, 0), h / w, w / h
    across = [none, none, (0, -tall, 0), none, (0, tall, tall), none, (0, 0, 2 / w), none, none]
    down = [none, none, (wide, 0, 0), none, none, (wide, 0, wide), none, (0, 0, 2 / h), none]
    u, v = ((2 * np.arange(side) + 1) / side - 1 for side in (w, h))
    return np.array((across, down), dtype=np.float64), u, v


# The work, on uint8 [images, c, h, w]


@torch.inference_mode()  # 10 % faster for one image; `augmix` copies the result to a tensor that autograd accepts
def _augment(images: Tensor, draws: Draws) -> Tensor:
    """uint8 [n, h, w, c] -> float32 [r, c, h, w] in [-1, 1]: r / n views of each image"""

    def send(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(images.device)

    _, h, w, c = images.shape
    r, plan = len(draws.op), make_plan(draws, h, w)
    bank = images.new_empty((r + len(plan.source), c, h, w))
    bank[:r] = crop_and_flip(images, send(draws.down), send(draws.right), send(draws.mirrored))
    source, end = send(plan.source), 0
    for sizes, tables, across, down in zip(plan.sizes, plan.tables, plan.across, plan.down, strict=True):
        start, end = end, end + sum(sizes)
        before = bank.index_select(0, source[start:end])
        after = bank[r + start : r + end]
        looked_up = len(before) - sizes[_WARP]
        if looked_up:
            after[:looked_up] = look_up(before[:looked_up], sizes[_EQUALIZE], sizes[_STRETCH], send(tables))
        if sizes[_WARP]:
            after[looked_up:] = warp(before[looked_up:], send(across) + send(down))
    share, result = send(draws.share / np.float32(127.5))[..., None, None, None], send(plan.result)
    total = bank[:r].float().mul_(share[0])
    for chain in range(CHAINS):
        total += bank.index_select(0, result[chain]).float().mul_(share[1 + chain])
    return total.sub_(1).clamp_(-1, 1)


def crop_and_flip(images: Tensor, down: Tensor, right: Tensor, mirrored: Tensor) -> Tensor:
    """r / n views of each image: padded with 4 black pixels, cropped at (down, right), then mirrored or not.

    images: uint8 [n, h, w, c]; down and right: int64 [r], 0 to 8; mirrored: int64 [r], 0 or 1. uint8 [r, c, h, w].
    """
    n, h, w, _ = images.shape
    framed = pad(images.movedim(3, 1), (PAD, PAD, PAD, PAD))
    both = torch.stack((framed, framed.flip(3))).unfold(3, h, 1).unfold(4, w, 1)  # [2, n, c, 9, 9, h, w]
    across = torch.where(mirrored > 0, 2 * PAD - right, right)  # a mirrored image is cropped from the other side
    which = torch.arange(len(down), device=images.device) // (len(down) // n)
    return both[mirrored, which, :, down, across]


def look_up(x: Tensor, equalized: int, stretched: int, tables: Tensor) -> Tensor:
    """Equalize the first images, stretch the next, and map the levels of the rest by uint8 tables [rest, 1, 256]."""
    planes = x.flatten(2).flatten(0, 1)
    starts = torch.arange(0, 256 * len(planes), 256, dtype=torch.int32, device=x.device)
    index = planes.int().add_(starts[:, None])
    a, b = x.shape[1] * equalized, x.shape[1] * (equalized + stretched)
    of_all = torch.empty((len(planes), 256), dtype=torch.uint8, device=x.device)
    if equalized:
        of_all[:a] = _equalize(planes[:a], index[:a])
    if stretched:
        of_all[a:b] = _stretch(planes[a:b])
    of_all[b:].view(-1, x.shape[1], 256).copy_(tables)
    return of_all.flatten().index_select(0, index.flatten()).view(x.shape)


def _equalize(planes: Tensor, index: Tensor) -> Tensor:
    """ImageOps.equalize: each level becomes the share of pixels below it, in integer steps; uint8 [planes, 256]"""
    counts = torch.bincount(index.flatten(), minlength=256 * len(planes)).view(-1, 256)
    brightest = counts.gather(1, planes.amax(1).long()[:, None])
    step = (planes.shape[1] - brightest) // 255
    below = counts.cumsum(1).sub_(counts).add_(step // 2)
    # integers below 2**24: even in float32, their quotient rounds to an integer only if it is one
    table = below.float().div_(step.float()).clamp_(max=255)
    return torch.where(step == 0, _levels(planes.device, torch.float32), table).to(torch.uint8)


def _stretch(planes: Tensor) -> Tensor:
    """ImageOps.autocontrast: the darkest level becomes 0 and the brightest 255; uint8 [planes, 256]"""
    levels = _levels(planes.device, torch.float64)
    low, high = planes.amin(1).double()[:, None], planes.amax(1).double()[:, None]
    # rounded as in Pillow, which may give 254 instead of 255; torch computes 255 / x as 255 * (1 / x)
    scale = torch.full_like(low, 255).div_(high - low)
    table = (levels * scale).sub_(low * scale).clamp_(0, 255)
    return torch.where(low == high, levels, table).to(torch.uint8)


@lru_cache(maxsize=4)
def _levels(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=dtype, device=device)


def warp(x: Tensor, place: Tensor) -> Tensor:
    """Image.transform with BILINEAR; black where a pixel looks outside.

    place: float32 [2, images, h, w], where each pixel looks, across and down, from -1 to 1 between the outer edges.
    """
    inside = torch.maximum(place[0].abs(), place[1].abs()) < 1
    moved = grid_sample(x.float(), place.movedim(0, 3), mode="bilinear", padding_mode="border", align_corners=False)
    return moved.add_(DUST).short().to(torch.uint8).mul_(inside[:, None])
