"""The examples with sensors and text: their readers, their clients, and a run in small."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import fedthe
from fedthe.errors import InputError
from fedthe.names import name_method
from helpers import ROOT, fails


@pytest.fixture(scope="module")
def load() -> Callable[[str], ModuleType]:
    """An example as a module, by its name."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="module")
def watch(load):
    return load("watch")


@pytest.fixture(scope="module")
def descriptions(load):
    return load("descriptions")


# ---------------------------------------------------------------- sensors


def write_recordings(path: Path, people: int = 10, length: int = 700, **changes: Any) -> Path:
    """A file as seglearn ships it. Every reading says whose it is: person, arm, exercise, and when."""
    keys = [(person, arm, exercise) for exercise in range(7) for arm in (1, 0) for person in range(1, people + 1)]
    times = np.arange(length)
    columns = [np.stack([*(np.full(length, k) for k in key), times, times, times], 1) for key in keys]
    person, arm, exercise = np.array(keys).T
    content = {"X": [c.astype(float) for c in columns], "y": exercise, "side": arm.astype(float), "subject": person}
    np.save(path, content | {"y_labels": ["PEN"]} | changes, allow_pickle=True)
    return path


@pytest.fixture(scope="module")
def wearers(watch, tmp_path_factory):
    """Clients and tests that the example would make a federation of."""
    file = write_recordings(tmp_path_factory.mktemp("watch") / "watch_dataset.npy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch.fedthe.Federation, "from_clients", lambda *a, **k: (a, k), raising=False)
        (clients,), given = watch.make_federation(watch.read_recordings(file))
    return clients, given["tests"]


def test_a_client_is_a_person_with_one_arm_and_four_exercises(wearers):
    clients, tests = wearers
    assert len(clients) == 10
    arms = []
    for i, parts in enumerate(clients):
        worn = {(x[0], x[1]) for part, _ in parts.values() for x in part.reshape(-1, 6)}
        ((person, arm),) = worn
        assert person == i + 1
        arms.append(arm)
        x, y = tests["other_arm"][i]
        assert {(person, 1 - arm)} == {(row[0], row[1]) for row in x.reshape(-1, 6)}
        own = [set(labels.tolist()) for _, labels in parts.values()]
        assert own[0] == own[1] == own[2] == set(y.tolist())
        assert len(own[0]) == 4
        x, y = tests["new_exercises"][i]
        assert {(person, arm)} == {(row[0], row[1]) for row in x.reshape(-1, 6)}
        assert set(y.tolist()) == set(range(7)) - own[0]
    assert sorted(arms) == [0.0] * 5 + [1.0] * 5


def test_windows_are_labelled_whole_and_in_order_and_no_reading_is_in_two_parts(wearers):
    clients, tests = wearers
    for x, y in [rows for parts in clients for rows in parts.values()] + tests["other_arm"] + tests["new_exercises"]:
        assert x.dtype == np.float32
        assert x.shape == (len(y), 100, 6)
        np.testing.assert_array_equal(x[:, :, 2], np.repeat(y[:, None], 100, 1))  # of one recording
        np.testing.assert_array_equal(np.diff(x[:, :, 3], axis=1), 1)  # no gap
    for parts in clients:
        train, val, test = (parts[name][0][:, :, 3] for name in ("train", "val", "test"))
        assert train.max() < val.min()
        assert val.max() < test.min()


@pytest.mark.parametrize(
    "changes", [{"X": [1, 2]}, {"X": None}, {"y": None}, {"side": np.zeros(3)}, {"X": [np.zeros((7, 5))] * 140}]
)
def test_files_of_other_content_are_refused(watch, tmp_path, changes):
    file = write_recordings(tmp_path / "watch_dataset.npy", length=1, **changes)
    fails(lambda: watch.read_recordings(file), file)


def test_missing_recordings_come_with_the_command_that_gets_them(watch, monkeypatch):
    monkeypatch.setattr(watch, "find_spec", lambda name: None)
    fails(watch.find_recordings, "pip install --no-deps seglearn")


def test_the_recordings_of_seglearn(watch):
    try:
        found = watch.read_recordings(watch.find_recordings())
    except InputError as error:
        pytest.skip(str(error))
    assert set(found) == {(person, arm, exercise) for person in range(1, 11) for arm in (0, 1) for exercise in range(7)}
    assert all(900 < len(x) < 3000 and np.isfinite(x).all() for x in found.values())
    gravity = [np.linalg.norm(x[:, :3], axis=1).mean() for x in found.values()]
    assert 0.8 < np.mean(gravity) < 1.3  # g


# ---------------------------------------------------------------- text

ENTRY = """Package: {name}
Source: {source} (1.2-3)
Maintainer: {team} <team@example.org>
Depends: libc6 (>= 2.34)
Description: {text}
Tag: devel::library,
 role::{role}, works-with::text
Section: libs
"""


def describe(name: str, **fields: str) -> str:
    fields = {"source": name, "team": "A Team", "text": "a tool", "role": "program"} | fields
    return ENTRY.format(name=name, **fields)


@pytest.fixture(scope="module")
def listed(descriptions, tmp_path_factory):
    """The packages of a list with 17 teams; team 0 has the fewest sources, and every source two packages."""
    entries = []
    for team in range(17):
        for source in range(5 + team):
            for kind, role in (("tool", "program"), ("library", "shared-lib")):
                name = f"{kind}{team}-{source}"
                text = f"{kind} number {source} of team{team}"
                entries.append(describe(name, source=f"s{team}-{source}", team=f"Team {team}", text=text, role=role))
    entries += [describe(f"old{i}", team="Debian QA Group") for i in range(40)]
    file = tmp_path_factory.mktemp("packages") / "packages.txt"
    file.write_text("\n".join(entries), encoding="utf-8")
    return descriptions.read_packages(file)


def test_packages_are_read_with_team_source_and_role(descriptions, tmp_path):
    file = tmp_path / "packages.txt"
    two = describe("two").replace("role::program", "role::program, role::plugin")
    alone = describe("alone", role="documentation").replace("Source: alone (1.2-3)\n", "")
    bare = describe("bare").replace("Description", "Other")
    entries = [
        describe("a", source="src", text="Größe: it's – fine"),
        two,
        describe("meta", role="metapackage"),
        alone,
        bare,
    ]
    file.write_bytes("\n".join(entries).encode() + b"\xff\xfe\n\nPackage: cut")
    assert descriptions.read_packages(file) == [
        descriptions.Package("A Team", "src", "Größe: it's – fine", 0),
        descriptions.Package("A Team", "alone", "a tool", 3),
    ]


def test_words_become_the_same_tokens_everywhere(descriptions):
    packages = [descriptions.Package("", "", text, 0) for text in ("C++ Library", "library, of C++!", "", "a " * 50)]
    x, _ = descriptions.encode(packages)
    assert x.dtype == np.int64
    assert x.shape == (4, 12)
    assert x[0, :3].tolist() == [x[1, 2], x[1, 0], 0]
    assert x[2].tolist() == [0] * 12
    assert len(set(x[3])) == 1
    assert 0 < x[3, 0] < 4096


def test_no_source_is_in_two_parts(descriptions, listed):
    own = [package for package in listed if package.team == "Team 9"]
    parts = descriptions.split(own)
    seen = {name: set(x[:, 2].tolist()) for name, (x, _) in parts.items()}  # the word that is the source's number
    assert sum(len(y) for _, y in parts.values()) == len(own) == 28
    assert len(seen["train"] | seen["val"] | seen["test"]) == 14 == sum(map(len, seen.values()))
    assert [len(seen[name]) for name in ("train", "val", "test")] == [9, 3, 2]
    assert all(np.bincount(y).tolist() == [len(y) // 2] * 2 for _, y in parts.values())


def test_clients_are_the_teams_with_the_most_sources(descriptions, listed, monkeypatch):
    monkeypatch.setattr(fedthe.Federation, "from_clients", lambda *a, **k: (a, k), raising=False)
    (clients,), given = descriptions.make_federation(listed)
    assert [sum(len(y) for _, y in parts.values()) for parts in clients] == [
        2 * (5 + team) for team in range(16, 0, -1)
    ]
    assert sum(len(y) for _, y in given["tests"]["orphaned"]) == 40
    fails(lambda: descriptions.make_federation(listed[:100]), "100 packages", "Debian")


def test_missing_lists_come_with_a_way_out(descriptions, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    fails(lambda: descriptions.read_packages(None), "apt gives no list", "head of this file")


def test_the_lists_of_this_machine(descriptions):
    if shutil.which("apt-cache") is None:
        pytest.skip("there is no apt")
    packages = descriptions.read_packages(None)
    if len(packages) < 20_000:
        pytest.skip("apt's lists are empty or of a part of Debian; run `apt-get update`")
    assert {package.role for package in packages} == set(range(6))
    assert any(package.team == descriptions.ORPHANED for package in packages)


# ---------------------------------------------------------------- both


@pytest.fixture
def small_runs(monkeypatch, tmp_path):
    """What the example's runs gave, with the example's settings but for fewer seeds and rounds."""
    monkeypatch.chdir(tmp_path)
    made, whole = [], fedthe.run

    def run(**settings):
        made.append(whole(**settings | {"seeds": [0], "rounds": 1}))
        return made[-1]

    monkeypatch.setitem(vars(fedthe), "run", run)
    return made


def test_the_watch_runs_in_small(watch, small_runs, capsys, tmp_path):
    watch.main(write_recordings(tmp_path / "watch_dataset.npy", length=530))
    check_run(small_runs, capsys, ["original", "other_arm", "new_exercises", "ooc", "mixture"], clients=10)


def test_the_descriptions_run_in_small(descriptions, listed, small_runs, capsys, monkeypatch):
    monkeypatch.setattr(descriptions, "read_packages", lambda path: listed)
    descriptions.main(None)
    check_run(small_runs, capsys, ["original", "orphaned", "ooc", "mixture"], clients=16)


def check_run(made, capsys, tests, clients):
    (results,) = made
    assert results.failures == {}
    assert results.tests == tests
    assert results.config.clients == clients
    printed = capsys.readouterr().out
    for word in (*results.methods, *results.tests, "fedthe compared with fedavg_ft"):
        assert word in printed


@pytest.mark.parametrize("name", ["watch", "descriptions"])
def test_a_missing_file_is_one_sentence_and_exit_code_2(name, tmp_path):
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "none" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["watch", "descriptions"])
def test_the_page_shows_what_was_measured(name):
    measured = json.loads((ROOT / "benchmarks" / "examples.json").read_text(encoding="utf-8"))[name]["accuracy"]
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    table = page.split(f"<!-- {name} -->")[1].strip().split("\n\n")[0].splitlines()[2:]
    shown = {cells[0]: cells[1:] for cells in ([cell.strip(" *") for cell in row.split("|")[1:-1]] for row in table)}
    expected = {
        name_method(method): [f"{mean:.1f} ± {std:.1f}" for mean, std in row.values()]
        for method, row in measured.items()
    }
    assert shown == expected
