"""Ditto (Li et al. 2021, https://arxiv.org/abs/2012.04221): every client keeps its own model, which it trains while
pulling it towards the received global model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .. import tree
from ..errors import InputError
from ..tree import Tree
from ..types import Batch, Shard
from .base import Fit, Method


@dataclass(frozen=True)
class Ditto(Method):
    lam: float = 1.0  # the pull

    def __post_init__(self) -> None:
        if self.lam < 0:
            raise InputError(f"ditto: lam must not be negative, but it is {self.lam}.")

    def personalize(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Tree:
        # the pull is the only regularisation: no weight decay
        return fit(self.pulled_loss, mine, shard, shared, weight_decay=0.0)

    def local(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Tree:
        return fit(self.loss, shared, shard, weight_decay=0.0)  # as the paper trains Ditto, here too

    def pulled_loss(self, params: Tree, given: Tree, batch: Batch) -> Tensor:
        squares = tree.map_leaves(lambda v, w: (v - w).square().sum(), params, given)
        return self.loss(params, {}, batch) + self.lam / 2 * sum(tree.flatten(squares).values())
