"""What clients keep between rounds, against a plain list of trees."""

import json
import os
import random
import resource
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedthe import tree
from fedthe.engine import clients as module
from fedthe.engine.clients import Clients, split
from fedthe.errors import InputError

COUNT = 7
# "tiny": own leaves in memory, received models on file; 0: all on file
BUDGETS = {"file": 0, "tiny": 300, "memory": 2**30}
LINKS = {"body.w": "body.w", "again": "body.w", "body.b": "body.b"}


@pytest.fixture(params=BUDGETS)
def budget(request, monkeypatch):
    monkeypatch.setattr(module, "RECEIVED", 2)
    return BUDGETS[request.param]


def make_shared(number: int) -> dict:
    g = torch.Generator().manual_seed(number)
    return {"body": {"w": torch.randn(5, 20, generator=g), "b": torch.randn(3, generator=g)}, "unused": torch.zeros(9)}


def make_own(number: int, k: int) -> dict:
    g = torch.Generator().manual_seed(1000 * number + k)
    return {
        "head.half": torch.randn(2, 2, generator=g).to(torch.bfloat16),
        "head.flags": torch.rand(3, generator=g) < 0.5,
        "alpha": torch.rand((), generator=g),
        "steps": torch.randint(2**40, (), generator=g),
        "none": torch.empty(0, 3),
    }


# the order differs from that of own leaves and links, and between the two kinds
NAMES = ["alpha", "head.flags", "body.w", "head.half", "steps", "body.b", "again", "none"]


def make_state(number: int, k: int) -> dict:
    """What client k holds after a put in round `number`; before the first, -1, all hold the same."""
    shared, own = tree.flatten(make_shared(number + 1)), make_own(number + 1, k if number >= 0 else 0)
    flat = own | {name: shared[source] for name, source in LINKS.items()}
    return tree.unflatten({name: flat[name] for name in NAMES})


def put(clients: Clients, ids: list, number: int) -> Clients:
    own = tree.stack([tree.unflatten(make_own(number + 1, k)) for k in ids])
    return clients.put(ids, tree.flatten(own), LINKS, make_shared(number + 1), number)


def start(budget: int, file=None) -> Clients:
    return Clients.start(make_state(-1, 0), COUNT, file, budget)


def assert_same(a: dict, b: dict) -> None:
    a, b = tree.flatten(a), tree.flatten(b)
    assert list(a) == list(b)
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert torch.equal(a[name], b[name]), name


def assert_holds(clients: Clients, numbers: list) -> None:
    assert len(clients) == len(numbers)
    for k, (mine, number) in enumerate(zip(clients, numbers, strict=True)):
        assert_same(mine, make_state(number, k))
    for ids in ([*range(len(numbers))], [3, 0, 3], [2]):
        assert_same(clients.take(ids), tree.stack([make_state(numbers[k], k) for k in ids]))


def checkpoint(clients: Clients, path) -> None:
    tensors, facts = clients.state()
    clients.sync()
    part = path.with_suffix(".part")
    save_file(
        {name: leaf.contiguous().clone() for name, leaf in tensors.items()},
        part,
        {"facts": json.dumps(facts, sort_keys=True)},
    )
    os.replace(part, path)


def restore(path, file) -> Clients:
    from safetensors import safe_open

    with safe_open(path, "pt") as opened:
        facts = json.loads(opened.metadata()["facts"])
    return Clients.restore(load_file(path), facts, file)


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


def test_before_the_first_put_all_hold_the_first_state():
    clients = start(0)
    assert_holds(clients, [-1] * COUNT)
    assert clients.take([])["body"]["w"].shape == (0, 5, 20)
    assert put(clients, [1], 0).take([])["body"]["w"].shape == (0, 5, 20)


@pytest.mark.parametrize("budget", [0, 2**30])
def test_a_state_may_be_empty_and_a_put_may_be_of_nobody(budget, tmp_path):
    clients = Clients.start({}, 3, budget=budget)
    assert clients[0] == clients.take([0, 1]) == {}
    clients = clients.put([1, 2], {}, {}, {}, 0)
    assert list(clients) == [{}, {}, {}]
    assert clients.take([0, 1]) == {}
    checkpoint(clients, tmp_path / "saved")
    assert list(restore(tmp_path / "saved", None)) == [{}, {}, {}]
    assert clients.put([], {}, {}, {}, 0) is clients


def test_a_first_state_with_other_leaves_is_told_apart_but_not_stacked():
    clients = Clients.start({}, 3).put([1], {"a": torch.ones(1, 2)}, {}, {}, 0)
    assert clients[0] == {}
    assert torch.equal(clients.take([1])["a"], torch.ones(1, 2))
    with pytest.raises(InputError, match="`init` must give clients the leaves"):
        clients.take([0, 1])


def test_a_link_is_to_the_model_last_received_and_models_nobody_holds_are_dropped():
    shared = [{"w": torch.full((4,), float(number))} for number in range(3)]
    clients = Clients.start(shared[0], 2)
    for number, k in enumerate([0, 1, 0]):
        clients = clients.put([k], {}, {"w": "w"}, shared[number], number)
    assert clients[0]["w"] is shared[2]["w"]
    assert clients[1]["w"] is shared[1]["w"]
    assert list(clients.received) == [1, 2]
    assert clients.take([1, 0])["w"][:, 0].tolist() == [1, 2]


