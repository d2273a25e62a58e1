"""Contrast, elastic transform, pixelation and JPEG compression."""

from __future__ import annotations

from functools import lru_cache
from io import BytesIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .shared import ItemDraws, gaussian, in_cache, mirror, to_bytes


def contrast(x: Tensor, draws: ItemDraws, keep: float) -> Tensor:
    mean = x.sum((1, 2), keepdim=True) / float(x.shape[1] * x.shape[2])
    return to_bytes((x - mean).mul_(keep).add_(mean))


def elastic_transform(x: Tensor, draws: ItemDraws, push: float, sigma: float, jitter: float) -> Tensor:
    """An affine map, then smoothed displacements; the settings are relative to the image's side."""
    size = min(x.shape[1:3])
    planes = _warp_affine(x.permute(0, 3, 1, 2).float(), draws, jitter * size)
    if push:
        planes = _displace(planes, draws, push * size, gaussian(sigma * size, 3))
    return to_bytes(planes.permute(0, 2, 3, 1))


def _warp_affine(planes: Tensor, draws: ItemDraws, jitter: float) -> Tensor:
    """The affine map that moves three points of each image by up to `jitter` pixels; float [n, c, h, w].

    As in OpenCV, which CIFAR-10-C uses, positions are rounded to 1/32 pixel: weights are integers and sums exact.
    """
    _, _, h, w = planes.shape
    across, down = (place.to(planes.device) for place in _affine_places(draws, h, w, jitter))
    column, row = across >> 5, down >> 5
    right, lower = (across & 31).float(), (down & 31).float()
    columns = [mirror(column, w, 0), mirror(column + 1, w, 0)]
    rows = [mirror(row, h, 0) * w, mirror(row + 1, h, 0) * w]
    total = torch.zeros_like(planes, memory_format=torch.contiguous_format)
    flat = planes.flatten(2)
    for y, part in zip(rows, (32 - lower, lower), strict=True):
        for x, share in zip(columns, (32 - right, right), strict=True):
            total += _look_up(flat, y + x).view(planes.shape) * (part * share)[:, None]
    return total.mul_(1 / 1024)


def _affine_places(draws: ItemDraws, h: int, w: int, jitter: float) -> tuple[Tensor, Tensor]:
    """The position that each pixel of the result reads, across and down, in 1/32 pixel: int32 [n, h, w] each.

    Computed in double precision, which not every device has, so on the CPU: it is only a few numbers.
    """
    cells = ItemDraws(draws.path, draws.items.cpu()).words("points", 6) >> 9
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


def _displace(planes: Tensor, draws: ItemDraws, push: float, weights: np.ndarray) -> Tensor:
    """Each pixel reads at an offset from a smoothed random field; the image is reflected beyond its border pixels."""
    n, _, h, w = planes.shape
    field = draws.uniform("field", 2 * h * w).mul_(2).sub_(1).view(n, 2, h, w)
    field = _smooth(_smooth(field, weights, 2), weights, 3).mul_(push)
    across = field[:, 0] + torch.arange(w, device=planes.device)
    down = field[:, 1] + torch.arange(h, device=planes.device)[:, None]
    left, top = across.floor(), down.floor()
    right, lower = (across - left)[:, None], (down - top)[:, None]
    columns = [mirror(left.int() + i, w, 1) for i in (0, 1)]
    rows = [mirror(top.int() + i, h, 1) * w for i in (0, 1)]
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
    padded = x.index_select(dim, mirror(torch.arange(-reach, n + reach, device=x.device), n, 1))
    total = torch.zeros_like(x)
    for i, weight in enumerate(weights.tolist()):
        total += padded.narrow(dim, i, n) * weight
    return total


def pixelate(x: Tensor, draws: ItemDraws, share: float) -> Tensor:
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


def jpeg_compression(x: Tensor, draws: ItemDraws, quality: int) -> Tensor:
    _, h, w, c = x.shape
    code = _code_together if c == 3 and h % 16 == w % 16 == 0 else _code_apart
    return in_cache(lambda part: code(part, quality), x.cpu()).to(x.device)  # a JPEG has at most 65,500 rows


def _code_apart(x: Tensor, quality: int) -> Tensor:
    """One JPEG file per image."""
    coded = [np.array(Image.open(_encode(image.squeeze(), quality), formats=("JPEG",))) for image in x.numpy()]
    return torch.from_numpy(np.stack(coded)).view(x.shape)


def _code_together(x: Tensor, quality: int) -> Tensor:
    """The same as _code_apart, bit for bit, but ten times faster: one JPEG file for all images, stacked vertically.

    JPEG codes blocks of 16 x 16 pixels one by one. Only the last step of decoding, which doubles the size of the
    colour planes, uses a block's neighbours; so the planes are read as stored, and doubled here for each image.
    """
    n, h, w, _ = x.shape
    file = _encode(x.numpy().reshape(n * h, w, 3), quality)
    planes = []
    for part in (1, 2):  # at half the size, Pillow gives the colour planes untouched
        with Image.open(file, formats=("JPEG",)) as picture:
            picture.draft("YCbCr", (w // part, n * h // part))
            planes.append(torch.from_numpy(np.array(picture)).int().view(n, h // part, w // part, 3))
    luma, blue, red = planes[0][..., 0], *(_double(planes[1][..., k]) - 128 for k in (1, 2))
    # libjpeg's integers: 1.402, 0.34414, 0.71414 and 1.772, times 2**16
    colours = (
        luma + (91881 * red + 32768 >> 16),
        luma + (-22554 * blue - 46802 * red + 32768 >> 16),
        luma + (116130 * blue + 32768 >> 16),
    )
    return torch.stack(colours, 3).clamp_(0, 255).to(torch.uint8)


def _encode(pixels: np.ndarray, quality: int) -> BytesIO:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    return file


def _double(plane: Tensor) -> Tensor:
    """int32 [n, h, w] at twice the size as in libjpeg: three parts of the nearer value and one of the farther."""
    above, below = (torch.cat(rows, 1) for rows in ((plane[:, :1], plane[:, :-1]), (plane[:, 1:], plane[:, -1:])))
    tall = torch.stack((3 * plane + above, 3 * plane + below), 2).flatten(1, 2)
    left, right = (torch.cat(sides, 2) for sides in ((tall[..., :1], tall[..., :-1]), (tall[..., 1:], tall[..., -1:])))
    return torch.stack((3 * tall + left + 8 >> 4, 3 * tall + right + 7 >> 4), 3).flatten(2, 3)
