"""Methods that send the same, trained side by side: each has the bits that it has alone."""

from dataclasses import dataclass, replace

import pytest
import torch

import fedthe
from fedthe import records, tree
from fedthe.engine.clients import Clients
from fedthe.engine.loop import Loop
from fedthe.engine.shards import Shards
from fedthe.engine.stack import Stack
from fedthe.engine.train import put_beside, start, take_apart, train_together
from fedthe.engine.visit import Progress, Run
from fedthe.errors import InputError
from fedthe.methods import METHODS
from fedthe.methods.apfl import APFL
from fedthe.methods.base import Method, Predictor, find_sender
from fedthe.methods.fedrod import FedRoD
from fedthe.methods.fedthe import TwoHeads
from fedthe.methods.finetune import BalancedFedAvg
from fedthe.methods.term import TERM
from helpers import count_rounds
from trained_methods import ALL, NET, PAPER, SETTINGS, make_data, make_federation, trained

ON_CARD = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
ALIKE = [
    (FedRoD(NET), TwoHeads(NET)),
    (BalancedFedAvg(NET), TwoHeads(NET), FedRoD(NET), TwoHeads(NET, balanced_personal=True)),
    (Method(NET), APFL(NET)),
    (APFL(NET), TwoHeads(NET, balanced=False), Method(NET)),
]


def train_beside(methods, engine, settings=SETTINGS, seeds=(0,), shards=None):
    """By seed and method, what they reached as one."""
    shards = shards or make_data()[0]
    pairs = [put_beside({each: start(each, len(shards), seed, engine.device) for each in methods}) for seed in seeds]
    method, runs = pairs[0][0], [Run(seed, shards) for seed in seeds]
    reached = train_together(method, runs, settings, [progress for _, progress in pairs], engine)
    return [take_apart(method, each) for each in reached]


def assert_same(one: Progress, other: Progress):
    assert (one.round, one.losses, len(one.mine)) == (other.round, other.losses, len(other.mine))
    pairs = [(one.shared, other.shared), *((one.mine[k], other.mine[k]) for k in range(len(one.mine)))]
    for a, b in pairs:
        a, b = tree.flatten(a), tree.flatten(b)
        assert list(a) == list(b)
        assert all(torch.equal(leaf, b[name]) for name, leaf in a.items())


@pytest.mark.parametrize("methods", ALIKE)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_each_has_the_bits_it_has_alone(methods, participation):
    settings = replace(SETTINGS, rounds=3, participation=participation)
    (apart,) = train_beside(methods, Loop(), settings)
    assert set(apart) == set(methods)
    for method in methods:
        (alone,) = train_together(method, [Run(0, make_data()[0])], settings, [start(method, 3, 0)], Loop())
        assert_same(apart[method], alone)


@pytest.mark.parametrize("methods", ALIKE[1:3])
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        pytest.param("cuda", torch.float32, marks=ON_CARD),
        pytest.param("cuda", torch.bfloat16, marks=ON_CARD),
    ],
)
def test_in_the_stack_too(methods, device, dtype):
    engine, shards = Stack(torch.device(device), dtype), Shards(make_federation(), device)
    several = train_beside(methods, engine, seeds=(0, 1), shards=shards)
    for seed, apart in enumerate(several):
        for method in methods:
            begun = start(method, 3, seed, device)
            (alone,) = train_together(method, [Run(seed, shards)], SETTINGS, [begun], engine)
            assert_same(apart[method], alone)


@pytest.mark.parametrize("name", ALL)
def test_what_a_method_says_it_sends_it_does_send(name):
    method = ALL[name](NET).trains_as()
    plain = find_sender(method)
    assert plain.trains_as() == plain == find_sender(plain)
    progress, other = trained(method), trained(plain)
    assert progress.losses == other.losses
    sent = tree.flatten(progress.shared)
    assert all(torch.equal(sent[leaf], value) for leaf, value in tree.flatten(other.shared).items())


def test_what_is_sent_once():
    senders = {name: find_sender(METHODS[name](NET).trains_as()) for name in METHODS}
    assert senders["fedavg"] == senders["apfl"] == senders["fedavg_ft"] != senders["ditto"]
    assert senders["fedrod"] == senders["fedthe"] != senders["fedavg"]
    assert len({senders[name] for name in PAPER}) == 6


class OfTwo(APFL, TERM):
    """APFL's clients, TERM's loss."""


