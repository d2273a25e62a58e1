"""Runs of methods from files, of variants, and of objects; and what hears of their rounds."""

from dataclasses import dataclass

import pytest
from torch import Tensor

import fedthe
from fedthe.config import make_config
from fedthe.data import load_dataset
from fedthe.data.plan import Settings, build
from fedthe.errors import Stopped
from fedthe.experiment.results import read_results
from fedthe.methods import METHODS
from fedthe.methods.base import FedAvg, Personal
from fedthe.methods.compose import arrange
from fedthe.methods.finetune import FineTune
from fedthe.methods.given import name_methods
from fedthe.methods.make import find_parts
from fedthe.methods.memo import Memo
from fedthe.methods.predictor import Predictor
from fedthe.nets import CNN
from fedthe.report.gather import gather
from helpers import count_rounds, fails

SMALL = {"clients": 3, "dirichlet": 1.0, "rounds": 1, "local_epochs": 1, "samples": 4, "tests": ["original", "ooc"]}
MINE = """
from dataclasses import dataclass
from fedthe.methods.base import FedAvg

@dataclass(frozen=True)
class Scaled(FedAvg):
    mu: float = 1.0  # times the loss

    def loss(self, net, params, given, batch):
        return self.mu * super().loss(net, params, given, batch)
"""


@dataclass(frozen=True)
class Scaled(FedAvg):
    mu: float = 1.0

    def loss(self, net, params, given, batch) -> Tensor:
        return self.mu * super().loss(net, params, given, batch)


