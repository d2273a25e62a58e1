"""What the server believes: an upload that is not what was asked for ends the run, or leaves its client out."""

from dataclasses import dataclass, replace

import pytest
import torch

import fedthe
from fedthe import tree
from fedthe.engine.loop import Loop
from fedthe.engine.robust import Defense
from fedthe.engine.server import Diverged, Sent, Server, aggregate, find_infinite, sample_clients
from fedthe.engine.stack import Stack
from fedthe.engine.train import start, train_round, train_together
from fedthe.engine.visit import Row, Run, Training, Visit
from fedthe.errors import Failed
from fedthe.methods.base import FedAvg, Fitted, Method, Personal, Rounds
from fedthe.nets.cnn import CNN
from fedthe.types import Shard

NET = CNN(3, size=16)
SETTINGS = Training(rounds=2, local_epochs=1, batch=16, crop=2)
CLIENTS, BAD = 3, 1
ENGINES = [Loop(), Loop(threads=2), Stack(), Stack(rows=2), *([Stack("cuda")] if torch.cuda.is_available() else [])]


def make_shard(k):
    draw = torch.Generator().manual_seed(k)
    rows = 16 + 5 * k
    labels = torch.arange(rows) % 3
    images = torch.randint(0, 90, (rows, 16, 16, 3), generator=draw) + 70 * labels[:, None, None, None]
    real, counts = torch.ones(rows, dtype=torch.bool), torch.bincount(labels, minlength=3).float()
    # the bad client is known by its rows: a method is not told who it works for
    images[:, 0, 0, 0] = 255 if k == BAD else 0
    images = images.to(torch.uint8)
    return Shard(images, labels, real, counts, images[:4], labels[:4], real[:4])


RUN = Run(0, [make_shard(k) for k in range(CLIENTS)])


def is_bad(shard):
    return shard.x[0, 0, 0, 0] == 255


def change(upload, name, leaf):
    flat = tree.flatten(upload)
    if leaf is None:
        del flat[name]
    else:
        flat[name] = leaf
    return tree.unflatten(flat)


STRUCTURES = {
    "part of the keys": (lambda upload: change(upload, "body.conv2", None), "body.conv2 is missing"),
    "one key more": (lambda upload: change(upload, "more", torch.zeros(2)), "more is not expected"),
    "a shape that broadcasts": (
        lambda upload: change(upload, "body.conv2", upload["body"]["conv2"][:1]),
        r"body.conv2 has shape \[1, .*\], not \[64, ",
    ),
    "whole numbers": (
        lambda upload: change(upload, "head.out", upload["head"]["out"].long()),
        "head.out is int64, not float32",
    ),
    "halves": (lambda upload: change(upload, "head.out", upload["head"]["out"].half()), "head.out is float16"),
}
VALUES = {"nan": float("nan"), "inf": float("inf"), "1e30": 1e30}


@dataclass(frozen=True)
class Misshapes(Rounds):
    """Client BAD, or everyone, uploads something else."""

    case: str = "halves"
    everyone: bool = False

    def local(self, fit, shared, mine, shard):
        fitted = super().local(fit, shared, mine, shard)
        bad = self.everyone or is_bad(shard)
        return fitted._replace(params=STRUCTURES[self.case][0](fitted.params)) if bad else fitted


@dataclass(frozen=True)
class Spoils(Rounds):
    """Client BAD uploads values that nobody can compute with."""

    value: float = 1e30

    def local(self, fit, shared, mine, shard):
        fitted = super().local(fit, shared, mine, shard)
        leaf = fitted.params["body"]["conv2"]
        spoiled = torch.where(is_bad(shard), leaf * 0 + self.value, leaf)
        return fitted._replace(params=change(fitted.params, "body.conv2", spoiled))


def make_visit(method, engine, settings=SETTINGS):
    return Visit((method,), settings, [RUN], [[start(method, CLIENTS, 0, engine.device)]])


def train_one_round(method, engine, settings=SETTINGS):
    (result,) = train_round(make_visit(method, engine, settings), engine)
    return result if isinstance(result, Failed) else result[0]


def train_all(method, engine, settings=SETTINGS):
    begun = start(method, CLIENTS, 0, engine.device)
    ((result,),) = train_together([method], [RUN], settings, [[begun]], engine)
    return result


@pytest.mark.parametrize("case", STRUCTURES)
def test_the_loop_names_the_client_and_leaf_of_a_misshapen_upload(case):
    method = Method(NET, Misshapes(case))
    for threads in (1, 2):
        result = train_one_round(method, Loop(threads=threads))
        assert isinstance(result, Diverged)
        assert (result.client, result.round) == (BAD, 0)
        with pytest.raises(Failed, match=f"client {BAD} in round 1: the upload's {STRUCTURES[case][1]}"):
            raise result


