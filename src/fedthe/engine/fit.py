"""Training on one client: batches cut, cropped and flipped from its shard, and steps of SGD or Adam.

Which row comes when, and how it is cropped, is drawn per row from (seed, phase, round, epoch) and (client, row): not
from what was drawn before, nor from how many rows the shard is padded to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from .. import rng, tree
from ..errors import InputError
from ..methods.checks import refuse_captured
from ..methods.fit import Fitted, Loss
from ..nets.net import Net
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

    def over(self, leaves: list[Tensor], weight_decay: float | None) -> Steps:
        decay = self.weight_decay if weight_decay is None else weight_decay
        return Steps(self, leaves, decay)


class Steps:
    """torch.optim.SGD or Adam over some leaves, by the functions that these call.

    The classes import torch._dynamo when they are made: over a second in every new process, such as those in which
    Flower runs a client's round.
    """

    def __init__(self, optimizer: Optimizer, leaves: list[Tensor], weight_decay: float) -> None:
        self.optimizer, self.leaves, self.weight_decay = optimizer, leaves, weight_decay
        if optimizer.name == "adam":
            self.means, self.squares = ([torch.zeros_like(leaf) for leaf in leaves] for _ in range(2))
            self.counts = [torch.zeros(()) for _ in leaves]
        else:
            self.velocities: list[Tensor | None] = [None] * len(leaves)

    def zero_grad(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Leaves that took no part in the loss stay as they are."""
        used = [i for i, leaf in enumerate(self.leaves) if leaf.grad is not None]
        leaves = [self.leaves[i] for i in used]
        grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
        how: dict[str, Any] = {"lr": self.optimizer.lr, "weight_decay": self.weight_decay, "maximize": False}
        if self.optimizer.name == "adam":
            means, squares, counts = ([each[i] for i in used] for each in (self.means, self.squares, self.counts))
            how |= {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False}
            adam(leaves, grads, means, squares, [], counts, foreach=True, **how)
            return
        velocities = [self.velocities[i] for i in used]
        how |= {"momentum": self.optimizer.momentum, "dampening": 0.0, "nesterov": False}
        sgd(leaves, grads, velocities, foreach=True, **how)
        for i, velocity in zip(used, velocities, strict=True):
            self.velocities[i] = velocity