@pytest.fixture
def small(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return {"dataset": data, "out": "run", **SMALL}


def test_variants_of_a_method_share_its_training_and_are_named_apart(small, tmp_path, monkeypatch):
    rounds = count_rounds(monkeypatch)
    results = fedthe.run(methods=["fedthe", ("fedthe", {"beta": 0.9, "alpha": 0.9})], **small)
    assert results.methods == ["fedthe", "fedthe(alpha=0.9,beta=0.9)"]
    assert rounds == [("TwoHeads",)]
    (training,) = results.trainings.values()
    assert training["methods"] == results.methods
    assert read_results(results.folder).table() == results.table()
    shown = gather([results.folder]).shown[0]
    assert list(shown.methods.values()) == ["FedTHE", "FedTHE (alpha=0.9, beta=0.9)"]
    assert not [note for note in shown.notes if "per-sample" in note]  # it finds their samples


def test_a_variant_with_the_default_values_has_the_same_answers_at_no_cost(small, monkeypatch):
    plain = fedthe.run(methods=["fedthe"], **small)
    rounds = count_rounds(monkeypatch)
    monkeypatch.setattr("fedthe.experiment.work.deploy_some", None)
    same = fedthe.run(methods=["fedthe(alpha=0.1)", "fedthe"], **small)
    assert rounds == []
    assert same.reused == 2
    assert same.table() == {"fedthe(alpha=0.1)": plain.table()["fedthe"], "fedthe": plain.table()["fedthe"]}
    assert {row.method for row in same.rows} == {"fedthe(alpha=0.1)", "fedthe"}


def test_hyperparameters_of_a_run_are_those_of_its_variants_unless_they_say_otherwise():
    config = make_config({"methods": ["fedthe", "fedthe(alpha=0.3)"], "hyper": {"fedthe": {"alpha": 0.2, "beta": 0.4}}})
    found = {name: parts.predictor for name, parts in find_parts(config).items()}
    assert {name: (each.alpha, each.beta) for name, each in found.items()} == {
        "fedthe": (0.2, 0.4),
        "fedthe(alpha=0.3)": (0.3, 0.4),
    }


def test_a_method_from_a_file_is_run_again_once_it_was_edited(small, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    first = fedthe.run(methods=["mine.py:Scaled", "fedavg"], **small)
    assert first.methods == ["Scaled", "fedavg"]
    assert first.config.methods == ("mine.py:Scaled", "fedavg")
    assert first.table()["Scaled"] == first.table()["fedavg"]  # mu is 1
    rounds = count_rounds(monkeypatch)
    (tmp_path / "mine.py").write_text(MINE + "# a comment\n")
    assert fedthe.run(methods=["mine.py:Scaled", "fedavg"], **small).reused == 2
    assert rounds == []
    (tmp_path / "mine.py").write_text(MINE.replace("return self.mu", "return 3 * self.mu"))
    assert fedthe.run(methods=["mine.py:Scaled", "fedavg"], **small).reused == 1
    assert len(rounds) == 1
    other = fedthe.run(methods=["mine.py:Scaled"], hyper={"Scaled": {"mu": 2.0}}, **small)
    assert len(rounds) == 2
    assert gather([other.folder]).shown[0].methods == {"Scaled": "Scaled"}
    fails(lambda: fedthe.run(methods=["mine.py:Scaled"], hyper={"Scaled": {"nu": 1.0}}, **small), "no hyperparameter")
    fails(lambda: fedthe.run(methods=["mine.py:Scald"], **small), "did you mean Scaled")
    fails(lambda: fedthe.run(methods=["mine.py:MISSING"], **small), "mine.py has no 'MISSING'")


def test_objects_run_beside_names_and_stay_out_of_the_registry(small):
    registry = dict(METHODS)
    METHODS["registered"] = Scaled(mu=2.0)
    try:
        given = [Scaled, "fedavg", Scaled(mu=0.5), ("mine", (Scaled(), FineTune())), "registered", (Scaled, FineTune)]
        results = fedthe.run(methods=given, **small)
    finally:
        del METHODS["registered"]
    assert results.methods == ["Scaled", "fedavg", "Scaled(mu=0.5)", "mine", "registered", "Scaled+FineTune"]
    assert results.table()["Scaled"] == results.table()["fedavg"]
    assert results.table()["mine"] == results.table()["Scaled+FineTune"]
    assert registry == METHODS
    assert not results.failures


@dataclass(frozen=True)
class Nested(Predictor):
    then: Memo | None = None


def test_objects_are_named_by_their_class_and_what_differs():
    def name(*given):
        methods, recipes = name_methods(given)
        parts = find_parts(make_config({"methods": methods}), recipes)
        return {id: parts[id] for id in make_config({"methods": methods}).specs}

    named = name(Scaled, Scaled(mu=2), (Scaled, {"mu": 3}), (FedAvg(balanced=True), FineTune), ("x", Memo(views=2)))
    assert named == {
        "Scaled": arrange(Scaled()),
        "Scaled(mu=2)": arrange(Scaled(mu=2.0)),
        "Scaled(mu=3)": arrange(Scaled(mu=3.0)),
        "FedAvg+FineTune": arrange((FedAvg(balanced=True), FineTune())),
        "x": arrange(Memo(views=2)),
    }
    assert name(Nested(Memo(views=3))) == {"Nested": arrange(Nested(Memo(views=3)))}  # its class alone is another
    assert name("fedthe", ("fedthe", {"search.lr": 0.5})).keys() == {"fedthe", "fedthe(search.lr=0.5)"}
    for wrong in (3, None, (), (3, 4), Personal.keep, CNN, {"fedthe": {}}, ("a", "b", "c"), (FedAvg, 3)):
        fails(lambda wrong=wrong: name_methods([wrong]), "not a method")
    fails(lambda: name_methods([("x", Memo(views=2)), ("x", Memo(views=3))]), "x names two methods")
    fails(lambda: name_methods([("fedavg", Memo())]), "fedavg names two methods")
    fails(lambda: name_methods([("fedthe", {"alpha": [1]})]), "alpha must be a number")


def test_a_federation_brings_its_settings_and_its_data(small, data):
    dataset = load_dataset(data)
    federation = build(dataset, Settings(clients=2, dirichlet=5.0, seed=3))
    settings = {key: small[key] for key in ("out", "rounds", "local_epochs", "samples", "tests")}
    results = fedthe.run(methods=["fedavg"], federation=federation, **settings)
    assert results.manifests == {3: federation.manifest_hash}
    assert (results.config.clients, results.config.seeds, results.config.dataset) == (2, (3,), dataset.pool.name)
    again = fedthe.run(methods=["fedavg"], dataset=data, clients=2, dirichlet=5.0, seeds=[3], **settings)
    assert (again.reused, again.table()) == (1, results.table())
    for more in ({"dataset": data}, {"sweep": {"size": [8, 16]}}):
        fails(lambda more=more: fedthe.run(methods=["fedavg"], federation=federation, **settings, **more), "no effect")
    more = fedthe.run(methods=["fedavg"], federation=federation, clients=3, seeds=[0, 1], **settings)
    assert len({row.client for row in more.rows}) == 3
    assert set(more.manifests) == {0, 1}


def test_a_network_is_a_name_an_object_or_in_a_file(small, tmp_path):
    named = fedthe.run(methods=["fedavg"], net="cnn", **small)
    given = fedthe.run(methods=["fedavg"], net=CNN(3, 3, 16), **small)
    assert (given.reused, given.table(), given.config.net) == (1, named.table(), "CNN")
    (tmp_path / "mine.py").write_text(
        "from fedthe.nets import CNN\ndef make_net(classes, shape):\n    return CNN(classes, *shape[:2])\n"
        "def broken(classes): ...\nnothing = 3\n"
    )
    assert fedthe.run(methods=["fedavg"], net="mine.py:make_net", **small).reused == 1
    fails(lambda: fedthe.run(methods=["fedavg"], net="mine.py:make_net", width=2, **small), "no effect")
    fails(lambda: fedthe.run(methods=["fedavg"], net="mine.py:broken", **small), "mine.py:broken", "cannot be made")
    fails(lambda: fedthe.run(methods=["fedavg"], net="mine.py:nothing", **small), "no network")


def test_every_round_is_heard_of_once(small):
    heard = []
    small |= {"rounds": 2, "seeds": [0, 1]}
    results = fedthe.run(methods=["fedavg", "memo_g", "fedthe"], on_round=heard.append, **small)
    expected = [
        (methods, seed, number)
        for methods in (("fedavg", "memo_g"), ("fedthe",))
        for seed in (0, 1)
        for number in (1, 2)
    ]
    assert sorted((each.methods, each.seed, each.round) for each in heard) == sorted(expected)
    assert all(each.rounds == 2 and each.loss > 0 and each.seconds > 0 for each in heard)
    assert isinstance(heard[0], fedthe.Round)
    heard.clear()
    assert fedthe.run(methods=["fedavg"], on_round=heard.append, **small).reused == 2
    assert heard == []
    assert results.failures == {}


def test_an_exception_of_the_callback_stops_the_run_and_loses_no_round(small, tmp_path, monkeypatch):
    class Enough(Exception):
        pass

    def stop(event):
        if event.round == 2:
            raise Enough("of it")

    small |= {"rounds": 3, "checkpoint_seconds": 1000.0}
    with pytest.raises(Stopped, match=r"on_round raised Enough: of it after fedavg, seed 0, round 2 of 3") as caught:
        fedthe.run(methods=["fedavg"], on_round=stop, **small)
    assert isinstance(caught.value.__cause__, Enough)
    assert not (tmp_path / "run" / "summary.json").exists()
    rounds = count_rounds(monkeypatch)
    stopped = fedthe.run(methods=["fedavg"], **small)
    assert len(rounds) == 1  # the first two were saved
    assert stopped.table() == fedthe.run(methods=["fedavg"], **small | {"out": "whole"}).table()


def test_a_name_that_would_be_read_otherwise_is_refused(small):
    for name in ("fedavg ", "fedavg(balanced=true)", "x.py:Foo"):
        fails(lambda name=name: fedthe.run(methods=[(name, FedAvg())], **small), "cannot be the name")
    fails(lambda: fedthe.run(methods=["fedthe(search.steps=2,steps=3)"], **small), "one hyperparameter")
    fails(lambda: fedthe.run("my.toml", methods=["fedavg"]), "config")
    fails(lambda: fedthe.run(methods=["fedavg"], on_round=3, **small), "on_round")
    fails(lambda: fedthe.run(methods=["fedavg"], federation=[], **small), "federation")


def test_a_run_that_adds_methods_or_seeds_moves_nothing(small):
    first = fedthe.run(methods=["fedavg"], **small)
    more = fedthe.run(methods=["fedavg", "fedavg_ft"], **small | {"seeds": [0, 1]})
    assert more.earlier is None
    assert more.reused == 1
    assert set(first.answers) < set(more.answers)
    less = fedthe.run(methods=["fedavg"], **small)
    assert less.earlier is not None
