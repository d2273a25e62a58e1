"""The loop engine: one client after another, one stream after another, a few at a time on several cores.

The way of the CPU. Every client computes with a single thread, so numbers do not depend on how many go at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..errors import InputError
from ..methods.base import Method
from ..parallel import map_in_threads
from ..tree import Tree
from ..types import Shard
from .clients import split
from .evaluate import answer_one
from .fit import Fit
from .server import find_fault
from .visit import Answered, Question, Row, Training, Visit, Visited


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
        owns: dict[str, Tensor] = {}
        uploads: dict[str, Tensor] = {}
        links: list[dict[str, str]] = []
        faults: dict[int, str] = {}
        names: tuple[str, ...] = ()
        losses = []
        work, versions = partial(visit_one, visit), _list_versions(visit)
        for i, done in enumerate(map_in_threads(work, rows, self._workers)):
            if i == 0:
                names = done.names
            fault = done.fault or _find_difference(names, owns, done)
            if fault is not None:
                faults[i] = fault
            else:
                _store(owns, i, len(rows), done.own)
                _store(uploads, i, len(rows), done.upload)
            links.append({} if fault else done.links)
            losses.append(done.loss)
        _refuse_changes(visit, versions)
        for i, row in enumerate(rows):  # a leaf that is a client's own in one row is so in all
            received = tree.flatten(visit.reached[row.run].shared)
            _store(owns, i, len(rows), {name: received[source] for name, source in links[i].items() if name in owns})
        linked = {name: source for some in links for name, source in some.items() if name not in owns}
        return Visited(names, owns, linked, tree.unflatten(uploads), torch.tensor(losses), faults)

    def answer(
        self, method: Method, deployed: Tree, shards: Sequence[Shard], questions: Sequence[Question]
    ) -> list[Answered]:
        def answer(asked: Question) -> Answered:
            return answer_one(method, tree.take(deployed, asked.row), shards[asked.row], asked)

        return list(map_in_threads(answer, questions, self._workers))


def _list_versions(visit: Visit) -> list[dict[str, int]]:
    """How often each leaf that clients receive was changed in place."""
    return [{name: leaf._version for name, leaf in tree.flatten(each.shared).items()} for each in visit.reached]


def _refuse_changes(visit: Visit, before: list[dict[str, int]]) -> None:
    """All clients receive the same tensors: who changes them, changes them for everybody."""
    for then, now in zip(before, _list_versions(visit), strict=True):
        for name in then:
            if now[name] != then[name]:
                raise InputError(
                    f"{type(visit.method).__name__} changes {name} of the shared model in place; return new tensors."
                )


class Done(NamedTuple):
    """What one client came to."""

    names: tuple[str, ...]  # of the leaves of its state
    own: dict[str, Tensor]
    links: dict[str, str]
    upload: dict[str, Tensor]
    loss: float  # the last one, or the first that is not finite
    fault: str | None  # why the upload cannot be used


def visit_one(visit: Visit, row: Row) -> Done:
    method, settings, number = visit.method, visit.settings, visit.round
    run, reached = visit.runs[row.run], visit.reached[row.run]
    shard = run.shards[row.client]
    fit = make_fit(settings, run.seed, "personal", number, row.client)
    mine = method.personalize(fit, reached.shared, reached.mine[row.client], shard)
    own, links = split(mine, reached.shared)
    loss, upload, fault = _last_loss(fit), {}, None
    if visit.trains:
        fit = make_fit(settings, run.seed, "local", number, row.client)
        upload = tree.flatten(method.local(fit, reached.shared, mine, shard))
        fault = find_fault(tree.flatten(reached.shared), upload)
        loss = _last_loss(fit) if math.isfinite(loss) else loss
    return Done(tuple(tree.flatten(mine)), own, links, upload, loss, fault and f"the upload's {fault}")


def _find_difference(names: tuple[str, ...], owns: dict[str, Tensor], done: Done) -> str | None:
    """How a client's state differs from those before it in its leaves, their shapes or dtypes."""
    if set(done.names) != set(names):
        name = next(iter(sorted(set(done.names) ^ set(names))))
        return f"its state {'has' if name in done.names else 'lacks'} {name}, unlike that of other clients"
    kinds = {name: stack[0] for name, stack in owns.items() if name in done.own}
    fault = find_fault(kinds, {name: leaf for name, leaf in done.own.items() if name in owns})
    return fault and f"its state's {fault}, as with other clients"


def make_fit(settings: Training, seed: int, phase: str, number: int, client: int) -> Fit:
    path = (seed, phase, number)
    epochs = settings.epochs(phase)
    return Fit(settings.optimizer, epochs, settings.batch, settings.flip, settings.crop, path, client)


def _store(stack: dict[str, Tensor], i: int, rows: int, leaves: dict[str, Tensor]) -> None:
    """Row i of a stack. A list that is stacked in the end would take twice the memory."""
    for name, leaf in leaves.items():
        if name not in stack:
            stack[name] = leaf.new_empty((rows, *leaf.shape))
        stack[name][i] = leaf.detach()


def _last_loss(fit: Fit) -> float:
    """The last loss, or the first one that is not finite."""
    return next((loss for loss in fit.log if not math.isfinite(loss)), fit.log[-1] if fit.log else 0.0)
