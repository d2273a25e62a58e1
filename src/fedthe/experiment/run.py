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
from .workers import Answered, Outcome, Trained, find_workers


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
    answers: dict[tuple[str, int], Answered] = {}
    failures: dict[tuple[str, int], Failure] = {}
    trained: dict[str, Trained] = {}

    def fail(name: str, work: Work, error: Failed) -> None:
        failure = Failure(name, work.run.seed, work.keep_traceback(name, error))
        failures[name, work.run.seed] = failure
        recorder.add_failure(f"{failure.who}: {failure.why}")
        warnings.warn(f"{failure.who} failed: {failure.why}", MethodFailed, stacklevel=2)

    workers = find_workers()
    for outcome in workers.compute(methods, works) if workers else _compute(methods, works):
        if isinstance(outcome, Trained):
            trained[outcome.work.key_of(outcome.training)] = outcome
        if outcome.failed is not None:
            for name in outcome.served if isinstance(outcome, Trained) else [outcome.name]:
                fail(name, outcome.work, outcome.failed)
        elif isinstance(outcome, Answered):
            answers[outcome.name, outcome.work.run.seed] = outcome
            recorder.add_answer(outcome.file)
    # workers finish in any order
    order = [(name, work.run.seed) for name in methods for work in works]
    keys = [work.key_of(training) for training in group_by_training(methods) for work in works]
    done = [trained[key] for key in keys]
    notes = [f"{', '.join(each.served)}, seed {each.work.run.seed}: {why}" for each in done for why in each.skipped]
    found = [answers[each] for each in order if each in answers]
    rows, others = (
        tuple(ClientScore(**row) for each in found for row in each.content[part]) for part in ("rows", "joined")
    )
    if works[0].run.unseen:
        answered = {name: methods[name] for name in dict.fromkeys(each.name for each in found)}
        notes += _note_left_out(answered, others)
    return _Measured(
        rows=rows,
        others=others,
        costs={each.name: each.content["costs"] for each in found},
        failures=[failures[each] for each in order if each in failures],
        trainings=dict(zip(keys, map(_describe_training, done), strict=True)),
        files=tuple(each.file for each in found),
        notes=notes,
        reused=sum(each.reused for each in found),
    )


def _describe_training(done: Trained) -> dict[str, Any]:
    about = {"seed": done.work.run.seed, "methods": list(done.served)}
    if done.failed:
        return about | {"failed": str(done.failed)}
    seconds = done.work.checkpoint(done.training, list(done.served)).seconds
    size = done.training.message_bytes
    return about | {"rounds": done.work.config.rounds, "seconds": seconds, "message_bytes": size}


def _compute(methods: Mapping[str, Method], works: Sequence[Work]) -> Iterator[Outcome]:
    """In this process."""

    def answer(name: str, work: Work, key: str, outcome: Progress, wait: bool) -> Answered | None:
        """None: another process is at it."""
        try:
            found = work.answer(name, methods[name], key, outcome, wait)
        except Failed as error:
            return Answered(name, work, failed=error)
        file = work.name_answer(name, methods[name], key)
        return None if found is None else Answered(name, work, file, content=found[0], reused=found[1])

    left: list[tuple[str, Work, str, Progress]] = []  # those that another process is at
    for training, served, work, outcome in train_all(methods, works):
        if isinstance(outcome, Failed):
            yield Trained(training, tuple(served), work, failed=outcome)
            continue
        yield Trained(training, tuple(served), work, outcome.server.skipped)
        key = work.key_of(training)
        for name in served:
            answered = answer(name, work, key, outcome, wait=False)
            if answered is None:
                left.append((name, work, key, outcome))
            else:
                yield answered
    for name, work, key, outcome in left:
        if answered := answer(name, work, key, outcome, wait=True):
            yield answered


def _note_left_out(methods: Mapping[str, Method], others: Iterable[ClientScore]) -> Iterator[str]:
    """Which methods clients do not have that join after training, and why."""
    groups = {(row.method, row.group) for row in others}
    for name, method in methods.items():
        if not can_join(method):
            yield f"{name}: only rounds train what a client keeps, so clients that join after training do not have it"
        elif (name, "joined") in groups and (name, "unlabeled") not in groups:
            yield f"{name}: needs labels, so clients that join without them do not have it"
