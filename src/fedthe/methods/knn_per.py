"""kNN-Per (Marfoq et al., ICML 2022, https://arxiv.org/abs/2111.09360): mix the global model's probabilities with
those of the nearest neighbours among the client's own training rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import InputError
from ..types import scale
from .base import Answers, Method, Predictor, Samples, Shard, Tree
from .label_shift import log


@dataclass(frozen=True)
class KNN(Predictor):
    needs_labels: ClassVar[bool] = True
    window = None
    k: int = 10
    scale: float = 1.0  # of the distances: a neighbour at Euclidean distance d counts exp(-d / scale)
    grid: float = 0.01  # the spacing of the lambdas that are tried

    def __post_init__(self) -> None:
        if self.k < 1 or not self.scale > 0 or not 0 < self.grid <= 1:
            raise InputError(
                f"knn_per needs k of at least 1, a positive scale and a grid above 0 and at most 1, "
                f"but has {self.k}, {self.scale} and {self.grid}."
            )

    def start(self, method: Method, mine: Tree, shard: Shard) -> Tree:
        h = collect_features(method, mine, shard.x)
        store = {"features": h, "labels": shard.labels, "real": shard.real}
        h = collect_features(method, mine, shard.val_x)
        lam = pick_lambda(*self._ask(method, mine, store, h), shard.val_labels, shard.val_real, self.grid)
        return store | {"lambda": lam}

    def answer(self, method: Method, mine: Tree, state: Tree, samples: Samples) -> tuple[Answers, Tree]:
        with torch.no_grad():
            near, model = self._ask(method, mine, state, method.net.features(mine["body"], samples.x))
            mixed = state["lambda"] * near + (1 - state["lambda"]) * model
        logits = log(mixed)
        return Answers(logits, {"lambda": state["lambda"].expand(len(logits))}), state

    def _ask(self, method: Method, mine: Tree, store: Tree, h: Tensor) -> tuple[Tensor, Tensor]:
        """What the neighbours of features h [n, d] say and what the model says, probabilities [n, classes]."""
        distances = torch.cdist(h, store["features"], compute_mode="donot_use_mm_for_euclid_dist")
        distances = distances.masked_fill(~store["real"], float("inf"))  # padding is no one's neighbour
        nearest, rows = (part[:, : self.k] for part in distances.sort(stable=True))  # of equal ones, the first rows
        votes = F.one_hot(store["labels"], method.net.classes)[rows]  # [n, k, classes]
        near = ((-nearest / self.scale).softmax(-1)[..., None] * votes).sum(1)
        return near, method.net.head(mine["head"], h).softmax(-1)


def collect_features(method: Method, mine: Tree, images: Tensor, chunk: int = 500) -> Tensor:
    """images uint8 [n, h, w, c], without augmentation -> [n, d]"""
    with torch.no_grad():
        return torch.cat([method.net.features(mine["body"], scale(x)) for x in images.split(chunk)])


def pick_lambda(near: Tensor, model: Tensor, labels: Tensor, real: Tensor, grid: float) -> Tensor:
    """The weight of the neighbours that gets most validation rows right; of equally good ones the smallest.

    The paper's own code picks it on test rows. A client without validation rows stays with the model: 0.
    """
    lams = torch.linspace(0, 1, round(1 / grid) + 1, dtype=near.dtype, device=near.device)[:, None, None]
    right = ((lams * near + (1 - lams) * model).argmax(-1) == labels) & real  # [lambdas, v]
    return lams[right.sum(-1).argmax()].squeeze()
