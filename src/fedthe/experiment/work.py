"""One seed's federation, and what is filed for it: checkpoints of trainings, answers, examples, tracebacks.

Files are named by a hash of everything they depend on. So a run that was stopped continues, an added method or seed
costs only itself, and no file is mistaken for another.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from .. import records, store, tree
from ..config import Config
from ..corruptions import CORRUPTION_VERSION
from ..data.plan import Federation, build
from ..data.pool import Dataset
from ..data.unknown import set_aside
from ..engine.conclude import conclude
from ..engine.evaluate import answer_one, begin_one, check_columns, score
from ..engine.memory import measure_peak
from ..engine.pick import pick_engine
from ..engine.robust import check_effect
from ..engine.server import count_sampled
from ..engine.shards import Shards, hide_labels
from ..engine.stack import Stack
from ..engine.train import can_join, deploy_some, deploy_unlabeled, start
from ..engine.visit import Engine, Progress, Question, Run
from ..errors import Damaged, Failed, InputError, code_of_a_method, format_traceback
from ..fingerprint import fingerprint
from ..methods.base import Method
from ..methods.compose import describe
from ..methods.make import Recipes, find_parts, make_methods
from ..nets import NETS
from ..parallel import one_thread_of_torch
from ..progress.events import AnswerEvent, tell
from ..store import content_hash
from ..text import find_nearest, flatten
from ..tree import Tree
from .checkpoint import Checkpoint
from .data import check_methods, fit_to_data, fit_to_net, load, pick_net, take_samples
from .results import NO_EXAMPLES
from .scores import ClientScore, make_columns, make_row
from .streams import check_asked, pick_stream
from .workers import find_workers, use_workers

T = TypeVar("T")
Scored = tuple[
    ClientScore, dict[str, np.ndarray]
]  # of one stream: its score, and columns with a value for every sample
get_engine = lru_cache(maxsize=1)(pick_engine)  # with its compiled programs, for the next runs of the process
EXAMPLES, EXAMPLE_CLIENTS = 4, 20  # images kept of each stream, and of how many clients
FORMAT = 4  # part of every file's name; raised when a change of the code moves numbers, so that no old file is taken
ANSWERS = 5  # the same of answers alone: raised when their files change, which retrains nothing


@dataclass(frozen=True)
class Work:
    """One seed's federation, what is computed on it, and where that is filed."""

    config: Config
    folder: Path
    engine: Engine
    federation: Federation
    run: Run
    tests: list[str]
    code: Mapping[Method, str]  # a hash of the code of methods that are not the package's own

    def key_of(self, method: Method) -> str:
        """The id of this method's training: a hash of all it depends on, and the number of rounds."""
        return self.place_of(method, self.config.rounds).stem

    def _path_of(self, method: Method) -> str:
        """A hash of all that a training depends on but its rounds. Engines agree, except in bfloat16."""
        settings, seed = self.config.training.describe(), self.run.seed
        del settings["rounds"]
        how = ["bfloat16"] if self.engine.dtype == torch.bfloat16 else []
        how += self._code_of(method)
        return content_hash(FORMAT, describe(method), settings, self.federation.training_hash, seed, *how)[:16]

    def checkpoint(self, method: Method, served: list[str]) -> Checkpoint:
        about = {"trains": describe(method), "methods": served, "seed": self.run.seed}
        return Checkpoint(self.place_of(method, self.config.rounds), about)

    def place_of(self, method: Method, rounds: int) -> Path:
        return self.folder / "trainings" / f"{self._path_of(method)}-{rounds}.safetensors"

    def has(self, method: Method) -> bool:
        """Whether all rounds of its training are done."""
        return records.read_round(self.place_of(method, self.config.rounds)) == self.config.rounds

    def begin(self, method: Method, checkpoint: Checkpoint) -> Progress:
        """The state to train from: this training's checkpoint, the longest shorter one, or the start."""
        found = self.find_begun(method, checkpoint.path)
        clients, file = len(self.run.shards), records.clients_file(checkpoint.path)
        if found and len(found.clients) != clients:
            raise InputError(
                f"{checkpoint.path} has {len(found.clients)} clients, not {clients}; delete it to train again."
            )
        with code_of_a_method():
            return found or start(method, clients, self.run.seed, self.engine.device, file)

    def find_begun(self, method: Method, path: Path) -> Progress | None:
        """What is filed of a training, or a copy of the longest shorter one."""
        return records.load_progress(path, self.engine.device) or self._adopt_shorter(method, path)

    def keep(self, method: Method, checkpoint: Checkpoint, reached: Progress) -> None:
        """Copy the checkpoint if its round is one to keep."""
        place = self.place_of(method, reached.round)
        wanted = reached.round in self.config.keep and reached.round < self.config.rounds
        if wanted and records.read_round(place) != reached.round:  # it may be there, but not finished
            with store.hold(place.with_suffix(".lock"), wait=False) as ours:
                if ours:  # else another process is training just that
                    records.copy_progress(checkpoint.path, place)

    def _adopt_shorter(self, method: Method, path: Path) -> Progress | None:
        """Begin with a copy of the longest undamaged training of fewer rounds."""
        others = path.parent.glob(f"{self._path_of(method)}-*.safetensors")
        reached = {other: records.read_round(other) for other in sorted(others)}
        for other in [other for other, number in reached.items() if number < 0]:
            warnings.warn(f"{other} is damaged, and is passed over.", stacklevel=2)
        shorter = {other: number for other, number in reached.items() if 0 <= number <= self.config.rounds}
        for other in sorted(shorter, key=lambda other: -shorter[other]):
            with store.hold(other.with_suffix(".lock"), wait=False) as ours:
                if not ours and records.clients_file(other).exists():
                    continue  # another process is writing both files
                records.copy_progress(other, path)
            try:
                return records.load_progress(path, self.engine.device)
            except InputError:  # the next one, or the start
                warnings.warn(f"{other} is damaged, and is passed over.", stacklevel=2)
                records.delete_progress(path)
        return None

    def name_answer(self, name: str, method: Method, training: str) -> str:
        """The name of an answer's file: method, seed, and a hash of all that it depends on."""
        tested = (self.tests, self.config.samples, self.federation.content_hash, CORRUPTION_VERSION)
        is_ = describe(method), *self._code_of(method)
        return f"{name}-{self.run.seed}-{content_hash(FORMAT, ANSWERS, training, *is_, *tested)[:16]}"

    def _code_of(self, method: Method) -> list[str]:
        return [self.code[method]] if method in self.code else []

    def keep_traceback(self, name: str, error: Failed) -> str:
        """Why a method failed, in a line. If its code raised something, the line names a file with the traceback."""
        told = format_traceback(error)
        if told is None:
            return str(error)
        path = self._traceback_of(name)
        with store.whole_file(path) as part:
            part.write_text(told, encoding="utf-8", errors="backslashreplace")
        return f"{error} ({path} has the traceback)"

    def forget_traceback(self, name: str) -> None:
        self._traceback_of(name).unlink(missing_ok=True)

    def _traceback_of(self, name: str) -> Path:
        return self.config.folder / "failures" / f"{name}-{self.run.seed}.txt"

    def keep_examples(self) -> dict[str, Any]:
        """File the first pictures of some clients' streams, for the report; return the seed and the file's name."""
        if not self.federation.pool.is_pictures:
            return {"seed": self.run.seed, "file": NO_EXAMPLES}
        name = f"{self.run.seed}-{content_hash(self.tests, self.federation.content_hash, CORRUPTION_VERSION)[:16]}"
        path = self.folder / "examples" / f"{name}.npz"
        if not records.read_arrays(path):
            some = {
                f"{test}/{k}": self.federation.inputs(stream.first(EXAMPLES))
                for test, streams in self.federation.tests.items()
                for k, stream in enumerate(streams[:EXAMPLE_CLIENTS])
                if stream is not None and test in self.tests
            }
            store.write_arrays(path, some, compress=True)
        return {"seed": self.run.seed, "file": name}

    def answer(
        self, name: str, method: Method, training: str, progress: Progress, wait: bool
    ) -> tuple[dict[str, Any], bool] | None:
        """The answers of every client to every test, and whether they were filed before.

        None if another process is computing them and `wait` is false.
        """
        path = self.place_of_answer(name, method, training)
        with store.hold(path.with_suffix(".lock"), wait) as ours:
            if not ours:
                return None
            done = self.find_answer(name, path)
            return (done, True) if done else (self._answer(name, method, training, progress, path), False)

    def place_of_answer(self, name: str, method: Method, training: str) -> Path:
        return self.folder / "answers" / f"{self.name_answer(name, method, training)}.json"

    def find_answer(self, name: str, path: Path) -> dict[str, Any] | None:
        """What is filed of an answer, or the same answer of another name."""
        return self._read_answer(path) or self._take_over(name, path)

    def _take_over(self, name: str, path: Path) -> dict[str, Any] | None:
        """The same answers under another name: fedthe(alpha=0.1) is fedthe."""
        same = path.name[-len(f"-{self.run.seed}-{'':16}.json") :]
        for other in sorted(path.parent.glob(f"*{same}")):
            if other != path and (done := self._read_answer(other)):
                renamed = {part: [row | {"method": name} for row in done[part]] for part in ("rows", "joined")}
                done |= {"method": name, **renamed}
                store.write_arrays(self._samples_of(path), store.read_arrays(self._samples_of(other)), compress=True)
                store.write_sealed(path, done)
                return done
        return None

    def _samples_of(self, path: Path) -> Path:
        return self.folder / "samples" / f"{path.stem}.npz"

    def _read_answer(self, path: Path) -> dict[str, Any] | None:
        """What `_answer` wrote; None where it is missing or damaged."""
        try:
            done = store.read_sealed(path)
            if done is not None:
                records.load_samples(self._samples_of(path))
            return done
        except Damaged as error:
            warnings.warn(f"{error} The method is tested again.", stacklevel=2)
        except InputError:
            pass  # there are no samples
        return None

    def _answer(self, name: str, method: Method, training: str, progress: Progress, path: Path) -> dict[str, Any]:
        """Deploy the method on every client and test it there, and without labels on those that join late."""
        clients, peak = range(len(self.run.shards)) if can_join(method) else self.run.trained, 0.0
        answered: list[Scored] = []
        concluded = conclude(method, self.run, progress)
        for some in split(clients, self.engine.together):
            tell(AnswerEvent(name, self.run.seed, done=some[0], total=len(clients)))
            deployed = deploy_some(method, self.run, self.config.training, progress, self.engine, some, concluded)
            if not answered:
                peak = self._measure_memory(method, tree.take(deployed, 0))
            answered += self._answer_some(name, method, deployed, some)
        for some in split(self.run.unseen, self.engine.together):
            unlabeled = deploy_unlabeled(method, self.run, progress, some, concluded)
            answered += [] if unlabeled is None else self._answer_some(name, method, unlabeled, some, labeled=False)
        tell(AnswerEvent(name, self.run.seed, done=len(clients), total=len(clients)))
        answered.sort(key=lambda each: (self.tests.index(each[0].test), each[0].client))  # stable
        rows, joined = (
            [asdict(row) for row, _ in answered if (row.group == "trained") == trained] for trained in (True, False)
        )
        samples = {f"{row.place}/{name}": values for row, columns in answered for name, values in columns.items()}
        with code_of_a_method():
            forward, backward = method.predictor.passes
        costs = {"forward": forward, "backward": backward, "peak_mib": peak}
        about = {"method": name, "seed": self.run.seed, "training": training, "is": describe(method)}
        answer = {**about, "costs": costs, "rows": rows, "joined": joined}
        records.write_samples(self._samples_of(path), samples)
        store.write_sealed(path, answer)
        return answer

    def _answer_some(
        self, name: str, method: Method, deployed: Tree, clients: Sequence[int], labeled: bool = True
    ) -> list[Scored]:
        """By test and client: the score, and columns with a value for every sample."""
        places, asked, streams = [], [], []
        for test in self.tests:
            for i, k in enumerate(clients):
                stream = pick_stream(self.federation, test, k, self.config.samples)
                if stream is not None:
                    places.append((test, k))
                    asked.append(Question(i, self.federation.inputs(stream), (self.run.seed, test, k)))
                    streams.append(stream)
        shards = [self.run.shards[k] if labeled else hide_labels(self.run.shards[k]) for k in clients]
        with code_of_a_method():
            answers = self.engine.answer(method, deployed, shards, asked)
        scored = []
        for (test, k), question, stream, answered in zip(places, asked, streams, answers, strict=True):
            check_columns(method, answered)
            truth = self.federation.labels(stream)
            scores = score(answered, truth, question.path)
            group = "trained" if k not in self.run.unseen else "joined" if labeled else "unlabeled"
            row = make_row(name, self.run.seed, test, k, scores, group)
            columns = make_columns(scores, truth, stream, tuple(self.federation.dataset.natural))
            scored.append((row, scores.info | columns))
        return scored

    def _measure_memory(self, method: Method, mine: Tree) -> float:
        """Peak tensor memory while one sample is answered, in MiB."""
        asked = Question(0, self.federation.pool.x[:1], (self.run.seed, "memory"))
        with code_of_a_method(), one_thread_of_torch():
            begun = begin_one(method, mine, self.run.shards[0])
            return measure_peak(lambda: answer_one(method, mine, begun, asked))


