"""CCT-4/3x2 with learnable positions (Hassani et al. 2021, https://arxiv.org/abs/2104.05704).

A convolutional tokenizer, four encoder layers and sequence pooling. Their dropout and stochastic depth are left out:
the forward pass is a pure function, so it draws no random numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..tree import Tree
from .layers import add_positions, attend, linear_add
from .net import Net, Start, norm

DIM, HEADS, LAYERS = 128, 2, 4


def _linear(out: int, into: int) -> Start:
    # The authors truncate at +-2, a hundred deviations away: a plain normal.
    return Start("normal", 0.02, (out, into))


def _biased(name: str, out: int, into: int) -> dict[str, Start]:
    return {f"{name}.weight": _linear(out, into), f"{name}.bias": Start("constant", 0.0, (out,))}


def _kaiming(out: int, into: int) -> Start:
    return Start("normal", math.sqrt(2 / (9 * into)), (out, into, 3, 3))


def _norm(x: Tensor, params: Tree) -> Tensor:
    return F.layer_norm(x, (DIM,), params["weight"], params["bias"])


def _add_linear(x: Tensor, layer: Tree, y: Tensor) -> Tensor:
    return linear_add(x, y, layer["weight"], layer["bias"])


@dataclass(frozen=True)
class CCT4(Net):
    @property
    def feature_dim(self) -> int:
        return DIM

    @property
    def _tokens(self) -> int:
        side = self.size
        for _ in range(2):
            side = (side + 1) // 2
        return side * side

    def body_starts(self) -> dict[str, Start]:
        starts = {"conv1": _kaiming(DIM // 2, self.channels), "conv2": _kaiming(DIM, DIM // 2)}
        starts |= {"positions": Start("normal", 0.2, (self._tokens, DIM))}  # 0.2, not 0.02: the authors' code
        for i in range(LAYERS):
            name = f"layer{i}"
            starts |= norm(f"{name}.norm1", DIM) | {f"{name}.qkv": _linear(3 * DIM, DIM)}
            starts |= _biased(f"{name}.proj", DIM, DIM) | norm(f"{name}.norm2", DIM)
            starts |= _biased(f"{name}.mlp1", DIM, DIM) | _biased(f"{name}.mlp2", DIM, DIM)
        # The authors' pooling has a bias; it adds the same to every token's score, which the softmax does not see.
        return starts | norm("norm", DIM) | {"pool": _linear(1, DIM)}

    def head_starts(self) -> dict[str, Start]:
        return {name: _linear(*start.shape) for name, start in super().head_starts().items()}

    def features(self, body: Tree, x: Tensor) -> Tensor:
        for name in ("conv1", "conv2"):
            # relu after the pool: the same values and gradients as before it, on a quarter of the pixels
            x = F.relu(F.max_pool2d(F.conv2d(x, body[name], padding=1), 3, stride=2, padding=1))
        x = add_positions(x.flatten(2).transpose(1, 2), body["positions"])  # [n, tokens, DIM]
        for i in range(LAYERS):
            layer = body[f"layer{i}"]
            y = attend(F.linear(_norm(x, layer["norm1"]), layer["qkv"]), HEADS)
            x = _add_linear(x, layer["proj"], y)
            x = _norm(x, layer["norm2"])  # the residual stream itself is normalised, as in the authors' code
            y = F.gelu(F.linear(x, layer["mlp1"]["weight"], layer["mlp1"]["bias"]))
            x = _add_linear(x, layer["mlp2"], y)
        x = _norm(x, body["norm"])
        share = F.linear(x, body["pool"]).softmax(1)  # [n, tokens, 1]
        return torch.sum(share * x, 1)
