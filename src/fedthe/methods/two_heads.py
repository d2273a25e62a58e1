"""The model of FedTHE (ICLR 2023, https://arxiv.org/abs/2205.10920): a shared extractor and global head, and on each
client a personal head and the mean of its features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..types import scale
from .base import Batch, FedAvg, Fit, Fitted, Net, Personal, Shard, Tree


@dataclass(frozen=True)
class TwoHeads(Personal):
    """With the plain predictor it answers by the mean of both heads (the paper's "pure two-head model")."""

    averages: ClassVar[Mapping[str, str]] = {"descriptor": "own_descriptor"}
    balanced_personal: bool = False  # balanced softmax for the personal head

    def keep(self, net: Net, params: Tree) -> Tree:
        return {"personal": params["head"], "own_descriptor": params["head"]["out"].new_zeros(net.feature_dim)}

    def personalize(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        head, losses, _ = fit(self.loss, mine["personal"], {"body": shared["body"]})
        return Fitted({"personal": head, "own_descriptor": mean_feature(fit.net, shared["body"], shard)}, losses)

    def personalize_unlabeled(self, net: Net, shared: Tree, shard: Shard) -> Tree:
        """The global head as the personal one, and the descriptor, which needs no labels."""
        return {"personal": shared["head"], "own_descriptor": mean_feature(net, shared["body"], shard)}

    def loss(self, net: Net, params: Tree, given: Tree, batch: Batch) -> Tensor:
        return FedAvg(self.balanced_personal).loss(net, {"head": params} | given, {}, batch)

    def logits(self, net: Net, mine: Tree, x: Tensor) -> Tensor:
        _, of_global, of_personal = heads(net, mine, x)
        return (of_global + of_personal) / 2


def heads(net: Net, mine: Tree, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The features [n, d] of x, and the logits [n, classes] of the global and of the personal head."""
    h = net.features(mine["body"], x)
    return h, net.head(mine["head"], h), net.head(mine["personal"], h)


def mean_feature(net: Net, body: Tree, shard: Shard, chunk: int = 500) -> Tensor:
    """The descriptor: the mean feature [d] of the client's own training rows, without augmentation."""
    total = shard.counts.new_zeros(net.feature_dim)
    with torch.no_grad():
        for x, real in zip(shard.x.split(chunk), shard.real.split(chunk), strict=True):
            total = total + (net.features(body, scale(x)) * real[:, None]).sum(0)
    return total / shard.real.sum().clamp(min=1)
