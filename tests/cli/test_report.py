"""The commands that show what ran: what they write, say and refuse."""

import csv
import io
import json
import os
import shutil
import sys
import zipfile

import pytest

from helpers import ROOT

SMALL = (
    'dataset = "glyphs"\nsize = 24\nmethods = ["fedavg", "fedthe"]\nclients = 3\nrounds = 2\ncurve = [1]\n'
    "local_epochs = 1\nbatch = 256\nsamples = 3\n"
)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Two runs of which the second has another setting, made through Python."""
    import fedthe

    folder = tmp_path_factory.mktemp("runs")
    same = {"dataset": "glyphs", "size": 24, "clients": 3, "rounds": 2, "local_epochs": 1, "batch": 256, "samples": 3}
    fedthe.run(**same, out=folder / "a", methods=["fedavg", "fedthe"])
    fedthe.run(**same, out=folder / "b", methods=["fedthe", "fedavg_ft"], hyper={"fedthe": {"alpha": 0.3}})
    return folder


def test_a_run_ends_with_a_report_and_says_where(fedthe, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(SMALL)
    folder = tmp_path / "run"
    shown = fedthe("run", file, f"out={folder}", "--tensorboard", tmp_path / "board")
    assert f"The report is {folder / 'report.html'}" in " ".join(shown.out.split())
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "FedTHE" in page
    assert "glyphs" in page
    assert len(page) < 8_000_000
    assert list((tmp_path / "board").rglob("events.*"))
    spoken = json.loads(fedthe("run", file, f"out={folder}", "--json").out)
    assert spoken["report"] == str(folder / "report.html")
    assert list(spoken["curves"]) == ["1"]


def test_a_run_without_plotly_is_no_failure(fedthe, ran, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    file = tmp_path / "mine.toml"
    file.write_text(SMALL)
    said = fedthe("run", file, "rounds=1", "curve=", "methods=fedavg", f"out={tmp_path / 'run'}")
    assert "the report is not complete" in said.err
    assert "pip install" in said.err
    assert "Accuracy in %" in said.out
    assert "pip install" in fedthe("report", ran / "a", "-o", tmp_path / "x.html", exits=2).err
    assert not (tmp_path / "x.html").exists()


def test_whatever_is_wrong_with_a_report_the_results_are_shown(fedthe, monkeypatch, tmp_path):
    def fail(results):
        raise ValueError("no good")

    monkeypatch.setattr("fedthe.report.gather.show_results", fail)
    file = tmp_path / "mine.toml"
    file.write_text(SMALL)
    said = fedthe("run", file, "rounds=1", "curve=", "methods=fedavg", f"out={tmp_path / 'run'}")
    assert "the report is not complete (no good)" in said.err
    assert "Accuracy in %" in said.out


def test_a_logger_that_is_not_there_is_refused_before_the_run(fedthe, monkeypatch, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(SMALL)
    assert "is not an MLflow URI" in fedthe("run", file, f"out={tmp_path / 'run'}", "--mlflow", "ftp://x", exits=2).err
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    said = fedthe("run", file, f"out={tmp_path / 'run'}", "--tensorboard", tmp_path / "board", exits=2)
    assert "fedthe[tensorboard]" in said.err
    assert not (tmp_path / "run").exists()


def test_a_report_of_several_runs_in_every_format(fedthe, ran, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "written to report.html" in fedthe("report", ran / "a", ran / "b").out
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count('<option value="') >= 2
    shown = fedthe("report", ran / "a", "--format", "md").out
    assert "| FedTHE |" in shown
    assert r"\toprule" in fedthe("report", ran / "a", "--format", "latex").out
    rows = list(csv.DictReader(io.StringIO(fedthe("report", ran / "a", ran / "b", "--format", "csv").out)))
    assert len(rows) == 2 * 2 * 6 * 3  # runs, methods, tests, clients
    fedthe("report", ran / "a", "--format", "csv", "-o", tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_bytes().count(b"\r\n") == 1 + 2 * 6 * 3


def test_compare_says_what_differs(fedthe, ran, tmp_path):
    said = " ".join(fedthe("compare", ran / "a", ran / "b", "-o", tmp_path / "both.html").out.split())
    assert "hyper.fedthe.alpha" in said
    assert "Only in b: FedAvg + FT" in said
    assert "same clients in seed 0" in said
    assert (tmp_path / "both.html").exists()
    spoken = json.loads(fedthe("compare", ran / "a", ran / "b", "--json").out)
    assert set(spoken["changes"]) == {"fedthe"}


def test_compare_of_two_methods_is_that_of_results(fedthe, ran):
    from fedthe import read_results

    said = fedthe("compare", ran / "a", "--methods", "fedthe,fedavg").out
    assert "p (Holm)" in said
    assert "does not cover other seeds" in " ".join(said.split())
    spoken = json.loads(fedthe("compare", ran / "a", "--methods", "fedthe,fedavg", "--json").out)
    rows = read_results(ran / "a").compare("fedthe", "fedavg").rows
    assert spoken["rows"] == {test: vars(row) for test, row in rows.items()}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name two runs, or one run and --methods A,B"),
        (["--methods", "fedthe"], "--methods takes two methods of one run"),
        (["--methods", "fedthe,fedavgg"], "did you mean fedavg?"),
        (["--methods", "fedthe,fedthe"], "cannot be compared with itself"),
        (["b", "--methods", "fedthe,fedavg"], "name two runs, or one run"),
    ],
)
def test_compare_refuses_in_a_sentence(fedthe, ran, arguments, says, monkeypatch):
    monkeypatch.chdir(ran)
    said = fedthe("compare", "a", *arguments, exits=2).err
    assert says in said
    assert said.count("\n") == 1


def test_watch_shows_a_run_that_is_over(fedthe, ran):
    said = fedthe("watch", ran / "a", "--once").out
    assert "done" in said
    assert "fedthe" in said
    assert "answers 2 of 2" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["report", "nothing"], "does not exist"),
        (["report", "."], "holds no run"),
        (["report", "nothing", "--format", "pdf"], "there is no format 'pdf'"),
        (["report", "nothing", "-o", "."], "is a folder"),
        (["compare", "nothing", "nothing"], "does not exist"),
        (["watch", "nothing"], "there is no folder nothing"),
        (["watch", "."], "holds no run"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(fedthe, arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = fedthe(*arguments, exits=2).err
    assert says in said
    assert said.count("\n") == 1


def test_something_else_than_a_run_is_named_for_what_it_is(fedthe, ran, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quick.toml").write_text(SMALL)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "empty").mkdir()
    with zipfile.ZipFile(tmp_path / "run.zip", "w") as file:
        file.writestr("config.json", "{}")
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "piped").mkdir()
    for name in ("config.json", "progress.json"):
        os.mkfifo(tmp_path / "piped" / name)
    wrong = {
        "quick.toml": "`fedthe run quick.toml`",
        "picture.png": "name the folder of a run",
        "run.zip": "name the folder of a run",
        "empty": "an empty folder",
        "pipe": "neither a file nor a folder",
        "pipe.json": "neither a file nor a folder",
        "piped": "not a regular file",
        ran: f"name one of them: {ran / 'a'}, {ran / 'b'}",
        ran / "a" / "trainings": f"name the folder of the run, {ran / 'a'}",
        ran / "a" / "results.jsonl": f"name the folder of the run, {ran / 'a'}",
        ran / "a" / "summary.json": f"name the folder of the run, {ran / 'a'}",
    }
    before = sorted(tmp_path.iterdir())
    for path, says in wrong.items():
        for command in (["report", path], ["compare", path, ran / "a"], ["compare", ran / "a", path], ["watch", path]):
            said = fedthe(*command, exits=2).err
            assert says in said, command
            assert "delete" not in said
            assert said.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_page_never_replaces_data(fedthe, ran, tmp_path):
    record = tmp_path / "main-dir0.1.json"
    shutil.copy(ROOT / "results" / "main-dir0.1.json", record)
    before = record.read_bytes()
    config = ran / "a" / "config.json"
    told = config.read_bytes()
    for words in (
        ("leaderboard", tmp_path, "--out", record),
        ("report", record, "--out", record),
        ("report", ran / "a", "--out", config),
        ("report", ran / "a", "--format", "csv", "--out", config),
        ("compare", ran / "a", ran / "b", "--out", config),
    ):
        assert "is no page; name another file" in fedthe(*words, exits=2).err
    assert (record.read_bytes(), config.read_bytes()) == (before, told)
    fedthe("leaderboard", tmp_path, "--out", tmp_path / "board.md")
    fedthe("leaderboard", tmp_path, "--out", tmp_path / "board.md")  # a page is replaced


def test_a_record_is_not_replaced_by_one_that_holds_less(fedthe, tmp_path):
    place = tmp_path / "saved"
    place.mkdir()
    shutil.copy(ROOT / "results" / "streams.json", place)
    before = (place / "streams.json").read_bytes()
    small = (
        "dataset=glyphs",
        "clients=2",
        "samples=3",
        "rounds=1",
        "--yes",
        "--out",
        tmp_path / "runs",
        "--save",
        place,
    )
    said = fedthe("table", "streams", "--methods", "fedavg,em", *small, exits=2).err
    assert "holds fedavg_ft, fedrod, t3a and 8 more, which this run does not measure" in " ".join(said.split())
    said = fedthe("figure", "streams", *small, exits=2).err
    assert "holds the table of that name" in " ".join(said.split())
    assert (place / "streams.json").read_bytes() == before
    (place / "streams.json").unlink()
    shutil.copy(ROOT / "results" / "figures" / "weights.json", place / "streams.json")
    said = fedthe("table", "streams", *small, exits=2).err
    assert "holds the figure of that name" in " ".join(said.split())
    assert not (tmp_path / "runs").exists()  # refused before any work


def test_tests_that_a_table_does_not_have(fedthe, tmp_path):
    small = ("dataset=glyphs", "clients=2", "samples=60", "rounds=1", "local_epochs=1", "--seeds", "0", "--yes")
    small = (*small, "--out", tmp_path / "runs", "--methods", "fedavg")
    said = fedthe("table", "streams", "tests=original", *small, exits=2).err
    assert "streams has the tests correlated, ooc_correlated" in " ".join(said.split())
    assert not (tmp_path / "runs").exists()
    said = fedthe("table", "streams", "tests=switch10,original", *small).out
    assert "Measured, but no column of this table: original." in " ".join(said.split())
