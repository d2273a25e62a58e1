"""GMA (Tenison et al. 2022, https://arxiv.org/abs/2201.11986): the server shrinks the mean update where the clients'
updates disagree in sign."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import tree
from ..errors import InputError
from .base import Rounds, Tree


@dataclass(frozen=True)
class GMA(Rounds):
    threshold: float = 0.1  # the least agreement that lets an update pass whole

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise InputError(f"gma: threshold must be from 0 to 1, not {self.threshold}.")

    def aggregate(self, shared: Tree, uploads: Tree, weights: Tensor) -> Tree:
        return tree.map_leaves(self._move, shared, uploads)

    def _move(self, start: Tensor, sent: Tensor) -> Tensor:
        """start [...], sent [clients, ...]; the mean is uniform, as the signs count every client once."""
        updates, clients = sent - start, len(sent)
        # Agreement is a multiple of 1 / clients and often the threshold itself: 2 of 20 at 0.1. As a whole number of
        # votes it is compared without rounding.
        votes = updates.sign().sum(0).abs()
        mask = torch.where(votes >= self.threshold * clients, 1.0, votes / clients)
        return start + mask * updates.mean(0)
