"""Accuracy along streams in time: what a chart of it shows, and the picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from ..experiment.timelines import StreamCurves
from ..names import OURS, name_phase
from . import draw

POINTS = 250  # of a curve
BEST = 4  # methods that a chart of the report shows at first, beside ours
DRAWN = 8  # methods of the picture
GREY = "#777777"


def pick_streams(curves: StreamCurves) -> dict[str, Any]:
    """Bands, phases and thinned curves of a test, as plain data."""
    return {
        "bands": [list(band) for band in curves.bands],
        "phases": look_up_phases([phase for *_, phase in curves.bands]),
        "curves": {
            method: {
                "positions": [curve.positions[i] for i in some],
                "mean": [round(curve.mean[i], 2) for i in some],
                "std": [round(curve.std[i], 2) for i in some] if curve.std else None,
                "segments": [None if each is None else round(each, 3) for each in curve.segments],
            }
            for method, curve in curves.methods.items()
            for some in [_thin(curve.positions, curves.bands)]
        },
    }


def _thin(positions: Sequence[int], bands: Sequence[tuple[int, int, str]]) -> list[int]:
    """Indices at equal distances, and those of the first and last position of every segment, at which lines break."""
    size = len(positions)
    starts = np.searchsorted(positions, [first for first, *_ in bands]).tolist()  # after all: nothing was known then
    ends = {at for start in starts for at in (start - 1, start) if 0 <= at < size}
    return sorted({round(each) for each in np.linspace(0, size - 1, min(size, POINTS)).tolist()} | ends)


def look_up_phases(phases: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The name, the colour and the shade of each phase: the colour of the test it belongs to, the darker the more
    severe."""
    looks = {}
    for phase in dict.fromkeys(phases):
        origin, _, severity = phase.partition(" ")
        colour = draw.TEST_COLOURS.get({"own": "original"}.get(origin, origin), GREY)
        shade = 0.04 * int(severity) if severity.isdecimal() else 0.13
        looks[phase] = {"name": name_phase(phase), "colour": colour, "shade": shade, "turn": 0}
    return looks


def pick_best(curves: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The methods that are best along the stream, and ours; from curves as `pick_streams` gives them."""
    means = {method: fmean(curve["mean"]) for method, curve in curves.items() if curve["mean"]}
    best = sorted(means, key=lambda method: -means[method])[:BEST]
    return [method for method in means if method in (*best, *OURS)]


def draw_streams(measured: Mapping[str, Any], path: Path) -> None:
    """A panel for each stream: segments as shaded bands, and the curve of each method."""
    from matplotlib.patches import Patch

    streams = measured["data"]["streams"]
    methods = list(dict.fromkeys(method for each in streams.values() for method in each["curves"]))
    looks = {method: look for method, look in draw.look_up(methods).items() if method in _pick_drawn(streams, methods)}
    figure, axes = draw.make_panels(len(streams), columns=2, width=6.2, height=2.7)
    shades: dict[str, Patch] = {}
    for panel, (test, stream) in zip(axes, streams.items(), strict=True):
        for first, end, phase in stream["bands"]:
            look = stream["phases"][phase]
            panel.axvspan(first - 0.5, end - 0.5, color=look["colour"], alpha=look["shade"], lw=0)
            shades.setdefault(look["name"], Patch(color=look["colour"], alpha=look["shade"], lw=0))
        for method, (name, colour) in looks.items():
            if method in stream["curves"]:
                curve = stream["curves"][method]
                style, width = draw.LINES.get(method, ("-", 1.4))
                at, mean = break_line(curve["positions"], curve["mean"], stream["bands"])
                panel.plot(at, mean, style, color=colour, label=name, lw=0.7 * width)
        panel.set(xlabel="sample", ylabel="accuracy (%)", xlim=(-0.5, max(end for _, end, _ in stream["bands"]) - 0.5))
        panel.set_title(measured["tests"][test], fontsize=10, parse_math=False)
        panel.grid(color="#e5e5e5", lw=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    lines = {line.get_label(): line for panel in axes for line in panel.get_lines()}
    draw.put_legend(figure, [*lines.values(), *shades.values()], [*map(str, lines), *shades])
    some = f"; {len(looks)} of {len(methods)} methods" if len(looks) < len(methods) else ""
    note = f"mean over clients and seeds; shades: what the samples of a segment are drawn from{some}"
    draw.finish(figure, measured, path, note)


def break_line(
    positions: Sequence[int], values: Sequence[float], bands: Sequence[tuple[int, int, str]]
) -> tuple[np.ndarray, np.ndarray]:
    """The points of a line with NaN between segments, except where a segment has one sample: a point is no line."""
    breaks = np.searchsorted(positions, [first for first, end, _ in bands if end - first > 1 and first > 0])
    at, mean = np.array(positions, dtype=np.float64), np.array(values, dtype=np.float64)
    return np.insert(at, breaks, np.nan), np.insert(mean, breaks, np.nan)


def _pick_drawn(streams: Mapping[str, Any], methods: Sequence[str]) -> list[str]:
    """As many as can be told apart: the best over all streams, and ours."""
    whole = [method for method in methods if all(method in each["curves"] for each in streams.values())]
    means = {m: fmean(_average_segments(each["curves"][m]) for each in streams.values()) for m in whole}
    best = sorted(whole, key=lambda method: -means[method])[: DRAWN - len(OURS)]
    return list(methods) if len(methods) <= DRAWN else [m for m in methods if m in (*best, *OURS)]


def _average_segments(curve: Mapping[str, Any]) -> float:
    """Without segments of unknown samples alone."""
    return fmean(each for each in curve["segments"] if each is not None)
