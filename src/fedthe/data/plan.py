"""The federation: what each client trains on and is tested on, and a manifest that identifies it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import rng
from ..corruptions import CORRUPTION_VERSION, CORRUPTIONS, corrupt_mixed
from ..errors import InputError
from ..store import cached, content_hash
from ..text import clean
from . import shifts
from .numbers import read_number, read_whole
from .partition import Partition, Split, check_dirichlet, partition
from .pool import Dataset, Pool
from .shifts import CLEAN, CORRUPTED, NATURAL, Stream

if TYPE_CHECKING:
    from torch import Tensor


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

    def __post_init__(self) -> None:
        for name in ("clients", "seed", "severity"):
            object.__setattr__(self, name, read_whole(name, getattr(self, name)))
        for name in ("dirichlet", "train_fraction", "test_fraction"):
            object.__setattr__(self, name, read_number(name, getattr(self, name)))
        check_dirichlet(self.dirichlet)
        if self.severity not in range(1, 6):
            raise InputError(f"severity must be 1, 2, 3, 4 or 5, not {self.severity}.")
        if self.partition not in ("balanced", "unbalanced"):
            raise InputError(f"partition must be balanced or unbalanced, not {self.partition!r}.")
        for name in ("train_fraction", "test_fraction"):
            if not 0 < getattr(self, name) <= 1:
                raise InputError(f"{name} must be above 0 and at most 1, not {getattr(self, name)}.")
        if not 0 <= self.seed < 2**31:
            raise InputError(f"seed must be from 0 to {2**31 - 1}, but it is {self.seed}.")


@dataclass(frozen=True)
class Federation:
    """Clients with frozen splits, and the test distributions that each client meets after deployment.

    `tests[name][k]` is client k's stream under that distribution, or None if the client has none: a client that holds
    no class of the natural shift is not tested on it.
    """

    dataset: Dataset
    settings: Settings
    clients: tuple[Split, ...]
    tests: Mapping[str, tuple[Stream | None, ...]]

    @property
    def pool(self) -> Pool:
        return self.dataset.pool

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know, such as a test distribution that could not be built."""
        return tuple(_write_notes(self, lambda pool: clean(pool.name)))

    @cached_property
    def class_counts(self) -> np.ndarray:
        """Rows of each class that each client holds [clients, classes]."""
        return count_classes(self.pool, self.clients)

    @cached_property
    def test_rows(self) -> np.ndarray:
        """The test rows of all clients, sorted: the rows that have a corrupted copy."""
        return np.sort(np.concatenate([split.test for split in self.clients]))

    @cached_property
    def corruptions(self) -> np.ndarray:
        """Which of the 15 corruptions each of `test_rows` gets [test rows]: one per row, the same in every test."""
        drawn = rng.integers(rng.key(self.settings.seed, "corruption"), self.test_rows, 1, 0, len(CORRUPTIONS))
        return np.asarray(drawn[:, 0])

    @cached_property
    def corrupted(self) -> np.ndarray:
        """The corrupted copies of `test_rows`, uint8 [test rows, h, w, c], computed once and cached on disk."""
        clean, s = self.pool.x[self.test_rows], self.settings
        key = content_hash(
            clean, self.test_rows, self.corruptions, s.severity, s.seed, self.frost_digest, CORRUPTION_VERSION
        )

        def make() -> dict[str, np.ndarray]:
            from torch import from_numpy

            kinds, items = from_numpy(self.corruptions), from_numpy(self.test_rows)
            return {"images": corrupt_mixed(from_numpy(clean), kinds, s.severity, items, s.seed, self._frost).numpy()}

        return cached("corrupted", key, make)["images"]

    @cached_property
    def _frost(self) -> list[Tensor] | None:
        """The user's own frost textures; None: generated ones."""
        if self.settings.frost is None:
            return None
        from .frost import load_frost

        return load_frost(self.settings.frost)

    @property
    def frost_digest(self) -> str | None:
        return None if self._frost is None else content_hash(*(texture.numpy() for texture in self._frost))

    def inputs(self, stream: Stream) -> np.ndarray:
        """The pixels of a stream, uint8 [n, h, w, c]."""
        out = np.empty((len(stream), *self.pool.x.shape[1:]), dtype=np.uint8)
        for source in np.unique(stream.source):
            here = stream.source == source
            rows = stream.rows[here]
            if source == CORRUPTED:
                out[here] = self.corrupted[np.searchsorted(self.test_rows, rows)]
            else:
                out[here] = self._pools[source].x[rows]
        return out

    def labels(self, stream: Stream) -> np.ndarray:
        """The true classes of a stream, int64 [n]."""
        out = np.empty(len(stream), dtype=np.int64)
        for source in np.unique(stream.source):
            here = stream.source == source
            out[here] = self._pools[source].labels[stream.rows[here]]
        return out

    @property
    def _pools(self) -> list[Pool]:
        return [self.pool, self.pool, *self.dataset.natural.values()]  # by source; corrupted rows keep their labels

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """Counts, and a SHA-256 of every list of rows: equal on every machine for the same labels and settings."""
        # manifests of older versions have no fractions: those of 1 are left out
        given = {
            name: value for name, value in vars(self.settings).items() if not name.endswith("_fraction") or value != 1
        }
        return {
            "format": 1,
            "settings": given | {"frost": self.frost_digest},
            "pool": _describe_pool(self.pool),
            "natural": {name: _describe_pool(shift) for name, shift in self.dataset.natural.items()},
            "corruptions": _describe_rows(self.test_rows, self.corruptions),
            "clients": [
                {
                    "classes": self.class_counts[k].tolist(),
                    "splits": {name: _describe_rows(getattr(split, name)) for name in ("train", "val", "test")},
                    "tests": {
                        name: _describe_rows(stream.rows, stream.source)
                        for name, streams in self.tests.items()
                        if (stream := streams[k]) is not None
                    },
                }
                for k, split in enumerate(self.clients)
            ],
            "notes": _write_notes(self, attrgetter("identity")),
        }

    @cached_property
    def manifest_hash(self) -> str:
        """Identifies which rows each client holds and is tested on."""
        return content_hash(self.manifest)

    @cached_property
    def training_hash(self) -> str:
        """Identifies all that training sees: the rows each client trains on, and the pixels of the pool."""
        splits = [(client["splits"]["train"], client["splits"]["val"]) for client in self.manifest["clients"]]
        return content_hash(splits, self.pool.digest)

    @cached_property
    def content_hash(self) -> str:
        """Identifies the rows and the pixels: results are comparable only if it is equal."""
        return content_hash(self.manifest, *(pool.digest for pool in (self.pool, *self.dataset.natural.values())))


