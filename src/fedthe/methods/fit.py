"""Training as a method sees it: `fit(loss, params)` on one client's data."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..nets.net import Net
from ..tree import Tree
from ..types import Batch, Shard

# What is trained, what is fixed, a batch -> one loss per sample. It reads no other tensors.
Loss = Callable[[Net, Tree, Tree, Batch], Tensor]


class Fitted(NamedTuple):
    """The result of training."""

    params: Tree
    losses: Tensor = torch.zeros(0)  # float [epochs]: the mean loss of each
    mine: Tree = {}  # noqa: RUF012  nobody changes it: leaves that the client keeps, where `local` changed them


class Fit(Protocol):
    """Training on one client's data, provided by the engine."""

    @property
    def net(self) -> Net: ...

    @property
    def lr(self) -> float: ...

    @property
    def steps(self) -> Tensor:
        """The optimizer's steps in a call on all training rows of the client, float []."""

    @property
    def total_clients(self) -> Tensor:
        """All clients of the federation, sampled in this round or not, float []."""

    def __call__(
        self,
        loss: Loss,
        params: Tree,
        given: Tree | None = None,
        *,
        shard: Shard | None = None,  # other rows than all training rows of the client
        weight_decay: float | None = None,  # another one than the experiment's
    ) -> Fitted: ...


def network(leaves: Tree) -> Tree:
    """The network's own leaves, where a method shares or keeps others beside them."""
    return {"body": leaves["body"], "head": leaves["head"]}
