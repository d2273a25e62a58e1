"""The hostile trial: its short form has no bad outcome, and it would see one."""

import json
import os
import random
import subprocess
import sys

import pytest

from helpers import ROOT

sys.path.append(str(ROOT / "tools"))

import torture
from hostile import damage, reports, settings, trial


def test_the_short_form_has_no_bad_outcome(tmp_path):
    """Damaged files, reports, settings, images, full disks and kills: `--only KIND:NUMBER` repeats what fails."""
    script, file = ROOT / "tools" / "torture.py", tmp_path / "torture.json"
    # a process of its own: the trial forks, which threads of the tests would not survive
    done = subprocess.run(
        [sys.executable, str(script), "--short", "--jobs", "1", "--json", str(file)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert file.exists(), done.stdout + done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["bad"] == [], done.stdout
    assert done.returncode == 0
    tries = {kind: sum(counts.values()) for kind, counts in found["counts"].items()}
    assert tries == {name: len(range(0, kind.long, kind.step)) for name, kind in torture.KINDS.items()}
    for kind in ("runs", "reports", "settings"):
        counts = found["counts"][kind]
        assert counts.get("same", 0) + counts.get("redone", 0) >= 3  # not everything is refused


def test_the_page_shows_the_record_and_the_record_is_of_the_long_form():
    summary = json.loads(torture.RECORD.read_text(encoding="utf-8"))
    page = torture.PAGE.read_text(encoding="utf-8")
    assert len(torture.MARKED.findall(page)) == 1
    assert page == torture.fill(page, summary), "run python tools/torture.py --json benchmarks/torture.json"
    tries = {kind: sum(counts.values()) for kind, counts in summary["counts"].items()}
    assert tries == {name: kind.long for name, kind in torture.KINDS.items()}
    assert summary["bad"] == []
    assert not any(counts.get(bad) for counts in summary["counts"].values() for bad in trial.BAD)


SAID = {
    "refused": trial.Said(2, "", "fedthe: there is no setting 'x'.\n"),
    "traceback": trial.Said(trial.CRASHED, "", 'Traceback (most recent call last):\n  File "x.py"\nKeyError: 1\n'),
    "hang": trial.Said(-9, "", "", hung=True),
    "silent": trial.Said(2, "", "fedthe: \x1b[31m is no image.\n"),
}


@pytest.mark.parametrize("outcome", SAID)
def test_words_are_judged(outcome):
    assert trial.judge_words(SAID[outcome]).outcome == outcome


@pytest.mark.parametrize("said", [trial.Said(-11, "", ""), trial.Said(2, "", ""), trial.Said(3, "", "fedthe: no.")])
def test_a_crash_and_an_exit_without_a_sentence_are_bad(said):
    assert trial.judge_words(said).outcome == "traceback"


def make_run(folder, right=3, failures=None, word=""):
    """What `fedthe run --json` leaves and prints, for one client."""
    import pyarrow
    import pyarrow.parquet

    row = {"method": "fedavg", "seed": 0, "client": 0, "right": right, "ms_per_sample": random.random()}
    tables = {"results": {"fedavg": right}, "std_over_seeds": {}, "worst_client": {}, "curves": {}, "manifests": {}}
    summary = tables | {"costs": {}, "answers": [], "failures": failures or {}}
    rows = [] if failures else [row]
    folder.mkdir(exist_ok=True)
    (folder / "results.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "results.parquet")
    (folder / "summary.json").write_text(json.dumps(summary))
    return trial.Said(0, json.dumps(summary), word)


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({}, "same"),
        ({"word": "fedthe: x is damaged; it is made again.\n"}, "redone"),
        ({"right": 2}, "silent"),
        ({"right": 2, "word": "fedthe: x is damaged; it is made again.\n"}, "silent"),
        ({"failures": {"fedavg, seed 0": "it diverged"}}, "refused"),
        ({"failures": {"fedavg, seed 1": "it diverged"}}, "silent"),
    ],
)
def test_numbers_are_judged(change, outcome, tmp_path):
    right = trial.read_numbers(tmp_path / "run", make_run(tmp_path / "run").out)
    said = make_run(tmp_path / "run", **change)
    assert trial.judge_run(said, tmp_path / "run", right).outcome == outcome


def test_a_file_that_is_gone_is_lost_and_one_that_moved_is_not(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    before = trial.take_stock(tmp_path)
    (tmp_path / "a").rename(tmp_path / "c")
    assert trial.find_loss(before, trial.take_stock(tmp_path), set(), refused=False) == ""
    (tmp_path / "b").write_text("other")
    assert trial.find_loss(before, trial.take_stock(tmp_path), set(), refused=False) == ""
    assert trial.find_loss(before, trial.take_stock(tmp_path), set(), refused=True) == "b has changed"
    assert trial.find_loss(before, trial.take_stock(tmp_path), {"b"}, refused=True) == ""
    (tmp_path / "b").unlink()
    assert trial.find_loss(before, trial.take_stock(tmp_path), set(), refused=False) == "b is gone"


CSV = "run,seed,client,method,test,percent\nmine,0,0,fedavg,ooc,{}\nmine,0,1,fedavg,ooc,50.0\n"


@pytest.mark.parametrize(
    ("out", "err", "outcome"),
    [
        (CSV.format("25.0"), "", "same"),
        (CSV.format("75.0"), "", "silent"),
        (CSV.format("75.0"), "fedthe: something is damaged.", "silent"),
        (CSV.format("25.0").rpartition("mine")[0], "", "silent"),
        (CSV.format("25.0").rpartition("mine")[0], "fedthe: client 1 is left out, its file is damaged.", "refused"),
    ],
)
def test_reports_are_judged(out, err, outcome, tmp_path):
    how = "report as csv"
    right = reports.read(how, tmp_path, trial.Said(0, CSV.format("25.0"), ""))
    assert reports.judge(how, tmp_path, trial.Said(0, out, err), right).outcome == outcome


MARKDOWN = "# run\n\nPercent right.\n\n|  | ooc | ms |\n| --- | ---: | ---: |\n| FedAvg | {} | {} |\n\n- {}\n"


@pytest.mark.parametrize(
    ("shown", "outcome"),
    [
        (("41.7 ± 1.0", "0.1", "a note"), "same"),
        (("41.7 ± 1.0", "0.2", "a note"), "same"),  # a time
        (("**41.7 ± 1.0**", "0.1", "a note"), "same"),
        (("43.0 ± 0.0", "0.1", "a note"), "silent"),
        (("43.0 ± 0.0", "0.1", "Seed 1 is left out: its file is damaged."), "refused"),
    ],
)
def test_means_without_a_damaged_file_are_named(shown, outcome, tmp_path):
    how = "report as md"
    right = reports.read(how, tmp_path, trial.Said(0, MARKDOWN.format("41.7 ± 1.0", "0.1", "a note"), ""))
    assert reports.judge(how, tmp_path, trial.Said(0, MARKDOWN.format(*shown), ""), right).outcome == outcome


def test_settings_are_judged(tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.json").write_text(json.dumps({"rounds": 7, "lr": 0.1}))
    assert settings.judge_settings(tmp_path, ["rounds=1", "rounds=7"]).outcome == "same"
    assert settings.judge_settings(tmp_path, ["rounds=250"]).outcome == "silent"
    assert settings.judge_settings(tmp_path, ["lr=nan"]).outcome == "silent"


@pytest.mark.parametrize("number", range(len(damage.WAYS)))
def test_the_seed_decides_the_damage_and_it_is_one(number, tmp_path):
    """The same number does the same twice, and leaves another folder than it found."""
    done = []
    for name in ("one", "two"):
        work = tmp_path / name
        (work / "run" / "answers").mkdir(parents=True)
        for i in range(3):
            rows = [{"test": "ooc", "client": k, "right": k, "samples": 4, "accuracy": 25.0 * k} for k in range(3)]
            (work / "run" / "answers" / f"{'abc'[i]}-{i}.json").write_text(json.dumps({"method": i, "rows": rows}))
        files = sorted((work / "run" / "answers").iterdir())
        before = trial.take_stock(work)
        done.append(damage.damage(work, files, random.Random(f"0:runs:{number}"), number))
        assert trial.take_stock(work) != before
    assert done[0] == done[1]