@dataclass(frozen=True)
class LoopFit:
    """The `Fit` of one client, with plain autograd."""

    net: Net
    shard: Shard
    optimizer: Optimizer
    epochs: int
    batch: int
    flip: bool
    crop: int  # pixels of padding to crop from; 0 for none
    path: tuple[int | str, ...]  # what the draws are for: seed, phase, round
    client: int
    federation: int = 1  # the number of its clients

    @property
    def lr(self) -> float:
        return self.optimizer.lr

    @property
    def steps(self) -> Tensor:
        batches = -(-int(self.shard.real.sum()) // self.batch)
        return torch.tensor(float(self.epochs * batches), device=self.shard.real.device)

    @property
    def total_clients(self) -> Tensor:
        return torch.tensor(float(self.federation), device=self.shard.real.device)

    def __call__(
        self,
        loss: Loss,
        params: Tree,
        given: Tree | None = None,
        *,
        shard: Shard | None = None,
        weight_decay: float | None = None,
    ) -> Fitted:
        refuse_captured(loss)
        shard, means = shard or self.shard, []
        flat = {name: _start(leaf) for name, leaf in tree.flatten(params).items()}
        trained = tree.unflatten(flat)
        given = _detach(given or {})
        optimizer = self.optimizer.over(list(flat.values()), weight_decay)
        for epoch in range(self.epochs):
            total = torch.zeros((), device=shard.real.device)
            for batch in self.batches(shard, epoch):
                losses = weigh_losses(loss(self.net, trained, given, batch), batch)
                optimizer.zero_grad()
                (losses.sum() / batch.weight.sum()).backward()
                optimizer.step()
                total = total + losses.detach().sum()
            means.append(float(total) / max(1, int(shard.real.sum())))
        return Fitted(tree.map_leaves(lambda leaf: leaf.detach().contiguous(), trained), torch.tensor(means))

    def batches(self, shard: Shard, epoch: int) -> Iterator[Batch]:
        """All real rows once, in random order, each cropped and flipped at random. Padding never makes a batch."""
        device, n = shard.real.device, int(shard.real.sum())
        key = torch.tensor([rng.key(*self.path, epoch)], device=device)
        client = torch.tensor([self.client], device=device)
        cuts = draw_cuts(key, client, shard.real[None], self.flip, self.crop).take(slice(n))
        for first in range(0, n, self.batch):
            part = cuts.take(slice(first, first + self.batch))
            x = order_axes(cut_batches_plainly(shard.x[None], part, self.crop)[0], shard.x.dtype)
            yield Batch(x, shard.labels[part.order[0]], torch.ones(len(x), device=device), shard.counts)


def weigh_losses(losses: Tensor, batch: Batch) -> Tensor:
    """The losses [b] of real rows, and 0 for padding."""
    if not isinstance(losses, Tensor) or losses.shape != batch.weight.shape:
        gave = list(losses.shape) if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        raise InputError(
            f"a loss must give one number per sample, but it gave {gave} for a batch of {len(batch.weight)}; "
            f"the engine takes the mean."
        )
    return losses * batch.weight


class Cuts(NamedTuple):
    """Which row comes when in an epoch, and how a picture is cut; all [rows, n]."""

    order: Tensor  # int64
    down: Tensor  # int64, 0 to 2 pad
    right: Tensor
    mirrored: Tensor  # bool

    def pad(self, length: int) -> Cuts:
        missing = length - self.order.shape[1]
        if missing <= 0:
            return self.take(slice(length))
        return Cuts(*(torch.nn.functional.pad(part, (0, missing)) for part in self))

    def take(self, part: slice) -> Cuts:
        return Cuts(*(each[:, part] for each in self))


def draw_cuts(keys: Tensor, clients: Tensor, real: Tensor, flip: bool, pad: int) -> Cuts:
    """An epoch of some clients' shards [rows, n], real images first; keys: int64 [rows, 2], clients: int64 [rows]."""
    item = (clients << 32)[:, None] + torch.arange(real.shape[1], device=real.device)
    zero = torch.zeros_like(item)
    word = 0xFFFFFFFF
    first, second, where, side = rng.philox((zero, zero, item & word, item >> 32 & word), (keys[:, :1], keys[:, 1:]))
    place = (first << 30 | second >> 2).masked_fill(~real, torch.iinfo(torch.int64).max)
    order = torch.argsort(place, 1)
    where, side, places = where.gather(1, order), side.gather(1, order), 2 * pad + 1
    mirrored = (side < 2**31) & flip
    return Cuts(order, (where >> 16) * places >> 16, (where & 0xFFFF) * places >> 16, mirrored)


def cut_batches_plainly(x: Tensor, cuts: Cuts, pad: int) -> Tensor:
    """Batches [rows, b, ...] of x [rows, n, ...]. Pictures [..., h, w, c] become float in [-1, 1]."""
    row = torch.arange(len(x), device=x.device)[:, None]
    chosen = x[row, cuts.order]
    if x.dtype != torch.uint8:
        return chosen
    chosen = torch.where(cuts.mirrored[..., None, None, None], chosen.flip(-2), chosen).flatten(0, 1)
    if pad:
        chosen = crop(chosen, pad, cuts.down.flatten(), cuts.right.flatten())
    batches: Tensor = scale(chosen).movedim(-3, -1).unflatten(0, cuts.order.shape)
    return batches


def order_axes(batches: Tensor, kind: torch.dtype) -> Tensor:
    """Batches as networks take them: pictures (of uint8) [..., h, w, c] -> [..., c, h, w]; other data as they are."""
    return batches.movedim(-1, -3) if kind == torch.uint8 else batches


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