@pytest.mark.parametrize("case", STRUCTURES)
def test_the_stack_refuses_the_same(case):
    method = Method(NET, Misshapes(case, everyone=True))
    for rows in (1024, 2):
        result = train_one_round(method, Stack(rows=rows))
        with pytest.raises(Diverged, match=f"client 0 in round 1: the upload's {STRUCTURES[case][1]}"):
            raise result


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("value", VALUES)
def test_values_that_are_not_finite_or_too_large_are_their_clients(value, engine):
    result = train_all(Method(NET, Spoils(VALUES[value])), engine)
    says = "values up to 1e.30" if value == "1e30" else "is not finite"
    with pytest.raises(Diverged, match=f"client {BAD} in round 1: the upload's body.conv2 (has )?{says}"):
        raise result


@dataclass(frozen=True)
class KeepsMean(Personal):
    """Keeps the mean of its pixels; the server averages it."""

    averages = {"mean": "own_mean"}  # noqa: RUF012

    def keep(self, net, params):
        return {"own_mean": torch.zeros(())}

    def personalize(self, fit, shared, mine, shard):
        return Fitted({"own_mean": (shard.x.float().mean((1, 2, 3)) * shard.real).sum() / shard.real.sum() / 255})


@pytest.mark.parametrize("engine", ENGINES)
def test_skip_leaves_the_client_out_and_says_so(engine):
    settings, method = replace(SETTINGS, tolerate="skip"), Method(NET, Spoils(), KeepsMean())
    result = train_all(method, engine, settings)
    assert result.round == 2
    assert len(result.server.skipped) == 2
    assert "client 1 in round 2: the upload's body.conv2" in result.server.skipped[1]
    assert "left out" in result.server.skipped[1]
    # the round of the others alone, weighted by their rows
    others = [k for k in range(CLIENTS) if k != BAD]
    visited = Loop().visit(make_visit(replace(method, rounds=FedAvg()), Loop(), settings), [Row(0, k) for k in others])
    sizes = torch.tensor([float(RUN.sizes[k]) for k in others])
    assert sizes[0] != sizes[1]
    after = train_one_round(method, engine, settings)
    near = 1e-3 if engine.device.type == "cuda" else 1e-6
    for found, expected in (
        (after.server.shared, tree.weighted_mean(visited.uploads, sizes)),
        (after.averages, tree.weighted_mean(visited.averages[0], sizes)),
    ):
        for name, leaf in tree.flatten(expected).items():
            assert torch.allclose(tree.flatten(found)[name].cpu(), leaf.cpu(), atol=near), name
    assert after.server.losses == (pytest.approx(float(visited.losses.mean()), abs=100 * near),)
    assert after.clients.rounds.tolist() == [-1 if k == BAD else 0 for k in range(CLIENTS)]
    assert all(torch.isfinite(leaf).all() for leaf in tree.flatten(result.server.shared).values())


def test_a_round_with_no_client_left_ends_the_run():
    method, settings = Method(NET, Misshapes(everyone=True)), replace(SETTINGS, tolerate="skip")
    for engine in (Loop(), Stack()):
        assert isinstance(train_one_round(method, engine, settings), Diverged)


@dataclass(frozen=True)
class Forgets(Rounds):
    """A server's rule that gives back less than it got."""

    def aggregate(self, shared, uploads, weights):
        return {"body": super().aggregate(shared, uploads, weights)["body"]}


@pytest.mark.parametrize("engine", [Loop(), Stack()])
def test_a_rule_of_the_server_that_loses_leaves_is_refused(engine):
    result = train_one_round(Method(NET, Forgets()), engine)
    with pytest.raises(Diverged, match=r"the aggregate in round 1: head.out is missing"):
        raise result


@dataclass(frozen=True)
class KeepsLess(Personal):
    """Client BAD keeps a part of what the others keep, or something else."""

    case: str = "less"

    def keep(self, net, params):
        return {"own": {"body": params["body"], "head": params["head"]}}

    def personalize(self, fit, shared, mine, shard):
        own = tree.map_leaves(lambda leaf: leaf + 1, {"body": shared["body"], "head": shared["head"]})
        odd = {
            "less": {"body": own["body"]},
            "more": own | {"more": torch.zeros(())},
            "shape": own | {"head": {"out": own["head"]["out"][:1]}},
            "dtype": own | {"head": {"out": own["head"]["out"].double()}},
        }
        return Fitted({"own": odd[self.case] if is_bad(shard) else own})


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("less", r"own\.head\.out is missing"),
        ("more", r"own\.more is not expected"),
        ("shape", r"own\.head\.out has shape \[1, .*\], not \[3, "),
        ("dtype", r"own\.head\.out is float64, not float32"),
    ],
)
def test_a_state_with_other_leaves_is_refused_and_not_filled_with_what_was_in_memory(case, says):
    result = train_one_round(Method(NET, personal=KeepsLess(case)), Loop())
    with pytest.raises(Diverged, match=f"client 1 in round 1: its state's personal.{says}"):
        raise result


