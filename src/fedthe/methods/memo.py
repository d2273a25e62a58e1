"""MEMO (Zhang et al., NeurIPS 2022, https://arxiv.org/abs/2110.09506): before answering a sample, make the mean
prediction over its augmented views confident, then forget."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import tree
from ..errors import InputError
from ..tree import Tree
from .base import Answers, Method, Predictor
from .losses import marginal_entropy

Logits = Callable[[Tree, Tensor], Tensor]


@dataclass(frozen=True)
class Memo(Predictor):
    views: int = 32  # 16 in FedTHE+
    steps: int = 3
    lr: float = 0.0005

    def __post_init__(self) -> None:
        if self.views < 1 or self.steps < 0 or not 0 <= self.lr < math.inf:
            raise InputError(
                f"memo: views must be at least 1, and steps and lr not negative, "
                f"but they are {self.views}, {self.steps} and {self.lr}."
            )

    def step(self, method: Method, mine: Tree, state: Tree, x: Tensor, views: Tensor | None) -> tuple[Answers, Tree]:
        seen = x.new_empty(0) if views is None else views  # no steps, no views
        return Answers(self.answer(method.logits, mine, x, seen)), state

    def answer(self, logits: Logits, mine: Tree, x: Tensor, views: Tensor) -> Tensor:
        """The logits of x after tuning on its views [steps, views, c, h, w]; `mine` stays as it is."""
        with torch.no_grad():
            return logits(self.tune(logits, mine, views), x)

    def tune(self, logits: Logits, params: Tree, views: Tensor) -> Tree:
        """Everything that `logits` depends on, after a step of SGD on each set of views."""

        def loss(tuned: Tree, seen: Tensor) -> Tensor:
            return marginal_entropy(logits(tuned, seen))

        for seen in views:
            flat = {name: leaf.detach().requires_grad_() for name, leaf in tree.flatten(params).items()}
            with torch.enable_grad():  # plain autograd: a fifth faster here than torch.func.grad
                entropy = loss(tree.unflatten(flat), seen)
                gradients = torch.autograd.grad(entropy, list(flat.values()), materialize_grads=True, allow_unused=True)
            slopes = dict(zip(flat, gradients, strict=True))
            params = tree.unflatten({name: leaf.detach() - self.lr * slopes[name] for name, leaf in flat.items()})
        return params

    @property
    def augments(self) -> tuple[int, int]:
        return self.steps, self.views

    @property
    def passes(self) -> tuple[int, int]:
        return self.steps * self.views + 1, self.steps * self.views
