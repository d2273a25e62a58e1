"""TSA (Zhang et al., NeurIPS 2022, https://arxiv.org/abs/2107.09249): weigh the heads so that two augmented views of a
sample get the same prediction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..tree import Tree
from .base import Answers, Method, Predictor, Views
from .head_ensemble import Search, descend, describe_heads, mix

CHUNK = 250  # samples whose views are in memory together


@dataclass(frozen=True)
class TSA(Predictor):
    """On a model with two heads. The paper learns one weight for a whole test set that it has at hand; in a stream
    every sample gets its own, from 0.5 and one pair of views, by Adam, as in the FedTHE authors' comparison."""

    steps: int = 10
    lr: float = 0.1

    def __post_init__(self) -> None:
        Search(self.steps, self.lr)  # refuses what cannot be searched with

    def step(self, method: Method, mine: Tree, state: Tree, x: Tensor, views: Tensor | None) -> tuple[Answers, Tree]:
        return self.stream(method, mine, state, x, None if views is None else lambda _: views[None])

    def stream(self, method: Method, mine: Tree, state: Tree, x: Tensor, views: Views | None) -> tuple[Answers, Tree]:
        assert views is not None
        search, weights = Search(self.steps, self.lr), []
        with torch.no_grad():
            for rows in torch.arange(len(x)).split(CHUNK):
                seen = views(rows)[:, 0].flatten(0, 1)  # [m * 2, c, h, w]
                _, of_global, of_personal = method.heads(mine, seen)  # type: ignore[attr-defined]
                weights.append(agree(of_global.unflatten(0, (-1, 2)), of_personal.unflatten(0, (-1, 2)), search))
            e = torch.cat(weights)
            _, of_global, of_personal = method.heads(mine, x)  # type: ignore[attr-defined]
        return Answers(mix(e, of_global, of_personal), describe_heads(e, of_global, of_personal)), state

    @property
    def augments(self) -> tuple[int, int]:
        return 1, 2

    @property
    def passes(self) -> tuple[int, int]:
        return 3, 0


def agree(of_global: Tensor, of_personal: Tensor, search: Search) -> Tensor:
    """e [n], maximising the cosine similarity of both views' predictions by Adam; logits [n, 2, classes]."""
    # in float64: where the heads agree, slopes nearly cancel, and Adam makes the rounding of float32 count
    slope, dtype = torch.func.grad(lose_similarity), of_global.dtype
    of_global, of_personal = of_global.double(), of_personal.double()
    return descend(lambda e: slope(e, of_global, of_personal), of_global[:, 0, 0], search).to(dtype)


def lose_similarity(e: Tensor, of_global: Tensor, of_personal: Tensor) -> Tensor:
    p = (e[:, None, None] * of_global + (1 - e[:, None, None]) * of_personal).softmax(-1)
    return -torch.cosine_similarity(p[:, 0], p[:, 1], dim=-1).sum()
