"""The round loop: sampled clients personalize, train and upload; the server aggregates.

Methods with the same `core` are trained side by side: the shared model once, and what clients keep for each of them.
Each method gets the same numbers as if it were trained alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from .. import tree
from ..errors import Broken, Failed, InputError, code_of_a_method
from ..methods.base import Method, Personal
from ..methods.checks import check_optimizer
from ..tree import Tree
from ..types import Shard
from .client import Received, join_unlabeled
from .clients import Clients
from .conclude import conclude, deploy_beside
from .loop import Loop
from .memory import trim_heap
from .robust import find_start, scale_update
from .server import Diverged, Sent, Server, aggregate, find_infinite, sample_clients
from .shards import hide_labels
from .visit import Engine, Progress, Row, Run, Training, Visit, Visited

Outcome = Progress | Failed


def start(
    method: Method, clients: int, seed: int, device: torch.device | str = "cpu", file: Path | None = None
) -> Progress:
    """Before the first round. `file` holds what clients keep where that is too much for memory."""
    return start_from(method, method.net.init(seed), clients, device, file)


def start_from(
    method: Method, params: Tree, clients: int, device: torch.device | str = "cpu", file: Path | None = None
) -> Progress:
    """Before the first round of a network with these parameters."""
    shared, averages, mine = (tree.map_leaves(lambda leaf: leaf.to(device), part) for part in method.start(params))
    budget = 2**30 if torch.device(device).type == "cuda" else 2**26
    return Progress(Server(0, shared), averages, Clients.start(mine, clients, file, budget))


@dataclass(frozen=True)
class Lane:
    """A run, and the methods (by their number) that share its server."""

    run: int
    methods: tuple[int, ...]


def train_together(
    methods: Sequence[Method],
    runs: Sequence[Run],
    settings: Training,
    reached: Sequence[Sequence[Progress]],
    engine: Engine,
    after_round: Callable[[int, Sequence[int], Sequence[Progress]], None] = lambda run, methods, progress: None,
) -> list[list[Outcome]]:
    """All rounds that are left of every run [run] and method [method]. The methods have the same core.

    Those behind go first, so that as many as possible go side by side. If anything goes wrong in a lane of several
    methods, each goes on alone, so that it is known whose fault it is, and the others are not affected.
    """
    for method in methods:
        check_optimizer(method, settings.optimizer)
    results: list[list[Outcome]] = [list(of_run) for of_run in reached]
    lanes = [Lane(r, some) for r, of_run in enumerate(reached) for some in group_equal([p.server for p in of_run])]
    while True:
        going = [(lane, _pick(results, lane)) for lane in lanes]
        left = [(lane, now) for lane, now in going if now and now[0].round < settings.rounds]
        if not left:
            return results
        number = min(now[0].round for _, now in left)
        some = next(lane.methods for lane, now in left if now[0].round == number)
        now = [(lane, progress) for lane, progress in left if progress[0].round == number and lane.methods == some]
        members = tuple(methods[m] for m in some)
        visit = Visit(members, settings, [runs[lane.run] for lane, _ in now], [progress for _, progress in now])
        for (lane, _), result in zip(now, train_round(visit, engine), strict=True):
            if isinstance(result, list):
                for m, progress in zip(lane.methods, result, strict=True):
                    results[lane.run][m] = progress
                after_round(lane.run, lane.methods, result)
            elif len(lane.methods) > 1:
                at = lanes.index(lane)
                lanes[at : at + 1] = [Lane(lane.run, (m,)) for m in lane.methods]
            else:
                results[lane.run][lane.methods[0]] = result
        if engine.device.type == "cpu":
            trim_heap()


def _pick(results: list[list[Outcome]], lane: Lane) -> list[Progress]:
    """What the lane has reached; nothing, if it failed."""
    reached = [results[lane.run][m] for m in lane.methods]
    return [progress for progress in reached if isinstance(progress, Progress)]


def group_equal(servers: Sequence[Server]) -> list[tuple[int, ...]]:
    """The places of equal servers, together."""
    groups: list[list[int]] = []
    for i, server in enumerate(servers):
        found = next((some for some in groups if _are_equal(servers[some[0]], server)), None)
        if found is None:
            groups.append([i])
        else:
            found.append(i)
    return [tuple(some) for some in groups]


def _are_equal(one: Server, other: Server) -> bool:
    a, b = tree.flatten(one.shared), tree.flatten(other.shared)
    facts = [(server.round, server.losses, server.skipped) for server in (one, other)]
    return facts[0] == facts[1] and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def train_round(visit: Visit, engine: Engine) -> list[list[Progress] | Failed]:
    """One round of every run: what each of its methods reached. A run that fails does not affect the others."""
    settings, runs = visit.settings, visit.runs
    sampled = [_sample(run, settings, visit.round) for run in runs]
    rows = [Row(r, k) for r, clients in enumerate(sampled) for k in clients]
    try:
        with code_of_a_method():
            visited = _attack(visit, rows, engine.visit(visit, rows))
    except Failed as error:
        if len(runs) == 1:
            return [error]
        return [result for r in range(len(runs)) for result in train_round(visit.pick(r), engine)]
    faults, losses = list_faults(visited), visited.losses.tolist()  # the host waits here, once a round
    results: list[list[Progress] | Failed] = []
    first = 0
    for r, clients in enumerate(sampled):
        part = range(first, first + len(clients))
        first = part.stop
        good = [row for row in part if faults[row] is None]
        bad = [Diverged(visit.round, rows[row].client, str(faults[row])) for row in part if faults[row] is not None]
        # a fault may be that of one method: the others must not lose a client over it
        if bad and (settings.tolerate == "stop" or not good or len(visit.methods) > 1):
            results.append(bad[0])
            continue
        mean, skipped = sum(losses[row] for row in good) / len(good), (f"{each}; left out" for each in bad)
        try:
            server = visit.servers[r]
            news = replace(server, losses=(*server.losses, mean), skipped=(*server.skipped, *skipped))
            results.append(_finish_round(visit, r, news, [rows[row].client for row in good], visited, good))
        except Failed as error:
            results.append(error)
    return results


def _attack(visit: Visit, rows: Sequence[Row], visited: Visited) -> Visited:
    """What the server sees: attackers change what they upload, and what goes beside it."""
    attack, rounds = visit.settings.attack, visit.methods[0].rounds
    attackers = [attack.choose(run.trained, run.seed) for run in visit.runs]
    wrong = [i for i, row in enumerate(rows) if row.client in attackers[row.run] and i not in visited.faults]
    if not wrong:
        return visited
    starts = [find_start(rounds, server.shared) for server in visit.servers]
    uploads = _change_rows(visited.uploads, wrong, [starts[rows[i].run] for i in wrong], attack.factor)
    averages = []
    for m, sent in enumerate(visited.averages):
        before = [visit.reached[rows[i].run][m].averages for i in wrong]
        averages.append(_change_rows(sent, wrong, before, attack.factor))
    return replace(visited, uploads=uploads, averages=tuple(averages))


def _change_rows(stacked: Tree, rows: Sequence[int], starts: Sequence[Tree], factor: float) -> Tree:
    changed = tree.map_leaves(torch.clone, stacked)
    for i, start in zip(rows, starts, strict=True):
        tree.map_leaves(
            lambda leaf, new, i=i: leaf[i].copy_(new), changed, scale_update(factor, start, tree.take(stacked, i))
        )
    return changed


def _sample(run: Run, settings: Training, number: int) -> list[int]:
    """Who takes part in a round, in order."""
    some = sample_clients(len(run.trained), settings.participation, run.seed, number)
    return [run.trained[i] for i in some]


def list_faults(visited: Visited) -> list[str | None]:
    """For every row, why its results cannot be used; None for the others."""
    leaves = [(f"the upload's {name}", leaf) for name, leaf in tree.flatten(visited.uploads).items()]
    leaves += [(f"the state's {name}", leaf) for kept in visited.kept for name, leaf in kept.items()]
    faults = find_faults(leaves, visited.losses)
    return [visited.faults.get(row, fault) for row, fault in enumerate(faults)]


def find_faults(leaves: Sequence[tuple[str, Tensor]], losses: Tensor) -> list[str | None]:
    """For every row of these leaves and losses [rows], which of them is not finite, if any."""
    found = find_infinite(leaves, len(losses))
    numbers = losses.tolist()
    return [fault if math.isfinite(loss) else f"the loss is {loss}" for fault, loss in zip(found, numbers, strict=True)]


def _finish_round(
    visit: Visit, r: int, server: Server, clients: Sequence[int], visited: Visited, rows: Sequence[int]
) -> list[Progress]:
    """What is shared after a round of these clients of run r, and what the clients keep."""
    run = visit.runs[r]
    weights = torch.tensor([float(run.sizes[k]) for k in clients], device=visited.losses.device)

    def pick(leaf: Tensor) -> Tensor:
        return leaf[_index(rows, leaf)]

    sent = Sent(tree.map_leaves(pick, visited.uploads), [tree.map_leaves(pick, each) for each in visited.averages])
    before = [each.averages for each in visit.reached[r]]
    shared, means = aggregate(visit.methods[0].rounds, visit.settings.defense, server, before, sent, weights)
    after = replace(server, round=server.round + 1, shared=shared)
    progress = []
    for reached, kept, averages in zip(visit.reached[r], visited.kept, means, strict=True):
        try:
            mine = reached.clients.put(clients, {name: pick(leaf) for name, leaf in kept.items()}, server.round)
        except InputError as error:  # states that do not fit together; a disk that is full is another matter
            raise Broken(error) from error
        progress.append(Progress(after, averages, mine))
    return progress


def _index(rows: Sequence[int], leaf: Tensor) -> slice | Tensor:
    """A slice where it will do, which copies nothing."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=leaf.device)


