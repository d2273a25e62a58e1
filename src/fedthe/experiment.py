"""Run an experiment: train what its methods need, once each, deploy them on every client, and keep what came of it.

Trainings and answers are filed under a hash of everything they depend on. So a run that was stopped goes on where it
was, a method or a seed added later costs only itself, and nothing is ever taken for what it is not.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from . import records, store, tree
from .config import Config, make_config
from .corruptions import CORRUPTION_VERSION
from .data import load_dataset
from .data.plan import Federation, build
from .data.pool import Pool
from .engine.beside import Beside
from .engine.evaluate import answer_stream, score
from .engine.memory import measure_peak
from .engine.pick import pick_engine
from .engine.shards import Shards
from .engine.train import deploy_some, put_beside, start, take_apart, train_together
from .engine.visit import Engine, Progress, Question, Run
from .errors import Damaged, Failed, InputError, MethodFailed, code_of_a_method
from .fingerprint import fingerprint
from .live import Recorder, recording
from .methods import METHODS, STUDIES
from .methods.base import Method, describe, find_sender
from .methods.fedthe import HeadEnsemble
from .nets import NETS, takes_width
from .nets.net import Net
from .nets.standardized import standardize
from .parallel import one_thread_of_torch
from .progress import tell
from .store import content_hash
from .text import find_nearest, flatten, quote
from .tree import Tree

T = TypeVar("T")
Moments = tuple[tuple[float, ...], tuple[float, ...]]
get_engine = lru_cache(maxsize=1)(pick_engine)  # with its compiled programs, for the runs that follow in a process
EXAMPLES, EXAMPLE_CLIENTS = 4, 20  # images of a stream that are kept to look at, and of so many clients
FORMAT = 3  # part of every file's name; raised when a change of the code moves numbers, so that no old file is taken


@dataclass(frozen=True)
class Row:
    """How one client did on one test distribution."""

    method: str
    seed: int
    test: str
    client: int
    samples: int
    right: int
    accuracy: float  # percent
    ms_per_sample: float


@dataclass(frozen=True)
class Results:
    rows: tuple[Row, ...]
    costs: Mapping[str, Mapping[str, float]]  # by method: forward and backward passes and peak memory, per sample
    failures: Mapping[str, str]  # by "method, seed": why there is no answer
    trainings: Mapping[str, Mapping[str, Any]]  # by id: whom it served, its rounds and seconds
    notes: tuple[str, ...]
    manifests: Mapping[int, str]  # by seed: the hash of who held which rows
    names: Mapping[str, str]  # of natural tests in front of people: by the pool that they come from
    pools: Mapping[str, str]  # by natural test: the name of its pool
    curves: Mapping[
        int, Mapping[str, Mapping[str, tuple[float, float | None]]]
    ]  # by round, method and test: mean and std
    answers: tuple[str, ...]  # the names of their files, for what is known sample by sample
    examples: str  # the name of the file with images to look at
    reused: int  # of the answers: those that were there before this run
    earlier: Path | None  # where results of other settings, which were in this folder, are now
    config: Config
    environment: Mapping[str, Any]
    folder: Path
    seconds: float
    digests: Mapping[str, str] = field(default_factory=dict)  # of decoded content: "pool", and by natural test

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(row.method for row in self.rows))

    @property
    def tests(self) -> list[str]:
        return list(dict.fromkeys(row.test for row in self.rows))

    def table(self) -> dict[str, dict[str, float]]:
        """Percent right, by method and test: the mean over clients, then over seeds."""
        return reduce_rows(self.rows, np.mean)

    def worst(self) -> dict[str, dict[str, float]]:
        """The worst client's percent, the mean over seeds."""
        return reduce_rows(self.rows, np.min)

    def std(self) -> dict[str, dict[str, float | None]]:
        """The standard deviation over seeds of what `table` gives; None where there is a single seed."""
        return {method: {test: std for test, (_, std) in cells.items()} for method, cells in self.scores().items()}

    def scores(self) -> dict[str, dict[str, tuple[float, float | None]]]:
        """`table` and `std` together."""
        return score_rows(self.rows)

    def summary(self) -> dict[str, Any]:
        """The tables and all that stands beside them, as plain data."""
        return {
            "results": self.table(),
            "std_over_seeds": self.std(),
            "worst_client": self.worst(),
            "costs": self.costs,
            "failures": self.failures,
            "trainings": self.trainings,
            "notes": list(self.notes),
            "names": self.names,
            "pools": self.pools,
            "digests": self.digests,
            "curves": {str(rounds): scores for rounds, scores in self.curves.items()},
            "answers": list(self.answers),
            "examples": self.examples,
            "reused": self.reused,
            "earlier": str(self.earlier) if self.earlier else None,
            "manifests": {str(seed): digest for seed, digest in self.manifests.items()},
            "folder": str(self.folder),
            "seconds": self.seconds,
        }


