"""TSA (Zhang et al., NeurIPS 2022, https://arxiv.org/abs/2107.09249): weigh the heads so that two augmented views of a
sample get the same prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Answers, Method, Predictor, Samples, Tree
from .head_ensemble import Search, descend, describe_heads, mix
from .two_heads import heads

CHUNK = 250  # samples whose views are in memory together


@dataclass(frozen=True)
class TSA(Predictor):
    """On a model with two heads. The paper learns one weight for a whole test set that it has at hand; in a stream
    every sample gets its own, from 0.5 and one pair of views, by Adam, as in the FedTHE authors' comparison."""

    needs: ClassVar[tuple[str, ...]] = ("personal",)
    window = None
    steps: int = 10
    lr: float = 0.1

    def __post_init__(self) -> None:
        Search(self.steps, self.lr)  # refuses what cannot be searched with

    def answer(self, method: Method, mine: Tree, state: Tree, samples: Samples) -> tuple[Answers, Tree]:
        search, weights = Search(self.steps, self.lr), []
        with torch.no_grad():
            for rows in torch.arange(len(samples.x)).split(CHUNK):
                seen = samples.views(rows)[:, 0].flatten(0, 1)  # [m * 2, c, h, w]
                _, of_global, of_personal = heads(method.net, mine, seen)
                weights.append(agree(of_global.unflatten(0, (-1, 2)), of_personal.unflatten(0, (-1, 2)), search))
            e = torch.cat(weights)
            _, of_global, of_personal = heads(method.net, mine, samples.x)
            logits = mix(e, of_global, of_personal)
        return Answers(logits, describe_heads(e, logits, of_global, of_personal)), state

    @property
    def augments(self) -> tuple[int, int]:
        return 1, 2

    @property
    def passes(self) -> tuple[int, int]:
        return 3, 0


def agree(of_global: Tensor, of_personal: Tensor, search: Search) -> Tensor:
    """e [n], maximising the cosine similarity of both views' predictions by Adam; logits [n, 2, classes]."""
    # in float64: where the heads agree, gradients nearly cancel, and Adam makes the rounding of float32 count
    gradient, dtype = torch.func.grad(lose_similarity), of_global.dtype
    of_global, of_personal = of_global.double(), of_personal.double()
    return descend(lambda e: gradient(e, of_global, of_personal), of_global[:, 0, 0], search).to(dtype)


def lose_similarity(e: Tensor, of_global: Tensor, of_personal: Tensor) -> Tensor:
    p = (e[:, None, None] * of_global + (1 - e[:, None, None]) * of_personal).softmax(-1)
    return -torch.cosine_similarity(p[:, 0], p[:, 1], dim=-1).sum()
