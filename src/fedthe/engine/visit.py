"""What an engine is asked for: some clients of some runs take part in a round, or deploy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from .. import tree
from ..errors import InputError
from ..methods.base import Method
from ..tree import Tree
from ..types import Shard
from .beside import ClientsBeside
from .clients import Clients
from .fit import Optimizer
from .shards import Shards


@dataclass(frozen=True)
class Training:
    """Everything federated training depends on, besides the method, the data and the seed."""

    rounds: int = 100
    participation: float = 1.0
    local_epochs: int = 5
    personal_epochs: int = 1
    batch: int = 32
    flip: bool = True
    crop: int = 4
    optimizer: Optimizer = Optimizer()
    tolerate: Literal["stop", "skip"] = "stop"  # a client whose upload cannot be used ends the run, or is left out

    def __post_init__(self) -> None:
        if self.rounds < 0 or self.local_epochs < 0 or self.personal_epochs < 0 or self.batch < 1 or self.crop < 0:
            raise InputError("rounds, epochs and crop must not be negative, and batch must be at least 1.")
        if not 0 < self.participation <= 1:
            raise InputError(f"participation must be above 0 and at most 1, not {self.participation}.")

    def epochs(self, phase: str) -> int:
        return self.local_epochs if phase == "local" else self.personal_epochs


@dataclass(frozen=True)
class Run:
    """One federated training: what its draws are keyed by, and its clients' data."""

    seed: int
    shards: Sequence[Shard]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many rows each client trains on."""
        if isinstance(self.shards, Shards):
            return self.shards.sizes
        return tuple(int(shard.real.sum()) for shard in self.shards)


@dataclass(frozen=True)
class Progress:
    """Training after some rounds: all that is needed to go on, or to deploy."""

    round: int
    shared: Tree
    mine: Clients | ClientsBeside
    losses: tuple[float, ...] = ()  # the mean local loss of each round
    skipped: tuple[str, ...] = ()  # clients that were left out of a round, and why


class Row(NamedTuple):
    """A client of one of the runs that go side by side."""

    run: int
    client: int


@dataclass(frozen=True)
class Visit:
    """All that the rows of a round have in common. `reached` has one entry per run, all in the same round."""

    method: Method
    settings: Training
    runs: Sequence[Run]
    reached: Sequence[Progress]
    trains: bool = True  # personalize and train; or personalize only, to deploy

    @property
    def round(self) -> int:
        return self.reached[0].round

    @property
    def longest(self) -> int:
        """The training rows of the client that has most, in this round or not: the same whoever is in a chunk."""
        return max(size for run in self.runs for size in run.sizes)


@dataclass(frozen=True)
class Visited:
    """What came of it, with a first axis over rows."""

    names: tuple[str, ...]  # of the leaves of a client's state, in order
    own: dict[str, Tensor]  # those that are the client's own
    links: dict[str, str]  # and those that are, by name, what it received
    uploads: Tree
    losses: Tensor  # float [rows]: the last loss of each row, or the first one that is not finite
    faults: Mapping[int, str] = field(default_factory=dict)  # by row: why nothing of it can be used

    def states(self, shared: Tree) -> Tree:
        """What the clients hold, given what they received [rows, ...]."""
        received = tree.flatten(shared)
        return tree.unflatten(
            {name: self.own[name] if name in self.own else received[self.links[name]] for name in self.names}
        )


class Question(NamedTuple):
    """What one deployed client is asked."""

    row: int  # which of the deployed clients
    images: np.ndarray  # uint8 [n, h, w, c]
    path: tuple[int | str, ...]  # what the draws of augmented views are keyed by


class Answered(NamedTuple):
    """What it said."""

    classes: np.ndarray  # int64 [n]
    finite: bool
    info: dict[str, np.ndarray]  # per sample, such as e [n]
    seconds: float


class Engine(Protocol):
    """A way to lift what is written for one client and one sample over many."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of convolutions in training and tuning; all else is float32."""

    @property
    def together(self) -> int:
        """How many clients are worth deploying at a time, and runs worth training at a time."""

    def release(self) -> None:
        """Give back all that is only kept for speed."""

    def visit(self, visit: Visit, rows: Sequence[Row]) -> Visited: ...

    def answer(
        self, method: Method, deployed: Tree, shards: Sequence[Shard], questions: Sequence[Question]
    ) -> list[Answered]:
        """deployed: states [clients, ...], with the clients' shards."""
