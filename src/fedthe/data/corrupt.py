"""The fifteen corruptions of CIFAR-10-C, for many images at once.

Hendrycks and Dietterich, "Benchmarking neural network robustness to common corruptions and perturbations", ICLR 2019,
https://arxiv.org/abs/1903.12261. The constants are those of CIFAR-10-C.

A sample's result is its own, whatever its neighbours, the batch size, the order or the number of threads:
- every draw is keyed by (seed, "corrupt", name) and the sample's item, and by nothing else;
- where a library picks the order of a sum, the terms are whole numbers below 2**24, which float32 holds exactly;
- all other arithmetic is one rounded operation per element at a time, so that nothing is fused on one path only.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from .. import rng
from ..errors import InputError
from ..parallel import map_in_threads
from ..progress.events import track
from .frost import enlarge_frost, make_frost
from .images import check_images

T = TypeVar("T")

UNIT = (
    65_520  # the whole-number weights of a blur add up to this: times a byte below 2**24; and fifths, ninths are whole
)
LUMA = (0.299, 0.587, 0.114)
_CACHED = 128 * 32 * 32 * 3  # bytes of images at a time: the work on them stays in the processor's cache
_LOCK = Lock()
_GROUPED = 64 * _CACHED  # streaks are drawn for all images of one direction together, so here more is better


@dataclass(frozen=True)
class Case:
    """What a corruption needs to know besides the images."""

    severity: int
    path: tuple[int | str, ...]
    items: Tensor  # int64 [n]
    frost: Sequence[Tensor]

    def pick(self, by_severity: Sequence[T]) -> T:
        return by_severity[self.severity - 1]

    def words(self, what: str, count: int) -> Tensor:
        """int64 [n, count] in [0, 2**32)"""
        return self._draw(rng.words, what, count)

    def uniform(self, what: str, count: int) -> Tensor:
        return self._draw(rng.uniform, what, count)

    def normal(self, what: str, count: int) -> Tensor:
        return self._draw(rng.normal, what, count)

    def _draw(self, draw: Callable[[rng.Key, Tensor, int], Tensor], what: str, count: int) -> Tensor:
        key, step = rng.key(*self.path, what), max(1, _fit(self.items.device) // count)
        return torch.cat([draw(key, items, count) for items in torch.split(self.items, step)])


def corrupt(
    images: Tensor,
    name: str,
    severity: int,
    items: Tensor,
    seed: int,
    frost: Sequence[Tensor] | Tensor | None = None,
) -> Tensor:
    """`images`, uint8 [n, height, width, 1 or 3], with the corruption `name` at `severity` 1 to 5.

    `items`, int64 [n], says which sample each image is: the draws follow it. `frost` holds textures, uint8 [height,
    width, 3] each (see `frost.load_frost`); without it, those made by code are used.
    """
    _check(images, name, severity, items)
    made = enlarge_frost(make_frost(), max(images.shape[1:3])) if frost is None else frost
    textures = [texture.to(images.device) for texture in made]
    size = max(1, (_GROUPED if name in _BY_STREAK else _fit(images.device)) // max(1, images[:1].numel()))
    work, path = _BY_NAME[name], (seed, "corrupt", name)
    done = torch.empty_like(images, memory_format=torch.contiguous_format)
    for start in range(0, len(images), size):
        part = slice(start, start + size)
        done[part] = work(images[part].contiguous(), Case(severity, path, items[part].to(images.device), textures))
    return done


def corrupt_mixed(
    images: Tensor,
    kinds: Tensor,
    severity: int,
    items: Tensor,
    seed: int,
    frost: Sequence[Tensor] | Tensor | None = None,
) -> Tensor:
    """Each image with its own corruption, CORRUPTIONS[kinds[i]]; `kinds` is int [n]."""
    present: list[int] = torch.unique(kinds).tolist()
    if kinds.shape != images.shape[:1] or any(not 0 <= kind < len(CORRUPTIONS) for kind in present):
        raise InputError(f"there must be one kind per image, from 0 to {len(CORRUPTIONS) - 1}.")
    done = torch.empty_like(images)

    def corrupt_kind(kind: int) -> None:
        rows = (kinds == kind).nonzero().flatten().to(images.device)
        own = items[rows.to(items.device)]
        done[rows] = corrupt(images[rows], CORRUPTIONS[kind], severity, own, seed, frost)

    threads = torch.get_num_threads() if images.device.type == "cpu" else 1
    for _ in track("corrupting the test images", map_in_threads(corrupt_kind, present, threads), len(present)):
        pass
    return done


def _check(images: Tensor, name: str, severity: int, items: Tensor) -> None:
    if name not in _BY_NAME:
        near = difflib.get_close_matches(str(name), CORRUPTIONS, n=1, cutoff=0)
        raise InputError(f"there is no corruption {name!r}; the nearest is {near[0]!r}.")
    if severity not in range(1, 6):
        raise InputError(f"the severity of a corruption is 1, 2, 3, 4 or 5, not {severity!r}.")
    check_images(images, items, "corrupt")


def _fit(device: torch.device) -> int:
    """How many values to work on at a time."""
    return _CACHED if device.type == "cpu" else 16 * _CACHED


def _to_bytes(levels: Tensor) -> Tensor:
    """Cut to whole levels, as CIFAR-10-C does; the small addend keeps 254.99998, meant as 255, from becoming 254."""
    return (levels + 2e-4).clamp_(0, 255).to(torch.uint8)


# Noise


def _gaussian_noise(x: Tensor, case: Case) -> Tensor:
    scale = case.pick((0.04, 0.06, 0.08, 0.09, 0.10))
    return _to_bytes(case.normal("noise", x[0].numel()).mul_(255 * scale).view(x.shape).add_(x))


def _shot_noise(x: Tensor, case: Case) -> Tensor:
    """Photon counts: Poisson with mean level / 255 * photons, by the inverse of its distribution function."""
    thresholds, values, guide = (t.to(x.device) for t in _count_photons(case.pick((500, 250, 100, 75, 50))))
    level, draw = x.flatten().long(), case.words("noise", x[0].numel()).flatten()
    byte = guide[level << _GUIDE | draw >> 32 - _GUIDE]
    open_ = (byte < 0).nonzero().flatten()
    draw, level = draw[open_], level[open_]
    byte[open_] = values[torch.searchsorted(thresholds, level << 23 | draw >> 9, right=True)]
    return byte.to(torch.uint8).view(x.shape)


_GUIDE = 11


@lru_cache(maxsize=5)
def _count_photons(photons: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each level, which of the 2**23 cells of a uniform draw lead to which byte.

    thresholds: the first cell of each next count, level after level, as level * 2**23 + cell; int64.
    values: the byte that each count stands for, in the same order; int16.
    guide: int16 [256 * 2**_GUIDE]: the byte that all cells with these first bits lead to, or -1 where they differ.
    """
    from scipy.stats import poisson

    counts = np.arange(2 * photons + 60)
    below = poisson.cdf(counts, np.arange(256)[:, None] * (photons / 255))  # [level, count]
    first = np.floor(below * 2**23 + 0.5).astype(np.int64)  # draws are the centres of cells
    kept = np.concatenate((np.ones((256, 1), dtype=bool), first[:, :-1] < 2**23), axis=1)
    thresholds = ((np.arange(256)[:, None] << 23) + first)[kept]
    values = np.minimum(counts * 255 / photons + 2e-4, 255).astype(np.int16)
    byte = np.broadcast_to(values, kept.shape)[kept]
    start = np.arange(256 << _GUIDE) << 23 - _GUIDE
    one = np.searchsorted(thresholds, start, side="right")
    two = np.searchsorted(thresholds, start + (1 << 23 - _GUIDE) - 1, side="right")
    guide = np.where(one == two, byte[one], np.int16(-1))
    return torch.from_numpy(thresholds), torch.from_numpy(byte.copy()), torch.from_numpy(guide)


