"""The result of a bench, its file, and the comparison with a baseline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .. import store
from ..errors import InputError
from .machine import Ceilings, Machine

FORMAT = 1  # of the file; raised when the meaning of a row changes
SLOWER = 1.2  # times the baseline: marked as slower. Timings mostly vary by less, even on a busy machine.


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    name: str
    unit: str  # s or ms, of value and floor
    value: float | None = None  # None: it failed
    floor: float | None = None
    floor_kind: str | None = None  # arithmetic or bytes
    floor_ratio: float | None = None  # value / floor
    scaled_from: str | None = None  # the smaller size that was measured, if it was not the full one
    cold: float | None = None  # seconds of the first call, not scaled
    authors: float | None = None  # the authors' code, if this is the device it was timed on
    failed: str | None = None  # why there is no value
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    machine: Machine
    engine: str  # loop or stack
    precision: str  # of convolutions in training and fine-tuning
    quick: bool
    ceilings: Ceilings
    rows: tuple[Line, ...]
    seconds: float  # of the whole bench

    def as_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self), "rows": [asdict(line) for line in self.rows]}


def read_bench(path: Path) -> Bench:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; `fedthe bench --save {path}` writes it.") from None
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}).") from None
    except ValueError as error:  # of UTF-8 as well
        raise InputError(f"{path} is not JSON ({error}); measure again.") from None
    try:
        return from_dict(value)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def from_dict(value: Any) -> Bench:
    """The inverse of `Bench.as_dict`."""
    if not isinstance(value, Mapping) or "format" not in value:
        raise InputError("this is not a result of `fedthe bench`.")
    if value["format"] != FORMAT:
        raise InputError(f"the baseline has format {value['format']!r} instead of {FORMAT}; measure again.")
    try:
        known = {each.name: value[each.name] for each in fields(Bench)}
        known |= {"machine": Machine(**value["machine"]), "ceilings": Ceilings(**value["ceilings"])}
        read = Bench(**known | {"rows": tuple(Line(**line) for line in value["rows"])})
    except (KeyError, TypeError):
        raise InputError("the baseline is incomplete; measure again.") from None
    for line in read.rows:
        if line.value is not None and not (isinstance(line.value, int | float) and 0 < line.value < float("inf")):
            raise InputError(f"the baseline has {line.value!r} for {line.name!r}; measure again.")
    return read


def find_baseline(machine: Machine) -> Path:
    """The file where `fedthe bench --remember` keeps the baseline of a machine."""
    return store.home() / f"bench-{machine.slug}.json"


def read_baseline(machine: Machine) -> Bench | None:
    path = find_baseline(machine)
    return read_bench(path) if path.exists() else None


@dataclass(frozen=True)
class RowChange:
    """One row, in the baseline and now."""

    name: str
    unit: str
    before: float
    now: float

    @property
    def ratio(self) -> float:
        return self.now / self.before

    @property
    def slower(self) -> bool:
        """By more than timings usually vary."""
        return self.ratio > SLOWER

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio, "slower": self.slower}


def compare(now: Bench, baseline: Bench) -> list[RowChange]:
    """The rows that both measured, by name."""
    values = {line.name: line.value for line in baseline.rows}
    return [
        RowChange(line.name, line.unit, old, line.value)
        for line in now.rows
        if line.value is not None and (old := values.get(line.name)) is not None
    ]


def list_differences(now: Bench, baseline: Bench) -> list[str]:
    """What else than the code may have changed the numbers, in sentences."""
    names = ("device", "torch", "threads", "engine", "precision")
    before, after = (vars(each) | vars(each.machine) for each in (baseline, now))
    notes = [
        f"{name} differs: {before[name]} in the baseline, {after[name]} now"
        for name in names
        if before[name] != after[name]
    ]
    sizes = {line.name: line.scaled_from for line in baseline.rows if line.value is not None}
    if any(line.name in sizes and line.scaled_from != sizes[line.name] for line in now.rows if line.value is not None):
        notes.append("the baseline was measured at other sizes")
    return notes
