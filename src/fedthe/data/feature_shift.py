"""Feature shift between clients: all pictures of a client are corrupted, or rotated, in its own way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from .. import rng
from ..corruptions import CORRUPTION_VERSION, CORRUPTIONS, corrupt_mixed
from ..errors import InputError
from ..store import cached, content_hash
from ..text import clean
from .pool import Dataset, Pool

if TYPE_CHECKING:
    from .plan import Settings

FeatureShift = Literal["none", "corruption", "rotation"]
FEATURE_SHIFTS = get_args(FeatureShift)
APART = 1 << 32  # added to row numbers: the noise of a corrupted test must not be the same once more


def shift_features(
    dataset: Dataset, settings: Settings, held: Sequence[np.ndarray], dealt: Mapping[str, Sequence[np.ndarray]]
) -> Dataset:
    """The dataset with every client's rows shifted: of the pool, and of natural shifts by name."""
    if settings.feature_shift == "none":
        return dataset
    if not dataset.pool.is_pictures:
        raise InputError(f"feature_shift is for pictures, and {clean(dataset.pool.name)} has none; leave it out.")
    if dataset.unknown is not None:  # clients have rows of it in common, so one pool cannot hold what each of them sees
        raise InputError(
            "feature_shift does not shift samples of an unknown class; leave feature_shift or unknown out."
        )
    natural = {name: _shift_pool(pool, settings, dealt[name]) for name, pool in dataset.natural.items()}
    return replace(dataset, pool=_shift_pool(dataset.pool, settings, held), natural=natural)


def list_feature_shifts(settings: Settings) -> list[str]:
    """What is done to whom, as a note."""
    if settings.feature_shift == "none":
        return []
    if settings.feature_shift == "rotation":
        return ["feature shift: pictures of client k are rotated by k times 90 degrees"]
    kinds = ", ".join(f"{k} {CORRUPTIONS[kind]}" for k, kind in enumerate(_draw_kinds(settings)))
    return [f"feature shift: every picture of a client is corrupted in one way; by client: {kinds}"]


def _draw_kinds(settings: Settings) -> np.ndarray:
    """Which corruption each client has [clients]: all different as long as there are enough."""
    order = rng.shuffled(rng.key(settings.seed, "feature shift"), len(CORRUPTIONS))
    return np.resize(order, settings.clients)


def _shift_pool(pool: Pool, settings: Settings, held: Sequence[np.ndarray]) -> Pool:
    if settings.feature_shift == "rotation":
        x = pool.x.copy()
        if x.shape[1] != x.shape[2]:
            raise InputError("feature_shift=rotation needs square pictures; set size.")
        for k, rows in enumerate(held):
            x[rows] = np.rot90(pool.x[rows], k % 4, axes=(1, 2))
        return replace(pool, x=x)
    kinds = np.full(len(pool), -1)
    for kind, rows in zip(_draw_kinds(settings), held, strict=True):
        kinds[rows] = kind
    rows, s = np.flatnonzero(kinds >= 0), settings
    if not len(rows):
        return pool
    key = content_hash("feature shift", pool.digest, kinds, s.feature_severity, s.seed, CORRUPTION_VERSION)

    def make() -> dict[str, np.ndarray]:
        from torch import from_numpy

        images, own = from_numpy(pool.x[rows]), from_numpy(kinds[rows])
        return {"images": corrupt_mixed(images, own, s.feature_severity, from_numpy(rows + APART), s.seed).numpy()}

    x = pool.x.copy()
    x[rows] = cached("shifted", key, make)["images"]
    return replace(pool, x=x)
