"""Literal, slow versions of test streams in time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.special import gammaincinv

from fedthe import rng


def take_turns(
    blocks: Sequence[tuple[str, int]], sizes: Mapping[str, int], same_rows: Mapping[str, str] | None = None
) -> list[tuple[str, int]]:
    """Pools in turn, block by block, one sample at a time, until the next one is used up; some share rows."""
    left, taken, i = dict(sizes), [], 0
    while True:
        pool, most = blocks[i % len(blocks)]
        rows = (same_rows or {}).get(pool, pool)
        if not left[rows]:
            return taken
        count = 0
        while count < most and left[rows] > 0:
            count += 1
            left[rows] -= 1
        taken.append((pool, count))
        i += 1


def pick_early_classes(labels: np.ndarray, seed: int, client: int) -> set[int]:
    """Half of the classes, rounded down, by a shuffle of them."""
    classes = sorted(set(labels.tolist()))
    order = rng.shuffled(rng.key(seed, "late", client, "classes"), len(classes)).tolist()
    return {classes[i] for i in order[: len(classes) // 2]}


def count_slots(labels: np.ndarray, seed: int, test: str, client: int, slots: int = 10) -> list[Counter[int]]:
    """How many samples of each class are in each slot: Dirichlet(0.1) shares, normalized Gamma quantiles."""
    classes = sorted(set(labels.tolist()))
    drawn = rng.uniform(rng.key(seed, test, client, "slots"), np.array([0]), len(classes) * slots)[0]
    counts: list[Counter[int]] = [Counter() for _ in range(slots)]
    for i, c in enumerate(classes):
        gammas = [float(gammaincinv(0.1, drawn[i * slots + s])) for s in range(slots)]
        total, reached, before = int((labels == c).sum()), 0.0, 0
        for s in range(slots):
            reached += gammas[s] / sum(gammas)
            end = total if s == slots - 1 else int(np.floor(reached * total + 0.5))
            if end > before:
                counts[s][c] = end - before
            before = end
    return counts
