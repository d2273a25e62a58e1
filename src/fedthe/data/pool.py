"""A dataset: a pool of labelled rows, natural shifts of it, and, if it is federated already, who holds which rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..errors import InputError
from ..store import content_hash
from ..text import clean
from .partition import Split

# Digest of an npz file behind published results -> its name in their manifests.
PUBLISHED = {"aeb7a9c0f16fcdf5d46178b111f959ec20b50e007185d0d564c89f9d6f5bc8e5": "Tiny-ImageNet"}


@dataclass(frozen=True)
class Pool:
    """Labelled rows of one kind."""

    name: str
    x: np.ndarray  # uint8 pictures [n, height, width, 1 or 3], float32 features [n, ...] or int64 tokens [n, ...]
    labels: np.ndarray  # int64 [n]
    classes: tuple[str, ...]
    own: bool = False  # the user's file or folder, of which `name` is only the file name

    def __post_init__(self) -> None:
        shape = self.x.shape
        pictures = self.x.dtype == np.uint8 and len(shape) == 4 and shape[3] in (1, 3)
        if not (pictures or (self.x.dtype in (np.float32, np.int64) and shape)) or 0 in shape:
            raise InputError(
                f"{clean(self.name)}: pictures must be uint8 [n, height, width, 1 or 3], features float32 [n, ...] and "
                f"tokens int64 [n, ...], and not empty, but x is {self.x.dtype} {list(shape)}."
            )
        if self.labels.shape != shape[:1] or self.labels.dtype.kind not in "iu":
            raise InputError(
                f"{clean(self.name)}: there must be one whole-number label per row, but there are {shape[0]} rows "
                f"and labels {self.labels.dtype} {list(self.labels.shape)}."
            )
        object.__setattr__(self, "labels", self.labels.astype(np.int64))
        if self.labels.min() < 0 or self.labels.max() >= len(self.classes):
            raise InputError(
                f"{clean(self.name)}: labels run from {self.labels.min()} to {self.labels.max()}, "
                f"but there are {len(self.classes)} classes, counted from 0."
            )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def is_pictures(self) -> bool:
        """Pictures can be corrupted and augmented; features and tokens cannot."""
        return bool(self.x.dtype == np.uint8)

    @cached_property
    def moments(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of every channel, for pixels in [-1, 1]; from exact counts of the levels."""
        levels = np.arange(256) / 127.5 - 1
        counts = [np.bincount(channel.ravel(), minlength=256) for channel in np.moveaxis(self.x, 3, 0)]
        means = [float(np.average(levels, weights=count)) for count in counts]
        squares = [np.average((levels - mean) ** 2, weights=count) for mean, count in zip(means, counts, strict=True)]
        return tuple(means), tuple(float(square**0.5) for square in squares)

    @cached_property
    def identity(self) -> str:
        """Its name in a manifest; for a user's own pool, a hash of the content, so that renaming changes nothing."""
        return PUBLISHED.get(self.digest, f"sha256:{self.digest}") if self.own else self.name

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the decoded content, whatever file it came from."""
        return content_hash(self.x, self.labels, list(self.classes))


@dataclass(frozen=True)
class Holding:
    """What one client holds of a dataset that is federated already."""

    name: str
    rows: np.ndarray | Split  # of the pool: to be split by the seed, or split already
    tests: Mapping[str, np.ndarray] = field(default_factory=dict)  # by natural shift: the client's rows of it


@dataclass(frozen=True)
class Dataset:
    """A pool, and what is known of shifts and clients."""

    pool: Pool
    natural: Mapping[str, Pool] = field(default_factory=dict)  # natural shifts by the name of their test
    clients: tuple[Holding, ...] = ()  # none: rows are dealt to clients by their labels
    unknown: Pool | None = None  # rows of a class that was set aside, so that no client holds it

    def __post_init__(self) -> None:
        for shift in self.natural.values():
            if shift.classes != self.pool.classes:
                raise InputError(f"{clean(shift.name)} and {clean(self.pool.name)} have different classes.")
            if (shift.x.shape[1:], shift.x.dtype) != (self.pool.x.shape[1:], self.pool.x.dtype):
                raise InputError(
                    f"{clean(shift.name)} has samples of {shift.x.dtype} {list(shift.x.shape[1:])}, "
                    f"{clean(self.pool.name)} of {self.pool.x.dtype} {list(self.pool.x.shape[1:])}; they must agree."
                )

    @cached_property
    def repeats(self) -> dict[str, np.ndarray]:
        """By shift, which of its rows are in the pool too, value for value, so may be trained on: bool [rows]."""
        found = {}
        for name, shift in self.natural.items():
            rows = [row.tobytes() for row in shift.x]
            wanted = set(rows)
            shared = {data for row in self.pool.x if (data := row.tobytes()) in wanted}  # keeps only matches
            found[name] = np.array([row in shared for row in rows])
        return found
