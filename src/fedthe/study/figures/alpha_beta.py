"""FedTHE's accuracy by its hyperparameters alpha and beta."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...config import Config
from ...experiment.training import deploy_all
from ...names import METHOD_NAMES
from ...progress.events import track
from .. import draw
from .base import PAPER, Figure, Found, average
from .inside import ensemble_of, try_pair, watch

GRID = (0.01, 0.05, 0.1, 0.3, 0.5, 1.0)  # of alpha and of beta


def measure(config: Config) -> dict[str, Any]:
    """Accuracy in percent; all pairs are tried on the same features and logits."""
    found: list[Found] = []
    for deployed in deploy_all(config):
        seen, ensemble = watch(deployed, config.samples), ensemble_of(deployed)
        pairs = track("alpha and beta", [(alpha, beta) for alpha in GRID for beta in GRID])
        rates = np.array([try_pair(seen, ensemble, alpha, beta) for alpha, beta in pairs])  # [pairs, streams]
        tables = rates.T.reshape(-1, len(GRID), len(GRID))
        found += [(each.test, deployed.seed, table) for each, table in zip(seen, tables, strict=True)]
    return {"alpha": GRID, "beta": GRID, "accuracy": average(found)}  # accuracy[test]["mean"][alpha][beta]


TITLE = f"{METHOD_NAMES['fedthe']}'s accuracy by alpha and beta"
FIGURE = Figure(TITLE, PAPER | {"methods": ["fedthe"]}, measure, draw.draw_alpha_beta)
