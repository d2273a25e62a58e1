"""Generated textures of frost on glass, because the photographs of CIFAR-10-C are not ours to ship.

Crystals that branch at 60 degrees, over rough ice with dark gaps; the same on every machine up to rounding.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from .. import rng

SIZE = 200
# number of stems, their length, share of rough ice, contrast, colours of thin and thick ice
_LOOKS = (
    (36, 90.0, 0.30, 1.30, (22, 40, 70), (240, 247, 252)),
    (81, 50.0, 0.35, 1.25, (16, 28, 50), (232, 242, 252)),
    (25, 120.0, 0.30, 1.30, (28, 50, 76), (246, 250, 252)),
    (144, 34.0, 0.35, 1.25, (12, 22, 42), (234, 243, 253)),
    (49, 66.0, 0.50, 1.20, (30, 40, 58), (242, 246, 249)),
)


@lru_cache(maxsize=1)
def make_frost() -> Tensor:
    """Five textures, uint8 [5, SIZE, SIZE, 3]."""
    return torch.stack([_make_texture(number) for number in range(len(_LOOKS))])


def enlarge_frost(textures: Tensor, side: int) -> Tensor:
    """Textures [n, h, w, 3] repeated pixel by pixel until an image of `side` pixels can be cut from them."""
    times = side // min(textures.shape[1:3]) + 1
    return textures if times == 1 else textures.repeat_interleave(times, 1).repeat_interleave(times, 2)


def _make_texture(number: int) -> Tensor:
    """uint8 [SIZE, SIZE, 3]"""
    stems, length, rough, contrast, thin, thick = _LOOKS[number]
    needles = _draw_needles(number, stems, length)
    ice = _ridged_noise(number, cells=6, octaves=5)
    gaps = _smooth_noise(number, "gaps", cells=4)
    light = (1 - rough) * needles + rough * ice + 0.25 * (gaps - 0.5)
    light = _spread(light)
    light = np.clip(0.5 + contrast * (light - 0.5), 0, 1)[..., None]
    colour = np.array(thin) + (np.array(thick) - np.array(thin)) * light
    return torch.from_numpy((colour + 0.5).astype(np.uint8))


def _spread(light: np.ndarray) -> np.ndarray:
    """Stretch to [0, 1] with a mean near 0.42, as in photographs of frost."""
    low, high = np.quantile(light, (0.02, 0.99))
    light = np.clip((light - low) / (high - low), 0, 1)
    return np.asarray(light ** (np.log(0.42) / np.log(light.mean())))


def _draw_needles(number: int, stems: int, length: float) -> np.ndarray:
    """Crystals that branch twice at about 60 degrees; float [SIZE, SIZE] in [0, 1]."""
    fine = 2 * SIZE  # drawn at twice the size and averaged, so that lines are smooth
    draws = rng.uniform(rng.key("frost", number, "stems"), np.arange(stems, dtype=np.int64), 5)
    angle = draws[:, 2] * 2 * np.pi
    reach = length * 2 * (0.6 + 0.8 * draws[:, 3])
    # the middle of one stem per cell of a grid, so that no large part of the glass stays empty
    side = np.ceil(stems**0.5)
    cell = np.stack((np.arange(stems) // side, np.arange(stems) % side), 1)
    start = (cell + draws[:, :2]) / side * fine - 0.4 * reach[:, None] * np.stack((np.sin(angle), np.cos(angle)), 1)
    lines = (start[:, 0], start[:, 1], angle, reach, 0 * angle + 1.0)
    canvas = np.zeros((fine, fine))
    for generation, (children, shrink) in enumerate(((26, 0.36), (9, 0.42), (0, 0.0))):
        _add_lines(canvas, lines, width=(2.2, 1.2, 0.8)[generation])
        if children:
            lines = _branch(lines, children, shrink, rng.key("frost", number, "branches", generation))
    canvas = canvas.reshape(SIZE, 2, SIZE, 2).mean((1, 3))
    return np.asarray(1 - np.exp(-0.9 * canvas))


Lines = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # y, x, angle, length, light: [lines] each


def _branch(lines: Lines, children: int, shrink: float, key: rng.Key) -> Lines:
    """Pairs of side branches along each line, shorter towards its tip, as in a fern."""
    y, x, angle, length, light = (value[:, None] for value in lines)
    draws = rng.uniform(key, np.arange(len(y), dtype=np.int64), 3 * children)
    place, turn, stretch = (draws[:, i * children : (i + 1) * children] for i in range(3))
    along = (np.arange(children) + place) / children
    side = np.where(np.arange(children) % 2, 1.0, -1.0)
    grown = (
        y + along * length * np.sin(angle),
        x + along * length * np.cos(angle),
        angle + side * np.pi / 3 + 0.16 * (turn - 0.5),
        shrink * length * (1.05 - along) * (0.5 + stretch),
        light * (0.55 + 0.3 * stretch),
    )
    return tuple(value.ravel() for value in grown)  # type: ignore[return-value]


def _add_lines(canvas: np.ndarray, lines: Lines, width: float) -> None:
    """Brighten every pixel along a line, less towards its tip, and a little beside it."""
    y, x, angle, length, light = (value[:, None] for value in lines)
    steps = np.arange(int(length.max()) + 1)[None]
    fade = light * np.clip(1 - steps / np.maximum(length, 1), 0, 1) ** 0.6
    for offset in (-1, 0, 1):
        beside = np.exp(-0.5 * (offset / (0.5 * width)) ** 2)
        row = np.rint(y + steps * np.sin(angle) + offset * np.cos(angle)).astype(int)
        column = np.rint(x + steps * np.cos(angle) - offset * np.sin(angle)).astype(int)
        seen = (fade > 0) & (row >= 0) & (row < len(canvas)) & (column >= 0) & (column < len(canvas))
        np.add.at(canvas, (row[seen], column[seen]), (fade * beside)[seen])


def _ridged_noise(number: int, cells: int, octaves: int) -> np.ndarray:
    """Sharp crests at every scale: float [SIZE, SIZE] in [0, 1]."""
    total = np.zeros((SIZE, SIZE))
    for octave in range(octaves):
        crest = 1 - np.abs(2 * _smooth_noise(number, f"ridge {octave}", cells * 2**octave) - 1)
        total += crest**3 * 0.65**octave
    return np.asarray(total / total.max())


def _smooth_noise(number: int, what: str, cells: int) -> np.ndarray:
    """Random heights on a grid, interpolated smoothly: float [SIZE, SIZE] in [0, 1]."""
    grid = rng.uniform(rng.key("frost", number, what), np.arange(cells + 2, dtype=np.int64), cells + 2)
    place = np.arange(SIZE) * cells / SIZE
    low = place.astype(int)
    ease = (place - low) ** 2 * (3 - 2 * (place - low))
    rows = grid[low] + (grid[low + 1] - grid[low]) * ease[:, None]
    return np.asarray(rows[:, low] + (rows[:, low + 1] - rows[:, low]) * ease)
