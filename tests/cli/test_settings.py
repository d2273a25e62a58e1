"""`fedthe settings`, `fedthe methods`, and runs that need no file, as a person meets them."""

import json

import pytest

from fedthe.config import Config, make_config, read_words
from fedthe.methods import METHODS, STUDIES
from fedthe.methods.about import explain_method
from fedthe.methods.compose import arrange
from fedthe.methods.make import list_hyper, set_hyper
from fedthe.settings import list_settings, write_markdown
from fedthe.specs import Spec
from helpers import ROOT

SMALL = ("clients=3", "dirichlet=1", "rounds=1", "local_epochs=1", "samples=4", "tests=original,ooc")
MINE = '''
"""Methods of my own."""
from dataclasses import dataclass
from fedthe.methods.base import FedAvg

@dataclass(frozen=True)
class Scaled(FedAvg):
    """Scaled (Me 2026, https://example.org/paper): FedAvg with a scaled loss."""

    mu: float = 1.0  # times the loss
'''


@pytest.fixture
def columns():
    return 80


def test_every_setting_is_listed_with_its_default_and_what_it_does(fedthe):
    listed = list_settings()
    assert [each.key for each in listed] == list(Config.__dataclass_fields__)
    assert [each.key for each in listed if not each.about] == []
    for each in listed:
        if each.said_default not in ("empty", "unset"):  # what is shown can be typed, and means the default
            assert make_config(read_words([f"{each.key}={each.said_default}"])) == Config()
        assert ("unset:" in each.about) == (each.default is None), each.key
    shown = fedthe("settings").out
    assert all(len(line) <= 80 for line in shown.splitlines()[:-1])
    assert [each.key for each in listed if f" {each.key} " not in shown] == []
    for words in ("the benchmark", "how it runs", "auto, float32 or bfloat16", "the higher, the more similar"):
        assert words in " ".join(shown.split())
    spoken = json.loads(fedthe("settings", "--json").out)
    assert spoken["rounds"]["default"] == Config().rounds
    assert list(spoken) == [each.key for each in listed]
    assert "the learning rate" in fedthe("settings", "lr").out
    assert "did you mean rounds" in fedthe("settings", "round", exits=2).err


def test_the_page_on_experiments_has_the_same_table():
    page = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    table = page.partition("<!-- settings -->\n\n")[2].partition("\n\n<!-- end -->")[0]
    assert table == write_markdown(), "run python tools/fill_settings.py"


@pytest.mark.parametrize("name", [*METHODS, *STUDIES])
def test_every_hyperparameter_is_listed_by_a_key_that_sets_it(name):
    about, parts = explain_method(Spec(name)), arrange((METHODS | STUDIES)[name])
    paths = list_hyper(parts)
    one = parts.personal == parts.rounds
    assert len(about.hyper) == sum(not (one and path.startswith("personal.")) for path in paths)
    for each in about.hyper:
        assert set_hyper(parts, {each.key: each.default}, name) == parts
    assert about.what.endswith(".")
    assert (about.link or "").startswith("https://") or name in STUDIES


