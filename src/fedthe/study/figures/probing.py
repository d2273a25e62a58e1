"""How to personalize a pre-trained extractor: linear probing, fine-tuning, or one after the other.

The paper's motivation, https://arxiv.org/abs/2205.10920, section 3: fine-tuning is better on a client's own data and
worse on shifted data, where the original features were better. The extractor is pre-trained centrally on half of the
classes; clients hold the other half, which it has never seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from ... import tree
from ...config import Config
from ...data.plan import build
from ...data.pool import Dataset, Pool
from ...engine.fit import LoopFit
from ...engine.shards import Shards
from ...engine.train import deploy_some, start_from
from ...engine.visit import Engine, Run, Training
from ...errors import InputError
from ...experiment.training import Deployed
from ...experiment.work import get_engine, pick_tests
from ...methods.base import FedAvg, Method
from ...methods.probing import Probe
from ...nets import NETS
from ...nets.net import Net
from ...progress.events import track
from ...text import quote
from ...tree import Tree
from ...types import Shard
from .. import draw
from .base import PAPER, Figure, Found, average, rate

MODES: tuple[Literal["lp", "ft", "lpft"], ...] = ("lp", "ft", "lpft")
PRETRAIN_EPOCHS = 20


def measure(config: Config, dataset: Dataset) -> dict[str, Any]:
    """Accuracy in percent by mode: the extractor saw the first half of the classes, clients hold the others."""
    names = dataset.pool.classes
    if (config.width, config.head_layers, config.standardize) != (1, 1, False):
        raise InputError("probing does not change networks; leave out width, head_layers and standardize.")
    if len(names) < 4:
        raise InputError(f"probing needs at least four classes, but {dataset.pool.name} has {len(names)}.")
    engine = get_engine(config.engine, config.device, config.precision)
    found: dict[str, list[Found]] = {mode: [] for mode in MODES}
    for seed in config.seeds:
        for deployed in deploy_probes(dataset, config, seed, engine):
            found[deployed.name] += rate(deployed, config.samples)
    return {"seen": names[: len(names) // 2], "accuracy": {mode: average(each) for mode, each in found.items()}}


def deploy_probes(dataset: Dataset, config: Config, seed: int, engine: Engine) -> Iterator[Deployed]:
    """Pre-train on the first half of the classes, and personalize the result in every mode on the others."""
    classes, training = range(len(dataset.pool.classes)), config.training
    seen, rest = classes[: len(classes) // 2], classes[len(classes) // 2 :]
    body = pretrain(keep_classes(dataset.pool, seen), config.net, training, seed, engine.device)
    others = {name: keep_classes(shift, rest) for name, shift in dataset.natural.items()}
    federation = build(Dataset(keep_classes(dataset.pool, rest), others), config.settings(seed))
    run, tests = Run(seed, Shards(federation, engine.device)), pick_tests(config, federation.tests)
    model = _make_net(federation.pool, config.net)
    begun = model.init(seed) | {"body": body}
    for mode in track("probing", MODES):
        method = Method(model, personal=Probe(mode))
        progress = start_from(method, begun, config.client_count, engine.device)
        states = deploy_some(method, run, training, progress, engine, range(config.client_count))
        yield Deployed(mode, method, federation, run, states, engine, tests)


def keep_classes(pool: Pool, classes: Sequence[int]) -> Pool:
    """The rows of some classes, relabelled in their order."""
    kept = np.flatnonzero(np.isin(pool.labels, classes))
    if not len(kept):
        raise InputError(f"{pool.name} has no image of the classes {quote(list(classes))}.")
    place = {c: i for i, c in enumerate(classes)}
    labels = np.array([place[c] for c in pool.labels[kept].tolist()])
    return replace(pool, x=pool.x[kept], labels=labels, classes=tuple(pool.classes[c] for c in classes))


def pretrain(pool: Pool, net: str, training: Training, seed: int, device: torch.device) -> Tree:
    """The body of a network trained centrally on a pool."""
    model = _make_net(pool, net)
    images, labels = torch.from_numpy(pool.x).to(device), torch.from_numpy(pool.labels).to(device)
    counts, real = torch.bincount(labels).float(), torch.ones(len(labels), dtype=torch.bool, device=device)
    shard = Shard(images, labels, real, counts, images[:0], labels[:0], real[:0])
    batch, flip, crop, path = training.batch, training.flip, training.crop, (seed, "pretrain")
    fit = LoopFit(model, shard, training.optimizer, PRETRAIN_EPOCHS, batch, flip, crop, path, 0)
    start = tree.map_leaves(lambda leaf: leaf.to(device), model.init(seed))
    return dict(fit(FedAvg().loss, start).params["body"])


def _make_net(pool: Pool, net: str) -> Net:
    _, size, _, channels = pool.x.shape
    return NETS[net](len(pool.classes), channels, size)


FIGURE = Figure(
    "Linear probing and fine-tuning",
    # ten epochs, since one is not enough for a head that starts from scratch
    PAPER | {"methods": ["probe_lp", "probe_ft", "probe_lpft"], "dirichlet": 1.0, "personal_epochs": 10},
    measure,
    draw.draw_probing,
)
