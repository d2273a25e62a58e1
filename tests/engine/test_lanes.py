"""Methods with the same core are trained side by side: each gets the bits it gets alone, whatever the others do."""

from dataclasses import dataclass, replace

import pytest
import torch

from fedthe import tree
from fedthe.engine.loop import Loop
from fedthe.engine.server import Diverged
from fedthe.engine.shards import Shards
from fedthe.engine.stack import Stack
from fedthe.engine.train import group_equal, start, train_together
from fedthe.engine.visit import Progress, Run
from fedthe.errors import Broken, Failed, InputError
from fedthe.methods import compose
from fedthe.methods.apfl import APFL
from fedthe.methods.base import FedAvg, Fitted, Personal, Rounds
from fedthe.methods.fedrod import FedRoD
from fedthe.methods.two_heads import TwoHeads
from helpers import count_rounds
from trained_methods import NET, SETTINGS, Drifting, make_data, make_federation

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BALANCED = FedAvg(balanced=True)
CLIENTS, BAD = 3, 1


SAME_CORE = {
    "balanced": (BALANCED, (BALANCED, TwoHeads()), (BALANCED, FedRoD()), (BALANCED, TwoHeads(balanced_personal=True))),
    "plain": (APFL(), (FedAvg(), TwoHeads()), FedAvg()),
    "kept by the rounds": ((Drifting(), APFL()), Drifting(), (Drifting(), TwoHeads())),
}
ENGINES = {
    "loop": Loop(),
    "threads": Loop(threads=2),
    "stack": Stack(),
    "chunks": Stack(rows=2),
}


def make_methods(*recipes):
    methods = [compose(NET, recipe).training for recipe in recipes]
    assert len({method.core for method in methods}) == 1
    return methods


def train_beside(methods, engine, settings=SETTINGS, seeds=(0,), shards=None, after_round=None):
    """[run][method]"""
    shards = shards or make_data()[0]
    runs = [Run(seed, shards) for seed in seeds]
    begun = [[start(method, len(shards), seed, engine.device) for method in methods] for seed in seeds]
    return train_together(methods, runs, settings, begun, engine, after_round or (lambda *args: None))


def train_alone(method, engine, settings=SETTINGS, seed=0, shards=None):
    ((outcome,),) = train_beside([method], engine, settings, (seed,), shards)
    return outcome


def assert_same(one: Progress, other: Progress):
    a, b = one.server, other.server
    assert (a.round, a.losses, a.skipped) == (b.round, b.losses, b.skipped)
    assert len(one.clients) == len(other.clients)
    assert one.clients.rounds.tolist() == other.clients.rounds.tolist()
    for x, y in [(a.shared, b.shared), (one.averages, other.averages), *zip(one.clients, other.clients, strict=True)]:
        x, y = tree.flatten(x), tree.flatten(y)
        assert list(x) == list(y)
        assert all(torch.equal(leaf, y[name]) for name, leaf in x.items())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("recipes", SAME_CORE)
def test_each_gets_the_bits_it_gets_alone(recipes, participation, engine, monkeypatch):
    engine, settings = ENGINES[engine], replace(SETTINGS, rounds=3, participation=participation)
    methods, lanes = make_methods(*SAME_CORE[recipes]), count_rounds(monkeypatch)
    beside = train_beside(methods, engine, settings, seeds=(0, 1))
    assert lanes == [tuple(type(method.personal).__name__ for method in methods)] * 3  # one lane, of both runs
    for seed, outcomes in enumerate(beside):
        for method, outcome in zip(methods, outcomes, strict=True):
            assert_same(outcome, train_alone(method, engine, settings, seed))


@ON_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_too(dtype):
    engine, shards = Stack("cuda", dtype), Shards(make_federation(), "cuda")
    methods = make_methods(*SAME_CORE["balanced"])
    for seed, outcomes in enumerate(train_beside(methods, engine, seeds=(0, 1), shards=shards)):
        for method, outcome in zip(methods, outcomes, strict=True):
            assert_same(outcome, train_alone(method, engine, seed=seed, shards=shards))


