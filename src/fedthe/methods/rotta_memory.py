"""RoTTA's memory, "category-balanced sampling with timeliness and uncertainty" (https://arxiv.org/abs/2303.13899)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..types import Shard, scale
from .base import Tree


@dataclass(frozen=True)
class Memory:
    """Slots of samples with their predicted class, -1 in empty ones, the entropy of the prediction, and an age.

    A new sample replaces the one with the highest score: of its own class, if that has its share of the memory; else of
    the largest classes, if no slot is empty. It is dropped if its own score is no lower.
    """

    size: int = 64
    timeliness: float = 1.0  # how much age counts in the score
    uncertainty: float = 1.0  # how much entropy counts

    def __post_init__(self) -> None:
        if self.size < 1 or min(self.timeliness, self.uncertainty) < 0:
            raise InputError(
                f"rotta: size must be at least 1, and timeliness and uncertainty not negative, "
                f"but they are {self.size}, {self.timeliness} and {self.uncertainty}."
            )

    def start(self, shard: Shard, like: Tensor) -> Tree:
        """Empty, for samples like those of the shard; `like`: a tensor of their dtype."""
        x = like.new_zeros((self.size, *scale(shard.x[:1]).shape[1:]))
        numbers = like.new_zeros(self.size)
        label = torch.full_like(numbers, -1, dtype=torch.int64)
        return {"x": x, "view": x, "label": label, "doubt": numbers, "age": numbers}

    def offer(self, memory: Tree, sample: Tree, classes: int) -> Tree:
        """The memory after a sample came, one sample older."""
        label, slots = memory["label"], torch.arange(self.size, device=memory["label"].device)
        held = label >= 0
        sizes = (label[:, None] == torch.arange(classes, device=label.device)).sum(0)
        largest = held & (sizes[label.clamp(min=0)] == sizes.max())
        own = label == sample["label"]
        rivals = torch.where(own.sum() < self.size / classes, held.all() & largest, own)
        scores = self.score(memory["age"], memory["doubt"], classes).masked_fill(~rivals, -torch.inf)
        taken = torch.where(rivals.any(), scores.argmax(), held.long().argmin())  # argmin: the first empty slot
        wins = ~rivals.any() | (scores.max() > self.score(torch.zeros_like(sample["doubt"]), sample["doubt"], classes))
        here = wins & (slots == taken)

        def write(name: str, new: Tensor) -> Tensor:
            return torch.where(here.view(-1, *[1] * new.ndim), new, memory[name])

        age = memory["age"].masked_fill(here, 0) + 1
        return {name: write(name, new) for name, new in sample.items()} | {"age": age}

    def score(self, age: Tensor, doubt: Tensor, classes: int) -> Tensor:
        return self.timeliness * (age / self.size).sigmoid() + self.uncertainty * doubt / math.log(max(classes, 2))

    def weigh(self, memory: Tree) -> Tensor:
        """How much each slot counts in the loss: newer ones more, empty ones nothing."""
        held: Tensor = memory["label"] >= 0
        weights: Tensor = (-memory["age"] / self.size).sigmoid()
        return weights.masked_fill(~held, 0) / held.sum().clamp(min=1)
