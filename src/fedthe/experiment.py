"""Run an experiment: train what its methods need, once each, deploy them on every client, and keep what came of it.

Trainings and answers are filed under a hash of everything they depend on. So a run that was stopped goes on where it
was, a method or a seed added later costs only itself, and nothing is ever taken for what it is not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from . import records, store
from .config import Config, make_config
from .data import load_dataset
from .data.plan import CORRUPTION_VERSION, Federation, build
from .data.pool import Pool
from .engine.evaluate import answer_stream
from .engine.memory import measure_peak
from .engine.train import Failed, Progress, deploy, make_shards, train
from .errors import InputError
from .methods import METHODS, STUDIES
from .methods.base import Method, describe
from .methods.fedthe import HeadEnsemble
from .nets import NETS
from .nets.net import Net
from .progress import tell, track
from .store import content_hash
from .text import find_nearest
from .tree import Tree
from .types import Shard

FORMAT = 1  # part of every file's name; raised when a change of the code moves numbers, so that no old file is taken


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
        return self._over_clients(np.mean)

    def worst(self) -> dict[str, dict[str, float]]:
        """The worst client's percent, the mean over seeds."""
        return self._over_clients(np.min)

    def std(self) -> dict[str, dict[str, float]]:
        """The standard deviation over seeds of what `table` gives; 0 for a single seed."""
        return self._over_clients(np.mean, np.std)

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
            "folder": str(self.folder),
            "seconds": self.seconds,
        }

    def _over_clients(
        self, reduce: Callable[[list[float]], Any], over_seeds: Callable[[list[float]], Any] = np.mean
    ) -> dict[str, dict[str, float]]:
        cells: dict[tuple[str, str], dict[int, list[float]]] = {}
        for row in self.rows:
            cells.setdefault((row.method, row.test), {}).setdefault(row.seed, []).append(row.accuracy)
        table: dict[str, dict[str, float]] = {}
        for (method, test), seeds in cells.items():
            table.setdefault(method, {})[test] = float(over_seeds([reduce(clients) for clients in seeds.values()]))
        return table


def run(config: Config | None = None, **settings: Any) -> Results:
    """Run an experiment, or go on with it. `fedthe.run(methods=["fedthe"], rounds=10)` or `fedthe.run(config)`."""
    config = make_config((config.as_dict() if config else {}) | settings)
    began, folder = time.perf_counter(), config.folder
    make_methods(config, classes=2, channels=3, size=32)  # refuse unknown names before any work
    dataset = load_dataset(config.dataset, natural=config.natural, size=config.size)
    methods = make_methods(config, len(dataset.pool.classes), *_check_images(dataset.pool, config))
    federations = [build(dataset, config.settings(seed)) for seed in config.seeds]
    tests = _pick_tests(config, federations[0])
    for name in ("results.jsonl", "results.parquet", "summary.json", "trainings.json"):
        (folder / name).unlink(missing_ok=True)  # they may be of other settings; what they came from stays
    store.write_json(folder / "config.json", config.as_dict())
    store.write_json(folder / "environment.json", records.describe_environment())

    answers: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    trainings: dict[str, dict[str, Any]] = {}
    for federation in federations:
        seed = federation.settings.seed
        store.write_json(folder / f"manifest-{seed}.json", federation.manifest)
        work = _Work(config, folder, federation, make_shards(federation), tests, seed)
        for trained, served in group_by_training(methods).items():
            key = work.key_of(trained)
            trainings[key] = {"seed": seed, "methods": list(served)}
            try:
                progress, seconds = work.train(trained, key, list(served))
            except Failed as error:
                failures |= {f"{name}, seed {seed}": str(error) for name in served}
                trainings[key]["failed"] = str(error)
                continue
            trainings[key] |= {"rounds": progress.round, "seconds": seconds}
            for name, method in served.items():
                try:
                    answers.append(work.answer(name, method, key, progress))
                except Failed as error:
                    failures[f"{name}, seed {seed}"] = str(error)
    rows = tuple(Row(**row) for answer in answers for row in answer["rows"])
    costs = {answer["method"]: answer["costs"] for answer in answers}
    notes = tuple(dict.fromkeys(note for federation in federations for note in federation.notes))
    results = Results(rows, costs, failures, trainings, notes, folder, time.perf_counter() - began)
    records.write_results(folder, [asdict(row) for row in rows])
    store.write_json(folder / "trainings.json", trainings)
    store.write_json(folder / "summary.json", results.summary())
    return results


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


def make_methods(config: Config, classes: int, channels: int, size: int) -> dict[str, Method]:
    net, known = make_net(config, classes, channels, size), METHODS | STUDIES
    methods = {}
    for name in dict.fromkeys((*config.methods, *config.hyper)):
        if name not in known:
            raise InputError(f"there is no method {name!r}; {find_nearest(name, known)}")
        method = known[name](net)
        if config.net == "cct4" and isinstance(method.predictor, HeadEnsemble):
            method = set_hyper(method, {"search.lr": 0.01}, name)  # the paper's rate for this network
        methods[name] = set_hyper(method, config.hyper.get(name, {}), name)
        methods[name].predictor.check(methods[name])
    return {name: methods[name] for name in config.methods}


