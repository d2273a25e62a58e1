"""Compare two runs, or two methods of a run: differences in accuracy, paired by client, and in settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..experiment.notebook import Comparison as MethodComparison
from ..experiment.notebook import explain_differences, say_interval, say_p
from ..statistics import Difference, compare_pairs, pair
from ..text import clean, find_nearest, say_value
from . import cells
from .data import Shown

if TYPE_CHECKING:
    from ..study.show import Grid

LONGEST = 2000  # characters of a remark
WHERE = ("name", "out", "keep", "checkpoint_seconds", "methods")  # settings that change no number


@dataclass(frozen=True)
class Change:
    """Accuracy (%) of one method on one test in both runs; if paired, over the clients that both have."""

    a: float
    b: float
    more: float  # b - a
    pairs: int  # clients that both runs have; 0 if unpaired
    low: float | None = None  # the 95 % interval of `more`; None if unpaired, or for a single pair
    high: float | None = None
    p: float | None = None
    p_holm: float | None = None  # corrected for all methods and tests compared
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
    changes = _measure_changes(a, b, list(methods), list(tests), seeds)
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
    """A row for each method and test: a, b, b - a with its interval and p, and clients that gained and lost."""
    rows = []
    for method, changes in comparison.changes.items():
        for test, change in changes.items():
            name = f"{clean(comparison.methods[method], 30)}, {clean(comparison.tests[test], 40)}"
            counts = f"{change.gained} / {change.lost}" if change.pairs else cells.NOTHING
            numbers = cells.say_number(change.a), cells.say_number(change.b), cells.say_change(change.more)
            rows.append([name, *numbers, say_interval(change.low, change.high), say_p(change.p_holm), counts])
    return ["", *comparison.names, "difference", "95 % interval", "p (Holm)", "up / down"], rows


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
    said = f"Paired: both runs have the same clients in {_say_seeds(comparison.seeds)}. " + explain_differences(
        sum(change.pairs > 0 for change in changes), len(comparison.seeds)
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


def _measure_changes(
    a: Shown, b: Shown, methods: Sequence[str], tests: Sequence[str], seeds: Sequence[str]
) -> dict[str, dict[str, Change]]:
    """By method and test; paired by the clients of these seeds, where there are any."""
    answered = [(m, t) for m in methods for t in tests if t in a.scores[m] and t in b.scores[m]]
    ours, theirs = ({method: cells.list_seeds(run, method) for method in methods} for run in (a, b))
    pairs = {}
    for method, test in answered:
        before, after = ({s: of[method].get(test, {}).get(s, ()) for s in seeds} for of in (ours, theirs))
        if both := pair(after, before):
            pairs[method, test] = both
    paired = compare_pairs(pairs)
    changes: dict[str, dict[str, Change]] = {}
    for method, test in answered:
        found = paired.get((method, test))
        means = a.scores[method][test].mean, b.scores[method][test].mean
        change = _turn(found) if found else Change(*means, means[1] - means[0], pairs=0)
        changes.setdefault(method, {})[test] = change
    return changes


def _turn(found: Difference) -> Change:
    """From a difference after - before."""
    interval = found.low, found.high, found.p, found.p_holm
    return Change(found.b, found.a, found.difference, found.clients, *interval, found.higher, found.lower)


def compare_methods(shown: Shown, a: str, b: str) -> MethodComparison:
    """Two methods of a run, a - b, on each test that both answered."""
    for method in (a, b):
        if method not in shown.scores:
            known = find_nearest(method, shown.scores)
            raise InputError(f"{clean(shown.name)} has no results of {clean(method)!r}; {known}")
    if a == b:
        raise InputError(f"{a} cannot be compared with itself; name two methods.")
    ours, theirs = cells.list_seeds(shown, a), cells.list_seeds(shown, b)
    pairs = {test: both for test in shown.tests if (both := pair(ours.get(test, {}), theirs.get(test, {})))}
    if not pairs:
        raise InputError(f"{a} and {b} share no seed, so there is nothing to compare.")
    return MethodComparison(a, b, compare_pairs(pairs))


def compare_all(shown: Shown) -> dict[str, dict[str, Mapping[str, Difference]]]:
    """Every pair of methods, in the order of the run; without those that share no seed."""
    found: dict[str, dict[str, Mapping[str, Difference]]] = {}
    for a, b in combinations([method for method in shown.methods if method in shown.scores], 2):
        try:
            found.setdefault(a, {})[b] = compare_methods(shown, a, b).rows
        except InputError:
            continue
    return found


def find_leads(shown: Shown) -> dict[str, dict[str, Difference]]:
    """By method and test: its difference from the best other method of that test, each compared on its own."""
    leads: dict[str, dict[str, Difference]] = {}
    for test in shown.tests:
        means = {m: scores[test].mean for m, scores in shown.scores.items() if test in scores}
        ranked = sorted(means, key=lambda method: -means[method])
        for method in ranked if len(ranked) > 1 else ():
            other = ranked[0] if method != ranked[0] else ranked[1]
            both = pair(cells.list_seeds(shown, method).get(test, {}), cells.list_seeds(shown, other).get(test, {}))
            if both:
                leads.setdefault(method, {})[test] = compare_pairs({test: both})[test]
    return leads
