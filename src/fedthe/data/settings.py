"""Everything that a federation depends on, except the dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import InputError
from ..text import quote
from .feature_shift import FEATURE_SHIFTS, FeatureShift
from .numbers import read_number, read_whole
from .partition import PARTITIONS, USE_DIRICHLET, Partition, check_dirichlet
from .pieces import parse_pieces


@dataclass(frozen=True)
class Settings:
    """Everything that a federation depends on, except the dataset."""

    clients: int = 20
    dirichlet: float = 0.1
    seed: int = 0
    partition: Partition = "balanced"
    severity: int = 5
    frost: str | None = None  # a folder with the original frost photographs; None: generated textures
    train_fraction: float = 1.0  # of each client's training rows; the rest is not used
    test_fraction: float = 1.0  # of its test rows, and so of all tests drawn from them
    shards: int = 2  # of each client, in the partition "shards"
    feature_shift: FeatureShift = "none"  # what is done to all pictures of a client, in its own way
    feature_severity: int = 3  # of the corruption that a client has as its feature shift
    tests: tuple[str, ...] | None = None  # those that are laid out beside the benchmark's own; None: all of `streams`
    streams: Mapping[str, str] = field(default_factory=dict)  # by name: pieces, such as "own 100, ooc 50, own 100"
    unseen: float = 0.0  # the share of clients that take no part in training, and join after it; above 0: at least one
    unknown: str | None = None  # a class that no client holds, by its name or number, for the test open_set

    def __post_init__(self) -> None:
        for name in ("clients", "seed", "severity", "shards", "feature_severity"):
            object.__setattr__(self, name, read_whole(name, getattr(self, name)))
        for name in ("dirichlet", "train_fraction", "test_fraction", "unseen"):
            object.__setattr__(self, name, read_number(name, getattr(self, name)))
        check_dirichlet(self.dirichlet)
        for name in ("severity", "feature_severity"):
            if getattr(self, name) not in range(1, 6):
                raise InputError(f"{name} must be 1, 2, 3, 4 or 5, not {getattr(self, name)}.")
        for name, known in (("partition", PARTITIONS), ("feature_shift", FEATURE_SHIFTS)):
            if getattr(self, name) not in known:
                raise InputError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}.")
        for name in ("train_fraction", "test_fraction"):
            if not 0 < getattr(self, name) <= 1:
                raise InputError(f"{name} must be above 0 and at most 1, not {getattr(self, name)}.")
        if not 0 <= self.unseen < 1 or (self.unseen and self.count_unseen >= self.clients):
            raise InputError(f"unseen must be from 0 to below 1 and leave a client to train, but is {self.unseen}.")
        if not 0 <= self.seed < 2**31:
            raise InputError(f"seed must be from 0 to {2**31 - 1}, but it is {self.seed}.")
        _check_kind("tests", self.tests, Sequence | None, 'a list of names, such as ("switch10",)')
        _check_kind("streams", self.streams, Mapping, 'a dict by name, such as {"mine": "own 100, ooc 50"}')
        for name, text in self.streams.items():
            parse_pieces(name, text)
        object.__setattr__(self, "unknown", _read_class(self.unknown))

    @property
    def count_unseen(self) -> int:
        return max(1, round(self.unseen * self.clients)) if self.unseen else 0

    def describe(self) -> dict[str, Any]:
        """The settings that have an effect, for a manifest. Those that older versions did not have are left out where
        they change nothing."""
        told = dict(vars(self))
        for name in ("train_fraction", "test_fraction"):
            if told[name] == 1:
                del told[name]
        if self.partition not in USE_DIRICHLET:
            del told["dirichlet"]
        if self.partition != "shards":
            del told["shards"]
        if self.feature_shift == "none":
            del told["feature_shift"]
        if self.feature_shift != "corruption":
            del told["feature_severity"]
        del told["tests"]  # a manifest lists the streams themselves
        told["streams"] = {
            name: text for name, text in self.streams.items() if self.tests is None or name in self.tests
        }
        for name in ("streams", "unknown", "unseen"):
            if not told[name]:
                del told[name]
        return told


def _read_class(unknown: object) -> str | None:
    """The name or the number of a class, as text."""
    if unknown is None or isinstance(unknown, str):
        return unknown
    if isinstance(unknown, bool) or not isinstance(unknown, int | np.integer):
        raise InputError(f"unknown must be a class, by its name or number, not {quote(unknown)}.")
    return str(unknown)


def _check_kind(name: str, value: object, kind: Any, words: str) -> None:
    if isinstance(value, str) or not isinstance(value, kind):
        raise InputError(f"{name} must be {words}, not {quote(value)}.")
