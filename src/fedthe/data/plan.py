"""The federation: what each client trains on and is tested on, and a manifest that identifies it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import rng
from ..corruptions import CORRUPTION_VERSION, corrupt_mixed
from ..errors import InputError
from ..store import cached, content_hash
from ..text import clean
from . import copies
from .feature_shift import shift_features
from .layout import deal_natural, draw_kinds, draw_tests
from .notes import write_notes
from .partition import Split, partition, split_rows
from .pool import Dataset, Pool
from .settings import Settings
from .shifts import CLEAN, CORRUPTED, NATURAL, UNKNOWN, Stream
from .tests import STANDARD
from .unknown import set_aside

__all__ = ["Federation", "Settings", "build", "lay_out"]

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


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
    def unseen(self) -> tuple[int, ...]:
        """The clients that take no part in training, in order."""
        drawn = rng.choose(rng.key(self.settings.seed, "unseen"), len(self.clients), self.settings.count_unseen)
        return tuple(sorted(drawn.tolist()))

    @cached_property
    def test_rows(self) -> np.ndarray:
        """The test rows of all clients, sorted: the rows that have a corrupted copy."""
        return np.sort(np.concatenate([split.test for split in self.clients]))

    @cached_property
    def corruptions(self) -> np.ndarray:
        """Which of the 15 corruptions each of `test_rows` gets [test rows]: one per row, the same in every test."""
        return draw_kinds(self.test_rows, self.settings.seed)

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
            out[here] = (
                self._corrupt(stream.take(here)) if source == CORRUPTED else self._pools[source].x[stream.rows[here]]
            )
        return out

    def _corrupt(self, stream: Stream) -> np.ndarray:
        """Corrupted samples alone: mostly the one copy that each row has, or with other kinds and severities."""
        out = np.empty((len(stream), *self.pool.x.shape[1:]), dtype=self.pool.x.dtype)
        usual = self._is_usual(stream)
        out[usual] = self.corrupted[np.searchsorted(self.test_rows, stream.rows[usual])]
        if not usual.all():
            (codes, images), wanted = self._further, copies.encode(stream.take(~usual))
            if not np.isin(wanted, codes).all():  # a stream that is not among the tests
                codes, images = self._make_copies(np.unique(wanted))
            out[~usual] = images[np.searchsorted(codes, wanted)]
        return out

    def _is_usual(self, stream: Stream) -> np.ndarray:
        kinds = draw_kinds(stream.rows, self.settings.seed)
        return np.asarray((stream.kind == kinds) & (stream.severity == self.settings.severity))

    @cached_property
    def _further(self) -> tuple[np.ndarray, np.ndarray]:
        """Corrupted copies of other kinds or severities that streams hold, by their codes."""
        corrupted = [
            each.take(each.source == CORRUPTED) for of in self.tests.values() for each in of if each is not None
        ]
        codes = np.unique(np.concatenate([copies.encode(each.take(~self._is_usual(each))) for each in corrupted]))
        return self._make_copies(codes)

    def _make_copies(self, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return codes, copies.make(self.pool.x, codes, self.settings.seed, self._frost, self.frost_digest)

    def labels(self, stream: Stream) -> np.ndarray:
        """The true classes of a stream, int64 [n]; -1 of a class that no client holds."""
        out = np.full(len(stream), -1, dtype=np.int64)
        for source in np.unique(stream.source[stream.source != UNKNOWN]):
            here = stream.source == source
            out[here] = self._pools[source].labels[stream.rows[here]]
        return out

    @property
    def _pools(self) -> dict[int, Pool]:
        """By source; corrupted rows keep their labels."""
        natural = {NATURAL + i: shift for i, shift in enumerate(self.dataset.natural.values())}
        unknown = {} if self.dataset.unknown is None else {UNKNOWN: self.dataset.unknown}
        return {CLEAN: self.pool, CORRUPTED: self.pool, **natural, **unknown}

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
            **({} if self.dataset.unknown is None else {"unknown": _describe_pool(self.dataset.unknown)}),
            **corruptions,
            "clients": [
                {
                    **(names[k] if names else {}),
                    "classes": self.class_counts[k].tolist(),
                    "splits": {name: _describe_rows(getattr(split, name)) for name in ("train", "val", "test")},
                    "tests": {
                        name: self._describe_stream(name, stream)
                        for name, streams in self.tests.items()
                        if (stream := streams[k]) is not None
                    },
                }
                for k, split in enumerate(self.clients)
            ],
            "notes": write_notes(self, attrgetter("identity")),
        }

    @property
    def streams(self) -> list[str]:
        """The tests beyond the benchmark's own."""
        return [name for name in self.tests if name not in STANDARD and name not in self.dataset.natural]

    def _describe_stream(self, name: str, stream: Stream) -> dict[str, Any]:
        """Of the benchmark's own tests, rows and sources say it all; their hashes are older than the other columns."""
        more = (stream.segment, stream.origin, stream.kind, stream.severity) if name in self.streams else ()
        return _describe_rows(stream.rows, stream.source, *more)

    @cached_property
    def manifest_hash(self) -> str:
        """Identifies which rows each client holds and is tested on."""
        return content_hash(self.manifest)

    @cached_property
    def training_hash(self) -> str:
        """Identifies all that training sees: the rows each client trains on, and the pixels of the pool."""
        splits = [(client["splits"]["train"], client["splits"]["val"]) for client in self.manifest["clients"]]
        return content_hash(splits, self.pool.digest, *([list(self.unseen)] if self.unseen else []))

    @cached_property
    def content_hash(self) -> str:
        """Identifies the rows and the pixels: results are comparable only if it is equal."""
        pools = [self.pool, *self.dataset.natural.values(), *([self.dataset.unknown] if self.dataset.unknown else [])]
        return content_hash(self.manifest, *(pool.digest for pool in pools))


def build(dataset: Dataset, settings: Settings) -> Federation:
    """Deal the pool to clients, unless they hold it already, and build every test distribution.

    No row is in two splits.
    """
    dataset = set_aside(dataset, settings.unknown)
    if settings.unknown is not None and dataset.unknown is not None:
        settings = replace(settings, unknown=dataset.unknown.name)
    s = settings
    if s.partition == "given":
        splits = _split_held(dataset, s)
    else:
        splits = partition(dataset.pool.labels, s.clients, s.dirichlet, s.seed, s.partition, s.shards)
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
    dealt = deal_natural(dataset, settings, count_classes(dataset.pool, splits))
    tests = draw_tests(dataset, settings, splits, dealt)
    shifted = shift_features(dataset, settings, [split.rows for split in splits], dealt)
    return Federation(shifted, settings, tuple(splits), tests, None if shifted is dataset else dataset)


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
