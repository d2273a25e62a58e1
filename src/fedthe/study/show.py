"""The paper's tables as text: our numbers beside the paper's, and what a table would cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from ..statistics import deviation
from ..text import say_points, say_seeds, say_value
from . import streams
from .bill import Bill
from .reproduce import say_unchecked
from .tables import AVERAGE, OWN_TABLES, Table

SHORT = {AVERAGE: "average", "corrupted_ooc": "corr. ooc", "imagenet_a": "A", "imagenet_r": "R", "imagenet_v2": "V2"}
SHORT |= streams.SHORT
WIDE = 6  # columns; a table with more has standard deviations below the means
Rows = list[list[str]]
Grid = tuple[list[str], Rows]  # a head, and rows
Number = Sequence[float]  # a mean and, where there is one, its standard deviation


def lay_out(table: Table, record: Mapping[str, Any]) -> Grid:
    """Ours ± the standard deviation over seeds; below, the paper's and the difference, where both are comparable."""
    head = ["", *(SHORT.get(column, column) for column in record["columns"])]
    if len(record["columns"]) <= WIDE:
        return head, _lay_out_rows(table, record, _say_cell)
    return [each.replace(" ", "\n") for each in head], _lay_out_rows(table, record, _say_high_cell)


def _lay_out_rows(table: Table, record: Mapping[str, Any], say: Callable[[Number, Number | None], str]) -> Rows:
    """Every row's name and cells. `say` gets our number and, where comparable, the paper's."""
    rows = []
    several = len(record["cases"][0]["config"]["seeds"]) > 1
    for row, measured in record["rows"].items():
        # older records of a single seed hold a standard deviation of 0
        cells = {
            test: [each for each in (cell if several or test == AVERAGE else cell[:1]) if each is not None]
            for test, cell in measured.items()
        }
        papers = {column: cell for column, cell in table.rows.get(row, {}).items() if column in record["compared"]}
        said = [say(cells[column], papers.get(column)) if column in cells else "-" for column in record["columns"]]
        rows.append([row, *said])
    return rows


def _say_cell(ours: Number, paper: Number | None) -> str:
    said = " ±".join(map(say_points, ours))
    return said if paper is None else f"{said}\n{say_points(paper[0])} {say_points(ours[0] - paper[0], '+')}"


def _say_high_cell(ours: Number, paper: Number | None) -> str:
    return _say_cell(ours, paper).replace(" ±", "\n±")


def say_spread(record: Mapping[str, Any]) -> str:
    """What ± means in a table. A single seed has no standard deviation over seeds."""
    several = len(record["cases"][0]["config"]["seeds"]) > 1
    return f"ours{' ± over seeds' if several else ', one seed'}, an average ± over tests"


def list_remarks(record: Mapping[str, Any]) -> list[str]:
    """What readers must know to judge the numbers."""
    remarks = [f"{column} is {name.removeprefix(column).strip(' ()')}." for column, name in record["names"].items()]
    apart = [column for column in record["columns"] if column not in record["compared"]]
    if apart and len(apart) < len(record["columns"]):
        named = ", ".join(SHORT.get(column, column) for column in apart)
        remarks.append(f"Not the paper's data, so not compared: {named}.")
    elif apart:
        own = record["id"] in OWN_TABLES
        remarks.append("Not in the paper." if own else "Not the paper's data, so nothing is compared.")
    if record["compared"] and record.get("unchecked"):
        remarks.append(say_unchecked(record["unchecked"]))
    if classes := record.get("effective_classes"):
        remarks.append(say_classes(classes))
    said = {
        name: ["default" if each is None else say_value(each) for each in both]
        for name, both in record["changed"].items()
    }
    if said:
        listed = ", ".join(f"{name} {ours} ({planned})" for name, (ours, planned) in said.items())
        whose = "this table's" if record.get("id") in OWN_TABLES else "the paper's"
        remarks.append(f"Not {whose} settings: {listed}.")
    for case in record["cases"]:
        asked = case["config"]["tests"] if "tests" in record["changed"] else ()
        beside = [test for test in asked or () if test not in case["columns"].values()]
        remarks += [f"Measured, but no column of this table: {', '.join(beside)}."] if beside else []
        remarks += [f"failed: {who}: {why}" for who, why in case["failures"].items()]
    return list(dict.fromkeys(remarks))


def say_classes(by_seed: Mapping[str, float]) -> str:
    spread = deviation([*by_seed.values()])
    said = f"{fmean(by_seed.values()):.1f}{'' if spread is None else f' ± {spread:.1f}'}"
    return f"Effective classes per client: {said} (exponential of the entropy of a client's mix)."


def lay_out_bills(bills: Mapping[str, Bill]) -> Grid:
    """What each table costs on top of those above it, and the sum."""
    total = sum(bills.values(), start=Bill(seconds=0))
    lines = [[name, *_say_bill(bill)] for name, bill in bills.items()]
    if len(bills) > 1:
        lines.append(["together", *_say_bill(total)])
    return ["", "trainings", "rounds", "images\ntrained", "samples\nanswered", "time here"], lines


def _say_bill(bill: Bill) -> list[str]:
    counts = [str(bill.trainings), str(bill.rounds), f"{bill.images / 1e6:.0f} M", f"{bill.samples / 1e3:.0f} k"]
    return [*counts, "?" if bill.seconds is None else say_duration(bill.seconds)]


def say_duration(seconds: float) -> str:
    for length, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def write_markdown(table: Table, record: Mapping[str, Any]) -> str:
    """A Markdown table: ours, and the difference from the paper's in brackets where comparable."""
    names = {column: record["names"].get(column, SHORT.get(column, column)) for column in record["columns"]}
    lines = ["| | " + " | ".join(names.values()) + " |", "|---|" + "---:|" * len(names)]
    lines += ["| " + " | ".join(row) + " |" for row in _lay_out_rows(table, record, _write_cell)]
    seeds = say_seeds(record["cases"][0]["config"]["seeds"])
    classes = record.get("effective_classes")
    lines += ["", f"{seeds.capitalize()}.{f' {say_classes(classes)}' if classes else ''}"]
    return "\n".join(lines)


def _write_cell(ours: Number, paper: Number | None) -> str:
    said = "±".join(map(say_points, ours))
    return said if paper is None else f"{said} ({say_points(ours[0] - paper[0], '+')})"
