"""Run an experiment: train what its methods need, once each, deploy them on every client, test them, keep the results.

Whatever is filed already, by this run or another in the same folder, is not computed again.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import records, store
from ..data.notes import note_cuts
from ..engine.train import can_join
from ..engine.visit import Progress
from ..errors import Failed, MethodFailed
from ..methods.base import Method
from ..progress.file import Recorder, recording
from .earlier import make_room, move_others
from .results import ClientScore, Failure, Results, name_shift, score_rows, write_results
from .streams import note_lacking
from .training import group_by_training, train_all
from .work import Work


def run_prepared(methods: Mapping[str, Method], works: Sequence[Work]) -> Results:
    """Run an experiment whose methods and federations `prepare` has made."""
    began, config = time.perf_counter(), works[0].config
    folder = config.folder
    about = {
        "config.json": config.as_dict(),
        "environment.json": records.describe_environment(works[0].engine),
        **{f"manifest-{work.run.seed}.json": work.federation.manifest for work in works},
    }
    earlier = make_room(folder, config)  # after all that may refuse the settings
    if not (folder / "summary.json").exists():  # else results of the same settings stay until there are new ones
        for name, value in about.items():
            store.write_json(folder / name, value)
    # each stage begins where the last one ended
    stages = [
        [replace(work, config=replace(config, rounds=rounds, curve=())) for work in works]
        for rounds in (*config.curve, config.rounds)
    ]
    trainings, answers = _count(methods, stages)
    with recording(folder, trainings=trainings, answers=answers) as recorder:
        *early, done = (_measure(methods, stage, recorder) for stage in stages)
        curve = dict(zip(config.curve, early, strict=True))
        failures = [replace(each, rounds=rounds) for rounds, part in curve.items() for each in part.failures]
        failures += done.failures
        dataset, examples = works[0].federation.dataset, works[0].keep_examples()
        earlier = move_others(folder, done.files) or earlier
        results = Results(
            rows=done.rows,
            others=done.others,
            costs=done.costs,
            failures={each.who: each.why for each in failures},
            trainings=done.trainings,
            notes=_collect_notes(works, done.notes),
            names={test: name_shift(test, pool) for test, pool in dataset.natural.items()},
            pools={test: pool.name for test, pool in dataset.natural.items()},
            digests={test: pool.digest for test, pool in {"pool": dataset.pool, **dataset.natural}.items()},
            curves={rounds: score_rows(part.rows) for rounds, part in curve.items()},
            answers=done.files,
            examples=examples,
            reused=done.reused,
            earlier=earlier,
            manifests={work.run.seed: work.federation.manifest_hash for work in works},
            folder=folder,
            shared=works[0].folder != folder,
            seconds=time.perf_counter() - began,
            config=config,
            environment=about["environment.json"],
        )
        _forget_tracebacks(works, methods, failures)
        write_results(results, about)
    return results


def _collect_notes(works: Sequence[Work], of_methods: Iterable[str]) -> tuple[str, ...]:
    notes: list[str] = []
    for work in works:
        notes += [*work.federation.notes, *note_cuts(work.federation, work.tests, work.config.samples)]
        notes += note_lacking(work.config, work.federation, work.tests)
    return tuple(dict.fromkeys([*notes, *of_methods]))


def _forget_tracebacks(works: Sequence[Work], methods: Iterable[str], failures: Iterable[Failure]) -> None:
    """Delete those of earlier runs where a method has not failed in this one."""
    failed = {(each.method, each.seed) for each in failures}
    for work in works:
        for name in methods:
            if (name, work.run.seed) not in failed:
                work.forget_traceback(name)


@dataclass(frozen=True)
class _Measured:
    """What methods came to, after a number of rounds."""

    rows: tuple[ClientScore, ...]
    others: tuple[ClientScore, ...]  # of clients that joined after training
    costs: dict[str, dict[str, float]]
    failures: list[Failure]
    trainings: dict[str, dict[str, Any]]
    files: tuple[str, ...]
    notes: list[str]
    reused: int


def _count(methods: Mapping[str, Method], stages: Sequence[Sequence[Work]]) -> tuple[int, int]:
    """What there is to do: trainings that are not finished yet, and all answers."""
    trainings = group_by_training(methods)
    left = [work for works in stages for work in works for each in trainings if not work.has(each)]
    return len(left), len(methods) * sum(map(len, stages))


def _measure(methods: Mapping[str, Method], works: Sequence[Work], recorder: Recorder) -> _Measured:
    """Train, deploy and test all methods on all seeds, or read what is filed."""
    answers: dict[tuple[str, int], tuple[str, dict[str, Any]]] = {}
    failures: list[Failure] = []
    trainings: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    reused = 0

    def fail(name: str, work: Work, error: Failed) -> None:
        failure = Failure(name, work.run.seed, work.keep_traceback(name, error))
        failures.append(failure)
        recorder.add_failure(f"{failure.who}: {failure.why}")
        warnings.warn(f"{failure.who} failed: {failure.why}", MethodFailed, stacklevel=2)

    def answer(name: str, work: Work, key: str, outcome: Progress, wait: bool) -> bool:
        """Whether it is done, since another process may be at it."""
        nonlocal reused
        method = methods[name]
        try:
            found = work.answer(name, method, key, outcome, wait)
        except Failed as error:
            fail(name, work, error)
            return True
        if found is None:
            return False
        file, (content, was_there) = work.name_answer(name, method, key), found
        answers[name, work.run.seed] = file, content
        reused += was_there
        recorder.add_answer(file)
        return True

    left: list[tuple[str, Work, str, Progress]] = []  # those that another process is at
    for trained, served, work, outcome in train_all(methods, works):
        key = work.key_of(trained)
        trainings[key] = {"seed": work.run.seed, "methods": list(served)}
        if isinstance(outcome, Failed):
            trainings[key]["failed"] = str(outcome)
            for name in served:
                fail(name, work, outcome)
            continue
        trainings[key] |= {"rounds": outcome.round, "seconds": work.checkpoint(trained, list(served)).seconds}
        notes += [f"{', '.join(served)}, seed {work.run.seed}: {each}" for each in outcome.server.skipped]
        left += [(name, work, key, outcome) for name in served if not answer(name, work, key, outcome, wait=False)]
    for name, work, key, outcome in left:
        answer(name, work, key, outcome, wait=True)
    order = [(name, work.run.seed) for name in methods for work in works]
    found = [answers[each] for each in order if each in answers]
    rows, others = (
        tuple(ClientScore(**row) for _, content in found for row in content[part]) for part in ("rows", "joined")
    )
    if works[0].run.unseen:
        answered = {name: methods[name] for name in dict.fromkeys(content["method"] for _, content in found)}
        notes += _note_left_out(answered, others)
    costs = {content["method"]: content["costs"] for _, content in found}
    return _Measured(rows, others, costs, failures, trainings, tuple(file for file, _ in found), notes, reused)


def _note_left_out(methods: Mapping[str, Method], others: Iterable[ClientScore]) -> Iterator[str]:
    """Which methods clients do not have that join after training, and why."""
    groups = {(row.method, row.group) for row in others}
    for name, method in methods.items():
        if not can_join(method):
            yield f"{name}: only rounds train what a client keeps, so clients that join after training do not have it"
        elif (name, "joined") in groups and (name, "unlabeled") not in groups:
            yield f"{name}: needs labels, so clients that join without them do not have it"