def deploy_some(
    method: Method,
    run: Run,
    settings: Training,
    progress: Progress,
    engine: Engine,
    clients: Sequence[int],
    concluded: Tree | None = None,
) -> Tree:
    """Some clients, sampled lately or not, personalize the last shared model once more: states [clients, ...].

    concluded: what `conclude` returned; None: it is called here.
    """
    with code_of_a_method():
        made, losses = engine.deploy(Visit((method,), settings, [run], [[progress]]), clients)
    leaves = [(f"the state's {name}", leaf) for name, leaf in tree.flatten(made).items()]
    for k, fault in zip(clients, find_faults(leaves, losses), strict=True):
        if fault is not None:
            raise Diverged(progress.round, k, fault)
    states = tree.map_leaves(lambda leaf: leaf.expand(len(clients), *leaf.shape), progress.server.shared) | made
    return _deploy_concluded(method, run, progress, states, concluded)


def _deploy_concluded(method: Method, run: Run, progress: Progress, states: Tree, concluded: Tree | None) -> Tree:
    return deploy_beside(method, states, conclude(method, run, progress) if concluded is None else concluded)


def can_join(method: Method) -> bool:
    """Whether a client that took part in no round has a model of its own: not if it keeps leaves of the network that
    only rounds train, such as FedPer's head."""
    params = method.net.zeros()
    with code_of_a_method():
        shared = method.rounds.share(method.net, params)
    kept = tree.flatten(params).keys() - tree.flatten(shared).keys()
    return not kept or type(method.personal).personalize is not Personal.personalize


def deploy_unlabeled(
    method: Method, run: Run, progress: Progress, clients: Sequence[int], concluded: Tree | None = None
) -> Tree | None:
    """What clients that have no labels deploy: states [clients, ...]; None for a method that cannot do so."""
    if method.predictor.needs_labels or not can_join(method):
        return None
    made = []
    for k in clients:
        received, shard = Received(progress.averages, progress.clients[k]), run.shards[k]
        rows = hide_labels(shard)._replace(real=shard.real)
        with code_of_a_method():
            own = join_unlabeled(method, progress.server.shared, received, rows)
        if own is None:
            return None
        made.append(own)
    return _deploy_concluded(method, run, progress, tree.stack(made), concluded)


def train(
    method: Method,
    shards: Sequence[Shard],
    settings: Training,
    seed: int,
    progress: Progress | None = None,
    engine: Engine | None = None,
) -> Progress:
    """One run: all rounds, or those left after `progress`."""
    engine = engine or Loop()
    progress = progress or start(method, len(shards), seed, engine.device)
    ((result,),) = train_together([method], [Run(seed, shards)], settings, [[progress]], engine)
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
