"""Per-FedAvg (Fallah et al. 2020, https://arxiv.org/abs/2002.07948): the shared model is trained to be good after one
step of gradient descent on a client's own rows; every client deploys it fine-tuned."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import tree
from ..errors import InputError
from ..tree import Tree
from ..types import Batch, Shard
from .base import Fit, Method


@dataclass(frozen=True)
class PerFedAvg(Method):
    inner_lr: float = 0.01  # the lr of the fine-tuning to come
    first_order: bool = True  # the paper's Per-FedAvg (FO): the inner gradient counts as a constant

    def __post_init__(self) -> None:
        if self.inner_lr < 0:
            raise InputError(f"per_fedavg: inner_lr must not be negative, but it is {self.inner_lr}.")

    def personalize(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Tree:
        return fit(self.loss, shared, shard)

    def local(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Tree:
        return fit(self.meta_loss, shared, shard)

    def meta_loss(self, params: Tree, given: Tree, batch: Batch) -> Tensor:
        """The losses of half of the rows after a step on the other half; scaled, for the engine divides by all rows."""
        inner, outer = split(batch.weight)
        here = tree.map_leaves(torch.detach, params) if self.first_order else params
        slope = torch.func.grad(self._mean_loss)(here, batch, inner)
        ahead = tree.map_leaves(lambda leaf, gradient: leaf - self.inner_lr * gradient, params, slope)
        return self.loss(ahead, {}, batch) * outer * batch.weight.sum() / outer.sum().clamp(min=1)

    def _mean_loss(self, params: Tree, batch: Batch, weight: Tensor) -> Tensor:
        return (self.loss(params, {}, batch) * weight).sum() / weight.sum().clamp(min=1)


def split(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Every other real row [b] for the inner step and the rest for the outer loss; a single row serves for both."""
    inner = weight * (weight.cumsum(0) % 2)
    outer = weight - inner
    return inner, torch.where(outer.sum() > 0, outer, inner)
