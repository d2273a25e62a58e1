"""A leaderboard from records of `fedthe table`: methods by test, with intervals, costs and the command of each row.

Records share a board if they have the same settings, tests, seeds and manifests: then every method answered the same
samples. A method that failed on some of them is not ranked.
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
from ..specs import Spec, say_plain
from ..statistics import ByTest, Interval, bootstrap, pair, pair_averages
from ..store import content_hash
from ..study.reproduce import HOW
from ..study.show import say_classes
from ..study.tables import OWN_TABLES, find_table, pick_seeds, title_table
from ..text import clean, count, say_points, say_seeds, say_value
from .formats import escape_markdown
from .read import check_record, is_record, read_json

FEWEST = 3  # methods of a board
MEAN = "mean"
APART = ("corrupted_ooc",)  # not in the mean, nor in the paper's
FREELY = HOW | {"methods", "seeds", "tests", "dataset", "natural"}  # what rows and manifests say, and how it ran
EXPLAINED = """Accuracy in percent: the mean over clients, then over seeds, ± half the width of its 95 % interval (a
bootstrap over seeds and their clients). All methods of a board answered the same samples. **Bold** is a method that is
ahead of every other one in the column: the 95 % interval of each difference, paired by seed and client, is above 0.
Where nothing is bold, nobody has won. Each board says what its mean is over. Costs are per sample: milliseconds on the
device above the board, or on the one that the row names, with many samples side by side, and forward + backward passes
through the network, each augmented view counted. Milliseconds are those of the run that made the record, whatever else
the device did at the time.

To add a method of yours, run it under the settings of a board, with its tests and seeds, and name both folders:

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
    spec: Spec = Spec("")
    source: str = ""  # the record
    device: str = ""
    auroc: Mapping[str, float] = field(default_factory=dict)  # by test that has an unknown class

    def is_same(self, other: Entry) -> bool:
        """Whether two records hold the same method, with the same numbers: code behind a name may have changed."""
        return (self.spec, self.tests) == (other.spec, other.tests)

    def has(self, tests: Iterable[str], seeds: Iterable[int]) -> bool:
        """Whether it answered all tests with all seeds."""
        return all(str(seed) in self.tests.get(test, {}) for test in tests for seed in seeds)


@dataclass
class Board:
    title: str
    config: Config
    device: str
    classes: Mapping[str, float]  # effective, by seed
    names: dict[str, str]  # of natural tests
    entries: dict[str, Entry] = field(default_factory=dict)  # by the id of the method; see `_put`
    sources: list[str] = field(default_factory=list)  # ids of tables, first that of the title
    failed: list[Entry] = field(default_factory=list)  # without some tests or seeds

    @property
    def tests(self) -> list[str]:
        """Every method has the same ones."""
        return list(next(iter(self.entries.values())).tests)

    @property
    def is_ours(self) -> bool:
        """Whether the table that it is named after is not one of the paper's."""
        return self.sources[0] in OWN_TABLES

    @property
    def averaged(self) -> list[str]:
        return [test for test in self.tests if test not in APART] or self.tests

    @property
    def rejecting(self) -> list[str]:
        """The tests for which all methods have an AUROC."""
        return [test for test in self.tests if all(test in entry.auroc for entry in self.entries.values())]

    def name_test(self, test: str) -> str:
        return self.names.get(test, name_test(test))


def read_boards(folders: Iterable[Path]) -> tuple[list[Board], list[str]]:
    """All boards of at least three methods, and the ids of the tables on none. The paper's tables come first."""
    boards: dict[str, Board] = {}
    records = {path: record for folder in folders for path, record in read_records(folder).items()}
    # a board has the title of its largest table
    for path, record in sorted(records.items(), key=lambda each: -len(_list_methods(each[1]))):
        if len(record["cases"]) == 1:  # not of severities
            _add(boards, record, path)
    shown = [board for board in boards.values() if len(board.entries) >= FEWEST]
    lost = [id for board in boards.values() if board not in shown for id in board.sources]
    return sorted(shown, key=lambda board: (board.is_ours, -len(board.entries))), sorted(set(lost))


