"""Streams in time in a report: what is known of them, and their tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..experiment.tables import Means, Samples
from ..experiment.timelines import (
    Estimate,
    PhaseScore,
    StreamScore,
    draw_streams,
    find_cut,
    find_slowest,
    list_streams,
    read_score,
    score_streams,
)
from ..names import name_phase
from ..timeline import WORST
from . import cells
from .data import Shown, Timeline

NEVER = "not"  # in place of the samples until a method has recovered
FEW = 3  # phases that each have a column for their recovery


def gather_streams(
    samples: Mapping[tuple[str, int], Samples], tests: Iterable[str], aurocs: Means
) -> dict[str, Timeline]:
    """Of the tests that change in time; without those that no method has all samples of."""
    streams, cut = list_streams(samples, tests), find_cut(samples)
    curves = draw_streams(samples, [test for test in streams if test in cut])  # without switches, there is no chart
    return {
        test: Timeline(scores, curves.get(test)) for test, scores in score_streams(samples, streams, aurocs).items()
    }


def read_streams(plain: Mapping[str, Mapping[str, Any]]) -> dict[str, Timeline]:
    """From the record of a table."""
    return {
        test: Timeline({method: read_score(each) for method, each in scores.items()}) for test, scores in plain.items()
    }


def lay_out_stream(shown: Shown, test: str) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The heads of a table, and for each method its name and cells. Columns without a number are left out."""
    scores = shown.streams[test].scores
    phases = list(dict.fromkeys(phase for score in scores.values() for phase in score.phases))
    named = {method: name for method, name in shown.methods.items() if method in scores}
    columns = {
        "accuracy": [_say_estimate(scores[method].accuracy) for method in named],
        f"worst window of {WORST}": [_say_estimate(scores[method].worst_window) for method in named],
        "worst client's": [cells.say_number(scores[method].worst_client) for method in named],
        "forgetting": [_say_estimate(scores[method].forgetting, signed=True) for method in named],
        "AUROC": [cells.say_number(scores[method].auroc) for method in named],
        "FPR at 95 % TPR": [cells.say_number(scores[method].fpr95) for method in named],
    }
    for phase in phases:
        found = [scores[method].phases.get(phase) for method in named]
        if len(phases) > 1:
            columns[name_phase(phase)] = [cells.say_number(each.accuracy if each else None) for each in found]
        if len(phases) <= FEW:
            columns[f"recovery, {name_phase(phase)}"] = [_say_recovery(each) for each in found]
    if len(phases) > FEW:
        columns["slowest recovery"] = [_say_recovery(find_slowest(scores[method])) for method in named]
    told = {head: said for head, said in columns.items() if any(each != cells.NOTHING for each in said)}
    return list(told), [(name, [said[i] for said in told.values()]) for i, name in enumerate(named.values())]


def _say_estimate(estimate: Estimate | None, signed: bool = False) -> str:
    """A number with its interval in brackets."""
    if estimate is None:
        return cells.NOTHING
    say = _say_change if signed else cells.say_number
    between = "" if estimate.low is None else f" ({say(estimate.low)} to {say(estimate.high or 0.0)})"
    return f"{say(estimate.mean)}{between}"


def _say_change(change: float) -> str:
    """With its sign, unless it rounds to zero."""
    said = cells.say_change(change)
    return said if float(said) else "0.0"


def _say_recovery(score: PhaseScore | None) -> str:
    """Samples, with their interval in brackets."""
    if score is None or score.steady is None:
        return cells.NOTHING
    ends = [NEVER if end is None else f"{end:.0f}" for end in (score.recovery_low, score.recovery_high)]
    return f"{NEVER if score.recovery is None else f'{score.recovery:.0f}'} ({' to '.join(ends)})"


def explain_streams(scores: Iterable[StreamScore]) -> str:
    """What the columns of the tables are."""
    scores = list(scores)
    said = [
        "Percent, mean over clients, then over seeds, with 95 % intervals (a bootstrap over seeds, then over clients).",
        f"Worst window: the lowest accuracy of a client over {WORST} samples in a row; the mean over clients, and the "
        "worst client's.",
    ]
    if any(score.forgetting for score in scores):
        said.append("Forgetting: accuracy on the first segment minus that on later segments of its kind.")
    if any(phase.steady is not None for score in scores for phase in score.phases.values()):
        said.append(
            "Recovery: samples after a switch until the accuracy is within 5 points of that in the second half of a "
            "segment, so 0 if it changes little, at whatever level; not: not within half a segment."
        )
    if any(score.auroc is not None for score in scores):
        said.append("AUROC and FPR: of the probability of the answer, known classes against an unknown one.")
    return " ".join(said)