def _impulse_noise(x: Tensor, case: Case) -> Tensor:
    """Each value of each channel on its own: half of those hit become white, half black."""
    amount = case.pick((0.01, 0.02, 0.03, 0.05, 0.07))
    draw = case.uniform("noise", x[0].numel()).view(x.shape)
    return x.masked_fill(draw < amount, 0).masked_fill_(draw < amount / 2, 255)


# Blur


def _defocus_blur(x: Tensor, case: Case) -> Tensor:
    return _to_bytes(_mix_pixels(x, _make_defocus(x.shape[1], x.shape[2], case.severity)))


def _glass_blur(x: Tensor, case: Case) -> Tensor:
    """Each pixel takes the value of a neighbour above or to the left, between two light blurs.

    The loop of CIFAR-10-C means to swap two pixels but assigns NumPy views, so that it copies one onto the other; it
    goes through the image backwards, so that the source is not yet changed: one pass is a single gather.
    """
    sigma, passes = case.pick(((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2)))
    n, h, w, c = x.shape
    smooth = _make_glass(h, w, sigma)
    draw = case.words("shuffle", h * w).view(n, h, w)
    rows, columns = torch.arange(h, device=x.device)[:, None], torch.arange(w, device=x.device)
    moved = (rows > 1) & (columns > 1)
    place = (rows * w + columns).flatten()
    source = place.expand(n, -1)
    for i in reversed(range(passes)):  # the last pass says where to look in the result of the one before
        up, left = draw >> 31 - 2 * i & 1, draw >> 30 - 2 * i & 1
        source = (place - ((up * w + left) * moved).flatten(1)).gather(1, source)
    pixels = _to_bytes(_mix_pixels(x, smooth)).reshape(n * h * w, c)
    first = torch.arange(n, device=x.device)[:, None] * (h * w)
    return _to_bytes(_mix_pixels(pixels.index_select(0, (source + first).flatten()).view(x.shape), smooth))


