"""TTT, online (Sun et al., ICML 2020, https://arxiv.org/abs/1909.13231): a second head predicts how an image was
rotated. Before each answer, the extractor and that head take a step on rotations of the sample, and keep it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import tree
from ..errors import InputError
from .base import Answers, Batch, Fit, Fitted, Method, Net, Personal, Predictor, Rounds, Samples, Shard, Tree, network
from .losses import cross_entropy


@dataclass(frozen=True)
class Online(Predictor):
    needs: ClassVar[tuple[str, ...]] = ("rotation",)
    lr: float = 0.001
    steps: int = 1

    def __post_init__(self) -> None:
        if self.steps < 0 or not 0 <= self.lr < math.inf:
            raise InputError(f"ttt: steps and lr must not be negative, but they are {self.steps} and {self.lr}.")

    def start(self, method: Method, mine: Tree, shard: Shard) -> Tree:
        return {"body": mine["body"], "rotation": mine["rotation"]}

    def answer(self, method: Method, mine: Tree, state: Tree, samples: Samples) -> tuple[Answers, Tree]:
        for _ in range(self.steps):
            gradients = torch.func.grad(rotation_loss)(state, method.net, samples.x)
            state = tree.map_leaves(lambda leaf, gradient: leaf - self.lr * gradient, state, gradients)
        with torch.no_grad():
            return Answers(method.logits(mine | state, samples.x)), state

    @property
    def pictures_only(self) -> bool:
        return True

    @property
    def passes(self) -> tuple[int, int]:
        return 4 * self.steps + 1, 4 * self.steps


def rotation_loss(params: Tree, net: Net, x: Tensor) -> Tensor:
    """The mean loss on one sample [1, c, h, w] turned all four ways."""
    h = net.features(params["body"], turn(x)[:, 0])
    return cross_entropy(F.linear(h, params["rotation"]), torch.arange(4, device=x.device)).mean()


def turn(x: Tensor) -> Tensor:
    """x [n, c, h, w] turned by 0, 90, 180 and 270 degrees: [4, n, c, h, w]"""
    if x.ndim != 4 or x.shape[2] != x.shape[3]:
        raise InputError(f"ttt rotates square pictures, but a sample is {list(x.shape[1:])}; leave it out.")
    return torch.stack([x.rot90(quarters, (-2, -1)) for quarters in range(4)])


@dataclass(frozen=True)
class TTT(Rounds, Personal):
    """TTT, online (Sun et al., ICML 2020, https://arxiv.org/abs/1909.13231): a second head predicts how an image was
    rotated. Clients train and share it like the rest, and every test sample trains it further. In the FedTHE paper it
    is not shared: that is ttt_ft."""

    def share(self, net: Net, params: Tree) -> Tree:
        # a linear head may start at zero: its rows part with the first step
        return params | {"rotation": torch.zeros(4, net.feature_dim)}

    def personalize(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        return fit(self.loss, shared)

    def loss(self, net: Net, params: Tree, given: Tree, batch: Batch) -> Tensor:
        """Both tasks, equally. Rows are turned by their place in the batch, which is random: each way equally often."""
        rows = torch.arange(len(batch.x), device=batch.x.device)
        turned = turn(batch.x)[rows % 4, rows]
        h, h_turned = net.features(params["body"], torch.cat([batch.x, turned])).chunk(2)
        main = cross_entropy(net.head(params["head"], h), batch.y)
        return main + cross_entropy(F.linear(h_turned, params["rotation"]), rows % 4)


@dataclass(frozen=True)
class LocalRotation(Personal):
    """TTT (Sun et al., ICML 2020, https://arxiv.org/abs/1909.13231) as the FedTHE authors run it: the shared model is
    FedAvg's. The head for rotations stays on the client, and only fine-tuning trains it."""

    def keep(self, net: Net, params: Tree) -> Tree:
        return {"rotation": params["head"]["out"].new_zeros(4, net.feature_dim)}

    def personalize(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        return fit(TTT().loss, network(shared) | {"rotation": mine["rotation"]})
