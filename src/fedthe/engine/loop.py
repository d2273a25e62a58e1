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
        states, uploads, health = [], [], []
        names: tuple[str, ...] = ()
        links: dict[str, str] = {}
        for row in rows:
            run, reached = visit.runs[row.run], visit.reached[row.run]
            shard = run.shards[row.client]
            fit = make_fit(settings, run.seed, "personal", number, row.client)
            mine = method.personalize(fit, reached.shared, reached.mine[row.client], shard)
            own, links = split(mine, reached.shared)
            states.append(own)
            names = tuple(tree.flatten(mine))
            health.append(_check(fit, own))
            if visit.trains:
                fit = make_fit(settings, run.seed, "local", number, row.client)
                upload = method.local(fit, reached.shared, mine, shard)
                uploads.append(upload)
                last = _check(fit, tree.flatten(upload))
                health[-1] = last if math.isfinite(health[-1]) else health[-1]
        stacked = {name: torch.stack([own[name] for own in states]) for name in states[0]}
        return Visited(names, stacked, links, tree.stack(uploads) if uploads else {}, torch.tensor(health))

    def answer(
        self, method: Method, deployed: Tree, shards: Sequence[Shard], questions: Sequence[Question]
    ) -> list[Answered]:
        return [answer_one(method, tree.take(deployed, asked.row), shards[asked.row], asked) for asked in questions]


def make_fit(settings: Training, seed: int, phase: str, number: int, client: int) -> Fit:
    path = (seed, phase, number)
    epochs = settings.epochs(phase)
    return Fit(settings.optimizer, epochs, settings.batch, settings.flip, settings.crop, path, client)


def _check(fit: Fit, trained: dict[str, Tensor]) -> float:
    """The last loss, or one that is not finite if any loss or parameter is not."""
    for loss in fit.log:
        if not math.isfinite(loss):
            return loss
    if not all(bool(leaf.isfinite().all()) for leaf in trained.values()):
        return math.nan  # the last step did it, after the last loss
    return fit.log[-1] if fit.log else 0.0
