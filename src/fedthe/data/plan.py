"""The federation: what each client trains on and is tested on, and a manifest that identifies it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from .feature_shift import FEATURE_SHIFTS, FeatureShift, shift_features
from .notes import write_notes
from .numbers import read_number, read_whole
from .partition import PARTITIONS, USE_DIRICHLET, Partition, Split, check_dirichlet, partition, split_rows
from .pool import Dataset, Pool
from .shifts import CLEAN, CORRUPTED, NATURAL, Stream

OWN_PARTS = (("original", CLEAN), ("corrupted", CORRUPTED))  # tests on the same rows

if TYPE_CHECKING:
    from pathlib import Path

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
    shards: int = 2  # of each client, in the partition "shards"
    feature_shift: FeatureShift = "none"  # what is done to all pictures of a client, in its own way
    feature_severity: int = 3  # of the corruption that a client has as its feature shift

    def __post_init__(self) -> None:
        for name in ("clients", "seed", "severity", "shards", "feature_severity"):
            object.__setattr__(self, name, read_whole(name, getattr(self, name)))
        for name in ("dirichlet", "train_fraction", "test_fraction"):
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
        if not 0 <= self.seed < 2**31:
            raise InputError(f"seed must be from 0 to {2**31 - 1}, but it is {self.seed}.")

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
        return told


@dataclass(frozen=True)
class Federation:
    """Clients with frozen splits, and the test distributions that each client meets after deployment.

    `tests[name][k]` is client k's stream under that distribution, or None if the client has none: a client that holds
    no class of the natural shift is not tested on it.

    `Federation.from_clients` makes one of data that clients hold already, `fedthe.build` deals a dataset to clients.
    """

    dataset: Dataset
    settings: Settings
    clients: tuple[Split, ...]
    tests: Mapping[str, tuple[Stream | None, ...]]
    unshifted: Dataset | None = field(default=None, repr=False)  # the dataset before a feature shift between clients

    def __repr__(self) -> str:
        kind = {"u": "pictures", "f": "samples", "i": "samples of tokens"}[self.pool.x.dtype.kind]
        tests = ", ".join(f"{name} ({sum(s is not None for s in streams)})" for name, streams in self.tests.items())
        return (
            f"<Federation {clean(self.pool.name)}: {len(self.pool):,} {kind} {list(self.pool.x.shape[1:])}, "
            f"{len(self.pool.classes)} classes, {len(self.clients)} clients; tests (clients): {tests}>"
        )

    @property
    def source(self) -> Dataset:
        """What it was built from, and what federations of other seeds are built from."""
        return self.unshifted or self.dataset

    @classmethod
    def from_clients(
        cls,
        clients: Sequence[Any],
        *,
        classes: Sequence[str] | None = None,
        tests: Mapping[str, Sequence[Any]] | None = None,
        name: str = "mine",
        seed: int = 0,
    ) -> Federation:
        """A federation of data that clients hold already.

        Args:
            clients: for each client `(x, y)`, split 60/20/20 by the seed of a run, or
                `{"train": (x, y), "val": (x, y), "test": (x, y)}`. x: uint8 pictures [n, h, w] or [n, h, w, 1 or 3],
                float features or integer tokens [n, ...]; y: whole numbers from 0 on, or names of classes; NumPy or
                torch. In place of (x, y): a torch Dataset, or an object with columns, such as one of Hugging Face.
            classes: the names of the classes; by default "0", "1", ..., or the sorted names in y.
            tests: further test distributions by name, with (x, y), or None, for each client.
            name: of the data, in notes and reports.
            seed: of this federation's splits and tests; a run has seeds of its own.
        """
        from .own import hold

        dataset = hold(clients, classes, tests or {}, name)
        return build(dataset, Settings(len(dataset.clients), seed=seed, partition="given"))

    def save(self, path: Path | str) -> Path:
        """Write who holds what to an npz file; `dataset=npz:PATH` reads it again. No pickle is in it."""
        from .own import save

        return save(self, path)

    @property
    def pool(self) -> Pool:
        return self.dataset.pool

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know, such as a test distribution that could not be built."""
        return tuple(write_notes(self, lambda pool: clean(pool.name)))

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
        """The samples of a stream [n, ...], in the type of the pool: uint8 [n, h, w, c] for pictures."""
        out = np.empty((len(stream), *self.pool.x.shape[1:]), dtype=self.pool.x.dtype)
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
        names = [{"name": each.name} for each in self.dataset.clients] if self.settings.partition == "given" else ()
        corruptions = {"corruptions": _describe_rows(self.test_rows, self.corruptions)} if self.pool.is_pictures else {}
        return {
            "format": 1,
            "settings": self.settings.describe() | {"frost": self.frost_digest},
            "pool": _describe_pool(self.pool),
            "natural": {name: _describe_pool(shift) for name, shift in self.dataset.natural.items()},
            **corruptions,
            "clients": [
                {
                    **(names[k] if names else {}),
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
            "notes": write_notes(self, attrgetter("identity")),
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
    """Deal the pool to clients, unless they hold it already, and build every test distribution.

    No row is in two splits.
    """
    s, labels = settings, dataset.pool.labels
    if s.partition == "given":
        splits = _split_held(dataset, s)
    else:
        splits = partition(labels, s.clients, s.dirichlet, s.seed, s.partition, s.shards)
    parts = (("train", s.train_fraction), ("test", s.test_fraction))
    splits = [
        replace(split, **{part: _some(getattr(split, part), share, (s.seed, part, k), s) for part, share in parts})
        for k, split in enumerate(splits)
    ]
    return lay_out(dataset, settings, splits)


def _split_held(dataset: Dataset, s: Settings) -> list[Split]:
    if not dataset.clients:
        raise InputError(f"{clean(dataset.pool.name)} does not say which client holds which rows; deal them instead.")
    if len(dataset.clients) != s.clients:
        count = len(dataset.clients)
        raise InputError(f"{clean(dataset.pool.name)} has {count} clients, not {s.clients}; set clients={count}.")
    held = [each.rows for each in dataset.clients]
    return [rows if isinstance(rows, Split) else split_rows(rows, s.seed, k) for k, rows in enumerate(held)]


def lay_out(dataset: Dataset, settings: Settings, splits: list[Split]) -> Federation:
    """The federation of clients that hold these rows."""
    s, pool = settings, dataset.pool
    counts = count_classes(pool, splits)
    dealt = {name: _deal_natural(dataset, name, counts, s) for name in dataset.natural}
    ooc = shifts.draw_out_of_client(splits, s.seed)

    tests: dict[str, list[Stream | None]] = {"original": [shifts.stream(CLEAN, split.test) for split in splits]}
    if pool.is_pictures:
        tests["corrupted"] = [shifts.stream(CORRUPTED, split.test) for split in splits]
    for i, (name, hands) in enumerate(dealt.items()):
        tests[name] = [shifts.stream(NATURAL + i, rows) if len(rows) else None for rows in hands]
    tests["ooc"] = [shifts.stream(CLEAN, rows) for rows in ooc]
    tests["mixture"] = [
        shifts.mix(
            _part_mixture({name: streams[k] for name, streams in tests.items()}, s.seed, k), (s.seed, "mixture", k)
        )
        for k in range(len(splits))
    ]
    if pool.is_pictures:
        tests["corrupted_ooc"] = [shifts.stream(CORRUPTED, rows) for rows in ooc]
    shifted = shift_features(dataset, s, [split.rows for split in splits], dealt)
    before = None if shifted is dataset else dataset
    return Federation(shifted, s, tuple(splits), {name: tuple(streams) for name, streams in tests.items()}, before)


def _part_mixture(tests: Mapping[str, Stream | None], seed: int, k: int) -> list[Stream]:
    """What client k's mixture is drawn from: its other tests, where no row is both clean and corrupted."""
    parts = {name: stream for name, stream in tests.items() if stream is not None}
    if "corrupted" in parts:
        halves = shifts.halve(parts["original"].rows, (seed, "mixture", k, "halves"))
        parts |= {name: shifts.stream(source, rows) for (name, source), rows in zip(OWN_PARTS, halves, strict=True)}
    return list(parts.values())


def _deal_natural(dataset: Dataset, name: str, counts: np.ndarray, s: Settings) -> list[np.ndarray]:
    """Each client's rows of a natural shift: those it holds, or a share in its own class mix."""
    shift, repeated = dataset.natural[name], dataset.repeats[name]
    if not shift.is_pictures:  # short texts and coarse measurements repeat without being the same sample
        repeated = np.zeros_like(repeated)
    if s.partition == "given" and any(name in each.tests for each in dataset.clients):
        held = [each.tests.get(name, np.zeros(0, dtype=np.int64)) for each in dataset.clients]
        return [rows[~repeated[rows]] for rows in held]
    return shifts.split_natural(np.where(repeated, -1, shift.labels), counts, s.seed, name)


def _some(rows: np.ndarray, fraction: float, key: tuple[int | str, ...], s: Settings) -> np.ndarray:
    """A random `fraction` of the rows, at least one, in their order."""
    count = max(1, round(fraction * len(rows)))
    if s.partition != "given":
        return rows[:count]  # they are in random order
    return np.asarray(rows[np.sort(rng.choose(rng.key(*key, "fraction"), len(rows), count))])


def count_classes(pool: Pool, splits: Sequence[Split]) -> np.ndarray:
    return np.stack([np.bincount(pool.labels[split.rows], minlength=len(pool.classes)) for split in splits])


def _describe_pool(pool: Pool) -> dict[str, Any]:
    shape = list(pool.x.shape[1:])
    return {"name": pool.identity, "classes": list(pool.classes), "shape": shape, **_describe_rows(pool.labels)}


def _describe_rows(*lists: np.ndarray) -> dict[str, Any]:
    return {"rows": len(lists[0]), "sha256": content_hash(*lists)}
