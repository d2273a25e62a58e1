"""FedBABU (Oh et al. 2022, https://arxiv.org/abs/2106.06042): the head stays as it started, and clients train the body
alone; to personalize, each fine-tunes both (`FineTune`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .base import Batch, Fit, Fitted, Net, Rounds, Shard, Tree


@dataclass(frozen=True)
class FedBABU(Rounds):
    mean_is_enough: ClassVar[bool] = True

    def local(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        body, losses, _ = fit(self.body_loss, {"body": shared["body"]}, {"head": shared["head"]})
        return Fitted(body | {"head": shared["head"]}, losses)

    def body_loss(self, net: Net, params: Tree, given: Tree, batch: Batch) -> Tensor:
        return self.loss(net, params | given, {}, batch)

    def aggregate(self, shared: Tree, uploads: Tree, weights: Tensor) -> Tree:
        return super().aggregate(shared, uploads, weights) | {"head": shared["head"]}  # a mean would round