def _motion_blur(x: Tensor, case: Case) -> Tensor:
    radius, sigma = case.pick(((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5)))
    return _streak(x, case.words("angle", 1)[:, 0], radius, sigma, -45)


def _zoom_blur(x: Tensor, case: Case) -> Tensor:
    return _to_bytes(_mix_pixels(x, _make_zoom(x.shape[1], x.shape[2], case.severity)))


def _mix_pixels(x: Tensor, mix: Tensor) -> Tensor:
    """Each pixel as a mix of pixels, float [n, h, w, c]; the sparse `mix` [h * w, h * w] holds whole parts of UNIT."""
    mixed = torch.sparse.mm(mix.to(x.device), _to_columns(x))
    return _from_columns(_share(mixed), x.shape)


def _share(total: Tensor) -> Tensor:
    """A sum of whole parts over UNIT: by a tensor, since CUDA takes a plain number's rounded inverse instead."""
    return total.div_(total.new_tensor(UNIT))


def _to_columns(x: Tensor) -> Tensor:
    """[n, h, w, c] as float [h * w, n * c]: what happens to a pixel happens to a row of all images."""
    n, h, w, c = x.shape
    return x.view(n, h * w, c).transpose(0, 1).reshape(h * w, n * c).float()


def _from_columns(columns: Tensor, shape: torch.Size) -> Tensor:
    n, h, w, c = shape
    return columns.view(h * w, n, c).transpose(0, 1).reshape(shape)


@lru_cache(maxsize=8)
def _make_defocus(h: int, w: int, severity: int) -> Tensor:
    """A disk, softened at its rim by a 3 x 3 Gaussian; the image is mirrored at its border pixels."""
    from scipy.ndimage import convolve1d

    radius, rim = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))[severity - 1]
    reach = np.arange(-3, 4)
    disk = (reach[:, None] ** 2 + reach**2 <= radius**2).astype(float)
    edge = np.exp(-0.5 / rim**2)
    soft = np.array([edge, 1, edge]) / (1 + 2 * edge)
    kernel = convolve1d(convolve1d(disk / disk.sum(), soft, 0), soft, 1)
    down, across = ([_read(_mirror(np.arange(n) + d, n, 0)) for d in reach] for n in (h, w))
    return _make_whole(kernel[i, j] * _cross(down[i], across[j]) for i, j in np.argwhere(kernel > 0))


@lru_cache(maxsize=8)
def _make_glass(h: int, w: int, sigma: float) -> Tensor:
    """A Gaussian cut at four sigma; the border pixels go on beyond the image."""
    weights = _gaussian(sigma, 4)
    reach = len(weights) // 2
    down, across = (
        sum(weight * _read(np.clip(np.arange(n) + i - reach, 0, n - 1), n) for i, weight in enumerate(weights))
        for n in (h, w)
    )
    return _make_whole([_cross(down, across)])


@lru_cache(maxsize=8)
def _make_zoom(h: int, w: int, severity: int) -> Tensor:
    """The mean of the image and of its enlargements (the first of which, by 1, is the image again)."""
    factors = np.arange(1, (1.06, 1.11, 1.16, 1.21, 1.26)[severity - 1], 0.01)

    def enlarge(n: int, factor: float) -> Any:
        low, high, part = _zoom_places(n, factor)
        return _scale_rows(_read(low, n), 1 - part) + _scale_rows(_read(high, n), part)

    share = 1 / (len(factors) + 1)
    return _make_whole(share * _cross(enlarge(h, z), enlarge(w, z)) for z in (1.0, *factors))


