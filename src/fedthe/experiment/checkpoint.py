"""The files of one training."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import records, store
from ..engine.visit import Progress
from ..errors import Damaged


@dataclass(frozen=True)
class Checkpoint:
    """The files of a training: its state, and facts about it."""

    path: Path
    about: Mapping[str, Any]

    @property
    def facts(self) -> Path:
        return self.path.with_suffix(".json")

    @property
    def seconds(self) -> float:
        """Training time so far; 0 where unknown."""
        try:
            return float((store.read_sealed(self.facts) or {}).get("seconds", 0.0))
        except Damaged as error:
            warnings.warn(f"{error} How long the training took so far is not known.", stacklevel=2)
            self._note(records.read_round(self.path), 0.0)
            return 0.0

    def save(self, reached: Progress, seconds: float) -> None:
        records.save_progress(self.path, reached)
        self._note(reached.round, seconds)

    def _note(self, rounds: int, seconds: float) -> None:
        store.write_sealed(self.facts, {**self.about, "rounds": rounds, "seconds": seconds})
