"""What the server believes: an upload that is not what was asked for ends the run, or leaves its client out."""

from dataclasses import dataclass, replace

import pytest
import torch

import fedthe
from fedthe import tree
from fedthe.engine.loop import Loop, visit_one
from fedthe.engine.server import Diverged
from fedthe.engine.stack import Stack
from fedthe.engine.train import start, train_round, train_together
from fedthe.engine.visit import Row, Run, Training, Visit
from fedthe.errors import Failed
from fedthe.methods.base import Method
from fedthe.nets.cnn import CNN
from fedthe.types import Shard

NET = CNN(3, size=16)
SETTINGS = Training(rounds=2, local_epochs=1, batch=16, crop=2)
CLIENTS, BAD = 3, 1
ENGINES = [Loop(), Loop(threads=2), Stack(), Stack(rows=2), *([Stack("cuda")] if torch.cuda.is_available() else [])]


def make_shard(k):
    draw = torch.Generator().manual_seed(k)
    labels = torch.arange(16) % 3
    images = torch.randint(0, 90, (16, 16, 16, 3), generator=draw) + 70 * labels[:, None, None, None]
    real, counts = torch.ones(16, dtype=torch.bool), torch.bincount(labels, minlength=3).float()
    # the bad client is known by its rows: a method is not told who it works for
    images[:, 0, 0, 0] = 255 if k == BAD else 0
    images = images.to(torch.uint8)
    return Shard(images, labels, real, counts, images[:4], labels[:4], real[:4])


RUN = Run(0, [make_shard(k) for k in range(CLIENTS)])


def is_bad(shard):
    return shard.images[0, 0, 0, 0] == 255


def change(upload, name, leaf):
    flat = tree.flatten(upload)
    if leaf is None:
        del flat[name]
    else:
        flat[name] = leaf
    return tree.unflatten(flat)


