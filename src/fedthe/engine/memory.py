"""How much memory tensors take at most while something runs."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Watch(TorchDispatchMode):
    """Counts the bytes of every storage that an operation makes, until it is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now: int = 0
        self.peak: int = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        place, size = storage.data_ptr(), storage.nbytes()
        if place == 0 or place in self.seen:
            return
        self.seen.add(place)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, place, size)

    def _free(self, place: int, size: int) -> None:
        self.seen.discard(place)
        self.now -= size


def measure_peak(work: Callable[[], object]) -> float:
    """The peak of memory that tensors made by `work` hold at one time, in MiB; what was there before does not count."""
    with _Watch() as watch:
        work()
    return float(watch.peak / 2**20)


OUT_OF_MEMORY = (torch.OutOfMemoryError, RuntimeError, MemoryError)


def measure_bytes(work: Callable[[], object], device: torch.device) -> int:
    """The most memory that `work` holds on the device, beyond what was there before."""
    if device.type != "cuda":
        return int(measure_peak(work) * 2**20)
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    wait(device)
    return torch.cuda.max_memory_allocated(device) - before


def wait(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_bytes(device: torch.device) -> int:
    """What could be allocated on the device now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return _available_memory()


def _available_memory() -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    except OSError:
        pass  # not Linux
    return 4 * 2**30


def trim_heap() -> None:
    """Return freed memory to the system. glibc keeps it in the heap, where tensors of changing sizes leave holes: over
    many rounds of many clients the process would grow to twice what it needs."""
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)


@cache
def _libc() -> Any:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no such thing
        return None