def reduce_rows(
    rows: Iterable[Row], over_clients: Callable[[list[float]], Any], over_seeds: Callable[[list[float]], Any] = np.mean
) -> dict[str, dict[str, float]]:
    """By method and test: percents of clients as one number, and those of seeds as one."""
    cells: dict[tuple[str, str], dict[int, list[float]]] = {}
    for row in rows:
        cells.setdefault((row.method, row.test), {}).setdefault(row.seed, []).append(row.accuracy)
    table: dict[str, dict[str, float]] = {}
    for (method, test), seeds in cells.items():
        table.setdefault(method, {})[test] = float(over_seeds([over_clients(clients) for clients in seeds.values()]))
    return table


def score_rows(rows: Sequence[Row]) -> dict[str, dict[str, tuple[float, float | None]]]:
    """By method and test: the mean over clients and seeds, and the standard deviation over seeds.

    A single seed has none: 0 would say that it was measured.
    """
    means = reduce_rows(rows, np.mean)
    deviations = reduce_rows(rows, np.mean, lambda seeds: np.std(seeds) if len(seeds) > 1 else math.nan)
    return {
        name: {
            test: (mean, None if math.isnan(deviations[name][test]) else deviations[name][test])
            for test, mean in cells.items()
        }
        for name, cells in means.items()
    }


def run(config: Config | None = None, **settings: Any) -> Results:
    """Run an experiment, or go on with it. `fedthe.run(methods=["fedthe"], rounds=10)` or `fedthe.run(config)`."""
    config = make_config((config.as_dict() if config else {}) | settings)
    began, folder = time.perf_counter(), config.folder
    methods, works = _prepare(config)
    _check_places(folder, config)
    earlier = _keep_earlier(folder, config)
    about = {
        "config.json": config.as_dict(),
        "environment.json": records.describe_environment(works[0].engine),
        **{f"manifest-{work.run.seed}.json": work.federation.manifest for work in works},
    }
    if not (folder / "summary.json").exists():  # else results of the same settings stay until there are new ones
        for name, value in about.items():
            store.write_json(folder / name, value)
    natural = works[0].federation.dataset.natural
    curves: dict[int, Any] = {}
    failures: dict[str, str] = {}
    # each stage begins where the last one ended
    stages = [
        [replace(work, config=replace(config, rounds=rounds, curve=())) for work in works]
        for rounds in (*config.curve, config.rounds)
    ]
    trainings, answers = _count(methods, stages)
    with recording(folder, trainings=trainings, answers=answers) as recorder:
        for shorter, rounds in zip(stages, config.curve, strict=False):
            early = _measure(methods, shorter, recorder)
            curves[rounds] = score_rows(early.rows)
            failures |= {f"{who}, after {rounds} rounds": why for who, why in early.failures.items()}
        done = _measure(methods, stages[-1], recorder)
        results = Results(
            rows=done.rows,
            costs=done.costs,
            failures=failures | done.failures,
            trainings=done.trainings,
            notes=tuple(dict.fromkeys(note for work in works for note in (*work.federation.notes, *done.notes))),
            manifests={work.run.seed: work.federation.manifest_hash for work in works},
            names={test: name_shift(test, pool) for test, pool in natural.items()},
            pools={test: pool.name for test, pool in natural.items()},
            digests={"pool": works[0].federation.pool.digest} | {test: pool.digest for test, pool in natural.items()},
            curves=curves,
            answers=done.files,
            examples=works[0].keep_examples(),
            reused=done.reused,
            earlier=earlier,
            config=config,
            environment=about["environment.json"],
            folder=folder,
            seconds=time.perf_counter() - began,
        )
        _forget_tracebacks(works, methods, results.failures)
        if _has_others(folder, done.files):
            results = replace(results, earlier=_move_results(folder))
        records.write_results(folder, [asdict(row) for row in done.rows])
        for name, value in {**about, "trainings.json": done.trainings}.items():
            store.write_json(folder / name, value)  # all of one run, whoever else wrote here meanwhile
        names = ("results.jsonl", "results.parquet", "trainings.json", *about)
        files = {name: store.file_hash(folder / name) for name in names if (folder / name).exists()}
        store.write_sealed(folder / "summary.json", results.summary() | {"files": files})
    return results


