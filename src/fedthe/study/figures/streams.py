"""Accuracy along streams in time."""

from __future__ import annotations

from typing import Any

from ...config import Config
from ...data.pool import Dataset
from ...experiment.samples import read_samples
from ...experiment.timelines import draw_streams
from .. import draw_streams as drawing
from ..streams import METHODS, STREAMS
from .base import PAPER, Figure, run_whole


def measure(config: Config, dataset: Dataset) -> dict[str, Any]:
    """By test: its segments, and the curve of each method."""
    results = run_whole(config, dataset)
    curves = draw_streams(read_samples(results), results.tests)
    return {"streams": {test: drawing.pick_streams(each) for test, each in curves.items()}}


FIGURE = Figure(
    "Accuracy along streams in time",
    PAPER | {"methods": list(METHODS), "tests": list(STREAMS)},
    measure,
    drawing.draw_streams,
    fixed=False,
)
