"""What clients keep between rounds, against a plain list of trees."""

import os
import random
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import clients_states
from clients_states import (
    COUNT,
    NEEDED,
    assert_holds,
    checkpoint,
    list_endless,
    make_state,
    put,
    restore,
    start,
)
from fedthe import tree
from fedthe.engine import clients as clients_module
from fedthe.engine.clients import BLOCK, Clients
from fedthe.engine.slots import HEADER
from fedthe.errors import Damaged, InputError

BUDGETS = {"file": 0, "a byte too little": NEEDED - 1, "just enough": NEEDED, "memory": 2**30}


@pytest.fixture(params=BUDGETS)
def budget(request):
    return BUDGETS[request.param]


@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_uses_is_that_of_a_list(budget, seed, tmp_path):
    choose = random.Random(seed)
    saved, file = tmp_path / "saved", tmp_path / "file"
    live = [(start(budget, file), [-1] * COUNT)]  # every pair here must hold at any time
    checkpoint(live[0][0], saved)
    kept = live[0]
    for number in range(25):
        what = choose.choice(["put", "put", "put", "twice", "branch", "checkpoint", "crash"])
        clients, numbers = live[-1] if what != "branch" else choose.choice(live)
        if what == "checkpoint":
            checkpoint(clients, saved)
            clients.forget_others()
            kept = live[-1]
            live = [kept]
        elif what == "crash":
            live = [(restore(saved, file), kept[1])]
            kept = live[0]
        else:
            for _ in range(2 if what == "twice" else 1):  # one round in two parts
                ids = choose.sample(range(COUNT), choose.randint(1, COUNT))
                clients, numbers = put(clients, ids, number), [number if k in ids else n for k, n in enumerate(numbers)]
            live.append((clients, numbers))
        for pair in live:
            assert_holds(*pair)
    assert file.exists() == (budget < NEEDED)


def test_before_the_first_put_all_hold_the_first_state(budget):
    clients = start(budget)
    assert_holds(clients, [-1] * COUNT)
    assert clients.take([])["body"]["w"].shape == (0, 5, 20)
    assert put(clients, [1], 0).take([])["body"]["w"].shape == (0, 5, 20)


@pytest.mark.parametrize("budget", [0, 2**30])
def test_a_state_may_be_empty(budget, tmp_path):
    clients = Clients.start({}, 3, tmp_path / "file", budget)
    assert clients[0] == clients.take([0, 1]) == {}
    clients = clients.put([1, 2], {}, 0)
    assert list(clients) == [{}, {}, {}]
    assert clients.take([0, 1]) == {}
    checkpoint(clients, tmp_path / "saved")
    assert list(restore(tmp_path / "saved", None)) == [{}, {}, {}]
    assert not (tmp_path / "file").exists()


def test_a_put_may_be_of_nobody(budget, tmp_path):
    clients = put(start(budget, tmp_path / "file"), [2], 0)
    nobody = {name: leaf[:0] for name, leaf in tree.flatten(clients.take([2])).items()}
    assert_holds(clients.put([], nobody, 1), [-1, -1, 0, -1, -1, -1, -1])


def test_what_take_gives_is_fresh(budget):
    clients = put(start(budget), [0, 1], 0)
    for leaf in tree.flatten(clients.take([0, 1, 2])).values():
        leaf.zero_()
    assert_holds(clients, [0, 0, -1, -1, -1, -1, -1])
    clients = start(budget)
    tree.flatten(clients.take([0]))["body.w"].zero_()
    assert_holds(clients, [-1] * COUNT)


def test_what_was_put_or_given_first_may_change_afterwards(budget):
    first, leaves = make_state(-1, 0), tree.flatten(tree.stack([make_state(0, k) for k in (0, 1)]))
    clients = Clients.start(first, COUNT, budget=budget).put([0, 1], leaves, 0)
    for leaf in (*tree.flatten(first).values(), *leaves.values()):
        leaf.zero_()
    assert_holds(clients, [0, 0, -1, -1, -1, -1, -1])


