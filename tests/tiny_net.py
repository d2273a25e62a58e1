"""The model of the oracles as a network, and small shards to train it on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from fedthe import tree
from fedthe.engine.fit import LoopFit
from fedthe.nets.net import PictureNet, Start, fan_in, norm
from fedthe.types import Shard

CLASSES = 3


@dataclass(frozen=True)
class Tiny(PictureNet):
    """In the precision of its parameters."""

    @property
    def feature_dim(self) -> int:
        return 4

    def body_starts(self) -> dict[str, Start]:
        return {"w": fan_in(4, self.channels * self.size**2)}

    def features(self, body, x):
        return torch.tanh(F.linear(x.flatten(1).to(body["w"]), body["w"]))


TINY = Tiny(CLASSES, channels=1, size=5)


@dataclass(frozen=True)
class Normed(PictureNet):
    """Two convolutions, each with a GroupNorm."""

    @property
    def feature_dim(self) -> int:
        return 8

    def body_starts(self) -> dict[str, Start]:
        first = {"conv1": fan_in(4, self.channels, 3, 3)} | norm("norm1", 4)
        return first | {"conv2": fan_in(8, 4, 3, 3)} | norm("norm2", 8)

    def features(self, body, x):
        h = F.conv2d(x.to(body["conv1"]), body["conv1"], stride=2, padding=1)
        h = F.conv2d(F.relu(F.group_norm(h, 2, **body["norm1"])), body["conv2"], stride=2, padding=1)
        return F.relu(F.group_norm(h, 2, **body["norm2"])).mean((2, 3))


def tiny_params(seed=0):
    return tree.map_leaves(torch.Tensor.double, TINY.init(seed))


def leaves(params):
    """As the oracles take them."""
    return [params["body"]["w"], params["head"]["out"]]


def make_shard(n=14, size=16, labels=None, pad=0, seed=0) -> Shard:
    """Squares, brighter by class, in noise; then `pad` rows of noise that are not real."""
    draws = np.random.default_rng(seed)
    y = draws.integers(0, CLASSES, 100)[: n + pad].astype(np.int64)
    if labels is not None:
        y[:n] = np.resize(labels, n)
    x = draws.integers(0, 100, (n + pad, size, size, 1)) + 70 * y[:, None, None, None]
    real = torch.arange(n + pad) < n
    counts = torch.bincount(torch.from_numpy(y[:n]), minlength=CLASSES).float()
    images, labels = torch.from_numpy(x.astype(np.uint8)), torch.from_numpy(y)
    return Shard(images, labels, real, counts, images[:0], labels[:0], real[:0])


def list_batches(fit: LoopFit):
    """All that a fit trains on, in order: (x, y)."""
    return [(batch.x, batch.y) for epoch in range(fit.epochs) for batch in fit.batches(fit.shard, epoch)]


def draw(like, seed=0, scale=0.3):
    """A tree of other numbers."""
    draws = torch.Generator().manual_seed(seed)
    return tree.map_leaves(lambda leaf: leaf + scale * torch.randn(leaf.shape, generator=draws).to(leaf), like)
