"""BBSE, black box shift estimation (Lipton, Wang and Smola, ICML 2018, https://arxiv.org/abs/1802.03916): the prior
that explains, through the confusion matrix, how often the stream's samples get each answer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import InputError
from .base import Answers, Method, Predictor, Samples, Shard, Tree
from .knn_per import collect_features
from .label_shift import SMOOTHING, adjust, describe_prior, global_logits, smooth_prior


@dataclass(frozen=True)
class BBSE(Predictor):
    """The source is the client's own class prior, and the confusion matrix that of its validation rows. They lack
    classes, which the paper excludes, so the matrix is regularised (ours): see `confusion`. As in RLLS (Azizzadenesheli
    et al., ICLR 2019, arXiv 1903.09734), the estimate is drawn to the source, more so early in the stream. The paper
    trains again with the class weights that it finds; here they change the answers."""

    needs_labels: ClassVar[bool] = True
    window = None
    soft: bool = False  # mean probabilities instead of the share of answers; the paper has both
    shrinkage: float = 10.0  # rows of a typical confusion that every class gets beside its validation rows
    ridge: float = 0.1  # of least squares, in place of an inverse; RLLS penalises the norm, not its square
    pseudo: float = 50.0  # samples that the client's own prior counts for, beside those of the stream

    def __post_init__(self) -> None:
        if not all(0 < value < math.inf for value in (self.shrinkage, self.ridge)) or not 0 <= self.pseudo < math.inf:
            raise InputError(
                f"bbse: shrinkage and ridge must be positive and pseudo not negative, "
                f"but they are {self.shrinkage}, {self.ridge} and {self.pseudo}."
            )

    def start(self, method: Method, mine: Tree, shard: Shard) -> Tree:
        with torch.no_grad():
            votes = self._vote(method.net.head(mine["head"], collect_features(method, mine, shard.val_x)))
        labels = F.one_hot(shard.val_labels, method.net.classes) * shard.val_real[:, None]
        own = smooth_prior(shard.counts, SMOOTHING)
        table = confusion(votes, labels, self.shrinkage)
        return {"own": own, "confusion": table, "votes": torch.zeros_like(own), "seen": torch.zeros_like(own[0])}

    def answer(self, method: Method, mine: Tree, state: Tree, samples: Samples) -> tuple[Answers, Tree]:
        logits = global_logits(method, mine, samples.x)
        votes = state["votes"] + self._vote(logits).cumsum(0)  # [n, classes], up to each sample
        seen = state["seen"] + torch.arange(1, len(logits) + 1, device=logits.device)
        prior = prior_by_bbse(votes, seen, state["confusion"], state["own"], self.ridge, self.pseudo)
        after = state | {"votes": votes[-1], "seen": seen[-1]}
        return Answers(adjust(logits, prior), describe_prior(prior)), after

    def _vote(self, logits: Tensor) -> Tensor:
        p = logits.double().softmax(-1)
        return p if self.soft else F.one_hot(p.argmax(-1), p.shape[-1]).double()


def confusion(votes: Tensor, labels: Tensor, shrinkage: float) -> Tensor:
    """p(answer i | class j), [classes, classes], of votes [v, classes] on rows with these one-hot labels [v, classes].

    A class with few rows is drawn to the typical one, and a class with none is it: right as often as all rows are,
    and wrong evenly. A row of zeros in the labels does not count.
    """
    labels = labels.to(votes.dtype)
    table, rows = votes.mT @ labels, labels.sum(0)
    right, classes = (table.trace() + 1) / (rows.sum() + 1), len(rows)
    same = torch.eye(classes, dtype=votes.dtype, device=votes.device)
    typical = right * same + (1 - right) * (1 - same) / max(classes - 1, 1)
    return (table + shrinkage * typical) / (rows + shrinkage)


def prior_by_bbse(
    votes: Tensor, seen: Tensor, confusion: Tensor, source: Tensor, ridge: float = 0.0, pseudo: float = 0.0
) -> Tensor:
    """The class prior [n, classes], from sums of votes [n, classes] over so many samples [n].

    Without ridge and pseudo it solves `confusion @ prior = votes / seen`. A ridge draws it to the source [classes], and
    `pseudo` adds samples from there. Negative entries become next to nothing.
    """
    excess = votes / seen[:, None] - confusion @ source
    squares = confusion.mT @ confusion + ridge * torch.eye(len(source), dtype=source.dtype, device=source.device)
    change: Tensor = torch.linalg.solve(squares, confusion.mT @ excess.mT).mT
    prior = source + (seen / (seen + pseudo))[:, None] * change
    prior = prior.clamp(min=torch.finfo(prior.dtype).tiny)  # not 0, should all of them be negative
    return prior / prior.sum(-1, keepdim=True)