def test_methods_are_explained_by_name_and_from_a_file(fedthe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    shown = fedthe("methods").out
    assert [name for name in METHODS if f" {name} " not in shown] == []
    assert all(len(line) <= 80 for line in shown.splitlines()[:-1])
    assert set(json.loads(fedthe("methods", "--json").out)) == set(METHODS)
    one = fedthe("methods", "fedthe_plus").out
    for words in ("HeadEnsemble then Memo", "https://arxiv.org/abs/2205.10920", "then.lr", "own_descriptor", "50 f"):
        assert words in one
    mine = fedthe("methods", "mine.py:Scaled").out
    for words in ("Scaled (Me 2026): FedAvg with a scaled loss.", "https://example.org/paper", "mu", "times the loss"):
        assert words in mine
    spoken = json.loads(fedthe("methods", "mine.py:Scaled(mu=3)", "--json").out)
    assert {"key": "mu", "default": 3.0, "about": "times the loss", "part": "Scaled"} in spoken["hyper"]
    assert "no hyperparameters" in fedthe("methods", "fedrep").out
    assert "did you mean fedthe" in fedthe("methods", "fedthee", exits=2).err
    assert "did you mean Scaled" in fedthe("methods", "mine.py:Scald", exits=2).err


def test_a_run_needs_no_file(fedthe, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    shown = fedthe("run", f"dataset={data}", "methods=mine.py:Scaled,fedavg,fedavg(balanced=true)", *SMALL).out
    for words in ("Scaled", "fedavg(balanced=true)", "runs/run"):
        assert words in shown
    assert json.loads((tmp_path / "runs" / "run" / "config.json").read_text())["rounds"] == 1
    named = fedthe("run", f"dataset={data}", "name=mine", "methods=fedavg", *SMALL, "--json").out
    assert json.loads(named)["folder"] == "runs/mine"
    (tmp_path / "a=b.toml").write_text("rounds = 1")  # a file is a file, whatever its name
    assert "no method 'x'" in fedthe("run", "a=b.toml", "methods=x", exits=2).err
    for key in ("federation", "on_round", "config"):  # arguments of `fedthe.run`, but no settings
        (tmp_path / "mine.toml").write_text(f"{key} = 3")
        assert f"there is no setting '{key}'" in fedthe("run", "mine.toml", exits=2).err
    (tmp_path / "mine.toml").write_text("sweep = 0")
    assert "sweep must be a table" in fedthe("run", "mine.toml", exits=2).err
    for words, says in (
        ((), "dataset=digits methods=fedavg"),
        (("rouns=3",), "did you mean rounds"),
        (("dataset=digits", "rounds"), "is not a setting"),
        (("methods=fedthe(alpha=0.2",), "there is no method"),
        (("methods=gone.py:X",), "gone.py does not exist"),
        (("methods=mine.py:Scald",), "did you mean Scaled"),
        (("methods=mine.py",), "write mine.py:NAME"),
        (("methods=fedavg", "sweep.alpha=0.1"), "sweep.alpha"),
    ):
        said = fedthe("run", *words, exits=2)
        assert says in said.err
        assert said.out == ""


def test_a_sweep_ends_with_a_table_or_one_object(fedthe, data, tmp_path):
    words = ("run", f"dataset={data}", "methods=fedavg,fedthe", "sweep.alpha=0.1,0.9", "sweep.lr=0.1,0.01", *SMALL)
    out = tmp_path / "out"
    shown = fedthe(*words, f"out={out}").out
    rows = [line.split() for line in shown.splitlines() if line.startswith((" fedavg", " fedthe"))]
    assert [row[:-3] for row in rows] == [
        *(["fedavg", lr] for lr in ("0.1", "0.01")),
        *(["fedthe", alpha, lr] for lr in ("0.1", "0.01") for alpha in ("0.1", "0.9")),
    ]
    assert all(len(line) <= 80 for line in shown.splitlines() if str(tmp_path) not in line)
    assert (out / "sweep.png").exists()
    assert (out / "report.html").exists()
    spoken = json.loads(fedthe(*words, f"out={out}", "--json").out)
    assert spoken["keys"] == ["alpha", "lr"]
    assert len(spoken["results"]) == 6
    page = fedthe("report", out, "--format", "md").out
    assert "## lr=0.1" in page
    assert "## lr=0.01" in page


@pytest.mark.filterwarnings("ignore:clients=400 failed")
def test_what_fails_in_a_sweep_is_said_and_is_the_exit_code(fedthe, data, tmp_path):
    words = ("run", f"dataset={data}", "methods=fedavg", *SMALL[1:], "sweep.clients=3,400", f"out={tmp_path / 'out'}")
    said = fedthe(*words, exits=1)
    assert "failed: clients=400:" in said.out
    assert len([line for line in said.out.splitlines() if line.startswith(" fedavg")]) == 1