def split(items: Sequence[T], most: int) -> list[Sequence[T]]:
    return [items[first : first + most] for first in range(0, len(items), most)]


def prepare(
    config: Config,
    dataset: Dataset | None = None,
    *,
    net: Any = None,
    recipes: Recipes | None = None,
    folder: Path | None = None,
) -> tuple[dict[str, Method], list[Work]]:
    """The methods, and the federation of every seed, whose config has what it left to the data filled in.

    dataset: what the config names, if it is loaded already. net, recipes: objects in place of names. folder: of
    trainings and answers, if not the run's own.
    """
    workers = find_workers()
    if workers and (recipes or net is not None):
        name = next(iter(recipes or ()), "the network")
        raise InputError(f"workers cannot load {name}, an object of this process; put it into a file: FILE.py:NAME.")
    engine = workers.find_engine(config) if workers else pick_engine_of(config)
    find_parts(config, recipes, net)  # refuses bad ones before any data is loaded
    dataset = set_aside(dataset or load(config), config.unknown)
    config = fit_to_data(config, dataset)
    made = pick_net(config, dataset.pool, net)
    config = config if net is None and config.net in NETS else fit_to_net(config, made)
    made.check(take_samples(dataset.pool), stacked=isinstance(engine, Stack))
    methods = make_methods(config, made, recipes)
    check_methods(methods, dataset.pool)
    federations = [build(dataset, config.settings(seed)) for seed in config.seeds]
    tests = pick_tests(config, federations[0].tests)
    for federation in federations:
        check_asked(config, federation)
    trained = len(federations[0].clients) - len(federations[0].unseen)
    sampled = count_sampled(trained, config.participation)
    check_effect(config.training.defense, config.training.attack, trained, sampled)
    every = [each for name, method in methods.items() for each in _check_method(name, method)]
    code = {method: found for method in every if (found := fingerprint(method))}
    if code:
        engine.release()  # its programs may be compiled from code that was edited since
    folder = folder or config.folder
    return methods, [Work(config, folder, engine, each, _make_run(each, engine), tests, code) for each in federations]


