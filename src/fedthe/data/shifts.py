"""The test distributions of BRFL: which samples each client meets after deployment, in which order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import rng
from .partition import Split

# where a sample comes from: the pool itself, its corrupted copy, or natural shift number i at NATURAL + i
CLEAN, CORRUPTED, NATURAL = 0, 1, 2


@dataclass(frozen=True)
class Stream:
    """An ordered list of test samples: for each, which pool it comes from and its row there."""

    source: np.ndarray  # uint8 [n], CLEAN, CORRUPTED or NATURAL + i
    rows: np.ndarray  # int64 [n], rows of that pool

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, index: np.ndarray) -> Stream:
        return Stream(self.source[index], self.rows[index])

    def first(self, samples: int | None) -> Stream:
        """The first `samples` of the stream; all of it for None."""
        return self.take(np.arange(min(len(self), samples or len(self))))


def stream(source: int, rows: np.ndarray) -> Stream:
    return Stream(np.full(len(rows), source, dtype=np.uint8), rows)


def draw_out_of_client(splits: list[Split], seed: int) -> list[np.ndarray]:
    """For each client, as many rows as its own test has, drawn from the other clients' tests without replacement."""
    tests = [split.test for split in splits]
    joined = np.concatenate(tests)
    ends = np.cumsum([len(test) for test in tests])
    drawn = []
    for k, (test, end) in enumerate(zip(tests, ends, strict=True)):
        others = len(joined) - len(test)
        index = rng.choose(rng.key(seed, "ooc", k), others, min(len(test), others))
        drawn.append(joined[np.where(index < end - len(test), index, index + len(test))])  # skip its own
    return drawn


def split_natural(labels: np.ndarray, counts: np.ndarray, seed: int, name: str) -> list[np.ndarray]:
    """Deal a shifted pool so that each client gets its own class mix; `counts` is [clients, classes].

    No row is dealt twice; rows with a negative label are not dealt.
    """
    hands: list[list[np.ndarray]] = [[] for _ in counts]
    for c in np.unique(labels):
        if c < 0 or not counts[:, c].any():
            continue  # no client holds this class, so none is tested on it
        rows = np.flatnonzero(labels == c)
        rows = rows[rng.shuffled(rng.key(seed, "natural", name, int(c)), len(rows))]
        for hand, part in zip(hands, np.split(rows, np.cumsum(apportion(len(rows), counts[:, c]))[:-1]), strict=True):
            hand.append(part)
    joined = [np.concatenate([np.zeros(0, dtype=np.int64), *hand]) for hand in hands]
    return [rows[rng.shuffled(rng.key(seed, "natural", name, "order", k), len(rows))] for k, rows in enumerate(joined)]


def apportion(total: int, weights: np.ndarray) -> np.ndarray:
    """Whole shares of `total` in proportion to `weights`, by largest remainders, in integer arithmetic."""
    quota = total * weights
    shares = quota // weights.sum()
    left = total - shares.sum()
    shares[np.argsort(-(quota % weights.sum()), kind="stable")[:left]] += 1
    return np.asarray(shares)


def halve(rows: np.ndarray, key: tuple[int | str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Two random halves without a row in common; the first has one more of an odd number."""
    order = rng.shuffled(rng.key(*key), len(rows))
    middle = (len(rows) + 1) // 2
    return rows[order[:middle]], rows[order[middle:]]


def mix(parts: list[Stream], key: tuple[int | str, ...]) -> Stream | None:
    """As many samples of each part as the smallest has, in random order; None if that has none."""
    size = min(len(part) for part in parts)
    if not size:
        return None
    taken = [part.take(rng.choose(rng.key(*key, i), len(part), size)) for i, part in enumerate(parts)]
    order = rng.shuffled(rng.key(*key, "order"), size * len(parts))
    return Stream(np.concatenate([t.source for t in taken]), np.concatenate([t.rows for t in taken])).take(order)
