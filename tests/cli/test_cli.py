"""The command as a person meets it: what it prints, what it refuses, what it leaves behind."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from fedthe import cli
from helpers import count_loads


def write_npz(path, rows=300, **more):
    images = np.random.default_rng(0).integers(0, 256, (rows, 16, 16, 3), dtype=np.uint8)
    np.savez(path, images=images, labels=np.arange(rows) % 3, **more)
    return path


def test_show_writes_pictures_and_a_manifest(fedthe, tmp_path):
    data = write_npz(tmp_path / "mine.npz")
    arguments = ("data", "show", f"npz:{data}", "--clients", 4, "--dirichlet", 1, "-o", tmp_path / "out")
    shown = fedthe(*arguments).out
    assert "natural: not available, mixture made of three parts" in shown
    summary = json.loads(fedthe(*arguments, "--json").out)
    assert np.array(summary["clients"]).sum() == 300
    assert summary["tests"]["original"] == [15] * 4
    assert summary["manifest_hash"] in shown
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [client["classes"] for client in manifest["clients"]] == summary["clients"]
    for name in ("clients.png", "tests.png"):
        with Image.open(tmp_path / "out" / name) as picture:
            assert min(picture.size) > 200


def test_names_from_a_file_are_text_not_markup(fedthe, tmp_path):
    names = ["[bold]loud[/bold]", "$\\frac$ \x1b[31m \n", "漢" * 99]
    data = write_npz(tmp_path / "mine.npz", classes=np.array(names))
    shown = fedthe("data", "show", f"npz:{data}", "--clients", 2, "--dirichlet", 9, "-o", tmp_path).out
    assert "[bold]loud[/bold]" in shown
    assert "$\\frac$" in shown
    assert "\x1b" not in shown
    assert "漢…" in shown


def test_a_test_that_no_client_has_is_shown_as_such(fedthe, tmp_path):
    data = write_npz(tmp_path / "mine.npz")
    arguments = ("data", "show", f"npz:{data}", "--natural", f"npz:{data}", "--clients", 3, "-o", tmp_path / "out")
    shown = fedthe(*arguments).out
    assert "300 images are in mine too and left out" in shown
    assert "natural (mine)" in shown


def test_a_place_that_cannot_be_written_is_refused_before_the_work(fedthe, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assert "cannot write in" in fedthe("data", "show", "digits", "-o", tmp_path / "file" / "x", exits=2).err
    (tmp_path / "out" / "clients.png").mkdir(parents=True)
    assert "clients.png" in fedthe("data", "show", "digits", "--clients", 3, "-o", tmp_path / "out", exits=2).err


def test_demo_and_run_end_with_a_table_or_one_object(fedthe, tmp_path, monkeypatch):
    small = {"rounds": 1, "curve": [], "samples": 2, "clients": 3, "batch": 512, "methods": ["fedavg", "fedthe_plus"]}
    monkeypatch.setattr(cli.run, "DEMO", cli.run.DEMO | small)
    loads = count_loads(monkeypatch, "glyphs")
    shown = fedthe("demo", "-o", tmp_path / "demo")
    assert len(loads) == 1
    for words in ("Accuracy in %", "fedthe_plus", "corr.", "mean", str(tmp_path / "demo")):
        assert words in shown.out
    assert {"clients.png", "tests.png", "results.jsonl", "manifest-0.json"} <= {
        file.name for file in (tmp_path / "demo").iterdir()
    }
    spoken = json.loads(fedthe("demo", "-o", tmp_path / "demo", "--json").out)
    assert set(spoken["results"]) == {"fedavg", "fedthe_plus"}
    assert list(spoken["results"]["fedavg"]) == ["original", "corrupted", "natural", "ooc", "mixture", "corrupted_ooc"]
    assert spoken["seconds"] > 0
    file = tmp_path / "mine.toml"
    file.write_text('methods = ["fedavg"]\nclients = 3\nrounds = 1\nlocal_epochs = 1\nbatch = 512\nsamples = 2\n')
    spoken = json.loads(fedthe("run", file, "seeds=0,1", f"out={tmp_path / 'run'}", "--json").out)
    assert spoken["folder"] == str(tmp_path / "run")
    assert "did you mean rounds" in fedthe("run", file, "round=2", exits=2).err
    assert "fedthe run --example" in fedthe("run", tmp_path / "none.toml", exits=2).err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("data", "show", "cifar"), "did you mean cifar10"),
        (("data", "show", "cifar10"), "fedthe data fetch cifar10"),
        (("data", "show", "npz:nowhere.npz"), "nowhere.npz"),
        (("data", "show", "digits", "--severity", 9), "severity must be"),
        (("data", "show", "digits", "--clients", 1), "at least 2 clients"),
        (("data", "show", "digits", "--clients", 9999), "use at most"),
        (("data", "show", "digits", "--partition", "fair"), "choose from balanced"),
        (("data", "show", "digits", "--natural", "rain"), "rain"),
        (("data", "show", "digits", "--frost", "nowhere"), "nowhere"),
        (("data", "fetch", "glyphs"), "comes with the package"),
        (("data", "verify", "mnits"), "did you mean mnist"),
        (("data", "show", "digits", "--clients", "x"), "not a valid integer"),
        (("data", "show", "npz:[/x].npz"), "[/x].npz"),
        (("data", "show", "npz:" + 300 * "a"), "too long for the name"),
        (("data", "show", "npz:~nosuchuser/x"), "no home folder"),
        (("data", "verify", "[/x]"), "[/x]"),
        (("data", "fetch", "[/x]"), "[/x]"),
        (("data", "show", "cifar10", "--size", 1000), "fedthe data fetch cifar10"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(fedthe, arguments, says, tmp_path):
    out = tmp_path / "out"
    more = ("-o", out) if "show" in arguments else ()
    said = fedthe(*arguments, *more, exits=2)
    assert says.lower() in said.err.lower()
    assert "Traceback" not in said.err
    assert said.out == ""
    assert not out.exists()


def test_verify_of_a_damaged_dataset_exits_with_2(fedthe, home):
    folder = home / "data" / "mnist"
    folder.mkdir(parents=True)
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte"):
        (folder / name).write_bytes(b"not an idx file")
    assert str(folder) in fedthe("data", "verify", "mnist", exits=2).out


def test_list_tells_what_is_at_hand(fedthe):
    listed = json.loads(fedthe("data", "list", "--json").out)
    assert listed["glyphs"]["here"] is True
    assert listed["cifar10"]["here"] is False
    assert listed["npz"]["here"] is None
    assert "imagenet32" in fedthe("data", "list").out


def test_help_and_version_need_neither_torch_nor_numpy():
    code = """
