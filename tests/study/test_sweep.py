"""Sweeps: which variants and experiments they make, what these share and leave behind, and what fails alone."""

import csv
import json
from dataclasses import dataclass

import pytest
from PIL import Image

import fedthe
from fedthe.config import Config, make_config, read_settings, read_words
from fedthe.errors import InputError, Stopped
from fedthe.methods.base import FedAvg
from fedthe.report.gather import gather
from fedthe.study.sweep import _name_folder, list_runs, plan_sweep, read_sweep
from helpers import count_loads, count_rounds, fails

SMALL = {"clients": 3, "dirichlet": 1.0, "rounds": 1, "local_epochs": 1, "samples": 4, "tests": ["original", "ooc"]}


@pytest.fixture
def small(data, tmp_path):
    return {"dataset": data, "out": str(tmp_path / "run"), **SMALL}


def plan(methods, sweep, **settings):
    return plan_sweep(make_config({"methods": methods, **settings}), sweep)


def test_a_hyperparameter_makes_variants_and_a_setting_makes_experiments():
    made = plan(["fedavg", "fedthe", "tsa"], {"alpha": [0.1, 0.2], "beta": [1], "lr": [0.1, 0.01]}, out="there")
    assert made.keys == ("alpha", "beta", "lr")
    assert {id: (each.method, each.values) for id, each in made.variants.items()} == {
        "fedavg": ("fedavg", {}),
        "fedthe(alpha=0.1,beta=1)": ("fedthe", {"alpha": 0.1, "beta": 1}),
        "fedthe(alpha=0.2,beta=1)": ("fedthe", {"alpha": 0.2, "beta": 1}),
        "tsa": ("tsa", {}),
    }
    assert [(case.config.lr, case.config.folder.as_posix()) for case in made.cases] == [
        (0.1, "there/lr=0.1"),
        (0.01, "there/lr=0.01"),
    ]
    assert all(case.config.methods == tuple(made.variants) for case in made.cases)


def test_a_key_of_both_kinds_is_the_setting_unless_a_method_is_named():
    both = plan(["memo_g", "ttt"], {"lr": [0.1, 0.2]})
    assert list(both.variants) == ["memo_g", "ttt"]
    assert [case.config.lr for case in both.cases] == [0.1, 0.2]
    one = plan(["memo_g", "ttt"], {"memo_g": {"lr": [0.1, 0.2]}})
    assert list(one.variants) == ["memo_g(lr=0.1)", "memo_g(lr=0.2)", "ttt"]
    assert [case.config for case in one.cases] == [make_config({"methods": list(one.variants)})]
    assert one == plan(["memo_g", "ttt"], {"memo_g.lr": [0.1, 0.2]})
    nested = plan(["fedthe_plus", "memo_g"], {"fedthe_plus": {"then": {"steps": [0, 1]}}, "views": [2]})
    assert list(nested.variants) == [
        "fedthe_plus(then.steps=0,views=2)",
        "fedthe_plus(then.steps=1,views=2)",
        "memo_g(views=2)",
    ]


def test_a_method_that_fixes_a_swept_value_keeps_it():
    made = plan(["fedthe", "fedthe(alpha=0.7)", "fedthe(beta=0.5)"], {"alpha": [0.1, 0.2]})
    assert list(made.variants) == [
        *("fedthe(alpha=0.1)", "fedthe(alpha=0.2)", "fedthe(alpha=0.7)"),
        *("fedthe(alpha=0.1,beta=0.5)", "fedthe(alpha=0.2,beta=0.5)"),
    ]


