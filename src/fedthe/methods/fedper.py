"""FedPer (Arivazhagan et al. 2019, https://arxiv.org/abs/1912.00818): clients share the body only; each keeps its own
head, and trains both together."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Fit, Fitted, Net, Personal, Rounds, Shard, Tree


@dataclass(frozen=True)
class FedPer(Rounds, Personal):
    """A client deploys the last shared body under the head that it trained last."""

    def share(self, net: Net, params: Tree) -> Tree:
        return {"body": params["body"]}

    def keep(self, net: Net, params: Tree) -> Tree:
        return {"head": params["head"]}

    def local(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        params, losses, _ = fit(self.loss, shared | mine)
        return Fitted({"body": params["body"]}, losses, {"head": params["head"]})
