"""FedRoD (Chen and Chao 2022, https://arxiv.org/abs/2107.00778): the body and a generic head learn by balanced softmax
and are shared; a personal head learns by plain cross entropy what to add to the generic head's logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..tree import Tree
from ..types import Batch, Shard
from .base import Fit, Method
from .finetune import BalancedFedAvg
from .losses import balanced_softmax, cross_entropy


@dataclass(frozen=True)
class FedRoD(Method):
    def init(self, params: Tree) -> tuple[Tree, Tree]:
        # The paper does not say how the personal head starts. With a last layer of zeros it adds nothing, so a client
        # starts as the generic model; the layer before it, where there is one, is not zero, or neither would learn.
        nothing = params["head"] | {"out": torch.zeros_like(params["head"]["out"])}
        return params, params | {"personal": nothing}

    def personalize(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Tree:
        return shared | {"personal": fit(self.personal_loss, mine["personal"], shard, shared)}

    def loss(self, params: Tree, given: Tree, batch: Batch) -> Tensor:
        return balanced_softmax(self.net.logits(params, batch.x), batch.y, batch.counts)

    def personal_loss(self, params: Tree, given: Tree, batch: Batch) -> Tensor:
        return cross_entropy(self.logits(given | {"personal": params}, batch.x), batch.y)

    def logits(self, mine: Tree, x: Tensor) -> Tensor:
        h = self.net.features(mine["body"], x)
        return self.net.head(mine["head"], h) + self.net.head(mine["personal"], h)

    def sends_as(self) -> Method:
        return BalancedFedAvg(self.net)
