"""What the server writes down about a federation after every phase, for `fedthe federate status`."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ... import foreign, store
from ...errors import InputError
from ...foreign import show_path

FILE, OTHER = "status.json", "{}.status.json"  # of the last federation in the folder, and of those before it, by id
IDS = re.compile("[0-9a-f]{16}")
LARGEST = 2**26
MOST_ROUNDS = 1000  # the last ones, which are kept


@dataclass
class Seen:
    """A client, as the server knows it."""

    node: str | None = None
    rows: int | None = None
    round: int | None = None  # the last one that it took part in
    accuracy: float | None = None  # in percent, on its own test split, when it was last asked
    fault: str | None = None  # why it was left out, the last time that it was


@dataclass
class RoundStatus:
    round: int
    loss: float
    clients: list[int]  # that were aggregated
    faults: dict[str, str]  # by client that was left out
    seconds: dict[str, float]  # by phase; mean and slowest: of the clients' own work
    bytes: dict[str, int]  # down to each client, and up from it


@dataclass
class Status:
    id: str
    method: str
    clients: int
    rounds: int
    doing: str = "waiting for clients"
    round: int = 0
    rated: int = 0  # the round after which clients were last asked for their accuracy
    at: float = 0.0  # the time of the last change, in seconds since 1970
    seen: dict[str, Seen] = field(default_factory=dict)  # by client
    history: list[RoundStatus] = field(default_factory=list)

    def of(self, client: int) -> Seen:
        return self.seen.setdefault(str(client), Seen())

    @property
    def accuracy(self) -> float | None:
        """The mean over clients that told theirs."""
        told = [each.accuracy for each in self.seen.values() if each.accuracy is not None]
        return sum(told) / len(told) if told else None

    def write(self, folder: Path) -> None:
        self.at = time.time()
        self.history = self.history[-MOST_ROUNDS:]
        store.write_json(folder / FILE, asdict(self))


def resume(folder: Path, begun: Status, round: int) -> tuple[Status, Status | None]:
    """What an earlier server of the same federation wrote down up to a round; else the status that was begun.

    Also the status of another federation in this folder, if there is one, which goes to a file of its own.
    """
    begun.round, other = round, _find_status(folder / FILE)
    if other is not None and other.id != begun.id and IDS.fullmatch(other.id):
        (folder / FILE).replace(folder / OTHER.format(other.id))
    else:
        other = None
    before = _find_status(folder / FILE) or _find_status(folder / OTHER.format(begun.id))
    if round and before is not None and before.id == begun.id:
        begun.seen, begun.rated = before.seen, before.rated
        begun.history = [each for each in before.history if each.round <= round]
    return begun, other


def _find_status(path: Path) -> Status | None:
    """None also if it is damaged: it is informational only."""
    try:
        return _read_file(path) if path.exists() else None
    except InputError:
        return None


def read_status(folder: Path) -> Status:
    path = folder / FILE
    if not path.exists():
        raise InputError(
            f"{show_path(folder)} has no {FILE}; name the folder of a federation's server, or wait until it has begun."
        )
    return _read_file(path)


def _read_file(path: Path) -> Status:
    with foreign.explain(f"{show_path(path)} is damaged"):
        found: Mapping[str, Any] = json.loads(foreign.read_file(path, LARGEST))
        parts = dict(found)
        parts["seen"] = {client: Seen(**each) for client, each in found["seen"].items()}
        parts["history"] = [RoundStatus(**each) for each in found["history"]]
        return Status(**parts)
