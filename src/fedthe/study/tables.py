"""The tables of the FedTHE paper: the runs that each needs, and our numbers in its rows and columns."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ..config import Config, make_config
from ..errors import InputError
from ..methods import METHODS, STUDIES
from ..names import METHOD_NAMES, NET_NAMES
from ..nets.make import MODELS
from ..specs import parse_spec
from ..text import clean, find_nearest
from . import deviations, judged, streams

AVERAGE = "average_over_tests"  # a column: mean and standard deviation over the tests
KEYS = ["dirichlet", "dataset", "size", "clients", "rounds", "participation", "personal_epochs"]
KEYS += ["train_fraction", "test_fraction", "tests", "unknown"]
SEVERITY = "severity"  # the columns severity1 to severity5 are separate runs
SEEDS = (0, 1, 2)  # as many as the paper has
MORE_SEEDS = tuple(range(8))  # of the tables that most claims rest on: see `pick_seeds`

Ours = tuple[float, float | None]  # percent: mean and standard deviation over seeds; None for a single seed


@dataclass(frozen=True)
class Table:
    """A table as the paper prints it."""

    id: str
    title: str
    setting: Mapping[str, Any]
    columns: tuple[str, ...]
    rows: Mapping[str, Mapping[str, tuple[float, float]]]  # by the paper's name of the method, and column: mean and std

    @property
    def tests(self) -> tuple[str, ...]:
        return tuple(column for column in self.columns if column != AVERAGE)


PAPERS_SEVEN = ("fedavg_ft", "fedrod", "fedrep", "memo_p", "t3a", "fedthe", "fedthe_plus")
PAPERS_MAIN = (
    *("fedavg", "gma", "memo_g", "fedavg_ft", "apfl", "fedrep", "ditto", "fedrod"),
    *("knn_per", "ttt_ft", "memo_p", "t3a", "fedthe", "fedthe_plus"),
)
NEED_NORMS = ("tent", "sar", "rotta")  # and so do not run on the CNN
MAIN_TESTS = ("original", "corrupted", "ooc", "natural", "mixture")


# Not in the paper.
OWN_TABLES = {
    # like its ImageNet experiments, on data that is easier to get
    "tiny-imagenet-20": Table(
        "tiny-imagenet-20",
        f"{NET_NAMES['resnet20_gn']} (width 4) on 20 classes of Tiny-ImageNet at 32 pixels, Dir(1.0)",
        judged.TINY,
        ("original", "corrupted", "ooc", "mixture"),
        {method: {} for method in PAPERS_SEVEN},
    ),
    "open-set": Table(
        "open-set", streams.OPEN_TITLE, streams.OPEN_SETTING, streams.OPEN, {method: {} for method in streams.METHODS}
    ),
    "streams": Table(
        "streams", streams.TITLE, streams.SETTING, streams.STREAMS, {method: {} for method in streams.METHODS}
    ),
    # with the records of main-dir0.1, these make one leaderboard
    "others-dir0.1": Table(
        "others-dir0.1",
        f"Methods that the paper's main table lacks, {NET_NAMES['cnn']} on CIFAR10, Dir(0.1)",
        streams.AS_USUAL,
        MAIN_TESTS,
        {method: {} for method in METHOD_NAMES if method not in (*PAPERS_MAIN, *NEED_NORMS)},
    ),
    # with arch-resnet20gn, on the trainings of FedAvg and FedTHE alone
    "others-resnet20gn": Table(
        "others-resnet20gn",
        f"Test-time adaptation that the paper's table lacks, {NET_NAMES['resnet20_gn']} on CIFAR10, Dir(1.0)",
        judged.SETTINGS["regime-resnet20gn"],
        MAIN_TESTS,
        {method: {} for method in ("lame", *NEED_NORMS, "fedthe_regime", "regime_memo")},
    ),
    "deviations": Table(
        "deviations", deviations.TITLE, deviations.SETTING, MAIN_TESTS, {method: {} for method in deviations.METHODS}
    ),
    **{
        id: Table(
            id,
            judged.title_of(setting),
            setting,
            tuple(test for test in judged.TESTS if test != "natural" or setting["dataset"] == "cifar10"),
            {method: {} for method in judged.METHODS},
        )
        for id, setting in judged.SETTINGS.items()
    },
}


@dataclass(frozen=True)
class TableCase:
    """One run, and which columns of the table come from which of its tests."""

    config: Config
    columns: Mapping[str, str]


@cache
def load_tables() -> dict[str, Table]:
    """All tables of the paper, by id."""
    text = resources.files(__package__).joinpath("paper_tables.json").read_text(encoding="utf-8")
    tables = {}
    for each in json.loads(text)["tables"]:
        rows = {row: {name: (mean, std) for name, (mean, std) in cells.items()} for row, cells in each["rows"].items()}
        tables[each["id"]] = Table(**each | {"columns": tuple(each["columns"]), "rows": rows})
    return tables


def find_table(name: str) -> Table:
    tables = load_tables() | OWN_TABLES
    if name not in tables:
        raise InputError(f"there is no table {name!r}; {find_nearest(name, tables)}")
    return tables[name]


def title_table(table: Table, config: Config) -> str:
    """The title of a table; if it ran on other data, its id and that data, as titles name the data they are about."""
    kind, _, path = config.dataset.partition(":")
    if kind == table.setting["dataset"] and config.unknown == table.setting.get("unknown"):
        return table.title
    data = kind if kind == table.setting["dataset"] else Path(path).name or kind
    return clean(f"{table.id} on {data}{f' without class {config.unknown}' if config.unknown else ''}", 160)


def method_of(row: str) -> str:
    """The id of the method in a row of the paper: "(9) (8) with SLW = fedthe" is ablation_9."""
    return f"ablation_{row[1 : row.index(')')]}" if row.startswith("(") else row


def plan_cases(table: Table, methods: Sequence[str] = (), **settings: Any) -> list[TableCase]:
    """The runs that a table needs. `methods` names rows of the table or methods; settings override the paper's."""
    rows = pick_rows(table, methods)
    base: dict[str, Any] = {key: table.setting[key] for key in KEYS if key in table.setting} | MODELS[
        table.setting["model"]
    ]
    base |= {"methods": [method_of(row) for row in rows], "seeds": pick_seeds(table), **settings}
    if table.columns[0].startswith(SEVERITY) and {"severity", "tests"} & settings.keys():
        raise InputError(f"{table.id} is about severities 1 to 5 of one test; leave severity and tests out.")
    if not table.columns[0].startswith(SEVERITY):
        config = make_config(base)
        if config.tests is not None and not set(config.tests) & set(table.tests):
            raise InputError(f"{table.id} has the tests {', '.join(table.tests)}; `tests` names none of them.")
        return [TableCase(config, {test: test for test in table.tests})]
    return [
        # both tests of the severity tables, so that these tables share answers
        TableCase(
            make_config({**base, "severity": int(column.removeprefix(SEVERITY)), "tests": ["corrupted", "mixture"]}),
            {column: table.setting["test"]},
        )
        for column in table.columns
    ]