@pytest.mark.parametrize("engine", ["loop", "stack"])
def test_runs_and_methods_in_different_rounds(engine, monkeypatch):
    """As after a kill between checkpoints, or where a method was added later."""
    engine, settings = ENGINES[engine], replace(SETTINGS, rounds=3)
    methods, shards = make_methods((BALANCED, TwoHeads()), (BALANCED, FedRoD())), make_data()[0]
    runs = [Run(seed, shards) for seed in range(4)]
    begun = [[start(method, CLIENTS, seed) for method in methods] for seed in range(4)]
    ahead = train_together(methods, runs, replace(SETTINGS, rounds=2), begun, engine)
    further = train_together(methods, runs, replace(SETTINGS, rounds=1), begun, engine)
    # both at the start; both ahead; one ahead; both in the middle, each with a server of its own
    apart = [train_alone(method, engine, replace(SETTINGS, rounds=1), 3) for method in methods]
    reached = [begun[0], ahead[1], [further[2][0], begun[2][1]], apart]
    assert apart[0].server is not apart[1].server
    lanes, told = count_rounds(monkeypatch), []

    def after_round(run, some, progress):
        assert [each.round for each in progress] == [progress[0].round] * len(some)
        told.append((run, tuple(some), progress[0].round))

    outcomes = train_together(methods, runs, settings, reached, engine, after_round)
    assert sorted(told) == [
        *((0, (0, 1), number) for number in (1, 2, 3)),
        (1, (0, 1), 3),
        *((2, (0,), number) for number in (2, 3)),
        *((2, (1,), number) for number in (1, 2, 3)),
        *((3, (0, 1), number) for number in (2, 3)),
    ]
    assert len(lanes) == 8  # three of both methods, two of the first alone, three of the second
    for seed in range(4):
        for method, outcome in zip(methods, outcomes[seed], strict=True):
            assert_same(outcome, train_alone(method, engine, settings, seed))


def test_what_has_all_its_rounds_stays_as_it_is(monkeypatch):
    methods = make_methods((BALANCED, TwoHeads()), (BALANCED, FedRoD()))
    (done,) = train_beside(methods, Loop())
    lanes = count_rounds(monkeypatch)
    (again,) = train_together(methods, [Run(0, make_data()[0])], SETTINGS, [done], Loop())
    assert lanes == []
    assert all(one is other for one, other in zip(done, again, strict=True))
    assert train_together(methods, [], SETTINGS, [], Loop()) == []


def test_servers_are_grouped_by_what_they_hold():
    a, b = (start(compose(NET, FedAvg()), CLIENTS, seed).server for seed in (0, 1))
    same = replace(a, shared=tree.map_leaves(torch.clone, a.shared))
    fewer = replace(a, shared={"body": a.shared["body"]})
    others = [replace(a, round=1), replace(a, losses=(1.0,)), replace(a, skipped=("one",)), b, fewer]
    assert group_equal([a, *others, same]) == [(0, 6), (1,), (2,), (3,), (4,), (5,)]
    assert group_equal([]) == []


# failures

SWITCH = {"raises": False}


@dataclass(frozen=True)
class Raises(FedRoD):
    """From the moment on that a switch is set."""

    def personalize(self, fit, shared, mine, shard):
        if SWITCH["raises"]:
            raise InputError("mine is wrong.")
        return super().personalize(fit, shared, mine, shard)


@dataclass(frozen=True)
class Explodes(FedRoD):
    """Its personal head is not finite from the second round on; on one client, or on all."""

    everyone: bool = True

    def personalize(self, fit, shared, mine, shard):
        made = super().personalize(fit, shared, mine, shard)
        changed = (shared["body"]["conv1"] - start_of_all(fit.net, shard)).abs().sum() > 0
        bad = changed if self.everyone else changed & is_bad(shard)
        params = tree.map_leaves(lambda leaf: torch.where(bad, leaf + float("inf"), leaf), made.params)
        return made._replace(params=params)


@dataclass(frozen=True)
class Diverges(FedRoD):
    """Its loss is not finite from the second round on, though what it keeps is."""

    def personalize(self, fit, shared, mine, shard):
        made = super().personalize(fit, shared, mine, shard)
        changed = (shared["body"]["conv1"] - start_of_all(fit.net, shard)).abs().sum() > 0
        return made._replace(losses=torch.where(changed, made.losses * float("nan"), made.losses))


def start_of_all(net, shard):
    return net.init(0)["body"]["conv1"].to(shard.counts.device)


def is_bad(shard):
    """Whose shard it is can be told by its counts."""
    counts = [each.counts for each in make_data()[0]]
    assert sum(torch.equal(counts[BAD], other) for other in counts) == 1
    return (shard.counts == counts[BAD].to(shard.counts.device)).all()


