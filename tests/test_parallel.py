"""Work on several cores: in order, bounded, and stopped by the first exception."""

import threading
import time

import pytest
import torch

import fedthe
from fedthe import records, store, tree
from fedthe.engine.loop import Loop
from fedthe.engine.train import deploy_some, train
from fedthe.engine.visit import Question, Run
from fedthe.methods import compose
from fedthe.methods.base import FedAvg
from fedthe.methods.ditto import Ditto
from fedthe.methods.fedthe import HeadEnsemble
from fedthe.methods.memo import Memo
from fedthe.methods.two_heads import TwoHeads
from fedthe.parallel import map_in_threads, one_thread_of_torch
from trained_methods import NET, SETTINGS, make_data


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_come_in_order(threads):
    assert list(map_in_threads(lambda i: time.sleep(0.002 * (i % 3)) or i * i, range(20), threads)) == [
        i * i for i in range(20)
    ]


def test_as_many_items_as_threads_are_at_work_at_a_time():
    together = threading.Barrier(3, timeout=30)  # breaks unless three come to it at a time
    assert len(list(map_in_threads(lambda i: together.wait(), range(9), 3))) == 9


def test_few_results_wait_to_be_taken():
    begun = []
    done = map_in_threads(lambda i: begun.append(i) or i, range(100), 3)
    next(done)
    time.sleep(0.05)
    assert len(begun) <= 5
    assert list(done) == list(range(1, 100))


def test_every_worker_computes_with_one_thread_and_the_caller_as_before():
    torch.set_num_threads(2)
    try:
        counts = list(map_in_threads(lambda i: torch.get_num_threads(), range(6), 3))
        assert counts == [1] * 6
        assert torch.get_num_threads() == 2
        with one_thread_of_torch():
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_first_exception_interrupts_the_rest(error):
    begun, ended = threading.Event(), []

    def work(i):
        if i == 0:
            begun.wait(30)
            raise error("no")
        begun.set()
        for _ in range(3000):  # 30 s of small operations, as training is
            time.sleep(0.01)
        ended.append(i)

    with pytest.raises(error, match="no"):
        list(map_in_threads(work, range(8), 2))
    assert ended == []


def test_numbers_do_not_depend_on_how_many_clients_go_at_a_time(data, tmp_path):
    """Bit for bit: what is trained, and every answer. And torch computes with as many threads as before."""
    methods = ["fedavg", "ditto", "apfl", "fedthe_plus", "t3a", "knn_per"]
    settings = {"clients": 5, "dirichlet": 1.0, "rounds": 2, "local_epochs": 1, "samples": 3, "methods": methods}
    kept = {}
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        try:
            results = fedthe.run(dataset=data, out=str(tmp_path / str(threads)), threads=threads, **settings)
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(1)
        assert results.environment["threads"] == threads
        assert results.failures == {}
        # the order of metadata in a file is safetensors' own; the hashes in it are of the tensors
        files = sorted(results.folder.glob("trainings/*.safetensors"))
        kept[threads] = {path.name: records._read_facts(path) for path in files} | {
            (path.name, name): values.tobytes()
            for path in sorted(results.folder.glob("samples/*.npz"))
            for name, values in store.read_arrays(path).items()
        }
    assert len(kept[1]) > 5
    assert kept[1] == kept[2] == kept[4]


@pytest.mark.parametrize("recipe", [(FedAvg(balanced=True), TwoHeads(), HeadEnsemble(then=Memo(2, 1))), Ditto()])
def test_a_loop_of_any_number_of_threads_trains_deploys_and_answers_the_same(recipe):
    method, (shards, streams) = compose(NET, recipe), make_data()
    run, found = Run(0, shards), []
    for threads in (1, 2, 3):
        engine = Loop(threads=threads)
        reached = train(method, shards, SETTINGS, 0, engine=engine)
        deployed = deploy_some(method, run, SETTINGS, reached, engine, range(len(shards)))
        asked = [Question(k, images, (0, "test", k)) for k, (images, _) in enumerate(streams)]
        answers = engine.answer(method, deployed, list(shards), asked)
        parts = [reached.server.shared, reached.averages, *reached.clients, deployed]
        leaves = [leaf.numpy().tobytes() for part in parts for leaf in tree.flatten(part).values()]
        columns = [column.tobytes() for each in answers for column in (each.classes, *each.info.values())]
        found.append((leaves, columns, reached.server.losses))
    assert found[0] == found[1] == found[2]


def test_idle_workers_do_not_keep_an_exception_from_coming_out():
    """Many threads, few items: most workers wait for work while one of them raises."""

    def work(i):
        if i == 0:
            time.sleep(0.05)
            raise ValueError("no")
        return i

    for threads in (4, 8):
        for _ in range(5):
            with pytest.raises(ValueError, match="no"):
                list(map_in_threads(work, range(5), threads))
    assert not [each for each in threading.enumerate() if each.name.startswith("fedthe")]


@pytest.mark.parametrize("threads", [1, 3])
def test_what_the_caller_set_for_its_own_thread_does_not_count(threads):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        product = lambda i: torch.ones(2, 2) @ torch.ones(2, 2)  # noqa: E731
        dtypes = [each.dtype for each in map_in_threads(product, range(3), threads)]
        modes = list(map_in_threads(lambda i: torch.is_grad_enabled(), range(3), threads))
    assert dtypes == [torch.float32] * 3
    assert modes == [True] * 3
