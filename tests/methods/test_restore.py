"""A method's description is enough to make it again."""

import json
from dataclasses import dataclass, replace

import pytest
import torch

from fedthe.methods import METHODS, STUDIES
from fedthe.methods.base import Personal
from fedthe.methods.compose import compose, describe
from fedthe.methods.fedthe import HeadEnsemble
from fedthe.methods.restore import restore, restore_method
from fedthe.nets import NETS
from fedthe.nets.cnn import CNN
from fedthe.nets.standardized import standardize
from fedthe.nets.wrap import wrap_module
from helpers import fails

NET = CNN(10)


def over_the_wire(value):
    return json.loads(json.dumps(describe(value)))


@pytest.mark.parametrize("name", [*METHODS, *STUDIES])
def test_every_method_is_made_again(name):
    method = compose(NET, (METHODS | STUDIES)[name])
    again = restore(over_the_wire(method))
    assert again == method
    assert hash(again) == hash(method)


@pytest.mark.parametrize("name", NETS)
def test_every_network_is_made_again(name):
    net = NETS[name](7, 3, 24)
    assert restore(over_the_wire(net)) == net
    scaled = standardize(net, (0.5, 0.25, 0.125), (1.0, 2.0, 3.0))
    assert restore(over_the_wire(scaled)) == scaled


def test_hyperparameters_that_were_changed_are_kept():
    changed = HeadEnsemble(alpha=0.3, batch=4)
    assert restore(over_the_wire(changed)) == changed != HeadEnsemble()


def test_a_wrapped_module_is_given():
    def make():
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5), torch.nn.Linear(5, 3))

    method = compose(wrap_module(make, head="2"), METHODS["fedthe"])
    told = over_the_wire(method)
    fails(lambda: restore_method(told), "Wrapped", "give the network")
    assert restore_method(told, wrap_module(make, head="2")) == method
    fails(lambda: restore_method(told, wrap_module(lambda: make().double().float(), head="1")), "not the one")
    fails(lambda: restore_method(told, NET), "not the one that was trained")


@dataclass(frozen=True)
class Mine(Personal):
    steps: int = 2


def test_only_known_classes_are_made(monkeypatch):
    told = over_the_wire(compose(NET, Mine()))
    fails(lambda: restore(told), "there is no", "Mine")
    monkeypatch.setitem(METHODS, "mine", Mine())
    assert restore(told) == compose(NET, Mine())


@pytest.mark.parametrize(
    "name",
    [
        *("os.system", "subprocess.Popen", "fedthe.methods.restore.import_module", "fedthe.methods.nothing.At", "CNN"),
        *("", 3, "fedthe.methods.base.Mapping", "fedthe.methods.../x.Y"),
    ],
)
def test_other_code_is_not_run(name):
    fails(lambda: restore({"is": name}))


def test_what_this_version_does_not_know_is_refused():
    told = over_the_wire(replace(NET, classes=4))
    fails(lambda: restore(told | {"depth": 3}), "CNN has no depth")
    fails(lambda: restore(told | {"classes": 0}), "at least one class")
    fails(lambda: restore(told | {"size": "big"}))
    fails(lambda: restore({}), "names no class")
    fails(lambda: restore_method(told), "a method is expected")
