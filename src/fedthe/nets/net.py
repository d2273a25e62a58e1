"""A network is two pure functions of a tree of parameters: features() of the body and head() of the head.

There is no hidden state: no buffers, no running statistics, no random numbers in the forward pass. So vmap can run a
network for many clients at once, and the same parameters give the same answer everywhere.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .. import rng
from ..errors import InputError
from ..foreign import explain
from ..tree import Tree, unflatten


@dataclass(frozen=True)
class Defaults:
    """How a network is trained unless the settings say otherwise."""

    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 5e-4
    search_lr: float | None = None  # of FedTHE's search for e; None: the method's

    def __post_init__(self) -> None:
        if self.optimizer not in ("sgd", "adam"):
            raise InputError(f"optimizer must be sgd or adam, not {self.optimizer!r}.")
        if self.optimizer == "adam" and self.momentum:
            raise InputError("adam takes no momentum; leave it out.")
        for name in ("lr", "momentum", "weight_decay", "search_lr"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise InputError(f"{name} must be a finite number that is not negative, not {value!r}.")


@dataclass(frozen=True)
class Start:
    """How to initialize a parameter: uniform in (-scale, scale), normal with that standard deviation, constant, or
    with given numbers."""

    kind: Literal["uniform", "normal", "constant", "given"]
    scale: float
    shape: tuple[int, ...]
    values: Tensor | None = field(default=None, compare=False, repr=False)  # the given ones

    def draw(self, key: rng.Key) -> Tensor:
        """float32 on the CPU, drawn by NumPy in float64: the same on every machine."""
        if self.values is not None:
            return self.values.clone()
        one, count = np.zeros(1, dtype=np.int64), math.prod(self.shape)
        if self.kind == "constant":
            return torch.full(self.shape, self.scale)
        drawn = rng.normal(key, one, count) if self.kind == "normal" else 2 * rng.uniform(key, one, count) - 1
        return torch.from_numpy((drawn * self.scale).astype(np.float32).reshape(self.shape))


def given(values: Tensor) -> Start:
    return Start("given", 1.0, tuple(values.shape), values)


def fan_in(*shape: int) -> Start:
    """The default of nn.Linear and nn.Conv2d."""
    return Start("uniform", 1 / math.sqrt(math.prod(shape[1:])), shape)


def norm(name: str, width: int) -> dict[str, Start]:
    """The weight and bias of a norm."""
    return {f"{name}.weight": Start("constant", 1.0, (width,)), f"{name}.bias": Start("constant", 0.0, (width,))}


@dataclass(frozen=True)
class Net(ABC):
    """A network for samples of any shape. A layer without bias is its weight, without a dict.

    The head is one linear layer; its bias is there if `head_starts` names one.
    """

    classes: int

    def __post_init__(self) -> None:
        if self.classes < 1:
            raise InputError(f"a network needs at least one class, but has {self.classes}.")

    @property
    def name(self) -> str:
        """What a run calls it that got it as an object."""
        return type(self).__name__

    @property
    @abstractmethod
    def feature_dim(self) -> int: ...

    @abstractmethod
    def body_starts(self) -> dict[str, Start]:
        """How to initialize the body, by dotted name."""

    def head_starts(self) -> dict[str, Start]:
        return {"out": fan_in(self.classes, self.feature_dim)}

    def init(self, seed: int) -> Tree:
        """{"body": ..., "head": ...}; each parameter has a random key of its own, made of the seed and its name."""
        return unflatten({name: start.draw(rng.key(seed, "init", name)) for name, start in self.starts().items()})

    def zeros(self) -> Tree:
        """All parameters as zeros, for their names and shapes."""
        return unflatten({name: torch.zeros(start.shape) for name, start in self.starts().items()})

    def starts(self) -> dict[str, Start]:
        """How to initialize every parameter, by dotted name."""
        body = {f"body.{name}": start for name, start in self.body_starts().items()}
        return body | {f"head.{name}": start for name, start in self.head_starts().items()}

    @abstractmethod
    def features(self, body: Tree, x: Tensor) -> Tensor:
        """x: [n, ...] -> [n, feature_dim]"""

    def head(self, head: Tree, h: Tensor) -> Tensor:
        """h: [n, feature_dim] -> logits [n, classes]"""
        return F.linear(h, head["out"], head.get("bias"))

    def logits(self, params: Tree, x: Tensor) -> Tensor:
        """x: [n, ...] -> [n, classes]"""
        return self.head(params["head"], self.features(params["body"], x))

    def check(self, x: Tensor, stacked: bool = False) -> None:
        """Refuse samples x [n, ...] that the network cannot take. `stacked`: it will run for many clients at once."""
        what, empty = type(self).__name__, self.zeros()
        kind = f"shape {list(x.shape)} in {str(x.dtype).removeprefix('torch.')}"
        with torch.no_grad(), explain(f"{what} cannot take a batch of {kind}"):
            h = self.features(empty["body"], x)
            logits = self.head(empty["head"], h)
        for name, made, width in (("features", h, self.feature_dim), ("logits", logits, self.classes)):
            if made.shape != (len(x), width):
                raise InputError(f"{what} gives {name} {list(made.shape)} for {len(x)} samples, not {[len(x), width]}.")


@dataclass(frozen=True)
class PictureNet(Net):
    """A network for images: floats [n, channels, size, size] in [-1, 1].

    `head_layers=2` is the paper's study of a deeper head: linear, ReLU, linear. The CNN's body ends with a linear layer
    and a ReLU, which then move to the head, so the network as a whole stays the same. The others' bodies do not, so
    their heads get a new layer, as wide as the features.
    """

    channels: int = 3
    size: int = 32
    head_layers: int = 1

    def __post_init__(self) -> None:
        if self.classes < 1 or self.channels < 1 or self.size < 1:
            raise InputError(
                f"a network needs at least one class, channel and pixel, "
                f"but has {self.classes}, {self.channels} and {self.size}."
            )
        if self.head_layers not in (1, 2):
            raise InputError(f"head_layers must be 1 or 2, but it is {self.head_layers}.")

    @property
    def hidden_dim(self) -> int:
        """The width inside a two-layer head."""
        return self.feature_dim

    def head_starts(self) -> dict[str, Start]:
        if self.head_layers == 1:
            return super().head_starts()
        return {"hidden": fan_in(self.hidden_dim, self.feature_dim), "out": fan_in(self.classes, self.hidden_dim)}

    def head(self, head: Tree, h: Tensor) -> Tensor:
        return super().head(head, F.relu(F.linear(h, head["hidden"])) if self.head_layers == 2 else h)
