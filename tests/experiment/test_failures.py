"""Awkward clients, and runs that go wrong: what is lost, what is kept, and what is said."""

import json
from dataclasses import asdict
from itertools import count

import numpy as np
import pytest
import torch

import fedthe
from fedthe import records, tree
from fedthe.engine import loop
from fedthe.engine import train as engine
from fedthe.errors import InputError
from fedthe.methods.base import FedAvg
from fedthe.methods.finetune import FineTune
from fedthe.methods.make import methods_for
from fedthe.nets import CNN

SMALL = {"clients": 3, "dirichlet": 1.0, "rounds": 2, "local_epochs": 1, "samples": 2}


@pytest.fixture
def save(tmp_path):
    """Writes images of these labels, brighter by class, and says what dataset they are."""

    def write(labels):
        step = 160 // (int(labels.max()) + 1)
        noise = np.random.default_rng(0).integers(0, 90, (len(labels), 16, 16, 3))
        images = (noise + step * labels[:, None, None, None]).astype(np.uint8)
        np.savez(tmp_path / "tiny.npz", images=images, labels=labels)
        return f"npz:{tmp_path / 'tiny.npz'}"

    return write


@pytest.fixture
def data(save):
    return save(np.arange(150) % 3)


def scores(results):
    """What must be equal between runs: everything but the time."""
    return [{name: value for name, value in asdict(row).items() if name != "ms_per_sample"} for row in results.rows]


def checkpoints(results):
    """Every training left on disk, by the methods that it serves."""
    paths = (results.folder if hasattr(results, "folder") else results).glob("trainings/*.safetensors")
    return {tuple(records.read_json(p.with_suffix(".json"))["methods"]): records.load_progress(p) for p in paths}


def is_finite(value):
    return all(torch.isfinite(leaf).all() for leaf in tree.flatten(value).values())


AWKWARD = {
    # 3 rows to train on, 1 to validate and 1 to test: so also streams of one sample
    "five rows each": (np.arange(15) % 3, {}, lambda held: (held.sum(1) == 5).all()),
    "one class only": (np.arange(90) % 3, {"dirichlet": 0.01}, lambda held: ((held > 0).sum(1) == 1).any()),
    "no client holds all classes": (
        np.arange(120) % 12,
        {"dirichlet": 0.1},
        lambda held: ((held > 0).sum(1) < 12).all() and (held > 0).any(0).all(),
    ),
    "one client has most rows": (
        np.arange(200) % 4,
        {"dirichlet": 0.1, "partition": "unbalanced", "seeds": [5]},
        lambda held: held.sum(1).max() > 8 * held.sum(1).min(),
    ),
    "a class that nobody has": (np.array([0, 1, 3] * 20), {}, lambda held: (held.sum(0) == 0).any()),
}


@pytest.mark.parametrize("case", AWKWARD)
def test_every_method_bears_awkward_clients(case, save, tmp_path):
    labels, more, holds = AWKWARD[case]
    few = case == "five rows each"  # where every mixture is empty
    tests, methods = ["original"] if few else ["original", "mixture"], methods_for(CNN(3))
    settings = SMALL | more | {"tests": tests, "samples": 1 if few else 2}
    results = fedthe.run(dataset=save(labels), methods=methods, out=str(tmp_path / "run"), **settings)
    (path,) = results.folder.glob("manifest-*.json")
    manifest = json.loads(path.read_text())
    assert holds(np.array([client["classes"] for client in manifest["clients"]]))
    assert results.failures == {}
    streams = [test for client in manifest["clients"] for test in tests if test in client["tests"]]
    assert len(streams) > 3 or few
    assert len(results.rows) == len(methods) * len(streams)
    for row in results.rows:
        assert 1 <= row.samples <= settings["samples"]
        assert row.accuracy == pytest.approx(100 * row.right / row.samples)
    for progress in checkpoints(results).values():
        assert is_finite(progress.server.shared)
        assert all(is_finite(mine) for mine in progress.clients)
        assert np.isfinite(progress.server.losses).all()


def test_too_few_rows_are_refused_with_the_way_out(save, tmp_path):
    with pytest.raises(InputError, match="use at most 2 clients"):
        fedthe.run(dataset=save(np.arange(14) % 3), out=str(tmp_path / "run"), **SMALL)


