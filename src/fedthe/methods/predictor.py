"""How a deployed client answers unlabeled samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..tree import Tree
from ..types import Shard
from .samples import Answers, Samples

if TYPE_CHECKING:
    from .base import Method


@dataclass(frozen=True)
class Predictor:
    """Answers a stream of samples in order. A subclass overrides `answer`, and `start` if it keeps a state."""

    needs: ClassVar[tuple[str, ...]] = ()  # leaves of a client's state beside those of the network

    def check(self, method: Method) -> None:
        """Refuse, before any work, a method that this predictor cannot serve for other reasons than `needs`."""

    def start(self, method: Method, mine: Tree, shard: Shard) -> Tree:
        """The state before the first sample."""
        return {}

    def answer(self, method: Method, mine: Tree, state: Tree, samples: Samples) -> tuple[Answers, Tree]:
        """The answers to the samples of a window, and the next state."""
        raise NotImplementedError

    def answer_given(self, method: Method, mine: Tree, state: Tree, views: Tensor, x: Tensor) -> tuple[Answers, Tree]:
        """The same for samples x [w, c, h, w] whose views are there: the step of a scan."""

        def draw(positions: Tensor) -> Tensor:
            if positions.device == views.device:
                return views[positions]
            # by plain numbers: a GPU's graph cannot take a tensor from the host
            return torch.stack([views[position] for position in positions.tolist()])

        return self.answer(method, mine, state, Samples(x, draw))

    @property
    def window(self) -> int | None:
        """How many samples are answered together. None: any number, with the same answers as one by one."""
        return 1

    @property
    def augments(self) -> tuple[int, int]:
        """How many steps of how many augmented views it uses of every sample."""
        return 0, 0

    @property
    def passes(self) -> tuple[int, int]:
        """Forward and backward passes through the network per sample, counting each augmented view."""
        return 1, 0


@dataclass(frozen=True)
class Forward(Predictor):
    """A plain forward pass."""

    window = None

    def answer(self, method: Method, mine: Tree, state: Tree, samples: Samples) -> tuple[Answers, Tree]:
        return Answers(method.logits(mine, samples.x)), state
