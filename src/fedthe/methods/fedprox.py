"""FedProx (Li et al. 2020, https://arxiv.org/abs/1812.06127): local training is pulled towards the received model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .. import tree
from ..errors import InputError
from .base import Batch, Fit, Fitted, Net, Rounds, Shard, Tree


@dataclass(frozen=True)
class FedProx(Rounds):
    mu: float = 0.1  # the pull; the paper picks it per dataset from 0.001, 0.01, 0.1, 0.5 and 1

    def __post_init__(self) -> None:
        if self.mu < 0:
            raise InputError(f"fedprox: mu must not be negative, but it is {self.mu}.")

    def local(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        return fit(self.proximal_loss, shared, given=shared)

    def proximal_loss(self, net: Net, params: Tree, given: Tree, batch: Batch) -> Tensor:
        squares = tree.map_leaves(lambda w, received: (w - received).square().sum(), params, given)
        return self.loss(net, params, {}, batch) + self.mu / 2 * sum(tree.flatten(squares).values())
