"""The finding of a run in a sentence: the best method, and whether it is significantly above the next."""

from __future__ import annotations

import math
from statistics import fmean, stdev

from ..names import OURS
from . import cells
from .data import Shown

# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom
QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
NORMAL = 1.96  # for more


def say_finding(shown: Shown) -> str:
    """One to three sentences about the average over tests; "" if no method answered every test."""
    averages = cells.average_all(shown)
    ranked = sorted(averages, key=lambda method: -averages[method])
    if not ranked:
        return ""
    best, others = ranked[0], ranked[1:]
    what = "average accuracy" if len(shown.tests) > 1 else "accuracy"
    if not others:
        return f"{shown.methods[best]} has an {what} of {averages[best]:.1f} %; it is the only method."
    parts = [_say_lead(shown, averages, best, others[0], what)]
    next_best = next((method for method in others if method not in OURS), None)
    if best in OURS and others[0] in OURS and next_best is not None:  # variants of one method
        parts.append(f"The best method apart from these two is {_name(shown, averages, next_best)}.")
    if len(shown.seeds) == 1:
        parts.append("This is a single seed: another may rank the methods differently.")
    return " ".join(parts)


def _say_lead(shown: Shown, averages: dict[str, float], best: str, second: str, what: str) -> str:
    highest, other = (f"{averages[method]:.1f} %" for method in (best, second))
    lead, said = f"{averages[best] - averages[second]:.1f}", ""
    interval = _find_interval(shown, best, second)
    if interval:
        low, high, seeds = interval
        lead = lead if low > 0 else "not significantly"
        said = f"; 95 % interval of the difference {cells.say_change(low)} to {cells.say_change(high)}, {seeds} seeds"
    elif highest == other:
        return f"{shown.methods[best]} and {shown.methods[second]} share the highest {what}, {highest}."
    above = f"{lead} above the best other method, {_name(shown, averages, second)}"
    return f"{shown.methods[best]} has the highest {what}, {highest}, {above}{said}."


def _name(shown: Shown, averages: dict[str, float], method: str) -> str:
    return f"{shown.methods[method]} ({averages[method]:.1f} %)"


def _find_interval(shown: Shown, one: str, other: str) -> tuple[float, float, int] | None:
    """The 95 % interval of one - other, paired by seed, and the number of seeds; None for fewer than two seeds."""
    both = [(_average_seed(shown, seed, one), _average_seed(shown, seed, other)) for seed in shown.clients]
    more = [ours - theirs for ours, theirs in both if ours is not None and theirs is not None]
    if len(more) < 2:
        return None
    t = QUANTILES[len(more) - 2] if len(more) - 2 < len(QUANTILES) else NORMAL
    half = t * stdev(more) / math.sqrt(len(more))
    return fmean(more) - half, fmean(more) + half, len(more)


def _average_seed(shown: Shown, seed: str, method: str) -> float | None:
    """The mean over tests of the mean over clients; None if a test is missing."""
    scores = shown.clients[seed].scores.get(method, {})
    known = [[each for each in scores.get(test, ()) if each is not None] for test in shown.tests]
    return fmean(map(fmean, known)) if known and all(known) else None
