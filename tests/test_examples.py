"""Examples, and the code on the page about methods, do what they say."""

from __future__ import annotations

import re

import pytest
import torch

import fedthe
from fedthe import tree
from fedthe.config import make_config
from fedthe.data import load_dataset
from fedthe.engine.evaluate import make_samples
from fedthe.engine.fit import Optimizer
from fedthe.engine.loop import make_fits
from fedthe.engine.stack import Stack
from fedthe.engine.train import deploy, start_from, train
from fedthe.engine.visit import Training
from fedthe.experiment.data import fit_to_net, pick_net, take_samples
from fedthe.methods import METHODS, compose
from fedthe.methods.base import FedAvg, Personal
from fedthe.methods.ditto import Ditto
from fedthe.methods.fedper import FedPer
from fedthe.methods.fedrep import FedRep
from fedthe.methods.finetune import FineTune
from fedthe.nets import CNN, NETS
from fedthe.nets.make import make_net
from fedthe.types import scale
from helpers import ROOT, fails, load_example
from tiny_net import CLASSES, TINY, make_shard

PAGE = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def my_method(monkeypatch):
    """examples/my_method.py as a module, whose runs are not started: their settings are checked."""
    monkeypatch.setitem(vars(fedthe), "run", lambda **settings: make_config(settings))
    return load_example("my_method")


@pytest.fixture
def methods(monkeypatch):
    """The registry, restored after the test."""
    for name in ("moon", "my_fedper", "balanced_ft"):
        monkeypatch.setitem(METHODS, name, None)
    return METHODS


@pytest.fixture
def page(methods, monkeypatch):
    """What the code on the page about methods defines, with the settings of its run and what it printed."""
    asked, printed = [], []
    monkeypatch.setitem(vars(fedthe), "run", lambda **settings: asked.append(make_config(settings)))
    names = {"__name__": __name__, "asked": asked, "printed": printed, "print": lambda text: printed.append(text)}
    for block in BLOCKS:
        exec(block, names)
    return names


def test_the_example_trains_in_both_engines_and_refuses_bad_values(my_method):
    """tests/methods/test_stateful_rounds.py compares it with the paper."""
    assert fedthe.check_method((my_method.Moon(), FineTune())).startswith("Moon + FineTune gives the same numbers")
    assert "keeps previous.conv" in fedthe.check_method(my_method.Moon)
    fails(lambda: my_method.Moon(mu=-1.0), "mu must not be negative")


def test_the_example_registers_a_class_and_asks_for_settings_that_exist(my_method, methods, monkeypatch):
    asked = []
    monkeypatch.setitem(vars(fedthe), "run", lambda **settings: asked.append(make_config(settings)))
    with pytest.raises(AttributeError):  # no results to print
        my_method.main()
    assert asked[0].methods == ("fedavg", "moon")
    assert compose(TINY, methods["moon"]) == compose(TINY, my_method.Moon())


def test_the_page_runs_its_methods_and_says_what_the_check_says(page, methods):
    assert [config.methods for config in page["asked"]] == [("fedavg", "my_fedper", "balanced_ft")]
    compose(TINY, methods["balanced_ft"]).check()
    shown = " ".join(PAGE.split())
    assert page["printed"][0] in shown
    assert page["printed"][1].startswith("FineTune + Balance gives the same numbers in both engines.")
    fails(lambda: page["Balance"](rate=2.0), "rate must be from 0 to 1")


def test_the_fedper_of_the_page_is_the_built_in_one(page):
    shards = [make_shard(n, seed=n) for n in (5, 9)]
    settings = Training(rounds=2, local_epochs=1, batch=4, crop=1)
    one, other = (train(compose(CNN(CLASSES, 1, 16), part), shards, settings, 0) for part in (page["FedPer"], FedPer))
    assert_same(one.server.shared, other.server.shared)
    assert all(tree.flatten(mine) for mine in one.clients)
    for mine, theirs in zip(one.clients, other.clients, strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("recipe", [FedRep(), FedPer(), Ditto(), Personal()], ids=lambda part: type(part).__name__)
def test_the_order_of_calls_on_the_page_is_that_of_the_engine(page, recipe):
    """All clients take part, so what the page says must give the same bits."""
    method, shards = compose(TINY, recipe), [make_shard(n, 5, seed=n) for n in (5, 9)]
    settings, params = Training(rounds=2, local_epochs=1, batch=4, crop=1), TINY.init(0)
    shared, mine = page["begin"](method, params)
    mine = [mine, mine]

    def fits(k, number):
        return make_fits(method.net, settings, 0, number, k, 2, shards[k])

    for number in range(2):
        uploads = []
        for k, shard in enumerate(shards):
            sent, mine[k] = page["take_part"](method, fits(k, number), shared, mine[k], shard)
            uploads.append(sent)
        shared = page["finish_round"](method, shared, uploads, [5.0, 9.0])
    progress = train(method, shards, settings, 0, start_from(method, params, 2))
    assert_same(progress.server.shared, shared)
    x = torch.from_numpy(make_shard(4, 5, seed=3).x.numpy())
    for k, expected in enumerate(deploy(method, shards, settings, 0, progress)):
        found = page["deploy"](method, fits(k, 2), shared, mine[k], shards[k])
        assert_same(found, expected)
        answers = list(page["answer"](method, found, shards[k], [make_samples(method, x, (0, "test", k))]))
        assert torch.equal(answers[0].logits, method.logits(expected, scale(x)))


def assert_same(one, other):
    one, other = tree.flatten(one), tree.flatten(other)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


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


def test_the_code_of_the_page_on_experiments_runs(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    found = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    blocks = [block for block in found if "class " in block or "sweep" in block]
    assert len(blocks) == 2
    monkeypatch.chdir(tmp_path)
    run, heard = fedthe.run, []
    small = {"clients": 3, "rounds": 1, "local_epochs": 1, "samples": 2, "tests": ["original"]}
    monkeypatch.setitem(vars(fedthe), "run", lambda **asked: run(**asked | small))
    monkeypatch.setattr("builtins.print", lambda *said: heard.append(said))
    for block in blocks:
        exec(compile(block, "experiments.md", "exec"), space := {"__name__": "__main__"})
        if "results" in space:
            names = ["fedthe", "fedthe(alpha=0.2)", "Gentle", "Gentle(mu=0.1)", "gentle_ft"]
            assert space["results"].methods == names
    assert (("Gentle", "gentle_ft"), 0, 1, 1) in [said[:4] for said in heard]
    assert list(space["sweep"].table()) == ["FedAvg", "FedTHE, alpha=0.05", "FedTHE, alpha=0.2"]
    assert (tmp_path / "alpha.png").exists()
