"""What each part of the regime filter is worth: the filter with one of its settings changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...config import Config
from ...data.pool import Dataset
from ...errors import InputError
from ...experiment.training import deploy_all
from ...methods.memo import Memo
from ...methods.regime import Regimes
from ...methods.regime_filter import RegimeFilter
from ...methods.views import Views
from ...names import METHOD_NAMES
from ...progress.events import track
from .. import draw
from .base import PAPER, Figure, Found, average, rate

FILTER = "the filter"
VARIANTS: dict[str, RegimeFilter] = {
    FILTER: RegimeFilter(),
    # one part taken away
    "recent answers not followed": RegimeFilter(Regimes(recent=0.0)),
    "no regime in between": RegimeFilter(Regimes(own=(0.03, 0.99), start=(0.25, 0.75))),
    "regimes hardly ever end": RegimeFilter(Regimes(leave=1e-6)),
    "temperatures of 1": RegimeFilter(calibrate=False),
    "own: global head alone": RegimeFilter(Regimes(personal=0.0)),
    "own: personal head alone": RegimeFilter(Regimes(personal=1.0)),
    # settings at half and double
    "trust 0.3": RegimeFilter(Regimes(trust=0.3)),
    "trust 1": RegimeFilter(Regimes(trust=1.0)),
    "leave 0.005": RegimeFilter(Regimes(leave=0.005)),
    "leave 0.02": RegimeFilter(Regimes(leave=0.02)),
    "smooth 1/32": RegimeFilter(Regimes(smooth=1 / 32)),
    "smooth 1/8": RegimeFilter(Regimes(smooth=1 / 8)),
    "regimes equal at the start": RegimeFilter(Regimes(start=(1 / 3, 1 / 3, 1 / 3))),
    # what it would have if it were told how many samples are the client's own
    "told: all are own": RegimeFilter(Regimes(own=(1.0,), start=(1.0,), recent=0.0)),
    "told: 3 of 4 are own": RegimeFilter(Regimes(own=(0.75,), start=(1.0,), recent=0.0)),
    "told: none is own": RegimeFilter(Regimes(own=(0.0,), start=(1.0,), recent=0.0)),
    # more passes
    "2 views: mirror image": RegimeFilter(then=Views()),
    "10 views: and shifts": RegimeFilter(then=Views(shift=2)),
    "then MEMO, 16 views": RegimeFilter(then=Memo(views=16)),
}


def measure(config: Config, dataset: Dataset) -> dict[str, Any]:
    """Accuracy in percent of every variant on the same trained clients, and the passes of each sample."""
    if config.hyper:
        raise InputError("regime compares settings of the filter itself; leave out hyper.")
    found: dict[str, list[Found]] = {name: [] for name in VARIANTS}
    for deployed in deploy_all(config, dataset):
        for name, variant in track("regime filters", list(VARIANTS.items())):
            method = replace(deployed.method, predictor=variant)
            found[name] += rate(replace(deployed, method=method), config.samples)
    return {
        "accuracy": {name: average(rates) for name, rates in found.items()},
        "passes": {name: variant.passes for name, variant in VARIANTS.items()},
    }


def draw_variants(measured: Mapping[str, Any], path: Path) -> None:
    """A table in colours: red is below the filter, blue above it."""
    accuracy = measured["data"]["accuracy"]
    tests = [test for test in measured["tests"] if test in accuracy[FILTER]]
    values = np.array([[row[test]["mean"] for test in tests] for row in accuracy.values()])  # [variants, tests]
    gains = values - values[list(accuracy).index(FILTER)]
    figure, (panel,) = draw.make_panels(1, width=1.35 * len(tests) + 2.6, height=0.28 * len(values) + 0.6)
    panel.imshow(gains, cmap="RdBu", vmin=-5, vmax=5, aspect="auto")
    for i, j in np.ndindex(*values.shape):
        shade = "white" if abs(gains[i, j]) > 3.5 else "black"
        panel.text(j, i, f"{values[i, j]:.1f}", ha="center", va="center", fontsize=8, color=shade)
    panel.set_xticks(range(len(tests)), [measured["tests"][test] for test in tests], fontsize=8, parse_math=False)
    panel.set_yticks(range(len(accuracy)), list(accuracy), fontsize=8, parse_math=False)
    panel.tick_params(length=0, labeltop=True, labelbottom=False)
    draw.finish(figure, measured, path, "accuracy (%); colours: points above (blue) or below (red) the filter, up to 5")


TITLE = f"{METHOD_NAMES['fedthe_regime']}: what each part is worth"
FIGURE = Figure(TITLE, PAPER | {"methods": ["fedthe"]}, measure, draw_variants)
