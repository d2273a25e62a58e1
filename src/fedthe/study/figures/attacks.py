"""Clients that attack, and server rules against them. Not in the paper."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ...config import Config
from ...data.pool import Dataset
from ...errors import Failed
from ...experiment.results import Results
from ...experiment.run import run_prepared
from ...experiment.scores import ClientScore
from ...experiment.work import prepare
from ..draw_attacks import draw_attacks
from .base import PAPER, Figure, average

SHARE = 0.2  # of clients
ATTACKS: dict[str, dict[str, Any]] = {
    "nobody attacks": {},
    "signs flipped": {"attackers": SHARE, "attack": -1.0},
    "updates times 10": {"attackers": SHARE, "attack": 10.0},
}
RULES: dict[str, dict[str, Any]] = {
    "mean": {},
    "clipping": {"clip": 1.0},
    "median": {"aggregation": "median"},
    "trimmed mean": {"aggregation": "trimmed_mean", "byzantine": SHARE},
    "Multi-Krum": {"aggregation": "multi_krum", "byzantine": SHARE},
}


def measure(config: Config, dataset: Dataset) -> dict[str, Any]:
    """By attack and rule: accuracy in percent by method and test, and over all tests; or why there is none."""
    cases: dict[str, dict[str, Any]] = {}
    for attack, settings in ATTACKS.items():
        for rule, more in RULES.items():
            results = run_prepared(*prepare(replace(config, **settings, **more), dataset))
            cases.setdefault(attack, {})[rule] = {method: _read(results, method) for method in config.methods}
    return {"cases": cases}


def _read(results: Results, method: str) -> dict[str, Any]:
    """A model that has diverged is a result, too; but any seed that is missing would make the mean another."""
    whys = [why for which, why in results.failures.items() if which.partition(",")[0] == method]
    if whys:
        return {"failed": whys[0]}
    rows = [row for row in results.rows if row.method == method]
    by_test = average((row.test, row.seed, row.accuracy) for row in rows)
    if not by_test:
        raise Failed(f"{method} has no results")
    # over the tests' own means, for not every client has every test
    means = [("average", seed, cell["mean"]) for seed in results.config.seeds for cell in _rate_seed(rows, seed)]
    return by_test | average(means)


def _rate_seed(rows: Iterable[ClientScore], seed: int) -> Iterable[dict[str, Any]]:
    """By test."""
    return average((row.test, row.seed, row.accuracy) for row in rows if row.seed == seed).values()


FIGURE = Figure(
    "Clients that attack, and server rules",
    PAPER | {"methods": ["fedavg", "fedthe", "fedthe_regime"]},
    measure,
    draw_attacks,
    fixed=False,
)
