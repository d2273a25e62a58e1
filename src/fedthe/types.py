"""What passes between the rooms: a client's data as a method may see it, and the batches cut from it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Shard(NamedTuple):
    """One client's labelled rows. Rows where `real` is False are padding, there to make clients equally long."""

    x: Tensor  # uint8 pictures [n, h, w, c], or float features or int64 tokens [n, ...]
    labels: Tensor  # int64 [n]
    real: Tensor  # bool [n]
    counts: Tensor  # float32 [classes]: real training rows of each class
    val_x: Tensor  # [v, ...], like x
    val_labels: Tensor  # int64 [v]
    val_real: Tensor  # bool [v]


class Batch(NamedTuple):
    x: Tensor  # pictures: float [b, c, h, w] in [-1, 1]; features and tokens: [b, ...] as they are
    y: Tensor  # int64 [b]
    weight: Tensor  # float [b]: 1 for a real row, 0 for padding
    counts: Tensor  # float [classes] of the whole shard


def scale(x: Tensor) -> Tensor:
    """What a network takes. Pictures: uint8 [..., h, w, c] -> float [..., c, h, w] in [-1, 1], in the memory order that
    convolutions like best. Features and tokens stay as they are."""
    return x if x.dtype != torch.uint8 else x.float().mul_(1 / 127.5).sub_(1).movedim(-1, -3)
