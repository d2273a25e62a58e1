"""FedRep (Collins et al. 2021, https://arxiv.org/abs/2102.07078): clients share the body only; each keeps its own head,
trained on the received body, and then trains the body under that head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import Batch, Fit, Fitted, Net, Personal, Rounds, Shard, Tree


@dataclass(frozen=True)
class FedRep(Rounds, Personal):
    def share(self, net: Net, params: Tree) -> Tree:
        return {"body": params["body"]}

    def keep(self, net: Net, params: Tree) -> Tree:
        return {"head": params["head"]}

    def personalize(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        return fit(self.loss, mine, shared)

    def local(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        return fit(self.loss, shared, mine)

    def loss(self, net: Net, params: Tree, given: Tree, batch: Batch) -> Tensor:
        return super().loss(net, given | params, {}, batch)
