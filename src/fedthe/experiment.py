"""Run an experiment: train what its methods need, once each, deploy them on every client, and keep what came of it.

Trainings and answers are filed under a hash of everything they depend on. So a run that was stopped goes on where it
was, a method or a seed added later costs only itself, and nothing is ever taken for what it is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from . import records, store
from .config import Config, make_config, suggest
from .data import load_dataset
from .data.plan import Federation, build
from .engine.evaluate import answer_stream
from .engine.memory import measure_peak
from .engine.train import Diverged, Progress, deploy, make_shards, train
from .errors import InputError
from .methods import METHODS
from .methods.base import Method, describe
from .nets import NETS
from .nets.net import Net
from .progress import tell
from .store import content_hash
from .tree import Tree
from .types import Shard


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

    def _over_clients(self, reduce: Callable[[list[float]], Any]) -> dict[str, dict[str, float]]:
        cells: dict[tuple[str, str], dict[int, list[float]]] = {}
        for row in self.rows:
            cells.setdefault((row.method, row.test), {}).setdefault(row.seed, []).append(row.accuracy)
        table: dict[str, dict[str, float]] = {}
        for (method, test), seeds in cells.items():
            table.setdefault(method, {})[test] = float(np.mean([reduce(clients) for clients in seeds.values()]))
        return table


def run(config: Config | None = None, **settings: Any) -> Results:
    """Run an experiment, or go on with it. `fedthe.run(methods=["fedthe"], rounds=10)` or `fedthe.run(config)`."""
    config = make_config((config.as_dict() if config else {}) | settings)
    began, folder = time.perf_counter(), config.folder
    methods = make_methods(config, classes=2, channels=3, size=32)  # refuse unknown names before any work
    store.write_json(folder / "config.json", config.as_dict())
    store.write_json(folder / "environment.json", records.describe_environment())
    answers: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    trainings: dict[str, dict[str, Any]] = {}
    notes: tuple[str, ...] = ()
    dataset = load_dataset(config.dataset, natural=config.natural, size=config.size)
    for seed in config.seeds:
        federation = build(dataset, config.settings(seed))
        notes = federation.notes
        tests = _pick_tests(config, federation)
        store.write_json(folder / f"manifest-{seed}.json", federation.manifest)
        shards = make_shards(federation)
        _, h, _, c = dataset.pool.images.shape
        methods = make_methods(config, len(dataset.pool.classes), c, h)
        for trained, served in group_by_training(methods).items():
            work = _Work(config, folder, federation, shards, tests, seed)
            key = work.key_of(trained)
            try:
                progress, seconds = work.train(trained, key, list(served))
                for name, method in served.items():
                    answers.append(work.answer(name, method, key, progress))
                trainings[key] = {"seed": seed, "methods": list(served), "rounds": progress.round, "seconds": seconds}
            except Diverged as error:
                failures |= {f"{name}, seed {seed}": str(error) for name in served}
                trainings[key] = {"seed": seed, "methods": list(served), "failed": str(error)}
    rows = tuple(Row(**row) for answer in answers for row in answer["rows"])
    written = records.write_results(folder, [asdict(row) for row in rows])
    store.write_json(folder / "trainings.json", trainings)
    costs = {answer["method"]: answer["costs"] for answer in answers}
    seconds = time.perf_counter() - began
    results = Results(rows, costs, failures, trainings, notes, folder, seconds)
    store.write_json(
        folder / "summary.json",
        {"results": results.table(), "worst": results.worst(), "costs": costs, "failures": failures, "files": written},
    )
    return results


def group_by_training(methods: Mapping[str, Method]) -> dict[Method, dict[str, Method]]:
    """Methods by the federated training they deploy, so that it is done once."""
    groups: dict[Method, dict[str, Method]] = {}
    for name, method in methods.items():
        groups.setdefault(method.trains_as(), {})[name] = method
    return groups


def make_methods(config: Config, classes: int, channels: int, size: int) -> dict[str, Method]:
    net = make_net(config, classes, channels, size)
    unknown = [name for name in (*config.methods, *config.hyper) if name not in METHODS]
    if unknown:
        raise InputError(f"there is no method {unknown[0]!r}; {suggest(unknown[0], METHODS)}")
    return {name: set_hyper(METHODS[name](net), config.hyper.get(name, {}), name) for name in config.methods}


def make_net(config: Config, classes: int, channels: int, size: int) -> Net:
    if config.net not in NETS:
        raise InputError(f"there is no network {config.net!r}; {suggest(config.net, NETS)}")
    more = {"width": config.width} if config.net == "resnet20_gn" else {}
    return NETS[config.net](classes, channels, size, config.head_layers, **more)


def set_hyper(value: Any, given: Mapping[str, Any], name: str) -> Any:
    """A method with some hyperparameters changed; they are looked for in the method, then in its predictor's parts."""
    for key, setting in given.items():
        changed = _set_one(value, key, setting)
        if changed is None:
            raise InputError(f"{name} has no hyperparameter {key!r}; {suggest(key, _list_hyper(value))}")
        value = changed
    return value


