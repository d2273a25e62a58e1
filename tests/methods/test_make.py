"""Methods by name: hyperparameters, the defaults of networks, and what is refused before there is any data."""

from dataclasses import dataclass, replace

import pytest

from fedthe.config import Config, make_config
from fedthe.errors import InputError
from fedthe.methods import METHODS
from fedthe.methods.base import Method
from fedthe.methods.fedthe import FedTHE
from fedthe.methods.make import check_methods, make_methods, set_hyper
from fedthe.nets import NETS
from fedthe.nets.cnn import CNN


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("apfl", "alpha", 1.5),
        ("ditto", "lam", -1.0),
        ("gma", "threshold", 2.0),
        ("per_fedavg", "inner_lr", -0.1),
        ("term", "tilt", 0.0),
        ("fedthe", "weighting", "sure"),
        ("fedthe", "alpha", 2.0),
        ("fedthe", "beta", -0.1),
        ("fedthe", "batch", 0),
        ("fedthe", "steps", -1),
        ("memo_g", "views", 0),
        ("memo_g", "steps", -1),
        ("knn_per", "k", 0),
        ("knn_per", "grid", 0.0),
        ("knn_per", "scale", 0.0),
        ("t3a", "m", 0),
        ("ttt", "steps", -1),
        ("tsa", "steps", -1),
    ],
)
def test_a_hyperparameter_out_of_range_is_refused_when_it_is_set(name, key, value):
    with pytest.raises(InputError, match=key):
        set_hyper(METHODS[name](CNN(3, size=16)), {key: value}, name)


def test_the_tuning_of_fedthe_plus_can_be_set():
    method = METHODS["fedthe_plus"](CNN(3, size=16))
    changed = set_hyper(method, {"then.lr": 0.001, "then.steps": 1}, "fedthe_plus")
    assert (changed.predictor.then.lr, changed.predictor.then.steps) == (0.001, 1)
    assert changed.predictor.search == method.predictor.search


def test_hyperparameters_reach_the_parts_of_a_predictor():
    method = set_hyper(FedTHE(CNN(3, size=16)), {"alpha": 0.4, "steps": 5, "balanced": False}, "fedthe")
    assert (method.predictor.alpha, method.predictor.search.steps, method.balanced) == (0.4, 5, False)


@pytest.mark.parametrize(("net", "rate"), [("cnn", 0.1), ("cct4", 0.01)])
def test_the_search_of_the_head_ensemble_has_the_rate_of_the_network(net, rate):
    made = make_methods(Config(net=net, methods=("fedthe", "fedavg", "fedthe_plus")), 3, 3, 32)
    assert made["fedthe"].predictor.search.lr == made["fedthe_plus"].predictor.search.lr == rate
    hyper = {"fedthe": {"search.lr": 0.7}}
    assert (
        make_methods(Config(net=net, methods=("fedthe",), hyper=hyper), 3, 3, 32)["fedthe"].predictor.search.lr == 0.7
    )


@dataclass(frozen=True)
class Grey(CNN):
    """Takes images of one channel and 28 pixels alone."""

    def __post_init__(self):
        super().__post_init__()
        if (self.channels, self.size) != (1, 28):
            raise InputError("grey takes 28 x 28 pixels of one channel.")


def test_no_network_is_made_before_its_shapes_are_known(monkeypatch):
    monkeypatch.setitem(NETS, "grey", Grey)
    config = make_config({"net": "grey", "methods": ["fedthe", "t3a"]})
    check_methods(config)
    assert make_methods(config, 10, 1, 28)["t3a"].net == Grey(10, 1, 28)
    for settings, says in (
        ({"methods": ["fedthee"]}, "did you mean fedthe"),
        ({"hyper": {"ditto": {"lam": -1.0}}}, "lam"),
        ({"head_layers": 2}, "t3a needs a head of one linear layer"),
    ):
        with pytest.raises(InputError, match=says):
            check_methods(make_config(config.as_dict() | settings))


@pytest.mark.parametrize(
    "make",
    [lambda net: FedTHE(replace(net, classes=7)), lambda net: set_hyper(FedTHE(net), {"alpha": 1 / net.size}, "")],
)
def test_a_method_that_needs_the_shapes_is_checked_with_them(make, monkeypatch):
    monkeypatch.setitem(METHODS, "mine", make)
    config = make_config({"methods": ["mine"], "hyper": {"mine": {"alhpa": 0.1}}})
    check_methods(config)
    with pytest.raises(InputError, match="did you mean alpha"):
        make_methods(config, 10, 3, 32)


def test_a_method_for_one_network_alone_is_checked_with_that_class(monkeypatch):
    def make(net):
        if not isinstance(net, CNN):
            raise InputError("mine needs the cnn.")
        return Method(net)

    monkeypatch.setitem(METHODS, "mine", make)
    check_methods(make_config({"methods": ["mine"]}))
    with pytest.raises(InputError, match="mine needs the cnn"):
        check_methods(make_config({"methods": ["mine"], "net": "cct4"}))
