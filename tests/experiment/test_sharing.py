"""Trainings that share the training of the shared model run side by side: each gets the bits that it gets alone."""

from dataclasses import dataclass

import pytest
import torch

import fedthe
from fedthe import records, tree
from fedthe.engine.clients import Clients
from fedthe.errors import InputError
from fedthe.methods import METHODS, compose
from fedthe.methods.base import FedAvg, Rounds
from fedthe.methods.fedrod import FedRoD
from fedthe.methods.two_heads import TwoHeads
from helpers import count_rounds
from trained_methods import ALL, NET, PAPER, net_for, trained

SMALL = {"clients": 3, "dirichlet": 1.0, "rounds": 2, "local_epochs": 1, "samples": 6}
BALANCED = FedAvg(balanced=True)


def read_trainings(folder):
    return {path.stem: records.load_progress(path) for path in sorted((folder / "trainings").glob("*.safetensors"))}


def run_alone(data, folder, names, **settings):
    """One method after another: none has another beside it."""
    tables = [fedthe.run(dataset=data, methods=[name], out=str(folder), **SMALL | settings).table() for name in names]
    return {name: table[name] for name, table in zip(names, tables, strict=True)}


def assert_same(one, other):
    assert (one.round, one.server.losses, len(one.clients)) == (other.round, other.server.losses, len(other.clients))
    pairs = [(one.server.shared, other.server.shared), (one.averages, other.averages)]
    for a, b in [*pairs, *zip(one.clients, other.clients, strict=True)]:
        a, b = tree.flatten(a), tree.flatten(b)
        assert list(a) == list(b)
        assert all(torch.equal(leaf, b[name]) for name, leaf in a.items())


def assert_same_trainings(one, other):
    one, other = read_trainings(one), read_trainings(other)
    assert list(one) == list(other)
    for name in one:
        assert_same(one[name], other[name])


@pytest.mark.parametrize("name", ALL)
def test_methods_with_one_core_have_one_shared_model(name):
    method = compose(net_for(name), ALL[name])
    core = method.core
    assert core.training == core == core.core == method.training.core
    progress, other = trained(method.training), trained(core)
    assert progress.server.losses == other.server.losses
    sent = tree.flatten(progress.server.shared)
    assert all(torch.equal(sent[leaf], value) for leaf, value in tree.flatten(other.server.shared).items())


def test_what_is_trained_once():
    cores = {name: compose(NET, METHODS[name]).core for name in METHODS}
    assert cores["fedavg"] == cores["apfl"] == cores["fedavg_ft"] != cores["ditto"]
    assert cores["fedrod"] == cores["fedthe"] != cores["fedavg"]
    assert len({cores[name] for name in PAPER}) == 5


def test_a_run_trains_them_side_by_side(data, tmp_path, monkeypatch):
    names = ["fedrod", "fedavg", "fedthe", "apfl"]
    alone = run_alone(data, tmp_path / "alone", names, keep=[1])
    rounds = count_rounds(monkeypatch)
    results = fedthe.run(dataset=data, methods=names, out=str(tmp_path / "beside"), **SMALL | {"keep": [1]})
    assert rounds == [("FedRoD", "TwoHeads")] * 2 + [("Personal", "APFL")] * 2
    assert results.methods == names
    assert results.table() == alone
    assert_same_trainings(tmp_path / "beside", tmp_path / "alone")
    assert all(facts["seconds"] > 0 for facts in results.trainings.values())


def test_with_what_clients_keep_on_file(data, tmp_path, monkeypatch):
    whole = Clients.start
    monkeypatch.setattr(Clients, "start", lambda first, count, file=None, budget=0: whole(first, count, file, 0))
    names = ["apfl", "fedavg", "fedrod", "fedthe"]
    alone = run_alone(data, tmp_path / "alone", names, keep=[1], participation=0.5)
    out, rounds = str(tmp_path / "beside"), count_rounds(monkeypatch)
    settings = SMALL | {"keep": [1], "participation": 0.5}
    assert fedthe.run(dataset=data, methods=names, out=out, **settings).table() == alone
    assert rounds == [("APFL", "Personal")] * 2 + [("FedRoD", "TwoHeads")] * 2
    assert list((tmp_path / "beside" / "trainings").glob("*.clients"))
    assert_same_trainings(tmp_path / "beside", tmp_path / "alone")


def test_a_method_added_later_goes_alone_and_a_longer_run_goes_on_together(data, tmp_path, monkeypatch):
    rounds, out = count_rounds(monkeypatch), str(tmp_path / "run")
    fedthe.run(dataset=data, methods=["fedthe"], out=out, **SMALL)
    assert rounds == [("TwoHeads",)] * 2
    fedthe.run(dataset=data, methods=["fedthe", "fedrod"], out=out, **SMALL)
    assert rounds[2:] == [("FedRoD",)] * 2
    fedthe.run(dataset=data, methods=["fedthe", "fedrod"], out=out, **SMALL | {"rounds": 4})
    assert rounds[4:] == [("TwoHeads", "FedRoD")] * 2
    run_alone(data, tmp_path / "alone", ["fedthe", "fedrod"])
    run_alone(data, tmp_path / "alone", ["fedthe", "fedrod"], rounds=4)
    assert_same_trainings(tmp_path / "run", tmp_path / "alone")