def _has_others(folder: Path, answers: Sequence[str]) -> bool:
    """Whether results of the same settings are there that these would not replace: of other code, or of what failed."""
    try:
        before = store.read_sealed(folder / "summary.json")
    except Damaged as error:
        warnings.warn(f"{error} It is written again.", stacklevel=2)
        return False
    for name, digest in (before or {}).get("files", {}).items():
        if not (folder / name).is_file() or store.file_hash(folder / name) != digest:
            warnings.warn(f"{folder / name} is missing or was changed; it is written again.", stacklevel=2)
    return bool(before and set(before.get("answers", ())) - set(answers))


def _forget_tracebacks(works: Sequence[_Work], methods: Iterable[str], failures: Iterable[str]) -> None:
    """Those of earlier runs, of what has not failed in this one."""
    failed = tuple(failures)
    for work in works:
        for name in methods:
            if not any(f"{who},".startswith(f"{name}, seed {work.run.seed},") for who in failed):
                work.forget_traceback(name)


RESULTS = ("results.parquet", "results.jsonl", "trainings.json", "config.json", "environment.json", "summary.json")


def _check_places(folder: Path, config: Config) -> None:
    """What cannot be written is refused before any work, and before a part of the results is replaced."""
    for name in (*RESULTS, *(f"manifest-{seed}.json" for seed in config.seeds)):
        if (folder / name).is_dir():
            raise InputError(f"{folder / name} is a folder, where a file of the run belongs; move it away.")


def _keep_earlier(folder: Path, config: Config) -> Path | None:
    """Results of other settings go to a folder of their own; the path of it. What they came from stays where it is."""
    try:
        before = make_config(records.read_json(folder / "config.json") or {})
    except (InputError, TypeError, AttributeError):
        before = None  # of another version, or damaged
    if not (folder / "summary.json").exists() or (before is not None and config.measures_as(before)):
        return None
    return _move_results(folder)


def _move_results(folder: Path) -> Path:
    place = folder / "earlier" / store.file_hash(folder / "summary.json")[:8]
    store.make_folder(place)
    names = ("report.html", *RESULTS[:-1])
    for path in (*(folder / name for name in names), *folder.glob("manifest-*.json"), folder / "summary.json"):
        if path.exists():
            os.replace(path, place / path.name)
    return place


@dataclass(frozen=True)
class _Measured:
    """What methods came to, after a number of rounds."""

    rows: tuple[Row, ...]
    costs: dict[str, dict[str, float]]
    failures: dict[str, str]
    trainings: dict[str, dict[str, Any]]
    files: tuple[str, ...]
    notes: tuple[str, ...]
    reused: int


def _count(methods: Mapping[str, Method], stages: Sequence[Sequence[_Work]]) -> tuple[int, int]:
    """What there is to do: trainings that are not there yet, and answers in all."""
    trainings = group_by_training(methods)
    left = [work for works in stages for work in works for each in trainings if not work.has(each)]
    return len(left), len(methods) * sum(map(len, stages))


def _measure(methods: Mapping[str, Method], works: Sequence[_Work], recorder: Recorder) -> _Measured:
    """Train, deploy and test all methods on all seeds, or take what is there."""
    answers: dict[tuple[str, int], tuple[str, dict[str, Any]]] = {}
    failures: dict[str, str] = {}
    trainings: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    reused = 0

    def fail(name: str, work: _Work, error: Failed) -> None:
        failures[f"{name}, seed {work.run.seed}"] = why = work.keep_traceback(name, error)
        recorder.add_failure(f"{name}, seed {work.run.seed}: {why}")
        warnings.warn(f"{name}, seed {work.run.seed} failed: {why}", MethodFailed, stacklevel=2)

    def answer(name: str, work: _Work, key: str, outcome: Progress, wait: bool) -> bool:
        """Whether it is done: another process may be at it."""
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

    left: list[tuple[str, _Work, str, Progress]] = []  # for others are at it
    for trained, served, work, outcome in _train_all(methods, works):
        key = work.key_of(trained)
        trainings[key] = {"seed": work.run.seed, "methods": list(served)}
        if isinstance(outcome, Failed):
            trainings[key]["failed"] = str(outcome)
            for name in served:
                fail(name, work, outcome)
            continue
        trainings[key] |= {"rounds": outcome.round, "seconds": work.checkpoint(trained, list(served)).seconds}
        notes += [f"{', '.join(served)}, seed {work.run.seed}: {each}" for each in outcome.skipped]
        left += [(name, work, key, outcome) for name in served if not answer(name, work, key, outcome, wait=False)]
    for name, work, key, outcome in left:
        answer(name, work, key, outcome, wait=True)
    order = [(name, work.run.seed) for name in methods for work in works]
    found = [answers[each] for each in order if each in answers]
    rows = tuple(Row(**row) for _, content in found for row in content["rows"])
    costs = {content["method"]: content["costs"] for _, content in found}
    return _Measured(rows, costs, failures, trainings, tuple(file for file, _ in found), tuple(notes), reused)


