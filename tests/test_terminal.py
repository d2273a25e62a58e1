"""Whatever goes wrong, a terminal gets one sentence and an exit code, and nothing that was done is lost."""

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

import fedthe as package
from fedthe import cli
from fedthe.errors import Failed, InputError
from fedthe.records import read_round
from fedthe.terminal import explain
from helpers import RESULTS, count_rounds

LONGEST = 60.0  # seconds that a child may take for what it does in one


def run_child(*arguments, **environment):
    command = [sys.executable, "-m", "fedthe", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | environment, text=True
    )


def write_to_a_full_disk(write):
    with Path("/dev/full").open("wb") as file:
        write(file)


def fill_by_parquet(file):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"a": np.random.default_rng(0).random(10**5)}), file)


def recurse():
    return recurse()


def wrap():
    try:
        raise OSError(errno.EDQUOT, "Disk quota exceeded", "x")
    except OSError:
        raise ValueError("cannot write") from None


@pytest.mark.parametrize(
    ("work", "says", "code"),
    [
        (lambda: torch.empty(2**50), "not enough memory", 1),
        (lambda: np.empty(2**50), "not enough memory", 1),
        (lambda: write_to_a_full_disk(lambda file: np.savez(file, a=np.ones(10**5))), "the disk is full", 1),
        (lambda: write_to_a_full_disk(fill_by_parquet), "the disk is full", 1),
        (wrap, "the disk is full", 1),
        (recurse, "nested too deep", 2),
    ],
)
def test_what_a_machine_cannot_do_is_a_sentence(work, says, code):
    with pytest.raises(Exception) as raised:  # noqa: PT011  that is what is being told apart
        work()
    sentence, exits = explain(raised.value)
    assert says in sentence
    assert exits == code


@pytest.mark.parametrize(
    ("error", "says", "code"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), "not enough memory", 1),
        (SafetensorError("Error: I/O error: No space left on device (os error 28)"), "the disk is full", 1),
        (OSError("100000 requested and 12800 written"), "the disk is full", 1),
        (PermissionError(errno.EACCES, "Permission denied", "x.toml"), "Permission denied: x.toml.", 2),
        (InputError("no."), "no.", 2),
        (Failed("it diverged"), "it diverged.", 1),
    ],
)
def test_known_errors_have_their_sentence_and_code(error, says, code):
    sentence, exits = explain(error)
    assert says in sentence
    assert exits == code


def test_a_bug_is_one_line_with_its_traceback_in_a_file(fedthe, tmp_path, monkeypatch):
    def fail(as_json):
        raise TypeError("of\nours \x1b[31m")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(cli.paper, "list_tables", fail)
    said = fedthe("table", exits=70).err
    assert said.startswith("fedthe: TypeError: of ours")
    assert said.count("\n") == 1
    assert "\x1b" not in said
    (kept,) = tmp_path.glob("fedthe-bug-*.txt")
    assert str(kept) in said
    assert "in fail" in kept.read_text()
    monkeypatch.setenv("FEDTHE_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["fedthe", "table"])
    with pytest.raises(TypeError):
        cli.main()


def test_control_characters_and_long_lists_do_not_reach_the_terminal(fedthe, monkeypatch):
    def refuse(as_json):
        raise InputError(f"\x1b[2J\r{list(range(10**5))}.")

    monkeypatch.setattr(cli.paper, "list_tables", refuse)
    said = fedthe("table", exits=2).err
    assert not set(said[:-1]) & {"\x1b", "\r", "\n"}
    assert len(said) < 3000


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rn"], "there is no command 'rn'; did you mean run?"),
        (["data", "lst"], "there is no command 'lst'; did you mean list?"),
        (["--versio"], "did you mean '--version'?"),
        (["run"], "fedthe run --example"),
        (["data", "show"], "missing argument 'spec'; `fedthe data show --help` says more."),
        (["bench", "--device", "gpu"], "device must be auto, cpu, cuda"),
        (["bench", "--engine", "lop"], "did you mean loop?"),
        (["bench", "--baseline", "nowhere.json"], "nowhere.json"),
        (["figure", "weight"], "did you mean weights?"),
        (["figure", "weights", "seeds=x"], "seeds must be a whole number"),
        (["figure", "weights", "--redraw", "seeds=0"], "leave out either the settings or"),
        (["table", "main-dir0.1", "rounds=3", "--show", "results"], "leave out either the settings or"),
        (["data", "show", "digits", "--dirichlet", "5e-324"], "dirichlet must be a positive number"),
        (["data", "show", "digits", "--dirichlet", "nan"], "dirichlet must be a finite number"),
        (["data", "show", "digits", "--seed", "-1"], "seed must be from 0"),
        (["data", "show", "digits", "--seed", 10**30], "seeds is too large"),
        (["data", "show", "digits", "--clients", 10**30], "clients is too large"),
        (["data", "show", ""], "dataset must not be empty"),
        (["data", "show", "digits", "--size", "4"], "size must be from 8"),
        (["data", "show", f"npz:{__file__}"], "is not a readable npz file"),
        (["data", "fetch", "nosuch"], "there is no 'nosuch' to fetch"),
    ],
)
def test_a_new_users_slips_are_one_sentence(words, says, fedthe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = fedthe(*words, exits=2)
    assert says in said.err.lower()
    assert said.err.count("\n") == 1
    assert said.err.lower().count("did you mean") <= 1
    assert said.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["table"], ["data", "list"], ["--help"], ["table", "--help"], ["figure"]])
