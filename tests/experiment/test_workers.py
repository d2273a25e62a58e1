"""What travels to workers and back, and what a worker does with it. Nothing here needs Ray."""

import os
import platform
import re
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

import fedthe
from fedthe import records, store, tree
from fedthe.config import make_config
from fedthe.engine.clients import Clients
from fedthe.errors import Failed
from fedthe.experiment import jobs
from fedthe.experiment import worker as worker_module
from fedthe.experiment.jobs import Batch, Job, Ledger
from fedthe.experiment.training import group_by_training
from fedthe.experiment.transfer import Task, TaskResult, list_files, pack, unpack, write_files
from fedthe.experiment.work import prepare
from fedthe.experiment.worker import PREFIX, Worker
from fedthe.methods.make import find_parts
from fedthe.nets import CNN
from fedthe.progress.events import AnswerEvent, TrainEvent
from fedthe.store import hold
from helpers import fails

SMALL = {"clients": 3, "rounds": 3, "local_epochs": 1, "samples": 4, "tests": ["original"], "device": "cpu"}
MINE = """
from package.factors import FACTOR
from fedthe.methods.base import FedAvg
from dataclasses import dataclass

@dataclass(frozen=True)
class Scaled(FedAvg):
    mu: float = FACTOR
"""


LOUD = """
import warnings
from fedthe.methods.base import FedAvg

class Loud(FedAvg):
    def loss(self, net, params, given, batch):
        warnings.warn("mind the gap")
        warnings.warn("nobody reads this", DeprecationWarning)
        return super().loss(net, params, given, batch)
"""


