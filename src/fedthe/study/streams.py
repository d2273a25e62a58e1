"""Our tables of streams in time, which switch, drift, come back or bring new classes, and of an open set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..experiment.timelines import StreamScore, find_slowest, read_score
from ..names import NET_NAMES
from ..timeline import WORST

NOTHING = "-"
TITLE = f"{NET_NAMES['cnn']} on CIFAR-10, Dir(0.1): streams in time"
METHODS = (
    *("fedavg", "fedavg_ft", "fedrod", "t3a", "memo_p", "ttt", "lame", "em", "bbse", "fmapls"),
    *("fedthe", "fedthe_plus", "fedthe_regime"),
)
STREAMS = ("correlated", "ooc_correlated", "switch10", "switch50", "switch100", "gradual", "recurring", "late")
SHORT = {
    "correlated": "correl.",
    "ooc_correlated": "ooc correl.",
    "switch10": "switch 10",
    "switch50": "switch 50",
    "switch100": "switch 100",
    "recurring": "recur.",
    "open_set": "open set",
}
AS_USUAL: dict[str, Any] = {
    "dataset": "cifar10",
    "model": "cnn",
    "clients": 20,
    "dirichlet": 0.1,
    "rounds": 100,
    "participation": 1.0,
}
SETTING = AS_USUAL | {"tests": list(STREAMS)}
OPEN_TITLE = f"{NET_NAMES['cnn']} on CIFAR-10 without trucks, Dir(0.1): trucks among a client's own samples"
OPEN = ("original", "open_set")
OPEN_SETTING = AS_USUAL | {"tests": list(OPEN), "unknown": "truck"}


def lay_out_streams(record: Mapping[str, Any]) -> dict[str, tuple[list[str], list[list[str]]]]:
    """By title, the head and the rows of a table with a column for each stream; without those that have no number."""
    scores = {
        test: {method: read_score(each) for method, each in of.items()}
        for case in record["cases"]
        for test, of in case.get("streams", {}).items()
    }
    grids: dict[str, Callable[[StreamScore], str]] = {
        "AUROC (%): an answer to a known class is more confident than one to the unknown class": _say_auroc,
        "FPR (%): answers to the unknown class as confident as 95 % of those to known ones": _say_passing,
        f"worst window of {WORST} samples: the lowest accuracy of a client, mean over clients": say_worst,
        "forgetting: accuracy on the first segment minus that on later ones of its kind": _say_forgetting,
        "recovery: samples after a switch to the slowest kind of segment; not: not in half a segment": say_slowest,
    }
    found = {}
    methods = dict.fromkeys(method for of in scores.values() for method in of)
    for title, say in grids.items():
        columns = {
            test: [say(of[method]) if method in of else NOTHING for method in methods] for test, of in scores.items()
        }
        told = {test: column for test, column in columns.items() if set(column) != {NOTHING}}
        rows = [[method, *(column[i] for column in told.values())] for i, method in enumerate(methods)]
        if told:
            found[title] = ["", *(SHORT.get(test, test).replace(" ", "\n") for test in told)], rows
    return found


def _say_auroc(score: StreamScore) -> str:
    return NOTHING if score.auroc is None else f"{score.auroc:.1f}"


def _say_passing(score: StreamScore) -> str:
    return NOTHING if score.fpr95 is None else f"{score.fpr95:.1f}"


def say_worst(score: StreamScore) -> str:
    return NOTHING if score.worst_window is None else f"{score.worst_window.mean:.1f}"


def _say_forgetting(score: StreamScore) -> str:
    return NOTHING if score.forgetting is None else f"{score.forgetting.mean:+.1f}"


def say_slowest(score: StreamScore) -> str:
    slowest = find_slowest(score)
    if slowest is None:
        return NOTHING
    return "not" if slowest.recovery is None else f"{slowest.recovery:.0f}"