def prepare_here(config: Config, dataset: Dataset | None = None, **given: Any) -> tuple[dict[str, Method], list[Work]]:
    """For what looks into models, which this process must have, whoever computes experiments."""
    with use_workers(None):
        return prepare(config, dataset, **given)


def pick_engine_of(config: Config) -> Engine:
    return get_engine(config.engine, config.device, config.precision, config.threads)


def _make_run(federation: Federation, engine: Engine) -> Run:
    return Run(federation.settings.seed, Shards(federation, engine.device), unseen=federation.unseen)


def _check_method(name: str, method: Method) -> tuple[Method, Method]:
    """A method and its training. Both need equality and a description, by which their files are named."""
    try:
        with code_of_a_method():
            both = method, method.training
    except Failed as error:
        raise InputError(f"{name} fails before training: {flatten(error, 200)}.") from None
    try:
        for each in both:
            hash(each), content_hash(describe(each))
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} cannot be filed by its hyperparameters: {flatten(error, 200)}.") from None
    for part in (method.net, method.rounds, method.personal, method.predictor):
        if "__eq__" not in vars(type(part)) and "__annotations__" in vars(type(part)):
            raise InputError(f"{name}: {type(part).__name__} has fields, so it must be a dataclass with eq.")
    return both


def pick_tests(config: Config, known: Iterable[str]) -> list[str]:
    """The tests that an experiment asks for, in the order of the known ones."""
    known = list(known)
    for test in config.tests or ():
        if test not in known:
            raise InputError(f"there is no test {test!r} here; {find_nearest(test, known)}")
    return [test for test in known if config.tests is None or test in config.tests]
