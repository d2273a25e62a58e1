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
        if threads <= 1:
            yield from map(fn, items)
        else:
            yield from _map(fn, items, threads)


def _map(fn: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    waiting: deque[Future[R]] = deque()
    workers: set[int] = set()
    pool = ThreadPoolExecutor(threads, "fedthe", initializer=lambda: workers.add(threading.get_ident()))
    try:
        for item in items:
            waiting.append(pool.submit(fn, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
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
