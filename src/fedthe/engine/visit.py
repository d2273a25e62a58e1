"""What an engine is asked for: some clients of some runs take part in a round, deploy, or answer samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from .. import tree
from ..errors import InputError
from ..methods.base import Method
from ..methods.checks import WrongMethod
from ..tree import Tree
from ..types import Shard
from .clients import Clients
from .fit import Optimizer
from .robust import RULES_VERSION, Attack, Defense
from .server import Server

_numbers = itertools.count()


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
    defense: Defense = Defense()
    attack: Attack = Attack()

    def __post_init__(self) -> None:
        if self.rounds < 0 or self.local_epochs < 0 or self.personal_epochs < 0 or self.batch < 1 or self.crop < 0:
            raise InputError("rounds, epochs and crop must not be negative, and batch must be at least 1.")
        if not 0 < self.participation <= 1:
            raise InputError(f"participation must be above 0 and at most 1, not {self.participation}.")

    def describe(self) -> dict[str, Any]:
        """For hashes and records, without what is switched off: those made before it came stay valid."""
        off = {name for name, plain in (("defense", Defense()), ("attack", Attack())) if getattr(self, name) == plain}
        known = {name: value for name, value in asdict(self).items() if name not in off}
        if "defense" in known:
            known["defense"]["version"] = RULES_VERSION
        return known

    def epochs(self, phase: str) -> int:
        return self.local_epochs if phase == "local" else self.personal_epochs


@dataclass(frozen=True)
class Run:
    """A federation: the seed that keys all draws, and its clients' data."""

    seed: int
    shards: Sequence[Shard]
    name: str = field(default_factory=lambda: f"run {next(_numbers)}")  # engines keep data on the device under it

    unseen: tuple[int, ...] = ()  # clients that take no part in training

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """The clients that may take part."""
        return tuple(k for k in range(len(self.shards)) if k not in self.unseen)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many rows each client trains on."""
        known = getattr(self.shards, "sizes", None)
        return known or tuple(int(shard.real.sum()) for shard in self.shards)


@dataclass(frozen=True)
class Progress:
    """The training of one method after some rounds: all that is needed to continue it, or to deploy."""

    server: Server
    averages: Tree  # leaves beside the shared model: means of what clients keep
    clients: Clients

    @property
    def round(self) -> int:
        return self.server.round


class Row(NamedTuple):
    """A client of one of the runs that are trained side by side."""

    run: int
    client: int


@dataclass(frozen=True)
class Visit:
    """What the rows of a round have in common. `reached[run][method]` are all in the same round, and the methods of a
    run have the same server."""

    methods: tuple[Method, ...]
    settings: Training
    runs: Sequence[Run]
    reached: Sequence[Sequence[Progress]]

    @property
    def servers(self) -> list[Server]:
        return [of_run[0].server for of_run in self.reached]

    @property
    def round(self) -> int:
        return self.servers[0].round

    def pick(self, run: int) -> Visit:
        """That of a single run."""
        return replace(self, runs=[self.runs[run]], reached=[self.reached[run]])

    @property
    def longest(self) -> int:
        """The training rows of the client that has most, in this round or not: the same for every chunk."""
        return max(size for run in self.runs for size in run.sizes)


@dataclass(frozen=True)
class Visited:
    """What came of it, with a first axis over rows."""

    uploads: Tree
    kept: tuple[dict[str, Tensor], ...]  # by method, and by dotted name
    averages: tuple[Tree, ...]  # by method
    losses: Tensor  # float [rows]: the last loss of each row, or the first one that is not finite
    faults: Mapping[int, str] = field(default_factory=dict)  # by row: why nothing of it can be used


def find_structural_fault(
    visit: Visit, run: int, upload: Tree, kept: Sequence[Mapping[str, Tensor]], batched: bool = False
) -> str | None:
    """How an upload, or what is kept of each method, differs from what it should be in leaves, shapes or dtypes."""
    fault = tree.find_fault(tree.flatten(visit.reached[run][0].server.shared), tree.flatten(upload), batched)
    if fault is not None:
        who = f"{_name(visit.methods[0].rounds)}.local"
        return f"the upload's {fault}; {who} must return the leaves, shapes and dtypes of `shared`"
    for method, progress, leaves in zip(visit.methods, visit.reached[run], kept, strict=True):
        fault = tree.find_fault(progress.clients.first, leaves, batched)
        if fault is not None:
            part = method.rounds if fault.startswith("rounds.") else method.personal
            return f"its state's {fault}; {_name(part)} must return the leaves, shapes and dtypes of its `keep`"
    return None


@contextmanager
def unchanged(visit: Visit, shared: Sequence[Tree], shard: Shard) -> Iterator[None]:
    """Refuse changes in place to what others read, too: the shared model, and the data."""
    leaves = [(f"{name} of the shared model", leaf) for part in shared for name, leaf in tree.flatten(part).items()]
    leaves += [(f"the shard's {name}", part) for name, part in shard._asdict().items()]
    before = [leaf._version for _, leaf in leaves]
    yield
    for (name, leaf), version in zip(leaves, before, strict=True):
        if leaf._version != version:
            who = " or ".join(_name(part) for part in (visit.methods[0].rounds, visit.methods[0].personal))
            raise WrongMethod(f"{who} changes {name} in place; return new tensors.")


def _name(part: object) -> str:
    return type(part).__name__


class Question(NamedTuple):
    """What one deployed client is asked."""

    row: int  # which of the deployed clients
    x: np.ndarray  # [n, ...], as in Pool
    path: tuple[int | str, ...]  # what the draws of augmented views are keyed by


class Answered(NamedTuple):
    """What it answered."""

    logits: np.ndarray  # float64 [n, classes]
    info: dict[str, np.ndarray]  # per sample, such as e [n]
    seconds: float

    @property
    def classes(self) -> np.ndarray:
        return np.asarray(self.logits.argmax(-1))

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.logits).all())


class Engine(Protocol):
    """Runs what is written for one client and one sample on many."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of convolutions in training and tuning; all else is float32."""

    @property
    def together(self) -> int:
        """How many clients are worth deploying at a time, and runs worth training at a time."""

    def release(self) -> None:
        """Free all that is only kept for speed."""

    def visit(self, visit: Visit, rows: Sequence[Row]) -> Visited:
        """These clients do a round's work."""

    def deploy(self, visit: Visit, clients: Sequence[int]) -> tuple[Tree, Tensor]:
        """What clients of a single run and method deploy beyond the shared model [clients, ...], and their losses."""

    def answer(
        self, method: Method, deployed: Tree, shards: Sequence[Shard], questions: Sequence[Question]
    ) -> list[Answered]:
        """deployed: states [clients, ...], with the clients' shards."""
