"""The leaderboard: same samples on one board, bold that intervals bear out, and a command for each row."""

import copy
import json
import re
import shlex
from statistics import fmean

import numpy as np
import pytest

from fedthe.config import read_words
from fedthe.errors import InputError
from fedthe.names import name_method
from fedthe.report.leaderboard import FREELY, MEAN, Board, Entry, is_best, measure, read_boards, write_leaderboard
from fedthe.report.read import check_record, is_record
from fedthe.statistics import bootstrap
from fedthe.store import write_sealed
from fedthe.study.tables import find_table, plan_cases
from helpers import ROOT

RESULTS = ROOT / "results"
RECORDS = sorted(RESULTS.rglob("*.json"))


@pytest.fixture(scope="module")
def boards():
    return read_boards([RESULTS])


def read(path):
    return {key: value for key, value in json.loads(path.read_text(encoding="utf-8")).items() if key != "seal"}


def save(folder, record, **changes):
    folder.mkdir(exist_ok=True)
    write_sealed(folder / f"{record['id']}.json", record | changes)
    return folder


def pick(record, methods):
    """The record of these rows alone."""
    record = copy.deepcopy(record)
    record["rows"] = {row: cells for row, cells in record["rows"].items() if row in methods}
    (case,) = record["cases"]
    case["clients"] = {method: tests for method, tests in case["clients"].items() if method in methods}
    case["config"]["methods"] = list(methods)
    return record


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: str(path.relative_to(RESULTS)))
def test_every_committed_record_is_valid(path):
    value = json.loads(path.read_text(encoding="utf-8"))
    assert is_record(value)
    check_record(value, path)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda record: record.pop("rows"), "has no 'rows'"),
        (lambda record: record["cases"].clear(), "it has no case"),
        (lambda record: record["rows"].update(mine={"ooc": [99.0, 0.0]}), "no client has its row 'mine'"),
        (lambda record: record["rows"]["fedthe"].update(ooc=[99.0, 0.0]), "fedthe.ooc is not the mean"),
        (lambda record: record["cases"][0]["clients"]["fedthe"]["ooc"]["0"].append(101.0), "a number from 0 to 100"),
        (lambda record: record["cases"][0]["config"].update(seeds=[7]), "seed that its config does not name"),
        (lambda record: record["cases"][0].update(passes={"fedthe": "many"}), "not a list"),
        (lambda record: record.update(effective_classes={"0": -1}), "a number from 0 to"),
        (lambda record: record.update(format=9), "another version wrote it"),
    ],
)
def test_a_wrong_record_is_refused_in_one_sentence(damage, says, fedthe, tmp_path):
    """The rest of the folder, and a page that was there before, stay as they are."""
    record = read(RESULTS / "main-dir0.1.json")
    damage(record)
    folder, page = save(tmp_path / "r", record), tmp_path / "board.md"
    page.write_text("before")
    said = fedthe("leaderboard", str(folder), "--out", str(page), exits=2).err
    assert says in said
    assert "main-dir0.1.json is not a valid record of a table" in said
    assert said.count("\n") == 1
    assert page.read_text() == "before"


def test_the_page_of_the_docs_shows_what_results_hold(boards):
    page = (ROOT / "docs" / "leaderboard.md").read_text(encoding="utf-8")
    written = write_leaderboard(*boards, [RESULTS.relative_to(ROOT)])
    assert page == written, "run fedthe leaderboard results --out docs/leaderboard.md"


def test_numbers_are_means_over_clients_and_seeds_and_ranks_by_the_mean(boards):
    found, lost = boards
    page = write_leaderboard(*boards, [RESULTS])
    for board in found:
        assert len(board.entries) >= 3
        assert not any(method.startswith("ablation") for method in board.entries)
        for method, entry in board.entries.items():
            means = {
                test: fmean(fmean(p for p in clients if p is not None) for clients in seeds.values())
                for test, seeds in entry.tests.items()
            }
            assert measure(board, method, "ooc").mean == pytest.approx(means["ooc"])
            average = fmean(means[t] for t in ("original", "corrupted", "ooc", "natural", "mixture") if t in means)
            assert measure(board, method, MEAN).mean == pytest.approx(average, abs=1e-4)
    for block in page.split("\n## ")[1:]:
        ranked = [float(cell) for cell in re.findall(r"^\| [^|]+ \| \**([\d.]+)\** ±", block, re.MULTILINE)]
        assert ranked == sorted(ranked, reverse=True)
    assert not set(lost) & {id for board in found for id in board.sources}


