"""Both heads, or whole models, mixed by a fixed e."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ... import tree
from ...config import Config
from ...data.pool import Dataset
from ...experiment.training import Deployed, deploy_all
from ...progress.events import track
from ...tree import Tree
from .. import draw
from .base import PAPER, Figure, Found, average, rate
from .inside import watch

WEIGHTS = tuple(i / 20 for i in range(21))  # fixed e


def measure_heads(config: Config, dataset: Dataset) -> dict[str, Any]:
    """Accuracy in percent with the logits of the two heads mixed by a fixed e, and FedTHE's, which finds e itself."""
    fixed: list[Found] = []
    ours: list[Found] = []
    for deployed in deploy_all(config, dataset):
        for each in watch(deployed, config.samples):
            fixed.append((each.test, deployed.seed, np.array([each.rate_fixed(e) for e in WEIGHTS])))
            ours.append((each.test, deployed.seed, each.accuracy))
    return _sum_up(fixed, ours)


def measure_models(config: Config, dataset: Dataset) -> dict[str, Any]:
    """The same with parameters mixed: FedAvg's, and those that each client fine-tuned from them."""
    received: dict[int, Tree] = {}
    fixed: list[Found] = []
    ours: list[Found] = []
    for deployed in deploy_all(config, dataset):
        if deployed.name == "fedavg":
            received[deployed.seed] = deployed.states
        elif deployed.name == "fedavg_ft":
            shared = received.pop(deployed.seed)
            rates = [rate(_mix_models(deployed, shared, e), config.samples) for e in track("interpolating", WEIGHTS)]
            for stream in zip(*rates, strict=True):  # the same stream at every e
                test, seed, _ = stream[0]
                fixed.append((test, seed, np.array([value for *_, value in stream])))
        else:
            ours += rate(deployed, config.samples)
    return _sum_up(fixed, ours)


def _mix_models(personal: Deployed, shared: Tree, e: float) -> Deployed:
    mixed = tree.map_leaves(lambda of_global, own: e * of_global + (1 - e) * own, shared, personal.states)
    return replace(personal, states=mixed)


def _sum_up(fixed: list[Found], ours: list[Found]) -> dict[str, Any]:
    best = [(test, seed, rates.max()) for test, seed, rates in fixed]  # each client's own e, chosen by its test labels
    return {"e": WEIGHTS, "shared": average(fixed), "best": average(best), "fedthe": average(ours)}


HEADS = Figure(
    "Global and personal head mixed by a fixed e",
    PAPER | {"methods": ["fedthe"]},
    measure_heads,
    draw.draw_interpolation,
)
MODELS = Figure(
    "Global and fine-tuned model mixed by a fixed e",
    PAPER | {"methods": ["fedavg", "fedavg_ft", "fedthe"]},
    measure_models,
    draw.draw_interpolation,
)
