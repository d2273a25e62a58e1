"""Methods by name: hyperparameters, the defaults of networks, and what is refused before there is any data."""

from dataclasses import dataclass, replace

import pytest

from fedthe.config import Config, make_config
from fedthe.errors import InputError
from fedthe.methods import METHODS
from fedthe.methods.base import Personal, Rounds
from fedthe.methods.compose import arrange
from fedthe.methods.make import find_parts, list_hyper, make_methods, set_hyper
from fedthe.nets import NETS
from fedthe.nets.cnn import CNN
from fedthe.nets.make import make_net


def make(config, classes, channels, size):
    return make_methods(config, make_net(config, classes, (channels, size, size)))


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
        set_hyper(arrange(METHODS[name]), {key: value}, name)


def test_the_tuning_of_fedthe_plus_can_be_set():
    method = arrange(METHODS["fedthe_plus"])
    changed = set_hyper(method, {"then.lr": 0.001, "then.steps": 1}, "fedthe_plus")
    assert (changed.predictor.then.lr, changed.predictor.then.steps) == (0.001, 1)
    assert changed.predictor.search == method.predictor.search


def test_hyperparameters_reach_the_parts_of_a_predictor():
    parts = set_hyper(arrange(METHODS["fedthe"]), {"alpha": 0.4, "steps": 5, "balanced": False}, "fedthe")
    assert (parts.predictor.alpha, parts.predictor.search.steps, parts.rounds.balanced) == (0.4, 5, False)


def test_values_that_are_valid_only_together_are_set_together():
    both = {"own": [0.1, 0.9], "start": [0.5, 0.5]}
    for given in (both, dict(reversed(both.items()))):
        regimes = set_hyper(arrange(METHODS["fedthe_regime"]), given, "fedthe_regime").predictor.regimes
        assert (regimes.own, regimes.start) == ((0.1, 0.9), (0.5, 0.5))
    with pytest.raises(InputError, match=r"^fedthe_regime: own must be shares"):
        set_hyper(arrange(METHODS["fedthe_regime"]), {"own": [0.1, 0.9]}, "fedthe_regime")
    with pytest.raises(InputError, match=r"^fedthe_regime: own must be like 0.03,0.6,0.99, not 0.5\.$"):
        set_hyper(arrange(METHODS["fedthe_regime"]), {"own": 0.5}, "fedthe_regime")
    with pytest.raises(InputError, match=r"own and regimes\.own are one hyperparameter"):
        set_hyper(arrange(METHODS["fedthe_regime"]), both | {"regimes.own": [0.1, 0.9]}, "fedthe_regime")


@pytest.mark.parametrize("value", [["a", 0.9], [[0.1], 0.9], [None], [True, 0.1], "0.1,,0.2"])
def test_a_list_of_anything_but_numbers_is_refused(value):
    config = {"methods": ["fedthe_regime"], "hyper": {"fedthe_regime": {"own": value}}}
    with pytest.raises(InputError, match=r"own must be (numbers, such as|like)"):
        find_parts(make_config(config))


@dataclass(frozen=True)
class Both(Rounds, Personal):
    pull: float = 1.0


def test_a_part_that_is_rounds_and_personal_is_set_once():
    parts = set_hyper(arrange(Both), {"pull": 0.5}, "both")
    assert parts.rounds == parts.personal == Both(0.5)
    assert {path.rsplit(".")[-1] for path in list_hyper(parts)} == {"pull"}


@pytest.mark.parametrize(("net", "rate"), [("cnn", 0.1), ("cct4", 0.01)])
def test_the_search_of_the_head_ensemble_has_the_rate_of_the_network(net, rate):
    made = make(Config(net=net, methods=("fedthe", "fedavg", "fedthe_plus")), 3, 3, 32)
    assert made["fedthe"].predictor.search.lr == made["fedthe_plus"].predictor.search.lr == rate
    hyper = {"fedthe": {"search.lr": 0.7}}
    assert make(Config(net=net, methods=("fedthe",), hyper=hyper), 3, 3, 32)["fedthe"].predictor.search.lr == 0.7


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
    find_parts(config)
    assert make(config, 10, 1, 28)["t3a"].net == Grey(10, 1, 28)
    for settings, says in (
        ({"methods": ["fedthee"]}, "did you mean fedthe"),
        ({"hyper": {"ditto": {"lam": -1.0}}}, "lam"),
    ):
        with pytest.raises(InputError, match=says):
            find_parts(make_config(config.as_dict() | settings))
    with pytest.raises(InputError, match="t3a needs a head of one linear layer"):
        make(replace(config, head_layers=2), 10, 1, 28)
