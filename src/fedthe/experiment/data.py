"""From settings and data to what both mean together: clients, partition, augmentation, and a network that fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import Config
from ..data import SMALLEST, load_dataset
from ..data.plan import Federation
from ..data.pool import Dataset, Pool
from ..errors import InputError
from ..methods.base import Method
from ..nets.make import find_defaults, make_net
from ..nets.net import Net
from ..text import clean
from ..types import scale


def load(config: Config) -> Dataset:
    options = {name: getattr(config, name) for name in ("natural", "size", "square", "by_client")}
    return load_dataset(config.dataset, **options)


def settings_of(federation: Federation) -> dict[str, Any]:
    """The settings of a run on a federation that is there already, on its seed and others."""
    settings = federation.settings
    unused = {name: None for name in ("dirichlet", "shards", "feature_severity") if name not in settings.describe()}
    told = vars(settings) | unused | {"seeds": [settings.seed], "dataset": clean(federation.pool.name)}
    del told["seed"]
    return told


def fit_to_data(config: Config, dataset: Dataset) -> Config:
    """The config with what it leaves to the data filled in. Refuse settings that the data gives no meaning."""
    name, held = clean(dataset.pool.name), len(dataset.clients)
    if config.unknown is not None and dataset.unknown is not None:
        config = replace(config, unknown=dataset.unknown.name)  # which may be given as a number
    partition = config.partition or ("given" if held else "balanced")
    if partition == "given" and not held:
        raise InputError(f"{name} does not say which client holds which rows; choose another partition.")
    if partition == "given":
        for key, fits in (("clients", config.clients in (None, held)), ("dirichlet", config.dirichlet is None)):
            if not fits:
                raise InputError(
                    f"{name} is held by {held} clients of its own; leave {key} out, or set partition=balanced to deal "
                    "its rows anew."
                )
        config = replace(config, partition=partition, clients=held)
    else:
        config = config.filled()
    if not dataset.pool.is_pictures:
        return _without_augmentation(config, name)
    side = min(dataset.pool.x.shape[1:3])
    if side < SMALLEST:
        raise InputError(f"{name} has images of {side} pixels, too small to corrupt; set size={SMALLEST} or more.")
    if config.crop >= side:
        raise InputError(f"crop must be less than the {side} pixels of a side, but is {config.crop}.")
    return config


def _without_augmentation(config: Config, name: str) -> Config:
    """Data that are no pictures are neither flipped nor cropped."""
    if config.standardize:
        raise InputError(f"standardize is for pictures, and {name} has none; scale its features beforehand.")
    return replace(config, flip=False, crop=0)


def pick_net(config: Config, pool: Pool, given: Any = None) -> Net:
    """The network that is given or that the config names, for samples as the pool has them."""
    moments = pool.moments if config.standardize else None
    return make_net(config, len(pool.classes), take_samples(pool).shape[1:], moments, given)


def take_samples(pool: Pool) -> Tensor:
    """A few samples, as networks take them; not the first ones alone, which may be of one class or even equal."""
    flat = pool.x.reshape(len(pool), -1)
    tokens = [] if pool.x.dtype != np.int64 else [flat.max(1).argmax(), flat.min(1).argmin()]  # a vocabulary has ends
    return scale(torch.from_numpy(pool.x[np.unique([0, len(pool) // 2, len(pool) - 1, *tokens])]))


def fit_to_net(config: Config, net: Net) -> Config:
    """The config with the training settings of a network that has no name to look them up by."""
    asked = find_defaults(net)
    if config.optimizer not in (None, asked.optimizer):
        return config
    left = [name for name in ("lr", "momentum", "weight_decay") if getattr(config, name) is None]
    return replace(config, optimizer=asked.optimizer, **{name: getattr(asked, name) for name in left})


def check_methods(methods: Mapping[str, Method], pool: Pool) -> None:
    """Refuse methods that augment or rotate samples where these are no pictures."""
    for name, method in methods.items():
        if not pool.is_pictures and method.predictor.pictures_only:
            raise InputError(
                f"{name} works on augmented or rotated pictures, and {clean(pool.name)} has none; leave it out."
            )