import sys
import fedthe.cli
assert not {"torch", "numpy", "matplotlib", "PIL", "scipy", "sklearn"} & set(sys.modules), "heavy import at start"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_there_and_others_are_not():
    import fedthe

    for name in fedthe.__all__:
        assert getattr(fedthe, name) is not None
        assert name in dir(fedthe)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = fedthe.nonsense


def test_the_command_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "fedthe", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("fedthe ")


def test_arguments_are_explained(fedthe):
    """Some versions of click hide the help of arguments from some versions of typer."""
    assert "the server's folder" in " ".join(fedthe("federate", "status", "--help").out.lower().split())


NEWER = "typer==0.29.1", "annotated-doc"  # newer than flwr allows
WITHOUT_CLICK = """
import sys
sys.modules["click"] = None
from fedthe.cli import main
sys.argv[1:] = {words}
main()
"""


@pytest.fixture(scope="module")
def newer_typer(tmp_path_factory):
    """What `pip install .` brings where nothing holds typer back."""
    folder = tmp_path_factory.mktemp("typer")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *NEWER]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        assert not os.environ.get("CI"), done.stderr
        pytest.skip("pip cannot install it here")
    return folder


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["federate", "status", "--help"], 0, "The server's folder"),
        (["federate", "status", "nowhere"], 2, "fedthe: nowhere has no status.json; name the folder of"),
        (["run", "--nonsense"], 2, "fedthe: no such option: --nonsense"),
        (["predict"], 2, "fedthe: missing argument"),
        (["rnu"], 2, "fedthe: there is no command 'rnu'; did you mean run?"),
        ([], None, "Usage: fedthe"),
    ],
)
def test_the_command_works_with_a_typer_that_has_no_click(newer_typer, tmp_path, words, code, says):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_CLICK.format(words=words)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(newer_typer), "COLUMNS": "120"},
    )
    assert says in done.stdout + done.stderr
    assert code in (None, done.returncode)
    assert "Traceback" not in done.stderr
