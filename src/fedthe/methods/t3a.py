"""T3A (Iwasawa and Matsuo, NeurIPS 2021, https://openreview.net/forum?id=e_yvNqkJKAW): answer by prototypes, the means
of the most certain features that the stream has shown of each class."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ..errors import InputError
from .base import Answers, Method, Predictor, Samples, Shard, Tree
from .losses import entropy


@dataclass(frozen=True)
class T3A(Predictor):
    """Each class has m slots, sorted by entropy; those with entropy inf are empty and hold zeros."""

    window = None
    m: int = 50

    def __post_init__(self) -> None:
        if self.m < 1:
            raise InputError(f"t3a: m, the slots of a class, must be at least 1, but is {self.m}.")

    def check(self, method: Method) -> None:
        if "hidden" in method.net.head_starts():
            raise InputError("t3a needs a head of one linear layer, but head_layers is 2.")

    def start(self, method: Method, mine: Tree, shard: Shard) -> Tree:
        rows = mine["head"]["out"]  # the first support of each class is its own weight vector
        doubt = entropy(method.net.head(mine["head"], rows))
        return {
            "supports": F.pad(F.normalize(rows, dim=-1)[:, None], (0, 0, 0, self.m - 1)),  # [classes, m, d]
            "entropies": F.pad(doubt[:, None], (0, self.m - 1), value=float("inf")),  # [classes, m]
        }

    def answer(self, method: Method, mine: Tree, state: Tree, samples: Samples) -> tuple[Answers, Tree]:
        with torch.no_grad():
            h = method.net.features(mine["body"], samples.x)
            logits = method.net.head(mine["head"], h)
            supports, entropies = state["supports"].clone(), state["entropies"].clone()
            prototypes = F.normalize(supports.sum(1), dim=-1)
            answers = []
            for one, c, doubt in zip(h.split(1), logits.argmax(-1).split(1), entropy(logits).split(1), strict=True):
                held = torch.cat([supports[c], F.normalize(one, dim=-1)[None]], 1)  # [1, m + 1, d]
                # the sample counts for its own prototype; of equal entropies the older stays
                sorted_, order = torch.cat([entropies[c], doubt[None]], 1).sort(stable=True)
                entropies[c] = sorted_[:, : self.m]
                supports[c] = held.take_along_dim(order[:, : self.m, None], 1)
                prototypes[c] = F.normalize(supports[c].sum(1), dim=-1)
                answers.append(one @ prototypes.T)
        return Answers(torch.cat(answers)), {"supports": supports, "entropies": entropies}
