"""FedAvg + fine-tuning (Wang et al. 2019, https://arxiv.org/abs/1910.10252): every client deploys the received global
model after training it on its own rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..tree import Tree
from ..types import Batch, Shard
from .base import Fit, Method
from .losses import balanced_softmax


@dataclass(frozen=True)
class BalancedFedAvg(Method):
    """FedAvg with balanced softmax."""

    def loss(self, params: Tree, given: Tree, batch: Batch) -> Tensor:
        return balanced_softmax(self.net.logits(params, batch.x), batch.y, batch.counts)


@dataclass(frozen=True)
class FineTune(Method):
    balanced: bool = False  # balanced softmax in the federated training: the paper's ablation 15
    balanced_personal: bool = False  # and in the fine-tuning: its ablation 16

    def personalize(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Tree:
        tuned_as = BalancedFedAvg(self.net) if self.balanced_personal else Method(self.net)
        return fit(tuned_as.loss, shared, shard)

    def local(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Tree:
        return self.trains_as().local(fit, shared, mine, shard)

    def trains_as(self) -> Method:
        """Without the fine-tuning, for no round sees what the round before it deployed."""
        return BalancedFedAvg(self.net) if self.balanced else Method(self.net)
