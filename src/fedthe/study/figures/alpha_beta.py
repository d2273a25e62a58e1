"""FedTHE's accuracy by alpha and beta, the rates of its history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...config import Config
from ...data.pool import Dataset
from ...experiment.training import deploy_all
from ...methods.fedthe import HeadEnsemble
from ...methods.head_ensemble import find_weight, measure_gap, mix
from ...names import METHOD_NAMES
from ...progress.events import track
from .. import draw
from .base import PAPER, Figure, Found, average
from .inside import Seen, ensemble_of, percent, watch

GRID = (0.01, 0.05, 0.1, 0.3, 0.5, 1.0)  # of alpha and of beta


def try_pair(seen: Sequence[Seen], ensemble: HeadEnsemble, alpha: float, beta: float) -> list[float]:
    """FedTHE's accuracy in percent on every stream. Only the history needs one stream at a time."""
    gap = torch.cat([measure_gap(each.smooth(alpha, beta), each.descriptor, each.own_descriptor) for each in seen])
    of_global = torch.cat([each.of_global for each in seen])
    of_personal = torch.cat([each.of_personal for each in seen])
    e = find_weight(of_global, of_personal, gap, ensemble.search, ensemble.weighting)
    right = mix(e, of_global, of_personal).argmax(-1) == torch.cat([each.labels for each in seen])
    return [percent(part) for part in right.split([len(each.labels) for each in seen])]


def measure(config: Config, dataset: Dataset) -> dict[str, Any]:
    """Accuracy in percent by alpha and beta, on the same features and logits."""
    found: list[Found] = []
    for deployed in deploy_all(config, dataset):
        seen, ensemble = watch(deployed, config.samples), ensemble_of(deployed)
        pairs = track("alpha and beta", [(alpha, beta) for alpha in GRID for beta in GRID])
        rates = np.array([try_pair(seen, ensemble, alpha, beta) for alpha, beta in pairs])  # [pairs, streams]
        tables = rates.T.reshape(-1, len(GRID), len(GRID))
        found += [(each.test, deployed.seed, table) for each, table in zip(seen, tables, strict=True)]
    return {"alpha": GRID, "beta": GRID, "accuracy": average(found)}  # accuracy[test]["mean"][alpha][beta]


TITLE = f"{METHOD_NAMES['fedthe']}'s accuracy by alpha and beta"
FIGURE = Figure(TITLE, PAPER | {"methods": ["fedthe"]}, measure, draw.draw_alpha_beta)
