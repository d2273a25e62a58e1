"""Programs: pieces of work on buffers that stay where they are, so that a GPU can replay them as one graph."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

WARM_UP = 2  # runs before a capture: kernels are compiled and libraries set up in them

Built = TypeVar("Built")


def name_function(fn: Callable[..., Any]) -> Hashable:
    """What a function does: bound methods of equal objects do the same, though they do not compare equal."""
    return getattr(fn, "__func__", fn), getattr(fn, "__self__", None)


class Replay:
    """Calls `work`, which only changes tensors in place; on a GPU as a graph, captured by `prepare`."""

    def __init__(self, work: Callable[[], None], device: torch.device, pool: Any) -> None:
        self._work: Callable[[], None] | None = work
        self._device, self._pool = device, pool
        self._graph: torch.cuda.CUDAGraph | None = None

    def prepare(self) -> None:
        """Run the work for the sake of compilation and capture. What it changed must be loaded again."""
        if self._device.type != "cuda" or self._work is None:
            return
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._work()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with _without_collection(), torch.cuda.graph(graph, pool=self._pool):
            self._work()
        self._graph = graph
        self._work = None  # it refers to the owner: without this cycle, a dropped program is freed at once

    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        elif self._work is not None:
            self._work()


@contextmanager
def _without_collection() -> Iterator[None]:
    """No garbage is collected: another graph among it, freed during a capture, would spoil that."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Programs(Generic[Built]):
    """Programs by what they do and on which shapes; those used longest ago are dropped."""

    def __init__(self, device: torch.device, most: int = 8) -> None:
        self.device, self._most = device, most
        self.captures = True  # whether a program is worth a graph
        self._kept: OrderedDict[Hashable, Built] = OrderedDict()
        # Graphs are replayed one after another and leave nothing inside, so they may share their memory.
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def get(self, key: Hashable, build: Callable[[], Built]) -> Built:
        if key not in self._kept:
            while len(self._kept) >= self._most:
                self._kept.popitem(last=False)
            self._kept[key] = build()
        self._kept.move_to_end(key)
        return self._kept[key]

    @contextmanager
    def try_out(self) -> Iterator[None]:
        """What is built meanwhile runs but once: it gets no graph and is not kept. What was kept before stays."""
        kept, captures = self._kept, self.captures
        self._kept, self.captures = OrderedDict(), False
        try:
            yield
        finally:
            self._kept, self.captures = kept, captures

    @property
    def are_kept(self) -> bool:
        return bool(self._kept)

    def clear(self) -> None:
        self._kept.clear()
