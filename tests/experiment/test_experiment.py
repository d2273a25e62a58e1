"""Running experiments: configuration, shared trainings, failures, records, and resuming after any kill."""

import json
import random
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pyarrow.parquet
import pytest
import torch

import fedthe
from fedthe import records, tree
from fedthe.config import Config, make_config, read_config, read_words
from fedthe.data.pool import Pool
from fedthe.engine.clients import Clients
from fedthe.engine.server import Server
from fedthe.engine.visit import Progress
from fedthe.errors import InputError
from fedthe.experiment.training import group_by_training
from fedthe.methods.make import make_methods
from fedthe.nets.cnn import CNN
from fedthe.nets.make import make_net
from helpers import count_rounds

SMALL = {"clients": 3, "dirichlet": 1.0, "rounds": 2, "local_epochs": 1, "samples": 6}


def test_a_run_leaves_results_that_agree_with_each_other(data, tmp_path):
    out = tmp_path / "run"
    results = fedthe.run(dataset=data, methods=["fedavg", "fedthe"], seeds=[0, 1], out=str(out), **SMALL)
    assert set(results.table()) == {"fedavg", "fedthe"}
    assert results.tests == ["original", "corrupted", "ooc", "mixture", "corrupted_ooc"]
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert lines == pyarrow.parquet.read_table(out / "results.parquet").to_pylist()
    assert len(lines) == 2 * 2 * 5 * 3 == len(results.rows)
    mean = np.mean([[r["accuracy"] for r in lines if r["method"] == "fedthe" and r["test"] == "ooc"]])
    assert results.table()["fedthe"]["ooc"] == pytest.approx(mean)
    for seed in (0, 1):
        manifest = json.loads((out / f"manifest-{seed}.json").read_text())
        assert manifest["settings"]["seed"] == seed
    (samples,) = (out / "samples").glob("fedthe-0-*.npz")
    columns = records.read_samples(samples)
    e, right = columns["mixture/1/e"], columns["mixture/1/right"]
    assert ((e > 0) & (e < 1)).all()
    row = next(r for r in lines if (r["method"], r["seed"], r["test"], r["client"]) == ("fedthe", 0, "mixture", 1))
    assert right.sum() == row["right"]
    assert row["samples"] == len(e) == 6
    assert results.costs["fedthe"]["peak_mib"] > 0
    assert json.loads((out / "config.json").read_text())["rounds"] == 2
    assert "torch" in json.loads((out / "environment.json").read_text())
    assert not list(out.rglob("*.pkl")) + list(out.rglob("*.pt")) + list(out.rglob("*.part"))


def test_a_finished_run_is_not_computed_again_and_can_be_extended(data, tmp_path, monkeypatch):
    out = str(tmp_path / "run")
    first = fedthe.run(dataset=data, methods=["fedthe"], out=out, **SMALL)
    rounds = count_rounds(monkeypatch)
    again = fedthe.run(dataset=data, methods=["fedthe"], out=out, **SMALL)
    assert again.table() == first.table()
    assert rounds == []
    more = fedthe.run(dataset=data, methods=["fedthe", "fedavg"], out=out, **SMALL)
    assert rounds == [("Personal",)] * 2
    assert more.table()["fedthe"] == first.table()["fedthe"]
    longer = fedthe.run(dataset=data, methods=["fedthe"], out=out, **SMALL | {"rounds": 3})
    assert rounds[2:] == [("TwoHeads",)]  # it goes on from the two rounds that are there
    whole = fedthe.run(dataset=data, methods=["fedthe"], out=str(tmp_path / "whole"), **SMALL | {"rounds": 3})
    assert longer.table() == whole.table()
    (path,), (other,) = (each.folder.glob("trainings/*-3.safetensors") for each in (longer, whole))
    states = [tree.flatten(records.load_progress(each).server.shared) for each in (path, other)]
    assert all(torch.equal(leaf, states[1][name]) for name, leaf in states[0].items())
    rounds.clear()
    assert fedthe.run(dataset=data, methods=["fedthe"], out=out, **SMALL).table() == first.table()
    shorter = fedthe.run(dataset=data, methods=["fedthe"], out=out, **SMALL | {"rounds": 1})
    assert rounds == [("TwoHeads",)]  # one round cannot be had of two
    assert shorter.trainings.keys() != first.trainings.keys()