def read_records(folder: Path) -> dict[Path, Mapping[str, Any]]:
    """All records of tables in a folder, by file."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; name one that `fedthe table --save` wrote to.")
    values = {path: read_json(path) for path in sorted(folder.rglob("*.json"))}
    known = {path: value for path, value in values.items() if is_record(value)}
    if not known and any(path.name == "config.json" for path in values):
        raise InputError(
            f"{folder} holds a run, not a record of a table; run its methods under the settings of a table: "
            "`fedthe table main-dir0.1 KEY=VALUE ... --methods NAME,... --save FOLDER` writes a record."
        )
    return {path: check_record(value, path) for path, value in known.items() if "data" not in value}  # no figure


def _add(boards: dict[str, Board], record: Mapping[str, Any], path: Path) -> None:
    (case,) = record["cases"]
    config = make_config(case["config"])
    same = {key: value for key, value in config.filled().as_dict().items() if key not in FREELY}
    tests = {test for tests in case["clients"].values() for test in tests}
    key = content_hash(same, case["manifests"], sorted(tests))
    table = find_table(record["id"])
    title = title_table(table, config)
    changed = ", ".join(_list_words(record, *([] if title == table.title else ["unknown"])))
    title = f"{title}{f' ({changed})' if changed else ''}, {say_seeds(config.seeds)}"
    device = str(record["environment"].get("device", "an unknown device"))
    classes = record.get("effective_classes", {})
    board = boards.setdefault(key, Board(title, config, device, classes, {}))
    board.names |= record["names"]
    board.sources.append(table.id)
    for method in _list_methods(record):
        passes = case.get("passes", {}).get(method) or _count_passes(method)
        rejected = {test: of.get(method, {}).get("auroc") for test, of in case.get("streams", {}).items()}
        entry = Entry(
            case["clients"][method],
            case["ms_per_sample"].get(method),
            passes,
            write_command(record, config, method),
            config.specs[method],
            str(path),
            device,
            {test: auroc for test, auroc in rejected.items() if auroc is not None},
        )
        if entry.has(tests, config.seeds):
            _put(board, entry)
        else:
            board.failed.append(entry)


def _put(board: Board, entry: Entry) -> None:
    """Add a method. Of another one with the same id, the record is part of the key."""
    id = entry.spec.id
    alike = [each for each in board.entries.values() if each.spec.id == id]
    if not any(entry.is_same(each) for each in alike):
        board.entries[f"{id} ({entry.source})" if alike else id] = entry


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
    words = _list_words(record)
    if config.dataset != table.setting["dataset"]:
        words.append(f"dataset={config.dataset}")
    if config.natural is not None:
        words.append(f"natural={config.natural}")
    if list(config.seeds) != pick_seeds(table):
        words.append(f"seeds={say_value(list(config.seeds))}")
    return shlex.join(["fedthe", "table", table.id, *words, "--methods", str(config.specs[method])])


def _list_words(record: Mapping[str, Any], *without: str) -> list[str]:
    """The changed settings as words of a command; without data and seeds, which have a place of their own."""
    told = {"seeds", "dataset", *without}
    changed = {key: ours for key, (ours, *_) in record["changed"].items() if key.partition(".")[0] not in told}
    return [f"{key}={say_value(v) if isinstance(v, list | tuple) else say_plain(v)}" for key, v in changed.items()]


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
            f"Left out, because fewer than {FEWEST} methods share their settings, tests, seeds and clients: "
            f"{', '.join(lost)}."
        )
    return "\n\n".join(parts) + "\n"


def _write_board(board: Board) -> str:
    measured = {
        method: {column: measure(board, method, column) for column in (MEAN, *board.tests)} for method in board.entries
    }
    ranked = sorted(measured, key=lambda method: -measured[method][MEAN].mean)
    titles = [
        MEAN,
        *map(board.name_test, board.tests),
        *(f"{board.name_test(test)}: AUROC" for test in board.rejecting),
    ]
    head = ["", *map(escape_markdown, titles), "ms", "passes"]
    rows = []
    for method in ranked:
        entry = board.entries[method]
        cells = [
            _write_cell(measured[method][column], is_best(board, method, column)) for column in (MEAN, *board.tests)
        ]
        cells += [say_points(entry.auroc[test]) for test in board.rejecting]
        rows.append([escape_markdown(_name(board, entry)), *cells, *_write_costs(entry, board.device)])
    table = [_write_row(head), "|---|" + "---:|" * (len(head) - 1), *map(_write_row, rows)]
    config = board.config
    ran = [
        count(config.client_count, "client"),
        count(config.rounds, "round"),
        say_seeds(config.seeds),
    ]
    said = f"{', '.join(ran)}; {board.device}. {_explain_columns(board)}"
    classes = f" {say_classes(board.classes)}" if board.classes else ""
    commands = "\n".join(escape(board.entries[method].command) for method in ranked)
    return "\n\n".join(
        [
            f"## {escape_markdown(board.title)}",
            f"{escape_markdown(said)}{classes}",
            "\n".join(table),
            *_name_failed(board),
            f"<details><summary>The command of each row</summary>\n<pre>\n{commands}\n</pre>\n</details>",
        ]
    )


def _name(board: Board, entry: Entry) -> str:
    """Of methods with the same id, with the record that each comes from."""
    several = sum(each.spec.id == entry.spec.id for each in board.entries.values()) > 1
    return f"{name_method(entry.spec.id)}{f' ({clean(entry.source, 200)})' if several else ''}"


def _name_failed(board: Board) -> list[str]:
    ranked = {entry.spec for entry in board.entries.values()}  # by another record
    names = [
        f"{name_method(each.spec.id)} ({clean(each.source, 200)})" for each in board.failed if each.spec not in ranked
    ]
    return [escape_markdown(f"Not ranked, because some tests or seeds failed: {', '.join(names)}.")] if names else []


def _explain_columns(board: Board) -> str:
    *others, last = map(board.name_test, board.averaged)
    said = f"The mean is over {', '.join(others)} and {last}." if others else f"The mean is that of {last}."
    if board.rejecting:
        said += " AUROC: in percent, how often an answer to a known class is more confident than one to an unknown one."
    return said


def _write_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _write_cell(found: Interval, best: bool) -> str:
    mean = f"**{say_points(found.mean)}**" if best else say_points(found.mean)
    return mean if found.low is None or found.high is None else f"{mean} ±{say_points((found.high - found.low) / 2)}"


def _write_costs(entry: Entry, device: str) -> list[str]:
    """Milliseconds, with the device if it is another one than the board's, and passes."""
    where = "" if entry.device == device else f" ({escape_markdown(entry.device)})"
    ms = "-" if entry.ms is None else f"{entry.ms:.2g}{where}"
    return [ms, "-" if entry.passes is None else " + ".join(f"{each:g}" for each in entry.passes)]
