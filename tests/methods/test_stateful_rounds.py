"""Rounds whose `local` updates what a client keeps: SCAFFOLD, and the example's MOON, judged by literal loops."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

import fedthe
import oracles
from fedthe import tree
from fedthe.engine.fit import LoopFit, Optimizer
from fedthe.engine.train import deploy, start_from, train, train_together
from fedthe.engine.visit import Run
from fedthe.errors import Broken, InputError
from fedthe.methods import compose
from fedthe.methods.base import Fitted, Rounds, network
from fedthe.methods.fedthe import HeadEnsemble
from fedthe.methods.finetune import FineTune
from fedthe.methods.scaffold import Scaffold
from fedthe.methods.two_heads import TwoHeads
from fedthe.types import scale
from helpers import load_example
from literal_rounds import (
    CLIENTS,
    DECAY,
    LR,
    SETTINGS,
    assert_near,
    draw_batches,
    every_engine,
    sample,
    train_in_doubles,
)
from tiny_net import CLASSES, TINY, leaves, list_batches, make_shard, tiny_params

Moon = load_example("my_method").Moon


# The papers' algorithms, taken literally: float64, models as lists [body, head]


def differentiate(loss, params):
    params = [p.detach().requires_grad_() for p in params]
    return torch.autograd.grad(loss(params), params)


def run_scaffold(settings, server_lr):
    """The server's x and c, and every client's c_i, after all rounds. The loss has the weight decay in it."""
    x = leaves(tiny_params())
    c = [torch.zeros_like(p) for p in x]
    own = [[torch.zeros_like(p) for p in x] for _ in CLIENTS]
    for number in range(settings.rounds):
        moved, changed = [], []
        sampled = sample(number, settings)
        for k in sampled:
            y, steps = x, 0
            for bx, by in draw_batches(k, number):
                g = differentiate(lambda y, bx=bx, by=by: oracles.mean_nll(oracles.tiny_logits(*y, bx), by), y)
                y = [y[i] - LR * (g[i] + DECAY * y[i] - own[k][i] + c[i]) for i in range(2)]
                steps += 1
            new = [own[k][i] - c[i] + (x[i] - y[i]) / (steps * LR) for i in range(2)]
            moved.append([y[i] - x[i] for i in range(2)])
            changed.append([new[i] - own[k][i] for i in range(2)])
            own[k] = new
        x = [x[i] + server_lr * sum(each[i] for each in moved) / len(sampled) for i in range(2)]
        c = [c[i] + sum(each[i] for each in changed) / len(CLIENTS) for i in range(2)]
    return x, c, own


def contrast_one(z, z_received, z_previous, temperature):
    """One sample's loss, in the paper's notation, from three vectors."""

    def alike(a, b):
        return (a * b).sum() / ((a * a).sum().sqrt() * (b * b).sum().sqrt())

    positive = torch.exp(alike(z, z_received) / temperature)
    return -torch.log(positive / (positive + torch.exp(alike(z, z_previous) / temperature)))


def run_moon(mu, temperature, decay):
    """The server's model, and the body that every client trained last."""
    lr, w = LR, leaves(tiny_params())
    previous = [w[0] for _ in CLIENTS]
    for number in range(SETTINGS.rounds):
        trained, rows = [], []
        for k in sample(number):
            y = w
            for bx, by in draw_batches(k, number):
                flat = bx.flatten(1).double()

                def loss(y, flat=flat, bx=bx, by=by, k=k, w=w):
                    z, z_received, z_previous = (torch.tanh(flat @ body.T) for body in (y[0], w[0], previous[k]))
                    each = [contrast_one(*three, temperature) for three in zip(z, z_received, z_previous, strict=True)]
                    return oracles.mean_nll(oracles.tiny_logits(*y, bx), by) + mu * sum(each) / len(each)

                g = differentiate(loss, y)
                y = [y[i] - lr * (g[i] + decay * y[i]) for i in range(2)]
            trained.append(y)
            rows.append(len(CLIENTS[k].labels))
            previous[k] = y[0]
        w = [sum(n * y[i] for n, y in zip(rows, trained, strict=True)) / sum(rows) for i in range(2)]
    return w, previous


