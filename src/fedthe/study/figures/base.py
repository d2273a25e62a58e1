"""What figures share: their form, the paper's settings, the answers of deployed clients, and averages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...config import Config
from ...data.pool import Dataset
from ...engine.evaluate import Scores, score
from ...engine.visit import Question
from ...errors import Failed
from ...experiment.results import Results
from ...experiment.run import run_prepared
from ...experiment.training import Deployed
from ...experiment.work import prepare

BASELINE = "fedavg_ft"  # gains are relative to it
PAPERS_OWN = ("fedthe", "fedthe_plus")  # the methods of the paper
PAPER: dict[str, Any] = {
    "name": "figures",  # one folder for all of them, so that they share trainings
    "dataset": "cifar10",
    "net": "cnn",
    "clients": 20,
    "dirichlet": 0.1,
    "rounds": 100,
    "seeds": [0, 1, 2],
}

Found = tuple[str, int, Any]  # a test, a seed, and one client's value: a number or an array


@dataclass(frozen=True)
class Figure:
    title: str
    settings: Mapping[str, Any]  # of the experiment, as keys of a config; a caller may override them
    measure: Callable[[Config, Dataset], dict[str, Any]]
    draw: Callable[[Mapping[str, Any], Path], None]  # what `measure_figure` returned, into a PNG
    fixed: bool = True  # whether it is about these methods only, so that a caller cannot choose others


def average(found: Iterable[Found]) -> dict[str, dict[str, Any]]:
    """By test: the mean over clients, then its mean and standard deviation (n - 1) over seeds; None for one."""
    cells: dict[str, dict[int, list[Any]]] = {}
    for test, seed, value in found:
        cells.setdefault(test, {}).setdefault(seed, []).append(value)
    averages = {}
    for test, seeds in cells.items():
        means = np.array([np.mean(clients, 0) for clients in seeds.values()])  # [seeds, ...]
        std = means.std(0, ddof=1) if len(means) > 1 else np.full(means.shape[1:], None)
        averages[test] = {"mean": means.mean(0).tolist(), "std": std.tolist()}
    return averages


def restate_figure(measured: Mapping[str, Any]) -> dict[str, Any]:
    """A figure whose standard deviations are with n - 1. Earlier records have them with n; every seed has its part."""
    seeds = len(measured["config"]["seeds"])
    if "ddof" in measured or seeds < 2:
        return dict(measured)
    factor = (seeds / (seeds - 1)) ** 0.5

    def restate(value: Any, is_std: bool = False) -> Any:
        if isinstance(value, Mapping):
            return {name: restate(each, name == "std") for name, each in value.items()}
        if isinstance(value, list):
            return [restate(each, is_std) for each in value]
        return value * factor if is_std and value is not None else value

    return {**measured, "data": restate(measured["data"]), "ddof": 1}


def run_whole(config: Config, dataset: Dataset) -> Results:
    """Run an experiment, and raise if any part of it failed: a mean over the other seeds would be another figure."""
    results = run_prepared(*prepare(config, dataset))
    for which, why in results.failures.items():
        raise Failed(f"{which}: {why}")
    return results


def answer(deployed: Deployed, samples: int | None) -> list[tuple[str, int, np.ndarray, Scores]]:
    """Test, client, labels int64 [n] and scores of every stream, or of its first samples; as in a run."""
    asked = [
        (test, k, labels[:samples], Question(k, images[:samples], (deployed.seed, test, k)))
        for test, k, images, labels in deployed.streams()
    ]
    shards = [deployed.run.shards[k] for k in range(len(deployed.run.shards))]
    questions = [question for *_, question in asked]
    answers = deployed.engine.answer(deployed.method, deployed.states, shards, questions)
    return [
        (test, k, labels, score(said, labels, question.path))
        for (test, k, labels, question), said in zip(asked, answers, strict=True)
    ]


def rate(deployed: Deployed, samples: int | None) -> list[Found]:
    """The accuracy in percent on every stream, or on its first samples."""
    return [(test, deployed.seed, 100 * scores.accuracy) for test, _, _, scores in answer(deployed, samples)]
