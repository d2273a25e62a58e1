"""Experiments on Ray: workers train and test, and this process writes the results to disk.

Each worker is an actor with a GPU or some cores of its own. It keeps federations and compiled programs between tasks;
Ray would end the process of a plain GPU task after each call. Tasks are the trainings and tests that have no result on
disk yet. If a worker is lost, another one runs its task again, from the last checkpoint that was sent.
"""

from __future__ import annotations

import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from ..config import Config
from ..data.pool import Dataset
from ..engine.remote import RemoteEngine
from ..errors import Failed, InputError
from ..fingerprint import hash_package
from ..methods.base import Method
from ..progress.events import Event, WaitEvent, WorkEvent, tell
from .actors import Slot, last_line, open_mailbox, start_actor
from .cluster import LOCAL, Share, connected, count_places, finish_within, list_machines, size_workers
from .jobs import Batch, Ledger
from .transfer import Payload, WorkerInfo, identify, pack
from .work import Work
from .workers import Outcome, use_workers

PULSE = 0.2  # seconds to wait for news
PATIENCE = 2.0  # seconds in which an idle worker answers
LOOK = 5.0  # seconds between looks at the machines of the cluster
MOST_LOSSES = 3  # workers that may be lost during one task
MOST_SHARED = 8  # datasets and settings that Ray keeps for tasks to come
CLOSING = 5.0  # seconds that idle workers have to remove their folders


@contextmanager
def workers_on_ray(address: str = LOCAL, cpus: int | None = None) -> Iterator[RayWorkers]:
    """Within the block, `fedthe.run` computes on Ray: `with fedthe.workers_on_ray("auto"): fedthe.run(...)`.

    Args:
        address: "local" starts Ray on this machine, "auto" uses the Ray that runs here, "HOST:PORT" a cluster.
        cpus: cores of each worker; by default as many as keep all of them busy.
    """
    if cpus is not None and (not isinstance(cpus, int) or cpus < 1):
        raise InputError(f"cpus must be a whole number from 1 on, not {cpus!r}.")
    with connected(address) as ray:
        workers = RayWorkers(ray, cpus)
        try:
            with use_workers(workers):
                yield workers
        finally:
            workers.close()


