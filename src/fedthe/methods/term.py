"""TERM (Li et al. 2021, https://arxiv.org/abs/2007.01162): local training weighs samples by the exponential of their
loss, towards the worst ones for a positive tilt and away from them for a negative one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from .base import Batch, Net, Rounds, Tree

NEVER = -1e30  # not -inf, which times a weight of 0 is nan: a batch may be nothing but padding


@dataclass(frozen=True)
class TERM(Rounds):
    tilt: float = 1.0

    def __post_init__(self) -> None:
        if self.tilt == 0:
            raise InputError("term: tilt must not be 0; use fedavg, which is its limit.")

    def loss(self, net: Net, params: Tree, given: Tree, batch: Batch) -> Tensor:
        """log(mean(exp(tilt * loss))) / tilt over the real rows, the same for every row, so that it is its own mean."""
        tilted = (self.tilt * super().loss(net, params, given, batch)).masked_fill(batch.weight == 0, NEVER)
        rows = batch.weight.sum().clamp(min=1)
        return ((tilted.logsumexp(0) - torch.log(rows)) / self.tilt).expand(len(tilted))