def _zoom_places(n: int, factor: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where each of n pixels looks in a row whose middle is enlarged: the pixel before, the one after, how far on."""
    cut = int(np.ceil(n / factor))
    grown = round(cut * factor)
    place = (np.arange(n) + (grown - n) // 2) * ((cut - 1) / (grown - 1))
    low = np.minimum(place.astype(np.int64), cut - 1)
    return low + (n - cut) // 2, np.minimum(low + 1, cut - 1) + (n - cut) // 2, place - low


# Sparse matrices of scipy, which has no types


def _read(index: np.ndarray, size: int | None = None) -> Any:
    """Row i reads entry index[i] of a vector."""
    from scipy.sparse import csr_matrix

    n = len(index)
    return csr_matrix((np.ones(n), (np.arange(n), index)), shape=(n, size or n))


def _scale_rows(matrix: Any, by: np.ndarray) -> Any:
    from scipy.sparse import diags

    return diags(by) @ matrix


def _cross(down: Any, across: Any) -> Any:
    from scipy.sparse import kron

    return kron(down, across, format="csr")


def _make_whole(parts: Any) -> Tensor:
    """The sum of `parts`, its rows turned into whole numbers that add up to UNIT, as a sparse tensor."""
    from scipy.sparse import csr_matrix

    mix = sum(parts)
    whole = csr_matrix((np.rint(mix.data * UNIT), mix.indices, mix.indptr), shape=mix.shape)
    rest = UNIT - np.asarray(whole.sum(1)).ravel()
    most = np.asarray(whole.argmax(1)).ravel()  # the largest weight takes what rounding left over
    whole = (whole + _scale_rows(_read(most), rest)).tocoo()
    whole.sum_duplicates()
    whole.eliminate_zeros()
    index = torch.from_numpy(np.stack((whole.row, whole.col)).astype(np.int64))
    data = torch.from_numpy(whole.data.astype(np.float32))
    with _LOCK, warnings.catch_warnings():  # the filters of warnings belong to all threads
        warnings.simplefilter("ignore")  # torch 2.11 warns that it checks nothing, even if told not to
        return torch.sparse_coo_tensor(index, data, whole.shape, check_invariants=False, is_coalesced=True)


# Streaks, as ImageMagick's motion blur draws them

_TURNS = 256  # directions in a quarter circle: enough, since trails go over whole pixels


def _streak(x: Tensor, draw: Tensor, radius: int, sigma: float, first: int) -> Tensor:
    """A one-sided Gaussian trail in a direction between `first` and `first` + 90 degrees; rounded, not cut.

    draw: int64 [n] in [0, 2**32). Images of one trail are done together: each tap is then one shifted copy.
    """
    weights, trails, trail_of = _make_trails(radius, sigma, first)
    _, h, w, _ = x.shape
    which = trail_of[(draw >> 24).cpu()]
    order = which.argsort(stable=True)
    kinds, counts = torch.unique(which, return_counts=True)
    done = torch.empty_like(x)
    for kind, members in zip(kinds.tolist(), torch.split(order, counts.tolist()), strict=True):
        trail, start = trails[kind], trails[kind].min(0)
        columns, rows = (
            np.arange(low, side + high).clip(0, side - 1)  # the border pixels go on beyond the image
            for low, high, side in zip(start, trail.max(0), (w, h), strict=True)
        )
        padded_from = torch.from_numpy((rows[:, None] * w + columns).ravel()).to(x.device)
        for some in torch.split(members.to(x.device), 64):
            images = x[some]
            padded = _to_columns(images).index_select(0, padded_from).view(len(rows), len(columns), -1)
            total = torch.full_like(padded[:h, :w], UNIT // 2)
            for weight, (dx, dy) in zip(weights, (trail - start).tolist(), strict=True):
                total.add_(padded[dy : dy + h, dx : dx + w], alpha=weight)
            done[some] = _from_columns(_share(total).to(torch.uint8), images.shape)
    return done


@lru_cache(maxsize=16)
def _make_trails(radius: int, sigma: float, first: int) -> tuple[list[int], np.ndarray, Tensor]:
    """Whole weights [taps] that add up to UNIT, the different trails [trails, taps, (x, y)], and each turn's trail."""
    taps = np.arange(2 * radius + 1)
    weights = np.exp(-(taps**2) / (2 * sigma**2))
    whole = np.rint(weights / weights.sum() * UNIT).astype(int)
    whole[0] += UNIT - whole.sum()
    taps = taps[whole > 0]
    angle = np.deg2rad(first + 90 * (np.arange(_TURNS) + 0.5) / _TURNS)[:, None, None]
    trails = np.ceil(taps[:, None] * np.concatenate((np.cos(angle), np.sin(angle)), axis=2) - 0.5).astype(int)
    trails, trail_of = np.unique(trails, axis=0, return_inverse=True)
    return whole[taps].tolist(), trails, torch.from_numpy(trail_of.reshape(-1))


# Weather


def _snow(x: Tensor, case: Case) -> Tensor:
    mean, spread, zoom, floor, radius, sigma, keep = case.pick(
        (
            (0.1, 0.2, 1.0, 0.6, 8, 3.0, 0.95),
            (0.1, 0.2, 1.0, 0.5, 10, 4.0, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4.0, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6.0, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12.0, 0.8),
        )
    )
    n, h, w, _ = x.shape
    flakes = _enlarge(case.normal("flakes", h * w).t().reshape(h, w, n).mul_(spread).add_(mean), zoom)
    flakes = _to_bytes(flakes.masked_fill_(flakes < floor, 0).mul_(255)).permute(2, 0, 1)[..., None].contiguous()
    fallen = _streak(flakes, case.words("angle", 1)[:, 0], radius, sigma, -135).float()
    fallen = fallen + fallen.flip(1, 2)
    return _in_cache(lambda x, fallen: _to_bytes(_whiten(x.float(), keep).add_(fallen)), x, fallen)


def _whiten(x: Tensor, keep: float) -> Tensor:
    """Part of the image turns towards its own brightened grey."""
    pale = torch.maximum(x, _grey(x).mul_(1.5).add_(127.5))
    return x.mul_(keep).add_(pale.mul_(1 - keep))


def _enlarge(layers: Tensor, factor: float) -> Tensor:
    """The middle of float [h, w, n] over the whole of it."""
    for dim in (0, 1):
        low, high, part = (torch.from_numpy(v).to(layers.device) for v in _zoom_places(layers.shape[dim], factor))
        part = part.float().view((-1, 1, 1) if dim == 0 else (-1, 1))
        layers = layers.index_select(dim, low).mul_(1 - part).add_(layers.index_select(dim, high).mul_(part))
    return layers


def _frost(x: Tensor, case: Case) -> Tensor:
    keep, add = case.pick(((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)))
    _, h, w, c = x.shape
    draw = case.words("crop", 3)
    which = draw[:, 0] * len(case.frost) >> 32
    crops = torch.empty(x.shape, device=x.device)
    for number, texture in enumerate(case.frost):
        rows, columns = texture.shape[0] - h, texture.shape[1] - w
        if min(rows, columns) < 1:
            raise InputError(
                f"frost texture {number + 1} is {texture.shape[0]} x {texture.shape[1]} pixels, "
                f"but it must be larger than the images, which are {h} x {w}; take larger photographs."
            )
        mine = (which == number).nonzero().flatten()
        y, top = draw[mine, 1] * rows >> 32, draw[mine, 2] * columns >> 32
        layer = texture.float() if c == 3 else _grey(texture.float())
        crops[mine] = layer.unfold(0, h, 1).unfold(1, w, 1)[y, top].permute(0, 2, 3, 1)
    return _to_bytes(crops.mul_(add).add_(x * float(keep)))


def _fog(x: Tensor, case: Case) -> Tensor:
    thickness, decay = case.pick(((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75)))
    n, h, w, _ = x.shape
    side = 1 << (max(h, w) - 1).bit_length()
    bumps = case.uniform("plasma", side * side).mul_(2).sub_(1)
    plasma = _diamond_square(bumps.t().reshape(side, side, n), decay)[:h, :w].permute(2, 0, 1)[..., None]
    brightest = x.amax((1, 2, 3), keepdim=True).float()
    return _to_bytes((plasma * (255 * thickness) + x).mul_(brightest / (brightest + 255 * thickness)))


def _diamond_square(bumps: Tensor, decay: float) -> Tensor:
    """A plasma fractal in [0, 1] on a map without edges, from bumps in (-1, 1): float [side, side, n] both."""
    plasma = torch.zeros_like(bumps)
    step, height = len(bumps), 100.0
    while step >= 2:
        half = step // 2
        corners, middles = slice(None, None, step), slice(half, None, step)

        def fill(
            rows: slice, columns: slice, around: Sequence[Tensor], plasma: Tensor = plasma, scale: float = height**2
        ) -> None:
            # CIFAR-10-C scales the bumps by their height twice: they fade with the square of the decay
            mean = (around[0] + around[1] + around[2] + around[3]).mul_(0.25)
            plasma[rows, columns] = mean + bumps[rows, columns] * scale

        at_corners = plasma[corners, corners]
        right = at_corners.roll(-1, 1)
        fill(middles, middles, (at_corners, at_corners.roll(-1, 0), right, right.roll(-1, 0)))
        at_middles = plasma[middles, middles]
        fill(corners, middles, (at_middles, at_middles.roll(1, 0), at_corners, right))
        fill(middles, corners, (at_middles, at_middles.roll(1, 1), at_corners, at_corners.roll(-1, 0)))
        step, height = half, height / decay
    plasma -= plasma.amin((0, 1))
    return plasma.div_(plasma.amax((0, 1)))


# Colour


def _brightness(x: Tensor, case: Case) -> Tensor:
    """More value at the same hue and saturation: all channels grow by one factor, and black becomes grey."""
    more = 255 * case.pick((0.05, 0.1, 0.15, 0.2, 0.3))
    value = x.amax(3, keepdim=True).float()
    raised = (value + more).clamp_(max=255)
    return _to_bytes(torch.where(value == 0, raised, x * raised / value))


def _contrast(x: Tensor, case: Case) -> Tensor:
    keep = case.pick((0.75, 0.5, 0.4, 0.3, 0.15))
    mean = x.sum((1, 2), keepdim=True) / float(x.shape[1] * x.shape[2])
    return _to_bytes((x - mean).mul_(keep).add_(mean))


def _grey(x: Tensor) -> Tensor:
    """Luma of float [..., channels] as [..., 1]; one channel is its own luma."""
    if x.shape[-1] == 1:
        return x.clone()
    red, green, blue = (channel * weight for channel, weight in zip(x.unbind(-1), LUMA, strict=True))
    return torch.add(red, green).add_(blue)[..., None]


# Geometry and coding


def _elastic_transform(x: Tensor, case: Case) -> Tensor:
    size = min(x.shape[1:3])
    push, sigma, jitter = case.pick(
        ((0, 0.0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03))
    )
    planes = _warp_affine(x.permute(0, 3, 1, 2).float(), case, jitter * size)
    if push:
        planes = _displace(planes, case, push * size, _gaussian(sigma * size, 3))
    return _to_bytes(planes.permute(0, 2, 3, 1))


def _warp_affine(planes: Tensor, case: Case, jitter: float) -> Tensor:
    """Three points of each image move by up to `jitter` and take the image along; float [n, c, h, w].

    As in the OpenCV of CIFAR-10-C, places are rounded to 1/32 pixel: the weights are whole numbers, the sums exact.
    """
    _, _, h, w = planes.shape
    across, down = (place.to(planes.device) for place in _affine_places(case.items.cpu(), case.path, h, w, jitter))
    column, row = across >> 5, down >> 5
    right, lower = (across & 31).float(), (down & 31).float()
    columns = [_mirror(column, w, 0), _mirror(column + 1, w, 0)]
    rows = [_mirror(row, h, 0) * w, _mirror(row + 1, h, 0) * w]
    total = torch.zeros_like(planes, memory_format=torch.contiguous_format)
    flat = planes.flatten(2)
    for y, part in zip(rows, (32 - lower, lower), strict=True):
        for x, share in zip(columns, (32 - right, right), strict=True):
            total += _look_up(flat, y + x).view(planes.shape) * (part * share)[:, None]
    return total.mul_(1 / 1024)


def _affine_places(items: Tensor, path: tuple[int | str, ...], h: int, w: int, jitter: float) -> tuple[Tensor, Tensor]:
    """Where each pixel of the result looks, across and down, in 1/32 pixel: int32 [n, h, w] each.

    In double precision, and on the CPU, since few numbers are concerned and not every device has it.
    """
    cells = rng.words(rng.key(*path, "points"), items, 6) >> 9
    moves = ((cells + 0.5) * (2.0**-22) - 1).mul_(jitter).view(-1, 3, 2)
    x, y, arm = h // 2, w // 2, min(h, w) // 3
    points = torch.tensor([[x + arm, y + arm], [x + arm, y - arm], [x - arm, y - arm]], dtype=torch.float32)
    moved = (points + moves.float()).double()
    by_y, by_x = (moved[:, 0] - moved[:, 1]) / (2 * arm), (moved[:, 1] - moved[:, 2]) / (2 * arm)  # [n, (x, y)] each
    shift = moved[:, 0] - by_x * (x + arm) - by_y * (y + arm)
    size = by_x[:, 0] * by_y[:, 1] - by_x[:, 1] * by_y[:, 0]
    back = (by_y[:, 1] / size, -by_y[:, 0] / size), (-by_x[:, 1] / size, by_x[:, 0] / size)
    columns, rows = torch.arange(w, dtype=torch.float64), torch.arange(h, dtype=torch.float64)

    def places(per_x: Tensor, per_y: Tensor) -> Tensor:
        start = -(per_x * shift[:, 0] + per_y * shift[:, 1])
        along = (per_x[:, None] * columns * 1024).round().int()
        from_row = ((per_y[:, None] * rows + start[:, None]) * 1024).round().int()
        return along[:, None] + from_row[:, :, None] + 16 >> 5

    return places(*back[0]), places(*back[1])


def _displace(planes: Tensor, case: Case, push: float, weights: np.ndarray) -> Tensor:
    """Each pixel looks a little aside, by a smoothed random field; the image is mirrored beyond its border pixels."""
    n, _, h, w = planes.shape
    field = case.uniform("field", 2 * h * w).mul_(2).sub_(1).view(n, 2, h, w)
    field = _smooth(_smooth(field, weights, 2), weights, 3).mul_(push)
    across = field[:, 0] + torch.arange(w, device=planes.device)
    down = field[:, 1] + torch.arange(h, device=planes.device)[:, None]
    left, top = across.floor(), down.floor()
    right, lower = (across - left)[:, None], (down - top)[:, None]
    columns = [_mirror(left.int() + i, w, 1) for i in (0, 1)]
    rows = [_mirror(top.int() + i, h, 1) * w for i in (0, 1)]
    flat = planes.flatten(2)
    upper, under = (
        _look_up(flat, y + columns[0]).view(planes.shape).mul_(1 - right)
        + _look_up(flat, y + columns[1]).view(planes.shape).mul_(right)
        for y in rows
    )
    return upper.mul_(1 - lower).add_(under.mul_(lower))


def _look_up(flat: Tensor, place: Tensor) -> Tensor:
    """flat [n, c, h * w] at int place [n, h, w]: [n, c, h * w]"""
    return flat.gather(2, place.long().flatten(1)[:, None].expand(-1, flat.shape[1], -1))


def _smooth(x: Tensor, weights: np.ndarray, dim: int) -> Tensor:
    n, reach = x.shape[dim], len(weights) // 2
    padded = x.index_select(dim, _mirror(torch.arange(-reach, n + reach, device=x.device), n, 1))
    total = torch.zeros_like(x)
    for i, weight in enumerate(weights.tolist()):
        total += padded.narrow(dim, i, n) * weight
    return total


def _gaussian(sigma: float, cut: float) -> np.ndarray:
    reach = np.arange(int(cut * sigma + 0.5) + 1)
    half = np.exp(-0.5 * (reach / sigma) ** 2)
    weights = np.concatenate((half[:0:-1], half))
    return np.asarray(weights / weights.sum())


Index = TypeVar("Index", Tensor, np.ndarray)


def _mirror(index: Index, size: int, repeat: int) -> Index:
    """Fold an index less than `size` outside back in; the border pixel comes twice if `repeat` is 1, once if 0."""
    if isinstance(index, np.ndarray):
        inside = np.maximum(index, -repeat - index)
        return np.asarray(np.minimum(inside, 2 * size - 2 + repeat - inside))
    inside = torch.maximum(index, -repeat - index)
    return torch.minimum(inside, 2 * size - 2 + repeat - inside)


def _pixelate(x: Tensor, case: Case) -> Tensor:
    share = case.pick((0.95, 0.9, 0.85, 0.75, 0.65))
    ups = []
    for dim in (2, 1):  # Pillow goes across first, and rounds in between
        side = x.shape[dim]
        small = int(side * share)
        first, last = (torch.from_numpy(v).to(x.device) for v in _box(side, small))
        pair = x.index_select(dim, first).short().add_(x.index_select(dim, last))
        x = (pair.add_(1) >> 1).to(torch.uint8)
        ups.append(((torch.arange(side) * 2 + 1) * small // (2 * side)).to(x.device))
    return x.index_select(2, ups[0]).index_select(1, ups[1])


@lru_cache(maxsize=16)
def _box(side: int, small: int) -> tuple[np.ndarray, np.ndarray]:
    """The first and last of the one or two pixels whose centres lie in each of `small` equal boxes."""
    scale = side / small
    centre = (np.arange(small)[:, None] + 0.5) * scale
    away = (np.arange(side) + 0.5 - centre) / scale
    inside = (away > -0.5) & (away <= 0.5)  # [small, side]
    return inside.argmax(1), side - 1 - inside[:, ::-1].argmax(1)


def _jpeg_compression(x: Tensor, case: Case) -> Tensor:
    quality = case.pick((80, 65, 58, 50, 40))
    _, h, w, c = x.shape
    code = _code_together if c == 3 and h % 16 == w % 16 == 0 else _code_apart
    return _in_cache(lambda part: code(part, quality), x.cpu()).to(x.device)  # a JPEG has at most 65,500 rows


def _code_apart(x: Tensor, quality: int) -> Tensor:
    """A JPEG file per image."""
    from PIL import Image

    coded = [np.array(Image.open(_encode(image.squeeze(), quality), formats=("JPEG",))) for image in x.numpy()]
    return torch.from_numpy(np.stack(coded)).view(x.shape)


def _code_together(x: Tensor, quality: int) -> Tensor:
    """The same as _code_apart, bit for bit, with one JPEG file for all images, one below the other: ten times faster.

    JPEG codes blocks of 16 x 16 pixels one by one. Only the last step of reading, which doubles the size of the colour
    planes, looks at a block's neighbours; so the planes are read as they are stored, and doubled here for each image.
    """
    from PIL import Image

    n, h, w, _ = x.shape
    file = _encode(x.numpy().reshape(n * h, w, 3), quality)
    planes = []
    for part in (1, 2):  # at half the size, Pillow gives the colour planes untouched
        with Image.open(file, formats=("JPEG",)) as picture:
            picture.draft("YCbCr", (w // part, n * h // part))
            planes.append(torch.from_numpy(np.array(picture)).int().view(n, h // part, w // part, 3))
    luma, blue, red = planes[0][..., 0], *(_double(planes[1][..., k]) - 128 for k in (1, 2))
    # libjpeg's own whole numbers: 1.402, 0.34414, 0.71414 and 1.772, times 2**16
    colours = (
        luma + (91881 * red + 32768 >> 16),
        luma + (-22554 * blue - 46802 * red + 32768 >> 16),
        luma + (116130 * blue + 32768 >> 16),
    )
    return torch.stack(colours, 3).clamp_(0, 255).to(torch.uint8)


def _encode(pixels: np.ndarray, quality: int) -> BytesIO:
    from PIL import Image

    file = BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    return file


def _double(plane: Tensor) -> Tensor:
    """int32 [n, h, w] at twice the size as libjpeg does it: three parts of the nearer value and one of the farther."""
    above, below = (torch.cat(rows, 1) for rows in ((plane[:, :1], plane[:, :-1]), (plane[:, 1:], plane[:, -1:])))
    tall = torch.stack((3 * plane + above, 3 * plane + below), 2).flatten(1, 2)
    left, right = (torch.cat(sides, 2) for sides in ((tall[..., :1], tall[..., :-1]), (tall[..., 1:], tall[..., -1:])))
    return torch.stack((3 * tall + left + 8 >> 4, 3 * tall + right + 7 >> 4), 3).flatten(2, 3)


def _in_cache(work: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`work` over the rows of `tensors`, a few at a time."""
    step = max(1, _fit(tensors[0].device) // tensors[0][0].numel())
    return torch.cat([work(*rows) for rows in zip(*(torch.split(tensor, step) for tensor in tensors), strict=True)])


_BY_NAME: dict[str, Callable[[Tensor, Case], Tensor]] = {
    "gaussian_noise": _gaussian_noise,
    "shot_noise": _shot_noise,
    "impulse_noise": _impulse_noise,
    "defocus_blur": _defocus_blur,
    "glass_blur": _glass_blur,
    "motion_blur": _motion_blur,
    "zoom_blur": _zoom_blur,
    "snow": _snow,
    "frost": _frost,
    "fog": _fog,
    "brightness": _brightness,
    "contrast": _contrast,
    "elastic_transform": _elastic_transform,
    "pixelate": _pixelate,
    "jpeg_compression": _jpeg_compression,
}
_BY_STREAK = ("motion_blur", "snow")
CORRUPTIONS: tuple[str, ...] = tuple(_BY_NAME)
