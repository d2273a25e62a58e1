"""APFL (Deng et al. 2020, https://arxiv.org/abs/2003.13461): every client deploys alpha * v + (1 - alpha) * w, its own
model v and the global model w in a proportion that it learns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import tree
from ..errors import InputError
from ..types import scale
from .base import Batch, FedAvg, Fit, Fitted, Net, Personal, Shard, Tree, network
from .fit import Loss


def mix(alpha: Tensor, v: Tree, w: Tree) -> Tree:
    return tree.map_leaves(lambda mine, theirs: alpha * mine + (1 - alpha) * theirs, v, w)


@dataclass(frozen=True)
class APFL(Personal):
    # The paper steps v and w together and takes the gradient of alpha on a batch. Here, as for every method, a client
    # personalizes around the received w, which stays; alpha moves before v, once per round, by the gradient on all rows
    # as they are, and v by its own gradient, which carries a factor alpha.
    alpha: float = 0.5  # where it starts

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise InputError(f"apfl: alpha must be from 0 to 1, not {self.alpha}.")

    def keep(self, net: Net, params: Tree) -> Tree:
        return {"personal": params, "alpha": params["head"]["out"].new_full((), self.alpha)}

    def personalize(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        received = network(shared)
        given = {"alpha": mine["alpha"], "received": received}
        alpha = self.step_alpha(fit, mine["personal"], given, shard)
        v, losses, _ = fit(self.loss, mine["personal"], given | {"alpha": alpha})
        return Fitted(mix(alpha, v, received) | {"personal": v, "alpha": alpha}, losses)

    def step_alpha(self, fit: Fit, params: Tree, given: Tree, shard: Shard) -> Tensor:
        alpha: Tensor = given["alpha"] - fit.lr * differentiate_alpha(self.loss, fit.net, params, given, shard)
        return alpha.clamp(0, 1)

    def loss(self, net: Net, params: Tree, given: Tree, batch: Batch) -> Tensor:
        return FedAvg().loss(net, mix(given["alpha"], params, given["received"]), {}, batch)


def differentiate_alpha(loss: Loss, net: Net, params: Tree, given: Tree, shard: Shard, chunk: int = 500) -> Tensor:
    """The derivative of the mean training loss with respect to `given["alpha"]`."""

    def total(alpha: Tensor, x: Tensor, y: Tensor, real: Tensor) -> Tensor:
        batch = Batch(scale(x), y, real.float(), shard.counts)
        return (loss(net, params, given | {"alpha": alpha}, batch) * batch.weight).sum()

    parts = zip(*(rows.split(chunk) for rows in (shard.x, shard.labels, shard.real)), strict=True)
    gradients = [torch.func.grad(total)(given["alpha"], *part) for part in parts]
    return torch.stack(gradients).sum(0) / shard.real.sum().clamp(min=1)
