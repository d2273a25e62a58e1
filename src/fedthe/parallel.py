"""Independent work on several CPU cores: worker threads, each of which computes with a single thread of torch.

Torch's own way, one operation spread over all cores, makes every operation wait for its slowest thread. On a busy
machine a thread may not be running at all, and the others burn their share of the CPU while they wait for it. Workers
that need nothing from each other lose only what other programs take, and numbers do not depend on how many there are.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def map_in_threads(fn: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """`fn` of every item, in order; at most `threads` at a time, and few results wait to be taken.

    The first exception ends it: what has not begun is dropped, and running work is interrupted.
    """
    with one_thread_of_torch():
        if threads > 1:
            yield from _map(fn, items, threads)
        else:
            for item in items:  # no `map`: a StopIteration of `fn` would end it as if it were done
                yield _compute(fn, item)


def _compute(fn: Callable[[T], R], item: T) -> R:
    """In any thread alike: what a caller has set for its own thread does not count."""
    import torch

    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        return fn(item)


def _map(fn: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    waiting: deque[Future[R]] = deque()
    running: set[int] = set()
    lock, over = threading.Lock(), threading.Event()

    def work(item: T) -> R:
        me = threading.get_ident()
        with lock:
            if over.is_set():
                raise SystemExit
            running.add(me)
        try:
            return _compute(fn, item)
        finally:
            with lock:
                running.discard(me)

    pool = ThreadPoolExecutor(threads, "fedthe")
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        with lock:  # who is idle must not be interrupted: it has to pass on the word that the pool is closed
            over.set()
            for worker in running:
                _interrupt(worker)
        raise
    finally:
        pool.shutdown()


def _interrupt(thread: int) -> None:
    """Raise SystemExit in a thread, between two operations: a client may have minutes of training before it."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))


@contextmanager
def one_thread_of_torch() -> Iterator[None]:
    """Within the block, operations of this thread and of threads that begin in it are not spread over cores."""
    import torch

    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
