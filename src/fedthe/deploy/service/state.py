"""What all requests work with."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...errors import InputError
from ...text import clean
from ..bundle import Bundle
from . import shapes
from .batching import Batcher, Busy, Missing, Reused
from .limits import Limits, Rate
from .metrics import Metrics
from .store import KeyTaken, NewStream, Store, StreamEntry

REUSED = "this Idempotency-Key was used for another stream; use a new one."
REMEMBERED = 100_000  # streams whose owners are in memory


@dataclass(frozen=True)
class Service:
    bundles: Mapping[str, Bundle]  # by name
    store: Store
    batcher: Batcher
    limits: Limits
    tokens: bool  # whether callers need one
    rate: Rate
    metrics: Metrics = field(default_factory=Metrics)
    owners: dict[str, tuple[int | None, str]] = field(default_factory=dict)  # by stream: its token, and its bundle's id

    def remember(self, stream: str, owner: int | None, bundle: str) -> None:
        if len(self.owners) >= REMEMBERED:
            self.owners.clear()
        self.owners[stream] = owner, bundle

    def begin(self, wanted: shapes.NewStream, owner: int | None, key: str | None) -> StreamEntry:
        """A new stream, or that which its owner began with the same key. To be called between batches."""
        digest = hashlib.sha256(wanted.model_dump_json().encode()).hexdigest() if key else None
        found = self.store.find_stream(owner, key) if key else None
        if found is None:
            try:
                return self._create(wanted, owner, key, digest)
            except KeyTaken:  # by another process, just now
                raise Busy("another process begins the same stream; try again") from None
        if found.digest != digest:
            raise Reused(REUSED)
        return found

    def _create(self, wanted: shapes.NewStream, owner: int | None, key: str | None, digest: str | None) -> StreamEntry:
        _, bundle = self.pick(wanted.bundle)
        if len(self.store.list_streams(owner)) >= self.limits.streams:
            raise InputError(f"there are {self.limits.streams} streams already; delete some.")
        id, online = f"s_{secrets.token_urlsafe(12)}", self.batcher.begin(bundle.id, wanted.name)
        return self.store.create_stream(NewStream(id, owner, bundle.id, wanted.name, online.state(), key, digest))

    def pick(self, name: str | None) -> tuple[str, Bundle]:
        """A bundle by its name, which may be left out where there is one."""
        if name is None and len(self.bundles) > 1:
            raise InputError(f"name a bundle: {clean(', '.join(self.bundles), 300)}.")
        name = next(iter(self.bundles)) if name is None else name
        if name not in self.bundles:
            raise Missing("there is no such bundle.")
        return name, self.bundles[name]

    def name_of(self, id: str) -> str:
        return next((name for name, bundle in self.bundles.items() if bundle.id == id), "")
