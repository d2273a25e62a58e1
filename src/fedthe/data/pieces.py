"""Streams made of pieces, written as text: "own 100, ooc 50, own 100", or "own 50, ooc 50, ..." over and over."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle

import numpy as np

from .. import rng
from ..errors import InputError
from ..names import STREAM_NAMES, TEST_NAMES
from ..text import clean, quote
from ..timeline import MIXED, UNKNOWN
from .shifts import CLEAN, CORRUPTED, Stream, join

SPLITS = ("train", "val", "test")
RESERVED = ("average", "mean", "method", "seed", "test", "client", "label", "none")  # columns beside tests, and words
PHASES = ("own", UNKNOWN, MIXED)  # of streams, that no test is named after; a test may well be `natural`
NEARLY = {"training": "train", "valid": "val", "validation": "val", "testing": "test"}
MOST_SEGMENTS = 2**15  # a stream keeps the number of its segments in 16 bits
ORDERS = {"corrupted": "own", "corrupted_ooc": "ooc"}  # pools of the same rows, which come in the same order
_PIECE = re.compile(r"([A-Za-z_][\w.-]*)(?:\s+(\d{1,9})\s*(%?))?", re.ASCII)


@dataclass(frozen=True)
class Pools:
    """What one client's streams are drawn from."""

    key: tuple[int | str, ...]  # of all draws: the seed, the test and the client
    streams: Mapping[str, Stream]  # by pool: own, corrupted, ooc, corrupted_ooc, unknown, natural, and each shift
    shifts: tuple[str, ...]  # the pools that are natural shifts
    labels: np.ndarray  # int64 [rows of the pool]

    def shuffle(self, pool: str, *more: int | str) -> Stream:
        """All samples of a pool, in random order."""
        stream = self.streams[pool]
        return stream.take(rng.shuffled(rng.key(*self.key, *more), len(stream)))


@dataclass(frozen=True)
class Piece:
    pool: str
    amount: int | None  # of samples; None: all that are left
    percent: bool = False  # the amount is a share of the pool

    def count(self, size: int, left: int) -> int:
        if self.amount is None:
            return left
        return max(1, size * self.amount // 100) if self.percent else self.amount


@dataclass(frozen=True)
class Pieces:
    """Pieces of pools one after another, each a segment. A row is met at most once, clean or corrupted.

    With "..." at the end they begin again until no row is left for the piece that is next; a piece is shorter where
    fewer rows are left than it asks for.
    Without it, a client that has too few rows for a piece has no such stream.
    """

    text: str

    @cached_property
    def parsed(self) -> tuple[tuple[Piece, ...], bool]:
        """The pieces, and whether they begin again."""
        *parts, last = self.text.split(",")
        again = last.strip() == "..."
        if not again:
            parts.append(last)
        found = [_PIECE.fullmatch(part.strip()) for part in parts]
        if not parts or not all(found):
            bad = next((part.strip() for part, each in zip(parts, found, strict=True) if not each), self.text)
            raise InputError(f"{quote(bad)} is no piece of a stream; {HOW}.")
        pieces = tuple(Piece(m[1], None if m[2] is None else int(m[2]), bool(m[3])) for m in found if m)
        for piece in pieces:
            if piece.amount == 0 or (piece.percent and (piece.amount or 0) > 100):
                raise InputError(f"a piece of a stream is at least 1 sample and at most 100 %; {HOW}.")
            if again and piece.amount is None:
                raise InputError(f"{piece.pool!r} repeats, so it needs a number; {HOW}.")
        return pieces, again

    @property
    def pools(self) -> tuple[str, ...]:
        """Those it is drawn from."""
        return tuple(dict.fromkeys(piece.pool for piece in self.parsed[0]))

    def draw(self, pools: Pools) -> Stream | None:
        pieces, again = self.parsed
        orders = {
            pool: rng.shuffled(rng.key(*pools.key, ORDERS.get(pool, pool)), len(pools.streams[pool]))
            for pool in self.pools
        }
        rows = {pool: _identify(pools.streams[pool]) for pool in self.pools}
        every = np.unique(np.concatenate(list(rows.values())))
        places = {pool: np.searchsorted(every, own) for pool, own in rows.items()}
        used = np.zeros(len(every), dtype=bool)
        parts: list[Stream] = []
        for piece in cycle(pieces) if again else pieces:
            stream, order, place = pools.streams[piece.pool], orders[piece.pool], places[piece.pool]
            left = order[~used[place[order]]]
            count = piece.count(len(stream), len(left))
            if again and not len(left):
                break
            if not again and not 0 < count <= len(left):
                return None
            if len(parts) == MOST_SEGMENTS:
                raise InputError(
                    f"the stream {quote(self.text)} has more than {MOST_SEGMENTS:,} pieces; make them longer."
                )
            index = left[:count]
            parts.append(stream.take(index).number(len(parts)))
            used[place[index]] = True
        return join(parts) if parts else None


def _identify(stream: Stream) -> np.ndarray:
    """A number for each row [n], the same wherever it is met: clean or corrupted, in `natural` or under its shift."""
    source = np.where(stream.source == CORRUPTED, CLEAN, stream.source).astype(np.int64)
    return np.asarray((source << 48) + stream.rows)


HOW = 'write pieces such as "own 100, ooc 50, own 20%", and end with ", ..." to begin again'


def parse_pieces(name: str, text: str) -> Pieces:
    """A stream of a user's own. Refuse a name with a meaning of its own, or pieces that cannot be read."""
    check_test_name(name)
    if name == "natural":
        raise InputError(f"the name {name!r} has a meaning of its own; choose another name for the stream.")
    if not isinstance(text, str):
        raise InputError(f"streams.{name} must be text, not {quote(text)}; {HOW}.")
    pieces = Pieces(text)
    try:
        _ = pieces.parsed
    except InputError as error:
        raise InputError(f"streams.{name}: {error}") from None
    return pieces


def check_test_name(test: object) -> None:
    if not isinstance(test, str) or not test.isidentifier():
        raise InputError(f"the name of a test must be a word such as night, not {quote(test)}.")
    if test in NEARLY:
        raise InputError(f"{test!r} would be a further test; write {NEARLY[test]} for that split.")
    if test in (*TEST_NAMES, *STREAM_NAMES, *SPLITS, *RESERVED, *PHASES):
        raise InputError(f"the name {clean(test)!r} has a meaning of its own; choose another name for the test.")