def test_kept_rounds_are_the_runs_of_so_many_rounds(data, tmp_path, monkeypatch):
    from fedthe.engine import train

    out, apart = str(tmp_path / "run"), str(tmp_path / "apart")
    alone = fedthe.run(dataset=data, methods=["fedthe"], out=apart, **SMALL | {"rounds": 1})
    fedthe.run(dataset=data, methods=["fedthe"], out=out, **SMALL | {"rounds": 3, "keep": [1, 2, 9]})
    assert len(list((tmp_path / "run").glob("trainings/*.safetensors"))) == 3
    monkeypatch.setattr(train, "train_round", None)  # nothing is trained
    for rounds in (1, 2):
        kept = fedthe.run(dataset=data, methods=["fedthe"], out=out, **SMALL | {"rounds": rounds})
        assert [each["rounds"] for each in kept.trainings.values()] == [rounds]
        if rounds == 1:
            assert kept.table() == alone.table()


def test_a_damaged_shorter_training_is_passed_over(data, tmp_path):
    out = tmp_path / "run"
    for rounds in (1, 2):
        fedthe.run(dataset=data, methods=["fedthe"], out=str(out), **SMALL | {"rounds": rounds})
    (two,) = out.glob("trainings/*-2.safetensors")
    two.write_bytes(two.read_bytes()[:100])
    with pytest.warns(UserWarning, match=rf"{two.name} is damaged, and is passed over"):
        longer = fedthe.run(dataset=data, methods=["fedthe"], out=str(out), **SMALL | {"rounds": 3})
    whole = fedthe.run(dataset=data, methods=["fedthe"], out=str(tmp_path / "whole"), **SMALL | {"rounds": 3})
    assert longer.table() == whole.table()


def test_facts_and_answers_that_make_no_sense_are_made_again(data, tmp_path):
    out = tmp_path / "run"
    first = fedthe.run(dataset=data, methods=["fedthe"], out=str(out), **SMALL)
    (answers,), (facts,) = out.glob("answers/*.json"), out.glob("trainings/*.json")
    answers.write_text('{"method": 1, "rows": [{}], "costs": {}}')
    facts.write_text("[1]")
    with pytest.warns(UserWarning, match="is not sealed"):
        assert fedthe.run(dataset=data, methods=["fedthe"], out=str(out), **SMALL).table() == first.table()
    for keep in ([0], [2, 2]):
        with pytest.raises(InputError, match="keep must name rounds from 1"):
            Config(keep=tuple(keep))


def test_a_longer_run_leaves_the_clients_file_of_the_shorter_alone(data, tmp_path, monkeypatch):
    """Where states are too much for memory, both have a file, and the longer training writes only to its own."""
    from fedthe.engine import clients

    # and a shorter one whose file is gone is passed over
    start = clients.Clients.start
    always_on_file = lambda first, count, file=None, budget=0: start(first, count, file, 0)  # noqa: E731
    monkeypatch.setattr(clients.Clients, "start", always_on_file)
    out = tmp_path / "run"
    first = fedthe.run(dataset=data, methods=["ditto"], out=str(out), **SMALL)
    (file,) = out.glob("trainings/*-2.clients")
    before = file.read_bytes()
    longer = fedthe.run(dataset=data, methods=["ditto"], out=str(out), **SMALL | {"rounds": 5})
    assert file.read_bytes() == before
    assert len(list(out.glob("trainings/*-5.clients"))) == 1
    whole = fedthe.run(dataset=data, methods=["ditto"], out=str(tmp_path / "whole"), **SMALL | {"rounds": 5})
    assert longer.table() == whole.table()
    assert fedthe.run(dataset=data, methods=["ditto"], out=str(out), **SMALL).table() == first.table()
    for path in [file, *out.glob("trainings/*-5.*")]:
        path.unlink()
    with pytest.warns(UserWarning, match="is damaged, and is passed over"):
        again = fedthe.run(dataset=data, methods=["ditto"], out=str(out), **SMALL | {"rounds": 5})
    assert again.table() == whole.table()


def test_methods_that_share_a_training_train_once():
    ids = ["fedavg", "memo_g", "fedavg_ft", "memo_p", "t3a", "knn_per", "gma", "apfl", "fedrep", "ditto", "fedrod"]
    config = Config(methods=(*ids, "ttt", "fedthe", "fedthe_plus"))
    groups = group_by_training(make_methods(config, make_net(config, 10, (3, 32, 32))))
    assert len(groups) == 8
    assert next(iter(groups.values())).keys() == set(ids[:6])


