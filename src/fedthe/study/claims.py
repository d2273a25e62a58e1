"""Judge a claim of the paper by our records: both numbers, the interval of the difference, and a verdict.

A claim has parts, each a comparison of two methods on one test. Differences are paired by seed and client, with the
intervals of `fedthe.statistics`. A part holds if its whole interval bears it out, not its mean alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from .. import store
from ..names import name_method
from ..statistics import ByTest, Interval, bootstrap, pair, pair_averages
from ..text import say_points
from .reproduce import read_record
from .tables import AVERAGE, MAIN_TESTS, Table, find_table, method_of

LEVEL = 1.0  # points: methods that differ by no more are on par
TESTS = {AVERAGE: "average", "corrupted_ooc": "corrupted ooc"}


@dataclass(frozen=True)
class Record:
    """A table as we measured it, beside the paper's."""

    table: Table
    clients: Mapping[str, ByTest]  # accuracy by method, test and seed

    @property
    def methods(self) -> list[str]:
        return list(self.clients)

    def score(self, method: str, test: str, seeds: Sequence[int] | None = None) -> float:
        """The mean over clients, then over seeds, all or these; of AVERAGE, over the main tests."""
        if test == AVERAGE:
            return fmean(self.score(method, each, seeds) for each in self._averaged(method))
        every = self.clients[method][test]
        picked = every.values() if seeds is None else [every[str(seed)] for seed in seeds]
        return fmean(fmean(each for each in clients if each is not None) for clients in picked)

    def paper(self, method: str, test: str) -> float | None:
        """The paper's number; None if it has none."""
        cells = {method_of(row): of for row, of in self.table.rows.items()}.get(method, {})
        if test == AVERAGE and cells.keys() >= set(MAIN_TESTS):
            return fmean(cells[each][0] for each in MAIN_TESTS)
        return cells[test][0] if test in cells else None

    def best(self, test: str, methods: Iterable[str]) -> str:
        return max(methods, key=lambda method: self.score(method, test))

    def papers_best(self, test: str, methods: Iterable[str]) -> str | None:
        known = {method: number for method in methods if (number := self.paper(method, test)) is not None}
        return max(known, key=lambda method: known[method]) if known else None

    def gap(self, a: str, b: str, test: str) -> Interval:
        """a - b on a test, or on the average of the main tests."""
        one, other = self.clients[a], self.clients[b]
        pairs = pair_averages(one, other, self._averaged(a)) if test == AVERAGE else pair(one[test], other[test])
        return bootstrap([each[:, 0] - each[:, 1] for each in pairs])

    def _averaged(self, method: str) -> list[str]:
        """The five tests of the main tables, without those that the data lacks."""
        return [test for test in MAIN_TESTS if test in self.clients[method]]


@dataclass(frozen=True)
class Book:
    """All records in a folder. Those that are not there yet are left out of claims."""

    folder: Path
    _read: dict[str, Record] = field(default_factory=dict)

    def __contains__(self, id: str) -> bool:
        return (self.folder / f"{id}.json").exists()

    def __getitem__(self, id: str) -> Record:
        if id not in self._read:
            table = find_table(Path(id).name)
            record = read_record(table, (self.folder / id).parent)
            clients: dict[str, dict[str, Any]] = {}
            for case in record["cases"]:
                columns = case["columns"] if len(record["cases"]) > 1 else {}  # of severities
                for method, tests in case["clients"].items():
                    named = {column: tests[test] for column, test in columns.items()} if columns else tests
                    clients.setdefault(method, {}).update(named)
            self._read[id] = Record(table, clients)
        return self._read[id]

    def figure(self, id: str) -> dict[str, Any]:
        return dict((store.read_sealed(self.folder / "figures" / f"{id}.json") or {})["data"])


@dataclass(frozen=True)
class Part:
    """One comparison that a claim makes."""

    where: str  # the setting, the test, or both
    ours: str
    holds: bool | None  # None: the interval leaves it open
    other: str = ""  # what ours is compared with
    gap: str = ""  # the difference, with its interval
    paper: str = ""  # the difference in the paper


@dataclass(frozen=True)
class Claim:
    says: str  # what the paper says
    judge: Callable[[Book], Sequence[Part]]
    remark: str = ""  # what the numbers do not say


