"""The leaderboard: same samples on one board, bold that intervals bear out, and a command for each row."""

import copy
import json
import re
import shlex
import warnings
from statistics import fmean

import numpy as np
import pytest

import fedthe as package
from fedthe.config import read_words
from fedthe.errors import InputError
from fedthe.names import name_method
from fedthe.report.leaderboard import FREELY, MEAN, Board, Entry, is_best, measure, read_boards, write_leaderboard
from fedthe.report.read import check_record, is_record
from fedthe.statistics import bootstrap
from fedthe.store import write_sealed
from fedthe.study.tables import OWN_TABLES, find_table, plan_cases
from fedthe.text import say_points
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
            for test, mean in means.items():
                assert measure(board, method, test).mean == pytest.approx(mean)
            of_the_paper = {"original", "corrupted", "ooc", "natural", "mixture"}
            streams = means.keys() - of_the_paper - {"corrupted_ooc"}
            average = fmean(mean for t, mean in means.items() if t in (means if streams else of_the_paper))
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


def rename(record, method, spec, factor=1.0):
    """The record of one method, under another name, with the accuracy of every client times a factor."""
    record, id = pick(record, [method]), spec.rpartition(":")[2]
    (case,) = record["cases"]
    case["clients"] = {id: case["clients"].pop(method)}
    for seeds in case["clients"][id].values():
        for clients in seeds.values():
            clients[:] = [each if each is None else each * factor for each in clients]
    (cells,) = record["rows"].values()
    record["rows"] = {id: {test: [mean * factor, std * factor] for test, (mean, std) in cells.items()}}
    case["config"]["methods"] = [spec]
    return record


def test_methods_of_the_same_name_from_other_code_are_both_on_the_board(tmp_path):
    record = read(RESULTS / "main-dir0.1.json")
    known = save(tmp_path / "known", pick(record, ["fedavg", "fedavg_ft", "fedthe"]))
    mine = save(tmp_path / "mine", rename(record, "memo_p", "mine.py:Mine"))
    again = save(tmp_path / "again", rename(record, "memo_p", "mine.py:Mine"))  # the same once more
    edited = save(tmp_path / "edited", rename(record, "memo_p", "mine.py:Mine", factor=0.9))
    moved = save(tmp_path / "moved", rename(record, "memo_p", "other/mine.py:Mine"))
    for folders in ([known, mine, edited, moved], [moved, edited, known, mine]):
        (board,), _ = read_boards(folders)
        page = write_leaderboard([board], [], folders)
        assert len(board.entries) == 6
        for folder, factor in ((mine, 1.0), (edited, 0.9), (moved, 1.0)):
            (row,) = re.findall(rf"^\| Mine \({re.escape(str(folder))}.*$", page.replace("\\", ""), re.MULTILINE)
            expected = fmean(cells[0] for cells in rename(record, "memo_p", "Mine", factor)["rows"]["Mine"].values())
            assert float(row.split(" | ")[1].split(" ")[0].strip("*")) == pytest.approx(expected, abs=0.051)
        assert page.count("--methods mine.py:Mine\n") == 2
        assert page.count("--methods other/mine.py:Mine\n") == 1
    (board,), _ = read_boards([known, mine, again])
    assert [*board.entries] == ["fedavg", "fedavg_ft", "fedthe", "Mine"]
    assert "| Mine |" in write_leaderboard([board], [], [known])


def restate(record, id, tests, **config):
    """The record as one of another table, with its tests renamed."""
    record = copy.deepcopy(record)
    (case,) = record["cases"]
    case["clients"] = {m: {new: of[old] for old, new in tests.items()} for m, of in case["clients"].items()}
    record["rows"] = {m: {new: of[old] for old, new in tests.items()} for m, of in record["rows"].items()}
    record |= {"id": id, "columns": [*tests.values()], "compared": [], "names": {}}
    case["columns"] = {test: test for test in tests.values()}
    case["config"] |= {"tests": [*tests.values()], **config}
    record["changed"] = {key: [value, None] for key, value in config.items()}
    return record


