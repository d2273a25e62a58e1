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
from ..methods.base import Method
from ..nets.net import Net
from ..parallel import map_in_threads
from ..tree import Tree
from ..types import Shard
from .client import Fits, Received, Worked, deploy, work
from .evaluate import answer_one, begin_one
from .fit import LoopFit
from .server import Diverged
from .visit import Answered, Question, Row, Training, Visit, Visited, find_structural_fault, unchanged


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
        losses, lent = [], _lend(visit)

        def visit_one(row: Row) -> _Done:
            fits, received, shard = _prepare(visit, row, lent[row.run])
            with unchanged(visit, lent[row.run].leaves, shard):
                worked = work(visit.methods, fits, lent[row.run].shared, received, shard)
            kept = [tree.flatten(each) for each in worked.kept]
            return _Done(worked, find_structural_fault(visit, row.run, worked.upload, kept))

        for i, done in enumerate(map_in_threads(visit_one, rows, self._workers)):
            losses.append(float(done.worked.loss))
            if done.fault is not None:
                faults[i] = done.fault
            else:
                _store(stacks, i, len(rows), _name_leaves(done.worked))
        stacked = tree.unflatten(stacks)
        methods = [str(m) for m in range(len(visit.methods))]
        kept = tuple(tree.flatten(stacked.get("kept", {}).get(m, {})) for m in methods)
        averages = tuple(stacked.get("averages", {}).get(m, {}) for m in methods)
        return Visited(stacked.get("upload", {}), kept, averages, torch.tensor(losses), faults)

    def deploy(self, visit: Visit, clients: Sequence[int]) -> tuple[Tree, Tensor]:
        (method,), (lent,), stacks, losses = visit.methods, _lend(visit), dict[str, Tensor](), []

        def deploy_one(k: int) -> tuple[Tree, Tensor]:
            fits, (received,), shard = _prepare(visit, Row(0, k), lent)
            with unchanged(visit, lent.leaves, shard):
                return deploy(method, fits.personal, lent.shared, received, shard)

        for i, (made, loss) in enumerate(map_in_threads(deploy_one, clients, self._workers)):
            flat = tree.flatten(made)
            fault = tree.find_fault({name: stack[0] for name, stack in stacks.items()} if i else flat, flat)
            if fault is not None:
                raise Diverged(visit.round, clients[i], f"its state's {fault}, unlike other clients'")
            losses.append(float(loss))
            _store(stacks, i, len(clients), flat)
        return tree.unflatten(stacks), torch.tensor(losses)

    def answer(
        self, method: Method, deployed: Tree, shards: Sequence[Shard], questions: Sequence[Question]
    ) -> list[Answered]:
        def begin(row: int) -> Tree:
            return begin_one(method, tree.take(deployed, row), shards[row])

        def answer(asked: Question) -> Answered:
            return answer_one(method, tree.take(deployed, asked.row), begun[asked.row], asked)

        rows = sorted({asked.row for asked in questions})
        begun = dict(zip(rows, map_in_threads(begin, rows, self._workers), strict=True))
        return list(map_in_threads(answer, questions, self._workers))


class _Done(NamedTuple):
    worked: Worked
    fault: str | None  # why it cannot be used


class _Lent(NamedTuple):
    """Copies of what all clients of a run receive: the server's own stay as they are, whatever a method does."""

    shared: Tree
    averages: tuple[Tree, ...]  # by method

    @property
    def leaves(self) -> tuple[Tree, ...]:
        return self.shared, *self.averages


def _lend(visit: Visit) -> list[_Lent]:
    def copy(leaves: Tree) -> Tree:
        return tree.map_leaves(torch.clone, leaves)

    return [_Lent(copy(some[0].server.shared), tuple(copy(each.averages) for each in some)) for some in visit.reached]


def _prepare(visit: Visit, row: Row, lent: _Lent) -> tuple[Fits, list[Received], Shard]:
    """What one client works with; what it keeps is a copy, too."""
    run = visit.runs[row.run]
    shard = run.shards[row.client]
    mine = [tree.map_leaves(torch.clone, each.clients[row.client]) for each in visit.reached[row.run]]
    received = [Received(*pair) for pair in zip(lent.averages, mine, strict=True)]
    net, total = visit.methods[0].net, len(run.shards)
    return make_fits(net, visit.settings, run.seed, visit.round, row.client, total, shard), received, shard


def make_fits(net: Net, settings: Training, seed: int, number: int, client: int, clients: int, shard: Shard) -> Fits:
    """Of one of so many clients, in a round."""
    s = settings

    def fit(phase: str) -> LoopFit:
        path = (seed, phase, number)
        return LoopFit(net, shard, s.optimizer, s.epochs(phase), s.batch, s.flip, s.crop, path, client, clients)

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
