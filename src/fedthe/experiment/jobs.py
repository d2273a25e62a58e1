"""What is left of experiments, as jobs for workers: trainings and tests that are not filed yet."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from .. import records, store
from ..engine.clients import BLOCK
from ..errors import Failed, InputError, RemoteFailure
from ..methods.base import Method
from .training import group_by_training
from .transfer import FOLDERS, LARGEST_FILE, Files, Task, TaskResult, read_files, write_files
from .work import Work, split
from .workers import Answered, Outcome, Trained

_numbers = count(1)


@dataclass(eq=False)
class Job:
    """A training of methods side by side on some seeds, or a test of one of them."""

    rank: tuple[int, int]  # the lowest goes first, and of equals the earliest
    references: tuple[Any, Any]  # Ray's references to settings and data
    works: Sequence[Work]
    trainings: Mapping[Method, Sequence[str]]  # with the methods that deploy them
    tested: str | None
    paths: Sequence[Path]  # what it leaves, if it does not fail
    locks: ExitStack = field(default_factory=ExitStack)
    losses: int = 0
    dropped: bool = False  # its experiment was stopped while a worker was doing it
    number: int = field(default_factory=lambda: next(_numbers))

    @property
    def folder(self) -> Path:
        return self.works[0].folder

    def hold(self) -> bool:
        """Lock its files. False if another process is working on one of them."""
        if all(self.locks.enter_context(store.hold(each.with_suffix(".lock"), wait=False)) for each in self.paths):
            return True
        self.locks.close()
        return False

    @property
    def is_filed(self) -> bool:
        return all(map(self.has_left, self.paths))

    def has_left(self, path: Path) -> bool:
        if self.tested is not None:
            return self.works[0].find_answer(self.tested, path) is not None
        return records.read_round(path) == self.works[0].config.rounds

    def make_task(self) -> Task:
        names = []
        for work in self.works:
            for training in self.trainings:
                path = work.place_of(training, work.config.rounds)
                if self.tested is None:
                    work.find_begun(training, path)  # or copies a shorter one
                names += [self.name_of(path.with_suffix(suffix)) for suffix in FOLDERS["trainings"]]
        return Task(
            self.number,
            tuple(work.run.seed for work in self.works),
            tuple(map(tuple, self.trainings.values())),
            self.tested,
            read_files(self.folder, names),
            tuple(map(self.name_of, self.paths)),
        )

    def write(self, files: Files) -> None:
        """File what a worker sent. Checkpoints to keep are those of another training, which a process may be doing."""
        held = {path.stem for path in self.paths}
        kept = {Path(name).stem for name in files if name.startswith("trainings/")} - held
        write_files(self.folder, {name: each for name, each in files.items() if Path(name).stem not in kept})
        for stem in sorted(kept):
            with store.hold(self.folder / "trainings" / f"{stem}.lock", wait=False) as ours:
                if ours:
                    write_files(self.folder, {name: each for name, each in files.items() if Path(name).stem == stem})

    def name_of(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def describe(self) -> str:
        seeds = ", ".join(str(work.run.seed) for work in self.works)
        what = (
            f"testing {self.tested}"
            if self.tested
            else f"training {' and '.join(s[0] for s in self.trainings.values())}"
        )
        return f"{what}, seed {seeds}"


class Ledger:
    """Jobs that are open, and what came of those that are not, by the files that they leave."""

    def __init__(self) -> None:
        self._jobs: dict[Path, Job] = {}
        self._failures: dict[Path, Failed] = {}
        self._errors: dict[Path, Exception] = {}
        self._filed: set[Path] = set()

    @property
    def jobs(self) -> set[Job]:
        return set(self._jobs.values())

    def is_open(self, path: Path) -> bool:
        return path in self._jobs

    def find(self, paths: Iterable[Path]) -> set[Job]:
        """The open jobs that write any of these files."""
        return {self._jobs[path] for path in paths if path in self._jobs}

    def find_failure(self, path: Path) -> Failed | None:
        return self._failures.get(path)

    def has_filed(self, path: Path) -> bool:
        """Whether the file came from a worker."""
        return path in self._filed

    def add(self, job: Job) -> None:
        self._jobs |= dict.fromkeys(job.paths, job)

    def file(self, job: Job, done: TaskResult) -> None:
        """Write what a worker sent, and close the job."""

        def name_ours(sentence: str) -> str:
            """With the folder of the run in place of the worker's."""
            return sentence.replace(done.folder, str(job.folder)) if done.folder else sentence

        for text in done.warnings:
            warnings.warn(name_ours(text), stacklevel=2)
        if done.refused:
            self.give_up(job, InputError(name_ours(done.refused)))
            return
        job.write(done.files)
        for name, (why, told) in done.failures.items():
            self._failures[job.folder / name] = RemoteFailure(name_ours(why), told)
        for path in job.paths:
            if path not in self._failures and not job.has_left(path):
                self.give_up(job, Failed(f"{job.describe()}: {path} did not come back from its worker"))
                return
        self._filed |= {*job.paths}
        self.close(job)

    def give_up(self, job: Job, error: Exception) -> None:
        """Close the job. The error stops the experiment that it belongs to, and no other."""
        self._errors |= dict.fromkeys(job.paths, error)
        self.close(job)

    def raise_error(self, path: Path) -> None:
        if path in self._errors:
            raise self._errors[path]

    def forget(self, paths: Iterable[Path]) -> None:
        """What came of them, so that another run tries again what failed, and reads what is filed."""
        for path in paths:
            self._errors.pop(path, None)
            self._failures.pop(path, None)
            self._filed.discard(path)

    def drop(self, job: Job, running: bool) -> None:
        """Nobody waits for it any more. If a worker is doing it, what is filed counts, but not how it failed."""
        job.dropped = running
        if not running:
            self.close(job)

    def close(self, job: Job) -> None:
        job.locks.close()
        for path in job.paths:
            self._jobs.pop(path, None)
        if job.dropped:
            self.forget(job.paths)


