"""Streams in time: a chart of each, drawn by streams.js, and a table of how methods take its switches."""

from __future__ import annotations

from collections.abc import Sequence

from ..data import Shown
from ..formats import lay_out_streams
from .markup import escape, fold, frame
from .statistics import write_block

WHAT = (
    "Accuracy along each stream, the mean over clients and seeds. Shades show what the samples of a segment are drawn "
    "from. Lines are moving averages within a segment, never across two. Click a name to show or hide its line."
)


def show_streams(runs: Sequence[Shown]) -> str:
    """The tables of all runs, below the charts of the selected one; "" if no run has such a test."""
    tables = {
        shown.name: "".join(f"<h3>{escape(block.title)}</h3>{write_block(block)}" for block in lay_out_streams(shown))
        for shown in runs
        if shown.streams
    }
    if not tables:
        return ""
    charts = "" if all(each.curves is None for shown in runs for each in shown.streams.values()) else WHAT
    of_run = '<p class="of-run"></p>' if len(runs) > 1 else ""
    body = f'{of_run}<div class="needs-script"><p class="what">{charts}</p><div class="drawn"></div></div>'
    told = [fold(escape(name), table) if len(runs) > 1 else table for name, table in tables.items()]
    return frame("streams", "Streams in time", body + "\n".join(told))
