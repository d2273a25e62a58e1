"""The table of results: methods by tests, the worst client, costs, and the paper's numbers below ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .. import cells
from ..data import Cost, Shown
from .markup import escape, frame, list_items, prefix

LONG = 30  # a table with more rows scrolls on its own, so that its head stays in sight


@dataclass(frozen=True)
class NumberCell:
    """A number, and how it is shown. A test's cell can show the worst client's number instead."""

    mean: float | None
    said: str
    worst: float | None = None  # None: the cell always shows `mean`
    small: str = ""

    def get(self, kind: str) -> float | None:
        return self.worst if kind == "worst" and self.worst is not None else self.mean


NOTHING = NumberCell(None, cells.NOTHING)


@dataclass(frozen=True)
class _Column:
    title: str
    cells: Sequence[NumberCell]
    bold: Sequence[bool] = ()  # none by default
    highest_first: bool = True  # when sorted


def show_results(runs: Sequence[Shown]) -> str:
    if not any(map(_has_scores, runs)):
        return frame("results", "Results", "<p>No method has finished, so there are no results to show.</p>")
    columns = _fill_columns(runs)
    heads = "".join(_write_head(title, "words") for title in ("method", "run")[: min(len(runs), 2)])
    heads += "".join(_write_head(escape(column.title), "" if column.highest_first else "least") for column in columns)
    rows = _write_rows(runs, columns)
    toggle = (
        '<div class="controls needs-script"><label class="control">Show <select id="shown-number">'
        '<option value="mean">mean over clients</option><option value="worst">worst client</option>'
        "</select></label></div>"
    )
    table = (
        f'<div class="scroll{" long" if len(rows) > LONG else ""}" tabindex="0" role="region" '
        'aria-label="Results of all methods">'
        '<table id="results-table" data-show="mean">'
        f"<caption><span>{_write_caption(runs)}</span></caption>"
        f"<thead><tr>{heads}</tr></thead><tbody>\n{chr(10).join(rows)}\n</tbody></table></div>"
    )
    return frame("results", "Results", f"{toggle}{table}{_explain(runs)}")


def _fill_columns(runs: Sequence[Shown]) -> list[_Column]:
    """Columns with at least one number, and in each a cell for every method of every run."""
    rows = [(shown, method) for shown in runs for method in shown.methods]
    leaders = [(cells.find_leaders(shown), method) for shown in runs for method in shown.methods]
    worst = [cells.average_of(*row, "worst") for row in rows]
    costs = [shown.costs.get(method, Cost()) for shown, method in rows]

    def embolden(place: str) -> list[bool]:
        return [found.get(place) == method for found, method in leaders]

    columns = [
        _Column(title, [_fill_cell(*row, test) for row in rows], embolden(test))
        for test, title in _join_tests(runs).items()
    ]
    columns += [
        _Column("average", [_fill_average(*row) for row in rows], embolden(cells.AVERAGE)),
        _Column("worst client", [NumberCell(each, cells.say_number(each)) for each in worst]),
        _Column("ms per sample", [NumberCell(cost.ms, cells.say_ms(cost)) for cost in costs], highest_first=False),
        _Column(
            "passes per sample",
            [NumberCell(_count_passes(cost), cells.say_passes(cost)) for cost in costs],
            highest_first=False,
        ),
    ]
    return [column for column in columns if any(cell.said != cells.NOTHING for cell in column.cells)]


def _write_rows(runs: Sequence[Shown], columns: Sequence[_Column]) -> list[str]:
    rows: list[str] = []
    for shown in runs:
        run = f'<td class="words">{escape(shown.name)}</td>' if len(runs) > 1 else ""
        for i, name in enumerate(shown.methods.values(), len(rows)):
            numbers = (_write_cell(each.cells[i], bool(each.bold) and each.bold[i]) for each in columns)
            rows.append(f'<tr><th scope="row">{escape(name)}</th>{run}{"".join(numbers)}</tr>')
    return rows


def _has_scores(shown: Shown) -> bool:
    return any(shown.scores.values())


def _write_head(title: str, kind: str) -> str:
    """The head of a column. A first click sorts numbers from the highest, "least" and "words" from the lowest."""
    kind = f' class="{kind}"' if kind else ""
    return f'<th scope="col"{kind}><button type="button">{title}</button></th>'


def _write_caption(runs: Sequence[Shown]) -> str:
    seeds = any(len(shown.seeds) > 1 for shown in runs)
    mean = "mean over clients" + (" and seeds ± standard deviation over seeds" if seeds else "")
    worst = "worst client of each test" + (", mean over seeds" if seeds else "")
    bold = escape(cells.explain_bold(runs))  # of means alone: the worst client has no interval
    return f'Accuracy (%), <span class="mean">{mean}. {bold}</span><span class="worst">{worst}.</span>'


def _join_tests(runs: Sequence[Shown]) -> dict[str, str]:
    """The tests of all runs, by name; by id if runs give a test different names. A dagger marks short streams."""
    titles: dict[str, str] = {}
    for shown in runs:
        for test, title in shown.tests.items():
            titles[test] = title if titles.get(test, title) == title else test
    short = {test for shown in runs for test in shown.short}
    return {test: f"{title}{cells.DAGGER if test in short else ''}" for test, title in titles.items()}


def _fill_cell(shown: Shown, method: str, test: str) -> NumberCell:
    score = shown.scores.get(method, {}).get(test)
    if score is None or not cells.is_known(score.mean):
        return NOTHING
    change = cells.difference(shown, method, test)
    paper = "" if change is None else f"paper {cells.say_number(score.mean - change)}, {cells.say_change(change)}"
    return NumberCell(score.mean, cells.say(score), score.worst, paper.replace("-", "−"))


def _fill_average(shown: Shown, method: str) -> NumberCell:
    mean = cells.average_of(shown, method)
    if len(shown.tests) < 2 or not cells.is_known(mean):
        return NOTHING
    return NumberCell(mean, cells.say_number(mean), cells.average_of(shown, method, "worst"))


def _count_passes(cost: Cost) -> float | None:
    return None if cost.forward is None else cost.forward + (cost.backward or 0)


def _write_cell(cell: NumberCell, bold: bool) -> str:
    values = {kind: cell.get(kind) for kind in ("mean", "worst")}
    sorts = "".join(f' data-{kind}="{value:.6g}"' for kind, value in values.items() if cells.is_known(value))
    number, *rest = cell.said.split(" ± ")
    mean = " ± ".join([f"<b>{number}</b>" if bold and cell != NOTHING else number, *rest])
    mean += f"<small>{cell.small}</small>" if cell.small else ""
    if cell.worst is None:
        return f"<td{sorts}>{mean}</td>"
    worst = cells.say_number(cell.worst)
    return f'<td{sorts}><span class="mean">{mean}</span><span class="worst">{worst}</span></td>'


def _explain(runs: Sequence[Shown]) -> str:
    """What the columns mean, and what to know before comparing with the paper."""
    several = len(runs) > 1
    of_run = {shown.name: f" of {escape(shown.name)}" if several else "" for shown in runs}
    lines = [
        f"Average{of_run[shown.name]}: mean over {', '.join(map(escape, shown.tests.values()))}."
        for shown in runs
        if len(shown.tests) > 1
    ]
    lines += [f"{prefix(shown, several)}{escape(line)}" for shown in runs for line in cells.explain_short(shown)]
    lines.append("Worst client: the lowest accuracy of any client on each test, averaged over tests.")
    if any(cost.forward is not None for shown in runs for cost in shown.costs.values()):
        lines.append("Passes: forward (+ backward) passes through the network.")
    for shown in runs:
        if shown.paper and shown.paper.cells:
            title = escape(shown.paper.title)
            lines.append(f"Small print{of_run[shown.name]}: the paper's number ({title}), and our difference from it.")
        remarks = shown.paper.remarks if shown.paper else ()
        lines += [f"{prefix(shown, several)}{escape(remark)}" for remark in remarks]
    lines += [f"{escape(shown.name)}: no method has finished." for shown in runs if not _has_scores(shown)]
    return f'<div class="remarks">{list_items(lines)}</div>'
