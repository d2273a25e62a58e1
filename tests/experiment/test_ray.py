"""Runs on Ray: the files and numbers of one process, whoever computes them, and whatever happens to workers."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import fedthe
from fedthe import records
from fedthe.config import make_config
from fedthe.engine.remote import RemoteEngine
from fedthe.errors import InputError
from fedthe.experiment import on_ray
from fedthe.experiment.cluster import Share, connected, count_places, size_workers
from fedthe.experiment.jobs import Job
from fedthe.experiment.on_ray import RayWorkers
from fedthe.experiment.training import group_by_training
from fedthe.experiment.work import prepare
from fedthe.experiment.workers import use_workers
from fedthe.fingerprint import hash_package
from fedthe.methods.base import FedAvg
from fedthe.nets import CNN
from fedthe.progress.events import AnswerEvent, TrainEvent, listening
from fedthe.progress.file import read_progress
from helpers import count_rounds, fails

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # as `connected` has it, before Ray is imported
ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings(  # Ray leaves files and processes to the garbage collector
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)

TIMES = ("ms_per_sample", "seconds", "peak_mib", "seal")
SMALL = {"clients": 3, "rounds": 2, "local_epochs": 1, "samples": 4, "tests": ["original", "ooc"], "device": "cpu"}
GLYPHS = {"dataset": "glyphs", "size": 16, "flip": False, "train_fraction": 0.1, **SMALL}
MINE = """
from dataclasses import dataclass
from beside import FACTOR
from fedthe.methods.base import FedAvg
from fedthe.methods.predictor import Predictor

@dataclass(frozen=True)
class Scaled(FedAvg):
    mu: float = FACTOR  # times the loss

    def loss(self, net, params, given, batch):
        return self.mu * super().loss(net, params, given, batch)

class Untrainable(FedAvg):
    def loss(self, net, params, given, batch):
        raise ZeroDivisionError("it cannot be trained")

class Mute(Predictor):
    def answer(self, method, mine, state, samples):
        raise ZeroDivisionError("it cannot answer")
"""

READS = """
from pathlib import Path
from fedthe.methods.base import FedAvg

FACTOR = float(Path(__file__).with_name("factor.txt").read_text())

class Reads(FedAvg):
    def loss(self, net, params, given, batch):
        return FACTOR * super().loss(net, params, given, batch)
"""


NEEDS = """
from pathlib import Path
from fedthe.methods.base import FedAvg

class Needs(FedAvg):
    def loss(self, net, params, given, batch):
        if not Path(PLACE).exists():
            raise FileNotFoundError("it is not there")
        return super().loss(net, params, given, batch)
"""

UNSHARED = """
from fedthe.methods.base import FedAvg

class Unshared(FedAvg):
    def share(self, net, params):
        raise ZeroDivisionError("nothing to share")
"""


class Prox(FedAvg):
    """It is in no file that settings name."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A Ray of four cores, whatever the machine has, that others cannot reach."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDTHE_HOME", str(tmp_path_factory.mktemp("home")))  # of workers
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        with connected(num_cpus=4):
            assert ray.nodes()[0]["NodeManagerAddress"] == "127.0.0.1"
            yield
        gc.collect()  # now, while its warnings are ignored


