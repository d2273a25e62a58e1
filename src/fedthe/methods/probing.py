"""Linear probing, fine-tuning, and first one and then the other (Kumar et al., ICLR 2022, https://arxiv.org/abs/2202.10054):
how to personalize a pre-trained model without distorting its features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .base import Batch, FedAvg, Fit, Fitted, Net, Personal, Shard, Tree, network


@dataclass(frozen=True)
class Probe(Personal):
    """The pre-trained model comes in as `shared`. "lpft" has two phases, each as long as the one of "lp" or "ft"."""

    mode: Literal["lp", "ft", "lpft"] = "lpft"

    def personalize(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        probed = Fitted(network(shared))
        if self.mode != "ft":
            probed = fit(self.head_loss, {"head": shared["head"]}, {"body": shared["body"]})
        if self.mode == "lp":
            return probed
        tuned = fit(FedAvg().loss, network(shared) | probed.params)
        return Fitted(tuned.params, torch.cat([probed.losses.to(tuned.losses), tuned.losses]))

    def head_loss(self, net: Net, params: Tree, given: Tree, batch: Batch) -> Tensor:
        return FedAvg().loss(net, params | given, {}, batch)
