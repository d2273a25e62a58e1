"""Measure all rows, and find the floor of each."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import get_args

import torch

from ..engine.pick import Kind, Precision, pick_engine
from ..errors import Failed, InputError
from ..progress.events import WorkEvent, tell, unheard
from ..text import find_nearest
from .lab import AUTHORS, Lab, Measured, Task
from .machine import Ceilings, describe_machine, join_ceilings, measure_ceilings, name_dtype
from .need import find_floor
from .result import Bench, Line
from .workload import Sizes, pick_sizes

CEILINGS = "what the machine can do"


def measure(
    kind: Kind = "auto",
    device: str = "auto",
    precision: Precision = "auto",
    quick: bool = False,
    only: Sequence[str] = (),
    sizes: Sizes | None = None,
) -> Bench:
    """Measure all rows, or `only` those named. A row that fails says why, and the others still run."""
    for name, value, known in (("engine", kind, get_args(Kind)), ("precision", precision, get_args(Precision))):
        if value not in known:
            raise InputError(f"{name} cannot be {value!r}; {find_nearest(value, known)}")
    began, engine = time.perf_counter(), pick_engine(kind, device, precision)
    place = engine.device
    sizes = sizes or pick_sizes(place.type == "cuda", engine.together > 1, quick)
    rows = Lab(kind, str(place), precision, sizes).rows
    for name in only:
        if name not in rows:
            raise InputError(f"there is no row {name!r}; {find_nearest(name, rows)}")
    chosen = [name for name in rows if not only or name in only]
    found: dict[str, Measured | str] = {}
    tell(WorkEvent("measuring", CEILINGS, done=0, total=len(chosen)))
    machine, ceilings = describe_machine(place), measure_ceilings(place, sizes)
    _free_memory(place)
    for done, name in enumerate(chosen):
        tell(WorkEvent("measuring", name, done=done, total=len(chosen)))
        found[name] = _try(rows[name])
        _free_memory(place)
    tell(WorkEvent("measuring", CEILINGS, done=len(chosen), total=len(chosen)))
    with suppress(RuntimeError):  # a row may have left the GPU unusable
        ceilings = join_ceilings(ceilings, measure_ceilings(place, sizes))  # the machine may have been busy before
    tell(WorkEvent("measuring", done=len(chosen), total=len(chosen)))
    authors = AUTHORS if "H200" in machine.device else {}
    lines = tuple(make_line(rows[name], found[name], ceilings, authors.get(name)) for name in chosen)
    by, dtype = type(engine).__name__.lower(), name_dtype(engine.dtype)
    return Bench(machine, by, dtype, quick, ceilings, lines, time.perf_counter() - began)


def _try(task: Task) -> Measured | str:
    """The measurement, or why it failed."""
    try:
        with unheard():  # the progress of the work itself is not shown
            return task.work()
    except Exception as error:  # any: out of memory, a missing library, a kernel that does not compile
        words = (str(error).splitlines() or [""])[0][:200]
        return words if isinstance(error, InputError | Failed) else f"{type(error).__name__}: {words}"


def make_line(task: Task, found: Measured | str, ceilings: Ceilings, authors: float | None = None) -> Line:
    """A task's numbers and its floor, in its unit, or why it failed."""
    line = Line(task.name, task.unit, authors=authors)
    if isinstance(found, str):
        return replace(line, failed=found)
    per_second = {"s": 1, "ms": 1000}[task.unit]
    floor, floor_kind = find_floor(found.need, ceilings)
    details = {"seconds": list(found.timed.seconds), **found.timed.peak, **found.details, **asdict(found.need)}
    return replace(
        line,
        value=per_second * found.seconds,
        floor=per_second * floor,
        floor_kind=floor_kind,
        floor_ratio=found.seconds / floor,
        scaled_from=found.scaled_from,
        cold=found.timed.cold,
        details=details,
    )


def _free_memory(device: torch.device) -> None:
    """Free what a row has allocated, so that the next one can use all memory."""
    gc.collect()
    if device.type == "cuda":
        with suppress(RuntimeError):  # a row may have left the GPU unusable; then the next ones fail and say so
            torch.cuda.empty_cache()
