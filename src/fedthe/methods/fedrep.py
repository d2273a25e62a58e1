"""FedRep (Collins et al. 2021, https://arxiv.org/abs/2102.07078): clients share the body only; each keeps its own head,
trained on the received body, and then trains the body under that head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..tree import Tree
from ..types import Batch, Shard
from .base import Fit, Method


@dataclass(frozen=True)
class FedRep(Method):
    def init(self, params: Tree) -> tuple[Tree, Tree]:
        return {"body": params["body"]}, params

    def personalize(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Tree:
        return shared | {"head": fit(self.head_loss, mine["head"], shard, shared)}

    def local(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Tree:
        return {"body": fit(self.body_loss, shared["body"], shard, {"head": mine["head"]})}

    def head_loss(self, params: Tree, given: Tree, batch: Batch) -> Tensor:
        return self.loss(given | {"head": params}, {}, batch)

    def body_loss(self, params: Tree, given: Tree, batch: Batch) -> Tensor:
        return self.loss(given | {"body": params}, {}, batch)
