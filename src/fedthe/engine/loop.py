"""The loop engine: one client after another, one stream after another. The way of the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import tree
from ..methods.base import Method
from ..tree import Tree
from ..types import Shard
from .clients import split
from .evaluate import answer_one
from .fit import Fit
from .visit import Answered, Question, Row, Training, Visit, Visited


@dataclass(frozen=True)
class Loop:
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    together: int = 1

    def visit(self, visit: Visit, rows: Sequence[Row]) -> Visited:
        method, settings, number = visit.method, visit.settings, visit.round
        owns: dict[str, Tensor] = {}
        uploads: dict[str, Tensor] = {}
        names: tuple[str, ...] = ()
        links: list[dict[str, str]] = []
        health = []
        for i, row in enumerate(rows):
            run, reached = visit.runs[row.run], visit.reached[row.run]
            shard = run.shards[row.client]
            fit = make_fit(settings, run.seed, "personal", number, row.client)
            mine = method.personalize(fit, reached.shared, reached.mine[row.client], shard)
            own, linked = split(mine, reached.shared)
            links.append(linked)
            names = tuple(tree.flatten(mine))
            _store(owns, i, len(rows), own)
            health.append(_check(fit, own))
            if visit.trains:
                fit = make_fit(settings, run.seed, "local", number, row.client)
                upload = tree.flatten(method.local(fit, reached.shared, mine, shard))
                _store(uploads, i, len(rows), upload)
                last = _check(fit, upload)
                health[-1] = last if math.isfinite(health[-1]) else health[-1]
        for i, row in enumerate(rows):  # what is own in one row is own in all
            received = tree.flatten(visit.reached[row.run].shared)
            _store(owns, i, len(rows), {name: received[source] for name, source in links[i].items() if name in owns})
        linked = {name: source for name, source in links[-1].items() if name not in owns}
        return Visited(names, owns, linked, tree.unflatten(uploads), torch.tensor(health))

    def answer(
        self, method: Method, deployed: Tree, shards: Sequence[Shard], questions: Sequence[Question]
    ) -> list[Answered]:
        return [answer_one(method, tree.take(deployed, asked.row), shards[asked.row], asked) for asked in questions]


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


def _check(fit: Fit, trained: dict[str, Tensor]) -> float:
    """The last loss, or one that is not finite if any loss or parameter is not."""
    for loss in fit.log:
        if not math.isfinite(loss):
            return loss
    if not all(bool(leaf.isfinite().all()) for leaf in trained.values()):
        return math.nan  # the last step did it, after the last loss
    return fit.log[-1] if fit.log else 0.0