def test_what_take_gives_is_fresh(budget):
    clients = put(start(budget), [0, 1], 0)
    for leaf in tree.flatten(clients.take([0, 1, 2])).values():
        leaf.zero_()
    assert_holds(clients, [0, 0, -1, -1, -1, -1, -1])


def test_in_memory_nothing_leaves_the_device():
    # the meta device stands for a GPU: it has shapes and no numbers, so a copy from it to the host raises
    def shared(number: int) -> dict:
        return {"w": torch.empty(4, device="meta")}

    clients = Clients.start(shared(0) | {"a": torch.empty(2, device="meta")}, 5)
    for number, ids in enumerate([[0, 1], [1, 2], [2, 3]]):
        received = shared(number)
        for k in ids:  # one round in two parts
            clients = clients.put([k], {"a": torch.empty(1, 2, device="meta")}, {"w": "w"}, received, number)
        clients.sync()
        clients.forget_others()
    kept = Clients.restore(*clients.state(), None)
    for held in (clients, kept):
        for mine in (held.take([0, 1, 2, 3]), held.take([0, 4]), held.take([2, 3]), held.take([4]), *held):
            assert {leaf.device.type for leaf in tree.flatten(mine).values()} == {"meta"}
    with pytest.raises(NotImplementedError, match="meta"):
        received["w"].cpu()


def test_a_view_does_not_keep_the_larger_tensor():
    models = torch.rand(100, 50)
    clients = Clients.start({"w": models[0]}, 2).put([0], {}, {"w": "w"}, {"w": models[7]}, 0)
    assert torch.equal(clients[0]["w"], models[7])
    for k in range(2):
        assert clients[k]["w"].untyped_storage().nbytes() == 200


def test_checkpoints_hold_no_rows_of_clients_never_put():
    clients = Clients.start({"a": torch.zeros(5)}, 1000).put([3, 9], {"a": torch.rand(2, 5)}, {}, {}, 0)
    tensors, _ = clients.state()
    assert tensors["own.a"].shape == (2, 5)


def test_nothing_is_written_where_all_fits_in_memory(tmp_path):
    put(start(2**30, tmp_path / "file"), [0, 1], 0).sync()
    assert not list(tmp_path.iterdir())


def test_the_file_stays_bounded_if_others_are_forgotten(tmp_path):
    file = tmp_path / "folder" / "file"
    clients = start(0, file)
    for number in range(40):
        clients = put(clients, [number % COUNT, (number + 2) % COUNT], number)
        clients.forget_others()
    model = 1 + make_shared(0)["body"]["w"].nbytes // module.BLOCK
    assert file.stat().st_size <= (COUNT + 2) * (1 + model) * module.BLOCK
    numbers = [-1] * COUNT
    for number in range(40):
        numbers[number % COUNT] = numbers[(number + 2) % COUNT] = number
    assert_holds(clients, numbers)


def test_models_larger_than_a_record_take_several_slots(tmp_path):
    shared = [{"w": torch.rand(5000) + number} for number in range(4)]
    clients = Clients.start({"w": shared[0]["w"], "a": torch.zeros(3)}, 4, tmp_path / "file", 0)
    for number in range(4):
        clients = clients.put([number], {"a": torch.rand(1, 3)}, {"w": "w"}, shared[number], number)
    assert {len(slots) for slots in clients.spilled.values()} == {5}
    checkpoint(clients, tmp_path / "saved")
    for kept in (clients, restore(tmp_path / "saved", tmp_path / "file")):
        assert torch.equal(kept.take([3, 1, 2])["w"], torch.stack([shared[k]["w"] for k in (3, 1, 2)]))


@pytest.mark.parametrize("at", [module.HEADER, module.HEADER + 11, -1])
def test_a_damaged_byte_is_an_error(at, tmp_path):
    clients = put(start(0, tmp_path / "file"), [0, 1], 0)
    size, slot = clients.layout.slot, int(clients.places[1])
    with (tmp_path / "file").open("r+b") as file:
        file.seek(slot * size + at % size)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))
    clients[0]
    with pytest.raises(InputError, match="file is damaged; delete the checkpoint"):
        clients[1]
    with pytest.raises(InputError, match="is damaged"):
        clients.take([0, 1])


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


def test_a_nameless_file_has_no_checkpoint():
    with pytest.raises(InputError, match="nameless temporary file"):
        put(start(0), [0], 0).state()


def test_a_file_that_cannot_be_made_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot write"):
        put(start(0, tmp_path), [0], 0)