def test_what_a_class_says_does_not_hold_for_its_subclasses():
    for kind in (type("Mine", (FedRoD,), {}), type("Mine", (TwoHeads,), {"trains_as": Method.trains_as}), OfTwo):
        assert find_sender(kind(NET)) == kind(NET).trains_as()
        assert type(find_sender(kind(NET))) is kind
    says = type("Mine", (FedRoD,), {"sends_as": FedRoD.sends_as})
    assert find_sender(says(NET)) == find_sender(FedRoD(NET))


@dataclass(frozen=True)
class Described(TwoHeads):
    """Sends the network that TwoHeads sends, and another descriptor."""

    def personalize(self, fit, shared, mine, shard):
        made = super().personalize(fit, shared, mine, shard)
        return made | {"own_descriptor": made["own_descriptor"].clamp(max=0.1)}

    def trains_as(self):
        return replace(self, predictor=Predictor())

    def sends_as(self):
        return BalancedFedAvg(self.net)


@dataclass(frozen=True)
class Nested(Method):
    """Sends one leaf more, within the head."""

    def init(self, params):
        shared = params | {"head": params["head"] | {"temperature": torch.ones(1)}}
        return shared, shared

    def sends_as(self):
        return Method(self.net)


@pytest.mark.parametrize(
    ("names", "beside"),
    [
        (["described", "fedthe"], False),
        (["fedthe", "described", "fedrod"], False),
        (["described", "fedrod"], True),
        (["fedavg", "nested"], True),
        (["apfl", "nested", "fedavg"], True),
    ],
)
def test_what_only_some_of_them_share(names, beside, data, tmp_path, monkeypatch):
    monkeypatch.setitem(fedthe.METHODS, "described", Described)
    monkeypatch.setitem(fedthe.METHODS, "nested", Nested)
    alone = run_alone(data, tmp_path / "alone", names)
    rounds = count_rounds(monkeypatch)
    assert fedthe.run(dataset=data, methods=names, out=str(tmp_path / "beside"), **SMALL).table() == alone
    assert ("Beside" in rounds) == beside
    assert_same_trainings(tmp_path / "beside", tmp_path / "alone")


def test_what_is_not_the_same_is_not_put_together():
    shards = make_data()[0]
    begun = {each: start(each, 3, 0) for each in (FedRoD(NET), TwoHeads(NET))}
    (further,) = train_together(
        FedRoD(NET), [Run(0, shards)], replace(SETTINGS, rounds=1), [begun[FedRoD(NET)]], Loop()
    )
    assert put_beside(begun)
    assert put_beside(begun | {FedRoD(NET): further}) is None
    assert put_beside(begun | {FedRoD(NET): start(FedRoD(NET), 3, 1)}) is None
    more = replace(begun[FedRoD(NET)], shared=begun[FedRoD(NET)].shared | {"other": torch.zeros(1)})
    assert put_beside(begun | {FedRoD(NET): more}) is None


# experiments

SMALL = {"clients": 3, "dirichlet": 1.0, "rounds": 2, "local_epochs": 1, "samples": 6}


def read_trainings(folder):
    return {path.stem: records.load_progress(path) for path in sorted((folder / "trainings").glob("*.safetensors"))}


def run_alone(data, folder, names, **settings):
    """Each method in its turn: none has another beside it."""
    tables = [fedthe.run(dataset=data, methods=[name], out=str(folder), **SMALL | settings).table() for name in names]
    return {name: table[name] for name, table in zip(names, tables, strict=True)}


def assert_same_trainings(one, other):
    one, other = read_trainings(one), read_trainings(other)
    assert list(one) == list(other)
    for name in one:
        assert_same(one[name], other[name])


def test_a_run_trains_them_side_by_side(data, tmp_path, monkeypatch):
    names = ["fedrod", "fedavg", "fedthe", "apfl"]
    alone = run_alone(data, tmp_path / "alone", names, keep=[1])
    rounds = count_rounds(monkeypatch)
    results = fedthe.run(dataset=data, methods=names, out=str(tmp_path / "beside"), **SMALL | {"keep": [1]})
    assert rounds == ["Beside"] * 4
    assert results.methods == names
    assert results.table() == alone
    assert_same_trainings(tmp_path / "beside", tmp_path / "alone")
    assert all(facts["seconds"] > 0 for facts in results.trainings.values())


