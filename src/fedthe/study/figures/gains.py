"""The accuracy gain of every method over fine-tuning."""

from __future__ import annotations

from typing import Any

from ...config import Config
from ...data.pool import Dataset
from ...errors import InputError
from ...names import METHOD_NAMES
from .. import draw
from .base import BASELINE, PAPER, PAPERS_OWN, Figure, average, run_whole


def measure(config: Config, dataset: Dataset) -> dict[str, Any]:
    """The accuracy of every method in percent, and its gain over the baseline on the same seed and client."""
    if BASELINE not in config.specs or len(config.specs) < 2:
        raise InputError(f"gains are relative to {BASELINE}; name it among the methods, and at least one other.")
    rows = run_whole(config, dataset).rows
    base = {(row.seed, row.test, row.client): row.accuracy for row in rows if row.method == BASELINE}
    accuracy: dict[str, Any] = {}
    gains: dict[str, Any] = {}
    for method in config.specs:
        mine = [row for row in rows if row.method == method]
        accuracy[method] = average((row.test, row.seed, row.accuracy) for row in mine)
        gains[method] = average(
            (row.test, row.seed, row.accuracy - base[row.seed, row.test, row.client]) for row in mine
        )
    del gains[BASELINE]
    return {"baseline": BASELINE, "accuracy": accuracy, "gains": gains}


FIGURE = Figure(
    f"Accuracy gain over {METHOD_NAMES[BASELINE]}",
    PAPER | {"methods": [BASELINE, "memo_p", "t3a", "fedrod", "fedrep", *PAPERS_OWN]},
    measure,
    draw.draw_gains,
    fixed=False,
)
