"""What networks are trained with: the paper's settings, and those of plugins."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from fedthe.config import OPTIMIZERS, make_config
from fedthe.engine.fit import Optimizer
from fedthe.errors import InputError
from fedthe.methods.make import make_methods
from fedthe.nets import NETS
from fedthe.nets.cnn import CNN
from fedthe.nets.make import Defaults, find_defaults, make_net


def test_defaults_follow_the_network():
    assert make_config({"net": "cct4"}).training.optimizer.name == "adam"
    assert make_config({"net": "resnet20_gn"}).training.optimizer.momentum == 0.9
    assert make_config({"net": "resnet20_gn", "momentum": 0.5}).training.optimizer.momentum == 0.5
    assert make_config({"lr": 0.2}).training.optimizer.lr == 0.2
    assert {
        "cnn": Optimizer("sgd", 0.01, 0.0, 5e-4),
        "resnet20_gn": Optimizer("sgd", 0.01, 0.9, 5e-4),
        "cct4": Optimizer("adam", 0.001, 0.0, 0.0),
    } == OPTIMIZERS


@dataclass(frozen=True)
class Slow(CNN):
    defaults: ClassVar = Defaults("adam", lr=0.002, search_lr=0.3)


def test_a_network_of_a_plugin_may_have_defaults(monkeypatch):
    monkeypatch.setitem(NETS, "slow", Slow)
    monkeypatch.setitem(NETS, "plain", CNN)
    config = make_config({"net": "slow", "methods": ["fedthe"]})
    assert config.training.optimizer == Optimizer("adam", 0.002)
    assert make_methods(config, make_net(config, 3, (3, 32, 32)))["fedthe"].predictor.search.lr == 0.3
    assert make_config({"net": "slow", "lr": 0.5}).training.optimizer == Optimizer("adam", 0.5)
    assert make_config({"net": "slow", "optimizer": "sgd"}).training.optimizer == Optimizer()
    assert make_config({"net": "plain"}).training.optimizer == Optimizer()
    assert find_defaults("no such network") == Defaults()


def test_defaults_of_another_kind_are_refused_where_the_network_is_asked_for(monkeypatch):
    monkeypatch.setitem(NETS, "odd", type("Odd", (CNN,), {"defaults": {"lr": 0.1}}))
    make_config({"net": "cnn"})
    with pytest.raises(InputError, match=r"odd has defaults that are no fedthe\.nets\.make\.Defaults"):
        make_config({"net": "odd"})
