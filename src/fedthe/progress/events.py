"""Long work reports progress as events; progress bars and a run's progress.json listen to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import ClassVar, TypeVar

from ..errors import Stopped
from ..text import flatten

T = TypeVar("T")
MOVING = ("done", "loss", "remark")  # fields that change during the work


@dataclass(frozen=True, kw_only=True)
class Event(ABC):
    """A piece of long work, and how much of it is done."""

    kind: ClassVar[str]
    unit: ClassVar[str] = ""  # what is counted
    done: int
    total: int
    worker: str = ""  # who does it, where there are several

    @property
    def is_over(self) -> bool:
        return self.done >= self.total

    @property
    def trainings(self) -> int:
        """How many trainings this work comprises."""
        return 0

    @property
    def remark(self) -> str:
        return ""

    @abstractmethod
    def describe(self) -> str:
        """The work, for people to read."""

    def _say_worker(self) -> str:
        return f"{self.worker}: " if self.worker else ""

    def continues(self, before: Event) -> bool:
        """Whether both events are about the same work."""
        names = [each.name for each in fields(self) if each.name not in MOVING]
        return type(self) is type(before) and all(getattr(self, name) == getattr(before, name) for name in names)


@dataclass(frozen=True)
class TrainEvent(Event):
    """Rounds of one or more trainings, each on one or more seeds, side by side."""

    kind = "training"
    unit = "round"
    methods: tuple[str, ...]  # for each training, the first method that deploys it
    seeds: tuple[int, ...]
    loss: float | None = None

    @property
    def trainings(self) -> int:
        return len(self.methods) * len(self.seeds)

    @property
    def remark(self) -> str:
        return "" if self.loss is None else f"loss {self.loss:.3f}"

    def describe(self) -> str:
        seeds = f", {len(self.seeds)} seeds" if len(self.seeds) > 1 else ""
        seed = f", seed {self.seeds[0]}" if self.worker and not seeds else ""
        return f"{self._say_worker()}training {' and '.join(self.methods)}{seeds or seed}"


@dataclass(frozen=True)
class AnswerEvent(Event):
    """A method answers the test streams of its clients."""

    kind = "testing"
    unit = "client"
    method: str
    seed: int

    def describe(self) -> str:
        seed = f", seed {self.seed}" if self.worker else ""
        return f"{self._say_worker()}testing {self.method}{seed}"


@dataclass(frozen=True)
class WaitEvent(Event):
    """Another process is computing what this one needs."""

    kind = "waiting"

    def describe(self) -> str:
        return f"{self._say_worker()}waiting for another process"


@dataclass(frozen=True)
class WorkEvent(Event):
    """Anything else, such as reading images."""

    kind = "working"
    what: str
    remark: str = ""

    def describe(self) -> str:
        return f"{self._say_worker()}{self.what}"


@dataclass(frozen=True)
class Round:
    """A finished round of one training on one seed, as `fedthe.run(on_round=...)` hears of it."""

    methods: tuple[str, ...]  # that deploy what it trains
    seed: int
    round: int  # from 1 on
    rounds: int  # after which the methods are tested
    loss: float  # of local training, the mean over the sampled clients
    seconds: float  # since training began or was continued


Listener = Callable[[Event], None]
RoundListener = Callable[[Round], None]

_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("listeners", default=())


_round_listener: ContextVar[RoundListener | None] = ContextVar("round_listener", default=None)


def tell_round(round: Round) -> None:
    """An exception of the listener stops the run; it says whose it is, and that nothing is lost."""
    listener = _round_listener.get()
    if listener is None:
        return
    try:
        listener(round)
    except Exception as error:
        words = flatten(f"{type(error).__name__}: {error}", 200)
        where = f"{round.methods[0]}, seed {round.seed}, round {round.round} of {round.rounds}"
        raise Stopped(f"on_round raised {words} after {where}; the same call continues from there") from error


@contextmanager
def hearing_rounds(listener: RoundListener | None) -> Iterator[None]:
    """Within the block, `listener` hears of every finished round."""
    token = _round_listener.set(listener)
    try:
        yield
    finally:
        _round_listener.reset(token)


def tell(event: Event) -> None:
    for listener in _listeners.get():
        listener(event)


def track(what: str, items: Iterable[T], total: int | None = None) -> Iterator[T]:
    """Yield the items, and tell after each how many are done."""
    if total is None:
        total = len(items) if isinstance(items, Sized) else 0
    tell(WorkEvent(what, done=0, total=total))
    for done, item in enumerate(items, 1):
        yield item
        tell(WorkEvent(what, done=done, total=total))


def listening(listener: Listener) -> AbstractContextManager[None]:
    """Within the block, `listener` hears all events, in addition to outer listeners."""
    return _set_listeners((*_listeners.get(), listener))


def unheard() -> AbstractContextManager[None]:
    """Within the block, nobody hears events."""
    return _set_listeners(())


@contextmanager
def _set_listeners(listeners: tuple[Listener, ...]) -> Iterator[None]:
    token = _listeners.set(listeners)
    try:
        yield
    finally:
        _listeners.reset(token)
