"""Every federated training that methods need, once: from its checkpoint, or from the start."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from .. import store
from ..config import Config
from ..data.plan import Federation
from ..engine.beside import Beside
from ..engine.train import deploy_some, put_beside, take_apart, train_together
from ..engine.visit import Engine, Progress, Run
from ..errors import Failed
from ..methods.base import Method, find_sender
from ..progress.events import TrainEvent, WaitEvent, tell
from ..tree import Tree
from .work import Checkpoint, Work, prepare, split


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
                    yield test, k, self.federation.images(stream), self.federation.labels(stream)


def deploy_all(config: Config) -> Iterator[Deployed]:
    """Every method of an experiment on every seed, trained or taken from its checkpoint, to look inside.

    Where a run only answers, this gives the models themselves.
    """
    for _, served, work, outcome in train_all(*prepare(config)):
        if isinstance(outcome, Failed):
            raise Failed(f"{next(iter(served))}, seed {work.run.seed}: {outcome}")
        for name, method in served.items():
            states = deploy_some(method, work.run, config.training, outcome, work.engine, range(config.clients))
            yield Deployed(name, method, work.federation, work.run, states, work.engine, work.tests)


def train_all(
    methods: Mapping[str, Method], works: Sequence[Work]
) -> Iterator[tuple[Method, dict[str, Method], Work, Progress | Failed]]:
    """Every training that methods need, on every seed: whom it serves, and what came of it.

    Those that another process is at come last: by then it may be done with them.
    """
    trainings = group_by_training(methods)
    jobs = deque((trained, some) for trained in trainings for some in split(works, works[0].engine.together))
    busy = 0
    while jobs:
        trained, some = jobs.popleft()
        alike = [each for each in trainings if find_sender(each) == find_sender(trained)]
        if trained is alike[0] and len(alike) > 1:
            with _hold_all(some, alike, wait=False) as ours:
                if ours:
                    train_beside(some, {each: list(trainings[each]) for each in alike})
        with _hold_all(some, [trained], wait=busy > len(jobs)) as ours:
            outcomes = train_some(some, trained, list(trainings[trained])) if ours else []
        if not ours:
            jobs.append((trained, some))
            busy += 1
            continue
        busy = 0
        for work, outcome in zip(some, outcomes, strict=True):
            yield trained, trainings[trained], work, outcome


@contextmanager
def _hold_all(works: Sequence[Work], methods: Sequence[Method], wait: bool) -> Iterator[bool]:
    """The locks of these trainings, or none of them."""
    paths = sorted(work.place_of(method, work.config.rounds) for work in works for method in methods)
    with ExitStack() as locks:
        if wait:
            tell(WaitEvent(done=0, total=1))
        yield all(locks.enter_context(store.hold(path.with_suffix(".lock"), wait)) for path in paths)


def group_by_training(methods: Mapping[str, Method]) -> dict[Method, dict[str, Method]]:
    """Methods by the federated training they deploy, so that it is done once."""
    groups: dict[Method, dict[str, Method]] = {}
    for name, method in methods.items():
        groups.setdefault(method.trains_as(), {})[name] = method
    return groups


def train_some(works: Sequence[Work], method: Method, served: list[str]) -> list[Progress | Failed]:
    """The training of `method` on several federations side by side, from their checkpoints or from the start."""
    files = [{method: work.checkpoint(method, served)} for work in works]
    try:
        begun = [work.begin(method, file[method]) for work, file in zip(works, files, strict=True)]
    except Failed as error:  # `init` raised something
        return [error] * len(works)
    return _train(works, method, begun, files, lambda reached: {method: reached})


def train_beside(works: Sequence[Work], trainings: Mapping[Method, list[str]]) -> None:
    """What is left of trainings that send the same, where they are in the same round.

    Their checkpoints are as if each had been trained alone, and each is asked for alone afterwards. So whatever goes
    wrong here stops nothing: whose it is shows then.
    """
    if works[0].config.tolerate == "skip":
        return  # a client that is left out for what one method keeps would be left out of the others, too
    lots: dict[Beside, list[tuple[Work, dict[Method, Checkpoint], Progress]]] = {}
    with suppress(Exception):
        for work in works:
            left = {each: work.checkpoint(each, served) for each, served in trainings.items() if not work.has(each)}
            pair = put_beside({each: work.begin(each, file) for each, file in left.items()}) if len(left) > 1 else None
            if pair is not None:
                lots.setdefault(pair[0], []).append((work, left, pair[1]))
        for method, lot in lots.items():
            some, files, begun = zip(*lot, strict=True)
            _train(some, method, begun, files, partial(take_apart, method))


def _train(
    works: Sequence[Work],
    method: Method,
    begun: Sequence[Progress],
    files: Sequence[Mapping[Method, Checkpoint]],
    apart: Callable[[Progress], Mapping[Method, Progress]],
) -> list[Progress | Failed]:
    """Train a method, maybe several as one: `apart` tells what each of them reached, and `files` where that is kept."""
    engine, config = works[0].engine, works[0].config
    spent, began = [{each: file.seconds for each, file in some.items()} for some in files], time.perf_counter()
    unsaved: dict[int, Progress] = {}
    saved = [time.monotonic()] * len(works)
    names = tuple(file.about["methods"][0] for file in files[0].values())
    seeds = tuple(work.run.seed for work in works)

    def save(r: int, reached: Progress) -> None:
        seconds = (time.perf_counter() - began) / (len(works) * len(files[r]))
        for each, part in apart(reached).items():
            files[r][each].save(part, spent[r][each] + seconds)
        unsaved.pop(r, None)
        saved[r] = time.monotonic()

    def keep(r: int, reached: Progress) -> None:
        for each, file in files[r].items():
            works[r].keep(each, file, reached)

    def after_round(r: int, reached: Progress) -> None:
        unsaved[r] = reached
        tell(TrainEvent(names, seeds, reached.losses[-1], done=reached.round, total=config.rounds))
        wanted = reached.round == config.rounds or reached.round in config.keep
        if wanted or time.monotonic() - saved[r] >= config.checkpoint_seconds:
            save(r, reached)
            keep(r, reached)

    for r, reached in enumerate(begun):
        keep(r, reached)  # what was stopped before it was kept
    try:
        return train_together(method, [work.run for work in works], config.training, begun, engine, after_round)
    finally:
        for r, reached in list(unsaved.items()):
            save(r, reached)  # the last good round of what diverged or was stopped, to look at or to go on from
