"""How to make a pre-trained extractor one's own: linear probing, fine-tuning, or first one and then the other.

The paper's motivation, https://arxiv.org/abs/2205.10920, section 3: fine-tuning wins on a client's own data and loses
on shifted data, where the features it started from were better. The extractor is pre-trained, centrally, on some of the
classes; clients then hold the others, which it has never seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from .. import tree
from ..data.plan import Settings, build
from ..data.pool import Dataset, Pool
from ..engine.clients import Clients
from ..engine.evaluate import score
from ..engine.fit import Fit
from ..engine.loop import Loop
from ..engine.shards import Shards
from ..engine.train import deploy
from ..engine.visit import Engine, Progress, Question, Training
from ..errors import InputError
from ..methods.base import Method
from ..methods.probing import Probe
from ..nets import NETS
from ..progress.events import track
from ..text import quote
from ..tree import Tree
from ..types import Shard

MODES = ("lp", "ft", "lpft")
PRETRAIN_EPOCHS = 20


def compare_probing(
    dataset: Dataset,
    seen: Sequence[int],
    settings: Settings,
    training: Training,
    *,
    net: str = "cnn",
    pretrain_epochs: int = PRETRAIN_EPOCHS,
    samples: int | None = None,
    engine: Engine | None = None,
) -> dict[str, dict[str, float]]:
    """Percent right by way of fine-tuning and test, the mean over clients; `seen` are the classes to pre-train on."""
    classes = len(dataset.pool.classes)
    rest = [c for c in range(classes) if c not in set(seen)]
    if len(seen) < 2 or len(rest) < 2 or not all(0 <= c < classes for c in seen):
        raise InputError(
            f"seen must name at least two of the {classes} classes and leave two, but it is {quote(seen)}."
        )
    _, size, _, channels = dataset.pool.images.shape
    engine = engine or Loop()
    body = pretrain(keep_classes(dataset.pool, seen), net, training, settings.seed, pretrain_epochs, engine.device)
    others = {name: keep_classes(shift, rest) for name, shift in dataset.natural.items()}
    federation = build(Dataset(keep_classes(dataset.pool, rest), others), settings)
    shards = Shards(federation, engine.device)
    model = NETS[net](len(rest), channels, size)
    shared = tree.map_leaves(lambda leaf: leaf.to(engine.device), model.init(settings.seed) | {"body": body})
    progress = Progress(0, shared, Clients.start(shared, settings.clients))
    asked = [
        (test, Question(k, federation.images(some), (test, k)), federation.labels(some))
        for test, streams in federation.tests.items()
        for k, stream in enumerate(streams)
        if stream is not None
        for some in [stream.first(samples)]
    ]
    table: dict[str, dict[str, float]] = {}
    for mode in track("probing", MODES):
        method = Probe(model, mode=mode)  # type: ignore[arg-type]
        mine = deploy(method, shards, training, settings.seed, progress, engine)
        answers = engine.answer(method, tree.stack(mine), shards[:], [question for _, question, _ in asked])
        scores: dict[str, list[float]] = {}
        for (test, question, labels), answered in zip(asked, answers, strict=True):
            scores.setdefault(test, []).append(score(answered, labels, question.path).accuracy)
        table[mode] = {test: 100 * float(np.mean(each)) for test, each in scores.items()}
    return table


def keep_classes(pool: Pool, classes: Sequence[int]) -> Pool:
    """The rows of some classes, counted anew in their order."""
    kept = np.flatnonzero(np.isin(pool.labels, classes))
    if not len(kept):
        raise InputError(f"{pool.name} has no image of the classes {quote(list(classes))}.")
    place = {c: i for i, c in enumerate(classes)}
    labels = np.array([place[c] for c in pool.labels[kept].tolist()])
    return replace(pool, images=pool.images[kept], labels=labels, classes=tuple(pool.classes[c] for c in classes))


def pretrain(
    pool: Pool, net: str, training: Training, seed: int, epochs: int, device: torch.device | str = "cpu"
) -> Tree:
    """The body of a network trained centrally on a pool."""
    _, size, _, channels = pool.images.shape
    model = NETS[net](len(pool.classes), channels, size)
    images, labels = torch.from_numpy(pool.images).to(device), torch.from_numpy(pool.labels).to(device)
    counts, real = torch.bincount(labels).float(), torch.ones(len(labels), dtype=torch.bool, device=device)
    shard = Shard(images, labels, real, counts, images[:0], labels[:0], real[:0])
    fit = Fit(training.optimizer, epochs, training.batch, training.flip, training.crop, (seed, "pretrain"), 0)
    start = tree.map_leaves(lambda leaf: leaf.to(device), model.init(seed))
    trained = fit(Method(model).loss, start, shard)
    return dict(trained["body"])
