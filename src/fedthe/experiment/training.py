"""Every federated training that methods need, once: from its checkpoint, or from the start."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from .. import store
from ..config import Config
from ..data.plan import Federation
from ..data.pool import Dataset
from ..engine.train import Outcome, deploy_some, train_together
from ..engine.visit import Engine, Progress, Run
from ..errors import Failed
from ..methods.base import Method
from ..progress.events import Round, TrainEvent, WaitEvent, tell, tell_round
from ..tree import Tree
from .checkpoint import Checkpoint
from .work import Work, prepare_here, split

Served = dict[Method, dict[str, Method]]  # by training: the methods that deploy it, by name


@dataclass(frozen=True)
class Deployed:
    """A method on every client of one seed, after its training."""

    name: str
    method: Method
    federation: Federation
    run: Run
    states: Tree  # [clients, ...]
    engine: Engine
    tests: list[str]

    @property
    def seed(self) -> int:
        return self.run.seed

    def streams(self) -> Iterator[tuple[str, int, np.ndarray, np.ndarray]]:
        """Test, client, images uint8 [n, h, w, c] and labels [n] of every stream."""
        for test in self.tests:
            for k, stream in enumerate(self.federation.tests[test]):
                if stream is not None:
                    yield test, k, self.federation.inputs(stream), self.federation.labels(stream)


def deploy_all(config: Config, dataset: Dataset | None = None) -> Iterator[Deployed]:
    """Every method of an experiment on every seed, trained or taken from its checkpoint, to look inside.

    Where a run only answers, this gives the models themselves.
    """
    for _, served, work, outcome in train_all(*prepare_here(config, dataset)):
        if isinstance(outcome, Failed):
            raise Failed(f"{next(iter(served))}, seed {work.run.seed}: {outcome}")
        for name, method in served.items():
            states = deploy_some(method, work.run, config.training, outcome, work.engine, range(len(work.run.shards)))
            yield Deployed(name, method, work.federation, work.run, states, work.engine, work.tests)


def group_by_training(methods: Mapping[str, Method]) -> Served:
    """Methods by the federated training they deploy, so that it is done once."""
    groups: Served = {}
    for name, method in methods.items():
        groups.setdefault(method.training, {})[name] = method
    return groups


def train_all(
    methods: Mapping[str, Method], works: Sequence[Work]
) -> Iterator[tuple[Method, dict[str, Method], Work, Outcome]]:
    """Every training that methods need, on every seed: the methods it serves, and its outcome.

    Trainings with the same core run side by side. Those that another process is running come last, one by one: by then
    it may have finished them.
    """
    served = group_by_training(methods)
    cores: dict[Method, list[Method]] = {}
    for training in served:
        cores.setdefault(training.core, []).append(training)
    jobs = deque((group, some) for group in cores.values() for some in split(works, works[0].engine.together))
    busy = 0  # jobs in a row that another process holds
    while jobs:
        group, some = jobs.popleft()
        with _hold_all(some, group, wait=busy > len(jobs)) as ours:
            outcomes = train_some(some, {training: list(served[training]) for training in group}) if ours else {}
        if not ours:
            jobs.extend(([training], some) for training in group)
            busy += 1
            continue
        busy = 0
        for training, of_works in outcomes.items():
            for work, outcome in zip(some, of_works, strict=True):
                yield training, served[training], work, outcome


@contextmanager
def _hold_all(works: Sequence[Work], trainings: Sequence[Method], wait: bool) -> Iterator[bool]:
    """The locks of these trainings, or none of them."""
    paths = sorted(work.place_of(training, work.config.rounds) for work in works for training in trainings)
    with ExitStack() as locks:
        if wait:
            tell(WaitEvent(done=0, total=1))
        yield all(locks.enter_context(store.hold(path.with_suffix(".lock"), wait)) for path in paths)


def train_some(works: Sequence[Work], served: Mapping[Method, list[str]]) -> dict[Method, list[Outcome]]:
    """Trainings with the same core on several federations, from their checkpoints or from the start."""
    files = {training: [work.checkpoint(training, names) for work in works] for training, names in served.items()}
    begun: dict[Method, list[Progress]] = {}
    failed: dict[Method, list[Outcome]] = {}
    for training, of_works in files.items():
        try:
            begun[training] = [work.begin(training, file) for work, file in zip(works, of_works, strict=True)]
        except Failed as error:  # the method's `share` or `keep` raised
            failed[training] = [error] * len(works)
    ready = list(begun)
    reached_by_run = [[begun[training][r] for training in ready] for r in range(len(works))]
    saver = _Saver(works, {training: files[training] for training in ready})
    for r, of_run in enumerate(reached_by_run):
        for m, reached in enumerate(of_run):
            saver.keep(r, m, reached)  # of a run that was stopped before it did
    try:
        engine, settings = works[0].engine, works[0].config.training
        runs = [work.run for work in works]
        done = train_together(ready, runs, settings, reached_by_run, engine, saver.after_round)
    finally:
        saver.save_rest()
    trained = {training: [of_run[m] for of_run in done] for m, training in enumerate(ready)}
    return {training: failed.get(training) or trained[training] for training in served}


class _Saver:
    """Writes checkpoints while training goes on."""

    def __init__(self, works: Sequence[Work], files: Mapping[Method, Sequence[Checkpoint]]) -> None:
        """files: of every training, one for each of the works."""
        self._works, self._trainings = works, list(files)
        self._served = [tuple(of_works[0].about["methods"]) for of_works in files.values()]
        self._files = [[of_works[r] for of_works in files.values()] for r in range(len(works))]
        self._spent = [[file.seconds for file in files] for files in self._files]
        self._began = time.perf_counter()
        self._saved = {(r, m): time.monotonic() for r in range(len(works)) for m in range(len(files))}
        self._unsaved: dict[tuple[int, int], Progress] = {}

    def after_round(self, r: int, trainings: Sequence[int], reached: Sequence[Progress]) -> None:
        """`reached` of these trainings of run r."""
        config, server = self._works[r].config, reached[0].server
        names, seeds = tuple(self._served[m][0] for m in trainings), tuple(work.run.seed for work in self._works)
        self._unsaved |= {(r, m): progress for m, progress in zip(trainings, reached, strict=True)}
        wanted = server.round == config.rounds or server.round in config.keep
        oldest = min(self._saved[r, m] for m in trainings)
        if wanted or time.monotonic() - oldest >= config.checkpoint_seconds:
            for m, progress in zip(trainings, reached, strict=True):
                self._save(r, m, progress)
                self.keep(r, m, progress)
            self._saved |= {(r, m): time.monotonic() for m in trainings}
        # after the checkpoint, which a worker sends when it hears of the round
        tell(TrainEvent(names, seeds, server.losses[-1], done=server.round, total=config.rounds))
        served = tuple(name for m in trainings for name in self._served[m])
        seed, seconds = self._works[r].run.seed, time.perf_counter() - self._began
        tell_round(Round(served, seed, server.round, config.rounds, server.losses[-1], seconds))

    def save_rest(self) -> None:
        """The last good rounds of what failed or was stopped, to look at or to continue from."""
        for (r, m), progress in list(self._unsaved.items()):
            self._save(r, m, progress)

    def keep(self, r: int, m: int, reached: Progress) -> None:
        self._works[r].keep(self._trainings[m], self._files[r][m], reached)

    def _save(self, r: int, m: int, progress: Progress) -> None:
        share = (time.perf_counter() - self._began) / (len(self._works) * len(self._trainings))
        self._files[r][m].save(progress, self._spent[r][m] + share)
        self._unsaved.pop((r, m), None)
