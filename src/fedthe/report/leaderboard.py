"""A leaderboard from records of `fedthe table`: methods by test, with intervals, costs and the command of each row.

Records share a board if they have the same settings, seeds and manifests: then every method answered the same samples.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from ..config import Config, make_config
from ..errors import InputError
from ..methods import METHODS
from ..methods.compose import arrange
from ..names import name_method, name_test
from ..specs import say_plain
from ..statistics import ByTest, Interval, bootstrap, pair, pair_averages
from ..store import content_hash
from ..study.reproduce import HOW
from ..study.show import say_classes
from ..study.tables import MAIN_TESTS, OWN_TABLES, find_table, pick_seeds
from ..text import say_value
from .formats import escape_markdown
from .read import check_record, is_record, read_json

FEWEST = 3  # methods of a board
MEAN = "mean"
FREELY = HOW | {
    "methods",
    "hyper",
    "seeds",
    "tests",
    "dataset",
    "natural",
}  # what rows and manifests say, and how it ran
EXPLAINED = """Accuracy in percent: the mean over clients, then over seeds, ± half the width of its 95 % interval (a
bootstrap over seeds and their clients). All methods of a board answered the same samples. **Bold** is a method that is
ahead of every other one in the column: the 95 % interval of each difference, paired by seed and client, is above 0.
Where nothing is bold, nobody has won. The mean is over original, corrupted, ooc, natural and mixture, those that there
are. Costs are per sample: milliseconds on the named device, with many samples side by side, and forward + backward
passes through the network, each augmented view counted.

To add a method of yours, run it under the settings of a board, and name both folders:

