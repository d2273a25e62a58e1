"""Networks by name, by class, by function and as they are; and what they are trained with."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file

from fedthe.config import OPTIMIZERS, make_config
from fedthe.engine.fit import Optimizer
from fedthe.errors import InputError
from fedthe.experiment.data import fit_to_net
from fedthe.methods.make import make_methods
from fedthe.nets import CCT4, NETS, ResNet20GN
from fedthe.nets.cnn import CNN
from fedthe.nets.make import Defaults, as_net, find_defaults, make_net
from fedthe.nets.net import Net, fan_in
from fedthe.nets.standardized import standardize
from fedthe.nets.started import start_from_file
from fedthe.nets.wrap import wrap_module
from torch_modules import MLP


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


def read_tokens(classes, shape):
    return wrap_module(lambda: MLP(inputs=shape[0], classes=classes))


read_tokens.defaults = Defaults("adam", lr=0.003)


@dataclass(frozen=True)
class Linear(Net):
    """For features of any number."""

    shape: tuple[int, ...]

    @property
    def feature_dim(self):
        return 4

    def body_starts(self):
        return {"w": fan_in(4, *self.shape)}

    def features(self, body, x):
        return x @ body["w"].T


def test_a_function_or_a_class_makes_a_network_for_any_shape(monkeypatch):
    monkeypatch.setitem(NETS, "reader", read_tokens)
    config = make_config({"net": "reader"})
    assert config.training.optimizer == Optimizer("adam", 0.003)
    net = make_net(config, 5, (7,))
    assert (net.classes, net.init(0)["body"]["layers"]["1"]["weight"].shape) == (5, (8, 7))
    assert as_net(Linear, 3, (6,)) == Linear(3, (6,))
    assert as_net(CNN, 3, (1, 28, 28)) == CNN(3, 1, 28)
    assert as_net(net, 5, (9,)) is net
    assert make_net(config, 5, (7,), given=net) is net
    assert make_net(make_config({"width": 2, "net": "resnet20_gn"}), 3, (3, 32, 32), given=ResNet20GN).width == 2


@pytest.mark.parametrize(
    ("value", "shape", "says"),
    [
        (CNN, (12,), r"CNN takes square images, but a sample has the shape \[12\]; bring a network.*wrap_module"),
        (CNN, (3, 20, 16), r"a sample has the shape \[3, 20, 16\]; set square=crop or square=pad, or bring"),
        (MLP(), (12,), "MLP is a torch module; make it a network with fedthe.wrap_module"),
        (MLP, (12,), "MLP is a torch module; make it a network with fedthe.wrap_module"),
        (lambda classes, shape: MLP(), (12,), "is a torch module; make it a network"),
        (lambda classes, shape: None, (12,), "is no network, but None"),
        (lambda classes, shape: 1 / 0, (12,), r"cannot be made for 3 classes and samples of shape \[12\] \(division"),
        ("cnn", (12,), "is no network, but 'cnn'"),
        (wrap_module(lambda: MLP(classes=7)), (12,), "Wrapped tells 7 classes apart, but the data has 3"),
    ],
)
def test_what_is_no_network_for_the_data_is_refused(value, shape, says):
    with pytest.raises(InputError, match=says):
        as_net(value, 3, shape)


def test_settings_for_images_are_refused_for_other_networks():
    net = wrap_module(MLP)
    with pytest.raises(InputError, match="Wrapped has a head of its own; leave head_layers out"):
        make_net(make_config({"head_layers": 2}), 3, (12,), given=net)
    with pytest.raises(InputError, match="Wrapped cannot standardize its samples"):
        make_net(make_config({}), 3, (12,), ((0.0,), (1.0,)), given=net)


def test_a_network_object_has_defaults(tmp_path):
    own = Defaults("adam", lr=0.002, search_lr=0.3)
    net = wrap_module(MLP, defaults=own)
    save_file({name: leaf.contiguous() for name, leaf in MLP().state_dict().items()}, tmp_path / "w.safetensors")
    assert find_defaults(net) == find_defaults(start_from_file(net, tmp_path / "w.safetensors")) == own
    assert find_defaults(wrap_module(MLP)) == Defaults()
    assert find_defaults(CCT4(3)) == find_defaults(standardize(CCT4(3), (0.0,), (1.0,))) == find_defaults("cct4")
    assert find_defaults(Slow(3)) == Slow.defaults
    assert fit_to_net(make_config({}), net).training.optimizer == Optimizer("adam", 0.002)
    assert fit_to_net(make_config({"lr": 0.5}), net).training.optimizer == Optimizer("adam", 0.5)
    assert fit_to_net(make_config({"optimizer": "sgd"}), net).training.optimizer == Optimizer()


def test_a_network_is_checked_on_the_shape_of_samples():
    Linear(3, (6,)).check(torch.zeros(2, 6))
    CNN(3).check(torch.zeros(2, 3, 32, 32))
    with pytest.raises(InputError, match=r"Linear cannot take a batch of shape \[2, 7\] in float32"):
        Linear(3, (6,)).check(torch.zeros(2, 7))
    with pytest.raises(InputError, match=r"Linear gives features \[2, 5, 4\] for 2 samples, not \[2, 4\]"):
        Linear(3, (6,)).check(torch.zeros(2, 5, 6))


def test_defaults_that_no_optimizer_has_are_refused():
    for wrong in (
        {"optimizer": "adamw"},
        {"lr": -1.0},
        {"optimizer": "adam", "momentum": 0.9},
        {"weight_decay": float("nan")},
    ):
        with pytest.raises(InputError):
            Defaults(**wrong)


def test_a_functions_defaults_are_those_of_what_it_makes():
    def make(classes, shape):
        return wrap_module(lambda: MLP(), head="fc")

    make.defaults = Defaults("adam", lr=0.002)
    made = as_net(make, 3, (12,))
    assert find_defaults(made) == make.defaults
