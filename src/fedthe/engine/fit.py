"""Training on one client: batches cut, cropped and flipped from its shard, and steps of SGD or Adam.

Which row comes when, and how it is cropped, is drawn per row from (seed, phase, round, epoch) and (client, row): not
from what was drawn before, nor from how many rows the shard is padded to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from .. import rng, tree
from ..errors import InputError
from ..methods.base import Loss
from ..tree import Tree
from ..types import Batch, Shard, scale


@dataclass(frozen=True)
class Optimizer:
    """The paper's CNN settings; momentum 0.9 for ResNet20-GN, Adam at 0.001 for CCT4."""

    name: Literal["sgd", "adam"] = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 5e-4

    def __post_init__(self) -> None:
        for name in ("lr", "momentum", "weight_decay"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{name} must be a finite number that is not negative, not {value}.")

    def over(self, leaves: list[Tensor], weight_decay: float | None) -> torch.optim.Optimizer:
        decay = self.weight_decay if weight_decay is None else weight_decay
        if self.name == "adam":
            return torch.optim.Adam(leaves, self.lr, weight_decay=decay, foreach=True)
        return torch.optim.SGD(leaves, self.lr, self.momentum, weight_decay=decay, foreach=True)


@dataclass(frozen=True)
class Fit:
    """`fit(loss, params, shard, given)`: the parameters after some epochs on the shard."""

    optimizer: Optimizer
    epochs: int
    batch: int
    flip: bool
    crop: int  # pixels of padding to crop from; 0 for none
    path: tuple[int | str, ...]  # what the draws are for: seed, phase, round
    client: int
    log: list[float] = field(default_factory=list)  # the mean loss of each epoch, for the engine to look at

    @property
    def lr(self) -> float:
        return self.optimizer.lr

    def __call__(
        self, loss: Loss, params: Tree, shard: Shard, given: Tree | None = None, *, weight_decay: float | None = None
    ) -> Tree:
        flat = {name: _start(leaf) for name, leaf in tree.flatten(params).items()}
        trained = tree.unflatten(flat)
        given = _detach(given or {})
        optimizer = self.optimizer.over(list(flat.values()), weight_decay)
        for epoch in range(self.epochs):
            total = torch.zeros((), device=shard.real.device)
            for batch in self.batches(shard, epoch):
                losses = loss(trained, given, batch) * batch.weight
                optimizer.zero_grad()
                (losses.sum() / batch.weight.sum()).backward()
                optimizer.step()
                total = total + losses.detach().sum()
            self.log.append(float(total) / max(1, int(shard.real.sum())))
        return tree.map_leaves(lambda leaf: leaf.detach().contiguous(), trained)

    def batches(self, shard: Shard, epoch: int) -> Iterator[Batch]:
        """All real rows once, in random order, each cropped and flipped at random. Padding never makes a batch."""
        rows = torch.arange(len(shard.real), device=shard.real.device)
        drawn = rng.words(rng.key(*self.path, epoch), (self.client << 32) + rows, 4)
        place = (drawn[:, 0] << 30 | drawn[:, 1] >> 2).masked_fill(~shard.real, torch.iinfo(torch.int64).max)
        order = torch.argsort(place)[: int(shard.real.sum())]
        for chosen in order.split(self.batch) if len(order) else ():  # split gives one empty part of nothing
            x = scale(self._augment(shard.images[chosen], drawn[chosen, 2], drawn[chosen, 3]))
            yield Batch(x, shard.labels[chosen], torch.ones(len(chosen), device=x.device), shard.counts)

    def _augment(self, images: Tensor, where: Tensor, side: Tensor) -> Tensor:
        """images: uint8 [b, h, w, c]; `where` and `side` are 32-bit words [b]."""
        if self.flip:
            images = torch.where((side < 2**31)[:, None, None, None], images.flip(2), images)
        if self.crop:
            places = 2 * self.crop + 1
            images = crop(images, self.crop, (where >> 16) * places >> 16, (where & 0xFFFF) * places >> 16)
        return images


def crop(images: Tensor, pad: int, down: Tensor, right: Tensor) -> Tensor:
    """images [b, h, w, c] with `pad` black pixels all around, cut to size at (down, right), each [b], 0 to 2 pad."""
    b, h, w, _ = images.shape
    padded = torch.nn.functional.pad(images, (0, 0, pad, pad, pad, pad))
    rows = down[:, None] + torch.arange(h, device=images.device)
    columns = right[:, None] + torch.arange(w, device=images.device)
    return padded[torch.arange(b, device=images.device)[:, None, None], rows[:, :, None], columns[:, None, :]]


def _start(leaf: Tensor) -> Tensor:
    order = torch.channels_last if leaf.ndim == 4 else torch.contiguous_format  # what convolutions on the CPU like best
    return leaf.detach().clone(memory_format=order).requires_grad_()


def _detach(given: Tree) -> Tree:
    return tree.map_leaves(lambda leaf: leaf.detach(), given)
