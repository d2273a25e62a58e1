"""SAR (Niu et al., ICLR 2023, https://arxiv.org/abs/2302.12400): entropy minimization that skips uncertain samples,
looks for flat minima, and puts the model back when it collapses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import tree
from ..errors import InputError
from .adapting import check_norms, check_step, pick_norms, put
from .base import Answers, Method, Predictor, Samples, Shard, Tree
from .losses import entropy

MEMORY = 0.9  # of the moving average of the loss


@dataclass(frozen=True)
class SAR(Predictor):
    """A sample is answered before the step of its batch. Steps are SGD with momentum on the norms' scales and shifts.
    The moving average goes on through a reset, as in the authors' code: a model that stays certain stays reset."""

    batch: int = 16  # samples that share a step; the paper's 64 would be a handful of steps per stream
    lr: float = 0.001  # the paper's for LayerNorm; 0.00025 for a ResNet50 with GroupNorm
    momentum: float = 0.9
    margin: float = 0.4  # of ln(classes): the most entropy that a sample may have to count
    rho: float = 0.05  # how far away the gradient is taken, uphill
    reset: float = 0.2  # the moving average of the loss below which the model is put back
    frozen: float = 0.25  # share of the norm layers, the last ones, that stay: the paper freezes the last stage

    def __post_init__(self) -> None:
        check_step("sar", self.batch, self.lr)
        if min(self.margin, self.rho, self.reset) < 0 or not (0 <= self.momentum < 1 and 0 <= self.frozen < 1):
            raise InputError(
                f"sar: margin, rho and reset must not be negative, and momentum and frozen from 0 to below 1, but they "
                f"are {self.margin}, {self.rho}, {self.reset}, {self.momentum} and {self.frozen}."
            )

    def check(self, method: Method) -> None:
        check_norms("sar", method)

    def start(self, method: Method, mine: Tree, shard: Shard) -> Tree:
        norms = pick_norms(method, mine, self.frozen)
        nothing = mine["head"]["out"].new_full((), torch.inf)  # no loss yet
        return {"norms": norms, "velocity": tree.map_leaves(torch.zeros_like, norms), "loss": nothing}

    def answer(self, method: Method, mine: Tree, state: Tree, samples: Samples) -> tuple[Answers, Tree]:
        norms, most = state["norms"], self.margin * math.log(method.net.classes)

        def loss(norms: Tree, among: Tensor | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            """The mean entropy of the samples that are certain, and were so before."""
            logits = method.logits(put(mine, norms), samples.x)
            doubt = entropy(logits)
            certain = doubt < most if among is None else among & (doubt < most)
            return mean(doubt, certain), (logits, doubt)

        uphill, (logits, doubt) = torch.func.grad(loss, has_aux=True)(norms)
        certain = doubt < most
        length = torch.stack([leaf.square().sum() for leaf in tree.flatten(uphill).values()]).sum().sqrt()
        away = tree.map_leaves(lambda leaf, g: leaf + self.rho * g / (length + 1e-12), norms, uphill)
        gradients, (_, doubt) = torch.func.grad(loss, has_aux=True)(away, certain)
        velocity = tree.map_leaves(lambda v, g: self.momentum * v + g, state["velocity"], gradients)
        norms = tree.map_leaves(lambda leaf, v: leaf - self.lr * v, norms, velocity)

        average = self._average(state["loss"], doubt, certain)
        return Answers(logits), self._recover(pick_norms(method, mine, self.frozen), norms, velocity, average)

    def _average(self, before: Tensor, doubt: Tensor, certain: Tensor) -> Tensor:
        """The moving average of the loss; it starts with the first batch that has a certain sample."""
        now = mean(doubt, certain)
        after = torch.where(before.isinf(), now, MEMORY * before + (1 - MEMORY) * now)
        return torch.where(certain.any(), after, before)

    def _recover(self, first: Tree, norms: Tree, velocity: Tree, average: Tensor) -> Tree:
        """The next state: as it was deployed if the model has collapsed."""
        collapsed = average < self.reset
        norms = tree.map_leaves(lambda leaf, old: torch.where(collapsed, old, leaf), norms, first)
        velocity = tree.map_leaves(lambda v: v.masked_fill(collapsed, 0), velocity)
        return {"norms": norms, "velocity": velocity, "loss": average}

    @property
    def window(self) -> int:
        return self.batch

    @property
    def passes(self) -> tuple[int, int]:
        return 2, 2


def mean(values: Tensor, counts: Tensor) -> Tensor:
    """Of the values that count; 0 if none does."""
    return values.masked_fill(~counts, 0).sum() / counts.sum().clamp(min=1)
