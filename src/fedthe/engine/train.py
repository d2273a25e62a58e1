"""The round loop: sampled clients personalize, train and upload; the server aggregates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from .. import rng, tree
from ..errors import Broken, Failed, InputError, code_of_a_method
from ..methods.base import Method
from ..tree import Tree
from ..types import Shard
from .beside import Beside, ClientsBeside
from .clients import Clients
from .loop import Loop
from .memory import trim_heap
from .server import Diverged, check_aggregate, find_infinite
from .visit import Engine, Progress, Row, Run, Training, Visit, Visited


def start(
    method: Method, clients: int, seed: int, device: torch.device | str = "cpu", file: Path | None = None
) -> Progress:
    """Before the first round. `file` keeps the clients' state where it is too much for memory."""
    return start_from(method, method.net.init(seed), clients, device, file)


def start_from(
    method: Method, params: Tree, clients: int, device: torch.device | str = "cpu", file: Path | None = None
) -> Progress:
    """Before the first round of a network with these parameters."""
    shared, mine = method.init(params)
    shared = tree.map_leaves(lambda leaf: leaf.to(device), shared)
    # a copy: what is later kept of it must not be taken for what was received
    mine = tree.map_leaves(lambda leaf: leaf.to(device, copy=True), mine)
    budget = 2**30 if torch.device(device).type == "cuda" else 2**26
    return Progress(0, shared, Clients.start(mine, clients, file, budget))


def train_round(
    method: Method, runs: Sequence[Run], settings: Training, reached: Sequence[Progress], engine: Engine
) -> list[Progress | Failed]:
    """One round further for runs that are all in the same round. A run that diverges does not touch the others."""
    visit = Visit(method, settings, runs, reached)
    sampled = [sample_clients(len(run.shards), settings.participation, run.seed, visit.round) for run in runs]
    rows = [Row(r, k) for r, clients in enumerate(sampled) for k in clients]
    try:
        with code_of_a_method():
            visited = engine.visit(visit, rows)
    except Failed as error:
        return [error] * len(runs)
    faults, losses = list_faults(visited, len(rows)), visited.losses.tolist()  # where the host waits, once a round
    results: list[Progress | Failed] = []
    first = 0
    for run, progress, clients in zip(runs, reached, sampled, strict=True):
        part = range(first, first + len(clients))
        first = part.stop
        good = [row for row in part if faults[row] is None]
        bad = [Diverged(visit.round, rows[row].client, str(faults[row])) for row in part if faults[row] is not None]
        if bad and (settings.tolerate == "stop" or not good):
            results.append(bad[0])
            continue
        kept, mean = [rows[row].client for row in good], sum(losses[row] for row in good) / len(good)
        skipped = (*progress.skipped, *(f"{each}; left out" for each in bad))
        try:
            shared, mine = _finish_round(method, run, progress, kept, visited, good)
            results.append(Progress(progress.round + 1, shared, mine, (*progress.losses, mean), skipped))
        except Failed as error:
            results.append(error)
    return results


def list_faults(visited: Visited, rows: int) -> list[str | None]:
    """For every row, why what it came to cannot be used; None for the others."""
    leaves = {f"the upload's {name}": leaf for name, leaf in tree.flatten(visited.uploads).items()}
    leaves |= {f"the state's {name}": leaf for name, leaf in visited.own.items()}
    faults = find_infinite(leaves, rows)
    for row, loss in enumerate(visited.losses.tolist()):
        if not math.isfinite(loss):
            faults[row] = f"the loss is {loss}"
    for row, fault in visited.faults.items():
        faults[row] = fault
    return faults


def _finish_round(
    method: Method, run: Run, progress: Progress, clients: Sequence[int], visited: Visited, rows: Sequence[int]
) -> tuple[Tree, Clients | ClientsBeside]:
    """What is shared after a round of these clients, and what the clients keep."""
    weights = torch.tensor([float(run.sizes[k]) for k in clients], device=visited.losses.device)
    uploads = tree.map_leaves(lambda leaf: leaf[_index(rows, leaf)], visited.uploads)
    with code_of_a_method():
        shared = method.aggregate(progress.shared, uploads, weights)
        check_aggregate(progress.shared, shared, progress.round)
    own = {name: leaf[_index(rows, leaf)] for name, leaf in visited.own.items()}
    try:
        return shared, progress.mine.put(clients, own, visited.links, progress.shared, progress.round)
    except InputError as error:  # states that do not fit together; a disk that is full is another matter
        raise Broken(error) from error


