"""The stacked engine says what the loop says: for every method, any number of rows at a time, and whatever happens."""

from functools import lru_cache

import numpy as np
import pytest

from conftest import make_pool
from fedthe import tree
from fedthe.data.plan import Settings, build
from fedthe.data.pool import Dataset
from fedthe.engine.fit import Optimizer
from fedthe.engine.loop import Loop
from fedthe.engine.shards import Shards
from fedthe.engine.stack import Stack
from fedthe.engine.train import deploy_some, start, train_together
from fedthe.engine.visit import Question, Run, Training
from fedthe.methods import METHODS, STUDIES
from fedthe.nets import CNN

NET = CNN(3, size=16)
ALL = METHODS | STUDIES
SETTINGS = Training(rounds=2, local_epochs=2, batch=16, crop=2, optimizer=Optimizer(lr=0.05, momentum=0.5))
CLIENTS = 3


@lru_cache
def federation(seed=0, partition="unbalanced"):
    pool = make_pool(np.arange(240) % 3, size=16)
    return build(Dataset(pool), Settings(clients=CLIENTS, dirichlet=1.0, seed=seed, partition=partition))


@lru_cache
def run_of(seed=0, partition="unbalanced"):
    return Run(seed, Shards(federation(seed, partition)))


@lru_cache
def trained(make, engine_name, settings=SETTINGS, seeds=(0,), net=NET):
    engine = {"loop": Loop, "stack": Stack, "chunked": lambda: Stack(rows=2)}[engine_name]()
    method = make(net).trains_as()
    runs = [run_of(seed) for seed in seeds]
    return train_together(method, runs, settings, [start(method, CLIENTS, seed) for seed in seeds], engine)


def difference(a, b):
    a, b = tree.flatten(a), tree.flatten(b)
    assert list(a) == list(b)
    return max((float((a[name] - b[name]).abs().max()) for name in a), default=0.0)


def questions(samples=3, seed=0):
    asked = []
    for test in ("original", "ooc"):
        for k, stream in enumerate(federation(seed).tests[test]):
            some = stream.take(np.arange(samples if k else samples + 1))  # of two lengths
            asked.append(Question(k, federation(seed).images(some), (seed, test, k)))
    return asked


@pytest.mark.parametrize("name", ALL)
def test_every_method_trains_and_answers_as_in_the_loop(name):
    method = ALL[name](NET)
    (a,), (b,) = trained(ALL[name], "loop"), trained(ALL[name], "stack")
    assert difference(a.shared, b.shared) < 1e-5
    assert max(difference(x, y) for x, y in zip(a.mine, b.mine, strict=True)) < 1e-5
    assert a.losses == pytest.approx(b.losses, abs=1e-5)
    run, clients = run_of(), range(CLIENTS)
    one = deploy_some(method, run, SETTINGS, a, Loop(), clients)
    two = deploy_some(method, run, SETTINGS, a, Stack(), clients)
    assert difference(one, two) < 1e-5
    answers = [engine.answer(method, one, list(run.shards), questions()) for engine in (Loop(), Stack(), Stack(rows=2))]
    for alone, together, chunked in zip(*answers, strict=True):
        assert alone.info.keys() == together.info.keys()
        for column in alone.info:
            assert np.abs(alone.info[column] - together.info[column]).max() < 1e-4
            assert np.array_equal(chunked.info[column], together.info[column])
        assert np.array_equal(alone.classes, together.classes)
        assert np.array_equal(chunked.classes, together.classes)
