"""Experiments on data that are no pictures, or that clients hold already."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

import fedthe
from fedthe import tree
from fedthe.config import Config, make_config
from fedthe.data.plan import Federation
from fedthe.engine.loop import Loop
from fedthe.engine.shards import Shards
from fedthe.engine.stack import Stack
from fedthe.engine.train import train
from fedthe.engine.visit import Training
from fedthe.experiment.data import fit_to_data, settings_of
from fedthe.experiment.run import run_prepared
from fedthe.experiment.work import prepare
from fedthe.methods import METHODS, compose
from fedthe.methods.make import methods_for
from fedthe.nets.net import Net, Start, fan_in
from fedthe.report.gather import gather
from fedthe.report.page import write_page
from helpers import fails

SMALL = {"rounds": 2, "local_epochs": 1, "batch": 8, "lr": 0.1}
PICTURES_ONLY = ("ttt", "ttt_ft", "memo_p", "memo_g", "fedthe_plus", "regime_memo", "tsa")


@dataclass(frozen=True)
class Perceptron(Net):
    """Of features [n, 2, 3], or of tokens [n, 7] of a vocabulary of 50."""

    tokens: bool = False

    @property
    def feature_dim(self) -> int:
        return 5

    def body_starts(self) -> dict[str, Start]:
        return {"w": fan_in(50, 5) if self.tokens else fan_in(5, 6)}

    def features(self, body, x: Tensor) -> Tensor:
        if self.tokens:
            return torch.tanh(torch.nn.functional.embedding(x, body["w"]).mean(1))
        return torch.tanh(torch.nn.functional.linear(x.flatten(1), body["w"]))


def federate(kind="features", sizes=(30, 25, 41), **more) -> Federation:
    draws = np.random.default_rng(0)
    clients = []
    for k, n in enumerate(sizes):
        y = np.r_[np.arange(3), (draws.random(n - 3) < 0.8) * (k % 3)]
        x = draws.integers(0, 10, (n, 7)) + 15 * y[:, None] if kind == "tokens" else draws.normal(size=(n, 2, 3))
        clients.append((x if kind == "tokens" else x + y[:, None, None], y))
    return Federation.from_clients(clients, **more)


@pytest.fixture(params=["features", "tokens"])
def kind(request) -> str:
    return request.param


@pytest.mark.parametrize("name", ["fedavg", "fedthe", "ditto", "apfl", "knn_per"])
def test_both_engines_train_on_features_and_tokens_alike(kind, name):
    federation, method = federate(kind), compose(Perceptron(3, tokens=kind == "tokens"), METHODS[name])
    settings = Training(rounds=2, local_epochs=2, batch=8, flip=False, crop=0)
    ends = [
        tree.flatten(train(method, Shards(federation), settings, 0, engine=engine).server.shared)
        for engine in (Loop(), Stack())
    ]
    start = tree.flatten(method.net.init(0))
    for leaf in ends[0]:
        torch.testing.assert_close(ends[0][leaf], ends[1][leaf], rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(ends[0][leaf], start[leaf]) for leaf in start)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["fedavg", "fedthe", "scaffold", "pfedme"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_trains_on_features_and_tokens_like_the_loop(kind, name, dtype):
    federation, method = federate(kind), compose(Perceptron(3, tokens=kind == "tokens"), METHODS[name])
    settings = Training(rounds=2, local_epochs=2, batch=8, flip=False, crop=0)
    loop = train(method, Shards(federation), settings, 0, engine=Loop()).server.shared
    stack = train(method, Shards(federation, "cuda"), settings, 0, engine=Stack("cuda", dtype)).server.shared
    for leaf, value in tree.flatten(stack).items():
        near = 1e-4 if dtype == torch.float32 else 1e-2  # matrix products go as tf32 then
        torch.testing.assert_close(value.cpu(), tree.flatten(loop)[leaf], rtol=near, atol=near)


def test_a_literal_step_on_features():
    """One client's one batch: SGD on the mean cross-entropy of its rows as they are, neither scaled nor cropped."""
    federation = federate(sizes=(10, 10))
    net = Perceptron(3)
    settings = Training(rounds=1, local_epochs=1, batch=100)
    got = train(compose(net, METHODS["fedavg"]), Shards(federation), settings, 0, engine=Loop()).server.shared
    ends = []
    for shard in Shards(federation):
        params = {name: leaf.clone().requires_grad_() for name, leaf in tree.flatten(net.init(0)).items()}
        optimizer = torch.optim.SGD(params.values(), lr=0.01, weight_decay=5e-4)
        h = torch.tanh(shard.x.flatten(1) @ params["body.w"].T)
        torch.nn.functional.cross_entropy(h @ params["head.out"].T, shard.labels).backward()
        optimizer.step()
        ends.append(params)
    for name, leaf in tree.flatten(got).items():
        torch.testing.assert_close(leaf, (ends[0][name] + ends[1][name]).detach() / 2, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("engine", ["loop", "stack"])
def test_a_run_on_data_that_are_no_pictures(tmp_path, kind, engine):
    night = federate(kind, sizes=(24, 24, 24))
    tests = {"night": [(night.pool.x[rows.rows], night.pool.labels[rows.rows]) for rows in night.dataset.clients]}
    federation = federate(kind, tests=tests, name="lab", classes=["a", "b", "c"])
    methods = [name for name in methods_for(Perceptron(3)) if name not in PICTURES_ONLY]
    settings = settings_of(federation) | SMALL | {"methods": methods, "seeds": [0, 1], "engine": engine}
    config, net = make_config(settings | {"out": str(tmp_path / "run")}), Perceptron(3, tokens=kind == "tokens")

    def run():
        return run_prepared(*prepare(config, federation.dataset, net=net))

    results = run()
    assert not results.failures
    assert results.methods == methods
    assert results.tests == ["original", "night", "ooc", "mixture"]
    assert {row.client for row in results.rows} == {0, 1, 2}
    assert any("not pictures" in note for note in results.notes)
    assert (results.config.clients, results.config.partition, results.config.crop) == (3, "given", 0)
    again = run()
    assert again.reused == 2 * len(methods)
    assert again.rows == results.rows
    assert fedthe.experiment.results.read_results(tmp_path / "run").rows == results.rows
    page = gather([tmp_path / "run"])
    assert not [note for note in page.shown[0].notes if "examples" in note]
    write_page(page, tmp_path / "report.html")
    assert "night" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_methods_for_pictures_are_refused_on_other_data(tmp_path):
    federation = federate()
    for name in PICTURES_ONLY:
        config = make_config(settings_of(federation) | SMALL | {"methods": [name], "out": str(tmp_path / "run")})
        fails(lambda config=config: prepare(config, federation.dataset, net=Perceptron(3)), name, "pictures", "mine")
    config = make_config(settings_of(federation) | SMALL | {"methods": ["fedavg"]})
    fails(lambda: prepare(config, federation.dataset), "cnn", "[2, 3]", "wrap_module")
    config = make_config(settings_of(federation) | {"standardize": True, "methods": ["fedavg"]})
    fails(lambda: prepare(config, federation.dataset, net=Perceptron(3)), "standardize")
    assert not (tmp_path / "run").exists()


def test_settings_that_the_data_decides():
    held, pictures = federate().dataset, fedthe.load_dataset("digits", size=16)
    filled = fit_to_data(Config(), pictures)
    assert (filled.clients, filled.partition, filled.dirichlet) == (20, "balanced", 0.1)
    assert fit_to_data(filled, pictures) == filled
    assert fit_to_data(Config(partition="iid"), pictures).dirichlet is None
    assert fit_to_data(Config(partition="shards"), pictures).shards == 2
    assert fit_to_data(Config(feature_shift="corruption"), pictures).feature_severity == 3
    filled = fit_to_data(Config(), held)
    assert (filled.clients, filled.partition, filled.dirichlet, filled.flip) == (3, "given", None, False)
    assert fit_to_data(filled, held) == filled
    anew = fit_to_data(Config(partition="balanced", clients=2), held)
    assert (anew.clients, anew.dirichlet) == (2, 0.1)
    fails(lambda: fit_to_data(Config(clients=5), held), "3 clients", "clients", "partition=balanced")
    fails(lambda: fit_to_data(Config(dirichlet=0.5), held), "dirichlet")
    fails(lambda: fit_to_data(Config(partition="given"), pictures), "digits", "which client")
    fails(lambda: fit_to_data(Config(crop=16), pictures), "crop", "16")


def test_settings_without_effect_are_refused():
    for settings, word in (
        ({"partition": "iid", "dirichlet": 0.5}, "dirichlet"),
        ({"shards": 3}, "shards"),
        ({"feature_severity": 3}, "feature_severity"),
        ({"feature_shift": "rotation", "feature_severity": 3}, "feature_severity"),
        ({"partition": "fair"}, "partition"),
        ({"square": "stretch"}, "square"),
    ):
        fails(lambda settings=settings: make_config(settings), word)


def test_an_npz_by_client_runs_from_its_file(tmp_path):
    """As the command line does: dataset=npz:PATH."""
    draws = np.random.default_rng(0)
    labels = np.arange(90) % 3
    images = (draws.integers(0, 99, (90, 16, 16, 1)) + 70 * labels[:, None, None, None]).astype(np.uint8)
    np.savez(tmp_path / "x.npz", images=images, labels=labels, clients=np.repeat(["ann", "bob", "cy"], 30))
    settings = SMALL | {"dataset": f"npz:{tmp_path / 'x.npz'}", "methods": ["fedavg"], "out": str(tmp_path / "run")}
    results = fedthe.run(**settings, crop=2, samples=5)
    assert results.config.clients == 3
    assert {row.client for row in results.rows} == {0, 1, 2}
    dealt = fedthe.run(**settings, crop=2, samples=5, partition="shards", clients=4)
    assert {row.client for row in dealt.rows} == {0, 1, 2, 3}
