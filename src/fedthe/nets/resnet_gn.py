"""ResNet20 for small images (He et al., https://arxiv.org/abs/1512.03385, section 4.2), with group norm for batch norm.

Where the shape changes, the shortcut is a 1x1 convolution and a norm (their option B), as in the FedTHE authors' code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from ..errors import InputError
from ..tree import Tree
from .layers import conv_residual, norm_relu
from .net import PictureNet, Start, norm

WIDEST = 64  # a billion parameters per client


def _conv(out: int, into: int, side: int) -> Start:
    return Start("normal", math.sqrt(2 / (side * side * out)), (out, into, side, side))


@dataclass(frozen=True)
class ResNet20GN(PictureNet):
    width: int = 1  # 4 for ImageNet-32
    groups: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width > WIDEST:
            raise InputError(f"resnet20_gn: width must be at most {WIDEST}, but is {self.width}.")
        if self.width < 1 or self.groups < 1 or 16 * self.width % self.groups:
            raise InputError(
                f"resnet20_gn: groups must divide 16 * width channels, "
                f"but groups is {self.groups} and width {self.width}."
            )

    @property
    def feature_dim(self) -> int:
        return 64 * self.width

    def _blocks(self) -> list[tuple[str, int, int]]:
        """Name, channels in and channels out of the nine blocks; a block that widens also halves the image."""
        widths = [16 * self.width] + [side * self.width for side in (16, 32, 64) for _ in range(3)]
        return [(f"block{i}", widths[i], widths[i + 1]) for i in range(9)]

    def body_starts(self) -> dict[str, Start]:
        starts = {"conv": _conv(16 * self.width, self.channels, 3)} | norm("norm", 16 * self.width)
        for name, into, out in self._blocks():
            starts |= {f"{name}.conv1": _conv(out, into, 3)} | norm(f"{name}.norm1", out)
            starts |= {f"{name}.conv2": _conv(out, out, 3)} | norm(f"{name}.norm2", out)
            if into != out:
                starts |= {f"{name}.short": _conv(out, into, 1)} | norm(f"{name}.short_norm", out)
        return starts

    def features(self, body: Tree, x: Tensor) -> Tensor:
        x = norm_relu(F.conv2d(x, body["conv"], padding=1), self.groups, **body["norm"])
        for name, into, out in self._blocks():
            block, stride = body[name], 1 if into == out else 2
            y, x = conv_residual(x, block["conv1"], stride=stride, padding=1)
            y = norm_relu(y, self.groups, **block["norm1"])
            if into != out:
                x = F.group_norm(F.conv2d(x, block["short"], stride=stride), self.groups, **block["short_norm"])
            x = norm_relu(F.conv2d(y, block["conv2"], padding=1), self.groups, **block["norm2"], residual=x)
        return x.mean((2, 3))
