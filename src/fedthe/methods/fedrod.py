"""FedRoD (Chen and Chao 2022, https://arxiv.org/abs/2107.00778): the body and a generic head learn by balanced softmax
and are shared; a personal head learns by plain cross-entropy what to add to the generic head's logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Batch, Fit, Fitted, Net, Personal, Shard, Tree
from .losses import cross_entropy


@dataclass(frozen=True)
class FedRoD(Personal):
    def keep(self, net: Net, params: Tree) -> Tree:
        # The paper does not say how the personal head starts. With a last layer of zeros it adds nothing, so a client
        # starts as the generic model; the layer before it, where there is one, is not zero, or neither would learn.
        last = {name: torch.zeros_like(leaf) for name, leaf in params["head"].items() if name in ("out", "bias")}
        return {"personal": params["head"] | last}

    def personalize(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        return fit(self.loss, {"personal": mine["personal"]}, shared)

    def loss(self, net: Net, params: Tree, given: Tree, batch: Batch) -> Tensor:
        return cross_entropy(self.logits(net, given | params, batch.x), batch.y)

    def logits(self, net: Net, mine: Tree, x: Tensor) -> Tensor:
        h = net.features(mine["body"], x)
        return net.head(mine["head"], h) + net.head(mine["personal"], h)
