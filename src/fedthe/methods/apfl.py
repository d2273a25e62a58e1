"""APFL (Deng et al. 2020, https://arxiv.org/abs/2003.13461): every client deploys alpha * v + (1 - alpha) * w, its own
model v and the global model w in a proportion that it learns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import tree
from ..errors import InputError
from ..tree import Tree
from ..types import Batch, Shard, scale
from .base import Fit, Method


def mix(alpha: Tensor, v: Tree, w: Tree) -> Tree:
    return tree.map_leaves(lambda mine, theirs: alpha * mine + (1 - alpha) * theirs, v, w)


@dataclass(frozen=True)
class APFL(Method):
    # The paper steps v and w together and takes the gradient of alpha on a batch. Here, as for every method, a client
    # personalizes around the received w, which stays; alpha moves before v, once per round, by the gradient on all rows
    # as they are, and v by its own gradient, which carries a factor alpha.
    alpha: float = 0.5  # where it starts

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise InputError(f"apfl: alpha must be from 0 to 1, not {self.alpha}.")

    def init(self, params: Tree) -> tuple[Tree, Tree]:
        return params, params | {"personal": params, "alpha": params["head"]["out"].new_full((), self.alpha)}

    def personalize(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Tree:
        slope = self.slope(mine["alpha"], mine["personal"], shared, shard)
        alpha = (mine["alpha"] - fit.lr * slope).clamp(0, 1)
        v = fit(self.mixed_loss, mine["personal"], shard, {"alpha": alpha, "received": shared})
        return mix(alpha, v, shared) | {"personal": v, "alpha": alpha}

    def mixed_loss(self, params: Tree, given: Tree, batch: Batch) -> Tensor:
        return self.loss(mix(given["alpha"], params, given["received"]), {}, batch)

    def sends_as(self) -> Method:
        return Method(self.net)

    def slope(self, alpha: Tensor, v: Tree, w: Tree, shard: Shard, chunk: int = 500) -> Tensor:
        """The derivative of the mean training loss by alpha: the gradient at the mixture, along v - w."""

        def total(alpha: Tensor, x: Tensor, y: Tensor, real: Tensor) -> Tensor:
            batch = Batch(scale(x), y, real.float(), shard.counts)
            return (self.loss(mix(alpha, v, w), {}, batch) * batch.weight).sum()

        parts = zip(*(rows.split(chunk) for rows in (shard.images, shard.labels, shard.real)), strict=True)
        slopes = [torch.func.grad(total)(alpha, *part) for part in parts]
        return torch.stack(slopes).sum(0) / shard.real.sum().clamp(min=1)