@dataclass(frozen=True)
class KeepsOdd(Personal):
    """Everyone keeps something else than was said."""

    def keep(self, net, params):
        return {"own": torch.zeros(2)}

    def personalize(self, fit, shared, mine, shard):
        return Fitted({"own": torch.zeros(3) + shard.counts.sum()})


def test_the_stack_refuses_other_states_too():
    result = train_one_round(Method(NET, personal=KeepsOdd()), Stack())
    with pytest.raises(Diverged, match=r"client 0 in round 1: its state's personal.own has shape \[3\], not \[2\]"):
        raise result


def test_the_server_samples_clients_in_order():
    assert sample_clients(20, 1.0, 0, 3) == list(range(20))
    assert sample_clients(20, 0.001, 0, 3) != sample_clients(20, 0.001, 0, 4)
    for number in range(20):
        drawn = sample_clients(20, 0.4, 0, number)
        assert drawn == sorted(set(drawn))
        assert len(drawn) == 8
        assert drawn == sample_clients(20, 0.4, 0, number)


def test_faults_are_found_in_the_rows_that_have_them():
    good = torch.ones(4, 3)
    bad = good.clone()
    bad[1, 2], bad[3, 0] = float("nan"), 1e20
    found = find_infinite([("a", good), ("b", bad), ("c", bad), ("d", torch.arange(4)), ("e", good[:, :0])], 4)
    assert found == [None, "b is not finite", None, "b has values up to 1e+20, more than can be computed with"]
    assert find_infinite([], 2) == [None, None]
    assert find_infinite([("a", good.to(torch.bfloat16) * float("inf"))], 4) == ["a is not finite"] * 4


def test_a_fault_of_structure_names_the_leaf():
    expected = {"a": torch.zeros(2), "b": torch.zeros(())}
    assert tree.find_fault(expected, {"b": torch.ones(()), "a": torch.ones(2)}) is None
    assert tree.find_fault(expected, {"b": torch.ones(5), "a": torch.ones(5, 2)}, batched=True) is None
    assert tree.find_fault(expected, {"a": torch.ones(2)}) == "b is missing"
    assert tree.find_fault(expected, expected | {"a": 3.0}) == "a is a float, not a tensor"


def test_a_bad_upload_ends_its_method_and_skip_is_noted_in_the_results(data, tmp_path, monkeypatch):
    @dataclass(frozen=True)
    class Bad(Rounds):
        def local(self, fit, shared, mine, shard):
            fitted = super().local(fit, shared, mine, shard)
            return Fitted({"body": fitted.params["body"]}) if shard.labels[0] == 1 else fitted

    monkeypatch.setitem(fedthe.METHODS, "bad", Bad)
    settings = {"dataset": data, "clients": 6, "dirichlet": 0.5, "rounds": 1, "local_epochs": 1, "samples": 2}
    settings["engine"] = "loop"  # a stack refuses Bad for its branch
    results = fedthe.run(methods=["bad", "fedavg"], out=str(tmp_path / "stop"), **settings)
    assert results.methods == ["fedavg"]
    assert "head.out is missing" in results.failures["bad, seed 0"]
    results = fedthe.run(methods=["bad", "fedavg"], out=str(tmp_path / "skip"), tolerate="skip", **settings)
    assert results.methods == ["bad", "fedavg"]
    assert any("bad, seed 0" in note and "left out" in note for note in results.notes)
    again = fedthe.run(methods=["bad", "fedavg"], out=str(tmp_path / "skip"), tolerate="skip", **settings)
    assert again.notes == results.notes


@dataclass(frozen=True)
class InPlace(Rounds):
    """Half of the old model and half of the mean, in the tensors that it got."""

    def aggregate(self, shared, uploads, weights):
        mean = tree.weighted_mean(uploads, weights)
        return tree.map_leaves(lambda old, new: old.mul_(0.5).add_(0.5 * new), shared, mean)


def test_a_rule_that_works_in_place_leaves_the_round_before_as_it_was():
    server = Server(0, {"w": torch.ones(2)})
    sent = Sent({"w": torch.full((3, 2), 5.0)}, [])
    after, _ = aggregate(InPlace(), Defense(), server, [], sent, torch.ones(3))
    assert after["w"].tolist() == [3, 3]
    assert server.shared["w"].tolist() == [1, 1]
