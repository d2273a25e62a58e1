"""Independent work on several CPU cores: worker threads, each of which computes with a single torch thread.

Torch's own parallelism spreads each operation over all cores, so every operation waits for its slowest thread. On a
busy machine a thread may not run at all, while the others burn CPU time waiting for it. Independent workers lose only
what other programs take, and the results do not depend on their number.
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
    """`fn` of every item, in order; at most `threads` run at a time, and few results are buffered.

    The first exception ends it: pending work is dropped, and running work is interrupted.
    """
    with one_thread_of_torch():
        if threads > 1:
            yield from _map(fn, items, threads)
        else:
            for item in items:  # not `map`, which a StopIteration from `fn` would end silently
                yield _compute(fn, item)


def _compute(fn: Callable[[T], R], item: T) -> R:
    """The same in any thread: torch settings of the caller's thread have no effect."""
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
        with lock:  # only running workers: idle ones must stay alive to pass on the pool's shutdown
            over.set()
            for worker in running:
                _interrupt(worker)
        raise
    finally:
        pool.shutdown()


def _interrupt(thread: int) -> None:
    """Raise SystemExit in a thread between two operations: a client may have minutes of training left."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))


@contextmanager
def one_thread_of_torch() -> Iterator[None]:
    """Within the block, operations of this thread and of threads started in it use one core each."""
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
