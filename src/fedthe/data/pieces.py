"""Streams made of pieces, written as text: "own 100, ooc 50, own 100", or "own 50, ooc 50, ..." over and over."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle

import numpy as np

from .. import rng
from ..errors import InputError
from ..names import STREAM_NAMES, TEST_NAMES
from ..text import clean, quote
from .shifts import Stream, join

SPLITS = ("train", "val", "test")
RESERVED = ("average", "mean", "method", "seed", "test", "client", "label", "none")  # columns beside tests, and words
NEARLY = {"training": "train", "valid": "val", "validation": "val", "testing": "test"}
MOST_SEGMENTS = 2**15  # a stream keeps the number of its segments in 16 bits
# Pools of the same rows: a row that one of them has given is not given again.
SUPPLIES = {"corrupted": "own", "corrupted_ooc": "ooc"}
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
        supplies = {piece.pool: SUPPLIES.get(piece.pool, piece.pool) for piece in pieces}
        orders = {
            supply: rng.shuffled(rng.key(*pools.key, supply), len(pools.streams[supply]))
            for supply in supplies.values()
        }
        used: Counter[str] = Counter()
        parts: list[Stream] = []
        for piece in cycle(pieces) if again else pieces:
            supply, stream = supplies[piece.pool], pools.streams[piece.pool]
            left = len(stream) - used[supply]
            count = piece.count(len(stream), left)
            if again and not left:
                break
            if again:
                count = min(count, left)
            elif not 0 < count <= left:
                return None
            if len(parts) == MOST_SEGMENTS:
                raise InputError(
                    f"the stream {quote(self.text)} has more than {MOST_SEGMENTS:,} pieces; make them longer."
                )
            index = orders[supply][used[supply] : used[supply] + count]
            parts.append(stream.take(index).number(len(parts)))
            used[supply] += count
        return join(parts) if parts else None


HOW = 'write pieces such as "own 100, ooc 50, own 20%", and end with ", ..." to begin again'


def parse_pieces(name: str, text: str) -> Pieces:
    """A stream of a user's own. Refuse a name with a meaning of its own, or pieces that cannot be read."""
    check_test_name(name)
    if name in ("natural", "unknown"):
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
    if test in (*TEST_NAMES, *STREAM_NAMES, *SPLITS, *RESERVED):
        raise InputError(f"the name {clean(test)!r} has a meaning of its own; choose another name for the test.")
