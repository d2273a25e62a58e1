"""What passes between the rooms: a client's data as a method may see it, and the batches cut from it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Shard(NamedTuple):
    """One client's labelled rows. Rows where `real` is False are padding, there to make clients equally long."""

    x: Tensor  # uint8 [n, h, w, c]
    labels: Tensor  # int64 [n]
    real: Tensor  # bool [n]
    counts: Tensor  # float32 [classes]: real training rows of each class
    val_x: Tensor  # uint8 [v, h, w, c]
    val_labels: Tensor  # int64 [v]
    val_real: Tensor  # bool [v]


class Batch(NamedTuple):
    x: Tensor  # float [b, c, h, w] in [-1, 1]
    y: Tensor  # int64 [b]
    weight: Tensor  # float [b]: 1 for a real row, 0 for padding
    counts: Tensor  # float [classes] of the whole shard


def scale(images: Tensor) -> Tensor:
    """uint8 [..., h, w, c] -> float [..., c, h, w] in [-1, 1], in the memory order that convolutions like best."""
    return images.float().mul_(1 / 127.5).sub_(1).movedim(-1, -3)