def test_what_does_not_fit_is_refused(budget):
    shared = {"w": torch.zeros(3)}
    own = {"a": torch.zeros(2, 4)}
    links = {"b": "w"}
    clients = Clients.start({}, 5, budget=budget)
    with pytest.raises(InputError, match="numbered from 0 to 4"):
        clients.take([5])
    with pytest.raises(IndexError):
        clients[-1]
    for wrong, said in [
        (([1, 1], own, links, shared, 0), "distinct clients"),
        (([1, 2], own, links, shared, -1), "round from 0"),
        (([1, -1], own, links, shared, 0), "numbered from 0"),
        (([1, 2, 3], own, links, shared, 0), "one row for each of 3"),
        (([1, 2], {"a": torch.zeros(())}, links, shared, 0), "one row for each of 2"),
        (([1, 2], own, {"a": "w"}, shared, 0), "both a client's own and a link"),
        (([1, 2], own, {"a.b": "w"}, shared, 0), "leaf"),
        (([1, 2], own, {"b": "v"}, shared, 0), "leads to v"),
    ]:
        with pytest.raises(InputError, match=said):
            clients.put(*wrong)
    clients = clients.put([1, 2], own, links, shared, 0)
    for wrong, said in [
        (({}, links, shared, 1), "same own leaves, but a is not there here"),
        (({"a": torch.zeros(2, 4).double()}, links, shared, 1), "same own leaves, but a is .*float64"),
        (({"a": torch.zeros(2, 3)}, links, shared, 1), "same own leaves, but a is"),
        ((own, {"c": "w"}, shared, 1), "same links, but c is"),
        ((own, links, {"w": torch.zeros(4)}, 1), "same received leaves, but w is"),
        ((own, links, {"w": torch.ones(3)}, 0), "another shared model"),
    ]:
        with pytest.raises(InputError, match=said):
            clients.put([1, 2], *wrong)
    with pytest.raises(InputError, match="at least 1"):
        Clients.start({}, 0)


def test_split_tells_links_by_identity():
    w, b = torch.zeros(2), torch.zeros(2)
    shared = {"body": {"w": w, "twin": w}, "b": b}
    mine = {"body": {"w": w, "twin": w}, "copy": {"b": b}, "other": w, "b": b.clone()}
    own, links = split(mine, shared)
    assert links == {"body.w": "body.w", "body.twin": "body.twin", "copy.b": "b", "other": "body.w"}
    assert own.keys() == {"b"}
    assert own["b"] is mine["b"]
    assert split({}, shared) == ({}, {})


ENDLESS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch
torch.set_num_threads(1)
from test_clients import *
module.RECEIVED = 2
folder = Path(sys.argv[1])
saved, file = folder / "saved", folder / "file"
clients = restore(saved, file) if saved.exists() else start(0, file)
for number in range(clients.rounds.max() + 1, 10**9):
    clients = put(clients, sorted({number % COUNT, number // 3 % COUNT}), number)
    if number % 2:
        checkpoint(clients, saved)
        clients.forget_others()
        print(number, flush=True)
"""


def test_a_killed_process_goes_on_exactly(tmp_path):
    for more in (5, 40):
        command = [sys.executable, "-c", ENDLESS, str(tmp_path), os.path.dirname(__file__)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for _ in range(more):
                assert process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        clients = restore(tmp_path / "saved", tmp_path / "file")
        last = int(clients.rounds.max())
        numbers = [-1] * COUNT
        for number in range(last + 1):
            numbers[number % COUNT] = numbers[number // 3 % COUNT] = number
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
shared = {"w": torch.zeros(10_000)}
clients = Clients.start(shared | {"a": torch.zeros(15_000)}, count, Path(sys.argv[2]), 2**20)
for number in range(rounds):
    ids = rng.choose(rng.key(0, "test", number), count, max(1, count // 100)).tolist()
    own = clients.take(ids)["a"].add_(1)
    shared = {"w": shared["w"] + 1}
    clients = clients.put(ids, {"a": own}, {"w": "w"}, shared, number)
    clients.forget_others()
assert (clients.take(ids)["w"] == rounds).all()
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


def test_a_leaf_that_is_now_received_and_now_own_is_kept_as_own():
    """Such as a body that is renewed in some rounds only."""
    sent = [{"body": torch.full((2,), float(number))} for number in range(4)]
    first = {"body": torch.zeros(2), "head": torch.zeros(1)}

    def heads(*values):
        return torch.tensor(values)[:, None]

    clients = Clients.start(first, 4).put([0, 1], {"head": heads(1.0, 2.0)}, {"body": "body"}, sent[1], 1)
    kept = torch.stack([clients[0]["body"], torch.full((2,), 9.0)])
    clients = clients.put([0, 2], {"head": heads(3.0, 4.0), "body": kept}, {}, sent[2], 2)  # own now
    clients = clients.put([3], {"head": heads(5.0)}, {"body": "body"}, sent[3], 3)  # and received again
    assert [state["body"].tolist() for state in clients] == [[1, 1], [1, 1], [9, 9], [3, 3]]
    assert [float(state["head"]) for state in clients] == [3, 2, 4, 5]
    on_file = Clients.start(first, 4, budget=0).put([0], {"head": heads(1.0)}, {"body": "body"}, sent[1], 1)
    with pytest.raises(InputError, match="let `personalize` clone it"):
        on_file.put([0], {"head": heads(1.0), "body": kept[:1]}, {}, sent[2], 2)
