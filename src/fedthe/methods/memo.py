"""MEMO (Zhang et al., NeurIPS 2022, https://arxiv.org/abs/2110.09506): before answering a sample, make the mean
prediction over its augmented views confident, then forget."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from .. import tree
from ..errors import InputError
from ..tree import Tree
from .base import Answers, Method, Predictor
from .losses import marginal_entropy

Logits = Callable[[Tree, Tensor], Tensor]


@dataclass(frozen=True)
class Memo(Predictor):
    forgets: ClassVar[bool] = True
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
            slopes = differentiate(loss, params, seen)
            params = tree.map_leaves(lambda leaf, slope: leaf.detach() - self.lr * slope, params, slopes)
        return params

    @property
    def augments(self) -> tuple[int, int]:
        return self.steps, self.views

    @property
    def passes(self) -> tuple[int, int]:
        return self.steps * self.views + 1, self.steps * self.views


def differentiate(loss: Callable[[Tree, Tensor], Tensor], params: Tree, x: Tensor) -> Tree:
    """The gradient of loss(params, x) by params."""
    flat = tree.flatten(params)
    if any(map(is_functorch_wrapped_tensor, (x, *flat.values()))):
        lifted: Tree = torch.func.grad(loss)(params, x)
        return lifted
    # plain autograd, which vmap does not allow: on the CPU a fifth faster than torch.func.grad
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in flat.items()}
    with torch.enable_grad():
        found = loss(tree.unflatten(leaves), x)
        gradients = torch.autograd.grad(found, list(leaves.values()), materialize_grads=True, allow_unused=True)
    return tree.unflatten(dict(zip(flat, gradients, strict=True)))