def test_a_diverging_experiment_stops_alone(data, tmp_path):
    settings = SMALL | {"lr": 1e6, "weight_decay": 0.0, "rounds": 3}
    results = fedthe.run(dataset=data, methods=["fedavg", "fedthe"], out=str(tmp_path / "run"), **settings)
    assert set(results.failures) == {"fedavg, seed 0", "fedthe, seed 0"}
    assert "client" in results.failures["fedavg, seed 0"]
    mixed = fedthe.run(
        dataset=data,
        methods=["fedavg", "fedthe"],
        out=str(tmp_path / "mixed"),
        **SMALL,
        hyper={"fedthe": {"lr": 0.2}},
    )
    assert mixed.failures == {}


def test_checkpoints_come_back_as_they_were(tmp_path):
    net = CNN(3, size=16)
    shared, averages = net.init(0), {"descriptor": torch.arange(5.0)}
    mine = [{"personal": {"head": net.init(k)["head"]}} for k in range(4)]
    path = tmp_path / "checkpoint.safetensors"
    clients = Clients.start(mine[0], 4).put(range(4), tree.flatten(tree.stack(mine)), 6)
    server = Server(7, shared, (0.5, 0.25), ("client 1 in round 2: the loss is nan; left out",))
    records.save_progress(path, Progress(server, averages, clients))
    back = records.load_progress(path)
    assert replace(back.server, shared={}) == replace(server, shared={})
    pairs = [(shared, back.server.shared), (averages, back.averages), *zip(mine, back.clients, strict=True)]
    for a, b in pairs:
        assert list(tree.flatten(a)) == list(tree.flatten(b))
        assert all(torch.equal(x, tree.flatten(b)[name]) for name, x in tree.flatten(a).items())
    assert path.stat().st_size < 1.1 * 4 * (tree.count(shared) + 5 * 64 * 3) + 8192
    whole = path.read_bytes()
    for cut in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(InputError, match="not a whole checkpoint"):
            records.load_progress(path)
    assert records.load_progress(tmp_path / "none") is None


CHILD = """
import json, os, signal, sys, threading, time
import torch
torch.set_num_threads(1)
import fedthe.experiment.run
if float(sys.argv[3]):
    threading.Timer(float(sys.argv[3]), os.kill, (os.getpid(), signal.SIGKILL)).start()
began = time.monotonic()
r = fedthe.run(dataset=sys.argv[1], methods=["fedthe", "fedavg", "fedrod"], clients=3, dirichlet=1.0, local_epochs=1,
               samples=6, checkpoint_seconds=0.0, out=sys.argv[2], **{"rounds": 20} | json.loads(sys.argv[4]))
rows = [[row.method, row.seed, row.test, row.client, row.right] for row in r.rows]
print(json.dumps({"rows": rows, "seconds": time.monotonic() - began}), flush=True)
os._exit(0)  # the timer, if it is still waiting, must not kill a finished run
"""


@pytest.mark.parametrize("how", [{"engine": "loop"}, {"engine": "stack", "seeds": [0, 1], "rounds": 8}])
def test_killed_ten_times_it_gives_the_numbers_of_a_run_that_was_not(how, data, tmp_path):
    def launch(out, kill_after):
        command = [sys.executable, "-c", CHILD, data, str(tmp_path / out), str(kill_after), json.dumps(how)]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300)

    whole = json.loads(launch("whole", 0).stdout)
    draw, kills = random.Random(0), 0
    for _ in range(30):
        # at a random moment, and so early that ten kills come before the end
        done = launch("killed", whole["seconds"] * draw.uniform(0.02, 0.16))
        kills += done.returncode == -signal.SIGKILL
        if done.returncode == 0 or kills == 10:
            break
    finished = json.loads(launch("killed", 0).stdout)
    assert kills == 10
    assert finished["rows"] == whole["rows"]
    checkpoints = [sorted((tmp_path / name / "trainings").glob("*.safetensors")) for name in ("whole", "killed")]
    assert [p.name for p in checkpoints[0]] == [p.name for p in checkpoints[1]]
    for a, b in zip(*checkpoints, strict=True):
        a, b = records.load_progress(a), records.load_progress(b)
        assert a.server.losses == b.server.losses
        assert all(torch.equal(x, tree.flatten(b.server.shared)[n]) for n, x in tree.flatten(a.server.shared).items())


