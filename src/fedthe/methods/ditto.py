"""Ditto (Li et al. 2021, https://arxiv.org/abs/2012.04221): every client keeps its own model, which it trains while
pulling it towards the received global model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .. import tree
from ..errors import InputError
from .base import Batch, Fit, Fitted, Net, Personal, Rounds, Shard, Tree


@dataclass(frozen=True)
class Ditto(Rounds, Personal):
    lam: float = 1.0  # the pull

    def __post_init__(self) -> None:
        if self.lam < 0:
            raise InputError(f"ditto: lam must not be negative, but it is {self.lam}.")

    def keep(self, net: Net, params: Tree) -> Tree:
        return params

    def personalize(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        return fit(self.pulled_loss, mine, shared, weight_decay=0.0)  # the pull is the only regularisation

    def local(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        return fit(self.loss, shared, weight_decay=0.0)  # as the paper trains Ditto, here too

    def pulled_loss(self, net: Net, params: Tree, given: Tree, batch: Batch) -> Tensor:
        squares = tree.map_leaves(lambda v, w: (v - w).square().sum(), params, given)
        return self.loss(net, params, {}, batch) + self.lam / 2 * sum(tree.flatten(squares).values())
