"""The picture of a sweep: lines for one swept key, heat maps for two."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from ..names import name_method, name_test
from ..specs import Value, say_plain
from ..text import clean
from .draw import MARKERS, finish, head, look_up, make_panels, put_legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .sweep import Sweep, SweepRow

MEAN = "mean over tests"
LETTERS = 22  # of a line beside a panel
LOG_FROM = 8  # times the smallest value, from where on an axis is logarithmic


def draw_sweep(sweep: Sweep, path: Path) -> None:
    tests = {test: clean(sweep.names.get(test) or name_test(test), 40) for test in sweep.tests}
    measured = {
        "title": f"Accuracy by {', '.join(sweep.keys)}",
        "config": next(iter(sweep.runs.values())).config.as_dict(),
        "tests": tests | ({MEAN: MEAN} if len(tests) > 1 else {}),
    }
    if len(sweep.keys) == 1:
        _draw_lines(sweep, measured, path)
    else:
        _draw_maps(sweep, measured, path)


def _head(panel: Axes, measured: Mapping[str, Any], test: str, grid: bool = True) -> None:
    head(panel, measured, test, grid)
    if test == MEAN:
        panel.title.set_color("#222222")


def _count_columns(panels: int) -> int:
    """As few panels as possible missing in the last row."""
    return min((4, 3, 2), key=lambda columns: (-panels % columns, -columns)) if panels > 3 else panels


def _score(row: SweepRow, test: str) -> tuple[float, float | None] | None:
    if test == MEAN:
        return row.mean, None
    return row.scores.get(test)


def _draw_lines(sweep: Sweep, measured: Mapping[str, Any], path: Path) -> None:
    """A panel for each test: a line for each method; dashed, a method that does not depend on the key."""
    (key,) = sweep.keys
    values = _order([row.values[key] for row in sweep.rows if key in row.values])
    places, is_log = _place(values)
    looks = look_up(dict.fromkeys(row.method for row in sweep.rows))
    figure, axes = make_panels(len(measured["tests"]), columns=_count_columns(len(measured["tests"])))
    for panel, test in zip(axes, measured["tests"], strict=True):
        for marker, (method, (name, colour)) in zip(MARKERS * len(looks), looks.items(), strict=False):
            rows = [row for row in sweep.rows if row.method == method and _score(row, test)]
            at = {row.values.get(key): _score(row, test) or (0.0, None) for row in rows}
            if list(at) == [None]:
                panel.axhline(at[None][0], color=colour, ls="--", lw=1.4, label=name)
                continue
            known = [value for value in values if value in at]
            x, means = [places[values.index(value)] for value in known], [at[value][0] for value in known]
            spread = [at[value][1] or 0.0 for value in known]
            style = "-" if _are_numbers(values) else ":"  # there is nothing between words
            how: dict[str, Any] = {"color": colour, "ls": style, "marker": marker, "ms": 4.5, "lw": 1.6, "capsize": 2}
            panel.errorbar(x, means, spread, label=name, **how)
        if is_log:
            panel.set_xscale("log")
        panel.set_xticks(places, [say_plain(value) for value in values], parse_math=False)
        panel.set_xticks([], minor=True)
        panel.set_xlabel(key, parse_math=False)
        panel.set_ylabel("accuracy (%)")
        _head(panel, measured, test)
    put_legend(figure, *axes[0].get_legend_handles_labels())
    several = len(sweep.plan.config.seeds) > 1
    note = "bars: one standard deviation over seeds" if several else "one seed"
    if any(key not in row.values for row in sweep.rows):
        note += f"; dashed: methods without {key}"
    finish(figure, measured, path, note, without=sweep.keys)


def _draw_maps(sweep: Sweep, measured: Mapping[str, Any], path: Path) -> None:
    """A heat map of the first two keys for each test, in a row for each method and values of the other keys."""
    down, across, *others = sweep.keys
    groups: dict[tuple[Any, ...], list[SweepRow]] = {}
    for row in sweep.rows:
        groups.setdefault((row.method, *(row.values.get(key) for key in others)), []).append(row)
    tests = list(measured["tests"])
    figure, axes = make_panels(len(groups) * len(tests), columns=len(tests), width=2.7, height=2.3)
    for t, test in enumerate(tests):
        found = [score[0] for row in sweep.rows if (score := _score(row, test))]
        for g, (group, rows) in enumerate(groups.items()):
            panel = axes[g * len(tests) + t]
            _draw_map(panel, rows, test, down, across, (min(found), max(found)))
            if g == 0:
                _head(panel, measured, test, grid=False)
            if t == 0:
                fixed = ", ".join(f"{key}={say_plain(value)}" for key, value in zip(others, group[1:], strict=True))
                title = f"{clean(name_method(group[0]), 60)}{f', {fixed}' if fixed else ''}"
                lines = [*textwrap.wrap(title, LETTERS), *([down] if _varies(rows, down) else [])]
                panel.set_ylabel("\n".join(lines), parse_math=False)
    note = "accuracy (%); each column has its own colour scale"
    finish(figure, measured, path, note, without=sweep.keys)


def _draw_map(
    panel: Axes, rows: Sequence[SweepRow], test: str, down: str, across: str, ends: tuple[float, float]
) -> None:
    ys, xs = (_order([row.values.get(key) for row in rows]) for key in (down, across))
    cells = np.full((len(ys), len(xs)), np.nan)
    for row in rows:
        score = _score(row, test)
        if score:
            cells[ys.index(row.values.get(down)), xs.index(row.values.get(across))] = score[0]
    panel.imshow(cells, cmap="viridis", origin="lower", aspect="auto", vmin=ends[0], vmax=ends[1])
    for i, j in np.ndindex(*cells.shape):
        if not np.isnan(cells[i, j]):
            shade = "white" if cells[i, j] <= fmean(ends) else "black"
            panel.text(j, i, f"{cells[i, j]:.1f}", ha="center", va="center", fontsize=8, color=shade)
    for key, values, set_ticks in ((down, ys, panel.set_yticks), (across, xs, panel.set_xticks)):
        varies = _varies(rows, key)
        set_ticks(range(len(values)) if varies else [], [say_plain(value) for value in values] if varies else [])
    if _varies(rows, across):
        panel.set_xlabel(across, parse_math=False)


def _varies(rows: Sequence[SweepRow], key: str) -> bool:
    return any(key in row.values for row in rows)


def _order(values: Sequence[Value | None]) -> list[Any]:
    """Each value once: numbers by size, others as they come."""
    once = list(dict.fromkeys(values))
    return sorted(once, key=float) if _are_numbers(once) else once


def _place(values: Sequence[Any]) -> tuple[list[float], bool]:
    """Where values are on an axis, and whether it is logarithmic. Words and truth values are evenly spaced."""
    if not _are_numbers(values):
        return list(map(float, range(len(values)))), False
    return [float(value) for value in values], min(values) > 0 and max(values) >= LOG_FROM * min(values)


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