def read_results(folder: Path) -> Results:
    """What `run` returned, from what it left behind."""
    summary, config = store.read_sealed(folder / "summary.json"), records.read_json(folder / "config.json")
    if config is None:
        raise InputError(f"{folder} holds no run; `fedthe run` makes one.")
    if summary is None:
        raise InputError(f"{folder} holds a run that is not finished; the command that began it goes on with it.")
    try:
        for name in ("results.jsonl", "config.json", "environment.json"):
            if store.file_hash(folder / name) != summary["files"][name]:
                raise ValueError(f"{name} was changed")
        lines = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
        return Results(
            rows=tuple(Row(**json.loads(line)) for line in lines),
            costs=summary["costs"],
            failures=summary["failures"],
            trainings=summary["trainings"],
            notes=tuple(summary["notes"]),
            manifests={int(seed): digest for seed, digest in summary["manifests"].items()},
            names=summary["names"],
            pools=summary["pools"],
            digests=summary.get("digests", {}),
            curves={int(rounds): _as_cells(scores) for rounds, scores in summary["curves"].items()},
            answers=tuple(summary["answers"]),
            examples=summary["examples"],
            reused=summary["reused"],
            earlier=Path(summary["earlier"]) if summary["earlier"] else None,
            config=make_config(config),
            environment=records.read_json(folder / "environment.json"),
            folder=folder,
            seconds=summary["seconds"],
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(
            f"{folder} is a run of another version, or damaged ({error}); run it again; nothing is retrained."
        ) from None


def name_shift(test: str, pool: Pool) -> str:
    """A natural shift is called by the pool that it comes from, and by how many of the classes that has."""
    present = len(np.unique(pool.labels))
    return f"{test} ({pool.name}{f', {present} classes' if present < len(pool.classes) else ''})"


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
    for _, served, work, outcome in _train_all(*_prepare(config)):
        if isinstance(outcome, Failed):
            raise Failed(f"{next(iter(served))}, seed {work.run.seed}: {outcome}")
        for name, method in served.items():
            states = deploy_some(method, work.run, config.training, outcome, work.engine, range(config.clients))
            yield Deployed(name, method, work.federation, work.run, states, work.engine, work.tests)


def _train_all(
    methods: Mapping[str, Method], works: Sequence[_Work]
) -> Iterator[tuple[Method, dict[str, Method], _Work, Progress | Failed]]:
    """Every training that methods need, on every seed: whom it serves, and what came of it.

    Those that another process is at come last: by then it may be done with them.
    """
    trainings = group_by_training(methods)
    jobs = deque((trained, some) for trained in trainings for some in _split(works, works[0].engine.together))
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
def _hold_all(works: Sequence[_Work], methods: Sequence[Method], wait: bool) -> Iterator[bool]:
    """The locks of these trainings, or none of them."""
    paths = sorted(work.place_of(method, work.config.rounds) for work in works for method in methods)
    with ExitStack() as locks:
        if wait:
            tell("waiting for another process", 0, 1)
        yield all(locks.enter_context(store.hold(path.with_suffix(".lock"), wait)) for path in paths)


def _prepare(config: Config) -> tuple[dict[str, Method], list[_Work]]:
    """The methods, and the federation of every seed. Whatever is wrong with the settings is refused here."""
    engine = get_engine(config.engine, config.device, config.precision, config.threads)
    make_methods(config, classes=2, channels=3, size=32)  # refuse unknown names before any work
    dataset = load_dataset(config.dataset, natural=config.natural, size=config.size)
    moments = dataset.pool.moments if config.standardize else None
    methods = make_methods(config, len(dataset.pool.classes), *_check_images(dataset.pool, config), moments)
    federations = [build(dataset, config.settings(seed)) for seed in config.seeds]
    tests = pick_tests(config, federations[0].tests)
    every = [each for name, method in methods.items() for each in _check_method(name, method)]
    code = {method: found for method in every if (found := fingerprint(method))}
    if code:
        engine.release()  # what was compiled may be of code that has been edited since
    return methods, [
        _Work(config, config.folder, engine, each, Run(each.settings.seed, Shards(each, engine.device)), tests, code)
        for each in federations
    ]


def _check_method(name: str, method: Method) -> tuple[Method, Method]:
    """A method and what it trains as, if both can be told apart from others and be filed."""
    try:
        with code_of_a_method():
            parts = method, method.trains_as()
            find_sender(method)
        for part in parts:
            content_hash(describe(part))
    except (Failed, TypeError, ValueError) as error:
        raise InputError(f"{name} cannot be filed by its hyperparameters: {flatten(error, 200)}.") from None
    for part in parts:
        if "__eq__" not in vars(type(part)) and "__annotations__" in vars(type(part)):
            raise InputError(f"{name}: {type(part).__name__} has fields, so it must be a dataclass with eq.")
    return parts


def _check_images(pool: Pool, config: Config) -> tuple[int, int]:
    """The channels and the side of the pool's images, if networks can take them."""
    _, height, width, channels = pool.images.shape
    if height != width:
        raise InputError(f"{pool.name} has images of {height} x {width}; networks need square ones, so set size.")
    if config.crop >= height:
        raise InputError(f"crop must be less than the {height} pixels of a side, but is {config.crop}.")
    return channels, height


def group_by_training(methods: Mapping[str, Method]) -> dict[Method, dict[str, Method]]:
    """Methods by the federated training they deploy, so that it is done once."""
    groups: dict[Method, dict[str, Method]] = {}
    for name, method in methods.items():
        groups.setdefault(method.trains_as(), {})[name] = method
    return groups


def make_methods(
    config: Config, classes: int, channels: int, size: int, moments: Moments | None = None
) -> dict[str, Method]:
    net, known = make_net(config, classes, channels, size, moments), METHODS | STUDIES
    methods = {}
    for name in dict.fromkeys((*config.methods, *config.hyper)):
        if name not in known:
            raise InputError(f"there is no method {name!r}; {find_nearest(name, known)}")
        if not re.fullmatch(r"[\w.+ -]{1,100}", name):
            raise InputError(f"{quote(name)} cannot be part of a file's name; call the method otherwise.")
        method = known[name](net)
        if config.net == "cct4" and isinstance(method.predictor, HeadEnsemble):
            method = set_hyper(method, {"search.lr": 0.01}, name)  # the paper's rate for this network
        methods[name] = set_hyper(method, config.hyper.get(name, {}), name)
        methods[name].check()
    return {name: methods[name] for name in config.methods}


def make_net(config: Config, classes: int, channels: int, size: int, moments: Moments | None = None) -> Net:
    """moments: of the images' channels, where the network is to standardize them."""
    if config.net not in NETS:
        raise InputError(f"there is no network {config.net!r}; {find_nearest(config.net, NETS)}")
    more = {"width": config.width} if takes_width(config.net) else {}
    net = NETS[config.net](classes, channels, size, config.head_layers, **more)
    return net if moments is None else standardize(net, *moments)


def set_hyper(value: Any, given: Mapping[str, Any], name: str) -> Any:
    """A method with some hyperparameters changed: by name, or by the end of a path where a name stands for several."""
    for key, setting in given.items():
        paths = list_hyper(value)
        found = [path for path in paths if f".{path}".endswith(f".{key}")]
        if not found:
            has = find_nearest(key, {path.rsplit(".", 1)[-1] for path in paths}) if paths else "it has none."
            raise InputError(f"{name} has no hyperparameter {key!r}; {has}")
        if len(found) > 1:
            ways = " or ".join(".".join(path.split(".")[-2:]) for path in found)
            raise InputError(f"{name} has several hyperparameters {key!r}; write {ways}.")
        value = _set_one(value, found[0].split("."), setting)
    return value


def list_hyper(value: Any, before: str = "") -> dict[str, Any]:
    """Every hyperparameter by its dotted path, and its value."""
    listed: dict[str, Any] = {}
    for each in fields(value):
        inner = getattr(value, each.name)
        if is_dataclass(inner) and each.name != "net":
            listed |= list_hyper(inner, f"{before}{each.name}.")
        elif each.name not in ("net", "then"):  # a `then` of None is a part that is not there
            listed[f"{before}{each.name}"] = inner
    return listed


def _set_one(value: Any, path: list[str], setting: Any) -> Any:
    first, *rest = path
    old = getattr(value, first)
    if rest:
        return replace(value, **{first: _set_one(old, rest, setting)})
    if isinstance(old, float) and isinstance(setting, int) and not isinstance(setting, bool):
        setting = float(setting)
    if type(setting) is not type(old):
        raise InputError(f"{first} must be like {old!r}, not {setting!r}.")
    if isinstance(setting, float) and not math.isfinite(setting):
        raise InputError(f"{first} must be finite, not {setting}.")
    return replace(value, **{first: setting})


def pick_tests(config: Config, known: Iterable[str]) -> list[str]:
    """Those of the known tests that an experiment asks for, in their order."""
    known = list(known)
    for test in config.tests or ():
        if test not in known:
            raise InputError(f"there is no test {test!r} here; {find_nearest(test, known)}")
    return [test for test in known if config.tests is None or test in config.tests]


@dataclass(frozen=True)
class _Checkpoint:
    """Where a training is kept, and what is known of it."""

    path: Path
    about: Mapping[str, Any]

    @property
    def facts(self) -> Path:
        return self.path.with_suffix(".json")

    @property
    def seconds(self) -> float:
        """Spent on it so far; 0 where nobody knows."""
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


def train_some(works: Sequence[_Work], method: Method, served: list[str]) -> list[Progress | Failed]:
    """The training of `method` on several federations side by side, from their checkpoints or from the start."""
    files = [{method: work.checkpoint(method, served)} for work in works]
    try:
        begun = [work.begin(method, file[method]) for work, file in zip(works, files, strict=True)]
    except Failed as error:  # `init` raised something
        return [error] * len(works)
    return _train(works, method, begun, files, lambda reached: {method: reached})


def train_beside(works: Sequence[_Work], trainings: Mapping[Method, list[str]]) -> None:
    """What is left of trainings that send the same, where they are in the same round.

    Their checkpoints are as if each had been trained alone, and each is asked for alone afterwards. So whatever goes
    wrong here stops nothing: whose it is shows then.
    """
    if works[0].config.tolerate == "skip":
        return  # a client that is left out for what one method keeps would be left out of the others, too
    lots: dict[Beside, list[tuple[_Work, dict[Method, _Checkpoint], Progress]]] = {}
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
    works: Sequence[_Work],
    method: Method,
    begun: Sequence[Progress],
    files: Sequence[Mapping[Method, _Checkpoint]],
    apart: Callable[[Progress], Mapping[Method, Progress]],
) -> list[Progress | Failed]:
    """Train a method, maybe several as one: `apart` tells what each of them reached, and `files` where that is kept."""
    engine, config = works[0].engine, works[0].config
    spent, began = [{each: file.seconds for each, file in some.items()} for some in files], time.perf_counter()
    unsaved: dict[int, Progress] = {}
    saved = [time.monotonic()] * len(works)
    names = " and ".join(file.about["methods"][0] for file in files[0].values())
    what = f"training {names}" + (f", {len(works)} seeds" if len(works) > 1 else "")

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
        tell(what, reached.round, config.rounds, f"loss {reached.losses[-1]:.3f}")
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


