"""Long work says how far it is, to whoever listens: the command line shows bars, and a run keeps it for who watches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
Listener = Callable[[str, int, int, str], None]  # what is going on, how much is done, of how much, and a remark

_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("listeners", default=())


def tell(what: str, done: int, total: int, remark: str = "") -> None:
    for listener in _listeners.get():
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
    """Within the block, `listener` hears what long work tells, as those do that listened before."""
    with _only((*_listeners.get(), listener)):
        yield


@contextmanager
def unheard() -> Iterator[None]:
    """Within the block, nobody hears what long work tells."""
    with _only(()):
        yield


@contextmanager
def _only(listeners: tuple[Listener, ...]) -> Iterator[None]:
    token = _listeners.set(listeners)
    try:
        yield
    finally:
        _listeners.reset(token)