class RayWorkers:
    """Assigns tasks to workers, and writes what they send to disk."""

    def __init__(self, ray: Any, cpus: int | None = None) -> None:
        self._ray, self._asked, self._share = ray, cpus, Share()
        self._slots: list[Slot] = []
        self._engines: dict[tuple[object, ...], RemoteEngine] = {}
        self._how: Config | None = None  # that of the first experiment: engine, device and precision
        self._ledger = Ledger()
        self._names: dict[int, str] = {}  # by the number of a job: the worker that had it last
        self._shared: OrderedDict[str, Any] = OrderedDict()  # by id: references to data and settings
        self._batches = count(1)
        self._upcoming: Iterator[tuple[Mapping[str, Method], Sequence[Work]]] = iter(())
        self._ahead: list[Batch] = []
        self._capacity = 1  # how many workers the cluster has room for
        self._look, self._failed_starts, self._waits = 0.0, 0, False
        self._mailbox = open_mailbox(ray)

    # ---- for a run

    def find_engine(self, config: Config) -> RemoteEngine:
        if config.device.startswith("cuda:"):
            raise InputError(f"on Ray each worker has a GPU of its own; set device=cuda in place of {config.device}.")
        how = _take_how(config)
        if how not in self._engines:
            machines = list_machines(self._ray)
            share = size_workers(machines, config, self._asked)
            if self._how is None:
                self._share, self._capacity = share, count_places(machines, share)
            elif share.gpus != self._share.gpus:
                raise InputError(
                    "workers on Ray use either GPUs or CPUs; use another workers_on_ray block, or another command, for "
                    "the other ones."
                )
            self._engines[how] = self._describe(config)
            self._how = self._how or config
        return self._engines[how]

    def compute(self, methods: Mapping[str, Method], works: Sequence[Work]) -> Iterator[Outcome]:
        batch = self._open_batch(methods, works)
        try:
            while batch.is_open:
                outcomes = list(batch.settle(self._capacity))
                yield from outcomes
                if not outcomes:
                    self._step()
            self._read_mail()
        finally:
            over = [batch, *(each for each in self._ahead if each.trainings <= batch.trainings)]
            for each in over:
                self._drop(each)
            self._ahead = [each for each in self._ahead if each not in over]
            self._ledger.forget(batch.paths)

    def _drop(self, batch: Batch) -> None:
        """Close its jobs, but those that a worker is doing."""
        running = {slot.job for slot in self._slots}
        for job in batch.jobs:
            self._ledger.drop(job, job in running)

    def look_ahead(self, experiments: Iterator[tuple[Mapping[str, Method], Sequence[Work]]]) -> None:
        """Experiments whose tasks workers may take while those before them leave workers idle."""
        self._upcoming = experiments

    def close(self) -> None:
        """End the workers. What they sent stays; the rest is left to the next run."""
        with suppress(Exception):
            self._read_mail(CLOSING)
        for slot in self._slots:
            with suppress(Exception):  # such as that of a worker that was lost
                if slot.job is not None and self._ray.wait([slot.call], timeout=0)[0]:
                    self._ledger.file(slot.job, self._ray.get(slot.call))
                    slot.call = None
        with suppress(Exception):
            idle = [slot.actor.close.remote() for slot in self._slots if slot.call is None]
            self._ray.wait(idle, num_returns=len(idle), timeout=CLOSING)
        finish_within(CLOSING, self._kill_actors)
        for job in self._ledger.jobs:
            job.locks.close()

    def _kill_actors(self) -> None:
        for actor in (*(slot.actor for slot in self._slots), self._mailbox):
            with suppress(Exception):
                self._ray.kill(actor)

    def _open_batch(self, methods: Mapping[str, Method], works: Sequence[Work]) -> Batch:
        return Batch(self._ledger, next(self._batches), methods, works, self._refer_to)

    def _refer_to(self, work: Work) -> tuple[Any, Any]:
        """Ray's references to the settings and to the data of a work, the same for all its seeds."""
        data = work.federation.source
        id = identify(data)
        payload = pack(replace(work.config, seeds=(0,), out=None), id)
        return self._put(payload.id, payload), self._put(id, data)

    def _put(self, id: str, value: Payload | Dataset) -> Any:
        if id not in self._shared:
            self._shared[id] = self._ray.put(value)
        self._shared.move_to_end(id)
        while len(self._shared) > MOST_SHARED:  # jobs have references of their own
            self._shared.popitem(last=False)
        return self._shared[id]

    # ---- workers

    def _start_worker(self, config: Config) -> Slot:
        taken = {slot.name for slot in self._slots}
        name = next(name for name in (f"worker {n}" for n in count(1)) if name not in taken)
        actor = start_actor(self._ray, self._share, self._mailbox)
        slot = Slot(name, actor, config, call=actor.describe.remote(config))
        self._slots.append(slot)
        return slot

    def _start_workers(self) -> None:
        """As many as the cluster has room for and the work needs. Machines may join and leave."""
        now = time.monotonic()
        if now >= self._look:
            self._look = now + LOOK
            self._capacity = count_places(list_machines(self._ray), self._share)
            wanted = min(self._capacity, len(self._ledger.jobs))
            while len(self._slots) < wanted and self._how is not None:
                self._start_worker(self._how)

    def _describe(self, config: Config) -> RemoteEngine:
        """What workers compute with, as the first one says that can take part."""
        refused: list[Any] = []  # their actors hold their places meanwhile, so that others start elsewhere
        try:
            while True:
                slot, about = self._ask(config, self._capacity - len(refused))
                if not (fault := self._find_fault(config, about)):
                    break
                self._slots.remove(slot)
                refused.append(slot.actor)
                if about.refused or len(refused) >= self._capacity:
                    raise InputError(fault)
                warnings.warn(f"a worker is left out: {fault}", stacklevel=2)
        finally:
            for actor in refused:
                with suppress(Exception):
                    self._ray.kill(actor)
        slot.pid = about.pid
        return RemoteEngine(getattr(torch, about.dtype.rpartition(".")[2]), about.together, about.environment)

    def _ask(self, config: Config, places: int) -> tuple[Slot, WorkerInfo]:
        """An idle worker, or a new one if there are places left, and what it computes with."""
        while (slot := next(iter(self._find_idle()), None)) is None and len(self._slots) >= places:
            self._await_calls()  # those of an earlier experiment that was stopped
        slot = slot or self._start_worker(config)
        call, began = slot.call or slot.actor.describe.remote(config), time.monotonic()
        while not self._ray.wait([call], timeout=PULSE)[0]:
            if time.monotonic() - began > LOOK:
                tell(WorkEvent("waiting for a worker of Ray", done=0, total=1))
        try:
            about: WorkerInfo = self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            self._end(slot)
            raise _refuse_start(error) from None
        slot.call = None
        return slot, about

    def _find_fault(self, config: Config, about: WorkerInfo) -> str:
        """Why a worker cannot take part, or would compute other numbers than the others; empty if it can."""
        if about.refused:
            return about.refused
        if about.code != hash_package():
            return "a worker has another fedthe than this process; install the same version everywhere."
        for how, engine in self._engines.items():
            one, other = engine.environment["torch"], about.environment["torch"]
            if one != other:
                return f"workers have torch {one} and {other}; install the same version everywhere."
            if how == _take_how(config) and str(engine.dtype) != about.dtype:
                return f"workers compute in {engine.dtype} and {about.dtype}; set precision=float32."
        return ""

    def _end(self, slot: Slot) -> None:
        self._slots.remove(slot)
        with suppress(Exception):
            self._ray.kill(slot.actor)

    # ---- the loop of a run

    def _step(self) -> None:
        """Read progress, assign tasks to idle workers, and wait a moment for results."""
        self._read_mail()
        self._start_workers()
        self._plan_ahead()
        self._assign()
        self._await_calls()

    def _await_calls(self) -> None:
        """Wait a moment for workers, and take what those that are ready have done."""
        calls = [slot.call for slot in self._slots if slot.call is not None]
        if not calls:
            time.sleep(PULSE)
            return
        for call in self._ray.wait(calls, timeout=PULSE)[0]:
            self._finish_call(next(slot for slot in self._slots if slot.call == call))

    def _read_mail(self, patience: float | None = None) -> None:
        running = {slot.job.number: slot.job for slot in self._slots if slot.job}
        try:
            mail = self._ray.get(self._mailbox.take.remote(), timeout=patience)
        except self._ray.exceptions.RayActorError:  # Ray starts it again; progress is lost, and no result
            return
        for number, message in mail:
            if isinstance(message, Event):
                tell(replace(message, worker=self._names[number]))
            elif number in running:  # else its result has already arrived
                running[number].write(message)

    def _assign(self) -> None:
        running = {slot.job for slot in self._slots if slot.job}
        waiting = sorted(self._ledger.jobs - running, key=lambda job: (job.rank, job.number))
        idle = self._find_idle() if waiting else []
        for job in waiting:
            if not idle:
                return
            if not job.hold():
                continue  # another process is working on it
            if job.is_filed:  # by that process
                self._ledger.close(job)
                continue
            try:
                task = job.make_task()
            except (InputError, Failed) as error:  # such as a damaged checkpoint
                self._ledger.give_up(job, error)
                continue
            slot = idle.pop(0)
            slot.call = slot.actor.do.remote(task, *job.references)
            slot.job, self._names[job.number] = job, slot.name
        waits = bool(waiting and idle) and len(idle) == len(self._slots)
        if waits and not self._waits:
            tell(WaitEvent(done=0, total=1))
        self._waits = waits

    def _find_idle(self) -> list[Slot]:
        """Idle workers that are there: one whose machine left costs no task a try."""
        idle = {slot.actor.ping.remote(): slot for slot in self._slots if slot.call is None}
        found = []
        for call in self._ray.wait([*idle], num_returns=len(idle), timeout=PATIENCE)[0] if idle else []:
            try:
                self._ray.get(call)
                found.append(idle[call])
            except self._ray.exceptions.RayError:
                self._slots.remove(idle[call])
                self._look = 0.0
        return found

    def _plan_ahead(self) -> None:
        """Take tasks of later experiments if there is nothing else to do."""
        if len(self._ledger.jobs) < self._capacity:
            planned = next(self._upcoming, None)
            if planned is not None:
                with suppress(Exception):  # its own turn will say so
                    self._ahead.append(self._open_batch(*planned))
        for batch in [*self._ahead]:
            try:
                deque(batch.settle(self._capacity), maxlen=0)
                if batch.is_open:
                    continue
            except Exception:  # its own turn will say so
                self._drop(batch)
            self._ahead.remove(batch)

    def _finish_call(self, slot: Slot) -> None:
        errors = self._ray.exceptions
        try:
            result = self._ray.get(slot.call)
        except errors.RayTaskError as error:  # a bug in our own code
            if slot.job is None:
                self._end(slot)
                raise
            self._ledger.give_up(slot.job, error)  # it may belong to another experiment
        except errors.RayError as error:
            self._replace_lost(slot, error)
            return
        else:
            if isinstance(result, WorkerInfo):
                if fault := self._find_fault(slot.config, result):
                    self._end(slot)  # it must do no task of a later experiment
                    self._count_failed_start(fault, InputError(fault))
                else:
                    slot.pid, self._failed_starts = result.pid, 0
            elif slot.job is not None:
                self._ledger.file(slot.job, result)
        slot.call = slot.job = None  # not before its result is filed: Ctrl-C must not lose it

    def _count_failed_start(self, why: str, refusal: InputError) -> None:
        """A worker cannot take part. Others go on without it; if there are none, a few failed starts end the run."""
        self._failed_starts += 1
        self._look = time.monotonic() + LOOK * self._failed_starts
        if not self._slots and self._failed_starts >= MOST_LOSSES:
            raise refusal
        warnings.warn(f"a worker is left out: {why}", stacklevel=2)

    def _replace_lost(self, slot: Slot, error: Exception) -> None:
        """A worker is gone. Another one runs its task."""
        self._read_mail()  # its last checkpoint may be there
        job = slot.job
        self._end(slot)  # it may be alive, if only its result was lost
        if job is None:
            self._count_failed_start(last_line(error), _refuse_start(error))
            return
        self._look = 0.0
        job.locks.close()
        job.losses += 1
        why = last_line(error)
        if job.losses >= MOST_LOSSES:
            self._ledger.give_up(job, Failed(f"{job.describe()}: {job.losses} workers were lost, the last by: {why}"))
            return
        warnings.warn(f"{slot.name} was lost; {job.describe()} is run again on another.", stacklevel=2)


def _take_how(config: Config) -> tuple[object, ...]:
    """The settings that an engine depends on."""
    return config.engine, config.device, config.precision, config.threads


def _refuse_start(error: Exception) -> InputError:
    return InputError(
        f"no worker can start on Ray ({last_line(error)}); install the same version of fedthe on all its machines."
    )