def _set_one(value: Any, key: str, setting: Any) -> Any | None:
    parts = {each.name: getattr(value, each.name) for each in fields(value) if each.name != "net"}
    if key in parts and not is_dataclass(parts[key]):
        if isinstance(parts[key], float) and isinstance(setting, int) and not isinstance(setting, bool):
            setting = float(setting)
        if type(setting) is not type(parts[key]):
            raise InputError(f"{key} must be like {parts[key]!r}, not {setting!r}.")
        return replace(value, **{key: setting})
    for part, inner in parts.items():
        if is_dataclass(inner) and (changed := _set_one(inner, key, setting)) is not None:
            return replace(value, **{part: changed})
    return None


def _list_hyper(value: Any) -> list[str]:
    names = []
    for each in fields(value):
        inner = getattr(value, each.name)
        names += _list_hyper(inner) if is_dataclass(inner) and each.name != "net" else [each.name]
    return [name for name in names if name != "net"]


def _pick_tests(config: Config, federation: Federation) -> list[str]:
    for test in config.tests or ():
        if test not in federation.tests:
            raise InputError(f"there is no test {test!r} here; {suggest(test, federation.tests)}")
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
        content = (self.federation.manifest_hash, self.federation.pool.digest, self.seed)
        return content_hash(describe(method), asdict(self.config.training), *content)[:16]

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
        except (Diverged, KeyboardInterrupt):
            if last is not None:
                save(last)  # the last good round, to look at or to go on from
            raise
        return progress, float((records.read_json(facts_path) or {}).get("seconds", 0.0))

    def answer(self, name: str, method: Method, training: str, progress: Progress) -> dict[str, Any]:
        """Deploy the method on every client and let it answer every test, unless that was done before."""
        limits = (self.tests, self.config.samples, self.config.severity, self.federation.frost_digest)
        key = content_hash(training, describe(method), *limits)[:16]
        path = self.folder / "answers" / f"{name}-{self.seed}-{key}.json"
        done = records.read_json(path)
        if done is not None:
            return dict(done)
        deployed = deploy(method, self.shards, self.config.training, self.seed, progress)
        rows: list[dict[str, Any]] = []
        samples: dict[str, np.ndarray] = {}
        for i, test in enumerate(self.tests):
            for k, mine in enumerate(deployed):
                tell(f"testing {name}", i * len(deployed) + k, len(self.tests) * len(deployed), test)
                row, detail = self._answer_one(name, method, mine, test, k)
                if row is not None:
                    rows.append(asdict(row))
                    samples |= {f"{test}/{k}/{column}": values for column, values in detail.items()}
        forward, backward = method.predictor.passes
        costs = {"forward": forward, "backward": backward, "peak_mib": self._measure_memory(method, deployed[0])}
        answer = {"method": name, "seed": self.seed, "training": training, "is": describe(method), "costs": costs}
        records.write_samples(self.folder / "samples" / f"{path.stem}.npz", samples)
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
