"""A stored file is believed for what it says, not for its name; an exception stops one method; processes share work."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import asdict, dataclass, field

import numpy as np
import pytest
import torch

import fedthe
from fedthe import records, store
from fedthe.engine import train
from fedthe.errors import Damaged, InputError, MethodFailed
from fedthe.experiment.results import read_results
from fedthe.methods.base import Answers, Personal, Predictor, Rounds
from fedthe.methods.finetune import FineTune
from fedthe.methods.predictor import Forward

SMALL = {"clients": 3, "dirichlet": 1.0, "rounds": 2, "local_epochs": 1, "samples": 4}


def scores(results):
    return [{name: value for name, value in asdict(row).items() if name != "ms_per_sample"} for row in results.rows]


@pytest.fixture
def done(data, tmp_path):
    """A finished run of two methods on two seeds, and how to run it again."""
    settings = SMALL | {"dataset": data, "methods": ["fedavg", "fedthe"], "seeds": [0, 1], "out": str(tmp_path / "run")}
    return fedthe.run(**settings), lambda **more: fedthe.run(**settings | more)


def list_files(folder, kind):
    return sorted(folder.glob(kind))


# Sealed files


def test_one_flipped_bit_anywhere_in_a_checkpoint_is_noticed(done, tmp_path):
    results, _ = done
    path = list_files(results.folder, "trainings/*.safetensors")[0]
    whole = path.read_bytes()
    copy = tmp_path / path.name
    for at in np.random.default_rng(0).integers(0, len(whole), 60):
        copy.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << int(at) % 8]) + whole[at + 1 :])
        with pytest.raises(InputError, match="delete it to train again"):
            records.load_progress(copy)
    copy.write_bytes(whole)
    assert records.load_progress(copy).round == 2


def test_a_flipped_bit_in_a_checkpoint_stops_the_run_where_it_is_needed(done):
    results, again = done
    path = list_files(results.folder, "trainings/*.safetensors")[0]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(InputError, match="was changed after it was written"):
        again(samples=3)
    path.unlink()
    assert scores(again()) == scores(results)


@pytest.mark.parametrize("kind", ["trainings/*.safetensors", "answers/*.json", "samples/*.npz"])
def test_a_file_copied_over_another_of_its_kind_is_not_believed(kind, done):
    results, again = done
    first, *others = list_files(results.folder, kind)
    for other in others:
        keep = first.read_bytes()
        shutil.copyfile(other, first)
        if "trainings" in kind:
            with pytest.raises(InputError, match="another checkpoint under this name"):
                again(samples=3)
        else:
            with pytest.warns(UserWarning, match=rf"{first.name} is {other.stem} under another name"):
                assert scores(again()) == scores(results)
        first.write_bytes(keep)


def drop_rows(answer):
    answer["rows"] = []


def praise(answer):
    for row in answer["rows"]:
        row["accuracy"] = 99.0


def exchange(answer):
    answer["rows"][0]["client"], answer["rows"][1]["client"] = 1, 0


@pytest.mark.parametrize("change", [drop_rows, praise, exchange])
def test_a_changed_answer_is_answered_again(change, done):
    results, again = done
    path = list_files(results.folder, "answers/*.json")[0]
    answer = json.loads(path.read_text())
    change(answer)
    path.write_text(json.dumps(answer))
    with pytest.warns(UserWarning, match="was changed after it was written. The method is tested again"):
        repeated = again()
    assert scores(repeated) == scores(results)
    assert repeated.reused == 3
    assert again().reused == 4


def test_one_cached_copy_over_another_is_made_again(home):
    for key in ("a" * 40, "b" * 40):
        store.cached("corrupted", key, lambda key=key: {"images": np.full(5, ord(key[0]))})
    a, b = sorted((home / "cache").iterdir())
    shutil.copyfile(b, a)
    with pytest.warns(UserWarning, match="under another name. It is computed again"):
        again = store.cached("corrupted", "a" * 40, lambda: {"images": np.full(5, ord("a"))})
    assert again["images"].tolist() == [97] * 5


def test_a_cached_array_changed_with_all_checksums_of_the_archive_right_is_made_again(home):
    store.cached("kind", "key", lambda: {"a": np.arange(9)})
    (path,) = (home / "cache").iterdir()
    with zipfile.ZipFile(path) as archive:
        comment = archive.comment
    np.savez(path, a=np.arange(9) + 1)
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = comment
    with pytest.warns(UserWarning, match="was changed after it was written"):
        assert store.cached("kind", "key", lambda: {"a": np.arange(9)})["a"].tolist() == list(range(9))


@pytest.mark.parametrize("name", ["summary.json", "results.jsonl", "config.json", "environment.json"])
def test_results_that_were_edited_are_not_read_as_those_of_the_run(name, done):
    results, again = done
    assert read_results(results.folder).table() == results.table()
    path = results.folder / name
    text = path.read_text()
    edit = ('"checkpoint_seconds": 10', '"checkpoint_seconds": 19') if name == "config.json" else ("0", "9")
    path.write_text(text.replace(*edit, 1))
    assert path.read_text() != text
    with pytest.raises(InputError, match=r"run it again|was changed after"):
        read_results(results.folder)
    with pytest.warns(UserWarning, match="t is written again"):
        assert again().table() == results.table()
    assert read_results(results.folder).table() == results.table()


def test_a_record_may_be_called_otherwise_but_not_changed(tmp_path):
    store.write_sealed(tmp_path / "main.json", {"id": "main", "rows": [1]})
    (tmp_path / "main.json").rename(tmp_path / "old.json")
    assert store.read_sealed(tmp_path / "old.json") == {"id": "main", "rows": [1]}
    text = (tmp_path / "old.json").read_text()
    (tmp_path / "old.json").write_text(text.replace('"id": "main"', '"id": "other"'))
    with pytest.raises(Damaged, match="is main under another name"):
        store.read_sealed(tmp_path / "old.json")


def test_a_sealed_file_says_what_is_wrong_with_it(tmp_path):
    path = tmp_path / "one.json"
    store.write_sealed(path, {"a": [1, 2.5, None], "b": "ü"})
    assert store.read_sealed(path) == {"a": [1, 2.5, None], "b": "ü"}
    assert store.read_sealed(tmp_path / "none.json") is None
    path.rename(tmp_path / "two.json")
    with pytest.raises(Damaged, match="is one under another name"):
        store.read_sealed(tmp_path / "two.json")
    for text in ("", "[]", "{}", '{"id": "one"}', "[" * 100_000, '{"id": "one", "sha256": 1}', "null"):
        path.write_text(text)
        with pytest.raises(Damaged):
            store.read_sealed(path)


# One method's exception


@dataclass(frozen=True)
class Raises(Rounds, Personal):
    where: str = "local"

    def _raise(self, where):
        if self.where == where:
            raise ValueError(f"no luck\nin {where}")

    def local(self, fit, shared, mine, shard):
        self._raise("local")
        if self.where == "exit":
            sys.exit(0)
        return super().local(fit, shared, mine, shard)

    def personalize(self, fit, shared, mine, shard):
        self._raise("personalize")
        return super().personalize(fit, shared, mine, shard)

    def aggregate(self, shared, uploads, weights):
        self._raise("aggregate")
        return super().aggregate(shared, uploads, weights)

    def logits(self, net, mine, x):
        self._raise("logits")
        if self.where == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 EiB.")
        return super().logits(net, mine, x)


@dataclass(frozen=True)
class Stumbles(Forward):
    def start(self, method, mine, shard):
        raise KeyError("descriptor")


@pytest.mark.parametrize("engine", ["loop", "stack"])
@pytest.mark.parametrize("where", ["local", "personalize", "aggregate", "logits", "exit", "memory", "start"])
def test_an_exception_stops_its_method_alone_and_its_traceback_is_kept(where, engine, data, tmp_path, monkeypatch):
    monkeypatch.setitem(fedthe.METHODS, "mine", Stumbles() if where == "start" else Raises(where))
    settings = SMALL | {"dataset": data, "out": str(tmp_path / "run"), "engine": engine, "tests": ["original"]}
    results = fedthe.run(methods=["mine", "fedavg_ft"], **settings)
    assert results.methods == ["fedavg_ft"]
    (why,) = results.failures.values()
    kind = {"exit": "SystemExit", "memory": "OutOfMemoryError", "start": "KeyError"}.get(
        where, "ValueError: no luck in"
    )
    assert kind in why
    assert "\n" not in why
    assert "failures/mine-0.txt" in why
    traceback = (results.folder / "failures" / "mine-0.txt").read_text()
    assert traceback.startswith("Traceback")
    assert "test_trust.py" in traceback
    monkeypatch.setitem(fedthe.METHODS, "mine", FineTune)
    mended = fedthe.run(methods=["mine", "fedavg_ft"], **settings)
    assert mended.table()["mine"] == mended.table()["fedavg_ft"]
    assert not (results.folder / "failures" / "mine-0.txt").exists()


class Rude(Exception):
    def __str__(self):
        raise RuntimeError("no words")


@dataclass(frozen=True)
class Odd(Rounds):
    """Raises where little is expected to."""

    how: str = "share"

    def share(self, net, params):
        if self.how == "share":
            raise ValueError("no start")
        return super().share(net, params)

    def local(self, fit, shared, mine, shard):
        if self.how == "rude":
            raise Rude
        if self.how == "surrogate":
            raise ValueError("lone \udc80")
        if self.how == "stop":
            raise StopIteration
        if self.how == "in place":
            shared["head"]["out"].add_(1.0)
        if self.how == "mean":
            return fit(lambda *given: self.loss(*given).mean(), shared)
        return super().local(fit, shared, mine, shard)


@dataclass(frozen=True)
class Counts(Predictor):
    how: str = "passes"

    window = None

    def answer(self, method, mine, state, samples):
        logits = method.logits(mine, samples.x)
        return Answers(logits[:1] if self.how == "short" else logits), state

    @property
    def passes(self):
        if self.how == "passes":
            raise ValueError("uncounted")
        return 1, 0


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (Odd("share"), "ValueError: no start"),
        (Odd("rude"), "Rude: it cannot be shown"),
        (Odd("surrogate"), "lone"),
        (Odd("stop"), "StopIteration"),
        (Odd("in place"), "changes head.out of the shared model in place"),
        (Odd("mean"), "one number per sample"),
        (Counts("passes"), "uncounted"),
        (Counts("short"), "one row of logits per sample"),
    ],
)
def test_what_is_odd_in_a_method_stops_it_alone_and_is_said(part, says, data, tmp_path, monkeypatch):
    monkeypatch.setitem(fedthe.METHODS, "odd", part)
    settings = SMALL | {"dataset": data, "out": str(tmp_path / "run"), "tests": ["original"], "threads": 1}
    with pytest.warns(MethodFailed, match="odd, seed 0 failed"):
        results = fedthe.run(methods=["odd", "fedavg"], **settings)
    assert says in results.failures["odd, seed 0"]
    assert results.methods == ["fedavg"]


def test_hyperparameters_that_cannot_be_filed_are_refused_before_anything_is_moved(data, tmp_path, monkeypatch):
    @dataclass(frozen=True)
    class Holds(Rounds):
        what: object = None

    settings = SMALL | {"dataset": data, "methods": ["fedavg"], "out": str(tmp_path / "run"), "tests": ["original"]}
    fedthe.run(**settings)
    monkeypatch.setitem(fedthe.METHODS, "holds", Holds(torch.nn.ReLU()))
    with pytest.raises(InputError, match="holds cannot be filed by its hyperparameters"):
        fedthe.run(**settings | {"methods": ["holds"], "samples": 2})
    assert not (tmp_path / "run" / "earlier").exists()
    monkeypatch.setitem(fedthe.METHODS, "../holds", Rounds)
    with pytest.raises(InputError, match="cannot be part of a file's name"):
        fedthe.run(**settings | {"methods": ["../holds"]})


def test_fields_that_cannot_be_hashed_are_refused(data, tmp_path, monkeypatch):
    @dataclass(frozen=True)
    class Lists(Rounds):
        layers: list = field(default_factory=list)

    monkeypatch.setitem(fedthe.METHODS, "lists", Lists)
    with pytest.raises(InputError, match="lists cannot be filed by its hyperparameters: unhashable"):
        fedthe.run(dataset=data, methods=["lists"], out=str(tmp_path / "run"), **SMALL)


def test_fields_without_equality_would_share_a_training_and_are_refused(data, tmp_path, monkeypatch):
    @dataclass(frozen=True, eq=False)
    class Unequal(Rounds):
        k: int = 0

    monkeypatch.setitem(fedthe.METHODS, "unequal", Unequal)
    with pytest.raises(InputError, match="must be a dataclass with eq"):
        fedthe.run(dataset=data, methods=["unequal"], out=str(tmp_path / "run"), **SMALL)


def test_skipping_for_one_method_leaves_nobody_out_of_another(data, tmp_path):
    hard = {"rounds": 5, "local_epochs": 1, "personal_epochs": 12, "lr": 2.0, "weight_decay": 0.0, "batch": 64}
    settings = {"clients": 3, "dirichlet": 1.0, "samples": 16, "dataset": data, "tolerate": "skip"} | hard
    alone = fedthe.run(methods=["fedavg"], out=str(tmp_path / "alone"), **settings)
    both = fedthe.run(methods=["fedavg", "apfl"], out=str(tmp_path / "both"), **settings)
    assert any("apfl" in note and "left out" in note for note in both.notes)
    assert both.table()["fedavg"] == alone.table()["fedavg"]


# Several processes, and several settings


def test_a_lock_is_for_one_at_a_time_and_leaves_nothing(tmp_path):
    path = tmp_path / "below" / "x.lock"
    with store.hold(path) as ours:
        assert ours
        with store.hold(path, wait=False) as second:
            assert not second
    with store.hold(path, wait=False) as ours:
        assert ours
    assert list(path.parent.iterdir()) == []


def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path):
    code = "import sys, time, pathlib; from fedthe import store\n"
    code += "with store.hold(pathlib.Path(sys.argv[1])):\n    print('mine', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "x")], stdout=-1)
    assert child.stdout.readline() == b"mine\n"
    with store.hold(tmp_path / "x", wait=False) as ours:
        assert not ours
    os.kill(child.pid, signal.SIGKILL)
    child.wait(30)
    child.stdout.close()
    with store.hold(tmp_path / "x", wait=False) as ours:
        assert ours


def test_many_threads_never_hold_a_lock_together(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    inside, seen = [], []

    def work(i):
        with store.hold(tmp_path / "x") as ours:
            inside.append(i)
            time.sleep(0.001)
            seen.append((ours, len(inside)))
            inside.remove(i)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(80)))
    assert seen == [(True, 1)] * 80


SHARED = """
import json, sys, time
import torch
torch.set_num_threads(1)
import fedthe
from fedthe.engine import train
rounds = []
once = train.train_round
def count(*given):
    rounds.append(type(given[0]).__name__)
    time.sleep(0.05)
    return once(*given)
