"""Examples, and the code on the page about methods, do what they say."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest
import torch

import fedthe
import oracles
from fedthe import tree
from fedthe.config import make_config
from fedthe.data import load_dataset
from fedthe.engine.fit import LoopFit, Optimizer
from fedthe.engine.stack import Stack
from fedthe.engine.train import train
from fedthe.engine.visit import Training
from fedthe.experiment.data import fit_to_net, pick_net, take_samples
from fedthe.methods import METHODS, compose
from fedthe.methods.base import FedAvg
from fedthe.methods.finetune import FineTune
from fedthe.nets import CNN, NETS
from fedthe.nets.make import make_net
from helpers import ROOT, fails
from tiny_net import CLASSES, TINY, draw, leaves, list_batches, make_shard, tiny_params

PAGE = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def my_method(monkeypatch):
    """examples/my_method.py as a module, whose runs are not started: their settings are checked."""
    monkeypatch.setitem(vars(fedthe), "run", lambda **settings: make_config(settings))
    spec = importlib.util.spec_from_file_location("my_method", ROOT / "examples" / "my_method.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "my_method", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def methods(monkeypatch):
    """The registry, restored after the test."""
    for name in ("fedprox", "fedprox_ft"):
        monkeypatch.setitem(METHODS, name, None)
    return METHODS


@pytest.mark.parametrize("mu", [0.0, 0.1, 2.0])
def test_fedprox_is_pulled_to_the_model_it_received(my_method, mu):
    shard, shared = make_shard(size=5), draw(tiny_params(), 1)
    fit = LoopFit(TINY, shard, Optimizer(lr=0.1, weight_decay=0.0), 2, 4, True, 1, (0, "local", 0), 0)
    sent = my_method.FedProx(mu).local(fit, shared, {}, shard).params
    expected = oracles.ditto_round(leaves(shared), leaves(shared), list_batches(fit), 0.1, mu)  # the same pull
    for one, other in zip(leaves(sent), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_fedprox_trains_in_both_engines_and_composes(my_method):
    net, shards = CNN(CLASSES, channels=1, size=16), [make_shard(n, seed=n) for n in (5, 9)]
    settings = Training(rounds=2, local_epochs=1, batch=4, crop=1, optimizer=Optimizer(lr=0.05))
    method = compose(net, (my_method.FedProx(), FineTune()))
    assert method.training == compose(net, my_method.FedProx) != compose(net, FedAvg)
    loop, stack = (train(method, shards, settings, 0, engine=engine) for engine in (None, Stack()))
    torch.testing.assert_close(loop.server.shared, stack.server.shared, rtol=0, atol=2e-5)
    assert loop.server.losses != train(compose(net, FedAvg), shards, settings, 0).server.losses
    fails(lambda: my_method.FedProx(mu=-1.0), "mu must not be negative")


def test_the_example_registers_a_class_and_asks_for_settings_that_exist(my_method, methods, monkeypatch):
    asked = []
    monkeypatch.setitem(vars(fedthe), "run", lambda **settings: asked.append(make_config(settings)))
    with pytest.raises(AttributeError):  # no results to print
        my_method.main()
    assert asked[0].methods == ("fedavg", "fedprox")
    assert compose(TINY, methods["fedprox"]) == compose(TINY, my_method.FedProx())


def test_the_page_shows_the_example(my_method):
    source = (ROOT / "examples" / "my_method.py").read_text(encoding="utf-8")
    shown = BLOCKS[0][BLOCKS[0].index("@dataclass") :]
    assert shown in source


def test_the_code_on_the_page_runs(methods, monkeypatch):
    asked = []
    monkeypatch.setitem(vars(fedthe), "run", lambda **settings: asked.append(make_config(settings)))
    page = {"__name__": __name__}
    for block in BLOCKS:
        exec(block, page)
    assert [config.methods for config in asked] == [("fedavg", "fedprox", "fedprox_ft")]
    net, shards = CNN(CLASSES, channels=1, size=16), [make_shard(n, seed=n) for n in (5, 9)]
    for name in ("fedprox", "fedprox_ft"):
        method = compose(net, methods[name])
        method.check()
        train(method, shards, Training(rounds=1, local_epochs=1, batch=4, crop=1), 0)


def test_the_table_on_the_page_has_every_method_and_who_shares_a_training():
    rows = re.findall(r"^\| `(\w+)` \|.*\| (A|B|its own) \|$", PAGE, re.MULTILINE)
    assert [name for name, _ in rows] == list(METHODS)
    shared = {"A": compose(TINY, FedAvg()), "B": compose(TINY, METHODS["fedthe"]).training}
    for name, letter in rows:
        training = compose(TINY, METHODS[name]).training
        assert (training == shared[letter]) if letter in shared else (training not in shared.values()), name


def find_network_code(words):
    """The first block of code on the page about networks that has these words."""
    page = (ROOT / "docs" / "networks.md").read_text(encoding="utf-8")
    return next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if words in block)


def test_the_module_and_the_weights_of_the_page_on_networks_are_taken(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setitem(vars(fedthe), "run", lambda **settings: asked.append(settings))
    monkeypatch.chdir(tmp_path)
    space = {"fedthe": fedthe, "__name__": "__main__"}
    exec(find_network_code("wrap_module"), space)
    exec(find_network_code("save_file"), space)
    pool = load_dataset("glyphs").pool
    net = asked[0].pop("net")
    config = make_config(asked[0])
    assert pick_net(config, pool, net) is net
    net.check(take_samples(pool), stacked=True)
    assert fit_to_net(config, net).training.optimizer == Optimizer("adam", lr=0.002, weight_decay=0.0)
    started = make_net(make_config(asked[1]), 10, (3, 32, 32))
    assert started.init(3)["head"]["out"].tolist() == CNN(10).init(0)["head"]["out"].tolist()


def test_the_network_of_the_page_on_networks_trains(monkeypatch):
    block = find_network_code("class ")
    asked = []
    monkeypatch.setitem(vars(fedthe), "run", lambda **settings: asked.append(make_config(settings)))
    monkeypatch.setitem(NETS, "mlp", None)
    exec(compile(block, "networks.md", "exec"), {"__name__": "__main__"})
    assert asked[0].training.optimizer == Optimizer("adam", lr=0.002, weight_decay=0.0)
    method = compose(NETS["mlp"](CLASSES, channels=1, size=16), METHODS[asked[0].methods[0]])
    shards = [make_shard(n, seed=n) for n in (5, 9)]
    settings = Training(rounds=1, local_epochs=1, batch=4, crop=1, optimizer=asked[0].training.optimizer)
    loop, stack = train(method, shards, settings, 0), train(method, shards, settings, 0, engine=Stack())
    for name, leaf in tree.flatten(loop.server.shared).items():
        torch.testing.assert_close(leaf, tree.flatten(stack.server.shared)[name], rtol=1e-3, atol=1e-4)
