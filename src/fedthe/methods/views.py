"""Views of an image that show the same thing: its mirror image, and itself moved by a few pixels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError


@dataclass(frozen=True)
class Views:
    mirror: bool = True  # the mirror image of each view, too
    shift: int = 0  # pixels by which the image is moved left, right, up and down; 0: not at all

    def __post_init__(self) -> None:
        if self.shift < 0 or not (self.mirror or self.shift):
            raise InputError(f"views need a mirror image, or a shift of at least 1 pixel, not {self.shift}.")

    def average(self, answer: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor) -> tuple[Tensor, ...]:
        """The mean over all views of what `answer` gives for x [n, c, h, w]."""
        seen = [answer(view) for view in self.make(x)]
        return tuple(torch.stack(parts).mean(0) for parts in zip(*seen, strict=True))

    def make(self, x: Tensor) -> Iterator[Tensor]:
        """The views of x [n, c, h, w], itself first."""
        moves = [(0, 0)] + [(0, self.shift), (0, -self.shift), (self.shift, 0), (-self.shift, 0)] * (self.shift > 0)
        for down, right in moves:
            moved = _move(_move(x, down, -2), right, -1)
            yield moved
            if self.mirror:
                yield moved.flip(-1)

    @property
    def count(self) -> int:
        return (1 + 4 * (self.shift > 0)) * (1 + self.mirror)


def _move(x: Tensor, by: int, dim: int) -> Tensor:
    """Moved by so many pixels; the edge is repeated behind it."""
    size = x.shape[dim]
    return x.index_select(dim, (torch.arange(size, device=x.device) - by).clamp(0, size - 1)) if by else x
