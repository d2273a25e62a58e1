"""pFedMe (Dinh et al. 2020, https://arxiv.org/abs/2006.08848): the shared model descends the clients' Moreau envelopes,
min over theta of loss(theta) + lam / 2 * ||theta - w||^2; each client deploys its own theta."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import tree
from ..autograd import differentiate
from ..errors import InputError
from .base import Batch, Fit, Fitted, Net, Personal, Rounds, Shard, Tree, network


@dataclass(frozen=True)
class PFedMe(Rounds, Personal):
    """Algorithm 1, where eta is the experiment's `lr` and R the number of local steps. Theta starts at w for every
    batch; in the authors' code it continues from the batch before. To deploy, theta trains for `personal_epochs` from
    the received w, at `inner_lr`, on all rows instead of one batch. The server weights clients by rows, as does the
    authors' code."""

    mean_is_enough: ClassVar[bool] = True
    plain_sgd: ClassVar[bool] = True  # its steps have lengths of their own, which Adam would undo
    lam: float = 15.0
    inner_lr: float = 0.03  # of theta; the authors' 0.09 diverges where the loss bends by more than 2 / 0.09 - lam = 7
    inner_steps: int = 5  # K, on the same batch
    beta: float = 1.0  # how far the server moves towards the mean; 1 is FedAvg's rule

    def __post_init__(self) -> None:
        if self.lam <= 0 or self.inner_lr <= 0 or self.inner_steps < 1 or self.beta <= 0:
            raise InputError("pfedme: lam, inner_lr and beta must be positive, and inner_steps at least 1.")

    def local(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        return fit(self.envelope, shared, weight_decay=0.0)  # the pull is the only regularisation

    def envelope(self, net: Net, params: Tree, given: Tree, batch: Batch) -> Tensor:
        """Its gradient is lam * (w - theta): that through theta vanishes where theta is the minimum."""
        w = tree.map_leaves(torch.detach, params)

        def mean_loss(theta: Tree) -> Tensor:
            return (self.pulled_loss(net, theta, w, batch) * batch.weight).sum() / batch.weight.sum().clamp(min=1)

        theta = w
        for _ in range(self.inner_steps):
            theta = tree.map_leaves(lambda leaf, g: leaf - self.inner_lr * g, theta, differentiate(mean_loss, theta))
        return self.pulled_loss(net, theta, params, batch)

    def personalize(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        pace = shard.counts.new_full((), self.inner_lr / fit.lr)  # so that a step of `fit` is one of theta
        return fit(self.paced_loss, network(shared), {"w": network(shared), "pace": pace}, weight_decay=0.0)

    def paced_loss(self, net: Net, params: Tree, given: Tree, batch: Batch) -> Tensor:
        loss: Tensor = given["pace"] * self.pulled_loss(net, params, given["w"], batch)
        return loss

    def pulled_loss(self, net: Net, params: Tree, given: Tree, batch: Batch) -> Tensor:
        squares = tree.map_leaves(lambda theta, w: (theta - w).square().sum(), params, given)
        return self.loss(net, params, {}, batch) + self.lam / 2 * sum(tree.flatten(squares).values())

    def aggregate(self, shared: Tree, uploads: Tree, weights: Tensor) -> Tree:
        mean = super().aggregate(shared, uploads, weights)
        return tree.map_leaves(lambda old, new: (1 - self.beta) * old + self.beta * new, shared, mean)