FAILURES = {
    Raises(): (Broken, "Raises.personalize: mine is wrong."),
    Explodes(): (Diverged, "client 0 in round 2: the state's personal.personal.out is not finite"),
    Diverges(): (Diverged, "client 0 in round 2: the loss is nan"),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("culprit", FAILURES, ids=lambda part: type(part).__name__)
def test_a_method_that_fails_in_round_two_fails_alone(culprit, engine, monkeypatch):
    engine, settings = ENGINES[engine], replace(SETTINGS, rounds=3)
    methods = make_methods((BALANCED, TwoHeads()), (BALANCED, culprit), (BALANCED, FedRoD()))
    monkeypatch.setitem(SWITCH, "raises", False)
    lanes, told = count_rounds(monkeypatch), []

    def after_round(run, some, progress):
        told.append((run, tuple(some), progress[0].round))
        SWITCH["raises"] = True

    (outcomes,) = train_beside(methods, engine, settings, after_round=after_round)
    kind, says = FAILURES[culprit]
    assert isinstance(outcomes[1], kind)
    assert str(outcomes[1]) == says
    for m in (0, 2):
        assert_same(outcomes[m], train_alone(methods[m], engine, settings))
    assert told[0] == (0, (0, 1, 2), 1)
    assert sorted(told[1:]) == [(0, (m,), number) for m in (0, 2) for number in (2, 3)]
    together, alone = ("TwoHeads", type(culprit).__name__, "FedRoD"), [("TwoHeads",), ("FedRoD",)]
    assert lanes[:2] == [together] * 2
    assert sorted(lanes[2:7]) == sorted([(type(culprit).__name__,), *alone * 2])


@pytest.mark.parametrize("engine", ["loop", "stack"])
def test_a_method_that_fails_in_one_run_goes_on_in_the_others(engine):
    """Seed 0 is the one that its parameters are compared with: with another seed it fails in the first round."""
    engine = ENGINES[engine]
    methods = make_methods((BALANCED, TwoHeads()), (BALANCED, Explodes()))
    settings = replace(SETTINGS, rounds=1)
    outcomes = train_beside(methods, engine, settings, seeds=(1, 0, 2))
    for seed, (good, bad) in zip((1, 0, 2), outcomes, strict=True):
        assert_same(good, train_alone(methods[0], engine, settings, seed))
        if seed == 0:
            assert_same(bad, train_alone(methods[1], engine, settings, seed))
        else:
            assert str(bad) == "client 0 in round 1: the state's personal.personal.out is not finite"


@dataclass(frozen=True)
class Picky(FedRoD):
    """Raises on a client with so many rows."""

    rows: int = 0

    def personalize(self, fit, shared, mine, shard):
        if len(shard.labels) == self.rows:
            raise InputError("not this client.")
        return super().personalize(fit, shared, mine, shard)


def test_a_run_whose_data_make_a_method_raise_does_not_take_other_runs_with_it():
    shards = list(make_data()[0])
    other = [shard._replace(**{name: getattr(shard, name)[1:] for name in ("x", "labels", "real")}) for shard in shards]
    rows = {len(shard.labels) for shard in other} - {len(shard.labels) for shard in shards}
    methods = make_methods((BALANCED, TwoHeads()), (BALANCED, Picky(max(rows))))
    runs = [Run(0, shards), Run(0, other)]
    begun = [[start(method, CLIENTS, 0) for method in methods] for _ in runs]
    for engine in (Loop(), Loop(threads=2)):
        outcomes = train_together(methods, runs, SETTINGS, begun, engine)
        assert str(outcomes[1][1]) == "Picky.personalize: not this client."
        for m, run in ((0, 0), (1, 0), (0, 1)):
            assert_same(outcomes[run][m], train_alone(methods[m], engine, shards=runs[run].shards))


@pytest.mark.parametrize("engine", ENGINES)
def test_only_the_method_whose_state_is_bad_leaves_the_client_out(engine):
    engine, settings = ENGINES[engine], replace(SETTINGS, rounds=3, tolerate="skip")
    methods = make_methods((BALANCED, Explodes(everyone=False)), (BALANCED, TwoHeads()), BALANCED)
    (outcomes,) = train_beside(methods, engine, settings)
    for method, outcome in zip(methods, outcomes, strict=True):
        assert_same(outcome, train_alone(method, engine, settings))
    said = "the state's personal.personal.out is not finite; left out"
    assert outcomes[0].server.skipped == tuple(f"client {BAD} in round {number}: {said}" for number in (2, 3))
    assert outcomes[0].clients.rounds.tolist() == [2, 0, 2]
    assert outcomes[1].server.skipped == outcomes[2].server.skipped == ()
    assert not torch.equal(outcomes[0].server.shared["head"]["out"], outcomes[1].server.shared["head"]["out"])


@dataclass(frozen=True)
class SpoilsUploads(Rounds):
    """Client BAD uploads values that nobody can compute with."""

    def local(self, fit, shared, mine, shard):
        fitted = super().local(fit, shared, mine, shard)
        spoil = torch.where(is_bad(shard), 1e30, 1.0)
        return fitted._replace(params=tree.map_leaves(lambda leaf: leaf * spoil, fitted.params))


@pytest.mark.parametrize("engine", ["loop", "stack"])
@pytest.mark.parametrize("tolerate", ["skip", "stop"])
def test_a_client_whose_upload_is_bad_is_left_out_of_all_methods(tolerate, engine):
    engine, settings = ENGINES[engine], replace(SETTINGS, tolerate=tolerate)
    methods = make_methods(SpoilsUploads(), (SpoilsUploads(), TwoHeads()))
    (outcomes,) = train_beside(methods, engine, settings)
    for method, outcome in zip(methods, outcomes, strict=True):
        alone = train_alone(method, engine, settings)
        if tolerate == "skip":
            assert_same(outcome, alone)
            assert [each.split(":")[0] for each in outcome.server.skipped] == [
                f"client {BAD} in round {n}" for n in (1, 2)
            ]
        else:
            assert str(outcome) == str(alone)
            assert "client 1 in round 1: the upload's" in str(outcome)


@dataclass(frozen=True)
class Forgets(Rounds):
    def aggregate(self, shared, uploads, weights):
        return {"body": super().aggregate(shared, uploads, weights)["body"]}


def test_a_rule_of_the_server_that_fails_fails_all():
    methods = make_methods(Forgets(), (Forgets(), TwoHeads()))
    (outcomes,) = train_beside(methods, Loop())
    for each in outcomes:
        assert str(each).startswith("the aggregate in round 1: head.out is missing; Forgets.aggregate must return")


@dataclass(frozen=True)
class Writes(Personal):
    """Changes what it was given, in place."""

    averages = {"mean": "own"}  # noqa: RUF012
    what: str = "shared"

    def keep(self, net, params):
        return {"own": torch.zeros(3)}

    def personalize(self, fit, shared, mine, shard):
        if self.what == "shared":
            shared["head"]["out"].mul_(2)
        elif self.what == "averages":
            shared["mean"].add_(2)
        elif self.what == "mine":
            mine["own"].add_(1)
        elif self.what == "raises":
            shared["head"]["out"].mul_(2)
            raise InputError("after all.")
        return Fitted({"own": mine["own"] + 1})


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("what", ["shared", "averages", "raises"])
def test_a_method_that_writes_into_what_all_receive_is_refused_and_spoils_nothing(what, threads):
    methods, engine = make_methods(FedAvg(), (FedAvg(), Writes(what)), APFL()), Loop(threads=threads)
    (outcomes,) = train_beside(methods, engine)
    assert isinstance(outcomes[1], Failed)
    named = {"shared": "changes head.out", "averages": "changes mean", "raises": "after all."}[what]
    assert named in str(outcomes[1])
    for m in (0, 2):
        assert_same(outcomes[m], train_alone(methods[m], Loop()))


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_client_keeps_is_its_own_to_write_into(engine):
    """No other client sees it, nor does the state that a checkpoint may still need."""
    engine = ENGINES[engine]
    (method,) = make_methods((FedAvg(), Writes("mine")))
    shards = make_data()[0]
    begun = start(method, CLIENTS, 0)
    ((first,),) = train_together([method], [Run(0, shards)], replace(SETTINGS, rounds=1), [[begun]], engine)
    assert [mine["personal"]["own"].tolist() for mine in begun.clients] == [[0, 0, 0]] * CLIENTS
    assert [mine["personal"]["own"].tolist() for mine in first.clients] == [[2, 2, 2]] * CLIENTS
    ((second,),) = train_together([method], [Run(0, shards)], SETTINGS, [[first]], engine)
    assert [mine["personal"]["own"].tolist() for mine in first.clients] == [[2, 2, 2]] * CLIENTS
    assert [mine["personal"]["own"].tolist() for mine in second.clients] == [[4, 4, 4]] * CLIENTS
    assert second.averages["mean"].tolist() == [4, 4, 4]


@dataclass(frozen=True)
class AveragesCounts(Personal):
    averages = {"mean": "count"}  # noqa: RUF012

    def keep(self, net, params):
        return {"count": torch.zeros(2, dtype=torch.int64)}

    def personalize(self, fit, shared, mine, shard):
        return Fitted({"count": mine["count"] + 1})


@pytest.mark.parametrize("engine", ["loop", "stack"])
def test_an_average_that_cannot_be_taken_fails_its_method_alone(engine):
    methods, engine = make_methods(FedAvg(), (FedAvg(), AveragesCounts())), ENGINES[engine]
    (outcomes,) = train_beside(methods, engine)
    assert isinstance(outcomes[1], Broken)
    assert "a mean needs floating-point numbers" in str(outcomes[1])
    assert_same(outcomes[0], train_alone(methods[0], engine))
