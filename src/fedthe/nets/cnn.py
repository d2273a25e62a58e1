"""The small CNN of the benchmark: two convolutions and one linear layer, no padding and no biases."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from ..errors import InputError
from ..tree import Tree
from .net import PictureNet, Start, fan_in


@dataclass(frozen=True)
class CNN(PictureNet):
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size < 16:
            raise InputError(f"cnn needs images of at least 16 pixels, but size is {self.size}.")

    @property
    def _flat(self) -> int:
        side = (self.size - 12) // 4  # twice: a 5x5 kernel takes 4 pixels, then the pool halves the side
        return 64 * side * side

    @property
    def feature_dim(self) -> int:
        return 64 if self.head_layers == 1 else self._flat

    @property
    def hidden_dim(self) -> int:
        return 64

    def body_starts(self) -> dict[str, Start]:
        starts = {"conv1": fan_in(32, self.channels, 5, 5), "conv2": fan_in(64, 32, 5, 5)}
        return starts | {"fc": fan_in(64, self._flat)} if self.head_layers == 1 else starts

    def features(self, body: Tree, x: Tensor) -> Tensor:
        # ReLU after the pool: same values and gradients as before it, on a quarter of the pixels
        for name in ("conv1", "conv2"):
            x = F.relu(F.max_pool2d(F.conv2d(x, body[name]), 2))
        h = x.flatten(1)
        return F.relu(F.linear(h, body["fc"])) if self.head_layers == 1 else h