def _as_cells(scores: Mapping[str, Mapping[str, Sequence[Any]]]) -> dict[str, dict[str, tuple[float, float | None]]]:
    return {method: {test: (mean, std) for test, (mean, std) in row.items()} for method, row in scores.items()}


def _split(items: Sequence[T], most: int) -> list[Sequence[T]]:
    return [items[first : first + most] for first in range(0, len(items), most)]


@dataclass(frozen=True)
class _Work:
    """One seed's federation, and what is done on it."""

    config: Config
    folder: Path
    engine: Engine
    federation: Federation
    run: Run
    tests: list[str]
    code: Mapping[Method, str]  # a hash, for methods that are not the package's own, as they were when the run began

    def key_of(self, method: Method) -> str:
        """A name for all that training this method depends on, and the number of rounds."""
        return self.place_of(method, self.config.rounds).stem

    def _path_of(self, method: Method) -> str:
        """What trainings of any number of rounds have in common. Engines agree, but for bfloat16."""
        settings, seed = asdict(self.config.training), self.run.seed
        del settings["rounds"]
        how = ["bfloat16"] if self.engine.dtype == torch.bfloat16 else []
        how += self._code_of(method)
        return content_hash(FORMAT, describe(method), settings, self.federation.training_hash, seed, *how)[:16]

    def checkpoint(self, method: Method, served: list[str]) -> _Checkpoint:
        about = {"trains": describe(method), "methods": served, "seed": self.run.seed}
        return _Checkpoint(self.place_of(method, self.config.rounds), about)

    def place_of(self, method: Method, rounds: int) -> Path:
        return self.folder / "trainings" / f"{self._path_of(method)}-{rounds}.safetensors"

    def has(self, method: Method) -> bool:
        """Whether its training is there, all rounds of it."""
        return records.read_round(self.place_of(method, self.config.rounds)) == self.config.rounds

    def begin(self, method: Method, checkpoint: _Checkpoint) -> Progress:
        """Where this training was; or where the furthest one of fewer rounds was; or the start."""
        found = records.load_progress(checkpoint.path, self.engine.device)
        found = found or self._adopt_shorter(method, checkpoint.path)
        clients, file = len(self.run.shards), records.clients_file(checkpoint.path)
        if found and len(found.mine) != clients:
            raise InputError(
                f"{checkpoint.path} has {len(found.mine)} clients, not {clients}; delete it to train again."
            )
        with code_of_a_method():
            return found or start(method, clients, self.run.seed, self.engine.device, file)

    def keep(self, method: Method, checkpoint: _Checkpoint, reached: Progress) -> None:
        """A checkpoint of this round stays, if it is one of those to keep."""
        place = self.place_of(method, reached.round)
        wanted = reached.round in self.config.keep and reached.round < self.config.rounds
        if wanted and records.read_round(place) != reached.round:  # it may be there, but not finished
            with store.hold(place.with_suffix(".lock"), wait=False) as ours:
                if ours:  # else another process trains so many rounds
                    records.copy_progress(checkpoint.path, place)

    def _adopt_shorter(self, method: Method, path: Path) -> Progress | None:
        """The furthest training of fewer rounds that is whole becomes the beginning of this one."""
        others = path.parent.glob(f"{self._path_of(method)}-*.safetensors")
        reached = {other: records.read_round(other) for other in sorted(others)}
        for other in [other for other, number in reached.items() if number < 0]:
            warnings.warn(f"{other} is damaged, and is passed over.", stacklevel=2)
        shorter = {other: number for other, number in reached.items() if 0 <= number <= self.config.rounds}
        for other in sorted(shorter, key=lambda other: -shorter[other]):
            records.copy_progress(other, path)
            try:
                return records.load_progress(path, self.engine.device)
            except InputError:  # the next one, or the start
                warnings.warn(f"{other} is damaged, and is passed over.", stacklevel=2)
                records.delete_progress(path)
        return None

    def name_answer(self, name: str, method: Method, training: str) -> str:
        """The name of a method, and of all that its answers depend on."""
        tested = (self.tests, self.config.samples, self.federation.content_hash, CORRUPTION_VERSION)
        is_ = describe(method), *self._code_of(method)
        return f"{name}-{self.run.seed}-{content_hash(FORMAT, training, *is_, *tested)[:16]}"

    def _code_of(self, method: Method) -> list[str]:
        return [self.code[method]] if method in self.code else []

    def keep_traceback(self, name: str, error: Failed) -> str:
        """Why a method failed, in a line; where its code raised something, with the file that tells where."""
        if error.__cause__ is None:
            return str(error)
        path = self._traceback_of(name)
        with store.whole_file(path) as part:
            told = "".join(traceback.format_exception(error.__cause__))
            part.write_text(told, encoding="utf-8", errors="backslashreplace")
        return f"{error} ({path} has the traceback)"

    def forget_traceback(self, name: str) -> None:
        self._traceback_of(name).unlink(missing_ok=True)

    def _traceback_of(self, name: str) -> Path:
        return self.folder / "failures" / f"{name}-{self.run.seed}.txt"

    def keep_examples(self) -> str:
        """The first images of some clients' streams, in a file for those who look at answers; its name."""
        name = f"{self.run.seed}-{content_hash(self.tests, self.federation.content_hash, CORRUPTION_VERSION)[:16]}"
        path = self.folder / "examples" / f"{name}.npz"
        if not records.read_samples(path):
            some = {
                f"{test}/{k}": self.federation.images(stream.first(EXAMPLES))
                for test, streams in self.federation.tests.items()
                for k, stream in enumerate(streams[:EXAMPLE_CLIENTS])
                if stream is not None and test in self.tests
            }
            store.write_arrays(path, some, compress=True)
        return name

    def answer(
        self, name: str, method: Method, training: str, progress: Progress, wait: bool
    ) -> tuple[dict[str, Any], bool] | None:
        """The answers of every client to every test, and whether they were there before.

        None if another process is at it, unless this one is to wait for it.
        """
        path = self.folder / "answers" / f"{self.name_answer(name, method, training)}.json"
        with store.hold(path.with_suffix(".lock"), wait) as ours:
            if not ours:
                return None
            done = self._read_answer(path)
            return (done, True) if done else (self._answer(name, method, training, progress, path), False)

    def _samples_of(self, path: Path) -> Path:
        return self.folder / "samples" / f"{path.stem}.npz"

    def _read_answer(self, path: Path) -> dict[str, Any] | None:
        """What `_answer` wrote, if it is there and is what it wrote."""
        try:
            done = store.read_sealed(path)
            if done is not None:
                store.read_arrays(self._samples_of(path))
            return done
        except Damaged as error:
            warnings.warn(f"{error} The method is tested again.", stacklevel=2)
        except InputError:
            pass  # there are no samples
        return None

    def _answer(self, name: str, method: Method, training: str, progress: Progress, path: Path) -> dict[str, Any]:
        """Deploy the method on every client and let it answer every test."""
        clients, peak = range(len(self.run.shards)), 0.0
        answered: dict[tuple[str, int], tuple[Row, dict[str, np.ndarray]]] = {}
        for some in _split(clients, self.engine.together):
            tell(f"testing {name}", some[0], len(clients))
            deployed = deploy_some(method, self.run, self.config.training, progress, self.engine, some)
            if not answered:
                peak = self._measure_memory(method, tree.take(deployed, 0))
            answered |= self._answer_some(name, method, deployed, some)
        tell(f"testing {name}", len(clients), len(clients))
        order = [(test, k) for test in self.tests for k in clients if (test, k) in answered]
        rows = [asdict(answered[place][0]) for place in order]
        samples = {
            f"{test}/{k}/{column}": values for test, k in order for column, values in answered[test, k][1].items()
        }
        with code_of_a_method():
            forward, backward = method.predictor.passes
        costs = {"forward": forward, "backward": backward, "peak_mib": peak}
        about = {"method": name, "seed": self.run.seed, "training": training, "is": describe(method)}
        answer = {**about, "costs": costs, "rows": rows}
        store.write_arrays(self._samples_of(path), samples, compress=True)
        store.write_sealed(path, answer)
        return answer

    def _answer_some(
        self, name: str, method: Method, deployed: Tree, clients: Sequence[int]
    ) -> dict[tuple[str, int], tuple[Row, dict[str, np.ndarray]]]:
        """By test and client: the score, and what is known of every sample."""
        places, asked, labels = [], [], []
        for test in self.tests:
            for i, k in enumerate(clients):
                stream = self.federation.tests[test][k]
                if stream is not None:
                    stream = stream.first(self.config.samples)
                    places.append((test, k))
                    asked.append(Question(i, self.federation.images(stream), (self.run.seed, test, k)))
                    labels.append(self.federation.labels(stream))
        with code_of_a_method():
            answers = self.engine.answer(method, deployed, [self.run.shards[k] for k in clients], asked)
        scored = {}
        for (test, k), question, truth, answered in zip(places, asked, labels, answers, strict=True):
            scores = score(answered, truth, question.path)
            ms = 1000 * scores.seconds / len(truth)
            right = int(scores.right.sum())
            row = Row(name, self.run.seed, test, k, len(truth), right, 100 * scores.accuracy, ms)
            known = {"right": scores.right, "label": truth.astype(np.int16), "answer": scores.classes.astype(np.int16)}
            scored[test, k] = (row, scores.info | known)
        return scored

    def _measure_memory(self, method: Method, mine: Tree) -> float:
        """The most memory that tensors take while one sample is answered, in MiB."""
        image, label = self.federation.pool.images[:1], self.federation.pool.labels[:1]
        shard, path = self.run.shards[0], (self.run.seed, "memory")
        with code_of_a_method(), one_thread_of_torch():
            return measure_peak(lambda: answer_stream(method, mine, shard, image, label, path))
