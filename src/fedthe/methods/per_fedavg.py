"""Per-FedAvg (Fallah et al. 2020, https://arxiv.org/abs/2002.07948): the shared model is trained to be good after one
step of gradient descent on a client's own rows; every client deploys it fine-tuned."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import tree
from ..errors import InputError
from .base import Batch, Fit, Fitted, Net, Rounds, Shard, Tree


@dataclass(frozen=True)
class PerFedAvg(Rounds):
    inner_lr: float = 0.01  # the lr of the fine-tuning to come
    first_order: bool = True  # the paper's Per-FedAvg (FO): the inner gradient counts as a constant

    def __post_init__(self) -> None:
        if self.inner_lr < 0:
            raise InputError(f"per_fedavg: inner_lr must not be negative, but it is {self.inner_lr}.")

    def local(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        return fit(self.meta_loss, shared)

    def meta_loss(self, net: Net, params: Tree, given: Tree, batch: Batch) -> Tensor:
        """The losses of half of the rows after a step on the other half; scaled, for the engine divides by all rows."""
        inner, outer = split(batch.weight)

        def mean_loss(params: Tree) -> Tensor:
            return (self.loss(net, params, {}, batch) * inner).sum() / inner.sum().clamp(min=1)

        here = tree.map_leaves(torch.detach, params) if self.first_order else params
        gradient = torch.func.grad(mean_loss)(here)
        ahead = tree.map_leaves(lambda leaf, g: leaf - self.inner_lr * g, params, gradient)
        return self.loss(net, ahead, {}, batch) * outer * batch.weight.sum() / outer.sum().clamp(min=1)


def split(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Every other real row [b] for the inner step and the rest for the outer loss; a single row serves for both."""
    inner = weight * (weight.cumsum(0) % 2)
    outer = weight - inner
    return inner, torch.where(outer.sum() > 0, outer, inner)
