"""MEMO (Zhang et al., NeurIPS 2022, https://arxiv.org/abs/2110.09506): before answering a sample, make the mean
prediction over its augmented views confident, then forget."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import tree
from ..autograd import differentiate
from ..errors import InputError
from .base import Answers, Method, Predictor, Samples, Tree
from .losses import marginal_entropy

Logits = Callable[[Tree, Tensor], Tensor]


@dataclass(frozen=True)
class Memo(Predictor):
    window = None
    views: int = 32  # 16 in FedTHE+
    steps: int = 3
    lr: float = 0.0005

    def __post_init__(self) -> None:
        if self.views < 1 or self.steps < 0 or not 0 <= self.lr < math.inf:
            raise InputError(
                f"memo: views must be at least 1, and steps and lr not negative, "
                f"but they are {self.views}, {self.steps} and {self.lr}."
            )

    def answer(self, method: Method, mine: Tree, state: Tree, samples: Samples) -> tuple[Answers, Tree]:
        return Answers(samples.each(self.tuned, method, mine, samples.x)), state

    def tuned(self, method: Method, mine: Tree, views: Tensor, x: Tensor) -> Tensor:
        """The answer to one sample after tuning on its views."""
        with torch.no_grad():
            return method.logits(self.tune(method.logits, mine, views), x)

    def tune(self, logits: Logits, params: Tree, views: Tensor) -> Tree:
        """Everything that `logits` depends on, after a step of SGD on each set of views [steps, views, c, h, w]."""

        def loss(tuned: Tree, seen: Tensor) -> Tensor:
            return marginal_entropy(logits(tuned, seen))

        for seen in views:
            gradients = differentiate(loss, params, seen)
            params = tree.map_leaves(lambda leaf, gradient: leaf.detach() - self.lr * gradient, params, gradients)
        return params

    @property
    def augments(self) -> tuple[int, int]:
        return self.steps, self.views

    @property
    def passes(self) -> tuple[int, int]:
        return self.steps * self.views + 1, self.steps * self.views
