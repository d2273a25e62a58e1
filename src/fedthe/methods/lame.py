"""LAME (Boudiaf et al., CVPR 2022, https://arxiv.org/abs/2201.05718): the model stays as it is; the predictions of a
batch are drawn towards those of samples with similar features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import InputError
from .base import Answers, Method, Predictor, Samples, Tree


@dataclass(frozen=True)
class LAME(Predictor):
    """The samples of a batch are answered together: the first waits for the last."""

    batch: int = 64  # samples that are answered together: the paper's
    k: int = 5  # nearest neighbours
    steps: int = 100  # at most, in the paper, which stops when nothing changes any more

    def __post_init__(self) -> None:
        if min(self.batch, self.k) < 1 or self.steps < 0:
            raise InputError(
                f"lame: batch and k must be at least 1, and steps not negative, "
                f"but they are {self.batch}, {self.k} and {self.steps}."
            )

    def answer(self, method: Method, mine: Tree, state: Tree, samples: Samples) -> tuple[Answers, Tree]:
        with torch.no_grad():
            h = method.net.features(mine["body"], samples.x)
            log_p = (method.net.head(mine["head"], h).softmax(-1) + 1e-10).log()
            return Answers(smooth(log_p, find_neighbours(h, self.k), self.steps)), state

    @property
    def window(self) -> int:
        return self.batch


def find_neighbours(h: Tensor, k: int) -> Tensor:
    """[n, n]: 1 where the sample of a column is one of the k nearest of the sample of the row; features h [n, d]."""
    h = F.normalize(h, dim=-1)
    distances = (h[:, None] - h).square().sum(-1)
    here = torch.eye(len(h), dtype=torch.bool, device=h.device)
    order = distances.masked_fill(here, torch.inf).argsort(dim=-1, stable=True)[:, : min(k, len(h) - 1)]
    return torch.zeros_like(distances).scatter(-1, order, 1.0)


def smooth(log_p: Tensor, weights: Tensor, steps: int) -> Tensor:
    """The log of the predictions [n, classes] that the concave-convex iteration of the paper, equation 6, reaches."""
    answers = log_p.log_softmax(-1)
    for _ in range(steps):
        answers = (log_p + weights @ answers.exp()).log_softmax(-1)
    return answers