def test_a_terminal_of_ascii_alone_can_show_everything(words):
    child = run_child(*words, PYTHONIOENCODING="ascii", LC_ALL="C", COLUMNS="80")
    out, err = child.communicate(timeout=LONGEST)
    assert (child.returncode, err) == (0, "")
    assert len(out) > 100
    assert out.isascii()


def test_records_and_errors_reach_an_ascii_terminal(tmp_path):
    results = RESULTS
    child = run_child("table", "main-dir0.1", "--show", results, PYTHONIOENCODING="ascii")
    out, err = child.communicate(timeout=LONGEST)
    assert (child.returncode, err) == (0, "")
    assert "+-" in out  # ±
    child = run_child("data", "show", "npz:漢…±", PYTHONIOENCODING="ascii")
    assert "npz is not at ?...+-;" in child.communicate(timeout=LONGEST)[1]


def test_a_reader_that_leaves_ends_the_command_quietly():
    with run_child("table", COLUMNS="80") as child:
        child.stdout.close()
        assert child.stderr.read() == ""
        assert child.wait(LONGEST) == 1


def test_output_that_cannot_be_written_is_said():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fedthe", "table", "--json"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr.startswith("fedthe: the disk is full")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("command", ["run", "table", "figure", "report", "bench"])
def test_help_is_not_broken_within_sentences(command, columns, fedthe, monkeypatch):
    """A line of prose ends early only where the next word would not have fitted."""
    monkeypatch.setenv("COLUMNS", str(columns))
    prose = fedthe(command, "--help").out.split("╭")[0].splitlines()[3:]
    lines = [line.strip() for line in prose]
    for line, after in pairwise(lines):
        if line and after:
            assert len(line) + 1 + len(after.split()[0]) > columns - 2, (line, after)


@pytest.mark.parametrize("command", ["run", "table"])
def test_sigterm_saves_as_ctrl_c_does_and_training_goes_on(command, data, tmp_path, monkeypatch):
    out = tmp_path / "out"
    settings = {"clients": 3, "local_epochs": 1, "batch": 512, "samples": 2, "dirichlet": 1.0, "seeds": [0]}
    words = [f"{key}={value}" for key, value in settings.items() if key != "seeds"]
    words += ["seeds=0", f"dataset={data}", f"out={out}", "rounds=100000", "checkpoint_seconds=100000"]
    (tmp_path / "c.toml").write_text('methods = ["fedavg"]\n')
    first = ["run", tmp_path / "c.toml"] if command == "run" else ["table", "main-dir1", "--yes", "methods=fedavg"]
    child = run_child(*first, *words, OMP_NUM_THREADS="1")
    try:
        wait_for_rounds(out / "progress.json", 2, child)
        child.send_signal(signal.SIGTERM)
        _, err = child.communicate(timeout=LONGEST)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 143
    assert err.splitlines()[-1] == "fedthe: stopped; run the same command to continue."
    (checkpoint,) = out.glob("trainings/*.safetensors")
    reached = read_round(checkpoint)
    assert reached >= 2  # nothing but the signal saved it
    assert json.loads((out / "progress.json").read_text())["state"] == "stopped"
    trained = count_rounds(monkeypatch)
    more = settings | {"methods": ["fedavg"], "dataset": data, "rounds": reached + 2}
    went_on = package.run(out=str(out), **more)
    assert len(trained) == 2
    whole = package.run(out=str(tmp_path / "whole"), **more)
    assert [(row.test, row.client, row.right) for row in went_on.rows] == [
        (row.test, row.client, row.right) for row in whole.rows
    ]


def wait_for_rounds(path, rounds, child):
    """Until a run says that it is in a round; a child that ended or hangs fails the test."""
    end = time.monotonic() + LONGEST
    while time.monotonic() < end:
        assert child.poll() is None, child.communicate()
        steps = json.loads(path.read_text())["steps"] if path.exists() else []
        if any(step["kind"] == "training" and step["done"] >= rounds for step in steps):
            return
        time.sleep(0.05)
    raise AssertionError(f"no round {rounds} within {LONGEST} seconds")
