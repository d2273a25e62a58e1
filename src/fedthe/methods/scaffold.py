"""SCAFFOLD (Karimireddy et al. 2020, https://arxiv.org/abs/1910.06378), option II: control variates, one of the
server and one of each client, correct every local step for the drift towards the client's own optimum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import tree
from ..errors import InputError
from .base import Batch, Fit, Fitted, Net, Rounds, Shard, Tree, network


@dataclass(frozen=True)
class Scaffold(Rounds):
    """Weight decay is part of the loss. Clients count equally, whatever their rows."""

    plain_sgd: ClassVar[bool] = True  # option II reads the mean gradient off the way that a client went
    changes: ClassVar[tuple[str, ...]] = ("control",)
    server_lr: float = 1.0

    def __post_init__(self) -> None:
        if self.server_lr <= 0:
            raise InputError(f"scaffold: server_lr must be positive, but it is {self.server_lr}.")

    def share(self, net: Net, params: Tree) -> Tree:
        return params | {"control": tree.map_leaves(torch.zeros_like, params)}

    def keep(self, net: Net, params: Tree) -> Tree:
        return {"own_control": tree.map_leaves(torch.zeros_like, params)}

    def local(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        x, own = network(shared), mine["own_control"]
        drift = tree.map_leaves(torch.sub, shared["control"], own)
        y, losses, _ = fit(self.corrected_loss, x, drift)
        steps = fit.steps.clamp(min=1)
        new = tree.map_leaves(lambda x, y, drift: (x - y) / fit.lr / steps - drift, x, y, drift)
        change = tree.map_leaves(lambda new, own: (new - own) / fit.total_clients, new, own)
        return Fitted(y | {"control": change}, losses, {"own_control": new})

    def corrected_loss(self, net: Net, params: Tree, given: Tree, batch: Batch) -> Tensor:
        """Its gradient is that of the loss, plus c - c_i."""
        products = tree.map_leaves(lambda y, drift: (y * drift).sum(), params, given)
        return self.loss(net, params, {}, batch) + sum(tree.flatten(products).values())

    def aggregate(self, shared: Tree, uploads: Tree, weights: Tensor) -> Tree:
        """Over the sampled clients, models are averaged and changes of control variates added up."""
        x = tree.map_leaves(
            lambda old, sent: old + self.server_lr * (sent.mean(0) - old), network(shared), network(uploads)
        )
        add = tree.map_leaves(lambda c, change: c + change.sum(0), shared["control"], uploads["control"])
        return x | {"control": add}
