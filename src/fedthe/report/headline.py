"""The finding of a run in a sentence: the best method, and whether it is significantly above the next."""

from __future__ import annotations

from ..names import OURS
from ..statistics import bootstrap, pair_averages
from ..text import say_points
from . import cells
from .data import Shown


def say_finding(shown: Shown) -> str:
    """One to three sentences about the average over tests; "" if no method answered every test."""
    averages = cells.average_all(shown)
    ranked = sorted(averages, key=lambda method: -averages[method])
    if not ranked:
        return ""
    best, others = ranked[0], ranked[1:]
    what = "average accuracy" if len(shown.tests) > 1 else "accuracy"
    if not others:
        return f"{shown.methods[best]} has an {what} of {say_points(averages[best])} %; it is the only method."
    parts = [_say_lead(shown, averages, best, others[0], what)]
    next_best = next((method for method in others if method not in OURS), None)
    if best in OURS and others[0] in OURS and next_best is not None:  # variants of one method
        parts.append(f"The best method that is not a variant of FedTHE is {_name(shown, averages, next_best)}.")
    if len(shown.seeds) == 1:
        parts.append("This is a single seed: another may rank the methods differently.")
    return " ".join(parts)


def _say_lead(shown: Shown, averages: dict[str, float], best: str, second: str, what: str) -> str:
    highest, other = (f"{say_points(averages[method])} %" for method in (best, second))
    lead, said = say_points(averages[best] - averages[second]), ""
    interval = _find_interval(shown, best, second)
    if interval:
        low, high, seeds = interval
        lead = lead if low > 0 else "not significantly"
        count = f"{seeds} seed{'s' if seeds > 1 else ''}"
        said = f"; 95 % interval of the difference {cells.say_change(low)} to {cells.say_change(high)}, {count}"
    elif highest == other:
        return f"{shown.methods[best]} and {shown.methods[second]} share the highest {what}, {highest}."
    above = f"{lead} above the best other method, {_name(shown, averages, second)}"
    return f"{shown.methods[best]} has the highest {what}, {highest}, {above}{said}."


def _name(shown: Shown, averages: dict[str, float], method: str) -> str:
    return f"{shown.methods[method]} ({say_points(averages[method])} %)"


def _find_interval(shown: Shown, one: str, other: str) -> tuple[float, float, int] | None:
    """The 95 % interval of one - other on the average over tests, and the number of seeds; None where there is none."""
    pairs = pair_averages(cells.list_seeds(shown, one), cells.list_seeds(shown, other), shown.tests)
    interval = bootstrap([each[:, 0] - each[:, 1] for each in pairs]) if pairs else None
    if interval is None or interval.low is None or interval.high is None:
        return None
    return interval.low, interval.high, len(pairs)
