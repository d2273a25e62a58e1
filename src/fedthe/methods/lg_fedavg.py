"""LG-FedAvg (Liang et al. 2020, https://arxiv.org/abs/2001.01523): clients share the head only; each keeps its own
body, a representation of its own data, and trains both together."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Fit, Fitted, Net, Personal, Rounds, Shard, Tree


@dataclass(frozen=True)
class LGFedAvg(Rounds, Personal):
    """All bodies start equal, from the network's first parameters; the authors' code starts them from FedAvg's model. A
    client deploys the body that it trained last under the last shared head."""

    def share(self, net: Net, params: Tree) -> Tree:
        return {"head": params["head"]}

    def keep(self, net: Net, params: Tree) -> Tree:
        return {"body": params["body"]}

    def local(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        params, losses, _ = fit(self.loss, shared | mine)
        return Fitted({"head": params["head"]}, losses, {"body": params["body"]})
