"""Streams of test samples, and how they are drawn: from other clients' rows, or from a naturally shifted pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .. import rng
from .partition import Split

# where a sample comes from: the pool itself, its corrupted copy, natural shift number i at NATURAL + i, or the rows of
# a class that no client holds
CLEAN, CORRUPTED, NATURAL, UNKNOWN = 0, 1, 2, 255
ORIGINS = ("own", "corrupted", "natural", "ooc", "corrupted_ooc", "unknown")  # by number, in the column `origin`


@dataclass(frozen=True)
class Stream:
    """An ordered list of test samples: for each, which pool it comes from, its row there, and what is known of it."""

    source: np.ndarray  # uint8 [n], CLEAN, CORRUPTED, NATURAL + i or UNKNOWN
    rows: np.ndarray  # int64 [n], rows of that pool
    segment: np.ndarray  # int16 [n], the number of the block in time, which never falls
    origin: np.ndarray  # uint8 [n], a position in ORIGINS
    kind: np.ndarray  # int8 [n], a position in CORRUPTIONS; -1: clean
    severity: np.ndarray  # int8 [n], of the corruption; 0: clean

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, index: np.ndarray) -> Stream:
        return Stream(**{name: column[index] for name, column in vars(self).items()})

    def first(self, samples: int | None) -> Stream:
        """The first `samples` of the stream; all of it for None."""
        return self.take(np.arange(min(len(self), samples or len(self))))

    def number(self, segment: int | np.ndarray) -> Stream:
        """The same samples in this segment, or in these."""
        return replace(self, segment=np.full(len(self), segment, dtype=np.int16))

    def corrupt(self, kind: int | np.ndarray, severity: int | np.ndarray) -> Stream:
        """The same rows with these corruptions. They keep their origin."""
        columns = {"source": CORRUPTED, "kind": kind, "severity": severity}
        return replace(self, **{name: np.full_like(getattr(self, name), of) for name, of in columns.items()})


def stream(origin: str, source: int, rows: np.ndarray) -> Stream:
    """Clean samples of one origin, in one segment."""
    columns = {"source": (source, np.uint8), "segment": (0, np.int16), "origin": (ORIGINS.index(origin), np.uint8)}
    columns |= {"kind": (-1, np.int8), "severity": (0, np.int8)}
    return Stream(rows=rows, **{name: np.full(len(rows), of, kind) for name, (of, kind) in columns.items()})


def join(parts: Sequence[Stream]) -> Stream:
    """One stream after another."""
    return Stream(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in vars(parts[0])})


def draw_out_of_client(splits: Sequence[Split], seed: int) -> list[np.ndarray]:
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
    return join(taken).take(order)
