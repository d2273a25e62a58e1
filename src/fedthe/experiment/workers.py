"""Who computes an experiment: this process, or workers in other processes. Outcomes arrive one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..engine.visit import Engine
from ..errors import Failed
from ..methods.base import Method

if TYPE_CHECKING:
    from ..config import Config
    from .work import Work


@dataclass(frozen=True)
class Trained:
    """A training of one seed is filed, or failed."""

    training: Method
    served: tuple[str, ...]  # the methods that deploy it
    work: Work
    skipped: tuple[str, ...] = ()  # clients that a round left out, and why
    failed: Failed | None = None


@dataclass(frozen=True)
class Answered:
    """The answers of a method on one seed are filed, or it failed."""

    name: str
    work: Work
    file: str = ""  # the stem of its name
    content: Mapping[str, Any] = field(default_factory=dict)
    reused: bool = False  # filed before
    failed: Failed | None = None


Outcome = Trained | Answered


class Workers(Protocol):
    """They compute in other processes; the results end up in the folder of the experiment."""

    def find_engine(self, config: Config) -> Engine:
        """What they compute with."""

    def compute(self, methods: Mapping[str, Method], works: Sequence[Work]) -> Iterator[Outcome]:
        """All trainings and answers of the methods on the works, in any order, but each training before its tests."""


_workers: ContextVar[Workers | None] = ContextVar("workers", default=None)


def find_workers() -> Workers | None:
    """Those that compute; None: this process does."""
    return _workers.get()


@contextmanager
def use_workers(workers: Workers | None) -> Iterator[None]:
    """Within the block, these workers compute experiments; None: this process does."""
    token = _workers.set(workers)
    try:
        yield
    finally:
        _workers.reset(token)