def test_one_diverges_and_the_others_finish(data, tmp_path):
    settings = SMALL | {"rounds": 8, "hyper": {"ditto": {"lam": 1e9}}}  # a pull that overshoots more in each round
    methods = ["fedavg", "ditto", "fedthe"]
    results = fedthe.run(dataset=data, methods=methods, out=str(tmp_path / "run"), **settings)
    assert set(results.failures) == {"ditto, seed 0"}
    assert results.methods == ["fedavg", "fedthe"]
    left = checkpoints(results)
    assert left["fedavg",].round == left["fedthe",].round == 8
    assert 0 < left["ditto",].round < 8
    assert len(left["ditto",].server.losses) == left["ditto",].round
    assert is_finite(left["ditto",].server.shared)
    assert all(is_finite(mine) for mine in left["ditto",].clients)
    alone = fedthe.run(
        dataset=data, methods=["fedavg", "fedthe"], out=str(tmp_path / "alone"), **settings | {"hyper": {}}
    )
    assert scores(results) == scores(alone)
    again = fedthe.run(dataset=data, methods=methods, out=str(tmp_path / "run"), **settings)
    assert again.failures == results.failures
    assert scores(again) == scores(results)


def test_one_diverges_in_deployment_and_those_it_shares_a_training_with_answer(data, tmp_path, monkeypatch):
    def diverge(self, fit, shared, mine, shard):
        return fit(lambda net, params, given, batch: FedAvg().loss(net, params, given, batch) * float("inf"), shared)

    monkeypatch.setattr(FineTune, "personalize", diverge)
    methods = ["fedavg", "fedavg_ft", "knn_per"]
    results = fedthe.run(dataset=data, methods=methods, out=str(tmp_path / "run"), **SMALL)
    assert set(results.failures) == {"fedavg_ft, seed 0"}
    assert results.methods == ["fedavg", "knn_per"]


def test_answers_that_are_not_finite_are_a_failure_and_no_score(data, tmp_path):
    settings = SMALL | {"rounds": 1, "batch": 64, "lr": 1e30, "weight_decay": 0.0}  # one step, seen by no later loss
    results = fedthe.run(dataset=data, methods=["fedavg"], out=str(tmp_path / "run"), **settings)
    assert set(results.failures) == {"fedavg, seed 0"}
    assert results.rows == ()


def interrupt(monkeypatch, where, name, after):
    """Ctrl-C at the call with this number, counted from 0."""
    calls, whole = count(), getattr(where, name)

    def call(*given):
        if next(calls) == after:
            raise KeyboardInterrupt
        return whole(*given)

    monkeypatch.setattr(where, name, call)


@pytest.mark.parametrize("methods", [["fedavg"], ["memo_g", "fedavg"]])
@pytest.mark.parametrize("call", [2, 3, 7, 11])
def test_ctrl_c_in_training_leaves_a_run_to_go_on_with(methods, call, data, tmp_path, monkeypatch):
    settings = SMALL | {"dataset": data, "methods": methods, "rounds": 4, "checkpoint_seconds": 1e9}
    whole = fedthe.run(out=str(tmp_path / "whole"), **settings)
    out = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        interrupt(patch, loop, "work", call)
        with pytest.raises(KeyboardInterrupt):
            fedthe.run(out=str(out), **settings)
    done = call // 3  # whole rounds of three clients
    left = checkpoints(out)
    assert [progress.round for progress in left.values()] == ([done] if done else [])
    rounds = []
    monkeypatch.setattr(engine, "train_round", lambda *a, go=engine.train_round: rounds.append(a[0].round) or go(*a))
    resumed = fedthe.run(out=str(out), **settings)
    assert rounds == list(range(done, 4))
    assert scores(resumed) == scores(whole)
    ((_, a),), ((_, b),) = checkpoints(whole).items(), checkpoints(resumed).items()
    assert a.server.losses == b.server.losses
    a, b = tree.flatten(a.server.shared), tree.flatten(b.server.shared)
    assert all(torch.equal(leaf, b[name]) for name, leaf in a.items())


