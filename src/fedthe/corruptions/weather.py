"""Snow, frost, fog and brightness."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import InputError
from .mixing import streak
from .shared import ItemDraws, in_cache, luma, to_bytes, zoom_places


def snow(
    x: Tensor,
    draws: ItemDraws,
    mean: float,
    std: float,
    zoom: float,
    floor: float,
    radius: int,
    sigma: float,
    keep: float,
) -> Tensor:
    """Noise above `floor` becomes flakes with streaks, added twice, once upside down, to a paler image."""
    n, h, w, _ = x.shape
    flakes = _enlarge(draws.normal("flakes", h * w).t().reshape(h, w, n).mul_(std).add_(mean), zoom)
    flakes = to_bytes(flakes.masked_fill_(flakes < floor, 0).mul_(255)).permute(2, 0, 1)[..., None].contiguous()
    fallen = streak(flakes, draws.words("angle", 1)[:, 0], radius, sigma, -135).float()
    fallen = fallen + fallen.flip(1, 2)
    return in_cache(lambda x, fallen: to_bytes(_whiten(x.float(), keep).add_(fallen)), x, fallen)


def _whiten(x: Tensor, keep: float) -> Tensor:
    """Blend an image, in place, with its own brightened grey; `keep` is the weight of the image."""
    pale = torch.maximum(x, luma(x).mul_(1.5).add_(127.5))
    return x.mul_(keep).add_(pale.mul_(1 - keep))


def _enlarge(layers: Tensor, factor: float) -> Tensor:
    """Enlarge the middle of float [h, w, n] to the same size."""
    for dim in (0, 1):
        low, high, part = (torch.from_numpy(v).to(layers.device) for v in zoom_places(layers.shape[dim], factor))
        part = part.float().view((-1, 1, 1) if dim == 0 else (-1, 1))
        layers = layers.index_select(dim, low).mul_(1 - part).add_(layers.index_select(dim, high).mul_(part))
    return layers


def frost(x: Tensor, draws: ItemDraws, keep: float, add: float, textures: Sequence[Tensor]) -> Tensor:
    """Add a random crop of a random texture."""
    _, h, w, c = x.shape
    draw = draws.words("crop", 3)
    which = draw[:, 0] * len(textures) >> 32
    crops = torch.empty(x.shape, device=x.device)
    for number, texture in enumerate(textures):
        rows, columns = texture.shape[0] - h, texture.shape[1] - w
        if min(rows, columns) < 1:
            raise InputError(
                f"frost texture {number + 1} is {texture.shape[0]} x {texture.shape[1]} pixels, "
                f"but it must be larger than the images, which are {h} x {w}; use larger photographs."
            )
        mine = (which == number).nonzero().flatten()
        top, left = draw[mine, 1] * rows >> 32, draw[mine, 2] * columns >> 32
        layer = texture.float() if c == 3 else luma(texture.float())
        crops[mine] = layer.unfold(0, h, 1).unfold(1, w, 1)[top, left].permute(0, 2, 3, 1)
    return to_bytes(crops.mul_(add).add_(x * keep))


def fog(x: Tensor, draws: ItemDraws, thickness: float, decay: float) -> Tensor:
    n, h, w, _ = x.shape
    side = 1 << (max(h, w) - 1).bit_length()
    bumps = draws.uniform("plasma", side * side).mul_(2).sub_(1)
    plasma = _diamond_square(bumps.t().reshape(side, side, n), decay)[:h, :w].permute(2, 0, 1)[..., None]
    brightest = x.amax((1, 2, 3), keepdim=True).float()
    return to_bytes((plasma * (255 * thickness) + x).mul_(brightest / (brightest + 255 * thickness)))


def _diamond_square(bumps: Tensor, decay: float) -> Tensor:
    """A plasma fractal in [0, 1] with periodic borders, from bumps in (-1, 1): float [side, side, n] both."""
    plasma = torch.zeros_like(bumps)
    step, height = len(bumps), 100.0
    while step >= 2:
        half = step // 2
        corners, middles = slice(None, None, step), slice(half, None, step)

        def fill(
            rows: slice, columns: slice, around: Sequence[Tensor], plasma: Tensor = plasma, scale: float = height**2
        ) -> None:
            # CIFAR-10-C multiplies the bumps by their height twice: they fade with the square of the decay
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


def brightness(x: Tensor, draws: ItemDraws, more: float) -> Tensor:
    """Raise the value at the same hue and saturation: all channels grow by one factor, and black becomes grey."""
    value = x.amax(3, keepdim=True).float()
    raised = (value + 255 * more).clamp_(max=255)
    return to_bytes(torch.where(value == 0, raised, x * raised / value))
