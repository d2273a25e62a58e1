"""Streams in time: for each, a chart, drawn by streams.js, and a table of how methods take its switches."""

from __future__ import annotations

from collections.abc import Sequence

from ..data import Shown
from ..formats import lay_out_streams
from .markup import escape, frame, prefix
from .statistics import write_block

WHAT = (
    "Accuracy along each stream, the mean over clients and seeds. Shades show what the samples of a segment are drawn "
    "from. Lines are moving averages within a segment, never across two. With several seeds and up to six lines, the "
    "band around a line is ± the standard deviation over seeds. Positions count from 0. Click a name to show or hide "
    "its line."
)


def show_streams(runs: Sequence[Shown]) -> str:
    """The streams of all runs, of which scripts show those of the selected one; "" if no run has any."""
    several = len(runs) > 1
    parts = []
    for i, shown in enumerate(runs):
        for test, block in zip(shown.streams, lay_out_streams(shown), strict=True):
            title = f"{prefix(shown, several)}{escape(shown.tests.get(test, test))}"
            place = f'<div class="place needs-script" data-test="{escape(test)}"></div>'
            parts.append(f'<div class="stream" data-run="{i}">\n<h3>{title}</h3>\n{place}\n{write_block(block)}</div>')
    if not parts:
        return ""
    what = f'<p class="what needs-script">{WHAT}</p>' if any(_has_curves(shown) for shown in runs) else ""
    of_run = '<p class="of-run"></p>' if several else ""
    body = "\n".join([f'{of_run}{what}<div class="drawn"></div>', *parts])
    return frame("streams", "Streams in time", body)


def _has_curves(shown: Shown) -> bool:
    return any(stream.curves for stream in shown.streams.values())