def _index(rows: Sequence[int], leaf: Tensor) -> slice | Tensor:
    """A slice where it will do, which copies nothing."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=leaf.device)


def deploy_some(
    method: Method, run: Run, settings: Training, progress: Progress, engine: Engine, clients: Sequence[int]
) -> Tree:
    """Some clients, sampled lately or not, personalize the last shared state once more: states [clients, ...]."""
    with code_of_a_method():
        visited = engine.visit(Visit(method, settings, [run], [progress], trains=False), [Row(0, k) for k in clients])
    for k, fault in zip(clients, list_faults(visited, len(clients)), strict=True):
        if fault is not None:
            raise Diverged(progress.round, k, fault)
    received = tree.map_leaves(lambda leaf: leaf.expand(len(clients), *leaf.shape), progress.shared)
    return visited.states(received)


def put_beside(reached: Mapping[Method, Progress]) -> tuple[Beside, Progress] | None:
    """Methods that send the same as one, if they are in the same round of the same run."""
    shared = {method: tree.flatten(progress.shared) for method, progress in reached.items()}
    parts = sorted(reached, key=lambda method: -len(shared[method]))
    first, most, network = reached[parts[0]], shared[parts[0]], parts[0].net.starts()
    for method in parts[1:]:
        # what goes around beside the network means the same within one class alone
        foreign = type(method) is not type(parts[0]) and not shared[method].keys() <= network.keys()
        if foreign or reached[method].losses != first.losses or not _is_part(shared[method], most):
            return None
    states = tuple(_one_method(reached[method].mine) for method in parts)
    leaves = tuple(frozenset(shared[method]) for method in parts)
    return Beside(parts[0].net, parts=tuple(parts), leaves=leaves), replace(first, mine=ClientsBeside(states))


def _is_part(leaves: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> bool:
    return all(name in whole and torch.equal(leaf, whole[name]) for name, leaf in leaves.items())


def _one_method(states: Clients | ClientsBeside) -> Clients:
    assert isinstance(states, Clients)
    return states


def take_apart(method: Beside, reached: Progress) -> dict[Method, Progress]:
    """What each of them has reached."""
    assert isinstance(reached.mine, ClientsBeside)
    return {
        part: replace(reached, shared=method.pick(reached.shared, i), mine=mine)
        for i, (part, mine) in enumerate(zip(method.parts, reached.mine.parts, strict=True))
    }


def train_together(
    method: Method,
    runs: Sequence[Run],
    settings: Training,
    reached: Sequence[Progress],
    engine: Engine,
    after_round: Callable[[int, Progress], None] = lambda run, progress: None,
) -> list[Progress | Failed]:
    """All rounds that are left of every run. Those behind go first, so that all that can go side by side do."""
    results: list[Progress | Failed] = list(reached)
    while True:
        going = [(r, p) for r, p in enumerate(results) if isinstance(p, Progress) and p.round < settings.rounds]
        if not going:
            return results
        number = min(progress.round for _, progress in going)
        now = [(r, progress) for r, progress in going if progress.round == number]
        after = train_round(method, [runs[r] for r, _ in now], settings, [progress for _, progress in now], engine)
        for (r, _), result in zip(now, after, strict=True):
            results[r] = result
            if isinstance(result, Progress):
                after_round(r, result)
        if engine.device.type == "cpu":
            trim_heap()


def train(
    method: Method,
    shards: Sequence[Shard],
    settings: Training,
    seed: int,
    progress: Progress | None = None,
    engine: Engine | None = None,
) -> Progress:
    """One run: all rounds, or those left after `progress`."""
    progress = progress or start(method, len(shards), seed)
    (result,) = train_together(method, [Run(seed, shards)], settings, [progress], engine or Loop())
    if isinstance(result, Failed):
        raise result
    return result


def deploy(
    method: Method,
    shards: Sequence[Shard],
    settings: Training,
    seed: int,
    progress: Progress,
    engine: Engine | None = None,
) -> list[Tree]:
    """Every client's deployed state."""
    clients = range(len(shards))
    deployed = deploy_some(method, Run(seed, shards), settings, progress, engine or Loop(), clients)
    return [tree.take(deployed, k) for k in clients]


def sample_clients(clients: int, participation: float, seed: int, number: int) -> list[int]:
    count = count_sampled(clients, participation)
    return sorted(rng.choose(rng.key(seed, "participation", number), clients, count).tolist())


def count_sampled(clients: int, participation: float) -> int:
    return max(1, round(participation * clients))
