"""Linear probing, fine-tuning, and first one and then the other (Kumar et al., ICLR 2022, https://arxiv.org/abs/2202.10054):
how to make a pre-trained model one's own without spoiling its features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..tree import Tree
from ..types import Batch, Shard
from .base import Fit, Method
from .losses import cross_entropy


@dataclass(frozen=True)
class Probe(Method):
    """The pre-trained model comes in as `shared`. "lpft" has two phases, each as long as the one of "lp" or "ft"."""

    mode: Literal["lp", "ft", "lpft"] = "lpft"

    def personalize(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Tree:
        if self.mode != "ft":
            shared = shared | {"head": fit(self.head_loss, shared["head"], shard, {"body": shared["body"]})}
        return shared if self.mode == "lp" else fit(self.loss, shared, shard)

    def head_loss(self, params: Tree, given: Tree, batch: Batch) -> Tensor:
        return cross_entropy(self.net.head(params, self.net.features(given["body"], batch.x)), batch.y)

    def trains_as(self) -> Method:
        return Method(self.net)