def test_with_the_clients_states_on_file(data, tmp_path, monkeypatch):
    whole = Clients.start
    monkeypatch.setattr(Clients, "start", lambda first, count, file=None, budget=0: whole(first, count, file, 0))
    names = ["apfl", "fedavg", "fedrod", "fedthe"]
    alone = run_alone(data, tmp_path / "alone", names, keep=[1], participation=0.5)
    out, rounds = str(tmp_path / "beside"), count_rounds(monkeypatch)
    settings = SMALL | {"keep": [1], "participation": 0.5}
    assert fedthe.run(dataset=data, methods=names, out=out, **settings).table() == alone
    assert rounds == ["Beside"] * 4
    assert list((tmp_path / "beside" / "trainings").glob("*.clients"))
    assert_same_trainings(tmp_path / "beside", tmp_path / "alone")


def test_a_method_added_later_goes_alone_and_a_longer_run_goes_on_together(data, tmp_path, monkeypatch):
    rounds, out = count_rounds(monkeypatch), str(tmp_path / "run")
    fedthe.run(dataset=data, methods=["fedthe"], out=out, **SMALL)
    assert rounds == ["TwoHeads"] * 2
    fedthe.run(dataset=data, methods=["fedthe", "fedrod"], out=out, **SMALL)
    assert rounds[2:] == ["FedRoD"] * 2
    fedthe.run(dataset=data, methods=["fedthe", "fedrod"], out=out, **SMALL | {"rounds": 4})
    assert rounds[4:] == ["Beside"] * 2
    run_alone(data, tmp_path / "alone", ["fedthe", "fedrod"])
    run_alone(data, tmp_path / "alone", ["fedthe", "fedrod"], rounds=4)
    assert_same_trainings(tmp_path / "run", tmp_path / "alone")


def test_those_in_different_rounds_go_on_alone(data, tmp_path, monkeypatch):
    names, out = ["fedthe", "fedrod"], str(tmp_path / "run")
    fedthe.run(dataset=data, methods=names[:1], out=out, **SMALL | {"rounds": 1})
    rounds = count_rounds(monkeypatch)
    fedthe.run(dataset=data, methods=names, out=out, **SMALL)
    assert rounds == ["TwoHeads", "FedRoD", "FedRoD"]


def test_seeds_that_are_ahead_do_not_keep_the_others_apart(data, tmp_path, monkeypatch):
    out, more = str(tmp_path / "run"), {"engine": "stack"}
    fedthe.run(dataset=data, methods=["fedthe"], out=out, **SMALL | more)
    rounds = count_rounds(monkeypatch)
    fedthe.run(dataset=data, methods=["fedthe", "fedrod"], seeds=[0, 1, 2], out=out, **SMALL | more)
    assert rounds == ["Beside"] * 2 + ["FedRoD"] * 2  # seeds 1 and 2, then what seed 0 has not


class Stops(FedRoD):
    def personalize(self, fit, shared, mine, shard):
        raise InputError("mine is wrong.")

    def sends_as(self):
        return BalancedFedAvg(self.net)


def test_an_error_of_one_does_not_keep_the_other_from_being_trained(data, tmp_path, monkeypatch):
    monkeypatch.setitem(fedthe.METHODS, "stops", Stops)
    alone = run_alone(data, tmp_path / "alone", ["fedthe"])
    results = fedthe.run(dataset=data, methods=["fedthe", "stops"], out=str(tmp_path / "run"), **SMALL)
    assert "mine is wrong" in results.failures["stops, seed 0"]
    assert results.methods == ["fedthe"]
    rounds = count_rounds(monkeypatch)
    assert fedthe.run(dataset=data, methods=["fedthe"], out=str(tmp_path / "run"), **SMALL).table() == alone
    assert rounds == []


class Explodes(FedRoD):
    """Its personal head diverges in the second round, and only that."""

    def personalize(self, fit, shared, mine, shard):
        made = super().personalize(fit, shared, mine, shard)
        changed = (shared["body"]["conv1"] - self.net.init(0)["body"]["conv1"]).abs().sum() > 0
        personal = tree.map_leaves(lambda leaf: torch.where(changed, leaf + float("inf"), leaf), made["personal"])
        return made | {"personal": personal}

    def sends_as(self):
        return BalancedFedAvg(self.net)


def test_one_that_diverges_does_not_take_the_other_with_it(data, tmp_path, monkeypatch):
    monkeypatch.setitem(fedthe.METHODS, "explodes", Explodes)
    alone = run_alone(data, tmp_path / "alone", ["fedthe"])
    rounds = count_rounds(monkeypatch)
    results = fedthe.run(dataset=data, methods=["explodes", "fedthe"], out=str(tmp_path / "beside"), **SMALL)
    assert rounds == ["Beside", "Beside", "Explodes", "TwoHeads"]
    assert list(results.failures) == ["explodes, seed 0"]
    assert "round 2" in results.failures["explodes, seed 0"]
    assert results.table() == alone