def test_a_round_to_keep_takes_the_place_of_a_training_that_was_stopped_before_it(data, tmp_path):
    out, folder = str(tmp_path / "run"), tmp_path / "run" / "trainings"
    fedthe.run(dataset=data, methods=["fedthe"], out=out, **SMALL)
    (path,) = folder.glob("*-2.safetensors")
    stopped = path.with_name(path.name.replace("-2.", "-4."))
    records.copy_progress(path, stopped)
    fedthe.run(dataset=data, methods=["fedthe"], out=out, **SMALL | {"rounds": 5, "keep": [2, 4]})
    assert [records.read_round(each) for each in sorted(folder.glob("*.safetensors"))] == [2, 4, 5]
    assert len(records.load_progress(stopped).server.losses) == 4


def test_standardized_images_are_another_training(data, tmp_path):
    plain, other = (
        fedthe.run(dataset=data, methods=["fedavg"], out=str(tmp_path / "run"), standardize=asked, **SMALL)
        for asked in (False, True)
    )
    assert plain.trainings.keys().isdisjoint(other.trainings)
    net = make_net(Config(standardize=True), 3, (3, 16, 16), ((0.1, 0.2, 0.3), (1.0, 2.0, 3.0)))
    assert (net.means, net.deviations) == ((0.1, 0.2, 0.3), (1.0, 2.0, 3.0))


def test_the_moments_of_a_pool():
    images = np.random.default_rng(0).integers(0, 256, (20, 5, 4, 3), dtype=np.uint8)
    means, deviations = Pool("made", images, np.zeros(20, np.int64), ("a",)).moments
    pixels = images / 127.5 - 1
    assert means == pytest.approx(tuple(pixels.mean((0, 1, 2))))
    assert deviations == pytest.approx(tuple(pixels.std((0, 1, 2))))


def test_words_change_a_file_and_lists_are_split(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('rounds = 7\nmethods = ["fedavg"]\n[hyper.fedthe]\nalpha = 0.3\n')
    config = read_config(path, ["methods=fedthe,fedavg", "seeds=0,1,2", "dirichlet=1", "hyper.fedthe.beta=0.2"])
    assert (config.name, config.rounds, config.dirichlet) == ("mine", 7, 1.0)
    assert (config.methods, config.seeds) == (("fedthe", "fedavg"), (0, 1, 2))
    assert config.hyper == {"fedthe": {"alpha": 0.3, "beta": 0.2}}
    assert read_config(path, ["lr=none"]).lr is None
    assert read_config(path, ["natural=none"]).natural == "none"  # no shift, not whatever is at hand


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["round=3"], "did you mean rounds?"),
        (["rounds"], "write key=value"),
        (["rounds=three"], "rounds must be a whole number"),
        (["rounds=2.5"], "rounds must be a whole number"),
        (["rounds=-1"], "must not be negative"),
        (["engine=lop"], "did you mean loop?"),
        (["partition=balance"], "did you mean balanced?"),
        (["flip=yes"], "flip must be true or false"),
        (["methods=fedavg,fedavg"], "only once"),
        (["participation=0"], "participation"),
        (["severity=8"], "severity"),
        (["samples=0"], "samples must be at least 1"),
        (["hyper.fedthe=1"], "hyper.METHOD.NAME"),
    ],
)
def test_a_bad_word_is_refused_with_the_way_out(words, says):
    with pytest.raises(InputError) as refused:
        make_config(read_words(words))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"methods": ["fedthee"]}, "did you mean fedthe"),
        ({"net": "resnet"}, "did you mean resnet20_gn?"),
        ({"hyper": {"fedthe": {"alhpa": 0.1}}, "methods": ["fedthe"]}, "did you mean alpha?"),
        ({"hyper": {"fedthe": {"alpha": "a"}}, "methods": ["fedthe"]}, "alpha must be like 0.1"),
        ({"dataset": "glyph"}, "did you mean glyphs?"),
    ],
)
def test_an_unknown_name_is_refused_before_any_work(settings, says, tmp_path):
    with pytest.raises(InputError, match=says.replace("?", r"\?")):
        fedthe.run(out=str(tmp_path / "run"), **settings)
    assert not (tmp_path / "run" / "trainings").exists()