@pytest.fixture
def small(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return {"dataset": data, **SMALL}


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """With a place for folders of its own, and its mail."""
    monkeypatch.setattr(worker_module.tempfile, "gettempdir", lambda: str(tmp_path))
    made = Worker(1, lambda *message: made.mail.append(message))
    made.mail = []
    yield made
    made.close()
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def make_task(methods, work, **changes):
    """Train the first of the methods."""
    training, served = next(iter(group_by_training(methods).items()))
    leaves = [work.place_of(training, work.config.rounds).relative_to(work.folder).as_posix()]
    task = Task(1, (work.run.seed,), (tuple(served),), None, {}, tuple(leaves))
    return replace(task, **changes)


def test_files_that_settings_name_travel_and_their_settings_follow(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("one/package", "two", "ice", "there"):
        Path(folder).mkdir(parents=True)
    Path("one/package/factors.py").write_text("FACTOR = 0.25\n")
    Path("one/mine.py").write_text(MINE)
    Path("two/mine.py").write_text("from fedthe.nets import CNN as Net\n")
    save_file(tree.flatten(CNN(10, 3, 16).init(0)), "weights.safetensors")
    Image.fromarray(np.zeros((40, 40, 3), np.uint8)).save("ice/frost.png")
    named = {"methods": ["fedavg", "one/mine.py:Scaled(mu=0.5)", "one/mine.py:Scaled"], "net": "two/mine.py:Net"}
    config = make_config({**named, "init": "weights.safetensors", "frost": "ice"})
    find_parts(config)
    payload = pack(config, "data")
    assert pack(config, "data").id == payload.id != pack(config, "other data").id
    moved = unpack(payload, tmp_path / "there")
    monkeypatch.chdir(tmp_path / "there")
    for path in ("one", "two", "ice", "weights.safetensors"):  # nothing of them is read from now on
        (tmp_path / path).rename(tmp_path / f"{path}-gone")
    assert list(moved.specs) == ["fedavg", "Scaled(mu=0.5)", "Scaled"]
    assert find_parts(moved)["Scaled"].rounds.mu == 0.25
    assert Path(moved.init).read_bytes() == (tmp_path / "weights.safetensors-gone").read_bytes()
    assert [each.name for each in Path(moved.frost).iterdir()] == ["frost.png"]
    assert moved.net.endswith("/mine.py:Net")
    assert moved.net.partition(":")[0] != moved.specs["Scaled"].file
    named = [
        find_parts(each)["Scaled"].rounds.__class__.__module__ for each in (moved, unpack(payload, tmp_path / "x"))
    ]
    assert named == [payload.modules[payload.places["one/mine.py"]]] * 2  # it is part of hashes


@pytest.mark.parametrize("name", ["answers/../../x.json", "x.json", "/x.json", "code/x.json", "trainings/x.exe"])
def test_a_file_that_is_none_of_a_run_is_not_written(name, tmp_path):
    fails(lambda: write_files(tmp_path / "run", {name: b"x"}), "no file of a run")
    assert not list(tmp_path.iterdir())


def test_the_file_that_says_that_others_are_there_comes_last(tmp_path, monkeypatch):
    written, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda part, path: (written.append(path.name), replace(part, path)))
    names = ["trainings/a.safetensors", "answers/b.json", "trainings/a.json", "samples/b.npz", "trainings/a.clients"]
    write_files(tmp_path, dict.fromkeys(names, b""))
    assert written == ["b.npz", "b.json", "a.clients", "a.json", "a.safetensors"]


@pytest.mark.parametrize("named", [False, True], ids=["plain", "with files that settings name"])
def test_a_worker_leaves_what_a_run_would(named, worker, small):
    if named:
        Path("ice").mkdir()
        Image.fromarray(np.arange(1200).reshape(20, 20, 3).astype(np.uint8)).resize((200, 200)).save("ice/frost.png")
        save_file(tree.flatten(CNN(3, 3, 16).init(7)), "weights.safetensors")
        small |= {"tests": ["corrupted"], "samples": 30, "init": "weights.safetensors", "frost": "ice"}
    one = fedthe.run(**small, methods=["fedthe"], out="one")
    methods, (work,) = prepare(make_config({**small, "methods": ["fedthe"], "out": "ours"}))
    payload, data = pack(work.config, "data"), work.federation.source
    trained = worker.do(make_task(methods, work), payload, data)
    assert not trained.refused
    assert not trained.failures
    write_files(work.folder, trained.files)
    (path,) = Path("ours").glob("trainings/*.safetensors")
    ours, theirs = (records.load_progress(Path(run) / "trainings" / path.name) for run in ("ours", "one"))
    assert tree.hash_leaves(tree.flatten(ours.server.shared)) == tree.hash_leaves(tree.flatten(theirs.server.shared))
    name = work.place_of_answer("fedthe", methods["fedthe"], path.stem).relative_to(work.folder).as_posix()
    tested = worker.do(make_task(methods, work, tested="fedthe", resume=trained.files, outputs=(name,)), payload, data)
    write_files(work.folder, tested.files)
    assert {*list_files(Path("ours"))} == {*list_files(Path("one"))}
    assert [row["right"] for row in work.find_answer("fedthe", work.folder / name)["rows"]] == [
        row.right for row in one.rows
    ]
    events = [message for _, message in worker.mail]
    assert {type(event) for event in events} == {TrainEvent, AnswerEvent}
    assert not list(worker._folder.glob("run"))  # nothing stays of a task


@pytest.mark.parametrize("where", ["in memory", "on file"])
def test_checkpoints_are_sent_on_the_way_unless_they_are_large(where, worker, small, monkeypatch, request):
    if where == "on file":
        request.getfixturevalue("on_file")
    methods, (work,) = prepare(make_config({**small, "methods": ["ditto"], "checkpoint_seconds": 0.0}))
    payload, data = pack(work.config, "data"), work.federation.source
    done = worker.do(make_task(methods, work), payload, data)
    sent = [message for _, message in worker.mail if isinstance(message, dict)]
    assert len(sent) == 2  # after the first and the second round
    write_files(Path("half"), sent[0])
    (path,) = Path("half").glob("trainings/*.safetensors")
    assert records.read_round(path) == 1
    worker.mail.clear()
    again = worker.do(make_task(methods, work, resume=sent[0]), payload, data)
    assert [event.done for _, event in worker.mail if isinstance(event, TrainEvent)] == [2, 3]
    for run, files in (("whole", done.files), ("resumed", again.files)):
        write_files(Path(run), files)
    whole, resumed = (Path(run) / "trainings" / path.name for run in ("whole", "resumed"))
    assert hash_states(whole) == hash_states(resumed)
    if where == "on file":  # in the end, nothing is sent but what counts
        clients = records.load_progress(whole).clients
        every = [files[name] for files in (*sent, done.files, again.files) for name in files if ".clients" in name]
        assert [len(each) / (3 * clients._slot) for each in every] == [1, 2, 1, 1]
    one = fedthe.run(**small, methods=["ditto"], out="one")
    assert hash_states(whole) == hash_states(one.folder / "trainings" / path.name)
    worker.mail.clear()
    monkeypatch.setattr(worker_module, "LARGEST_ON_THE_WAY", 10)
    worker.do(make_task(methods, work), payload, data)
    assert not [message for _, message in worker.mail if isinstance(message, dict)]


@pytest.fixture
def on_file(monkeypatch):
    """Clients' states are on file, however small they are."""
    start = Clients.start
    monkeypatch.setattr(Clients, "start", lambda first, count, file=None, budget=0: start(first, count, file, 0))


def hash_states(checkpoint):
    found = records.load_progress(checkpoint)
    return found.round, tree.hash_leaves(tree.flatten(found.clients.take([0, 1, 2])))


def test_a_checkpoint_and_its_states_on_file_stay_together(worker, small, on_file, monkeypatch):
    """What a training that fails wrote after its last checkpoint belongs to none."""
    methods, (work,) = prepare(make_config({**small, "methods": ["ditto"], "checkpoint_seconds": 0.0}))
    payload, data = pack(work.config, "data"), work.federation.source
    worker.do(make_task(methods, work), payload, data)
    _, sent = (message for _, message in worker.mail if isinstance(message, dict))
    write_files(Path("run"), sent)
    (path,) = Path("run").glob("trainings/*.safetensors")
    before, put = hash_states(path), Clients.put
    assert before[0] == 2
    assert records.load_progress(path).clients.has_gaps
    for _ in range(8):  # safetensors has no fixed order of its metadata
        failed = []

        def put_and_fail(clients, *given, failed=failed):
            done = put(clients, *given)
            if not failed:
                failed.append(True)
                raise Failed("it cannot go on")
            return done

        with monkeypatch.context() as patch:
            patch.setattr(Clients, "put", put_and_fail)
            done = worker.do(make_task(methods, work, resume=sent), payload, data)
        assert len(done.failures) == 1
        write_files(Path("run"), done.files)
        assert hash_states(path) == before


def test_a_checkpoint_outlives_a_run_that_is_stopped_while_it_writes(worker, small, on_file, monkeypatch):
    methods, (work,) = prepare(make_config({**small, "methods": ["ditto"], "checkpoint_seconds": 0.0}))
    payload, data = pack(work.config, "data"), work.federation.source
    done = worker.do(make_task(methods, work), payload, data)
    first, second = (message for _, message in worker.mail if isinstance(message, dict))
    write_files(Path("run"), first)
    (path,) = Path("run").glob("trainings/*.safetensors")
    write = Path.write_bytes
    for suffix in (".safetensors", ".clients"):

        def stop(path, content, suffix=suffix):
            if suffix in path.name:
                raise KeyboardInterrupt
            write(path, content)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_bytes", stop)
            with pytest.raises(KeyboardInterrupt):
                write_files(Path("run"), second)
        assert hash_states(path)[0] == 1
    sync_file = store.sync_file
    for number in range(len(second)):  # large files reach the disk after seconds
        synced = []

        def stop(part, number=number, synced=synced):
            if len(synced) == number:
                raise KeyboardInterrupt
            synced.append(part)
            sync_file(part)

        with monkeypatch.context() as patch:
            patch.setattr(store, "sync_file", stop)
            with pytest.raises(KeyboardInterrupt):
                write_files(Path("run"), second)
        assert hash_states(path)[0] == 1
    write_files(Path("run"), done.files)
    assert hash_states(path)[0] == 3


def test_what_clients_keep_must_fit_what_can_be_sent(worker, small, monkeypatch):
    monkeypatch.setattr(jobs, "LARGEST_FILE", 10)
    methods, works = prepare(make_config({**small, "methods": ["ditto"]}))
    fails(lambda: Batch(Ledger(), 1, methods, works, None), "more than workers can send; run it without Ray")
    methods, works = prepare(make_config({**small, "methods": ["fedavg"]}))
    Batch(Ledger(), 1, methods, works, None)  # whose clients keep nothing


def test_a_sentence_of_a_worker_names_the_file_of_the_run(worker, small):
    methods, (work,) = prepare(make_config({**small, "methods": ["fedavg"]}))
    payload, data = pack(work.config, "data"), work.federation.source
    trained = worker.do(make_task(methods, work), payload, data)
    name = work.place_of_answer("fedavg", methods["fedavg"], work.key_of(methods["fedavg"].training))
    (path,) = (each for each in trained.files if each.endswith(".safetensors"))
    damaged = bytearray(trained.files[path])
    damaged[-1] ^= 1
    task = make_task(
        methods,
        work,
        tested="fedavg",
        resume={**trained.files, path: bytes(damaged)},
        outputs=(f"answers/{name.name}",),
    )
    done = worker.do(task, payload, data)
    ledger, (training, served) = Ledger(), next(iter(group_by_training(methods).items()))
    job = Job((1, 1), (None, None), [work], {training: served}, "fedavg", [name])
    ledger.add(job)
    ledger.file(job, done)
    fails(lambda: ledger.raise_error(name), f"{work.folder / path} was changed after it was written")


def test_jobs_train_nothing_that_another_job_trains(small):
    """A job does all its trainings on all its seeds."""
    methods, works = prepare(make_config({**small, "methods": ["fedrod", "fedthe"], "seeds": [0, 1, 2]}))
    works = [replace(work, engine=replace(work.engine, together=9)) for work in works]
    ledger = Ledger()
    first = Batch(ledger, 1, {"fedrod": methods["fedrod"]}, works[:1], lambda work: (None, None))
    second = Batch(ledger, 2, methods, works, lambda work: (None, None))
    for batch in (first, second):
        assert not list(batch.settle(1))
    trained = [(served, work.run.seed) for job in ledger.jobs for served in job.trainings for work in job.works]
    assert len(trained) == len(set(trained)) == 6


def make_job(methods, work):
    """Train the first of the methods."""
    training, served = next(iter(group_by_training(methods).items()))
    path = work.place_of(training, work.config.rounds)
    return Job((1, 1), (None, None), [work], {training: served}, None, [path])


def test_a_checkpoint_to_keep_is_not_written_under_a_process_that_trains_it(worker, small):
    asked = {**small, "methods": ["fedavg"], "keep": [1], "checkpoint_seconds": 0.0}
    methods, (work,) = prepare(make_config(asked))
    files = worker.do(make_task(methods, work), pack(work.config, "data"), work.federation.source).files
    job = make_job(methods, work)
    (kept,) = {Path(name).stem for name in files} - {job.paths[0].stem}
    with hold(work.folder / "trainings" / f"{kept}.lock"):
        job.write(files)
        assert {Path(name).stem for name in list_files(work.folder)} == {job.paths[0].stem}
    job.write(files)
    assert list_files(work.folder) == sorted(files)
    assert records.read_round(work.folder / "trainings" / f"{kept}.safetensors") == 1


def test_how_a_job_failed_that_nobody_waits_for_is_forgotten(worker, small):
    methods, (work,) = prepare(make_config({**small, "methods": ["fedavg"]}))
    done = worker.do(make_task(methods, work), pack(work.config, "data"), work.federation.source)
    ledger, (name,) = Ledger(), {name for name in done.files if name.endswith(".safetensors")}
    refused, failed = TaskResult(refused="it is not there."), TaskResult(failures={name: ("it fails", None)})
    for result in (refused, failed):
        job = make_job(methods, work)
        for dropped in (False, True):
            ledger.add(job)
            if dropped:
                ledger.drop(job, running=True)
            ledger.file(job, result)
            (path,) = job.paths
            found = ledger.find_failure(path) is not None
            try:
                ledger.raise_error(path)
            except fedthe.errors.InputError:
                found = True
            assert found != dropped
            assert not ledger.jobs
    job = make_job(methods, work)
    ledger.add(job)
    ledger.drop(job, running=True)
    ledger.file(job, done)
    assert records.read_round(job.paths[0]) == 3  # what is done is not lost


def test_a_worker_whose_disk_is_full_says_so(worker, small, monkeypatch):
    methods, (work,) = prepare(make_config({**small, "methods": ["fedavg"]}))
    payload, data = pack(work.config, "data"), work.federation.source

    def fail(*given):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(worker_module, "train_some", fail)
    done = worker.do(make_task(methods, work), payload, data)
    assert done.refused == f"a worker on {platform.node()} says: No space left on device."


def test_a_worker_keeps_as_many_federations_as_it_has_room_for(worker, small, monkeypatch):
    methods, works = prepare(make_config({**small, "methods": ["fedavg"], "seeds": [0, 1]}))
    (payload, data), kept = (pack(works[0].config, "data"), works[0].federation.source), []
    for room in (2**30, 0):
        monkeypatch.setattr(worker_module, "LARGEST_PREPARED", room)
        for work in works:
            done = worker.do(make_task(methods, work), payload, data)
            assert not done.refused
            assert not done.failures
        kept.append(len(worker._prepared))
    assert kept == [2, 1]
    monkeypatch.undo()
    worker.do(make_task(methods, works[0]), payload, data)
    assert len(worker._prepared) == 2
    worker.do(make_task(methods, works[0]), pack(works[0].config, "other data"), data)
    assert [id for id, _ in worker._prepared] == [pack(works[0].config, "other data").id]


def test_a_worker_refuses_to_compute_something_else(worker, small):
    methods, (work,) = prepare(make_config({**small, "methods": ["fedavg"]}))
    task = make_task(methods, work, outputs=("trainings/0123456789abcdef-3.safetensors",))
    done = worker.do(task, pack(work.config, "data"), work.federation.source)
    assert "would compute something else" in done.refused
    assert "install the same versions everywhere." in done.refused


@pytest.mark.filterwarnings("default::UserWarning", "ignore::DeprecationWarning")  # as Python has it
def test_what_a_method_warns_of_is_sent_back_once(worker, small):
    Path("loud.py").write_text(LOUD)
    methods, (work,) = prepare(make_config({**small, "methods": ["loud.py:Loud"]}))
    done = worker.do(make_task(methods, work), pack(work.config, "data"), work.federation.source)
    assert done.warnings == ("mind the gap",)


def test_folders_of_killed_workers_are_removed_and_those_of_others_stay(worker, tmp_path):
    gone, alive = (tmp_path / f"{PREFIX}{name}" for name in ("gone", "alive"))
    for folder in (gone, alive):
        folder.mkdir()
        (folder / "file").touch()
    with hold(alive.with_suffix(".lock")):
        other = Worker(1, print)
        assert not gone.exists()
        assert (alive / "file").exists()
        assert worker._folder.exists()
        other.close()
    worker_module.shutil.rmtree(alive)


def test_without_ray_the_command_says_how_to_install_it(fedthe, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for command in (["run", "rounds=1"], ["table", "main-dir1", "dataset=glyphs", "rounds=1", "--yes"]):
        said = fedthe(*command, "--ray", exits=2).err
        assert said == "fedthe: workers on Ray need ray; install it with: pip install 'fedthe[ray]'.\n"


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (["--ray", "rounds=1"], "local"),
        (["rounds=1", "--ray"], "local"),
        (["--ray", "auto", "rounds=1"], "auto"),
        (["rounds=1", "--ray", "head-1.cluster:6379"], "head-1.cluster:6379"),
        (["rounds=1", "--ray=[::1]:6379", "--ray-cpus", "3"], "[::1]:6379"),
    ],
)
def test_ray_has_an_address_or_none(words, address, fedthe, small, monkeypatch):
    asked = []

    @contextmanager
    def stand_in(*given):
        asked.append(given)
        yield

    monkeypatch.setattr("fedthe.experiment.on_ray.workers_on_ray", stand_in)
    settings = [f"{key}={value[0] if isinstance(value, list) else value}" for key, value in small.items()]
    fedthe("run", *settings, "methods=fedavg", "out=run", *words)
    assert asked == [(address, 3 if "--ray-cpus" in words else None)]


def test_options_of_ray_that_mean_nothing_are_refused(fedthe):
    said = "fedthe: 'main-dir1' is no address of Ray; write local, auto, or HOST:PORT.\n"
    assert fedthe("run", "rounds=1", "--ray=main-dir1", exits=2).err == said
    for word in ("127.0.0.1", "127.0.0.1:abc", "ray://head:10001"):
        assert f"'{word}' is no address of Ray" in fedthe("run", "rounds=1", "--ray", word, exits=2).err
    assert "--ray-cpus has no effect without --ray" in fedthe("run", "rounds=1", "--ray-cpus", "2", exits=2).err
    assert "name a table" in fedthe("table", "--ray", exits=2).err


def test_no_ray_is_said_at_once(fedthe):
    pytest.importorskip("ray")
    said = fedthe("run", "rounds=1", "--ray", "localhost:1", exits=2).err
    assert re.match(r"fedthe: there is no Ray at localhost:1 \([\d.]+ port 1: Connection refused\); ", said)
