"""Compare two runs: differences in accuracy, paired by client where both have the same clients, and in settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..text import clean, say_value
from . import cells
from .data import Shown
from .formats import LONGEST

if TYPE_CHECKING:
    from ..study.show import Grid

WHERE = ("name", "out", "keep", "checkpoint_seconds", "methods")  # settings that change no number


@dataclass(frozen=True)
class Change:
    """Accuracy (%) of one method on one test in both runs; if paired, over the clients that both have."""

    a: float
    b: float
    more: float  # b - a
    pairs: int  # clients that both runs have; 0 if unpaired
    error: float | None = None  # the standard error of `more` over clients and seeds
    gained: int = 0  # clients on which b is better
    lost: int = 0


@dataclass(frozen=True)
class Comparison:
    names: tuple[str, str]
    methods: Mapping[str, str]  # in both runs: display names by id
    tests: Mapping[str, str]
    changes: Mapping[str, Mapping[str, Change]]  # by method and test
    seeds: Sequence[str]  # with the same manifest, so the same clients
    apart: Sequence[str]  # the other seeds: in one run only, or with different clients
    settings: Mapping[str, tuple[Any, Any]]  # that differ
    only: tuple[Sequence[str], Sequence[str]]  # names of methods and tests in one run only
    renamed: Mapping[str, tuple[str, str]]  # tests with the same id but different names


def compare(a: Shown, b: Shown) -> Comparison:
    """The difference b - a for each method and test in both."""
    first, second = cells.number_names([clean(a.name), clean(b.name)])
    seeds, apart = _match_seeds(a, b)
    answered = [{test for scores in run.scores.values() for test in scores} for run in (a, b)]
    methods = {m: name for m, name in a.methods.items() if m in b.methods and m in a.scores and m in b.scores}
    tests = {t: name for t, name in a.tests.items() if t in b.tests and t in answered[0] and t in answered[1]}
    for kind, shared in (("method", methods), ("test", tests)):
        if not shared:
            raise InputError(f"{first} and {second} share no {kind}, so there is nothing to compare.")
    changes: dict[str, dict[str, Change]] = {}
    for method in methods:
        for test in tests:
            if test in a.scores[method] and test in b.scores[method]:
                changes.setdefault(method, {})[test] = _measure_change(a, b, method, test, seeds)
    if not changes:
        raise InputError(f"{first} and {second} share no method that answered the same test in both.")
    return Comparison(
        names=(first, second),
        methods={method: methods[method] for method in changes},
        tests={test: name for test, name in tests.items() if any(test in row for row in changes.values())},
        changes=changes,
        seeds=seeds,
        apart=apart,
        settings=_list_differences(cells.list_settings(a), cells.list_settings(b)),
        only=(_list_own(a, b), _list_own(b, a)),
        renamed={test: (a.tests[test], b.tests[test]) for test in tests if a.tests[test] != b.tests[test]},
    )


def lay_out(comparison: Comparison) -> Grid:
    """A row for each method and test: a, b, b - a ± its standard error, and clients that gained and lost."""
    rows = []
    for method, changes in comparison.changes.items():
        for test, change in changes.items():
            name = f"{clean(comparison.methods[method], 30)}, {clean(comparison.tests[test], 40)}"
            error = "" if change.error is None else f" ± {change.error:.1f}"
            counts = f"{change.gained} / {change.lost}" if change.pairs else cells.NOTHING
            numbers = cells.say_number(change.a), cells.say_number(change.b), cells.say_change(change.more) + error
            rows.append([name, *numbers, counts])
    return ["", *comparison.names, "difference", "up / down"], rows


def list_remarks(comparison: Comparison) -> list[str]:
    """What readers must know about the differences, the most important first."""
    a, b = comparison.names
    remarks = [_say_pairing(comparison)]
    remarks += [f"{test} is {ours} in {a} and {theirs} in {b}." for test, (ours, theirs) in comparison.renamed.items()]
    for setting, (before, after) in comparison.settings.items():
        remarks.append(f"{setting}: {_say_setting(before)} in {a}, {_say_setting(after)} in {b}.")
    if not comparison.settings:
        remarks.append("No setting differs.")
    only = zip(comparison.names, comparison.only, strict=True)
    remarks += [f"Only in {name}: {', '.join(own)}." for name, own in only if own]
    return [clean(remark, LONGEST) for remark in remarks]


def _say_pairing(comparison: Comparison) -> str:
    changes = [change for row in comparison.changes.values() for change in row.values()]
    if not any(change.pairs for change in changes):
        return (
            "Not paired: no seed has the same clients in both runs, so a difference may come from the clients; "
            "numbers are means over all seeds."
        )
    said = (
        f"Paired: both runs have the same clients in {_say_seeds(comparison.seeds)}; a difference is the mean over "
        "these clients, ± its standard error over clients and seeds."
    )
    if comparison.apart:
        said += f" Left out, because in one run only or with different clients: {_say_seeds(comparison.apart)}."
    if not all(change.pairs for change in changes):
        said += " Differences without client counts are unpaired and over all seeds."
    return said


def _say_seeds(seeds: Sequence[str]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}"


def _say_setting(value: Any) -> str:
    return "unset" if _is_unset(value) else say_value(value)


def _match_seeds(a: Shown, b: Shown) -> tuple[list[str], list[str]]:
    """Seeds with the same manifest in both runs, and the others."""
    ours, theirs = (shown.provenance.get("manifests") or {} for shown in (a, b))
    every = dict.fromkeys(str(seed) for seed in (*a.seeds, *b.seeds))
    same = [seed for seed in every if seed in ours and ours[seed] == theirs.get(seed)]
    return same, [seed for seed in every if seed not in same]


def _list_own(one: Shown, other: Shown) -> list[str]:
    methods = [name for method, name in one.methods.items() if method not in other.methods]
    return methods + [name for test, name in one.tests.items() if test not in other.tests]


def _list_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    pairs = {name: (ours.get(name), theirs.get(name)) for name in {**ours, **theirs} if name not in WHERE}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and not all(map(_is_unset, pair))}


def _is_unset(value: Any) -> bool:
    """An empty list counts as unset."""
    return value is None or value in ("", [], ())


def _measure_change(a: Shown, b: Shown, method: str, test: str, seeds: Sequence[str]) -> Change:
    by_seed = [pairs for seed in seeds if (pairs := _pair_clients(a, b, method, test, seed))]
    pairs = [pair for some in by_seed for pair in some]
    if not pairs:
        before, after = a.scores[method][test].mean, b.scores[method][test].mean
        return Change(before, after, after - before, pairs=0)
    more = [after - before for before, after in pairs]
    before, after = (fmean(fmean(pair[i] for pair in some) for some in by_seed) for i in (0, 1))  # as in all tables
    error = stdev(more) / math.sqrt(len(more)) if len(more) > 1 else None
    gained, lost = sum(each > 0 for each in more), sum(each < 0 for each in more)
    return Change(before, after, after - before, len(pairs), error, gained, lost)


def _pair_clients(a: Shown, b: Shown, method: str, test: str, seed: str) -> list[tuple[float, float]]:
    ours, theirs = (
        run.clients[seed].scores.get(method, {}).get(test, ()) if seed in run.clients else () for run in (a, b)
    )
    both = zip(ours, theirs, strict=False)
    return [(before, after) for before, after in both if before is not None and after is not None]
