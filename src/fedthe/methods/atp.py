"""ATP (Bao et al., NeurIPS 2023, https://arxiv.org/abs/2310.18816): clients learn together how far each layer should go
when a model makes its own predictions certain; at test time it goes that far, without labels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import tree
from ..autograd import differentiate
from ..errors import InputError
from .base import Answers, Batch, Fit, Fitted, Method, Net, Personal, Predictor, Samples, Shard, Tree, network
from .losses import cross_entropy, entropy


@dataclass(frozen=True)
class AdaptationRates(Personal):
    """The server averages the rates like weights, beside the model that FedAvg trains; the paper trains them after it.
    Batches, momentum and Adam are those of the experiment."""

    averages: ClassVar[Mapping[str, str]] = {"rates": "own_rates"}
    rate_lr: float = 0.1  # of SGD; Adam takes the experiment's

    def __post_init__(self) -> None:
        if not 0 <= self.rate_lr < math.inf:
            raise InputError(f"atp: rate_lr must not be negative, but it is {self.rate_lr}.")

    def keep(self, net: Net, params: Tree) -> Tree:
        return {"own_rates": tree.map_leaves(lambda leaf: leaf.new_zeros(()), params)}

    def personalize(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        # so that a step of `fit` is one of `rate_lr`; with a learning rate of 0 nothing is learned
        pace = shard.counts.new_full((), self.rate_lr / fit.lr if fit.lr else 0.0)
        given = {"model": network(shared), "pace": pace}
        fitted = fit(self.loss, shared["rates"], given, weight_decay=0.0)
        return Fitted({"own_rates": fitted.params}, fitted.losses)

    def personalize_unlabeled(self, net: Net, shared: Tree, shard: Shard) -> Tree:
        return {}  # the received model and rates, as with labels: a client's own rates are for the server

    def loss(self, net: Net, params: Tree, given: Tree, batch: Batch) -> Tensor:
        """After a step of the model at these rates, on the batch without its labels."""
        direction = torch.func.grad(mean_entropy)(given["model"], net, batch.x, batch.weight)
        adapted = move(given["model"], tree.map_leaves(slow_down, params, direction), direction)
        loss: Tensor = given["pace"] * cross_entropy(net.logits(adapted, batch.x), batch.y)
        return loss


@dataclass(frozen=True)
class ATP(Predictor):
    """ATP-online: every batch is answered by the received model after one step along the mean of the gradients so far,
    its own among them, each taken at the received model."""

    needs: ClassVar[tuple[str, ...]] = ("rates",)
    batch: int = 20  # samples that share a gradient, and are answered after it: the paper's

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise InputError(f"atp: batch must be at least 1, not {self.batch}.")

    def start(self, method: Method, mine: Tree, shard: Shard) -> Tree:
        direction = tree.map_leaves(torch.zeros_like, network(mine))
        return {"direction": direction, "batches": mine["head"]["out"].new_zeros(())}

    def answer(self, method: Method, mine: Tree, state: Tree, samples: Samples) -> tuple[Answers, Tree]:
        model, batches = network(mine), state["batches"] + 1
        equal = torch.ones(len(samples.x), device=samples.x.device)
        gradients = differentiate(mean_entropy, model, method.net, samples.x, equal)
        direction = tree.map_leaves(lambda old, new: old + (new - old) / batches, state["direction"], gradients)
        with torch.no_grad():
            logits = method.net.logits(move(model, mine["rates"], direction), samples.x)
        return Answers(logits), {"direction": direction, "batches": batches}

    @property
    def window(self) -> int:
        return self.batch

    @property
    def passes(self) -> tuple[int, int]:
        return 2, 1


def mean_entropy(model: Tree, net: Net, x: Tensor, weight: Tensor) -> Tensor:
    return (entropy(net.logits(model, x)) * weight).sum() / weight.sum().clamp(min=1)


def move(model: Tree, rates: Tree, direction: Tree) -> Tree:
    return tree.map_leaves(lambda leaf, rate, gradient: leaf - rate * gradient, model, rates, direction)


def slow_down(rate: Tensor, leaf: Tensor) -> Tensor:
    """The same rate, but its gradient is divided by the square root of how many numbers it moves, as in the paper."""
    return rate.detach() + (rate - rate.detach()) / math.sqrt(math.prod(leaf.shape))