def make_board(**methods):
    """By method: accuracy of three clients with two seeds, on one test."""
    tests = {method: {"ooc": {"0": list(numbers), "1": list(numbers)}} for method, numbers in methods.items()}
    entries = {method: Entry(of, None, None, "") for method, of in tests.items()}
    return Board("", None, "", {}, {}, entries)


def test_bold_is_ahead_of_every_other_method_not_of_the_second_alone():
    sure = make_board(a=(50, 60, 70), b=(40, 51, 60), c=(41, 50, 59))
    assert [is_best(sure, method, "ooc") for method in "abc"] == [True, False, False]
    # a is surely ahead of b, the second by its mean, but not of c, which is far better for one client
    unsure = make_board(a=(50, 60, 70), b=(49, 59.1, 69), c=(30, 50, 95))
    assert measure(unsure, "a", "ooc").mean > measure(unsure, "b", "ooc").mean > measure(unsure, "c", "ooc").mean
    assert bootstrap([np.array([20.0, 10, -25])] * 2).low < 0
    assert not is_best(unsure, "a", "ooc")


def test_commands_plan_what_was_run(boards):
    found, _ = boards
    for board in found:
        for method, entry in board.entries.items():
            program, command, id, *words, option, row = shlex.split(entry.command)
            assert (program, command, option) == ("fedthe", "table", "--methods")
            (case,) = plan_cases(find_table(id), [row], **read_words(words))
            planned, ran = case.config.filled().as_dict(), board.config.filled().as_dict()
            same = {key for key in ran if key not in FREELY | {"device"}} | {"seeds", "natural", "dataset"}
            assert {key: planned[key] for key in same} == {key: ran[key] for key in same}
            assert row == method


def test_records_of_the_same_samples_share_a_board(tmp_path):
    record = read(RESULTS / "main-dir0.1.json")
    (case,) = record["cases"]
    whole, some = (["fedavg", "fedavg_ft", "fedthe"], ["memo_p"])
    first, second = save(tmp_path / "a", pick(record, whole)), save(tmp_path / "b", pick(record, some))
    (board,), lost = read_boards([first, second])
    assert [*board.entries] == [*whole, *some]
    assert not lost
    page = write_leaderboard([board], lost, [first, second])
    assert all(f"| {name_method(method)} |" in page for method in (*whole, *some))
    # other clients, or other settings: a board of its own, and with fewer than three methods none
    elsewhere = {"manifests": dict.fromkeys(case["manifests"], "0" * 64)}
    for changed in (elsewhere, {"config": case["config"] | {"lr": 0.5}}):
        other = pick(record, some)
        other["cases"][0] |= changed | {"config": changed.get("config", case["config"]) | {"methods": some}}
        (board,), lost = read_boards([first, save(tmp_path / "b", other)])
        assert [*board.entries] == whole
        assert lost == ["main-dir0.1"]


def test_the_command_says_what_is_missing(fedthe, tmp_path):
    assert "is not a folder" in fedthe("leaderboard", str(tmp_path / "no"), exits=2).err
    assert "share settings, seeds and clients" in fedthe("leaderboard", str(tmp_path), exits=2).err
    assert "is a folder; name a file" in fedthe("leaderboard", str(RESULTS), "--out", str(tmp_path), exits=2).err
    with pytest.raises(InputError, match="is not a folder"):
        read_boards([tmp_path / "no"])
    record = read(RESULTS / "arch-cct4.json")
    said = fedthe("leaderboard", str(save(tmp_path / "r", record))).out
    assert "## CCT4 on CIFAR10, Dir(1.0)" in said
