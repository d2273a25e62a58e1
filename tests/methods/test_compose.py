"""Methods as values: how parts become one, what is refused before training, and when two methods are equal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

import fedthe
from fedthe.engine.train import train
from fedthe.methods import METHODS, STUDIES, compose
from fedthe.methods.apfl import APFL
from fedthe.methods.base import FedAvg, Fitted, Method, Personal, Predictor, Rounds
from fedthe.methods.compose import describe
from fedthe.methods.ditto import Ditto
from fedthe.methods.fedrod import FedRoD
from fedthe.methods.fedthe import HeadEnsemble
from fedthe.methods.finetune import FineTune
from fedthe.methods.gma import GMA
from fedthe.methods.memo import Memo
from fedthe.methods.predictor import Forward
from fedthe.methods.t3a import T3A
from fedthe.methods.tsa import TSA
from fedthe.methods.ttt import TTT, Online
from fedthe.methods.two_heads import TwoHeads
from fedthe.store import content_hash
from helpers import fails
from trained_methods import NET, SETTINGS, make_data, net_for, trained

# compose


def test_parts_find_their_places_in_any_order():
    method = Method(NET, FedAvg(balanced=True), TwoHeads(), HeadEnsemble())
    parts = method.rounds, method.personal, method.predictor
    for recipe in (parts, parts[::-1], (parts[1], parts[0], parts[2])):
        assert compose(NET, recipe) == method


def test_places_without_a_part_are_fedavgs():
    assert compose(NET, ()) == compose(NET, FedAvg()) == Method(NET)
    assert compose(NET, FineTune()) == Method(NET, FedAvg(), FineTune(), Forward())
    assert compose(NET, Memo()) == Method(NET, FedAvg(), Personal(), Memo())


def test_a_part_may_be_both_rounds_and_personal():
    ditto = compose(NET, Ditto(lam=0.5))
    assert ditto.rounds is ditto.personal
    assert ditto.is_one_part
    assert not compose(NET, FedAvg()).is_one_part
    assert not Method(NET, Ditto(), Ditto(lam=0.5)).is_one_part


@pytest.mark.parametrize("kind", [FedAvg, FineTune, Ditto, Memo])
def test_a_class_is_a_recipe(kind):
    assert compose(NET, kind) == compose(NET, kind()) == compose(NET, (kind,))


def test_a_registered_class_is_a_recipe(monkeypatch):
    monkeypatch.setitem(fedthe.METHODS, "mine", Ditto)
    assert compose(NET, METHODS["mine"]) == compose(NET, METHODS["ditto"])


@pytest.mark.parametrize(
    ("recipe", "place"),
    [
        ((FedAvg(), GMA()), "rounds"),
        ((FineTune(), TwoHeads()), "personal"),
        ((Memo(), T3A()), "predictor"),
        ((FedAvg(balanced=True), Ditto()), "rounds"),
        ((FineTune(), Ditto()), "personal"),
    ],
    ids=str,
)
def test_two_parts_for_one_place_are_refused(recipe, place):
    fails(lambda: compose(NET, recipe), repr(recipe[0]), repr(recipe[1]), f"are both {place} parts; a method has one.")


@pytest.mark.parametrize("part", [3, "fedavg", None, NET, object], ids=str)
def test_what_is_no_part_is_refused(part):
    fails(lambda: compose(NET, part), "is not a part of a method; derive it from Rounds, Personal or Predictor.")
    fails(lambda: compose(NET, (FedAvg(), part)), "is not a part of a method")


# check


@pytest.mark.parametrize("name", METHODS | STUDIES)
def test_every_method_of_the_package_passes(name):
    compose(net_for(name), (METHODS | STUDIES)[name]).check()


@pytest.mark.parametrize(
    ("recipe", "missing", "there"),
    [
        ((FineTune(), HeadEnsemble()), "personal", "body, head"),
        (TSA(), "personal", "body, head"),
        (Online(), "rotation", "body, head"),
        ((FedAvg(balanced=True), FedRoD(), HeadEnsemble()), "descriptor", "body, head, personal"),
        ((APFL(), HeadEnsemble(then=Memo())), "descriptor", "alpha, body, head, personal"),
        ((TTT(), TSA()), "personal", "body, head, rotation"),
    ],
    ids=str,
)
def test_a_predictor_that_misses_what_it_needs_is_refused(recipe, missing, there):
    method = compose(NET, recipe)
    said = fails(method.check, f"{type(method.predictor).__name__} needs '{missing}'", f"has only {there};")
    assert said.endswith("; choose another personal part.")


def test_needs_may_be_shared_averaged_or_kept():
    compose(NET, (TTT(), Online())).check()  # shared
    compose(NET, (TwoHeads(), HeadEnsemble())).check()  # a mean of what clients keep, and what they keep


def test_a_predictor_may_refuse_a_network():
    deep = replace(NET, head_layers=2)
    fails(compose(deep, (FineTune(), T3A())).check, "head_layers is 2")
    compose(deep, (FineTune(), Memo())).check()


@dataclass(frozen=True)
class Keeps(Rounds):
    """Rounds that keep a number under some name."""

    name: str = "count"

    def keep(self, net, params):
        return {self.name: torch.zeros(())}

    def local(self, fit, shared, mine, shard):
        params, losses, _ = fit(self.loss, shared)
        return Fitted(params, losses, {self.name: mine[self.name] + 1})


@dataclass(frozen=True)
class Shares(Rounds):
    """Rounds that share a vector beside the model."""

    name: str = "vector"

    def share(self, net, params):
        return params | {self.name: torch.zeros(net.feature_dim)}


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ((Keeps("personal"), TwoHeads()), "personal"),  # both keep it
        ((Keeps("own_descriptor"), TwoHeads()), "own_descriptor"),
        ((Shares("descriptor"), TwoHeads()), "descriptor"),  # shared twice: by the rounds, and as a mean
        ((Keeps("descriptor"), TwoHeads()), "descriptor"),  # it would hide the mean from the predictor
    ],
    ids=str,
)
def test_clashing_names_of_leaves_are_refused(recipe, name):
    said = fails(compose(NET, recipe).check, f"two parts of the method use the name '{name}'; rename one of them.")
    assert fails(lambda: train(compose(NET, recipe), make_data()[0], SETTINGS, 0)) == said  # before any round


def test_names_that_differ_do_not_clash():
    for recipe in ((Keeps(), TwoHeads(), HeadEnsemble()), (Shares(), TwoHeads(), HeadEnsemble()), Keeps("personal")):
        compose(NET, recipe).check()


def test_a_part_that_is_both_keeps_the_same_leaves_once():
    method = compose(NET, Ditto())
    method.check()
    mine = method.start(NET.init(0)).mine
    assert mine["rounds"] == {}
    assert mine["personal"].keys() == {"body", "head"}


# equality


def test_methods_with_equal_parts_are_equal_and_share_a_training():
    one, other = (compose(NET, (GMA(threshold=0.2), FineTune(), Memo(views=2))) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one.training == other.training == compose(NET, GMA(threshold=0.2))
    assert trained(one.training) is trained(other.training)
    assert compose(NET, GMA(threshold=0.3)).training != one.training
    assert compose(replace(NET, head_layers=2), GMA(threshold=0.2)).training != one.training


class Copy(FineTune):
    """A subclass without a decorator."""

    def personalize(self, fit, shared, mine, shard):
        return Fitted({})


class Tilted(FedAvg):
    def loss(self, net, params, given, batch):
        return 2 * super().loss(net, params, given, batch)


class Doubled(TwoHeads):
    def loss(self, net, params, given, batch):
        return 2 * super().loss(net, params, given, batch)


class Loud(Memo):
    def tuned(self, method, mine, views, x):
        return 2 * super().tuned(method, mine, views, x)


@pytest.mark.parametrize("kind", [Copy, Tilted, Doubled, Loud])
def test_a_subclass_of_a_part_is_not_equal_to_its_parent(kind):
    parent = kind.__bases__[0]
    assert kind() == kind()
    assert kind() != parent()
    assert parent() != kind()
    assert compose(NET, kind) != compose(NET, parent)
    assert dataclass(frozen=True)(type("Decorated", (parent,), {}))() != parent()


def test_a_subclass_trains_by_itself_where_it_changes_training():
    fedavg = Method(NET)
    assert compose(NET, Copy).training == fedavg  # it keeps nothing, so no round sees it
    assert compose(NET, (Copy(), Loud())).training == fedavg
    assert compose(NET, Tilted).training == compose(NET, (Tilted(), FineTune(), Memo())).training != fedavg
    assert compose(NET, Doubled).training not in (fedavg, compose(NET, TwoHeads).training)
    assert compose(NET, Doubled).core == compose(NET, TwoHeads).core == fedavg
    assert compose(NET, Tilted).core != fedavg


class KeepingFineTune(FineTune):
    """It keeps what it fine-tuned, so every round has to run it."""

    def keep(self, net, params):
        return params


def test_a_personal_part_that_keeps_something_is_part_of_the_training():
    method = compose(NET, KeepingFineTune)
    assert method.training == method != compose(NET, FineTune).training
    assert method.core == Method(NET)


# records


@dataclass(frozen=True)
class Averaging(Personal):
    averages: ClassVar[Mapping[str, str]] = {"mean": "own"}
    weight: float = 0.5

    def keep(self, net, params):
        return {"own": torch.zeros(3)}


def test_a_record_names_the_class_and_every_hyperparameter():
    found = describe(compose(NET, (GMA(threshold=0.2), Averaging(), HeadEnsemble(then=Memo(views=2)))))
    assert list(found) == ["is", "net", "rounds", "personal", "predictor"]
    assert found["rounds"] == {"is": "fedthe.methods.gma.GMA", "threshold": 0.2}
    assert found["personal"] == {"is": f"{__name__}.Averaging", "weight": 0.5}  # what a class says is not a setting
    assert found["predictor"]["then"] == {"is": "fedthe.methods.memo.Memo", "views": 2, "steps": 3, "lr": 0.0005}
    assert found["predictor"].keys() == {"is", "alpha", "beta", "search", "weighting", "history", "batch", "then"}


def test_records_tell_methods_apart():
    recipes = [*METHODS.values(), *STUDIES.values(), Copy(), Tilted(), (FineTune(), Loud())]
    methods = {compose(NET, recipe) for recipe in recipes}
    assert len({content_hash(describe(method)) for method in methods}) == len(methods)


class Plain(FineTune):
    """It has a field of its own, but is no dataclass: nothing sees the field."""

    strength: float = 1.0

    def __init__(self, strength: float = 1.0) -> None:
        super().__init__()
        object.__setattr__(self, "strength", strength)


def test_the_fields_of_a_plain_class_are_not_compared():
    """Two settings would be one training and one record, so `fedthe.run` refuses the class."""
    assert Plain(1.0) == Plain(2.0)
    assert "strength" not in describe(Plain())
    assert dataclass(frozen=True)(Plain).__eq__ is not FineTune.__eq__  # the way out


def test_a_predictor_without_answer_says_so():
    with pytest.raises(NotImplementedError):
        Predictor().answer(Method(NET), {}, {}, None)


@dataclass(frozen=True)
class Unkept(Personal):
    averages: ClassVar[Mapping[str, str]] = {"mean": "own"}


@dataclass(frozen=True)
class Windowless(Forward):
    window = 0


@pytest.mark.parametrize(
    ("part", "says"),
    [(Unkept(), "Unkept.averages names a leaf that its `keep` does not return"), (Windowless(), "a window of 0")],
)
def test_what_could_not_work_is_refused_before_training(part, says):
    fails(compose(NET, part).check, says)


@dataclass(frozen=True)
class Demanding(Rounds):
    rate: float


def test_a_class_that_needs_arguments_is_refused_with_the_way_out():
    fails(lambda: compose(NET, Demanding), "Demanding cannot be made without arguments", "register an instance")
    assert compose(NET, Demanding(0.5)).rounds == Demanding(0.5)


class Undecorated(Rounds):
    def __init__(self, mu):
        self.mu = mu


def test_attributes_that_are_no_fields_are_refused_since_equality_does_not_see_them():
    fails(lambda: compose(NET, Undecorated(0.1)), "Undecorated.mu is not a field", "frozen dataclass")
