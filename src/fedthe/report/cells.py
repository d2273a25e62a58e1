"""How all formats of a report write numbers, and which numbers are the best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal, TypeGuard

from ..experiment.notebook import BOLD, DAGGER, say_change
from ..statistics import find_average_leader, find_leader
from ..text import say_points
from .data import Cost, Percents, Score, Shown

__all__ = ["DAGGER", "say_change"]  # as in notebooks
NOTHING = "-"  # in place of a missing number
AVERAGE = "average over tests"  # no id of a test has spaces
Kind = Literal["mean", "worst"]  # over clients, or of the worst client


def average_of(shown: Shown, method: str, kind: Kind = "mean") -> float | None:
    """The mean over tests; None for a method that lacks a test, as its mean would not be comparable."""
    scores = shown.scores.get(method, {})
    if not scores or not scores.keys() >= shown.tests.keys():
        return None
    return fmean(getattr(score, kind) for score in scores.values())


def average_all(shown: Shown) -> dict[str, float]:
    """The mean over tests by method, without methods that lack a test."""
    return {method: mean for method in shown.scores if (mean := average_of(shown, method)) is not None}


def list_seeds(shown: Shown, method: str) -> dict[str, dict[str, Percents]]:
    """The accuracy of a method's clients by test and seed."""
    found: dict[str, dict[str, Percents]] = {}
    for seed, clients in shown.clients.items():
        for test, percents in clients.scores.get(method, {}).items():
            found.setdefault(test, {})[seed] = percents
    return found


def find_leaders(shown: Shown) -> dict[str, str | None]:
    """By test, and under AVERAGE for the average: the method whose lead over the best other has an interval above 0."""
    seeds = {
        method: {test: of for test, of in list_seeds(shown, method).items() if test in scores}
        for method, scores in shown.scores.items()
    }
    leaders = {test: find_leader({m: of[test] for m, of in seeds.items() if test in of}) for test in shown.tests}
    return {**leaders, AVERAGE: find_average_leader(seeds, list(shown.tests))}


def explain_bold(runs: Sequence[Shown]) -> str:
    """What bold numbers are; "" if there are none."""
    if not any(leader for shown in runs for leader in find_leaders(shown).values()):
        return ""
    one = " With one seed, the interval does not cover other seeds." if any(len(s.seeds) == 1 for s in runs) else ""
    return f"Bold: {BOLD}.{one}"


def mark(shown: Shown, test: str) -> str:
    """The name of a test, with a dagger if some of its streams have few samples."""
    return f"{shown.tests[test]}{DAGGER if test in shown.short else ''}"


def explain_short(shown: Shown) -> list[str]:
    return [f"{DAGGER} {shown.tests[test]}: {said}." for test, said in shown.short.items() if test in shown.tests]


def difference(shown: Shown, method: str, test: str) -> float | None:
    """Our number minus the paper's; None if they are not comparable."""
    ours = shown.scores.get(method, {}).get(test)
    papers = shown.paper.cells.get(method, {}).get(test) if shown.paper else None
    return ours.mean - papers[0] if ours and papers else None


def is_known(number: float | None) -> TypeGuard[float]:
    return number is not None and math.isfinite(number)


def say_number(number: float | None, digits: int = 1) -> str:
    return f"{number:.{digits}f}" if is_known(number) else NOTHING


def say(score: Score) -> str:
    """71.3 ± 0.4, or 71.3 for a single seed."""
    return " ± ".join(say_points(each) for each in (score.mean, score.std) if each is not None)


def say_ms(cost: Cost) -> str:
    """Three digits, because methods differ by factors of thousands."""
    if cost.ms is None:
        return NOTHING
    return f"{cost.ms:.3g}" if cost.ms < 100 else f"{cost.ms:.0f}"


def say_passes(cost: Cost) -> str:
    """Forward passes, + backward passes if there are any: 1 or 33 + 1."""
    if cost.forward is None:
        return NOTHING
    return f"{cost.forward:g} + {cost.backward:g}" if cost.backward else f"{cost.forward:g}"


def number_names(names: Sequence[str]) -> list[str]:
    """Names that occur more than once get a number: a (1), a (2)."""
    return [f"{name} ({names[: i + 1].count(name)})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def find_free(name: str, taken: Sequence[str]) -> str:
    """The name, or the first of name-2, name-3, ... that is not taken."""
    names = [name, *(f"{name}-{i}" for i in range(2, len(taken) + 2))]
    return next(each for each in names if each not in taken)


def list_settings(shown: Shown) -> dict[str, Any]:
    """The settings of a run by name, nested ones with dots: hyper.fedthe.alpha."""
    return _flatten(shown.provenance.get("config") or {})


def _flatten(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flatten(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return flat
