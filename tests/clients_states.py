"""What clients keep in tests: states that are told apart by round and client, and checkpoints of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedthe import tree
from fedthe.engine.clients import Clients
from fedthe.tree import Tree

COUNT = 7


def make_state(number: int, k: int) -> Tree:
    """What client k keeps after a put in round `number`; before the first, -1, all keep the same."""
    g = torch.Generator().manual_seed(1000 * (number + 1) + (k if number >= 0 else 0))
    return {
        "alpha": torch.rand((), generator=g),
        "head": {"half": torch.randn(2, 2, generator=g).to(torch.bfloat16), "flags": torch.rand(3, generator=g) < 0.5},
        "body": {"w": torch.randn(5, 20, generator=g)},
        "steps": torch.randint(2**40, (), generator=g),
        "none": torch.empty(0, 3),
    }


NEEDED = COUNT * sum(leaf.nbytes for leaf in tree.flatten(make_state(-1, 0)).values())  # bytes, in memory


def start(budget: int, file: Path | None = None) -> Clients:
    return Clients.start(make_state(-1, 0), COUNT, file, budget)


def put(clients: Clients, ids: list[int], number: int) -> Clients:
    leaves = tree.flatten(tree.stack([make_state(number, k) for k in ids]))
    return clients.put(ids, dict(reversed(leaves.items())), number)  # in any order


def assert_same(a: Tree, b: Tree) -> None:
    a, b = tree.flatten(a), tree.flatten(b)
    assert list(a) == list(b)
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert torch.equal(a[name], b[name]), name


def assert_holds(clients: Clients, numbers: list[int]) -> None:
    """Every client keeps what it put in the round that `numbers` has for it."""
    assert len(clients) == len(numbers)
    for k, (mine, number) in enumerate(zip(clients, numbers, strict=True)):
        assert_same(mine, make_state(number, k))
    for ids in ([*range(len(numbers))], [3, 0, 3], [2]):
        assert_same(clients.take(ids), tree.stack([make_state(numbers[k], k) for k in ids]))


def checkpoint(clients: Clients, path: Path) -> None:
    tensors, facts = clients.state()
    clients.sync()
    part = path.with_suffix(".part")
    whole = {name: leaf.contiguous().clone() for name, leaf in tensors.items()}
    save_file(whole, part, {"facts": json.dumps(facts, sort_keys=True)})
    os.replace(part, path)


def restore(path: Path, file: Path | None) -> Clients:
    with safe_open(path, "pt") as opened:
        facts = json.loads(opened.metadata()["facts"])
    return Clients.restore(load_file(path), facts, file)


def put_forever(folder: Path) -> None:
    """Put round after round, and say each that a checkpoint holds; whatever is there already is gone on with."""
    saved, file = folder / "saved", folder / "file"
    clients = restore(saved, file) if saved.exists() else start(0, file)
    for number in range(int(clients.rounds.max()) + 1, 10**9):
        clients = put(clients, list_endless(number), number)
        if number % 2:
            checkpoint(clients, saved)
            clients.forget_others()
            print(number, flush=True)


def list_endless(number: int) -> list[int]:
    """Who puts in a round of `put_forever`."""
    return sorted({number % COUNT, number // 3 % COUNT})
