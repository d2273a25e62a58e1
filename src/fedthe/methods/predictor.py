"""How a deployed client answers unlabeled samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..tree import Tree
from ..types import Shard
from .checks import check_answers, check_tree, code_of
from .samples import Answers, Samples

if TYPE_CHECKING:
    from .base import Method


@dataclass(frozen=True)
class Predictor:
    """Answers a stream of samples in order. A subclass overrides `answer`, and `start` if it keeps a state.

    Gradients are off; a predictor that needs one calls `differentiate` or `torch.func.grad`.
    """

    needs: ClassVar[tuple[str, ...]] = ()  # leaves of a client's state beside those of the network
    needs_labels: ClassVar[bool] = False  # whether `start` makes no sense for a shard without labels

    def check(self, method: Method) -> None:
        """Raise InputError if the method does not fit this predictor. `needs` is checked already."""

    def summarize(self, method: Method, shared: Tree, shard: Shard) -> Tree:
        """What a client sends once, after the last round; {} if clients send nothing. The server takes the mean over
        those that trained, weighted by their training rows."""
        return {}

    def conclude(self, method: Method, mean: Tree) -> Tree:
        """What the server makes of that mean: leaves that every client deploys beside its own."""
        return mean

    def start(self, method: Method, mine: Tree, shard: Shard) -> Tree:
        """The state before the first sample: a tree of tensors. Every stream of a client begins with a copy of it."""
        return {}

    def answer(self, method: Method, mine: Tree, state: Tree, samples: Samples) -> tuple[Answers, Tree]:
        """The answers to the samples of a window, and the next state: the same leaves, shapes and dtypes."""
        raise NotImplementedError

    def respond(self, method: Method, mine: Tree, state: Tree, samples: Samples) -> tuple[Answers, Tree]:
        """`answer`, if it returns what it should."""
        with code_of(self, "answer", mine=mine, state=state):
            found = self.answer(method, mine, state, samples)
        return check_answers(self, state, found, len(samples.x), method.net.classes)

    def begin(self, method: Method, mine: Tree, shard: Shard) -> Tree:
        """`start`, if it returns what it should."""
        with code_of(self, "start", mine=mine):
            state = self.start(method, mine, shard)
        check_tree(f"what {type(self).__name__}.start returns", state)
        return state

    def answer_given(self, method: Method, mine: Tree, state: Tree, views: Tensor, x: Tensor) -> tuple[Answers, Tree]:
        """A step of a scan: the answers to samples x [window, ...] with their views."""

        def draw(positions: Tensor) -> Tensor:
            if positions.device == views.device:
                return views[positions]
            # by plain numbers: a GPU's graph cannot take a tensor from the host
            return torch.stack([views[position] for position in positions.tolist()])

        return self.respond(method, mine, state, Samples(x, draw))

    @property
    def window(self) -> int | None:
        """How many samples a call of `answer` gets. None: any number; the answers are the same as one by one."""
        return 1

    @property
    def augments(self) -> tuple[int, int]:
        """The augmented views of each sample: the number of steps, and of views per step."""
        return 0, 0

    @property
    def pictures_only(self) -> bool:
        """Whether it cannot answer samples that are no pictures, as none with augmented views can."""
        return self.augments[0] > 0

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
