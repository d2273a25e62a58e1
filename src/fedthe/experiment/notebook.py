"""Results in a notebook: data frames, tables as text and HTML, and the comparison of two methods."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError
from ..names import name_test
from ..statistics import Difference, compare_pairs, find_average_leader, find_leader, pair
from ..text import clean, say_points
from .samples import check_known
from .scores import count_clients, find_group, say_clients
from .tables import find_short_streams, list_clients

if TYPE_CHECKING:
    from .results import Results

DAGGER = "†"
AUROC = "AUROC (%): how well the probability of the answer tells known classes from the unknown one; 50 is chance."
BOLD = "the best of a column, if the 95 % interval of its lead over the best other (by client and seed) excludes 0"


def make_frame(columns: Mapping[str, Any]) -> Any:
    """A pandas DataFrame if pandas is installed, else a dict of NumPy arrays."""
    try:
        import pandas  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        return {name: np.asarray(values) for name, values in columns.items()}
    return pandas.DataFrame(dict(columns))


@dataclass(frozen=True)
class Cell:
    text: str
    bold: bool = False


@dataclass(frozen=True)
class Grid:
    """A small table: a title, a head, rows that begin with a name, and notes below."""

    title: str
    head: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    notes: Sequence[str] = ()

    def write_text(self) -> str:
        """With a star behind what would be bold."""
        lines = [["", *self.head]]
        lines += [[name, *(f"{cell.text}{'*' if cell.bold else ' '}" for cell in cells)] for name, cells in self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        body = [
            "  ".join(
                [
                    line[0].ljust(widths[0]),
                    *(word.rjust(width) for word, width in zip(line[1:], widths[1:], strict=True)),
                ]
            )
            for line in lines
        ]
        notes = [note.replace("Bold:", "*") for note in self.notes]
        return "\n".join([self.title, "", *(line.rstrip() for line in body), "", *notes]).rstrip()

    def write_html(self) -> str:
        head = "".join(f"<th>{html.escape(each)}</th>" for each in ("", *self.head))
        rows = "".join(
            f"<tr><th>{html.escape(name)}</th>{''.join(map(_write_cell, cells))}</tr>" for name, cells in self.rows
        )
        notes = "".join(f"<br>{html.escape(note)}" for note in self.notes)
        return (
            f"<p><b>{html.escape(self.title)}</b></p><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
            f"<p><small>{notes.removeprefix('<br>')}</small></p>"
        )


def _write_cell(cell: Cell) -> str:
    said = html.escape(cell.text)
    return f"<td>{f'<b>{said}</b>' if cell.bold else said}</td>"


def name_run(results: Results) -> str:
    """Its name, with the group of clients if that is not the usual one."""
    group, config = find_group(results.rows), results.config
    name = clean(config.name if config.out is None else results.folder.name)
    return name if group == "trained" else f"{name}, {group} clients"


def lay_out(results: Results) -> Grid:
    """The table of accuracies."""
    config, scores = results.config, results.scores()
    clients, short = list_clients(results.rows), find_short_streams(results.rows)
    best = {t: find_leader({m: of[t] for m, of in clients.items() if t in of}) for t in results.tests}
    best_average = find_average_leader(clients, results.tests)

    def say(method: str, test: str) -> Cell:
        if test not in scores[method]:
            return Cell("-")
        mean, std = scores[method][test]
        return Cell(" ± ".join(say_points(each) for each in (mean, std) if each is not None), best[test] == method)

    def average(method: str) -> Cell:
        means = [mean for mean, _ in scores[method].values()]
        whole = len(means) == len(results.tests)
        return Cell(say_points(float(np.mean(means))) if whole else "-", best_average == method)

    areas = results.rejection()
    open_sets = [test for test in results.tests if any(test in of for of in areas.values())]

    def say_areas(method: str) -> list[Cell]:
        found = [areas.get(method, {}).get(test) for test in open_sets]
        return [Cell("-" if area is None else f"{area:.1f}") for area in found]

    heads = [f"{clean(test)}{DAGGER if test in short else ''}" for test in results.tests]
    seeds = f"{len(config.seeds)} seeds" if len(config.seeds) > 1 else f"seed {config.seeds[0]}"
    count = f"{len(results.methods)} method{'s' if len(results.methods) != 1 else ''}"
    deviation = " and seeds ± standard deviation over seeds" if len(config.seeds) > 1 else ""
    some = bool(config.unseen and results.rows)  # of the clients: one group
    notes = [f"Accuracy (%), mean over clients{deviation}."]
    notes += [f"The numbers are of {say_clients(results.rows, config.client_count)}."] if some else []
    rows = [
        (clean(method), [*(say(method, test) for test in results.tests), average(method), *say_areas(method)])
        for method in scores
    ]
    if any(cell.bold for _, cells in rows for cell in cells):
        notes.append(f"Bold: {BOLD}.")
    notes += [f"{DAGGER} {clean(name_test(test))}: {said}." for test, said in short.items()]
    notes += [f"Failed: {who}: {clean(why, 200)}" for who, why in results.failures.items()]
    if open_sets:
        notes.append(AUROC)
    who = f"{count_clients(results.rows)} of {config.clients} clients" if some else f"{config.clients} clients"
    title = f"{name_run(results)}: {count} on {clean(config.dataset)}, {who}, {seeds}"
    return Grid(title, [*heads, "average", *(f"{clean(test)} AUROC" for test in open_sets)], rows, notes)


@dataclass(frozen=True)
class Comparison:
    """Two methods of a run on each test: a - b, paired by client and seed.

    `rows` holds a `Difference` by test: the means, the difference, its 95 % interval (`low`, `high`; a bootstrap over
    seeds and the clients of each), the p-value of the same bootstrap, the p-value corrected by Holm's method over the
    tests, and the numbers of clients and seeds.
    """

    a: str
    b: str
    rows: Mapping[str, Difference]

    def frame(self) -> Any:
        """One row per test: a pandas DataFrame if pandas is installed, else a dict of columns."""
        each = [asdict(row) for row in self.rows.values()]
        columns = {name: [row[name] for row in each] for name in each[0]}
        return make_frame({"test": list(self.rows), **columns})

    def lay_out(self) -> Grid:
        rows = [(clean(name_test(test)), [*map(Cell, say_difference(row))]) for test, row in self.rows.items()]
        a, b = clean(self.a), clean(self.b)
        return Grid(f"{a} compared with {b}", [a, b, *HEAD], rows, [self.explain()])

    def explain(self) -> str:
        """What the numbers are."""
        return explain_differences(len(self.rows), max(row.seeds for row in self.rows.values()))

    def __repr__(self) -> str:
        return self.lay_out().write_text()

    def _repr_html_(self) -> str:
        return self.lay_out().write_html()


def compare_methods(results: Results, a: str, b: str) -> Comparison:
    for method in (a, b):
        check_known("method", method, results.methods)
    if a == b:
        raise InputError(f"{a} cannot be compared with itself; name two methods.")
    clients = list_clients(results.rows)
    pairs = {test: pair(clients[a][test], clients[b].get(test, {})) for test in clients[a]}
    known = {test: both for test, both in pairs.items() if both}
    if not known:
        raise InputError(f"{a} and {b} share no seed, so there is nothing to compare.")
    return Comparison(a, b, compare_pairs(known))


HEAD = ("difference", "95 % interval", "p (Holm)", "up / down")


def say_difference(row: Difference) -> list[str]:
    """a, b, and what HEAD names."""
    numbers = [say_points(row.a), say_points(row.b), say_change(row.difference), say_interval(row.low, row.high)]
    return [*numbers, say_p(row.p_holm), f"{row.higher} / {row.lower}"]


def explain_differences(comparisons: int, seeds: int) -> str:
    """What the numbers of a comparison are."""
    how = "a bootstrap over seeds, then over the clients of each"
    if seeds == 1:
        how = "a bootstrap over clients; it does not cover other seeds, since there is only one"
    return (
        f"Differences are paired by client and seed. Interval: {how}. p: from the same bootstrap, corrected by Holm's "
        f"method for {comparisons} comparison{'s' if comparisons != 1 else ''}. Up / down: clients with a higher and "
        "with a lower accuracy."
    )


def say_interval(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"{say_change(low)} to {say_change(high)}"


def say_change(change: float) -> str:
    """With its sign; what rounds to zero is +0.0, never -0.0."""
    return f"{round(change, 1) + 0.0:+.1f}"


def say_p(p: float | None) -> str:
    if p is None:
        return "-"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
