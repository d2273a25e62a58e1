"""How all formats of a report write numbers, and which numbers are the best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal, TypeGuard

from .data import Cost, Score, Shown

NOTHING = "-"  # in place of a missing number
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


def pick_best(numbers: Mapping[str, float]) -> set[str]:
    """The keys of the highest number as shown: 71.26 and 71.34 tie at 71.3. Empty if all tie."""
    seen = {who: float(f"{number:.1f}") for who, number in numbers.items()}
    best = {who for who, number in seen.items() if number == max(seen.values())}
    return best if len(best) < len(seen) else set()


def find_best(shown: Shown, kind: Kind) -> dict[str, set[str]]:
    """The best methods by test."""
    every = {test: [m for m in shown.scores if test in shown.scores[m]] for test in shown.tests}
    return {test: pick_best({m: getattr(shown.scores[m][test], kind) for m in ms}) for test, ms in every.items()}


def difference(shown: Shown, method: str, test: str) -> float | None:
    """Our number minus the paper's; None if they are not comparable."""
    ours = shown.scores.get(method, {}).get(test)
    papers = shown.paper.cells.get(method, {}).get(test) if shown.paper else None
    return ours.mean - papers[0] if ours and papers else None


def is_known(number: float | None) -> TypeGuard[float]:
    return number is not None and math.isfinite(number)


def say_number(number: float | None) -> str:
    return f"{number:.1f}" if is_known(number) else NOTHING


def say(score: Score) -> str:
    """71.3 ± 0.4, or 71.3 for a single seed."""
    return f"{score.mean:.1f}" if score.std is None else f"{score.mean:.1f} ± {score.std:.1f}"


def say_change(change: float) -> str:
    """With its sign; what rounds to zero is +0.0, never -0.0."""
    return f"{round(change, 1) + 0.0:+.1f}"


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
