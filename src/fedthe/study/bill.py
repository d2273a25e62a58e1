"""The cost of tables before anything runs. Shared trainings count once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from ..bench.lab import ANSWER_MEMO, ROUND, ROUND_CCT, ROUND_RESNET, ROUND_STACKED
from ..bench.result import Bench
from ..bench.workload import FULL
from ..config import Config
from ..data import load_dataset
from ..engine.server import count_sampled
from ..engine.visit import Training
from ..experiment.training import group_by_training
from ..methods.base import Method, Predictor
from ..methods.compose import describe
from ..methods.make import make_methods
from ..methods.memo import Memo
from ..nets.make import make_net
from ..store import content_hash
from .figures.probing import MODES, PRETRAIN_EPOCHS
from .tables import Table, plan_cases

POOLS = {"cifar10": (50_000, 10), "imagenet32": (110_000, 86)}  # images and classes; rounded for imagenet32
SPLIT = 0.6, 0.2  # shares of a client's rows for training and for testing
TESTS = 6  # in a run of all tests: an upper bound, since natural shifts and mixtures are smaller
ROUNDS = {"cnn": ROUND_STACKED, "resnet20_gn": ROUND_RESNET, "cct4": ROUND_CCT}
IMAGES_OF_ROUND = FULL.clients * FULL.train * (Training.local_epochs + Training.personal_epochs)  # in the bench


@dataclass(frozen=True)
class Bill:
    trainings: int = 0
    rounds: int = 0
    images: float = 0  # visited in training
    samples: float = 0  # answered
    seconds: float | None = 0  # on this machine; None if its speed was not measured

    def __add__(self, other: Bill) -> Bill:
        timed = self.seconds is not None and other.seconds is not None
        sums = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)[:-1]}
        return Bill(**sums, seconds=self.seconds + other.seconds if timed else None)  # type: ignore[operator]


def bill_tables(tables: Iterable[tuple[Table, Sequence[str]]], bench: Bench | None, **settings: Any) -> dict[str, Bill]:
    """By table, what it adds to the tables before it."""
    paid: set[str] = set()
    bills = {}
    for table, methods in tables:
        bills[table.id] = Bill(seconds=0 if bench else None)
        for case in plan_cases(table, methods, **settings):
            for bill in bill_case(case.config, bench, paid):
                bills[table.id] += bill
    return bills


def bill_case(config: Config, bench: Bench | None, paid: set[str]) -> Iterator[Bill]:
    """The cost of the trainings and answers that are not in `paid` yet; their hashes are added to it."""
    rows, classes = _measure_pool(config.dataset, config.size)
    methods = make_methods(config, make_net(config, classes, (3, 32, 32)))
    for seed in config.seeds:
        s = config.settings(seed)
        data = (config.dataset, config.size, config.unknown, s.clients, s.dirichlet, s.partition, s.train_fraction)
        cores = set()  # trained here: other methods with the same core do not train the shared model again
        for trained, served in group_by_training(methods).items():
            key = content_hash(describe(trained), config.training.describe(), data, seed)
            if key not in paid:
                yield bill_training(config, rows, bench, trains=trained.core not in cores)
                cores.add(trained.core)
                paid.add(key)
            for method in served.values():
                tested = (config.tests, config.streams, config.severity, config.samples, config.test_fraction)
                answers = content_hash(key, describe(method), *tested)
                if answers not in paid:
                    yield bill_answers(config, method, rows, bench)
                    paid.add(answers)


@cache
def _measure_pool(dataset: str, size: int | None) -> tuple[int, int]:
    """The number of images and classes; the paper's datasets need not be available."""
    if dataset in POOLS:
        return POOLS[dataset]
    pool = load_dataset(dataset, natural="none", size=size).pool
    return len(pool), len(pool.classes)


def bill_training(config: Config, rows: int, bench: Bench | None, trains: bool) -> Bill:
    there = count_sampled(config.client_count, config.participation) / config.client_count
    visits = rows * SPLIT[0] * config.train_fraction * (config.local_epochs * trains + config.personal_epochs)
    images = config.rounds * there * visits
    return Bill(1, config.rounds, images, 0, _time_images(config, images, bench))


def bill_pretraining(config: Config, bench: Bench | None) -> Bill:
    """The probing study: pre-training on half of the classes, and three ways of fine-tuning on the other half."""
    rows, _ = _measure_pool(config.dataset, config.size)
    tuning = len(MODES) * SPLIT[0] * config.train_fraction * config.personal_epochs
    images = len(config.seeds) * rows / 2 * (PRETRAIN_EPOCHS + tuning)
    return Bill(len(config.seeds), 0, images, 0, _time_images(config, images, bench))


def _time_images(config: Config, images: float, bench: Bench | None) -> float | None:
    speed = _find(bench, ROUNDS.get(config.net, ROUND), ROUND)
    return None if speed is None else images * config.width**2 * speed / IMAGES_OF_ROUND


def bill_answers(config: Config, method: Method, rows: int, bench: Bench | None) -> Bill:
    tests = TESTS + len(config.streams) if config.tests is None else len(config.tests)
    samples = tests * rows * SPLIT[1] * config.test_fraction
    if config.samples is not None:
        samples = min(samples, tests * config.client_count * config.samples)
    memo = _find(bench, ANSWER_MEMO)
    large, small = _find(bench, ROUNDS.get(config.net, ROUND), ROUND), _find(bench, ROUND)
    if memo is None or large is None or small is None:
        return Bill(samples=samples, seconds=None)
    times = _count_passes(method.predictor) / _count_passes(Memo()) * max(1, large / small) * config.width**2
    return Bill(samples=samples, seconds=samples * times * memo / 1000)


def _count_passes(predictor: Predictor) -> int:
    """Forward passes per sample; a backward pass counts as two."""
    forward, backward = predictor.passes
    return forward + 2 * backward


def _find(bench: Bench | None, *names: str) -> float | None:
    """The value of the first of these rows that has one."""
    values = {row.name: row.value for row in bench.rows} if bench else {}
    return next((values[name] for name in names if values.get(name) is not None), None)
