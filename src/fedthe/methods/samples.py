"""The samples that a predictor answers: the same interface in every engine. Here they are taken one after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import InputError
from ..tree import Tree

if TYPE_CHECKING:
    from .base import Method


@dataclass(frozen=True)
class Answers:
    """A predictor's answers to some samples."""

    logits: Tensor  # [n, classes]
    info: dict[str, Tensor] = field(default_factory=dict)  # per sample, such as the weight of the global head [n]


# Engines compile both and cache the result, so they may read no tensors but their arguments.
# fn(method, mine, views [steps, views, c, h, w], *columns [1, ...]) -> a row of the result [1, ...]
OneSample = Callable[..., Tensor]
# step(method, mine, state, views [window, steps, views, c, h, w], *columns [window, ...]) -> answers, the next state
Step = Callable[..., tuple[Answers, Tree]]


class Samples:
    """Samples x [n, ...] of a stream, in order. `draw` gives the augmented views, of pictures, that the predictor asks
    for."""

    def __init__(self, x: Tensor, draw: Callable[[Tensor], Tensor]) -> None:
        self.x, self._draw = x, draw

    def views(self, positions: Tensor) -> Tensor:
        """Augmented views of the samples at these positions: int64 [m] -> [m, steps, views, c, h, w]."""
        return self._draw(positions)

    def each(self, fn: OneSample, method: Method, mine: Tree, *columns: Tensor) -> Tensor:
        """`fn` of every sample, where samples do not depend on each other; columns [n, ...] -> [n, ...]."""
        rows = zip(*(column.split(1) for column in columns), strict=True)
        return torch.cat([fn(method, mine, self.views(torch.tensor([i]))[0], *row) for i, row in enumerate(rows)])

    def scan(
        self, step: Step, method: Method, mine: Tree, state: Tree, *columns: Tensor, window: int = 1
    ) -> tuple[Answers, Tree]:
        """`step` of `window` samples at a time, each with the state that the step before returned."""
        answers, first = [], 0
        for rows in zip(*(column.split(window) for column in columns), strict=True):
            positions = torch.arange(first, first + len(rows[0]))
            answer, state = step(method, mine, state, self.views(positions), *rows)
            answers.append(answer)
            first += len(positions)
        return join(answers), state


def join(answers: list[Answers], dim: int = 0) -> Answers:
    if any(each.info.keys() != answers[0].info.keys() for each in answers):
        raise InputError("a predictor must give the same columns of info for every sample.")
    info = {name: torch.cat([each.info[name] for each in answers], dim) for name in answers[0].info}
    return Answers(torch.cat([each.logits for each in answers], dim), info)
