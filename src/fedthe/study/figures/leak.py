"""The gain from redrawing splits in every round, as the code of FedTHE's authors does.

It shuffles a client's rows before every round and splits them into 60 % for training, 20 % for validation and 20 % for
testing. So a client trains on all its rows, and is tested on rows that it trained on in most rounds. Here splits are
frozen; this figure measures the difference on the same clients, with everything else equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ... import rng
from ...config import Config
from ...data.partition import Split
from ...data.plan import lay_out
from ...data.pool import Dataset
from ...engine.shards import Shards
from ...engine.train import deploy_some, start, train_round
from ...engine.visit import Progress, Run, Visit
from ...errors import Failed
from ...experiment.training import Deployed, deploy_all, group_by_training
from ...methods.base import Method
from ...progress.events import WorkEvent, tell
from .. import draw
from .base import PAPER, Figure, Found, average, rate


def measure(config: Config, dataset: Dataset) -> dict[str, Any]:
    """Accuracy in percent with frozen and with reshuffled splits, by method, and the difference."""
    frozen = list(deploy_all(config, dataset))
    rates: dict[str, list[list[Found]]] = {method: [[], []] for method in config.methods}
    for which, some in enumerate((frozen, deploy_reshuffled(frozen, config))):
        for each in sorted(some, key=lambda each: each.seed):
            rates[each.name][which] += rate(each, config.samples)
    return {
        "frozen": {method: average(before) for method, (before, _) in rates.items()},
        "reshuffled": {method: average(after) for method, (_, after) in rates.items()},
        "gains": {method: average(_subtract(before, after)) for method, (before, after) in rates.items()},
    }


def _subtract(before: Sequence[Found], after: Sequence[Found]) -> list[Found]:
    """The difference on every stream: both lists have the same clients in the same order."""
    return [(test, seed, new - old) for (test, seed, old), (_, _, new) in zip(before, after, strict=True)]


def deploy_reshuffled(frozen: Sequence[Deployed], config: Config) -> list[Deployed]:
    """The same methods on the same clients, trained with reshuffled splits and tested on those of the last round."""
    leaked = []
    for trained, served in group_by_training({each.name: each.method for each in frozen}).items():
        firsts = [each for each in frozen if each.name == next(iter(served))]  # one of each seed
        reached = _train_reshuffled(firsts, trained, config)
        for first, (run, splits, progress) in zip(firsts, reached, strict=True):
            federation = lay_out(first.federation.dataset, first.federation.settings, splits)
            for name, method in served.items():
                states = deploy_some(method, run, config.training, progress, first.engine, range(config.client_count))
                leaked.append(replace(first, name=name, method=method, federation=federation, run=run, states=states))
    return leaked


def _train_reshuffled(
    seeds: Sequence[Deployed], method: Method, config: Config
) -> list[tuple[Run, list[Split], Progress]]:
    """Train with splits redrawn before every round: the run and the splits of the last round, and the progress."""
    engine = seeds[0].engine
    runs, splits = [each.run for each in seeds], [list(each.federation.clients) for each in seeds]
    reached = [start(method, config.client_count, each.seed, engine.device) for each in seeds]
    for number in range(config.rounds):
        splits = [reshuffle(each.federation.clients, each.seed, number) for each in seeds]
        runs = [Run(each.seed, _resplit(each.run, some)) for each, some in zip(seeds, splits, strict=True)]
        visit = Visit((method,), config.training, runs, [[progress] for progress in reached])
        for r, after in enumerate(train_round(visit, engine)):
            if isinstance(after, Failed):
                raise after
            (reached[r],) = after
        what = f"training {seeds[0].name} on reshuffled splits"
        tell(WorkEvent(what, done=number + 1, total=config.rounds))
    return list(zip(runs, splits, reached, strict=True))


def reshuffle(splits: Sequence[Split], seed: int, number: int) -> list[Split]:
    """Shuffle every client's rows and cut them in the same places."""
    return [_cut(split, rng.key(seed, "reshuffle", number, k)) for k, split in enumerate(splits)]


def _cut(split: Split, key: rng.Key) -> Split:
    rows = np.sort(split.rows)
    rows = rows[rng.choose(key, len(rows), len(rows))]
    train, val, test = np.split(rows, np.cumsum([len(split.train), len(split.val)]))
    return Split(train, val, test)


def _resplit(run: Run, splits: Sequence[Split]) -> Shards:
    assert isinstance(run.shards, Shards)
    return run.shards.resplit(splits)


FIGURE = Figure(
    "Splits drawn anew in every round",
    PAPER | {"methods": ["fedavg", "fedavg_ft", "fedthe"]},
    measure,
    draw.draw_gains,
    fixed=False,
)
