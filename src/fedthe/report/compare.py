"""Two runs side by side: differences, whether on the same clients, and which settings differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..text import clean, say_value
from . import cells
from .data import Shown
from .formats import LONGEST, escape_markdown, write_markdown_table

if TYPE_CHECKING:
    from ..study.show import Grid

WHERE = ("name", "out", "keep", "checkpoint_seconds", "methods")  # settings that change no number


@dataclass(frozen=True)
class Change:
    """One method on one test, in percent. A paired change is over the clients of the seeds that both runs share."""

    a: float
    b: float
    more: float  # b - a
    pairs: int  # clients in both runs; 0 if unpaired
    error: float | None = None  # the standard error of `more` over clients and seeds
    gained: int = 0  # clients on which b is better
    lost: int = 0


@dataclass(frozen=True)
class Comparison:
    names: tuple[str, str]
    methods: Mapping[str, str]  # in both runs, display names by id
    tests: Mapping[str, str]
    changes: Mapping[str, Mapping[str, Change]]  # by method and test
    seeds: Sequence[str]  # whose clients are the same in both, by their manifests
    apart: Sequence[str]  # other seeds: in one run only, or with different clients
    settings: Mapping[str, tuple[Any, Any]]  # that differ
    only: tuple[Sequence[str], Sequence[str]]  # names of methods and tests in one run only
    renamed: Mapping[str, tuple[str, str]]  # tests of one id that are not the same test


def compare(a: Shown, b: Shown) -> Comparison:
    """The difference b - a for each method and test in both."""
    first, second = cells.number_names([clean(a.name), clean(b.name)])
    names = first, second
    seeds, apart = _match_seeds(a, b)
    methods = _share("method", names, a.methods, b.methods, (a.scores, b.scores))
    tests = _share("test", names, a.tests, b.tests, (_list_tests(a), _list_tests(b)))
    changes: dict[str, dict[str, Change]] = {}
    for method in methods:
        for test in tests:
            if test in a.scores[method] and test in b.scores[method]:
                changes.setdefault(method, {})[test] = _measure_change(a, b, method, test, seeds)
    if not changes:
        raise InputError(f"{names[0]} and {names[1]} share no method that answered the same test in both.")
    return Comparison(
        names=names,
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
            numbers = cells.say_number(change.a), cells.say_number(change.b), _say_more(change)
            counts = f"{change.gained} / {change.lost}" if change.pairs else cells.NOTHING
            rows.append([name, *numbers, counts])
    return ["", *comparison.names, "difference", "up / down"], rows


def write_markdown(comparison: Comparison) -> str:
    """The table of `lay_out`, and the remarks below it."""
    a, b = map(escape_markdown, comparison.names)
    head, rows = lay_out(comparison)
    table = write_markdown_table([*map(escape_markdown, head)], [[escape_markdown(row[0]), *row[1:]] for row in rows])
    remarks = [f"- {escape_markdown(remark)}" for remark in list_remarks(comparison)]
    return "\n\n".join([f"# {b} compared with {a}", table, "\n".join(remarks)]) + "\n"


def list_remarks(comparison: Comparison) -> list[str]:
    """What to know about the differences, the most important first."""
    a, b = comparison.names
    remarks = [_say_pairing(comparison)]
    remarks += [f"{test} is {ours} in {a} and {theirs} in {b}." for test, (ours, theirs) in comparison.renamed.items()]
    for setting, (before, after) in comparison.settings.items():
        remarks.append(f"{setting}: {_say_setting(before)} in {a}, {_say_setting(after)} in {b}.")
    if not comparison.settings:
        remarks.append("No setting differs.")
    remarks += [
        f"Only in {name}: {', '.join(own)}." for name, own in zip(comparison.names, comparison.only, strict=True) if own
    ]
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


def _say_more(change: Change) -> str:
    return cells.say_change(change.more) + (f" ± {change.error:.1f}" if change.error is not None else "")


def _say_setting(value: Any) -> str:
    return "unset" if _is_unset(value) else say_value(value)


def _match_seeds(a: Shown, b: Shown) -> tuple[list[str], list[str]]:
    """Seeds with the same manifest in both runs, so the same clients; and the others."""
    ours, theirs = (shown.provenance.get("manifests") or {} for shown in (a, b))
    every = dict.fromkeys(str(seed) for seed in (*a.seeds, *b.seeds))
    same = [seed for seed in every if seed in ours and ours[seed] == theirs.get(seed)]
    return same, [seed for seed in every if seed not in same]


def _share(
    kind: str,
    runs: tuple[str, str],
    ours: Mapping[str, str],
    theirs: Mapping[str, str],
    measured: tuple[Iterable[str], Iterable[str]],
) -> dict[str, str]:
    shared = {each: name for each, name in ours.items() if each in theirs and all(each in some for some in measured)}
    if not shared:
        raise InputError(f"{runs[0]} and {runs[1]} share no {kind}, so there is nothing to compare.")
    return shared


def _list_tests(shown: Shown) -> set[str]:
    return {test for scores in shown.scores.values() for test in scores}


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
    differences = [after - before for before, after in pairs]
    before, after = (fmean(fmean(pair[i] for pair in some) for some in by_seed) for i in (0, 1))  # as in all tables
    return Change(
        before,
        after,
        after - before,
        len(pairs),
        stdev(differences) / math.sqrt(len(pairs)) if len(pairs) > 1 else None,
        sum(each > 0 for each in differences),
        sum(each < 0 for each in differences),
    )


def _pair_clients(a: Shown, b: Shown, method: str, test: str, seed: str) -> list[tuple[float, float]]:
    ours, theirs = (
        run.clients[seed].scores.get(method, {}).get(test, ()) if seed in run.clients else () for run in (a, b)
    )
    both = zip(ours, theirs, strict=False)
    return [(before, after) for before, after in both if before is not None and after is not None]
