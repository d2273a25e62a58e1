"""Which test streams a federation has, drawn for every client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from .. import rng
from ..corruptions import CORRUPTIONS
from . import shifts
from .partition import Split
from .pieces import Pools
from .pool import Dataset
from .settings import Settings
from .shifts import CLEAN, NATURAL, UNKNOWN, Stream
from .tests import STANDARD, check_drawn, choose_tests

Dealt = Mapping[str, list[np.ndarray]]  # by natural shift: the rows of each client


def draw_tests(
    dataset: Dataset, settings: Settings, splits: Sequence[Split], dealt: Dealt
) -> dict[str, tuple[Stream | None, ...]]:
    """The stream of every client, or None, by test."""
    s, chosen = settings, choose_tests(dataset, settings)
    ooc = shifts.draw_out_of_client(splits, s.seed)
    pools = [
        _gather_pools(dataset, s, k, split.test, ooc[k], {name: hands[k] for name, hands in dealt.items()})
        for k, split in enumerate(splits)
    ]
    tests = {
        name: tuple(recipe.draw(replace(each, key=(s.seed, name, k))) for k, each in enumerate(pools))
        for name, recipe in chosen.items()
    }
    for name in (name for name in chosen if name not in STANDARD and name not in dataset.natural):
        check_drawn(name, chosen[name], tests[name])
    return tests


def _gather_pools(
    dataset: Dataset, s: Settings, k: int, own: np.ndarray, ooc: np.ndarray, dealt: Mapping[str, np.ndarray]
) -> Pools:
    """What the streams of client k are drawn from."""
    streams = {"own": shifts.stream("own", CLEAN, own), "ooc": shifts.stream("ooc", CLEAN, ooc)}
    if dataset.pool.is_pictures:
        for name, rows in (("corrupted", own), ("corrupted_ooc", ooc)):
            streams[name] = shifts.stream(name, CLEAN, rows).corrupt(draw_kinds(rows, s.seed), s.severity)
    natural = {name: shifts.stream("natural", NATURAL + i, rows) for i, (name, rows) in enumerate(dealt.items())}
    if natural:
        streams |= {"natural": shifts.join(list(natural.values()))} | natural
    if dataset.unknown is not None:
        drawn = rng.choose(rng.key(s.seed, "unknown", k), len(dataset.unknown), min(len(own), len(dataset.unknown)))
        streams["unknown"] = shifts.stream("unknown", UNKNOWN, drawn)
    return Pools((), streams, tuple(dealt), dataset.pool.labels)


def draw_kinds(rows: np.ndarray, seed: int) -> np.ndarray:
    """Which of the 15 corruptions each row gets in the benchmark's own tests."""
    return np.asarray(rng.integers(rng.key(seed, "corruption"), rows, 1, 0, len(CORRUPTIONS))[:, 0])


def deal_natural(dataset: Dataset, settings: Settings, counts: np.ndarray) -> Dealt:
    """Each client's rows of every natural shift; `counts` is [clients, classes]."""
    return {name: _deal_shift(dataset, name, counts, settings) for name in dataset.natural}


def _deal_shift(dataset: Dataset, name: str, counts: np.ndarray, s: Settings) -> list[np.ndarray]:
    """Each client's rows of a natural shift: those it holds, or a share in its own class mix."""
    shift, repeated = dataset.natural[name], dataset.repeats[name]
    if not shift.is_pictures:  # short texts and coarse measurements repeat without being the same sample
        repeated = np.zeros_like(repeated)
    if s.partition == "given" and any(name in each.tests for each in dataset.clients):
        held = [each.tests.get(name, np.zeros(0, dtype=np.int64)) for each in dataset.clients]
        return [rows[~repeated[rows]] for rows in held]
    return shifts.split_natural(np.where(repeated, -1, shift.labels), counts, s.seed, name)