def test_nothing_that_is_kept_has_a_gradient(budget):
    leaf = torch.ones(3, requires_grad=True)
    clients = Clients.start({"a": leaf * 2}, COUNT, budget=budget).put([0], {"a": (leaf * 3)[None]}, 0)
    for k in (0, 1):
        assert not clients[k]["a"].requires_grad
        assert not clients.take([k])["a"].requires_grad


def test_in_memory_nothing_leaves_the_device():
    # the meta device stands for a GPU: it has shapes and no numbers, so a copy from it to the host raises
    clients = Clients.start({"a": torch.empty(2, device="meta"), "b": torch.empty((), device="meta")}, 5)
    for number, ids in enumerate([[0, 1], [1, 2], [2, 3]]):
        for k in ids:  # one round in two parts
            leaves = {"a": torch.empty(1, 2, device="meta"), "b": torch.empty(1, device="meta")}
            clients = clients.put([k], leaves, number)
        clients.sync()
        clients.forget_others()
    kept = Clients.restore(*clients.state(), None)
    for held in (clients, kept):
        for mine in (held.take([0, 1, 2, 3]), held.take([0, 4]), held.take([2, 3]), held.take([4]), *held):
            assert {leaf.device.type for leaf in tree.flatten(mine).values()} == {"meta"}
    with pytest.raises(NotImplementedError, match="meta"):
        clients[0]["a"].cpu()


def test_a_view_does_not_keep_the_larger_tensor(budget):
    models = torch.rand(100, 50)
    clients = Clients.start({"w": models[0]}, 2, budget=budget)
    assert clients[0]["w"].untyped_storage().nbytes() == 200
    clients = clients.put([0], {"w": models[7:8]}, 0)
    assert torch.equal(clients[0]["w"], models[7])
    for k in range(2):
        assert clients[k]["w"].untyped_storage().nbytes() <= 2 * 200  # of all clients, at most
        assert clients.take([k])["w"].untyped_storage().nbytes() == 200


def test_checkpoints_hold_no_rows_of_clients_never_put():
    clients = Clients.start({"a": torch.zeros(5)}, 1000).put([3, 9], {"a": torch.rand(2, 5)}, 0)
    tensors, _ = clients.state()
    assert tensors["own.a"].shape == (2, 5)


def test_nothing_is_written_where_all_fits_in_memory(tmp_path):
    put(start(NEEDED, tmp_path / "file"), [0, 1], 0).sync()
    assert not list(tmp_path.iterdir())


def test_the_file_stays_bounded_if_others_are_forgotten(tmp_path):
    file = tmp_path / "folder" / "file"
    clients = start(0, file)
    for number in range(40):
        clients = put(clients, [number % COUNT, (number + 2) % COUNT], number)
        clients.forget_others()
    assert file.stat().st_size <= (COUNT + 2) * BLOCK
    numbers = [-1] * COUNT
    for number in range(40):
        numbers[number % COUNT] = numbers[(number + 2) % COUNT] = number
    assert_holds(clients, numbers)