@pytest.mark.parametrize(("participation", "server_lr"), [(0.67, 1.0), (1.0, 0.5)])
@every_engine
def test_scaffold_keeps_the_control_variates_of_the_paper(participation, server_lr, engine):
    settings = replace(SETTINGS, participation=participation)
    progress = train_in_doubles(compose(TINY, Scaffold(server_lr)), engine(), settings)
    x, c, own = run_scaffold(settings, server_lr)
    shared = progress.server.shared
    assert_near(leaves(shared), x)
    assert_near(leaves(shared["control"]), c)
    for k in range(3):
        assert_near(leaves(progress.clients[k]["rounds"]["own_control"]), own[k])
    assert float(max(part.abs().max() for part in c)) > 0.01  # they count,
    assert not torch.allclose(own[0][1], own[1][1], atol=0.01)  # and clients differ
    # all began at zero, so the server's is the mean of the clients'
    assert_near(c, [sum(each[i] for each in own) / 3 for i in range(2)])


@pytest.mark.parametrize("optimizer", [Optimizer(momentum=0.5), Optimizer("adam", lr=0.001)], ids=["momentum", "adam"])
def test_scaffold_refuses_what_option_two_is_not_defined_for(optimizer, tmp_path):
    says = r"Scaffold is defined for plain SGD, not for (momentum 0\.5|adam); set optimizer=sgd and momentum=0\."
    with pytest.raises(InputError, match=says):
        train(compose(TINY, Scaffold()), CLIENTS, replace(SETTINGS, optimizer=optimizer), 0)
    how = {"optimizer": optimizer.name, "momentum": optimizer.momentum or None}
    settings = {"methods": ["fedavg", "scaffold"], "dataset": "glyphs", "size": 20, "out": str(tmp_path / "run")}
    with pytest.raises(InputError, match=says):  # before anything is trained or written
        fedthe.run(**settings, **{name: value for name, value in how.items() if value is not None})
    assert not (tmp_path / "run").exists()


def test_scaffold_without_control_variates_is_fedavg_of_equal_weights():
    """In the first round all of them are zero."""
    once = replace(SETTINGS, rounds=1, participation=1.0)

    @dataclass(frozen=True)
    class Uniform(Rounds):
        def aggregate(self, shared, uploads, weights):
            return tree.map_leaves(lambda leaf: leaf.mean(0), uploads)

    one, other = (train(compose(TINY, kind), CLIENTS, once, 0).server.shared for kind in (Scaffold, Uniform))
    assert_near(leaves(one), leaves(other), 1e-6)


@pytest.mark.parametrize(("mu", "temperature"), [(1.0, 0.5), (5.0, 0.2)])
@every_engine
def test_moon_keeps_the_model_that_a_client_trained_last(mu, temperature, engine):
    progress = train_in_doubles(compose(TINY, Moon(mu, temperature)), engine())
    w, previous = run_moon(mu, temperature, SETTINGS.optimizer.weight_decay)
    # the server's weights are float32
    assert_near(leaves(progress.server.shared), w, 1e-6)
    for k in range(3):
        assert_near([progress.clients[k]["rounds"]["previous"]["w"]], [previous[k]], 1e-6)
    plain, _ = run_moon(0.0, temperature, SETTINGS.optimizer.weight_decay)
    assert not torch.allclose(plain[0], w[0], atol=1e-3)  # the contrast counts


def test_moon_while_all_models_are_equal():
    """The contrast of the first step is log 2, and has no gradient."""
    once = replace(SETTINGS, rounds=1, local_epochs=1, batch=12)  # one step
    moon, fedavg = (train(compose(TINY, kind), CLIENTS, once, 0).server for kind in (Moon, Rounds))
    assert_near(leaves(moon.shared), leaves(fedavg.shared), 1e-6)
    assert moon.losses[0] == pytest.approx(fedavg.losses[0] + math.log(2), rel=1e-5)


# Beside other parts


@pytest.mark.parametrize("rounds", [Scaffold(), Moon()], ids=["scaffold", "moon"])
@pytest.mark.parametrize("parts", [(FineTune(),), (TwoHeads(),), (TwoHeads(), HeadEnsemble())], ids=str)
@every_engine
def test_it_composes_with_personal_parts(rounds, parts, engine):
    method, alone = compose(TINY, (rounds, *parts)), compose(TINY, rounds)
    method.check()
    assert method.core == alone
    assert (method.training == alone) is isinstance(parts[0], FineTune)
    reached, bare = (train(each, CLIENTS, SETTINGS, 0, engine=engine()) for each in (method.training, alone))
    assert_same(reached.server.shared, bare.server.shared)
    for k in range(3):
        assert_same(reached.clients[k]["rounds"], bare.clients[k]["rounds"])
    x = scale(make_shard(6, 5, seed=4).x)
    logits = torch.stack([method.logits(mine, x) for mine in deploy(method, CLIENTS, SETTINGS, 0, reached, engine())])
    assert logits.shape == (3, 6, CLASSES)
    assert logits.isfinite().all()
    assert not torch.equal(logits[0], logits[1])