def test_words_and_files_say_the_same(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('methods = ["fedthe"]\n[sweep]\nlr = [0.1, 0.2]\nnet = "cnn"\n[sweep.fedthe]\nalpha = [0.3]\n')
    words = ["methods=fedthe", "sweep.lr=0.1,0.2", "sweep.net=cnn", "sweep.fedthe.alpha=0.3"]

    def read(settings):
        sweep = settings.pop("sweep")
        return plan_sweep(make_config(settings | {"name": "x"}), sweep)

    assert read(read_settings(file)) == read(read_words(words))
    changed = read(read_settings(file, ["sweep.fedthe.alpha=0.4,0.5"]))
    assert [each.values for each in changed.variants.values()] == [{"fedthe.alpha": 0.4}, {"fedthe.alpha": 0.5}]
    assert make_config({}) == Config()  # a config knows no sweep
    fails(lambda: make_config({"sweep": {}}), "no setting 'sweep'")


@pytest.mark.parametrize(
    ("sweep", "says"),
    [
        ({"alpa": [1]}, "did you mean alpha"),
        ({"fedthe.alpa": [1]}, "fedthe has no such hyperparameter; did you mean alpha"),
        ({"fedavg.alpha": [1]}, "fedavg has no such hyperparameter"),
        ({"alpha": []}, "at least one value"),
        ({"alpha": [1, 1.0]}, "only once"),
        ({"alpha": [2.0]}, "alpha and beta must be from 0 to 1"),
        ({"alpha": ["a/b"]}, "cannot be part of a file's name"),
        ({"alpha": [[1]]}, "alpha must be a number"),
        ({"seeds": [0, 1]}, "seeds cannot be swept"),
        ({"lr": ["fast"]}, "lr must be a number"),
        ({"rounds": [1, -1]}, "rounds"),
        ({"steps": [1, 2]}, "several hyperparameters 'steps'"),
        (3, "sweep must be a table"),
        ({}, "sweep must be a table"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_before_anything_runs(sweep, says):
    fails(lambda: plan(["fedthe_plus" if "steps" in str(sweep) else "fedthe", "fedavg"], sweep), says)


def test_a_sweep_leaves_a_table_a_picture_and_runs_that_a_report_shows(small, tmp_path, monkeypatch):
    loads = count_loads(monkeypatch, "npz")
    rounds = count_rounds(monkeypatch)
    values = {"alpha": [0.1, 0.9], "severity": [1, 5], "rounds": [2, 1]}
    sweep = fedthe.run(methods=["fedavg", "fedthe"], sweep=values, **small)
    assert isinstance(sweep, fedthe.Sweep)
    assert len(loads) == 1
    assert len(rounds) == 2 * 2  # each training goes on from one round to two, and serves both severities
    assert set(sweep.runs) == {f"severity={severity},rounds={rounds}" for severity in (1, 5) for rounds in (1, 2)}
    assert len(sweep.rows) == 4 * 3 == len(sweep.table())
    folder = tmp_path / "run"
    row = sweep.table()["FedTHE, alpha=0.9, severity=5, rounds=2"]
    alone = fedthe.run(methods=["fedthe(alpha=0.9)"], **small | {"rounds": 2, "out": str(tmp_path / "alone")})
    assert row == alone.table()["fedthe(alpha=0.9)"]
    with (folder / "sweep.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 4 * 3 * 2
    for line, record in zip(lines, sweep.records(), strict=True):
        assert float(line["accuracy"]) == record["accuracy"]
        assert line["alpha"] == ("" if line["method"] == "fedavg" else str(record["alpha"]))
    assert json.loads((folder / "sweep.json").read_text())["results"] == sweep.table()
    with Image.open(folder / "sweep.png") as picture:
        assert min(picture.size) > 300
    again = read_sweep(folder)
    assert (again.table(), again.keys, list(again.names)) == (sweep.table(), sweep.keys, list(sweep.names))
    page = gather([folder])
    assert [shown.name for shown in page.shown] == [each.name for each in list_runs(folder)]
    assert len(page.shown) == 4
    for shown in page.shown:
        assert shown.examples  # from the folder that the experiments share
        assert len(shown.losses) == 2
        assert not [note for note in shown.notes if "per-sample" in note]


def test_a_sweep_goes_on_where_it_was_stopped_and_repeats_nothing(small, monkeypatch):
    rounds = count_rounds(monkeypatch)

    def stop(event):
        if len(rounds) == 2:
            raise RuntimeError("enough")

    asked = {"methods": ["fedavg"], "sweep": {"lr": [0.1, 0.2, 0.3]}, **small}
    with pytest.raises(Stopped):
        fedthe.run(on_round=stop, **asked)
    folder = fedthe.run(**asked).folder
    assert len(rounds) == 3
    before = (folder / "sweep.csv").read_bytes()
    assert sum(results.reused for results in fedthe.run(**asked).runs.values()) == 3
    assert len(rounds) == 3
    assert (folder / "sweep.csv").read_bytes() == before


@dataclass(frozen=True)
class Fragile(FedAvg):
    limit: float = 1.0

    def loss(self, net, params, given, batch):
        if self.limit > 2:
            raise RuntimeError("too much")
        return super().loss(net, params, given, batch)


@pytest.mark.filterwarnings("ignore:clients=500 failed")
def test_what_fails_does_not_take_the_rest_with_it(small, tmp_path):
    sweep = fedthe.run(methods=[Fragile, "fedavg"], sweep={"limit": [1.0, 3.0], "clients": [3, 500]}, **small)
    assert list(sweep.runs) == ["clients=3"]
    assert [row.label for row in sweep.rows] == ["Fragile, limit=1, clients=3", "FedAvg, clients=3"]
    assert set(sweep.failures) == {"clients=500", "clients=3: Fragile(limit=3), seed 0"}
    traceback = tmp_path / "run" / "clients=3" / "failures" / "Fragile(limit=3)-0.txt"
    assert "too much" in traceback.read_text()
    assert read_sweep(tmp_path / "run").failures == sweep.failures
    with pytest.warns(UserWarning, match="failed"), pytest.raises(InputError, match="400"):
        fedthe.run(methods=["fedavg"], sweep={"clients": [400, 500]}, **small)


def test_one_hyperparameter_is_one_run_in_the_folder_itself(small, tmp_path):
    sweep = fedthe.run(methods=["fedthe"], sweep={"weighting": ["slw", "em"]}, **small)
    (results,) = sweep.runs.values()
    assert results.folder == sweep.folder == tmp_path / "run"
    assert list_runs(sweep.folder) == [sweep.folder]
    shown = gather([sweep.folder]).shown[0]
    assert list(shown.methods.values()) == ["FedTHE (weighting=slw)", "FedTHE (weighting=em)"]


def test_folders_have_names_that_every_file_system_takes():
    names = [_name_folder({"dataset": f"npz:/a/{x}?.npz"}) for x in "bc"]
    assert len(set(names)) == 2
    assert all(name.isprintable() and not set(name) & set('<>:"/\\|?*') for name in names)
    assert len(_name_folder({"frost": "x" * 300})) < 120
    assert _name_folder({"lr": 0.1, "rounds": 5}) == "lr=0.1,rounds=5"


def test_a_frame_has_the_columns_of_the_records(small):
    sweep = fedthe.run(methods=["fedavg"], sweep={"lr": [0.01, 0.1]}, **small)
    frame = sweep.frame()
    assert list(frame) == list(sweep.records()[0])
    for name in frame:
        assert list(frame[name]) == [row[name] for row in sweep.records()]