@dataclass(frozen=True, eq=False)
class _Item:
    """A training on one seed, or a test after it."""

    training: Method
    work: Work
    path: Path
    tested: str | None = None


class Batch:
    """What is left of an experiment."""

    def __init__(
        self,
        ledger: Ledger,
        rank: int,
        methods: Mapping[str, Method],
        works: Sequence[Work],
        share: Callable[[Work], tuple[Any, Any]],
    ) -> None:
        """rank: the lowest goes first. share: makes Ray's references to the settings and the data of a work."""
        self._ledger, self._rank, self._methods, self._works, self._share = ledger, rank, methods, works, share
        self._served = group_by_training(methods)
        _check_sizes(self._served, works)
        self._references: tuple[Any, Any] | None = None
        rounds = works[0].config.rounds
        self._open = [_Item(each, work, work.place_of(each, rounds)) for each in self._served for work in works]
        self.trainings = frozenset(item.path for item in self._open)
        self.paths = {*self.trainings}  # of all files that it is about; grows by those of tests

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    @property
    def jobs(self) -> set[Job]:
        return self._ledger.find(item.path for item in self._open)

    def settle(self, places: int) -> Iterator[Outcome]:
        """Yield what has arrived or was on disk already; make jobs of what is left.

        places: how many workers there is room for.
        """
        fresh = [each for each in self._open if not self._ledger.is_open(each.path)]
        for item in fresh:  # grows by the tests of trainings
            self._ledger.raise_error(item.path)
            piece = self._find(item) if item.tested is None else self._find_answer(item, item.tested)
            if piece is not None:
                self._open.remove(item)
                if isinstance(piece, Trained) and piece.failed is None:
                    tests = [self._make_test(item, name) for name in piece.served]
                    self._open += tests
                    self.paths |= {each.path for each in tests}
                    fresh += [each for each in tests if not self._ledger.is_open(each.path)]
                yield piece
        self._plan_trainings(places)
        for item in self._open:
            if item.tested is not None and not self._ledger.is_open(item.path):
                self._add_job(1, [item])

    def _add_job(self, rank: int, items: Sequence[_Item]) -> None:
        self._references = self._references or self._share(self._works[0])
        trainings = {each: [*self._served[each]] for each in dict.fromkeys(item.training for item in items)}
        works = {item.work.run.seed: item.work for item in items}
        paths = [item.path for item in items]
        job = Job((self._rank, rank), self._references, [*works.values()], trainings, items[0].tested, paths)
        self._ledger.add(job)

    def _make_test(self, item: _Item, name: str) -> _Item:
        path = item.work.place_of_answer(name, self._methods[name], item.work.key_of(item.training))
        return replace(item, path=path, tested=name)

    def _find(self, item: _Item) -> Trained | None:
        served, failed = tuple(self._served[item.training]), self._ledger.find_failure(item.path)
        if failed is not None:
            return Trained(item.training, served, item.work, failed=failed)
        if not _is_trained(item.work, item.training):
            return None
        return Trained(item.training, served, item.work, tuple(records.read_skipped(item.path)))

    def _find_answer(self, item: _Item, name: str) -> Answered | None:
        failed = self._ledger.find_failure(item.path)
        if failed is not None:
            return Answered(name, item.work, failed=failed)
        found = item.work.find_answer(name, item.path)
        reused = not self._ledger.has_filed(item.path)
        return None if found is None else Answered(name, item.work, item.path.stem, found, reused)

    def _plan_trainings(self, places: int) -> None:
        """Trainings with the same core go side by side, and so do seeds, as long as all workers have something."""
        left = {(each.training, each.work.run.seed): each for each in self._open if each.tested is None}
        left = {key: each for key, each in left.items() if not self._ledger.is_open(each.path)}
        cores: dict[Method, list[Method]] = {}
        for training in dict.fromkeys(training for training, _ in left):
            cores.setdefault(training.core, []).append(training)
        if not cores:
            return
        fair = math.ceil(len(cores) * len(self._works) / (2 * places))
        for group in cores.values():
            alike: dict[tuple[Method, ...], list[Work]] = {}  # by what is left of the group: a job trains all of it
            for work in self._works:
                alike.setdefault(tuple(t for t in group if (t, work.run.seed) in left), []).append(work)
            for trainings, works in alike.items():
                for some in split(works, min(works[0].engine.together, fair)) if trainings else []:
                    self._add_job(0, [left[t, work.run.seed] for work in some for t in trainings])


def _check_sizes(trainings: Iterable[Method], works: Sequence[Work]) -> None:
    """Refuse now what could not be sent once it is trained."""
    clients = max(len(work.run.shards) for work in works)
    size = 0
    for training in trainings:
        with suppress(Failed, InputError):  # its worker will say so
            size = max(size, clients * (training.state_bytes + BLOCK) if training.state_bytes else 0)
    if size > LARGEST_FILE:
        raise InputError(
            f"what {clients} clients keep takes {size / 2**30:.0f} GiB, more than workers can send; run it without Ray."
        )


def _is_trained(work: Work, training: Method) -> bool:
    return work.config.rounds == 0 or work.has(training)
