"""Tent (Wang et al., ICLR 2021, https://arxiv.org/abs/2006.10726): after every batch of the stream, the scales and
shifts of the norm layers take a step towards certain predictions, and keep it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .adapting import check_norms, check_step, pick_norms, put, start_adam, step_adam
from .base import Answers, Method, Predictor, Samples, Shard, Tree
from .losses import entropy


@dataclass(frozen=True)
class Tent(Predictor):
    """A sample is answered before the step of its batch, as in the paper, so the answer needs no later sample: `batch`
    only says how many gradients are averaged. The paper takes 128 to 200 samples of tens of thousands; a client's
    stream has hundreds."""

    batch: int = 16  # samples that share a step
    lr: float = 0.001  # of Adam: the paper's for CIFAR-10

    def __post_init__(self) -> None:
        check_step("tent", self.batch, self.lr)

    def check(self, method: Method) -> None:
        check_norms("tent", method)

    def start(self, method: Method, mine: Tree, shard: Shard) -> Tree:
        norms = pick_norms(method, mine)
        return {"norms": norms, "adam": start_adam(norms)}

    def answer(self, method: Method, mine: Tree, state: Tree, samples: Samples) -> tuple[Answers, Tree]:
        def loss(norms: Tree) -> tuple[Tensor, Tensor]:
            logits = method.logits(put(mine, norms), samples.x)
            return entropy(logits).mean(), logits

        gradients, logits = torch.func.grad(loss, has_aux=True)(state["norms"])
        norms, adam = step_adam(state["norms"], gradients, state["adam"], self.lr)
        return Answers(logits), {"norms": norms, "adam": adam}

    @property
    def window(self) -> int:
        return self.batch

    @property
    def passes(self) -> tuple[int, int]:
        return 1, 1
