"""`fedthe bench`: what it prints, keeps and refuses. No test looks at the clock."""

import json
from dataclasses import replace

import pytest

from fedthe import store
from fedthe.bench.result import read_bench
from fedthe.bench.workload import Sizes
from helpers import ROOT


@pytest.fixture(scope="module")
def measured():
    return read_bench(ROOT / "benchmarks" / "engine-cpu.json")


@pytest.fixture
def columns():
    return 80


def test_the_command_measures_and_prints_a_table(fedthe, home, tmp_path, monkeypatch):
    monkeypatch.setattr("fedthe.bench.workload.SMALL_QUICK", Sizes(2, 2, 6, 6, 2, 4, 2, 15, 1, 64, 2**10))
    saved = tmp_path / "new" / "saved.json"
    said = fedthe("bench", "--quick", "--device", "cpu", "--remember", "--save", saved)
    for line in read_bench(saved).rows:
        assert line.name in said.out
    assert "measuring" in said.err
    assert "before" not in said.out
    kept = home / "bench-cpu.json"
    assert kept.read_text() == saved.read_text()
    assert read_bench(kept).quick
    assert str(kept) in said.out


def test_the_command_compares_with_what_it_is_given_or_remembers(fedthe, home, measured, tmp_path, monkeypatch):
    monkeypatch.setattr("fedthe.bench.measure.measure", lambda *_, **__: measured)
    assert json.loads(fedthe("bench", "--json").out)["changes"] == []
    fedthe("bench", "--remember")
    again = json.loads(fedthe("bench", "--json").out)
    assert [(change["name"], change["ratio"]) for change in again["changes"]] == [
        (line.name, 1) for line in measured.rows
    ]
    rows = tuple(replace(line, value=1234.5, floor=12.3, floor_ratio=100.4) for line in measured.rows)
    slow, fast = (replace(measured, rows=tuple(replace(line, value=line.value / by) for line in rows)) for by in (1, 2))
    monkeypatch.setattr("fedthe.bench.measure.measure", lambda *_, **__: slow)
    store.write_json(tmp_path / "fast.json", fast.as_dict())
    said = fedthe("bench", "--baseline", tmp_path / "fast.json").out
    assert "+100 % !" in said
    assert "10 of 10 rows are over 20 % slower" in said  # and yet the exit code is 0
    assert "…" not in said  # it fits 80 columns


def test_a_remembered_baseline_of_another_format_is_only_noted(fedthe, home, measured, monkeypatch):
    monkeypatch.setattr("fedthe.bench.measure.measure", lambda *_, **__: measured)
    store.write_json(home / "bench-cpu.json", {"format": 0})
    spoken = json.loads(fedthe("bench", "--json", "--remember").out)
    assert "format 0" in spoken["notes"][0]
    assert read_bench(home / "bench-cpu.json") == measured


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "does not exist"),
        ("{", "not JSON"),
        ("[1]", "not a result of `fedthe bench`"),
        ('{"format": 99}', "has format 99 instead of 1"),
        ('{"format": 1, "machine": {}}', "incomplete"),
    ],
)
def test_a_baseline_that_cannot_be_read_is_refused_before_the_work(fedthe, tmp_path, monkeypatch, content, says):
    monkeypatch.setattr("fedthe.bench.measure.measure", lambda *_, **__: pytest.fail("it was measured"))
    path = tmp_path / "baseline.json"
    if content is not None:
        path.write_text(content)
    said = fedthe("bench", "--baseline", path, exits=2)
    assert says in said.err
    assert "baseline.json" in said.err
    assert said.out == ""


def test_other_bad_input_exits_with_2_as_well(fedthe, tmp_path):
    assert "did you mean stack" in fedthe("bench", "--engine", "stak", exits=2).err
    assert "device must be" in fedthe("bench", "--device", "tpu", exits=2).err
    assert "is a folder" in fedthe("bench", "--save", tmp_path, exits=2).err
    (tmp_path / "file").touch()
    assert "cannot write in" in fedthe("bench", "--save", tmp_path / "file" / "x.json", exits=2).err
