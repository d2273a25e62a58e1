"""CCT-4/3x2 with learnable positions (Hassani et al. 2021, https://arxiv.org/abs/2104.05704).

A convolutional tokenizer, four encoder layers and sequence pooling. No dropout and no stochastic depth: the forward
pass is a pure function, so it draws no random numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..tree import Tree
from .layers import add_positions, attend, linear_add
from .net import PictureNet, Start, norm

DIM, HEADS, LAYERS = 128, 2, 4


def _linear(out: int, into: int) -> Start:
    # The authors truncate at +-2, which is 100 standard deviations: a plain normal.
    return Start("normal", 0.02, (out, into))


def _biased(name: str, out: int, into: int) -> dict[str, Start]:
    return {f"{name}.weight": _linear(out, into), f"{name}.bias": Start("constant", 0.0, (out,))}


def _kaiming(out: int, into: int) -> Start:
    return Start("normal", math.sqrt(2 / (9 * into)), (out, into, 3, 3))


def _norm(x: Tensor, params: Tree) -> Tensor:
    return F.layer_norm(x, (DIM,), **params)


@dataclass(frozen=True)
class CCT4(PictureNet):
    @property
    def feature_dim(self) -> int:
        return DIM

    @property
    def _tokens(self) -> int:
        return ((self.size + 3) // 4) ** 2  # two pools, each halves the sides and rounds up

    def body_starts(self) -> dict[str, Start]:
        starts = {"conv1": _kaiming(DIM // 2, self.channels), "conv2": _kaiming(DIM, DIM // 2)}
        starts |= {"positions": Start("normal", 0.2, (self._tokens, DIM))}  # 0.2, not 0.02: the authors' code
        for i in range(LAYERS):
            name = f"layer{i}"
            starts |= norm(f"{name}.norm1", DIM) | {f"{name}.qkv": _linear(3 * DIM, DIM)}
            starts |= _biased(f"{name}.proj", DIM, DIM) | norm(f"{name}.norm2", DIM)
            starts |= _biased(f"{name}.mlp1", DIM, DIM) | _biased(f"{name}.mlp2", DIM, DIM)
        # No bias, unlike the authors' pooling: it shifts all scores equally, which the softmax cancels.
        return starts | norm("norm", DIM) | {"pool": _linear(1, DIM)}

    def head_starts(self) -> dict[str, Start]:
        return {name: _linear(*start.shape) for name, start in super().head_starts().items()}

    def features(self, body: Tree, x: Tensor) -> Tensor:
        for name in ("conv1", "conv2"):
            # ReLU after the pool: same values and gradients as before it, on a quarter of the pixels
            x = F.relu(F.max_pool2d(F.conv2d(x, body[name], padding=1), 3, stride=2, padding=1))
        x = add_positions(x.flatten(2).transpose(1, 2), body["positions"])  # [n, tokens, DIM]
        for i in range(LAYERS):
            layer = body[f"layer{i}"]
            y = attend(F.linear(_norm(x, layer["norm1"]), layer["qkv"]), HEADS)
            x = linear_add(x, y, **layer["proj"])
            x = _norm(x, layer["norm2"])  # the residual stream itself is normalized, as in the authors' code
            y = F.gelu(F.linear(x, **layer["mlp1"]))
            x = linear_add(x, y, **layer["mlp2"])
        x = _norm(x, body["norm"])
        weights = F.linear(x, body["pool"]).softmax(1)  # [n, tokens, 1]
        return torch.sum(weights * x, 1)