def pick_seeds(table: Table) -> list[int]:
    """The paper's three; eight where clients are drawn anew and most claims are judged; new ones for the filter."""
    if table.id in judged.SETTINGS:
        return list(judged.SEEDS)
    many = table.id.startswith(("main-", "others-dir", "corrupted-ooc-cnn-"))
    return list(MORE_SEEDS if many else SEEDS)


def name_rows(table: Table) -> dict[str, str]:
    """The rows of a table by our ids and by the paper's names."""
    return {method_of(row): row for row in table.rows} | {row: row for row in table.rows}


def pick_rows(table: Table, methods: Sequence[str]) -> list[str]:
    """Rows of the table by the paper's names or our ids; all rows if `methods` is empty. Any other method of the
    package, and one from a file, FILE.py:NAME, is a row of its own."""
    names, package = name_rows(table), METHODS | STUDIES
    own = [method for method in dict.fromkeys(methods) if method not in names]
    for method in own:
        spec = parse_spec(method)
        if not spec.file and spec.name not in package:
            near = find_nearest(spec.name, names | package)
            raise InputError(f"{table.id} has no row {method!r}, and there is no such method; {near}")
    chosen = {names[method] for method in methods if method in names}
    return [*(row for row in table.rows if not methods or row in chosen), *own]


def pick_tables(methods: Sequence[str]) -> list[tuple[Table, list[str]]]:
    """Every table with one of the methods, and those it has; all tables, whole, if `methods` is empty."""
    names = {table.id: name_rows(table) for table in load_tables().values()}
    known = sorted({name for of_table in names.values() for name in of_table})
    for method in methods:
        if method not in known:
            raise InputError(f"no table has a row {method!r}; {find_nearest(method, known)}")
    found = {id: [method for method in methods if method in names[id]] for id in names}
    return [(load_tables()[id], here) for id, here in found.items() if here or not methods]


def fill_table(
    table: Table, found: Sequence[tuple[TableCase, Mapping[str, Mapping[str, Ours]]]]
) -> dict[str, dict[str, Ours]]:
    """Our (mean, std) by row and column, from those by method and test of each case."""
    filled: dict[str, dict[str, Ours]] = {}
    own = dict.fromkeys(method for _, scores in found for method in scores)  # beside the rows of the table
    for row in (*table.rows, *(method for method in own if method not in name_rows(table))):
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
                filled[row][AVERAGE] = (statistics.mean(means), statistics.stdev(means))
    return filled
