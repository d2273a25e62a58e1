"""Run an experiment: train what its methods need, once each, deploy them on every client, and keep what came of it.

Trainings and answers are filed under a hash of everything they depend on. So a run that was stopped goes on where it
was, a method or a seed added later costs only itself, and nothing is ever taken for what it is not.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from . import records, store, tree
from .config import Config, make_config
from .data import load_dataset
from .data.plan import CORRUPTION_VERSION, Federation, build
from .data.pool import Pool
from .engine.beside import Beside
from .engine.evaluate import answer_stream, score
from .engine.memory import measure_peak
from .engine.pick import pick_engine
from .engine.shards import Shards
from .engine.train import deploy_some, put_beside, start, take_apart, train_together
from .engine.visit import Diverged, Engine, Progress, Question, Run
from .errors import Failed, InputError
from .live import Recorder, recording
from .methods import METHODS, STUDIES
from .methods.base import Method, describe, find_sender
from .methods.fedthe import HeadEnsemble
from .nets import NETS
from .nets.net import Net
from .nets.standardized import standardize
from .progress import tell
from .store import content_hash
from .text import find_nearest
from .tree import Tree

T = TypeVar("T")
Moments = tuple[tuple[float, ...], tuple[float, ...]]
get_engine = lru_cache(maxsize=1)(pick_engine)  # with its compiled programs, for the runs that follow in a process
EXAMPLES, EXAMPLE_CLIENTS = 4, 20  # images of a stream that are kept to look at, and of so many clients
FORMAT = 2  # part of every file's name; raised when a change of the code moves numbers, so that no old file is taken


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
    config: Config
    environment: Mapping[str, Any]
    folder: Path
    seconds: float

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
            "curves": {str(rounds): scores for rounds, scores in self.curves.items()},
            "answers": list(self.answers),
            "examples": self.examples,
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
    engine = works[0].engine
    for name in ("results.jsonl", "results.parquet", "summary.json", "trainings.json", "progress.json"):
        (folder / name).unlink(missing_ok=True)  # they may be of other settings; what they came from stays
    store.write_json(folder / "config.json", config.as_dict())
    environment = records.describe_environment(engine.device)
    store.write_json(folder / "environment.json", environment)
    for work in works:
        store.write_json(folder / f"manifest-{work.run.seed}.json", work.federation.manifest)
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
            notes=tuple(dict.fromkeys(note for work in works for note in work.federation.notes)),
            manifests={work.run.seed: work.federation.manifest_hash for work in works},
            names={test: name_shift(test, pool) for test, pool in natural.items()},
            pools={test: pool.name for test, pool in natural.items()},
            curves=curves,
            answers=done.files,
            examples=works[0].keep_examples(),
            config=config,
            environment=environment,
            folder=folder,
            seconds=time.perf_counter() - began,
        )
        records.write_results(folder, [asdict(row) for row in done.rows])
        store.write_json(folder / "trainings.json", done.trainings)
        store.write_json(folder / "summary.json", results.summary())
    return results


@dataclass(frozen=True)
class _Measured:
    """What methods came to, after a number of rounds."""

    rows: tuple[Row, ...]
    costs: dict[str, dict[str, float]]
    failures: dict[str, str]
    trainings: dict[str, dict[str, Any]]
    files: tuple[str, ...]


def _count(methods: Mapping[str, Method], stages: Sequence[Sequence[_Work]]) -> tuple[int, int]:
    """What there is to do: trainings that are not there yet, and answers in all."""
    trainings = group_by_training(methods)
    left = [work for works in stages for work in works for each in trainings if not work.has(each)]
    return len(left), len(methods) * sum(map(len, stages))


def _measure(methods: Mapping[str, Method], works: Sequence[_Work], recorder: Recorder) -> _Measured:
    """Train, deploy and test all methods on all seeds, or take what is there."""
    answers: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    trainings: dict[str, dict[str, Any]] = {}
    for trained, served, work, outcome in _train_all(methods, works):
        seed, key = work.run.seed, work.key_of(trained)
        trainings[key] = {"seed": seed, "methods": list(served)}
        if isinstance(outcome, Failed):
            trainings[key]["failed"] = str(outcome)
            for name in served:
                failures[f"{name}, seed {seed}"] = str(outcome)
                recorder.add_failure(f"{name}, seed {seed}: {outcome}")
            continue
        trainings[key] |= {"rounds": outcome.round, "seconds": work.checkpoint(trained, list(served)).seconds}
        for name, method in served.items():
            try:
                answer = work.answer(name, method, key, outcome)
            except Failed as error:
                failures[f"{name}, seed {seed}"] = str(error)
                recorder.add_failure(f"{name}, seed {seed}: {error}")
            else:
                file = work.name_answer(name, method, key)
                answers[file] = answer
                recorder.add_answer(file)
    rows = tuple(Row(**row) for answer in answers.values() for row in answer["rows"])
    costs = {answer["method"]: answer["costs"] for answer in answers.values()}
    return _Measured(rows, costs, failures, trainings, tuple(answers))


def read_results(folder: Path) -> Results:
    """What `run` returned, from what it left behind."""
    summary, config, environment = (
        records.read_json(folder / f"{name}.json") for name in ("summary", "config", "environment")
    )
    if config is None:
        raise InputError(f"{folder} holds no run; `fedthe run` makes one.")
    if summary is None:
        raise InputError(f"{folder} holds a run that is not finished; the command that began it goes on with it.")
    try:
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
            curves={int(rounds): _as_cells(scores) for rounds, scores in summary["curves"].items()},
            answers=tuple(summary["answers"]),
            examples=summary["examples"],
            config=make_config(config),
            environment=environment or {},
            folder=folder,
            seconds=summary["seconds"],
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(
            f"{folder} is a run of another version, or damaged ({error}); run it again, which trains nothing anew."
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
) -> Iterator[tuple[Method, dict[str, Method], _Work, Progress | Diverged]]:
    """Every training that methods need, on every seed: whom it serves, and what came of it."""
    trainings = group_by_training(methods)
    for trained, served in trainings.items():
        alike = [each for each in trainings if find_sender(each) == find_sender(trained)]
        for some in _split(works, works[0].engine.together):
            if trained is alike[0] and len(alike) > 1:
                train_beside(some, {each: list(trainings[each]) for each in alike})
            for work, outcome in zip(some, train_some(some, trained, list(served)), strict=True):
                yield trained, served, work, outcome


def _prepare(config: Config) -> tuple[dict[str, Method], list[_Work]]:
    """The methods, and the federation of every seed. Whatever is wrong with the settings is refused here."""
    engine = get_engine(config.engine, config.device, config.precision)
    make_methods(config, classes=2, channels=3, size=32)  # refuse unknown names before any work
    dataset = load_dataset(config.dataset, natural=config.natural, size=config.size)
    moments = dataset.pool.moments if config.standardize else None
    methods = make_methods(config, len(dataset.pool.classes), *_check_images(dataset.pool, config), moments)
    federations = [build(dataset, config.settings(seed)) for seed in config.seeds]
    tests = pick_tests(config, federations[0].tests)
    return methods, [
        _Work(config, config.folder, engine, each, Run(each.settings.seed, Shards(each, engine.device)), tests)
        for each in federations
    ]


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
    more = {"width": config.width} if config.net == "resnet20_gn" else {}
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
        facts = records.read_json(self.facts)
        spent = facts.get("seconds") if isinstance(facts, dict) else None
        return float(spent) if isinstance(spent, int | float) else 0.0

    def save(self, reached: Progress, seconds: float) -> None:
        records.save_progress(self.path, reached)
        store.write_json(self.facts, {**self.about, "rounds": reached.round, "seconds": seconds})


def train_some(works: Sequence[_Work], method: Method, served: list[str]) -> list[Progress | Diverged]:
    """The training of `method` on several federations side by side, from their checkpoints or from the start."""
    files = [{method: work.checkpoint(method, served)} for work in works]
    begun = [work.begin(method, file[method]) for work, file in zip(works, files, strict=True)]
    return _train(works, method, begun, files, lambda reached: {method: reached})


def train_beside(works: Sequence[_Work], trainings: Mapping[Method, list[str]]) -> None:
    """What is left of trainings that send the same, where they are in the same round.

    Their checkpoints are as if each had been trained alone, and each is asked for alone afterwards. So whatever goes
    wrong here stops nothing: whose it is shows then.
    """
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
) -> list[Progress | Diverged]:
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


def _is_answer(value: Any) -> bool:
    """Whether a file holds what `_Work.answer` wrote."""
    if not (isinstance(value, dict) and {"method", "rows", "costs"} <= value.keys()):
        return False
    try:
        return all(Row(**row) for row in value["rows"])
    except TypeError:
        return False


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

    def key_of(self, method: Method) -> str:
        """A name for all that training this method depends on, and the number of rounds."""
        return self.place_of(method, self.config.rounds).stem

    def _path_of(self, method: Method) -> str:
        """What trainings of any number of rounds have in common. Engines agree, but for bfloat16."""
        settings, seed = asdict(self.config.training), self.run.seed
        del settings["rounds"]
        rounded = ["bfloat16"] if self.engine.dtype == torch.bfloat16 else []
        return content_hash(FORMAT, describe(method), settings, self.federation.training_hash, seed, *rounded)[:16]

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
        return found or start(method, clients, self.run.seed, self.engine.device, file)

    def keep(self, method: Method, checkpoint: _Checkpoint, reached: Progress) -> None:
        """A checkpoint of this round stays, if it is one of those to keep."""
        place = self.place_of(method, reached.round)
        wanted = reached.round in self.config.keep and reached.round < self.config.rounds
        if wanted and records.read_round(place) != reached.round:  # it may be there, but not finished
            records.copy_progress(checkpoint.path, place)

    def _adopt_shorter(self, method: Method, path: Path) -> Progress | None:
        """The furthest training of fewer rounds that is whole becomes the beginning of this one."""
        others = path.parent.glob(f"{self._path_of(method)}-*.safetensors")
        reached = {other: records.read_round(other) for other in sorted(others)}
        shorter = {other: number for other, number in reached.items() if 0 <= number <= self.config.rounds}
        for other in sorted(shorter, key=lambda other: -shorter[other]):
            records.copy_progress(other, path)
            try:
                return records.load_progress(path, self.engine.device)
            except InputError:  # damaged; the next one, or the start
                records.delete_progress(path)
        return None

    def name_answer(self, name: str, method: Method, training: str) -> str:
        """The name of a method, and of all that its answers depend on."""
        tested = (self.tests, self.config.samples, self.federation.content_hash, CORRUPTION_VERSION)
        return f"{name}-{self.run.seed}-{content_hash(FORMAT, training, describe(method), *tested)[:16]}"

    def keep_examples(self) -> str:
        """The first images of some clients' streams, in a file for those who look at answers; its name."""
        name = f"{self.run.seed}-{content_hash(self.tests, self.federation.content_hash, CORRUPTION_VERSION)[:16]}"
        path = self.folder / "examples" / f"{name}.npz"
        if not path.exists():
            some = {
                f"{test}/{k}": self.federation.images(stream.first(EXAMPLES))
                for test, streams in self.federation.tests.items()
                for k, stream in enumerate(streams[:EXAMPLE_CLIENTS])
                if stream is not None and test in self.tests
            }
            records.write_samples(path, some)
        return name

    def answer(self, name: str, method: Method, training: str, progress: Progress) -> dict[str, Any]:
        """Deploy the method on every client and let it answer every test, unless that was done before."""
        seed = self.run.seed
        path = self.folder / "answers" / f"{self.name_answer(name, method, training)}.json"
        samples_path = self.folder / "samples" / f"{path.stem}.npz"
        done = records.read_json(path)
        if _is_answer(done) and samples_path.exists():
            return dict(done)
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
        forward, backward = method.predictor.passes
        costs = {"forward": forward, "backward": backward, "peak_mib": peak}
        answer = {"method": name, "seed": seed, "training": training, "is": describe(method), "costs": costs}
        records.write_samples(samples_path, samples)
        store.write_json(path, answer | {"rows": rows})
        return answer | {"rows": rows}

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
        answers = self.engine.answer(method, deployed, [self.run.shards[k] for k in clients], asked)
        scored = {}
        for (test, k), question, truth, answered in zip(places, asked, labels, answers, strict=True):
            scores = score(answered, truth, question.path)
            ms = 1000 * scores.seconds / len(truth)
            right = int(scores.right.sum())
            row = Row(name, self.run.seed, test, k, len(truth), right, 100 * scores.accuracy, ms)
            known = {"right": scores.right, "label": truth.astype(np.int16), "answer": scores.classes.astype(np.int16)}
            scored[test, k] = (row, known | scores.info)
        return scored

    def _measure_memory(self, method: Method, mine: Tree) -> float:
        """The most memory that tensors take while one sample is answered, in MiB."""
        image, label = self.federation.pool.images[:1], self.federation.pool.labels[:1]
        shard, path = self.run.shards[0], (self.run.seed, "memory")
        return measure_peak(lambda: answer_stream(method, mine, shard, image, label, path))
