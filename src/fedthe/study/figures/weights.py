"""The distribution of the weight of the personal head."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...config import Config
from ...data.pool import Dataset
from ...experiment.training import deploy_all
from .. import draw
from .base import PAPER, Figure, answer

BINS = 40  # of the weights, from 0 to 1


def measure(config: Config, dataset: Dataset) -> dict[str, Any]:
    """A histogram of 1 - e over all samples, by method and test."""
    weights: dict[str, dict[str, list[np.ndarray]]] = {}
    for deployed in deploy_all(config, dataset):
        for test, _, _, scores in answer(deployed, config.samples):
            own = 1 - scores.info["e"].astype(np.float64)
            weights.setdefault(deployed.name, {}).setdefault(test, []).append(own)
    histograms = {
        method: {test: _count(np.concatenate(parts)) for test, parts in tests.items()}
        for method, tests in weights.items()
    }
    return {"edges": np.linspace(0, 1, BINS + 1).tolist(), "weights": histograms}


def _count(values: np.ndarray) -> dict[str, Any]:
    density, _ = np.histogram(values, BINS, (0, 1), density=True)
    return {"density": density.tolist(), "mean": float(values.mean()), "samples": len(values)}


FIGURE = Figure(
    "Weight of the personal head, 1 - e", PAPER | {"methods": ["fedthe", "ablation_11"]}, measure, draw.draw_weights
)
