"""A network that first scales its images to mean 0 and standard deviation 1 in every channel.

The paper says that inputs are in [-1, 1], but its authors' code does this (`pcode/create_dataset.py` in
https://github.com/LINs-lab/FedTHE). A network without biases then starts with logits about twice as large, and takes
larger steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..tree import Tree
from .net import PictureNet, Start


@dataclass(frozen=True)
class Standardized(PictureNet):
    inner: PictureNet = field(kw_only=True)
    means: tuple[float, ...] = field(kw_only=True)  # of each channel of images in [-1, 1]
    deviations: tuple[float, ...] = field(kw_only=True)

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def feature_dim(self) -> int:
        return self.inner.feature_dim

    @property
    def hidden_dim(self) -> int:
        return self.inner.hidden_dim

    def body_starts(self) -> dict[str, Start]:
        return self.inner.body_starts()

    def head_starts(self) -> dict[str, Start]:
        return self.inner.head_starts()

    def features(self, body: Tree, x: Tensor) -> Tensor:
        # with Python numbers: a CUDA graph cannot copy a tensor from the host
        channels = zip(x.unbind(1), self.means, self.deviations, strict=True)
        return self.inner.features(
            body, torch.stack([(each - mean) / deviation for each, mean, deviation in channels], 1)
        )

    def head(self, head: Tree, h: Tensor) -> Tensor:
        return self.inner.head(head, h)


def standardize(net: PictureNet, means: tuple[float, ...], deviations: tuple[float, ...]) -> Standardized:
    shape = (net.classes, net.channels, net.size, net.head_layers)
    return Standardized(*shape, inner=net, means=means, deviations=deviations)