```
fedthe table main-dir0.1 natural=npz:Tiny-ImageNet.npz --methods mine.py:Mine --save mine
fedthe leaderboard results mine --out leaderboard.md
```"""


@dataclass(frozen=True)
class Entry:
    """A method on a board."""

    tests: ByTest  # accuracy of clients, by test and seed
    ms: float | None  # per sample
    passes: Sequence[float] | None  # forward and backward, per sample
    command: str


@dataclass
class Board:
    title: str
    config: Config
    device: str
    classes: Mapping[str, float]  # effective, by seed
    names: dict[str, str]  # of natural tests
    entries: dict[str, Entry] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)  # ids of tables

    @property
    def tests(self) -> list[str]:
        """The tests that all methods have."""
        every = dict.fromkeys(test for entry in self.entries.values() for test in entry.tests)
        return [test for test in every if all(entry.tests.get(test) for entry in self.entries.values())]

    @property
    def averaged(self) -> list[str]:
        return [test for test in MAIN_TESTS if test in self.tests]


def read_boards(folders: Iterable[Path]) -> tuple[list[Board], list[str]]:
    """All boards of at least three methods, and the ids of the tables on none. Larger boards come first."""
    boards: dict[str, Board] = {}
    records = []
    for path in list_records(folders):
        value = read_json(path)
        if is_record(value) and "data" not in value:  # no figure
            records.append(check_record(value, path))
    # a board has the title of its largest table
    for record in sorted(records, key=lambda record: -len(_list_methods(record))):
        if len(record["cases"]) == 1:  # not of severities
            _add(boards, record)
    shown = [board for board in boards.values() if len(board.entries) >= FEWEST]
    lost = [id for board in boards.values() if board not in shown for id in board.sources]
    return sorted(shown, key=lambda board: -len(board.entries)), sorted(set(lost))


def list_records(folders: Iterable[Path]) -> list[Path]:
    found: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder; name one that `fedthe table --save` wrote to.")
        found += sorted(folder.rglob("*.json"))
    return found


def _add(boards: dict[str, Board], record: Mapping[str, Any]) -> None:
    (case,) = record["cases"]
    config = make_config(case["config"])
    same = {key: value for key, value in config.filled().as_dict().items() if key not in FREELY}
    key = content_hash(same, case["manifests"])
    table = find_table(record["id"])
    changed = ", ".join(f"{key}={_say(value[0])}" for key, value in record["changed"].items() if key != "seeds")
    title = f"{table.title}{f' ({changed})' if changed else ''}"
    device = str(record["environment"].get("device", "an unknown device"))
    classes = record.get("effective_classes", {})
    board = boards.setdefault(key, Board(title, config, device, classes, {}))
    board.names |= record["names"]
    board.sources.append(table.id)
    for method in _list_methods(record):
        passes = case.get("passes", {}).get(method) or _count_passes(method)
        entry = Entry(
            case["clients"][method], case["ms_per_sample"].get(method), passes, write_command(record, config, method)
        )
        board.entries.setdefault(method, entry)


def _list_methods(record: Mapping[str, Any]) -> list[str]:
    """Without the rows of the ablation: variants of FedTHE, and methods that have another name elsewhere."""
    return [method for method in record["cases"][0]["clients"] if not method.startswith("ablation_")]


def _count_passes(method: str) -> Sequence[float] | None:
    """Of built-in methods, for records that lack it."""
    return arrange(METHODS[method]).predictor.passes if method in METHODS else None


def write_command(record: Mapping[str, Any], config: Config, method: str) -> str:
    """The command that makes a row again: of its table or, where that lacks the row by now, of one like it."""
    table = find_table(record["id"])
    if method not in table.rows and not config.specs[method].file:
        like = (each for each in OWN_TABLES.values() if each.setting == table.setting and method in each.rows)
        table = next(like, table)
    words = [f"{key}={_say(value[0])}" for key, value in record["changed"].items() if key != "seeds"]
    if config.dataset != table.setting["dataset"]:
        words.append(f"dataset={config.dataset}")
    if config.natural is not None:
        words.append(f"natural={config.natural}")
    if list(config.seeds) != pick_seeds(table):
        words.append(f"seeds={say_value(list(config.seeds))}")
    return shlex.join(["fedthe", "table", table.id, *words, "--methods", str(config.specs[method])])


def _say(value: Any) -> str:
    return say_value(value) if isinstance(value, list | tuple) else say_plain(value)


def pair_up(board: Board, a: str, b: str, column: str) -> list[np.ndarray]:
    """The numbers of two methods, or of one method twice, by seed [clients, 2]."""
    one, other = board.entries[a].tests, board.entries[b].tests
    return pair_averages(one, other, board.averaged) if column == MEAN else pair(one[column], other[column])


def measure(board: Board, method: str, column: str) -> Interval:
    """The mean accuracy of a method, and its interval."""
    return bootstrap([each[:, 0] for each in pair_up(board, method, method, column)])


def is_best(board: Board, method: str, column: str) -> bool:
    """Whether the interval of its lead over every other method is above 0."""
    for other in board.entries:
        if other != method:
            low = bootstrap([each[:, 0] - each[:, 1] for each in pair_up(board, method, other, column)]).low
            if low is None or low <= 0:
                return False
    return True


def write_leaderboard(boards: Sequence[Board], lost: Sequence[str], folders: Sequence[Path]) -> str:
    """The page, in Markdown."""
    made = shlex.join(["fedthe", "leaderboard", *map(str, folders)])
    parts = ["# Leaderboard", f"Written by `{made}`; do not edit.", EXPLAINED, *map(_write_board, boards)]
    if lost:
        parts.append(
            f"Left out, because fewer than {FEWEST} methods share their settings, seeds and clients: {', '.join(lost)}."
        )
    return "\n\n".join(parts) + "\n"


def _write_board(board: Board) -> str:
    measured = {
        method: {column: measure(board, method, column) for column in (MEAN, *board.tests)} for method in board.entries
    }
    ranked = sorted(measured, key=lambda method: -measured[method][MEAN].mean)
    titles = [MEAN, *(board.names.get(test, name_test(test)) for test in board.tests)]
    head = ["", *map(escape_markdown, titles), "ms", "passes"]
    rows = []
    for method in ranked:
        cells = [
            _write_cell(measured[method][column], is_best(board, method, column)) for column in (MEAN, *board.tests)
        ]
        rows.append([escape_markdown(name_method(method)), *cells, *_write_costs(board.entries[method])])
    table = [_write_row(head), "|---|" + "---:|" * (len(head) - 1), *map(_write_row, rows)]
    config, seeds = board.config, board.config.seeds
    said = f"{config.client_count} clients, {config.rounds} rounds, seeds {say_value(list(seeds))}; {board.device}."
    classes = f" {say_classes(board.classes)}" if board.classes else ""
    commands = "\n".join(escape(board.entries[method].command) for method in ranked)
    return "\n\n".join(
        [
            f"## {escape_markdown(board.title)}",
            f"{escape_markdown(said)}{classes}",
            "\n".join(table),
            f"<details><summary>The command of each row</summary>\n<pre>\n{commands}\n</pre>\n</details>",
        ]
    )


def _write_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _write_cell(found: Interval, best: bool) -> str:
    mean = f"**{found.mean:.1f}**" if best else f"{found.mean:.1f}"
    return mean if found.low is None or found.high is None else f"{mean} ±{(found.high - found.low) / 2:.1f}"


def _write_costs(entry: Entry) -> list[str]:
    ms = "-" if entry.ms is None else f"{entry.ms:.2g}"
    return [ms, "-" if entry.passes is None else " + ".join(f"{each:g}" for each in entry.passes)]
