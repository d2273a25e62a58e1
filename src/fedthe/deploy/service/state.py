"""What all requests work with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...errors import InputError
from ...text import clean
from ..bundle import Bundle
from .batching import Batcher, Missing
from .limits import Limits, Rate
from .metrics import Metrics
from .store import Store

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