@pytest.fixture(scope="module")
def workers(cluster):
    """Two of them for all tests, since they take seconds to start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_ray, "PATIENCE", 60.0)  # on a busy machine, an idle worker may take longer to answer
        made = RayWorkers(ray, cpus=2)
        # what is refused must not spoil what comes after it
        refused = make_config({"engine": "stack", "threads": 1, "device": "cpu"})
        fails(lambda: made.find_engine(refused), "a worker on", "threads is for engine=loop")
        yield made
        made.close()


@pytest.fixture
def small(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return {"dataset": data, **SMALL}


def strip(value):
    """What must be equal between runs: everything but times and places."""
    if isinstance(value, dict):
        return {name: strip(each) for name, each in value.items() if name not in TIMES}
    return [strip(each) for each in value] if isinstance(value, list) else value


def read_folder(folder):
    """All that a run files, by name; checkpoints as their facts and tensors."""
    from safetensors import safe_open

    found = {}
    for path in sorted(path for kind in ("trainings", "answers", "samples") for path in (folder / kind).iterdir()):
        if path.suffix == ".json":
            content = strip(json.loads(path.read_text()))
        elif path.suffix == ".npz":
            content = {name: values.tobytes() for name, values in records.load_samples(path).items()}
        else:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name).numpy().tobytes() for name in file.keys()}  # noqa: SIM118
                content = file.metadata(), tensors
        found[path.relative_to(folder).as_posix()] = content
    return found


def read_rows(folder):
    return [strip(json.loads(line)) for line in (folder / "results.jsonl").read_text().splitlines()]


def assert_same(ours, theirs):
    assert read_folder(ours) == read_folder(theirs)
    assert read_rows(ours) == read_rows(theirs)


def test_the_numbers_are_those_of_one_process_bit_for_bit(workers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    Path("beside.py").write_text("FACTOR = 0.5\n")
    # fedavg and fedavg_ft deploy one training, fedrod and fedthe train side by side, ditto alone
    own = ["mine.py:Scaled", "mine.py:Scaled(mu=0.25)", "mine.py:Untrainable", "mine.py:Mute"]
    asked = {**GLYPHS, "methods": ["fedavg", "fedavg_ft", "fedrod", "fedthe", "ditto", *own], "seeds": [0, 1]}
    heard = []
    start(workers, 2)
    with use_workers(workers), listening(heard.append):
        ours = fedthe.run(**asked, out="ours")
    one = fedthe.run(**asked, out="one")
    assert_same(ours.folder, one.folder)
    assert ours.table() == one.table()
    assert list(ours.trainings) == list(one.trainings)
    assert ours.notes == one.notes
    assert ours.environment["torch"] == torch.__version__
    # what failed
    assert [why.replace("ours", "one") for why in ours.failures.values()] == list(one.failures.values())
    assert set(ours.failures) == {f"{name}, seed {seed}" for name in ("Untrainable", "Mute") for seed in (0, 1)}
    for name in ("Untrainable", "Mute"):
        assert "ZeroDivisionError: it cannot" in (ours.folder / "failures" / f"{name}-1.txt").read_text()
    # who did it
    names = {event.worker for event in heard if isinstance(event, TrainEvent | AnswerEvent)}
    assert names == {"worker 1", "worker 2"}
    live = read_progress(ours.folder)
    assert {step.event.worker for step in live.steps} >= names
    assert all(
        step.event.is_over for step in live.steps if isinstance(step.event, AnswerEvent) and "Mute" not in str(step)
    )
    # and what is there is not computed again, by whomever
    rounds = count_rounds(monkeypatch)
    again = fedthe.run(**asked | {"methods": asked["methods"][:6]}, out="ours")
    assert rounds == []
    assert again.reused == 12
    heard.clear()
    with use_workers(workers), listening(heard.append):
        again = fedthe.run(**asked | {"methods": asked["methods"][:6]}, out="one")
    assert again.reused == 12
    assert not [event for event in heard if event.worker]


def test_workers_begin_with_what_is_there(workers, small):
    asked = {**small, "methods": ["fedthe"]}
    fedthe.run(**asked | {"rounds": 1}, out="ours")
    heard = []
    with use_workers(workers), listening(heard.append):
        ours = fedthe.run(**asked, out="ours")
    assert [event.done for event in heard if isinstance(event, TrainEvent)] == [2]
    one = fedthe.run(**asked, out="one")
    assert ours.table() == one.table()
    theirs = read_folder(one.folder)
    assert {name: content for name, content in read_folder(ours.folder).items() if name in theirs} == theirs


def test_a_lost_worker_s_task_is_done_by_another(workers, small, capfd):
    asked = {**small, "methods": ["fedavg", "ditto"], "rounds": 60, "checkpoint_seconds": 0.0}
    pids, after, lost = {}, [], []

    def kill(event):
        if not isinstance(event, TrainEvent) or not event.worker:
            return
        if pids:
            after.append((event.methods, event.done))
        elif event.done >= 3:
            lost.append(event.methods)
            slot = next(each for each in workers._slots if each.name == event.worker)
            assert slot.pid
            pids[event.worker] = slot.pid
            os.kill(slot.pid, signal.SIGKILL)

    with (
        use_workers(workers),
        listening(kill),
        pytest.warns(UserWarning, match="was lost; training .* is run again"),
    ):
        ours = fedthe.run(**asked, out="ours")
    assert len(pids) == 1
    assert capfd.readouterr().out == ""  # Ray would print there, where --json prints an object
    assert min(done for methods, done in after if methods == lost[0]) > 1  # it went on from a checkpoint
    assert_same(ours.folder, fedthe.run(**asked, out="one").folder)


def test_a_lost_mailbox_costs_progress_and_no_result(workers, small):
    ends = {"seen": False}

    def kill(event):
        if event.worker and not ends["seen"]:
            ends["seen"] = True
            ray.kill(workers._mailbox, no_restart=False)

    with use_workers(workers), listening(kill):
        ours = fedthe.run(**small | {"rounds": 30}, methods=["fedavg", "ditto"], out="ours")
    assert ends["seen"]
    one = fedthe.run(**small | {"rounds": 30}, methods=["fedavg", "ditto"], out="one")
    assert_same(ours.folder, one.folder)


def test_what_failed_is_tried_again_and_what_is_filed_is_reused(workers, small):
    Path("needs.py").write_text(NEEDS.replace("PLACE", repr(str(Path.cwd() / "there.txt"))))
    asked = {**small, "methods": ["fedavg", "needs.py:Needs"], "out": "ours"}
    with use_workers(workers):
        first = fedthe.run(**asked)
        Path("there.txt").touch()
        again = fedthe.run(**asked)
        last = fedthe.run(**asked)
    assert [len(each.failures) for each in (first, again, last)] == [1, 0, 0]
    assert [each.reused for each in (first, again, last)] == [0, 1, 2]


def test_a_method_that_cannot_begin_stops_no_other(workers, small):
    Path("bad.py").write_text(UNSHARED)
    asked = {**small, "methods": ["fedavg", "bad.py:Unshared"]}
    with use_workers(workers):
        ours = fedthe.run(**asked, out="ours")
    one = fedthe.run(**asked, out="one")
    assert list(ours.failures) == list(one.failures) == ["Unshared, seed 0"]
    assert ours.table() == one.table()


def start(workers, count):
    """Have that many workers ready."""
    workers.find_engine(make_config({"device": "cpu"}))
    while len(workers._slots) < count:
        workers._start_worker(workers._how)
    ends = time.monotonic() + 300
    while any(slot.call is not None for slot in workers._slots):
        workers._await_calls()
        assert time.monotonic() < ends


def note_tasks(monkeypatch):
    """What workers are asked to do, in order."""
    assigned, make_task = [], Job.make_task
    monkeypatch.setattr(Job, "make_task", lambda job: assigned.append(job.describe()) or make_task(job))
    return assigned


def describe_again(workers, slot):
    """As if the worker had just started."""
    slot.call, slot.pid = slot.actor.describe.remote(slot.config), 0
    assert ray.wait([slot.call], timeout=300)[0]


def test_a_worker_of_another_version_does_no_task(workers, monkeypatch):
    start(workers, 2)
    one, other = workers._slots
    monkeypatch.setattr(on_ray, "hash_package", lambda: "another")
    describe_again(workers, one)
    other.pid = 0  # it is still starting, in place of one that was lost
    with pytest.warns(UserWarning, match="a worker is left out: a worker has another fedthe"):
        workers._await_calls()
    assert workers._slots == [other]  # it goes on
    describe_again(workers, other)
    monkeypatch.setattr(workers, "_failed_starts", on_ray.MOST_LOSSES - 1)
    with pytest.raises(InputError, match="a worker has another fedthe than this process"):
        workers._await_calls()
    assert workers._slots == []
    workers._look = 0.0


def test_the_first_worker_may_be_one_that_cannot_take_part(workers, monkeypatch):
    for slot in [*workers._slots]:
        workers._end(slot)
    monkeypatch.setattr(workers, "_engines", {})
    codes = iter(["another"])
    monkeypatch.setattr(on_ray, "hash_package", lambda: next(codes, hash_package()))
    with pytest.warns(UserWarning, match="a worker is left out: a worker has another fedthe"):
        engine = workers.find_engine(make_config({"device": "cpu"}))
    assert engine.dtype == torch.float32
    (slot,) = workers._slots
    ray.get(slot.actor.ping.remote())
    monkeypatch.setattr(workers, "_engines", {})
    monkeypatch.setattr(on_ray, "hash_package", lambda: "another")
    with pytest.warns(UserWarning, match="left out"):
        fails(lambda: workers.find_engine(make_config({"device": "cpu"})), "a worker has another fedthe")
    assert workers._slots == []


def test_a_worker_s_bug_stops_the_experiment_that_it_belongs_to(workers, small):
    methods, (work,) = prepare(make_config({**small, "methods": ["fedavg"]}))
    start(workers, 1)
    slot, ((training, served),) = workers._slots[0], group_by_training(methods).items()
    path = work.place_of(training, work.config.rounds)
    job = Job((1, 1), (None, None), [work], {training: served}, None, [path])
    workers._ledger.add(job)
    slot.job, slot.call = job, ray.remote(lambda: 1 / 0).remote()
    while slot.call is not None:
        workers._await_calls()
    with pytest.raises(ZeroDivisionError):
        workers._ledger.raise_error(path)
    workers._ledger.forget([path])
    assert not workers._ledger.jobs
    assert workers._slots[0] is slot
    ray.get(slot.actor.ping.remote())


@pytest.mark.parametrize("then", ["the next run", "the end"])
def test_what_arrives_while_a_run_is_stopped_is_filed(then, workers, small, monkeypatch):
    """Ctrl-C while a result is written."""
    write, stopped = Job.write, []

    def stop(job, files):
        if not stopped:
            stopped.append(job)
            raise KeyboardInterrupt
        write(job, files)

    monkeypatch.setattr(Job, "write", stop)
    assigned = note_tasks(monkeypatch)
    asked = {**small, "methods": ["fedavg"], "out": "ours"}
    with use_workers(workers), pytest.raises(KeyboardInterrupt):
        fedthe.run(**asked)
    assert not list(Path("ours").glob("trainings/*.safetensors"))
    if then == "the next run":
        with use_workers(workers):
            ours = fedthe.run(**asked)
        assert assigned == ["training fedavg, seed 0", "testing fedavg, seed 0"]
        assert_same(ours.folder, fedthe.run(**asked | {"out": "one"}).folder)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(workers, "_kill_actors", lambda: None)
            workers.close()
        assert len(list(Path("ours").glob("trainings/*.safetensors"))) == 1
        workers._slots.clear()  # their actors are closed


def test_ray_does_not_keep_the_data_of_experiments_that_are_over(workers, small, monkeypatch):
    monkeypatch.setattr(on_ray, "MOST_SHARED", 2)
    tables = []
    for run in (small, GLYPHS, small):
        with use_workers(workers):
            tables.append(fedthe.run(**run, methods=["fedavg"]).table())
        assert len(workers._shared) == 2
    assert tables[0] == tables[2] != tables[1]


def test_workers_are_compared_with_those_of_their_own_settings(workers, monkeypatch):
    start(workers, 1)
    slot, *others = workers._slots
    for each in others:
        workers._end(each)
    engines = {("stack", "cpu", "bfloat16", None): RemoteEngine(torch.bfloat16, 8, {"torch": torch.__version__})}
    monkeypatch.setattr(workers, "_engines", engines | workers._engines)
    describe_again(workers, slot)
    workers._await_calls()
    assert slot in workers._slots
    known = workers._engines
    wrong = {how: RemoteEngine(torch.bfloat16, 8, each.environment) for how, each in known.items()}
    monkeypatch.setattr(workers, "_engines", wrong)
    describe_again(workers, slot)
    with pytest.warns(UserWarning, match=r"left out: workers compute in torch.bfloat16 and torch.float32"):
        workers._await_calls()
    assert workers._slots == []
    workers._failed_starts, workers._look = 0, 0.0


def test_an_engine_is_asked_for_while_all_workers_are_busy(workers, monkeypatch):
    """Jobs of an experiment that was stopped still run; there is no room for one more worker."""
    start(workers, 2)
    monkeypatch.setattr(workers, "_capacity", 2)
    for slot in workers._slots:
        slot.call = slot.actor.describe.remote(slot.config)
    monkeypatch.setattr(workers, "_engines", dict(workers._engines))
    before = [*workers._slots]
    engine = workers.find_engine(make_config({"device": "cpu", "engine": "stack"}))
    assert engine.together > 1
    assert workers._slots == before


def test_what_failed_ahead_of_its_turn_is_not_tried_again_after_it(workers, small, monkeypatch):
    Path("needs.py").write_text(NEEDS.replace("PLACE", repr(str(Path.cwd() / "there.txt"))))
    bad, good = {**small, "methods": ["needs.py:Needs"], "out": "bad"}, {**small, "methods": ["ditto"], "out": "good"}
    assigned = note_tasks(monkeypatch)
    with use_workers(workers):
        workers.look_ahead(iter([prepare(make_config({**bad, "device": "cpu"}))]))
        assert len(fedthe.run(**bad).failures) == 1
        assert workers._ahead == []
        fedthe.run(**good | {"rounds": 6})
    assert assigned == ["training Needs, seed 0", "training ditto, seed 0", "testing ditto, seed 0"]


def test_idle_workers_that_died_cost_no_task_a_try(workers, small, monkeypatch):
    monkeypatch.setattr(on_ray, "MOST_LOSSES", 1)
    with use_workers(workers):
        fedthe.run(**small, methods=["fedavg"], out="first")
        start(workers, 2)
        for slot in workers._slots:
            os.kill(slot.pid, signal.SIGKILL)
        ours = fedthe.run(**small, methods=["fedavg"], out="ours")
    assert_same(ours.folder, fedthe.run(**small, methods=["fedavg"], out="one").folder)


def test_a_damaged_checkpoint_is_said_and_can_be_deleted(workers, small):
    asked = {**small, "methods": ["fedavg"], "out": "ours"}
    fedthe.run(**asked)
    (checkpoint,) = Path("ours/trainings").glob("*.safetensors")
    checkpoint.write_bytes(b"damaged")
    with use_workers(workers):
        fails(lambda: fedthe.run(**asked), "delete it")
        checkpoint.unlink()
        ours = fedthe.run(**asked)
    assert ours.table() == fedthe.run(**asked | {"out": "one"}).table()


def test_what_is_refused_stops_no_other_experiment(workers, small):
    Path("reads.py").write_text(READS)
    Path("factor.txt").write_text("0.5")  # data that code reads is not sent
    bad, good = {**small, "methods": ["reads.py:Reads"], "out": "bad"}, {**small, "methods": ["fedavg"], "out": "good"}
    with use_workers(workers):
        workers.look_ahead(iter([prepare(make_config(bad))]))
        ours = fedthe.run(**good | {"rounds": 6})
        fails(lambda: fedthe.run(**bad), "factor.txt")
        again = fedthe.run(**good | {"seeds": [1]})
    assert ours.table() == fedthe.run(**good | {"rounds": 6, "out": "one"}).table()
    assert again.table() == fedthe.run(**good | {"seeds": [1], "out": "two"}).table()
    assert not workers._ledger.jobs


def test_a_model_can_be_exported_while_workers_compute(workers, small):
    with use_workers(workers):
        results = fedthe.run(**small, methods=["fedavg_ft"], out="run")
        fedthe.export(results, "bundle", client=1)
    assert fedthe.load_bundle("bundle").classes


def test_workers_are_as_large_as_machines_allow():
    machines = [{"GPU": 2.0, "CPU": 16.0}, {"GPU": 1.0, "CPU": 4.0}, {"CPU": 64.0}]
    made = size_workers(machines, make_config({"device": "auto"}))
    assert (made.gpus, made.cpus, count_places(machines, made)) == (1, 4, 3)
    asked = size_workers(machines, make_config({"device": "cuda"}), 8)
    assert (asked.gpus, asked.cpus, count_places(machines, asked)) == (1, 8, 2)  # the smaller machine has no room
    fails(lambda: size_workers(machines, make_config({"device": "auto"}), 32), "has 32 cores")
    many = size_workers(machines, make_config({"device": "cpu", "methods": ["fedavg", "ditto"], "seeds": [0, 1, 2]}))
    assert (many.gpus, many.cpus, count_places(machines, many)) == (0, 4, 21)


def test_a_task_that_loses_every_worker_ends_the_run(workers, small, monkeypatch):
    monkeypatch.setattr(on_ray, "MOST_LOSSES", 1)

    def kill(event):
        if event.worker:
            os.kill(next(each.pid for each in workers._slots if each.name == event.worker), signal.SIGKILL)

    with use_workers(workers), listening(kill), pytest.raises(fedthe.errors.Failed, match="1 workers were lost"):
        fedthe.run(**small, methods=["fedavg"], out="run")


def test_workers_that_are_idle_take_tasks_of_the_next_experiment(workers, small, monkeypatch):
    first, second = ({**small, "methods": [name], "out": name} for name in ("fedavg", "ditto"))
    heard, assigned = [], note_tasks(monkeypatch)
    while len(workers._slots) < 2:  # a test before may have killed them
        workers._start_worker(workers._how)
    while not all(slot.pid for slot in workers._slots):
        workers._step()
    with use_workers(workers), listening(heard.append):
        workers.look_ahead(iter([prepare(make_config(second))]))
        fedthe.run(**first | {"rounds": 6})
        assert assigned[:2] == ["training fedavg, seed 0", "training ditto, seed 0"]
        ours = fedthe.run(**second)
    trained = [event.done for event in heard if isinstance(event, TrainEvent) and event.methods == ("ditto",)]
    assert sorted(set(trained)) == sorted(trained)  # once
    assert_same(ours.folder, fedthe.run(**second | {"out": "one"}).folder)


def test_tables_on_ray_are_those_of_one_process(workers, fedthe, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    @contextmanager
    def share(address, cpus):
        with use_workers(workers):
            yield workers

    monkeypatch.setattr(on_ray, "workers_on_ray", share)
    words = [f"{key}={','.join(value) if isinstance(value, list) else value}" for key, value in SMALL.items()]
    words += [f"dataset={data}", "--methods", "gma", "--seeds", "0,1", "--all"]
    for name, more in (("ours", ["--ray"]), ("one", [])):
        fedthe("table", *words, "--out", f"{name}-runs", "--save", name, *more)
    ours, one = (
        {path.name: strip(json.loads(path.read_text())) for path in Path(name).glob("*.json")}
        for name in ("ours", "one")
    )
    assert ours.keys() == {"main-dir0.1.json", "main-dir1.json", "main-dir10.json"}
    for name, record in ours.items():
        assert record["rows"] == one[name]["rows"]
        assert [case["clients"] for case in record["cases"]] == [case["clients"] for case in one[name]["cases"]]
    assert read_folder(Path("ours-runs")) == read_folder(Path("one-runs"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"address": None}, "'None' is no address of Ray"),
        ({"address": 6379}, "write local, auto, or HOST:PORT"),
        ({"address": "127.0.0.1"}, "'127.0.0.1' is no address"),
        ({"cpus": 0}, "cpus must be a whole number from 1 on, not 0"),
        ({"cpus": "2"}, "cpus must be a whole number"),
    ],
)
def test_workers_that_make_no_sense_are_refused(given, words):
    fails(lambda: on_ray.workers_on_ray(**given).__enter__(), words)


def test_what_workers_cannot_do_is_refused(workers, small, monkeypatch):
    with use_workers(workers):
        fails(lambda: fedthe.run(**small | {"device": "cuda:1"}), "device=cuda in place of cuda:1")
        fails(lambda: fedthe.run(**small | {"device": "cuda"}), "no machine in this Ray cluster has a GPU")
        workers.find_engine(make_config({"device": "auto"}))  # as there is none
        with monkeypatch.context() as patch:
            patch.setattr(workers, "_share", Share(1, 1))
            fails(lambda: fedthe.run(**small | {"engine": "loop"}), "either GPUs or CPUs")
        fails(lambda: fedthe.run(**small, on_round=print), "on_round is for runs in this process")
        fails(lambda: fedthe.run(**small, methods=["fedavg", Prox]), "cannot load Prox", "put it into a file")
        fails(lambda: fedthe.run(**small, methods=["fedavg"], net=CNN(3, 3, 16)), "cannot load the network")
    fails(
        lambda: RayWorkers(ray).find_engine(make_config({"device": "cuda"})), "no machine in this Ray cluster has a GPU"
    )
    fails(lambda: RayWorkers(ray, cpus=64).find_engine(make_config({})), "has 64 cores")


@contextmanager
def heeded(number):
    """A signal that processes started in the block do not ignore. Those that a shell starts in the background do."""
    before = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_is_continued_without_ray(how, small, monkeypatch):
    asked = {**small, "methods": ["ditto"]}
    words = [f"{key}={','.join(value) if isinstance(value, list) else value}" for key, value in asked.items()]
    words += ["rounds=100000", "checkpoint_seconds=0", "out=run"]
    command = [sys.executable, "-m", "fedthe", "run", *words, "--ray", "--ray-cpus", "1"]
    with heeded(signal.SIGINT):
        child = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONFAULTHANDLER": "1"},
        )
    try:
        ends = time.monotonic() + 300
        while not list(Path("run").glob("trainings/*.safetensors")):
            assert child.poll() is None, child.stderr.read()
            assert time.monotonic() < ends
            time.sleep(0.1)
        if how == signal.SIGINT:
            os.killpg(child.pid, how)  # as a terminal does
        else:
            child.send_signal(how)  # as a scheduler does
        try:
            _, said = child.communicate(timeout=180)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGABRT)  # it says where it hangs
            pytest.fail(child.communicate()[1])
    finally:
        child.kill()
        child.wait()
    assert child.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[how], said
    assert said.splitlines()[-1] == "fedthe: stopped; run the same command to continue."
    assert read_progress(Path("run")).state == "stopped"
    (checkpoint,) = Path("run").glob("trainings/*.safetensors")
    reached = records.read_round(checkpoint)
    assert 0 < reached < 100000
    rounds = count_rounds(monkeypatch)
    ours = fedthe.run(**asked | {"rounds": reached + 1}, out="run")
    assert len(rounds) == 1
    assert ours.table() == fedthe.run(**asked | {"rounds": reached + 1}, out="one").table()
