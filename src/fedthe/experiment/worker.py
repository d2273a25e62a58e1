"""A worker: does tasks of a run in a folder of its own, by the functions that a run of one process calls."""

from __future__ import annotations

import copy
import os
import platform
import secrets
import shutil
import tempfile
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from .. import records, store
from ..config import Config
from ..data.pool import Dataset
from ..errors import Failed, InputError, format_traceback
from ..fingerprint import hash_package
from ..foreign import say_error
from ..methods.base import Method
from ..progress.events import Event, TrainEvent, listening
from .training import train_some
from .transfer import (
    Files,
    Payload,
    Task,
    TaskResult,
    WorkerInfo,
    list_files,
    read_files,
    unpack,
    write_files,
)
from .work import Work, pick_engine_of, prepare

Post = Callable[[int, Event | Files], object]  # of a task's number: progress, or a checkpoint on the way
PREFIX = "fedthe-worker-"
MOST_PREPARED = 16  # federations to keep for the next tasks
LARGEST_PREPARED = 2**32  # bytes of their rows; each has a copy on the GPU
PACE = 0.5  # seconds between events of one piece of work
LARGEST_ON_THE_WAY = 2**28  # bytes of checkpoints; larger ones are sent at the end alone


class Worker:
    """Keeps federations and compiled programs from task to task."""

    def __init__(self, threads: int, post: Post) -> None:
        """threads: of torch, which the loop engine gives to as many clients."""
        torch.set_num_threads(threads)
        self._post = post
        self._held = ExitStack()
        self._folder = self._held.enter_context(_folder_of_our_own())
        self._configs: dict[str, Config] = {}
        self._data: tuple[str, Dataset] | None = None
        self._prepared: OrderedDict[tuple[str, int], tuple[dict[str, Method], Work]] = OrderedDict()

    def describe(self, config: Config) -> WorkerInfo:
        """What it computes with under these settings."""
        try:
            engine = pick_engine_of(config)
        except InputError as error:
            return WorkerInfo(refused=f"a worker on {platform.node()} refuses: {error}")
        environment = records.describe_environment(engine)
        return WorkerInfo(str(engine.dtype), engine.together, environment, os.getpid(), hash_package())

    def do(self, task: Task, payload: Payload, dataset: Dataset) -> TaskResult:
        with warnings.catch_warnings(record=True) as heard:
            try:
                done = self._do(task, payload, dataset)
            except (InputError, OSError) as error:
                done = TaskResult(refused=f"a worker on {platform.node()} says: {say_error(error)}.")
            finally:
                shutil.rmtree(self._run, ignore_errors=True)
        return replace(done, warnings=tuple(dict.fromkeys(map(_say_warning, heard))), folder=str(self._run))

    def close(self) -> None:
        """Remove its folder."""
        self._held.close()

    @property
    def _run(self) -> Path:
        return self._folder / "run"

    def _do(self, task: Task, payload: Payload, dataset: Dataset) -> TaskResult:
        write_files(self._run, task.resume)
        failures = {}
        with listening(_Reporter(task, self._run, payload.config["checkpoint_seconds"], self._post)):
            prepared = [self._prepare(payload, dataset, seed) for seed in task.seeds]
            methods, works = prepared[0][0], [work for _, work in prepared]
            served = {methods[names[0]].training: list(names) for names in task.trainings}
            self._check(task, methods, works, list(served))
            if task.tested is None:
                for training, outcomes in train_some(works, served).items():
                    for work, outcome in zip(works, outcomes, strict=True):
                        if isinstance(outcome, Failed):
                            path = work.place_of(training, work.config.rounds)
                            failures[path.relative_to(self._run).as_posix()] = str(outcome), format_traceback(outcome)
                        records.compact_progress(work.place_of(training, work.config.rounds))
            else:
                ((training, names),), (work,) = served.items(), works
                try:
                    reached = work.begin(training, work.checkpoint(training, names))
                    if reached.round != work.config.rounds:
                        raise Failed(f"{names[0]}: its training has {reached.round} of {work.config.rounds} rounds")
                    work.answer(task.tested, methods[task.tested], work.key_of(training), reached, wait=True)
                except Failed as error:
                    failures[task.outputs[0]] = str(error), format_traceback(error)
        names = [name for name in list_files(self._run) if task.tested is None or not name.startswith("trainings/")]
        return TaskResult(_read_new(self._run, names, task), failures)

    def _check(
        self, task: Task, methods: dict[str, Method], works: Sequence[Work], trainings: Sequence[Method]
    ) -> None:
        """Names of files hash what numbers depend on. If ours differ, the numbers would, too."""
        if task.tested is None:
            paths = {work.place_of(each, work.config.rounds) for work in works for each in trainings}
        else:
            key = works[0].key_of(trainings[0])
            paths = {works[0].place_of_answer(task.tested, methods[task.tested], key)}
        if not {path.relative_to(self._run).as_posix() for path in paths} >= set(task.outputs):
            raise InputError(
                f"a worker on {platform.node()} would compute something else: it has another version of fedthe or of a "
                "package that methods come from, or a file was edited since; install the same versions everywhere."
            )

    def _prepare(self, payload: Payload, dataset: Dataset, seed: int) -> tuple[dict[str, Method], Work]:
        key = payload.id, seed
        if key not in self._prepared:
            if payload.id not in self._configs:
                self._configs[payload.id] = unpack(payload, self._folder)
            config = replace(self._configs[payload.id], seeds=(seed,), out=str(self._run))
            if self._data is None or self._data[0] != payload.data:
                self._prepared.clear()
                self._data = payload.data, copy.deepcopy(dataset)  # Ray's arrays are read-only
            methods, (work,) = prepare(config, self._data[1], folder=self._run)
            self._prepared[key] = methods, work
        self._prepared.move_to_end(key)
        most = min(MOST_PREPARED, LARGEST_PREPARED // max(1, dataset.pool.x.nbytes))
        while len(self._prepared) > max(1, most):
            self._prepared.popitem(last=False)
        return self._prepared[key]


class _Reporter:
    """Sends events, but not too often, and checkpoints that were saved since the last one sent."""

    def __init__(self, task: Task, folder: Path, every: float, post: Post) -> None:
        """every: seconds between checkpoints."""
        self._task, self._folder, self._every, self._post = task, folder, every, post
        self._last: Event | None = None
        self._told, self._sent = 0.0, time.monotonic()
        self._state = self._look()

    def __call__(self, event: Event) -> None:
        now, before = time.monotonic(), self._last
        if before is None or event.is_over or not event.continues(before) or now - self._told >= PACE:
            self._post(self._task.number, event)
            self._last, self._told = event, now
        due = isinstance(event, TrainEvent) and not event.is_over and now - self._sent >= self._every
        if due and self._look() != self._state:  # the last one comes with the result
            self._send()
            self._state, self._sent = self._look(), now

    def _look(self) -> dict[str, int]:
        """The checkpoints, and when they were written. Clients' states on file count from the next checkpoint on."""
        names = [name for name in list_files(self._folder) if name.endswith(".safetensors")]
        with suppress(OSError):
            return {name: (self._folder / name).stat().st_mtime_ns for name in names}
        return {}

    def _send(self) -> None:
        names = list_files(self._folder)
        if sum((self._folder / name).stat().st_size for name in names) <= LARGEST_ON_THE_WAY:
            self._post(self._task.number, _read_new(self._folder, names, self._task))


def _read_new(folder: Path, names: Sequence[str], task: Task) -> Files:
    """What the task did not come with. Clients' states on file go with the checkpoint that refers to them."""
    files = read_files(folder, names)
    changed = {name for name, each in files.items() if task.resume.get(name) != each}
    return {name: each for name, each in files.items() if name.replace(".clients", ".safetensors") in changed}


def _say_warning(heard: warnings.WarningMessage) -> str:
    text = str(heard.message)
    return text if issubclass(heard.category, UserWarning) else f"{heard.category.__name__}: {text}"


@contextmanager
def _folder_of_our_own() -> Iterator[Path]:
    """A new folder. Those of workers that were killed are removed: nobody holds their locks."""
    base = Path(tempfile.gettempdir())
    for each in base.glob(f"{PREFIX}*"):
        if each.is_dir():
            with suppress(InputError), store.hold(each.with_suffix(".lock"), wait=False) as gone:
                if gone:
                    shutil.rmtree(each, ignore_errors=True)
    folder = base / f"{PREFIX}{secrets.token_hex(8)}"
    with store.hold(folder.with_suffix(".lock")):
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