def build(dataset: Dataset, settings: Settings) -> Federation:
    """Deal the pool to clients and build every test distribution. No row is in two splits."""
    s = settings
    splits = [
        Split(_some(split.train, s.train_fraction), split.val, _some(split.test, s.test_fraction))
        for split in partition(dataset.pool.labels, s.clients, s.dirichlet, s.seed, s.partition)
    ]
    return lay_out(dataset, settings, splits)


def lay_out(dataset: Dataset, settings: Settings, splits: list[Split]) -> Federation:
    """The federation of clients that hold these rows."""
    s, pool, natural = settings, dataset.pool, dataset.natural
    counts = count_classes(pool, splits)
    ooc = shifts.draw_out_of_client(splits, s.seed)

    tests: dict[str, list[Stream | None]] = {
        "original": [shifts.stream(CLEAN, split.test) for split in splits],
        "corrupted": [shifts.stream(CORRUPTED, split.test) for split in splits],
    }
    for i, (name, shift) in enumerate(natural.items()):
        dealt = shifts.split_natural(np.where(dataset.repeats[name], -1, shift.labels), counts, s.seed, name)
        tests[name] = [shifts.stream(NATURAL + i, rows) if len(rows) else None for rows in dealt]
    tests["ooc"] = [shifts.stream(CLEAN, rows) for rows in ooc]
    # collected first, so that the mixture does not become a part of itself
    parts = [[streams[k] for streams in tests.values()] for k in range(s.clients)]
    tests["mixture"] = [
        shifts.mix([part for part in mine if part is not None], (s.seed, "mixture", k)) for k, mine in enumerate(parts)
    ]
    tests["corrupted_ooc"] = [shifts.stream(CORRUPTED, rows) for rows in ooc]
    return Federation(dataset, s, tuple(splits), {name: tuple(streams) for name, streams in tests.items()})


def _some(rows: np.ndarray, fraction: float) -> np.ndarray:
    """The first `fraction` of the rows, which are in random order; at least one."""
    return rows[: max(1, round(fraction * len(rows)))]


def count_classes(pool: Pool, splits: Sequence[Split]) -> np.ndarray:
    return np.stack([np.bincount(pool.labels[split.rows], minlength=len(pool.classes)) for split in splits])


def _write_notes(federation: Federation, call: Callable[[Pool], str]) -> list[str]:
    """`call` names a pool: by its name for people, by its identity in a manifest."""
    dataset, settings, tests = federation.dataset, federation.settings, federation.tests
    notes = []
    if not dataset.natural:
        notes.append("natural: not available, mixture made of three parts")
    for name, shift in dataset.natural.items():
        which = f"{name} ({call(shift)})"
        missing = sorted(set(range(len(shift.classes))) - set(shift.labels.tolist()))
        if missing:
            notes.append(f"{which}: has no {', '.join(clean(shift.classes[c]) for c in missing)}")
        if dataset.repeats[name].any():
            notes.append(f"{which}: {dataset.repeats[name].sum()} images are in {call(dataset.pool)} too and left out")
        without = [str(k) for k, stream in enumerate(tests[name]) if stream is None]
        if without:
            notes.append(f"{which}: no such test for client {', '.join(without)}, mixture made of the rest")
    lengths = zip(tests["original"], tests["ooc"], strict=True)
    short = [str(k) for k, (own, other) in enumerate(lengths) if own and other and len(other) < len(own)]
    if short:
        notes.append(f"ooc: shorter than original for client {', '.join(short)}, for the others have no more test rows")
    for part in ("train", "test"):
        if getattr(settings, f"{part}_fraction") < 1:
            notes.append(f"{part}: {getattr(settings, f'{part}_fraction'):g} of each client's rows")
    unused = len(dataset.pool) - sum(len(split.rows) for split in federation.clients)
    if unused and settings.train_fraction == settings.test_fraction == 1:
        notes.append(f"{unused} rows left over, so that all clients hold the same number")
    return notes


def _describe_pool(pool: Pool) -> dict[str, Any]:
    shape = list(pool.x.shape[1:])
    return {"name": pool.identity, "classes": list(pool.classes), "shape": shape, **_describe_rows(pool.labels)}


def _describe_rows(*lists: np.ndarray) -> dict[str, Any]:
    return {"rows": len(lists[0]), "sha256": content_hash(*lists)}
