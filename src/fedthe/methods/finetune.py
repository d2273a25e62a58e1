"""FedAvg + fine-tuning (Wang et al. 2019, https://arxiv.org/abs/1910.10252): every client deploys the received global
model after training it on its own rows."""

from __future__ import annotations

from dataclasses import dataclass

from .base import FedAvg, Fit, Fitted, Net, Personal, Shard, Tree, network


@dataclass(frozen=True)
class FineTune(Personal):
    balanced_personal: bool = False  # balanced softmax instead of cross-entropy: the paper's ablation 16

    def personalize(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        return fit(FedAvg(self.balanced_personal).loss, network(shared))

    def personalize_unlabeled(self, net: Net, shared: Tree, shard: Shard) -> Tree:
        return {}  # the received model