def test_those_in_different_rounds_go_on_alone(data, tmp_path, monkeypatch):
    names, out = ["fedthe", "fedrod"], str(tmp_path / "run")
    fedthe.run(dataset=data, methods=names[:1], out=out, **SMALL | {"rounds": 1})
    rounds = count_rounds(monkeypatch)
    fedthe.run(dataset=data, methods=names, out=out, **SMALL)
    assert sorted(rounds) == [("FedRoD",), ("FedRoD",), ("TwoHeads",)]


def test_seeds_that_are_ahead_do_not_keep_the_others_apart(data, tmp_path, monkeypatch):
    out, more = str(tmp_path / "run"), {"engine": "stack"}
    fedthe.run(dataset=data, methods=["fedthe"], out=out, **SMALL | more)
    rounds = count_rounds(monkeypatch)
    fedthe.run(dataset=data, methods=["fedthe", "fedrod"], seeds=[0, 1, 2], out=out, **SMALL | more)
    # seeds 1 and 2, and what seed 0 has not
    assert sorted(rounds) == [("FedRoD",)] * 2 + [("TwoHeads", "FedRoD")] * 2


@dataclass(frozen=True)
class Described(TwoHeads):
    """Averages another descriptor than TwoHeads does, under the same name."""

    def personalize(self, fit, shared, mine, shard):
        made = super().personalize(fit, shared, mine, shard)
        own = made.params["own_descriptor"].clamp(max=0.1)
        return made._replace(params=made.params | {"own_descriptor": own})


@dataclass(frozen=True)
class Nested(Rounds):
    """Shares one leaf more, within the head."""

    def share(self, net, params):
        return params | {"head": params["head"] | {"temperature": torch.ones(1)}}


@pytest.mark.parametrize(
    ("names", "lanes"),
    [
        (["fedthe", "described", "fedrod"], {("TwoHeads", "Described", "FedRoD")}),
        (["fedavg", "nested", "apfl"], {("Personal", "APFL"), ("Personal",)}),
    ],
)
def test_what_only_some_of_them_share(names, lanes, data, tmp_path, monkeypatch):
    monkeypatch.setitem(fedthe.METHODS, "described", (BALANCED, Described()))
    monkeypatch.setitem(fedthe.METHODS, "nested", Nested)
    alone = run_alone(data, tmp_path / "alone", names)
    rounds = count_rounds(monkeypatch)
    assert fedthe.run(dataset=data, methods=names, out=str(tmp_path / "beside"), **SMALL).table() == alone
    assert set(rounds) == lanes
    assert_same_trainings(tmp_path / "beside", tmp_path / "alone")


@dataclass(frozen=True)
class Stops(FedRoD):
    def personalize(self, fit, shared, mine, shard):
        raise InputError("mine is wrong.")


def test_an_error_of_one_does_not_keep_the_other_from_being_trained(data, tmp_path, monkeypatch):
    monkeypatch.setitem(fedthe.METHODS, "stops", (BALANCED, Stops()))
    alone = run_alone(data, tmp_path / "alone", ["fedthe"])
    results = fedthe.run(dataset=data, methods=["fedthe", "stops"], out=str(tmp_path / "run"), **SMALL)
    assert "mine is wrong" in results.failures["stops, seed 0"]
    assert results.methods == ["fedthe"]
    rounds = count_rounds(monkeypatch)
    assert fedthe.run(dataset=data, methods=["fedthe"], out=str(tmp_path / "run"), **SMALL).table() == alone
    assert rounds == []


@dataclass(frozen=True)
class Explodes(FedRoD):
    """Its personal head diverges in the second round, and only that."""

    def personalize(self, fit, shared, mine, shard):
        made = super().personalize(fit, shared, mine, shard)
        changed = (shared["body"]["conv1"] - fit.net.init(0)["body"]["conv1"]).abs().sum() > 0
        return made._replace(
            params=tree.map_leaves(lambda leaf: torch.where(changed, leaf + float("inf"), leaf), made.params)
        )


@pytest.mark.parametrize("tolerate", ["stop", "skip"])
def test_one_that_diverges_does_not_take_the_other_with_it(tolerate, data, tmp_path, monkeypatch):
    monkeypatch.setitem(fedthe.METHODS, "explodes", (BALANCED, Explodes()))
    alone = run_alone(data, tmp_path / "alone", ["fedthe"])
    rounds, settings = count_rounds(monkeypatch), SMALL | {"tolerate": tolerate}
    results = fedthe.run(dataset=data, methods=["explodes", "fedthe"], out=str(tmp_path / "beside"), **settings)
    assert rounds == [("Explodes", "TwoHeads")] * 2 + [("Explodes",), ("TwoHeads",)]
    assert list(results.failures) == ["explodes, seed 0"]
    assert "round 2" in results.failures["explodes, seed 0"]
    assert results.table() == alone