def test_ctrl_c_in_testing_costs_the_answers_of_one_method(data, tmp_path, monkeypatch):
    settings = SMALL | {"dataset": data, "methods": ["fedavg", "knn_per", "fedavg_ft"]}
    whole = fedthe.run(out=str(tmp_path / "whole"), **settings)
    out = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        interrupt(patch, loop, "answer_one", 25)  # 5 tests of 3 clients a method
        with pytest.raises(KeyboardInterrupt):
            fedthe.run(out=str(out), **settings)
    assert [path.name.split("-")[0] for path in (out / "answers").iterdir()] == ["fedavg"]
    asked, answer = [], loop.answer_one
    monkeypatch.setattr(loop, "answer_one", lambda *a: asked.append(type(a[0].predictor).__name__) or answer(*a))
    monkeypatch.setattr(engine, "train_round", lambda *a: pytest.fail("trained again"))
    assert scores(fedthe.run(out=str(out), **settings)) == scores(whole)
    assert asked == ["KNN"] * 15 + ["Forward"] * 15


def test_tests_and_samples_are_respected_and_cost_no_training(data, tmp_path, monkeypatch):
    settings = SMALL | {"dataset": data, "methods": ["fedthe"], "out": str(tmp_path / "run")}
    few = fedthe.run(**settings, tests=["ooc", "original"])
    assert set(few.tests) == {"ooc", "original"}
    assert {row.samples for row in few.rows} == {2}
    monkeypatch.setattr(engine, "train_round", lambda *a: pytest.fail("trained again"))
    everything = fedthe.run(**settings | {"samples": None})
    assert {(row.test, row.samples) for row in everything.rows} == {
        *((test, 10) for test in ("original", "corrupted", "ooc", "corrupted_ooc")),
        ("mixture", 15),  # a row is clean or corrupted, so half of the rows of each
    }
    plenty = fedthe.run(**settings | {"samples": 1000})
    assert scores(plenty) == scores(everything)
    with pytest.raises(InputError, match="did you mean original"):
        fedthe.run(**settings, tests=["orginal"])


def test_the_first_samples_of_a_stream_are_answered_alike_however_many_follow(data, tmp_path):
    settings = SMALL | {"dataset": data, "methods": ["fedthe", "t3a"], "tests": ["mixture"]}
    read = {}
    for samples in (2, 7):
        results = fedthe.run(out=str(tmp_path / str(samples)), **settings | {"samples": samples})
        for path in results.folder.glob("samples/*.npz"):
            read[path.name.split("-")[0], samples] = records.read_samples(path)["mixture/1/right"]
    for name in ("fedthe", "t3a"):
        assert read[name, 2].tolist() == read[name, 7][:2].tolist()


@pytest.mark.parametrize("content", [b"", b"\x00\xff" * 40], ids=["empty", "noise"])
def test_a_damaged_checkpoint_is_refused_in_one_sentence_and_deleting_it_helps(content, data, tmp_path):
    settings = SMALL | {"dataset": data, "methods": ["fedavg"], "out": str(tmp_path / "run")}
    whole = fedthe.run(**settings)
    (path,) = whole.folder.glob("trainings/*.safetensors")
    path.write_bytes(content)
    with pytest.raises(InputError) as refused:
        fedthe.run(**settings)
    said = str(refused.value)
    assert str(path) in said
    assert "delete it" in said
    assert "\n" not in said
    path.unlink()
    assert scores(fedthe.run(**settings)) == scores(whole)


@pytest.mark.parametrize("kind", ["trainings/*.json", "answers/*.json", "samples/*.npz"])
@pytest.mark.parametrize("content", [b"", b"\x00\xff" * 40], ids=["empty", "noise"])
def test_what_else_is_damaged_is_made_again_with_a_word(kind, content, data, tmp_path):
    settings = SMALL | {"dataset": data, "methods": ["fedavg"], "out": str(tmp_path / "run")}
    whole = fedthe.run(**settings)
    (path,) = whole.folder.glob(kind)
    path.write_bytes(content)
    with pytest.warns(UserWarning, match=rf"{path.name} is damaged") as said:
        again = fedthe.run(**settings)
    assert scores(again) == scores(whole)
    assert all("\n" not in str(each.message) for each in said)
    assert again.reused == (1 if "trainings" in kind else 0)
    assert fedthe.run(**settings).reused == 1
