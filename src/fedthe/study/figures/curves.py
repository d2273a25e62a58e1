"""Learning curves, and how many rounds FedTHE saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...config import Config
from ...data.pool import Dataset
from ...errors import InputError
from .. import draw
from .base import BASELINE, PAPER, PAPERS_OWN, Figure, run_whole

POINTS = 10  # of a curve


def measure(config: Config, dataset: Dataset) -> dict[str, Any]:
    """Accuracy in percent after more and more rounds, and the rounds that ours need to match each baseline."""
    rounds = pick_rounds(config.rounds)
    results = run_whole(replace(config, curve=tuple(rounds[:-1])), dataset)
    curves: dict[str, dict[str, dict[str, list[Any]]]] = {}
    for method, scores in results.scores().items():
        for test, last in scores.items():
            found = [*(results.curves[number][method][test] for number in rounds[:-1]), last]
            curves.setdefault(method, {})[test] = {
                kind: [each[i] for each in found] for i, kind in enumerate(("mean", "std"))
            }
    on_mixture = {method: tests["mixture"]["mean"] for method, tests in curves.items() if "mixture" in tests}
    return {"rounds": rounds, "curves": curves, "speed": compare_speed(rounds, on_mixture)}


def pick_rounds(last: int) -> list[int]:
    """The rounds after which to evaluate: evenly spaced, up to the last."""
    if last < 1:
        raise InputError(f"rounds must be at least 1 for a learning curve, but is {last}.")
    return sorted({-(-last * i // POINTS) for i in range(1, POINTS + 1)})


def compare_speed(rounds: Sequence[int], curves: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """By our method and baseline: the rounds until ours reaches the baseline's final accuracy, and the ratio.

    The baseline's rounds are those until it first reached that accuracy. `first`: ours reached it by the first point of
    the curve, so the rounds may be fewer and the ratio greater. Rounds and ratio are None if ours never reaches it.
    """
    speed: dict[str, dict[str, Any]] = {}
    for ours in (method for method in PAPERS_OWN if method in curves):
        for baseline in (method for method in curves if method not in PAPERS_OWN):
            target = curves[baseline][-1]
            needs, other = reach(rounds, curves[ours], target), reach(rounds, curves[baseline], target)
            speed.setdefault(ours, {})[baseline] = {
                "accuracy": target,
                "rounds": needs,
                "baseline_rounds": other,
                "ratio": None if needs is None or other is None else other / needs,
                "first": needs == rounds[0],
            }
    return speed


def reach(rounds: Sequence[int], curve: Sequence[float], target: float) -> float | None:
    """The round in which a curve, linear between its points, first reaches the target; None: never."""
    if curve[0] >= target:
        return float(rounds[0])
    for i in range(1, len(rounds)):
        if curve[i] >= target:
            share = (target - curve[i - 1]) / (curve[i] - curve[i - 1])
            return rounds[i - 1] + share * (rounds[i] - rounds[i - 1])
    return None


def _plan(title: str, **settings: Any) -> Figure:
    methods = ["fedavg", BASELINE, "memo_p", "t3a", "fedrod", *PAPERS_OWN]
    return Figure(title, PAPER | {"methods": methods} | settings, measure, draw.draw_curves, fixed=False)


FIGURES = {
    "curves-dir0.1": _plan("Learning curves at Dir(0.1)"),
    "curves-dir1": _plan("Learning curves at Dir(1.0)", dirichlet=1.0),
    "curves-500": _plan("Learning curves over 500 rounds", rounds=500, tests=["mixture"]),
    "curves-1000": _plan("Learning curves over 1,000 rounds", rounds=1000, tests=["mixture"]),
}