def assert_same(one, other):
    one, other = tree.flatten(one), tree.flatten(other)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_fine_tuning_starts_from_the_model_and_deploys_no_control_variate_of_others():
    method = compose(TINY, (Scaffold(), FineTune()))
    reached = train(method, CLIENTS, SETTINGS, 0)
    for k, mine in enumerate(deploy(method, CLIENTS, SETTINGS, 0, reached)):
        assert mine.keys() == {"body", "head", "control", "own_control"}
        assert_same(mine["own_control"], reached.clients[k]["rounds"]["own_control"])
        assert_same(mine["control"], reached.server.shared["control"])
        s = SETTINGS
        fit = LoopFit(TINY, CLIENTS[k], s.optimizer, 1, s.batch, s.flip, s.crop, (0, "personal", s.rounds), k)
        double = [leaf.double() for leaf in leaves(reached.server.shared)]
        tuned = oracles.fine_tune(*double, list_batches(fit), 0.1, s.optimizer.weight_decay)
        assert_near([leaf.double() for leaf in leaves(mine)], tuned, 1e-5)


@every_engine
def test_side_by_side_with_others_each_has_the_bits_it_has_alone(engine):
    methods = [compose(TINY, (Scaffold(), *parts)) for parts in ((), (TwoHeads(),), (TwoHeads(True),))]
    reached = [start_from(method, TINY.init(0), 3) for method in methods]
    (together,) = train_together(methods, [Run(0, CLIENTS)], SETTINGS, [reached], engine())
    for method, found in zip(methods, together, strict=True):
        alone = train(method, CLIENTS, SETTINGS, 0, engine=engine())
        assert_same(found.server.shared, alone.server.shared)
        assert_same(found.averages, alone.averages)
        for k in range(3):
            assert_same(found.clients[k], alone.clients[k])


@dataclass(frozen=True)
class Forgetful(Scaffold):
    """It says nothing in `keep` of what `local` returns."""

    def keep(self, net, params):
        return {}

    def local(self, fit, shared, mine, shard):
        return super().local(fit, shared, super().keep(fit.net, network(shared)), shard)


@every_engine
def test_what_keep_does_not_name_is_refused(engine):
    with pytest.raises(Broken, match=r"Forgetful.local returned 'own_control' .* but `keep` does not name it"):
        train(compose(TINY, Forgetful()), CLIENTS, SETTINGS, 0, engine=engine())


@dataclass(frozen=True)
class Count(Rounds):
    """It counts a client's rounds, in place."""

    def keep(self, net, params):
        return {"count": params["head"]["out"].new_zeros(())}

    def local(self, fit, shared, mine, shard):
        params, losses, _ = fit(self.loss, shared)
        mine["count"] += 1
        return Fitted(params, losses, {"count": mine["count"]})


@every_engine
def test_writing_to_what_a_client_keeps_reaches_no_other_client(engine):
    method = compose(TINY, Count())
    begun = start_from(method, TINY.init(0), 3)
    reached = train(method, CLIENTS, SETTINGS, 0, begun, engine())
    took_part = [k for number in range(SETTINGS.rounds) for k in sample(number)]
    for clients, counts in ((reached.clients, [took_part.count(k) for k in range(3)]), (begun.clients, [0, 0, 0])):
        assert [float(mine["rounds"]["count"]) for mine in clients] == counts


@dataclass(frozen=True)
class Shrink(TwoHeads):
    """It writes to the mean that all clients receive."""

    def personalize(self, fit, shared, mine, shard):
        shared["descriptor"] *= 0.5
        return super().personalize(fit, shared, mine, shard)


def test_writing_to_a_mean_that_all_clients_receive_is_refused():
    with pytest.raises(Broken, match="Shrink changes descriptor of the shared model in place; return new tensors"):
        train(compose(TINY, Shrink()), CLIENTS, SETTINGS, 0)
