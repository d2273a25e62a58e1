"""The loop engine: one client after another, one stream after another, a few at a time on several cores.

The engine of the CPU. Every client computes with a single thread, so numbers do not depend on how many run at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..errors import InputError
from ..methods.base import Method
from ..parallel import map_in_threads
from ..tree import Tree
from ..types import Shard
from .client import Fits, Received, Worked, deploy, work
from .evaluate import answer_one
from .fit import LoopFit
from .server import Diverged, find_fault
from .visit import Answered, Question, Row, Visit, Visited, find_structural_fault


@dataclass(frozen=True)
class Loop:
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    together: int = 1
    threads: int | None = None  # clients at a time; as many as torch would use

    @property
    def _workers(self) -> int:
        return 1 if self.device.type != "cpu" else self.threads or torch.get_num_threads()

    def release(self) -> None:
        """It keeps nothing."""

    def visit(self, visit: Visit, rows: Sequence[Row]) -> Visited:
        stacks: dict[str, Tensor] = {}
        faults: dict[int, str] = {}
        losses, versions = [], _list_versions(visit)
        for i, done in enumerate(map_in_threads(lambda row: _visit_one(visit, row), rows, self._workers)):
            losses.append(float(done.worked.loss))
            if done.fault is not None:
                faults[i] = done.fault
            else:
                _store(stacks, i, len(rows), _name_leaves(done.worked))
        _refuse_changes(visit, versions)
        stacked = tree.unflatten(stacks)
        methods = [str(m) for m in range(len(visit.methods))]
        kept = tuple(tree.flatten(stacked.get("kept", {}).get(m, {})) for m in methods)
        averages = tuple(stacked.get("averages", {}).get(m, {}) for m in methods)
        return Visited(stacked.get("upload", {}), kept, averages, torch.tensor(losses), faults)

    def deploy(self, visit: Visit, clients: Sequence[int]) -> tuple[Tree, Tensor]:
        (method,), (server,), stacks, losses = visit.methods, visit.servers, dict[str, Tensor](), []

        def work(k: int) -> tuple[Tree, Tensor]:
            fits, (received,), shard = _prepare(visit, Row(0, k))
            return deploy(method, fits.personal, server.shared, received, shard)

        versions = _list_versions(visit)
        for i, (made, loss) in enumerate(map_in_threads(work, clients, self._workers)):
            flat = tree.flatten(made)
            fault = find_fault({name: stack[0] for name, stack in stacks.items()} or flat, flat)
            if fault is not None:
                raise Diverged(server.round, clients[i], f"its state's {fault}, unlike other clients'")
            losses.append(float(loss))
            _store(stacks, i, len(clients), flat)
        _refuse_changes(visit, versions)
        return tree.unflatten(stacks), torch.tensor(losses)

    def answer(
        self, method: Method, deployed: Tree, shards: Sequence[Shard], questions: Sequence[Question]
    ) -> list[Answered]:
        def answer(asked: Question) -> Answered:
            return answer_one(method, tree.take(deployed, asked.row), shards[asked.row], asked)

        return list(map_in_threads(answer, questions, self._workers))


class _Done(NamedTuple):
    worked: Worked
    fault: str | None  # why it cannot be used


def _visit_one(visit: Visit, row: Row) -> _Done:
    fits, received, shard = _prepare(visit, row)
    shared = visit.servers[row.run].shared
    worked = work(visit.methods, fits, shared, received, shard)
    kept = [tree.flatten(each) for each in worked.kept]
    return _Done(worked, find_structural_fault(visit.reached[row.run], worked.upload, kept))


def _prepare(visit: Visit, row: Row) -> tuple[Fits, list[Received], Shard]:
    """What one client works with."""
    run = visit.runs[row.run]
    shard = run.shards[row.client]
    # copies, for a method may write to them; other clients still need the stored ones
    kept = [tree.map_leaves(torch.clone, each.clients[row.client]) for each in visit.reached[row.run]]
    received = [Received(each.averages, mine) for each, mine in zip(visit.reached[row.run], kept, strict=True)]
    return make_fits(visit, run.seed, row.client, shard), received, shard


def make_fits(visit: Visit, seed: int, client: int, shard: Shard) -> Fits:
    s, net = visit.settings, visit.methods[0].net

    def fit(phase: str) -> LoopFit:
        path = (seed, phase, visit.round)
        return LoopFit(net, shard, s.optimizer, s.epochs(phase), s.batch, s.flip, s.crop, path, client)

    return Fits(fit("personal"), fit("local"))


def _name_leaves(worked: Worked) -> dict[str, Tensor]:
    parts: Tree = {"upload": worked.upload}
    for name, trees in (("kept", worked.kept), ("averages", worked.averages)):
        parts[name] = {str(m): each for m, each in enumerate(trees)}
    return tree.flatten(parts)


def _store(stacks: dict[str, Tensor], i: int, rows: int, leaves: dict[str, Tensor]) -> None:
    """Row i of the stacks. A list that is stacked in the end would take twice the memory."""
    for name, leaf in leaves.items():
        if name not in stacks:
            stacks[name] = leaf.new_empty((rows, *leaf.shape))
        stacks[name][i] = leaf.detach()


def _list_versions(visit: Visit) -> list[dict[str, int]]:
    """How often each leaf that all clients receive was changed in place."""
    trees = [each.server.shared | each.averages for of_run in visit.reached for each in of_run]
    return [{name: leaf._version for name, leaf in tree.flatten(received).items()} for received in trees]


def _refuse_changes(visit: Visit, before: list[dict[str, int]]) -> None:
    """All clients receive the same tensors: an in-place change would reach them all."""
    for then, now in zip(before, _list_versions(visit), strict=True):
        for name in then:
            if now[name] != then[name]:
                who = " or ".join(type(part).__name__ for part in (visit.methods[0].rounds, visit.methods[0].personal))
                raise InputError(f"{who} changes {name} of the shared model in place; return new tensors.")
