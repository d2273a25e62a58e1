"""Long work says how far it is, to whoever listens: the command line shows bars, everyone else hears nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
Listener = Callable[[str, int, int, str], None]  # what is going on, how much is done, of how much, and a remark

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def tell(what: str, done: int, total: int, remark: str = "") -> None:
    listener = _listener.get()
    if listener is not None:
        listener(what, done, total, remark)


def track(what: str, items: Iterable[T], total: int | None = None) -> Iterator[T]:
    """The items, telling after each how many are done."""
    if total is None:
        total = len(items) if isinstance(items, Sized) else 0
    tell(what, 0, total)
    for done, item in enumerate(items, 1):
        yield item
        tell(what, done, total)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Within the block, `listener` hears what long work tells."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
