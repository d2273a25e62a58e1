"""The tables of the FedTHE paper: what each of them needs to run, and ours beside the paper's."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from ..config import Config, make_config
from ..errors import InputError
from ..nets.make import MODELS
from ..text import find_nearest

AVERAGE = "average_over_tests"  # a column: the mean over the tests, and the deviation over them
KEYS = ("dirichlet", "dataset", "size", "clients", "rounds", "participation", "personal_epochs")
SEVERITY = "severity"  # the columns severity1 to severity5 are runs of their own

Cell = tuple[float, float]  # percent: the mean, and the standard deviation over seeds
Ours = tuple[float, float | None]  # the same; a single seed has no deviation


@dataclass(frozen=True)
class Table:
    """A table as the paper prints it."""

    id: str
    title: str
    setting: Mapping[str, Any]
    columns: tuple[str, ...]
    rows: Mapping[str, Mapping[str, Cell]]  # by method, as the paper names it, and column

    @property
    def tests(self) -> tuple[str, ...]:
        return tuple(column for column in self.columns if column != AVERAGE)


PAPERS_SEVEN = ("fedavg_ft", "fedrod", "fedrep", "memo_p", "t3a", "fedthe", "fedthe_plus")
# Tables that the paper does not have: how its ImageNet experiments go where ImageNet is not at hand.
OWN_TABLES = {
    "tiny-imagenet-20": Table(
        "tiny-imagenet-20",
        "ResNet20-GN (width 4) on 20 classes of Tiny-ImageNet at 32 pixels, Dir(1.0)",
        {
            "dataset": "tiny_imagenet",
            "size": 32,
            "model": "resnet20_gn x4",
            "clients": 20,
            "dirichlet": 1.0,
            "rounds": 100,
            "participation": 1.0,
        },
        ("original", "corrupted", "ooc", "mixture"),
        {method: {} for method in PAPERS_SEVEN},
    )
}


@dataclass(frozen=True)
class Case:
    """One run, and which columns of the table come from which of its tests."""

    config: Config
    columns: Mapping[str, str]


@cache
def load_tables() -> dict[str, Table]:
    """All tables of the paper, by id."""
    text = resources.files(__package__).joinpath("paper_tables.json").read_text(encoding="utf-8")
    return {
        each["id"]: Table(
            each["id"],
            each["title"],
            each["setting"],
            tuple(each["columns"]),
            {
                row: {column: (cell[0], cell[1]) for column, cell in cells.items()}
                for row, cells in each["rows"].items()
            },
        )
        for each in json.loads(text)["tables"]
    }


def find_table(name: str) -> Table:
    tables = load_tables() | OWN_TABLES
    if name not in tables:
        raise InputError(f"there is no table {name!r}; {find_nearest(name, tables)}")
    return tables[name]


def method_of(row: str) -> str:
    """The method that a row of the paper is: "(9) (8) with SLW = fedthe" is ablation_9."""
    return f"ablation_{row[1 : row.index(')')]}" if row.startswith("(") else row


def plan_cases(table: Table, methods: Sequence[str] = (), **settings: Any) -> list[Case]:
    """The runs that a table needs. `methods` are rows of the table, or methods; settings change those of the paper."""
    rows = pick_rows(table, methods)
    base = {key: table.setting[key] for key in KEYS if key in table.setting} | MODELS[table.setting["model"]]
    base |= {key: table.setting[key] for key in ("train_fraction", "test_fraction") if key in table.setting}
    base |= {"methods": [method_of(row) for row in rows], "seeds": [0, 1, 2], **settings}
    if table.columns[0].startswith(SEVERITY) and {"severity", "tests"} & settings.keys():
        raise InputError(f"{table.id} is about severities 1 to 5 of one test; leave severity and tests out.")
    if not table.columns[0].startswith(SEVERITY):
        return [Case(make_config(base), {test: test for test in table.tests})]
    return [
        # both tests that tables of severities show, so that they share the answers
        Case(
            make_config({**base, "severity": int(column.removeprefix(SEVERITY)), "tests": ["corrupted", "mixture"]}),
            {column: table.setting["test"]},
        )
        for column in table.columns
    ]


def pick_rows(table: Table, methods: Sequence[str]) -> list[str]:
    """Rows of the table by the paper's names or ours; all without any."""
    names = {method_of(row): row for row in table.rows} | {row: row for row in table.rows}
    for method in methods:
        if method not in names:
            raise InputError(f"{table.id} has no row {method!r}; {find_nearest(method, names)}")
    chosen = {names[method] for method in methods}
    return [row for row in table.rows if not methods or row in chosen]


def pick_tables(methods: Sequence[str]) -> list[tuple[Table, list[str]]]:
    """Every table that has one of the methods, with those it has; all tables, whole, without any."""
    tables = load_tables().values()
    known = {name for table in tables for row in table.rows for name in (row, method_of(row))}
    for method in methods:
        if method not in known:
            raise InputError(f"no table has a row {method!r}; {find_nearest(method, sorted(known))}")
    found = []
    for table in tables:
        names = {*table.rows, *map(method_of, table.rows)}
        here = [method for method in methods if method in names]
        if here or not methods:
            found.append((table, here))
    return found


def fill_table(
    table: Table, found: Sequence[tuple[Case, Mapping[str, Mapping[str, Ours]]]]
) -> dict[str, dict[str, Ours]]:
    """Ours, by row and column, from the (mean, std) by method and test of each case."""
    filled: dict[str, dict[str, Ours]] = {}
    for row in table.rows:
        cells = {
            column: scores[method_of(row)][test]
            for case, scores in found
            for column, test in case.columns.items()
            if test in scores.get(method_of(row), {})
        }
        if cells:
            filled[row] = {column: cells[column] for column in table.tests if column in cells}
            if AVERAGE in table.columns and len(filled[row]) == len(table.tests):
                means = [mean for mean, _ in filled[row].values()]
                # of a sample, as the paper's numbers are; over seeds it is numpy's, of all there are
                filled[row][AVERAGE] = (statistics.mean(means), statistics.stdev(means))
    return filled