@pytest.mark.parametrize("chunk", [1, 2 * BLOCK, 2**26])
def test_a_copy_holds_the_same_without_gaps(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(clients_module, "CHUNK", chunk)
    clients = put(put(start(0, tmp_path / "file"), [0, 1, 2, 3, 5], 0), [1, 5], 1)
    assert clients.has_gaps
    copy = clients.copy_to(tmp_path / "copy")
    for kept in (clients, copy):
        assert_holds(kept, [0, 1, 0, 0, -1, 1, -1])
    assert not copy.has_gaps
    assert (tmp_path / "copy").stat().st_size == 5 * BLOCK
    checkpoint(copy, tmp_path / "saved")
    assert not restore(tmp_path / "saved", tmp_path / "copy").has_gaps
    assert not put(start(NEEDED), [0, 1], 0).has_gaps  # in memory


def test_records_larger_than_a_block_take_several(tmp_path):
    first, file = {"a": torch.zeros(3), "w": torch.zeros(5000)}, tmp_path / "file"
    leaves = {"a": torch.rand(4, 3), "w": torch.rand(4, 5000)}
    clients = Clients.start(first, 4, file, 0)
    for k in range(4):
        clients = clients.put([k], {name: leaf[k : k + 1] for name, leaf in leaves.items()}, k)
    assert file.stat().st_size == 4 * 5 * BLOCK
    checkpoint(clients, tmp_path / "saved")
    for kept in (clients, restore(tmp_path / "saved", file)):
        for name, leaf in leaves.items():
            assert torch.equal(kept.take([3, 1, 2])[name], leaf[[3, 1, 2]])


def test_several_threads_may_read_at_a_time(tmp_path):
    clients = put(start(0, tmp_path / "file"), list(range(COUNT)), 0)
    faults = []

    def read():
        try:
            for _ in range(20):
                assert_holds(clients, [0] * COUNT)
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


def flip_bit(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("at", [HEADER, HEADER + 11, BLOCK - 1])
def test_a_damaged_byte_is_an_error(at, tmp_path):
    clients = put(start(0, tmp_path / "file"), [0, 1], 0)
    checkpoint(clients, tmp_path / "saved")
    flip_bit(tmp_path / "file", int(clients.places[1]) * BLOCK + at)
    for kept in (clients, restore(tmp_path / "saved", tmp_path / "file")):
        kept[0]
        with pytest.raises(Damaged, match="file is damaged; delete the checkpoint"):
            kept[1]
        with pytest.raises(Damaged, match="is damaged"):
            kept.take([0, 1])


@pytest.mark.parametrize("at", [0, HEADER - 1])
def test_a_damaged_header_is_an_error(at, tmp_path):
    clients = put(start(0, tmp_path / "file"), [0, 1], 0)
    flip_bit(tmp_path / "file", int(clients.places[1]) * BLOCK + at)
    with pytest.raises(InputError, match="no longer holds client 1 of round 0"):
        clients[1]


def test_an_overwritten_state_is_an_error_and_not_another_clients():
    old = put(start(0), [0, 1], 0)
    new = put(old, [0, 1], 1)
    new.forget_others()
    put(new, [2, 3], 2)
    with pytest.raises(InputError, match="no longer holds client 0 of round 0"):
        old[0]
    with pytest.raises(InputError, match="no longer holds"):
        old.take([1])


def test_a_full_disk_is_an_os_error_and_harms_no_earlier_state(tmp_path):
    clients = put(start(0, tmp_path / "file"), [0, 1, 2], 0)
    checkpoint(clients, tmp_path / "saved")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "file").stat().st_size + 6000, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            put(clients, [0, 1, 4], 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    numbers = [0, 0, 0, -1, -1, -1, -1]
    assert_holds(clients, numbers)
    assert_holds(restore(tmp_path / "saved", tmp_path / "file"), numbers)
    assert_holds(put(clients, [0, 1, 4], 1), [1, 1, 0, -1, 1, -1, -1])


def test_restore_needs_the_file_as_it_was(tmp_path):
    file, saved = tmp_path / "file", tmp_path / "saved"
    clients = put(start(0, file), [0, 1, 2], 0)
    checkpoint(clients, saved)
    with pytest.raises(InputError, match="not named"):
        restore(saved, None)
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(InputError, match="file is shorter"):
        restore(saved, file)
    with pytest.raises(InputError, match="file is shorter"):
        clients.take([0, 1, 2])
    file.unlink()
    with pytest.raises(InputError, match="file is missing; delete the checkpoint to train again"):
        restore(saved, file)
    file.mkdir()
    with pytest.raises(InputError, match=r"cannot open .*file"):
        restore(saved, file)


def test_a_nameless_file_has_no_checkpoint():
    with pytest.raises(InputError, match="nameless temporary file"):
        put(start(0), [0], 0).state()


def test_a_file_that_cannot_be_made_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot write"):
        put(start(0, tmp_path), [0], 0)


@pytest.mark.parametrize("budget", [0, 2**30])
def test_what_does_not_fit_is_refused(budget):
    leaves = {"a": torch.zeros(2, 4), "b.c": torch.zeros(2)}
    begun = Clients.start({"a": torch.ones(4), "b": {"c": torch.ones(())}}, 5, budget=budget)
    for clients in (begun, begun.put([1, 2], leaves, 0)):
        for ids in ([5], [-1], [0, 9]):
            with pytest.raises(InputError, match="numbered from 0 to 4"):
                clients.take(ids)
        for k in (-1, 5):
            with pytest.raises(IndexError):
                clients[k]
        for wrong, said in [
            (([1, 1], leaves, 1), "distinct clients"),
            (([1, 2], leaves, -1), "round from 0"),
            (([1, -1], leaves, 1), "numbered from 0"),
            (([1, 2, 3], leaves, 1), r"a must be torch.float32 \[3, 4\], but is torch.float32 \[2, 4\]"),
            (([1, 2], {}, 1), "clients keep a, b.c, but a is not in both"),
            (([1, 2], leaves | {"d": torch.zeros(2)}, 1), "but d is not in both"),
            (([1, 2], leaves | {"a": torch.zeros(2, 4).double()}, 1), "a must be torch.float32 .* torch.float64"),
            (([1, 2], leaves | {"a": torch.zeros(2, 3)}, 1), "a must be"),
            (([1, 2], leaves | {"a": torch.zeros(())}, 1), "a must be"),
            (([1, 2], leaves | {"b.c": torch.zeros(2, 1)}, 1), "b.c must be"),
        ]:
            with pytest.raises(InputError, match=said):
                clients.put(*wrong)
    for count, budget in ((0, 0), (1, -1)):
        with pytest.raises(InputError, match="at least 1"):
            Clients.start({}, count, budget=budget)


def test_a_killed_process_goes_on_exactly(tmp_path):
    code = "import sys, clients_states, pathlib; clients_states.put_forever(pathlib.Path(sys.argv[1]))"
    path = os.pathsep.join([str(Path(clients_states.__file__).parent), os.environ.get("PYTHONPATH", "")])
    for more in (5, 40):
        command = [sys.executable, "-c", code, str(tmp_path)]
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            for _ in range(more):
                assert process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        clients = restore(tmp_path / "saved", tmp_path / "file")
        last = int(clients.rounds.max())
        numbers = [-1] * COUNT
        for number in range(last + 1):
            for k in list_endless(number):
                numbers[k] = number
        assert last >= more * 2 - 1
        assert_holds(clients, numbers)


MEMORY = """
import sys
from pathlib import Path
import torch
from fedthe import rng
from fedthe.engine.clients import Clients
torch.set_num_threads(1)
count, rounds = int(sys.argv[1]), 40
clients = Clients.start({"a": torch.zeros(15_000)}, count, Path(sys.argv[2]), 2**20)
for number in range(rounds):
    ids = rng.choose(rng.key(0, "test", number), count, max(1, count // 100)).tolist()
    clients = clients.put(ids, {"a": clients.take(ids)["a"].add_(1)}, number)
    clients.forget_others()
touched = [k for k in range(count) if clients.rounds[k] >= 0]
assert sum(float(clients[k]["a"][7]) for k in touched) == rounds * max(1, count // 100)
# not ru_maxrss, which a child has from its parent on
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")
def test_memory_hardly_depends_on_the_number_of_clients(tmp_path):
    def peak(count: int) -> int:
        command = [sys.executable, "-c", MEMORY, str(count), str(tmp_path / str(count))]
        return int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)

    few, many = peak(100), peak(10_000)
    assert (tmp_path / "10000").stat().st_size > 150e6  # what memory would hold otherwise
    assert many < 1.2 * few
