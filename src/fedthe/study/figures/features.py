"""FedTHE's features with and without the history of the stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from ...config import Config
from ...data.pool import Dataset
from ...experiment.training import deploy_all
from .. import draw
from .base import PAPER, Figure
from .inside import ensemble_of, watch

FEW_CLIENTS, FEW_SAMPLES = 4, 40  # clients in the figure, and samples of each of their streams


def measure(config: Config, dataset: Dataset) -> dict[str, Any]:
    """The features h of some samples, and h', moved towards the history, for a few clients of the first seed."""
    (deployed,) = deploy_all(replace(config, seeds=config.seeds[:1]), dataset)
    streams, ensemble = deployed.federation.tests, ensemble_of(deployed)
    whole = [k for k in range(config.client_count) if all(streams[test][k] is not None for test in deployed.tests)]
    clients = (whole or list(range(config.client_count)))[:FEW_CLIENTS]
    found: dict[str, list[Any]] = {"test": [], "client": [], "without": [], "with": []}
    for each in watch(deployed, config.samples):
        if each.client in clients:
            # spread over the stream, since the history covers all samples before, shown or not
            picked = np.unique(np.linspace(0, len(each.labels) - 1, FEW_SAMPLES).round().astype(int))
            found["test"] += [each.test] * len(picked)
            found["client"] += [each.client] * len(picked)
            found["without"] += _list_features(each.h, picked)
            found["with"] += _list_features(each.smooth(ensemble.alpha, ensemble.beta), picked)
    return {"seed": deployed.seed, **found}


def _list_features(h: Tensor, picked: np.ndarray) -> list[list[float]]:
    rounded: list[list[float]] = h.cpu().numpy()[picked].astype(np.float64).round(2).tolist()
    return rounded


FIGURE = Figure("Features, with and without history", PAPER | {"methods": ["fedthe"]}, measure, draw.draw_features)