STRUCTURES = {
    "part of the keys": (lambda upload: change(upload, "body.conv2", None), "body.conv2 is missing"),
    "one key more": (lambda upload: change(upload, "more", torch.zeros(2)), "more is not a leaf of the shared model"),
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
class Misshapes(Method):
    """Client BAD, or everyone, uploads something else."""

    case: str = "halves"
    everyone: bool = False

    def local(self, fit, shared, mine, shard):
        upload = super().local(fit, shared, mine, shard)
        return STRUCTURES[self.case][0](upload) if self.everyone or is_bad(shard) else upload


@dataclass(frozen=True)
class Spoils(Method):
    """Client BAD uploads values that nobody can compute with."""

    value: float = 1e30

    def local(self, fit, shared, mine, shard):
        upload = super().local(fit, shared, mine, shard)
        leaf = upload["body"]["conv2"]
        return change(upload, "body.conv2", torch.where(is_bad(shard), leaf * 0 + self.value, leaf))


def begin(method, engine):
    return start(method, CLIENTS, 0, engine.device)


@pytest.mark.parametrize("case", STRUCTURES)
def test_the_loop_names_the_client_and_leaf_of_a_misshapen_upload(case):
    method = Misshapes(NET, case=case)
    for threads in (1, 2):
        engine = Loop(threads=threads)
        (result,) = train_round(method, [RUN], SETTINGS, [begin(method, engine)], engine)
        assert isinstance(result, Diverged)
        assert (result.client, result.round) == (BAD, 0)
        with pytest.raises(Failed, match=f"client {BAD} in round 1: the upload's {STRUCTURES[case][1]}"):
            raise result


@pytest.mark.parametrize("case", STRUCTURES)
def test_the_stack_refuses_the_same(case):
    method = Misshapes(NET, case=case, everyone=True)
    for rows in (1024, 2):
        engine = Stack(rows=rows)
        (result,) = train_round(method, [RUN], SETTINGS, [begin(method, engine)], engine)
        with pytest.raises(Diverged, match=f"client 0 in round 1: the upload's {STRUCTURES[case][1]}"):
            raise result


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("value", VALUES)
def test_values_that_are_not_finite_or_too_large_are_their_clients(value, engine):
    method = Spoils(NET, value=VALUES[value])
    (result,) = train_together(method, [RUN], SETTINGS, [begin(method, engine)], engine)
    says = "values up to 1e.30" if value == "1e30" else "is not finite"
    with pytest.raises(Diverged, match=f"client {BAD} in round 1: the upload's body.conv2 (has )?{says}"):
        raise result


@pytest.mark.parametrize("engine", ENGINES)
def test_skip_leaves_the_client_out_and_says_so(engine):
    settings, method = replace(SETTINGS, tolerate="skip"), Spoils(NET)
    (result,) = train_together(method, [RUN], settings, [begin(method, engine)], engine)
    assert result.round == 2
    assert len(result.skipped) == 2
    assert "client 1 in round 2: the upload's body.conv2" in result.skipped[1]
    # the round of the others alone, weighted by their rows
    visit = Visit(Method(NET), settings, [RUN], [begin(Method(NET), Loop())])
    uploads = [tree.unflatten(visit_one(visit, Row(0, k)).upload) for k in range(CLIENTS) if k != BAD]
    (after,) = train_round(method, [RUN], settings, [begin(method, engine)], engine)
    for name, leaf in tree.flatten(tree.weighted_mean(uploads, [16, 16])).items():
        near = 1e-3 if engine.device.type == "cuda" else 1e-6
        assert torch.allclose(tree.flatten(after.shared)[name].cpu(), leaf.cpu(), atol=near), name
    assert all(torch.isfinite(leaf).all() for leaf in tree.flatten(result.shared).values())


def test_a_round_with_no_client_left_ends_the_run():
    method = Misshapes(NET, everyone=True)
    (result,) = train_round(method, [RUN], replace(SETTINGS, tolerate="skip"), [begin(method, Loop())], Loop())
    assert isinstance(result, Diverged)


@dataclass(frozen=True)
class Forgets(Method):
    """A server's rule that gives back less than it got."""

    def aggregate(self, shared, uploads, weights):
        return {"body": super().aggregate(shared, uploads, weights)["body"]}


@pytest.mark.parametrize("engine", [Loop(), Stack()])
def test_a_rule_of_the_server_that_loses_leaves_is_refused(engine):
    method = Forgets(NET)
    (result,) = train_round(method, [RUN], SETTINGS, [begin(method, engine)], engine)
    with pytest.raises(Diverged, match=r"the aggregate in round 1: head.out is missing"):
        raise result


@dataclass(frozen=True)
class KeepsLess(Method):
    """Client BAD keeps a part of what the others keep."""

    def personalize(self, fit, shared, mine, shard):
        own = {"body": shared["body"], "head": tree.map_leaves(lambda leaf: leaf + 1, shared["head"])}
        return {"body": own["body"]} if is_bad(shard) else own


def test_a_state_that_lacks_leaves_is_refused_and_not_filled_with_what_was_in_memory():
    (result,) = train_round(KeepsLess(NET), [RUN], SETTINGS, [begin(KeepsLess(NET), Loop())], Loop())
    with pytest.raises(Diverged, match=r"client 1 in round 1: its state lacks head\.out"):
        raise result


def test_a_bad_upload_ends_its_method_and_skip_is_noted_in_the_results(data, tmp_path, monkeypatch):
    @dataclass(frozen=True)
    class Bad(Method):
        def local(self, fit, shared, mine, shard):
            upload = super().local(fit, shared, mine, shard)
            return {"body": upload["body"]} if shard.labels[0] == 1 else upload

    monkeypatch.setitem(fedthe.METHODS, "bad", Bad)
    settings = {"dataset": data, "clients": 6, "dirichlet": 0.5, "rounds": 1, "local_epochs": 1, "samples": 2}
    results = fedthe.run(methods=["bad", "fedavg"], out=str(tmp_path / "stop"), **settings)
    assert results.methods == ["fedavg"]
    assert "head.out is missing" in results.failures["bad, seed 0"]
    results = fedthe.run(methods=["bad", "fedavg"], out=str(tmp_path / "skip"), tolerate="skip", **settings)
    assert results.methods == ["bad", "fedavg"]
    assert any("bad, seed 0" in note and "left out" in note for note in results.notes)
    again = fedthe.run(methods=["bad", "fedavg"], out=str(tmp_path / "skip"), tolerate="skip", **settings)
    assert again.notes == results.notes
