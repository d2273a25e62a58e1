"""What a run has on Ray: an actor for each worker, and a mailbox for what they send while they work."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from ..config import Config
from ..progress.events import Event
from ..text import flatten
from .cluster import Share
from .jobs import Job
from .transfer import Files
from .worker import Worker

MOST_EVENTS = 1000  # of progress in the mailbox


@dataclass(eq=False)
class Slot:
    """A worker, as seen by the run."""

    name: str
    actor: Any
    config: Config  # engine, device and precision
    call: Any = None  # Ray's reference to what it is doing
    job: Job | None = None  # None: it is starting, or idle
    pid: int = 0  # 0: it is starting


class Mailbox:
    """An actor beside the run: holds what workers send until the run takes it."""

    def __init__(self) -> None:
        self._events: deque[tuple[int, Event]] = deque(maxlen=MOST_EVENTS)
        self._files: dict[int, Files] = {}  # by task, the latest

    def put(self, number: int, message: Event | Files) -> None:
        if isinstance(message, Event):
            self._events.append((number, message))
        else:
            self._files[number] = message

    def take(self) -> list[tuple[int, Event | Files]]:
        found: list[tuple[int, Event | Files]] = [*self._files.items(), *self._events]
        self._events.clear()
        self._files.clear()
        return found


class Actor(Worker):
    """A worker whose mail goes to a mailbox."""

    def ping(self) -> None:
        """It answers, so it is there."""

    def __init__(self, threads: int, mailbox: Any) -> None:
        super().__init__(threads, mailbox.put.remote)


def open_mailbox(ray: Any) -> Any:
    """On the run's own machine, so that it lives as long as the run."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(Mailbox).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here).remote()


def start_actor(ray: Any, share: Share, mailbox: Any) -> Any:
    remote = ray.remote(Actor).options(num_cpus=share.cpus, num_gpus=share.gpus)
    return remote.remote(max(1, share.cpus), mailbox)


def last_line(error: Exception) -> str:
    """The last line of what Ray says, which names the cause."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return flatten(lines[-1], 300).rstrip(".")
