"""The round loop: sampled clients personalize, train and upload; the server aggregates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .. import rng, tree
from ..data.plan import Federation
from ..errors import InputError
from ..methods.base import Method
from ..tree import Tree
from ..types import Shard
from .fit import Fit, Optimizer


@dataclass(frozen=True)
class Training:
    """Everything federated training depends on, besides the method, the data and the seed."""

    rounds: int = 100
    participation: float = 1.0
    local_epochs: int = 5
    personal_epochs: int = 1
    batch: int = 32
    flip: bool = True
    crop: int = 4
    optimizer: Optimizer = Optimizer()

    def __post_init__(self) -> None:
        if self.rounds < 0 or self.local_epochs < 0 or self.personal_epochs < 0 or self.batch < 1 or self.crop < 0:
            raise InputError("rounds, epochs and crop must not be negative, and batch must be at least 1.")
        if not 0 < self.participation <= 1:
            raise InputError(f"participation must be above 0 and at most 1, not {self.participation}.")


@dataclass(frozen=True)
class Progress:
    """Training after some rounds: all that is needed to go on, or to deploy."""

    round: int
    shared: Tree
    mine: tuple[Tree, ...]  # one per client
    losses: tuple[float, ...] = field(default=())  # the mean local loss of each round


class Failed(Exception):
    """An experiment that cannot go on; the others can."""


class Diverged(Failed):
    """A loss or a parameter that is not finite. Training cannot go on from it."""

    def __init__(self, round: int, client: int, loss: float) -> None:
        super().__init__(f"the loss of client {client} in round {round} is {loss}")
        self.round, self.client, self.loss = round, client, loss


def make_shards(federation: Federation) -> list[Shard]:
    """Every client's labelled rows, as tensors."""
    images, labels = torch.from_numpy(federation.pool.images), torch.from_numpy(federation.pool.labels)

    def rows_of(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return images[rows], labels[rows], torch.ones(len(rows), dtype=torch.bool)

    shards = []
    for split in federation.clients:
        x, y, real = rows_of(torch.from_numpy(split.train))
        counts = torch.bincount(y, minlength=len(federation.pool.classes)).float()
        shards.append(Shard(x, y, real, counts, *rows_of(torch.from_numpy(split.val))))
    return shards


def start(method: Method, clients: int, seed: int) -> Progress:
    shared, mine = method.init(method.net.init(seed))
    return Progress(0, shared, (mine,) * clients)


def train_round(method: Method, shards: list[Shard], settings: Training, seed: int, progress: Progress) -> Progress:
    """One round further."""
    number, shared, mine = progress.round, progress.shared, list(progress.mine)
    chosen = sample_clients(len(shards), settings.participation, seed, number)
    uploads, losses = [], []
    for k in chosen:
        mine[k] = personalize(method, shards[k], settings, seed, number, k, shared, mine[k])
        fit = make_fit(settings, seed, "local", number, k)
        upload = method.local(fit, shared, mine[k], shards[k])
        losses.append(_check(fit, upload, number, k))
        uploads.append(upload)
    weights = torch.tensor([float(shards[k].real.sum()) for k in chosen])
    shared = method.aggregate(shared, tree.stack(uploads), weights)
    mean = sum(losses) / len(losses)
    return Progress(number + 1, shared, tuple(mine), (*progress.losses, mean))


def personalize(
    method: Method, shard: Shard, settings: Training, seed: int, number: int, client: int, shared: Tree, mine: Tree
) -> Tree:
    fit = make_fit(settings, seed, "personal", number, client)
    mine = method.personalize(fit, shared, mine, shard)
    _check(fit, mine, number, client)
    return mine


def deploy(method: Method, shards: list[Shard], settings: Training, seed: int, progress: Progress) -> list[Tree]:
    """Every client, sampled lately or not, receives the last shared state and personalizes it once more."""
    return [
        personalize(method, shard, settings, seed, progress.round, k, progress.shared, mine)
        for k, (shard, mine) in enumerate(zip(shards, progress.mine, strict=True))
    ]


def train(
    method: Method,
    shards: list[Shard],
    settings: Training,
    seed: int,
    progress: Progress | None = None,
    after_round: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """All rounds, or those left after `progress`."""
    progress = progress or start(method, len(shards), seed)
    while progress.round < settings.rounds:
        progress = train_round(method, shards, settings, seed, progress)
        after_round(progress)
    return progress


def sample_clients(clients: int, participation: float, seed: int, number: int) -> list[int]:
    count = max(1, round(participation * clients))
    return sorted(rng.choose(rng.key(seed, "participation", number), clients, count).tolist())


def make_fit(settings: Training, seed: int, phase: str, number: int, client: int) -> Fit:
    epochs = settings.local_epochs if phase == "local" else settings.personal_epochs
    path = (seed, phase, number)
    return Fit(settings.optimizer, epochs, settings.batch, settings.flip, settings.crop, path, client)


def _check(fit: Fit, trained: Tree, number: int, client: int) -> float:
    """The last loss, if all losses and all that was trained are finite."""
    for loss in fit.log:
        if not math.isfinite(loss):
            raise Diverged(number, client, loss)
    if not all(bool(leaf.isfinite().all()) for leaf in tree.flatten(trained).values()):
        raise Diverged(number, client, math.nan)  # the last step did it, after the last loss
    return fit.log[-1] if fit.log else 0.0