def test_streams_are_averaged_and_ranked(tmp_path):
    methods = ["fedavg", "fedthe", "fedavg_ft"]
    record = pick(read(RESULTS / "main-dir0.1.json"), methods)
    tests = {"original": "switch10", "corrupted": "recurring"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (board,), _ = read_boards([save(tmp_path / "r", restate(record, "streams", tests))])
        page = write_leaderboard([board], [], [tmp_path])
    assert "The mean is over switching every 10 and recurring." in page
    assert "nan" not in page
    means = {method: fmean(record["rows"][method][test][0] for test in tests) for method in methods}
    ranked = re.findall(r"^\| (FedAvg|FedTHE|FedAvg \+ FT) \| \**([\d.]+)", page, re.MULTILINE)
    best = sorted(methods, key=lambda method: -means[method])
    assert ranked == [(name_method(method), say_points(means[method])) for method in best]


def test_an_open_set_shows_its_auroc_and_the_title_its_data(tmp_path):
    methods = ["fedavg", "fedthe", "fedavg_ft"]
    record = pick(read(RESULTS / "main-dir0.1.json"), methods)
    tests = {"original": "original", "ooc": "open_set"}
    record = restate(record, "open-set", tests, dataset="glyphs", unknown="4", rounds=1)
    empty = dict.fromkeys(("worst_window", "worst_client", "forgetting", "fpr95"))
    estimate = {"mean": 50.0, "low": None, "high": None}
    record["cases"][0]["streams"] = {
        "open_set": {
            method: {"accuracy": estimate, "phases": {}, "auroc": 60.0 + i, **empty} for i, method in enumerate(methods)
        }
    }
    (board,), _ = read_boards([save(tmp_path / "r", record)])
    page = write_leaderboard([board], [], [tmp_path])
    assert "\n## open-set on glyphs without class 4 (rounds=1), seeds 0 to 7\n" in page
    assert "\n20 clients, 1 round, seeds 0 to 7; " in page
    (head,) = re.findall(r"^\|  \| .*$", page, re.MULTILINE)
    column = head.split(" | ").index("open set: AUROC")
    for i, method in enumerate(methods):
        (row,) = re.findall(rf"^\| {re.escape(name_method(method))} \| .*$", page, re.MULTILINE)
        assert row.split(" | ")[column] == f"{60 + i}.0"
    assert "dataset=glyphs" in page
    assert "CIFAR" not in page.partition("\n## ")[2]


def test_other_hyperparameters_make_another_board(tmp_path):
    """They change what a method is, also where its name stays."""
    methods = ["fedavg", "fedthe", "fedavg_ft"]
    usual = pick(read(RESULTS / "main-dir0.1.json"), [*methods, "memo_p"])
    tuned = pick(usual, methods)
    tuned["cases"][0]["config"]["hyper"] = {"fedthe": {"alpha": 0.2}}
    tuned["changed"] = {"hyper.fedthe.alpha": [0.2, None]}
    boards, _ = read_boards([save(tmp_path / "usual", usual), save(tmp_path / "tuned", tuned)])
    assert [[*board.entries] for board in boards] == [[*usual["rows"]], [*tuned["rows"]]]
    assert [" hyper.fedthe.alpha=0.2 " in board.entries["fedthe"].command for board in boards] == [False, True]
    assert ["hyper.fedthe.alpha=0.2" in board.title for board in boards] == [False, True]


def drop(record, method, seeds=(), test=None):
    """The record after a method failed with some seeds, or on a test."""
    record = copy.deepcopy(record)
    tests, cells = record["cases"][0]["clients"][method], record["rows"][method]
    if test:
        del tests[test], cells[test]
    for name, of in tests.items():
        for seed in seeds:
            del of[seed]
        if name in cells:
            cells[name] = [fmean(fmean(each for each in of[seed] if each is not None) for seed in of), None]
    return record


@pytest.mark.parametrize("failed", [{"seeds": ["0", "1"]}, {"test": "ooc"}])
def test_a_method_that_failed_in_part_is_named_but_not_ranked(failed, tmp_path):
    methods = ["fedavg", "fedavg_ft", "fedthe", "memo_p"]
    whole = pick(read(RESULTS / "main-dir0.1.json"), methods)
    part = save(tmp_path / "part", drop(whole, "fedavg", **failed))
    (board,), _ = read_boards([part])
    page = write_leaderboard([board], [], [part])
    assert sorted(board.entries) == sorted(methods[1:])
    assert {"ooc", "original"} <= set(board.tests)
    assert "| FedAvg |" not in page
    said = page.replace("\\", "")
    assert f"Not ranked, because some tests or seeds failed: FedAvg ({part / 'main-dir0.1.json'})." in said
    # run again, it is ranked
    again = save(tmp_path / "again", pick(whole, ["fedavg"]))
    (board,), _ = read_boards([part, again])
    page = write_leaderboard([board], [], [part, again])
    assert board.entries["fedavg"].tests == whole["cases"][0]["clients"]["fedavg"]
    assert "Not ranked" not in page


def test_a_record_with_fewer_tests_takes_no_columns_from_others(tmp_path):
    whole = pick(read(RESULTS / "main-dir0.1.json"), ["fedavg", "fedavg_ft", "fedthe"])
    tests = {"original": "original", "ooc": "ooc"}
    for methods in (["memo_p"], ["memo_p", "t3a", "ttt_ft"]):
        few = restate(pick(read(RESULTS / "main-dir0.1.json"), methods), "main-dir0.1", tests)
        few["changed"] = {"tests": [[*tests], None]}
        folders = [save(tmp_path / "whole", whole), save(tmp_path / "few", few)]
        (board, *others), lost = read_boards(folders)
        assert (sorted(board.entries), len(board.tests)) == (sorted(whole["rows"]), 6)
        assert [(board.tests, sorted(board.entries)) for board in others] == (
            [([*tests], sorted(methods))] if len(methods) == 3 else []
        )
        page = write_leaderboard([board, *others], lost, folders)
        assert ("share their settings, tests, seeds and clients: main-dir0.1." in page) == (len(methods) < 3)
        assert ("(tests=original,ooc), seeds 0 to 7" in page) == (len(methods) == 3)


def test_milliseconds_of_another_device_name_it(tmp_path):
    record = read(RESULTS / "main-dir0.1.json")
    first = save(tmp_path / "a", pick(record, ["fedavg", "fedavg_ft", "fedthe"]))
    slow = pick(record, ["t3a"])
    slow["environment"]["device"] = "cpu"
    slow["cases"][0]["ms_per_sample"] = {"t3a": 99.0}
    (board,), _ = read_boards([first, save(tmp_path / "b", slow)])
    page = write_leaderboard([board], [], [first])
    assert "; NVIDIA H200. " in page
    costs = {
        name: re.search(rf"^\| {name} \|.* \| ([^|]*) \| [^|]* \|$", page, re.MULTILINE)[1]
        for name in ("T3A", "FedAvg")
    }
    assert costs["T3A"] == "99 (cpu)"
    assert float(costs["FedAvg"]) > 0


def test_boards_have_titles_of_their_own(boards):
    titles = [board.title for board in boards[0]]
    assert len(set(titles)) == len(titles)
    for board in boards[0]:
        assert board.title.endswith(("seed 0", "seeds 0 to 2", "seeds 0 to 7", "seeds 31 to 38"))


def test_tables_and_boards_round_alike():
    """Means of rows, and means of clients with three decimals each, are one number to the reader."""
    assert [say_points(each) for each in (59.55, 59.549999, 59.5503, 35.25, 35.25005, -0.25, 3.0)] == [
        *("59.5", "59.5", "59.5", "35.2", "35.2", "-0.2", "3.0")
    ]
    assert [say_points(each, "+") for each in (1.25, -1.25, 0.0)] == ["+1.2", "-1.2", "+0.0"]
    checked = 0
    for path in RECORDS:
        record = read(path)
        if "data" not in record and len(record["cases"]) == 1:
            (case,) = record["cases"]
            for method, cells in record["rows"].items():
                for test, (mean, _) in cells.items():
                    seeds = case["clients"].get(method, {}).get(test)
                    if seeds:
                        pairs = [np.array([each for each in of if each is not None]) for of in seeds.values()]
                        assert say_points(mean) == say_points(bootstrap(pairs).mean), (path, method, test)
                        checked += 1
    assert checked > 200


def test_the_boards_of_the_papers_tables_come_first_and_larger_ones_before_smaller():
    boards, _ = read_boards([RESULTS])
    ours = [board.sources[0] in OWN_TABLES for board in boards]
    assert {*ours} == {True, False}
    assert ours == sorted(ours)
    for part in (True, False):
        sizes = [len(board.entries) for board, own in zip(boards, ours, strict=True) if own is part]
        assert sizes == sorted(sizes, reverse=True)


def test_a_folder_of_a_run_is_not_a_record(fedthe, data, tmp_path):
    run = tmp_path / "runs" / "own"
    small = {"clients": 2, "rounds": 1, "local_epochs": 1, "samples": 4, "natural": "none", "engine": "loop"}
    package.run(dataset=data, methods=["fedavg"], out=str(run), **small)
    for folders in ([run], [RESULTS, run], [run.parent]):
        said = fedthe("leaderboard", *map(str, folders), exits=2).err
        assert f"{folders[-1]} holds a run, not a record of a table" in said
        assert "--save FOLDER" in said
    save(run, read(RESULTS / "arch-cct4.json"))  # a record beside a run
    assert "## CCT4 on CIFAR10" in fedthe("leaderboard", str(run)).out


def test_no_folder_is_made_for_the_page(fedthe, tmp_path):
    page = tmp_path / "no" / "x.md"
    assert f"{page.parent} is not a folder" in fedthe("leaderboard", str(RESULTS), "--out", str(page), exits=2).err
    assert not page.parent.exists()


def test_the_command_says_what_is_missing(fedthe, tmp_path):
    assert "is not a folder" in fedthe("leaderboard", str(tmp_path / "no"), exits=2).err
    assert "share settings, tests, seeds and clients" in fedthe("leaderboard", str(tmp_path), exits=2).err
    assert "is a folder; name a file" in fedthe("leaderboard", str(RESULTS), "--out", str(tmp_path), exits=2).err
    with pytest.raises(InputError, match="is not a folder"):
        read_boards([tmp_path / "no"])
    record = read(RESULTS / "arch-cct4.json")
    said = fedthe("leaderboard", str(save(tmp_path / "r", record))).out
    assert "## CCT4 on CIFAR10, Dir(1.0)" in said


def test_two_methods_of_one_name_are_told_apart(tmp_path):
    record = read(RESULTS / "main-dir0.1.json")
    known = save(tmp_path / "known", pick(record, ["fedavg", "fedavg_ft", "fedthe"]))
    mine = save(tmp_path / "mine", rename(record, "memo_p", "mine.py:Mine"))
    edited = save(tmp_path / "edited", rename(record, "memo_p", "mine.py:Mine", factor=0.9))
    (board,), _ = read_boards([known, mine, edited])
    assert "| Mine |" not in write_leaderboard([board], [], [known])


def test_a_method_that_lacks_the_last_seed_is_not_ranked(tmp_path):
    methods = ["fedavg", "fedavg_ft", "fedthe", "memo_p"]
    whole = pick(read(RESULTS / "main-dir0.1.json"), methods)
    (board,), _ = read_boards([save(tmp_path / "part", drop(whole, "fedavg", seeds=["7"]))])
    assert sorted(board.entries) == sorted(methods[1:])