def give_verdict(parts: Sequence[Part]) -> str:
    """In a word, from how many parts hold, how many are contradicted, and how many are open."""
    held, wrong = (sum(part.holds is each for part in parts) for each in (True, False))
    if held == len(parts):
        return "**yes**"
    if wrong == len(parts):
        return "**no**"
    contradicted = f"; {wrong} contradicted" if wrong else ""
    return f"**{'partly' if held else 'not shown'}**: {held} of {len(parts)} hold{contradicted}"


Rule = Callable[[Interval], bool | None]  # whether an interval bears a part out; None: it leaves it open


def exceeds(least: float) -> Rule:
    """By more than `least` points, with 95 % certainty."""

    def judge(gap: Interval) -> bool | None:
        if gap.low is None or gap.high is None:
            return None
        return True if gap.low > least else False if gap.high < least else None

    return judge


is_ahead, is_no_worse = exceeds(0.0), exceeds(-LEVEL)


def is_level(gap: Interval) -> bool | None:
    """No more than a point apart."""
    if gap.low is None or gap.high is None:
        return None
    inside, outside = gap.low > -LEVEL and gap.high < LEVEL, gap.low > LEVEL or gap.high < -LEVEL
    return True if inside else False if outside else None


def compare(
    book: Book, label: str, id: str, a: str, b: str | Sequence[str], test: str = AVERAGE, rule: Rule = is_ahead
) -> list[Part]:
    """Method a against b, or against the best of several; nothing if a record or method is not there."""
    return compare_in(book[id], label, a, b, test, rule) if id in book else []


def compare_in(
    record: Record, label: str, a: str, b: str | Sequence[str], test: str = AVERAGE, rule: Rule = is_ahead
) -> list[Part]:
    rivals = [method for method in ([b] if isinstance(b, str) else b) if method != a]
    known = [method for method in rivals if method in record.clients]
    if a not in record.clients or not known:
        return []
    other = record.best(test, known)
    gap = record.gap(a, other, test)
    mine, theirs = record.paper(a, test), record.papers_best(test, rivals)
    paper = ""
    if mine is not None and theirs is not None:
        over = "" if theirs == other or isinstance(b, str) else f" over {name_row(theirs)}"
        paper = f"{say_points(mine - (record.paper(theirs, test) or 0), '+')}{over}"
    ours, others = (f"{name_row(method)} {say_points(record.score(method, test))}" for method in (a, other))
    return [Part(label, ours, rule(gap), others, say_gap(gap), paper)]


def say_gap(gap: Interval) -> str:
    said = say_points(gap.mean, "+")
    return said if gap.low is None or gap.high is None else f"{said} [{say_points(gap.low)}, {say_points(gap.high)}]"


def say_each(numbers: Sequence[float | None], sign: str = "", between: str = ", ") -> str:
    return between.join(say_points(number, sign) for number in numbers if number is not None)


def name_row(method: str) -> str:
    """Of a method, or of a row of the ablation: ablation_9 is (9)."""
    return f"({method.removeprefix('ablation_')})" if method.startswith("ablation_") else name_method(method)


def name_column(test: str) -> str:
    return TESTS.get(test, test)


def write_claims(claims: Sequence[Claim], book: Book) -> str:
    """Two Markdown tables, of the claims for which there are records: verdicts, then what they rest on."""
    judged = [(claim, parts) for claim in claims if (parts := claim.judge(book))]
    lines = ["| | the paper says | verdict |", "|---|---|---|"]
    for n, (claim, parts) in enumerate(judged, 1):
        remark = f". {claim.remark}" if claim.remark else ""
        lines.append(f"| {n} | {claim.says} | {give_verdict(parts)}{remark} |")
    lines += [
        "",
        "What they rest on:",
        "",
        "| | where | ours | against | difference | paper | |",
        "|---|---|---|---|---|---|---|",
    ]
    for n, (_, parts) in enumerate(judged, 1):
        for part in parts:
            holds = {True: "✓", False: "✗", None: "open"}[part.holds]
            lines.append(f"| {n} | {part.where} | {part.ours} | {part.other} | {part.gap} | {part.paper} | {holds} |")
    return "\n".join(lines)