train.train_round = count
r = fedthe.run(dataset=sys.argv[1], methods=["fedavg", "fedthe", "ditto", "fedrep"], clients=3, dirichlet=1.0, rounds=4,
               local_epochs=1, samples=4, tests=["original"], out=sys.argv[2])
rows = [[row.method, row.client, row.right] for row in r.rows]
print(json.dumps({"rows": rows, "rounds": rounds, "reused": r.reused, "failures": r.failures}))
"""


def test_two_processes_share_the_work_and_agree(data, tmp_path):
    command = [sys.executable, "-c", SHARED, data]
    alone = json.loads(subprocess.run([*command, str(tmp_path / "alone")], stdout=-1, timeout=300, check=True).stdout)
    both = [subprocess.Popen([*command, str(tmp_path / "both")], stdout=-1) for _ in range(2)]
    said = [json.loads(each.communicate(timeout=300)[0]) for each in both]
    assert [each["rows"] for each in said] == [alone["rows"]] * 2
    assert [each["failures"] for each in said] == [{}, {}]
    # every round of every training was done by one of them, none by both
    assert sorted(said[0]["rounds"] + said[1]["rounds"]) == sorted(alone["rounds"])
    assert list((tmp_path / "both").rglob("*.lock")) == []


def test_results_of_other_settings_are_kept_beside(data, tmp_path, monkeypatch):
    settings = SMALL | {"dataset": data, "methods": ["fedavg"], "out": str(tmp_path / "run")}
    first = fedthe.run(**settings)
    assert first.earlier is None
    assert fedthe.run(**settings, checkpoint_seconds=3.0, threads=1).earlier is None  # settings that move no number
    other = fedthe.run(**settings | {"samples": 2})
    assert other.earlier.parent == first.folder / "earlier"
    kept = read_results(other.earlier)
    assert kept.config.samples == 4
    assert scores(kept) == scores(first)
    assert {row.samples for row in read_results(first.folder).rows} == {2}
    monkeypatch.setattr(train, "train_round", lambda *a: pytest.fail("trained again"))
    back = fedthe.run(**settings)
    assert scores(back) == scores(first)
    assert read_results(back.earlier).config.samples == 2


def test_results_of_a_method_that_fails_after_an_edit_are_kept_beside(data, tmp_path, monkeypatch):
    settings = SMALL | {"dataset": data, "methods": ["mine", "fedavg"], "out": str(tmp_path / "run")}
    monkeypatch.setitem(fedthe.METHODS, "mine", FineTune)
    good = fedthe.run(**settings)
    monkeypatch.setitem(fedthe.METHODS, "mine", Odd("share"))
    bad = fedthe.run(**settings)
    assert bad.methods == ["fedavg"]
    assert scores(read_results(bad.earlier)) == scores(good)


def test_a_run_that_is_refused_loses_no_results(done):
    results, again = done
    path = list_files(results.folder, "trainings/*.safetensors")[0]
    list_files(results.folder, "answers/*.json")[0].unlink()
    path.write_bytes(b"")
    before = {p.name: p.read_bytes() for p in results.folder.iterdir() if p.is_file() and p.name != "progress.json"}
    with pytest.raises(InputError):
        again()
    assert {p.name: p.read_bytes() for p in results.folder.iterdir() if p.name in before} == before


# Disks


def test_a_full_disk_is_one_sentence_that_names_the_file(tmp_path):
    from safetensors import SafetensorError

    errors = [
        OSError(28, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ]
    for error in errors:
        with pytest.raises(InputError, match="x does not fit on the disk"), store.whole_file(tmp_path / "x"):
            raise error
    with pytest.raises(SafetensorError), store.whole_file(tmp_path / "x"):
        raise SafetensorError("something else")
