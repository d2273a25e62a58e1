"""A bench as text: the table, its title, and the notes below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Literal

from ..names import METHOD_NAMES
from .result import SLOWER, Bench, Line, RowChange
from .workload import FULL

RATES = {"T": 1e12, "G": 1e9, "M": 1e6}
TIMES = {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def title(bench: Bench) -> str:
    m, c = bench.machine, bench.ceilings
    return (
        f"{m.device}, torch {m.torch}, {m.threads} threads, engine {bench.engine}, {bench.precision}\n"
        f"at best {_scale(c.flops, RATES)}FLOP/s in {c.flops_of} and copies at {_scale(c.bytes, RATES)}B/s"
    )


def tabulate(bench: Bench, changes: Sequence[RowChange] = ()) -> list[list[str]]:
    """The cells, header first: they fit 80 columns, or 100 with the authors' code."""
    before = {change.name: change for change in changes}
    with_authors = any(line.authors is not None for line in bench.rows)
    head = ["", "measured", "floor", "by", "x floor"]
    head += ["authors'\ncode (H200)", "faster\nby"] if with_authors else []
    head += ["before", "change"] if before else []
    return [head, *(_tabulate_line(line, before, with_authors) for line in bench.rows)]


def _tabulate_line(line: Line, before: Mapping[str, RowChange], with_authors: bool) -> list[str]:
    value = "failed" if line.value is None else format_time(line.value, line.unit)
    row = [line.name, value + (" *" if line.scaled_from is not None else "")]
    kind = {"arithmetic": "arith.", "bytes": "bytes", None: ""}[line.floor_kind]
    row += [format_time(line.floor, line.unit), kind, _format_number(line.floor_ratio)]
    if with_authors:
        ratio = line.authors / line.value if line.authors and line.value else None
        row += [format_time(line.authors, line.unit), _format_number(ratio)]
    if before:
        change = before.get(line.name)
        row += [format_time(change.before, line.unit), _format_change(change)] if change else ["", ""]
    return row


def list_notes(bench: Bench, changes: Sequence[RowChange] = ()) -> list[str]:
    """The lines below the table."""
    notes = [f"failed: {line.name}: {line.failed}" for line in bench.rows if line.failed is not None]
    sources: dict[str, list[str]] = {}
    for line in bench.rows:
        if line.scaled_from is not None:
            sources.setdefault(line.scaled_from, []).append(line.name)
    notes += [f"* scaled from {source}: {'; '.join(names)}" for source, names in sources.items()]
    notes += [
        f"round: {METHOD_NAMES['fedthe']}, {FULL.clients} clients x {FULL.train:,} images, "
        "5 local + 1 personal epochs; seconds per run",
        "per sample: the engine's whole call",
        "floor: arithmetic, or bytes to move, at the best rate of this machine",
    ]
    if changes:
        slower, much = sum(change.slower for change in changes), f"{100 * (SLOWER - 1):.0f} %"
        said = f"{slower} of {len(changes)} rows are over {much} slower than the baseline" + (" (!)" if slower else "")
        notes.append(f"{said}; timings vary, so the exit code stays 0")
    return notes


def as_text(bench: Bench, changes: Sequence[RowChange] = ()) -> str:
    """Title, table and notes in plain characters."""
    head, *rows = tabulate(bench, changes)
    heads = zip_longest(*(reversed(name.split("\n")) for name in head), fillvalue="")
    table = [*reversed([list(line) for line in heads]), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    sides = ["<" if side == "left" else ">" for side in align(head)]
    lines = [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in table
    ]
    return "\n".join([title(bench), "", *lines, "", *list_notes(bench, changes)])


def align(head: Sequence[str]) -> list[Literal["left", "right"]]:
    """Words to the left, numbers to the right."""
    return ["left" if name in ("", "by") else "right" for name in head]


def format_time(value: float | None, unit: str) -> str:
    """Three digits, in a readable unit: 1.23 s, 45.6 ms, 7.89 us."""
    if value is None:
        return ""
    return _scale(value / {"s": 1, "ms": 1000}[unit], TIMES)


def _format_number(value: float | None) -> str:
    """Three digits, without an exponent."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _format_change(change: RowChange) -> str:
    return f"{100 * (change.ratio - 1):+.0f} %" + (" !" if change.slower else "")


def _scale(value: float, units: Mapping[str, float]) -> str:
    """The value in the largest unit that it fills, or else in the last one."""
    unit = next((unit for unit, size in units.items() if value >= size), list(units)[-1])
    return f"{_format_number(value / units[unit])} {unit}"