def make_net(config: Config, classes: int, channels: int, size: int) -> Net:
    if config.net not in NETS:
        raise InputError(f"there is no network {config.net!r}; {find_nearest(config.net, NETS)}")
    more = {"width": config.width} if config.net == "resnet20_gn" else {}
    return NETS[config.net](classes, channels, size, config.head_layers, **more)


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


def _pick_tests(config: Config, federation: Federation) -> list[str]:
    for test in config.tests or ():
        if test not in federation.tests:
            raise InputError(f"there is no test {test!r} here; {find_nearest(test, federation.tests)}")
    return [test for test in federation.tests if config.tests is None or test in config.tests]


@dataclass(frozen=True)
class _Work:
    """One seed's federation, and what is done on it."""

    config: Config
    folder: Path
    federation: Federation
    shards: list[Shard]
    tests: list[str]
    seed: int

    def key_of(self, method: Method) -> str:
        """A name for all that training this method depends on."""
        settings = asdict(self.config.training)
        return content_hash(FORMAT, describe(method), settings, self.federation.training_hash, self.seed)[:16]

    def train(self, method: Method, key: str, served: list[str]) -> tuple[Progress, float]:
        """The training of `method`, from its checkpoint or from the start."""
        settings, path = self.config.training, self.folder / "trainings" / f"{key}.safetensors"
        facts_path = path.with_suffix(".json")
        facts = records.read_json(facts_path) or {}
        progress = records.load_progress(path)
        spent, began, saved = facts.get("seconds", 0.0), time.perf_counter(), time.monotonic()
        last = progress

        def save(reached: Progress) -> None:
            records.save_progress(path, reached)
            seconds = spent + time.perf_counter() - began
            about = {"trains": describe(method), "methods": served, "seed": self.seed, "rounds": reached.round}
            store.write_json(facts_path, about | {"seconds": seconds})

        def after_round(reached: Progress) -> None:
            nonlocal last, saved
            last = reached
            tell(f"training {served[0]}", reached.round, settings.rounds, f"loss {reached.losses[-1]:.3f}")
            if reached.round == settings.rounds or time.monotonic() - saved >= self.config.checkpoint_seconds:
                save(reached)
                saved = time.monotonic()

        try:
            progress = train(method, self.shards, settings, self.seed, progress, after_round)
        except (Failed, KeyboardInterrupt):
            if last is not None:
                save(last)  # the last good round, to look at or to go on from
            raise
        return progress, float((records.read_json(facts_path) or {}).get("seconds", 0.0))

    def answer(self, name: str, method: Method, training: str, progress: Progress) -> dict[str, Any]:
        """Deploy the method on every client and let it answer every test, unless that was done before."""
        tested = (self.tests, self.config.samples, self.federation.content_hash, CORRUPTION_VERSION)
        key = content_hash(FORMAT, training, describe(method), *tested)[:16]
        path = self.folder / "answers" / f"{name}-{self.seed}-{key}.json"
        samples_path = self.folder / "samples" / f"{path.stem}.npz"
        done = records.read_json(path)
        if done is not None and samples_path.exists():
            return dict(done)
        deployed = deploy(method, self.shards, self.config.training, self.seed, progress)
        rows: list[dict[str, Any]] = []
        samples: dict[str, np.ndarray] = {}
        streams = [(test, k) for test in self.tests for k in range(len(deployed))]
        for test, k in track(f"testing {name}", streams):
            row, detail = self._answer_one(name, method, deployed[k], test, k)
            if row is not None:
                rows.append(asdict(row))
                samples |= {f"{test}/{k}/{column}": values for column, values in detail.items()}
        forward, backward = method.predictor.passes
        costs = {"forward": forward, "backward": backward, "peak_mib": self._measure_memory(method, deployed[0])}
        answer = {"method": name, "seed": self.seed, "training": training, "is": describe(method), "costs": costs}
        records.write_samples(samples_path, samples)
        store.write_json(path, answer | {"rows": rows})
        return answer | {"rows": rows}

    def _answer_one(
        self, name: str, method: Method, mine: Tree, test: str, k: int
    ) -> tuple[Row | None, dict[str, np.ndarray]]:
        stream = self.federation.tests[test][k]
        if stream is None:
            return None, {}
        stream = stream.take(np.arange(min(len(stream), self.config.samples or len(stream))))
        images, labels = self.federation.images(stream), self.federation.labels(stream)
        scores = answer_stream(method, mine, self.shards[k], images, labels, (self.seed, test, k))
        ms = 1000 * scores.seconds / len(stream)
        row = Row(name, self.seed, test, k, len(stream), int(scores.right.sum()), 100 * scores.accuracy, ms)
        return row, {"right": scores.right, **scores.info}

    def _measure_memory(self, method: Method, mine: Tree) -> float:
        """The most memory that tensors take while one sample is answered, in MiB."""
        image, label = self.federation.pool.images[:1], self.federation.pool.labels[:1]
        return measure_peak(lambda: answer_stream(method, mine, self.shards[0], image, label, (self.seed, "memory")))
