"""FedProx, FedPer, LG-FedAvg, FedBABU and pFedMe: whole trainings, judged by literal loops in float64."""

from __future__ import annotations

import pytest
import torch

import oracles
from fedthe import tree
from fedthe.engine.train import deploy, train
from fedthe.methods import METHODS, compose
from fedthe.methods.base import Rounds
from fedthe.methods.fedbabu import FedBABU
from fedthe.methods.fedper import FedPer
from fedthe.methods.fedprox import FedProx
from fedthe.methods.finetune import FineTune
from fedthe.methods.lg_fedavg import LGFedAvg
from fedthe.methods.pfedme import PFedMe
from helpers import fails
from literal_rounds import (
    CLIENTS,
    DECAY,
    LR,
    SETTINGS,
    assert_near,
    draw_batches,
    every_engine,
    run_literally,
    sample,
    train_in_doubles,
)
from tiny_net import TINY, leaves, tiny_params

NEAR = 1e-6  # the server's weights are float32
BODY, HEAD = leaves(tiny_params())


def deploy_all(method, progress, engine):
    return [leaves(mine) for mine in deploy(method, CLIENTS, SETTINGS, 0, progress, engine)]


def differ(one, other):
    return any(not torch.allclose(a, b, atol=1e-3) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("mu", [0.1, 2.0])
@every_engine
def test_fedprox_is_pulled_to_the_model_it_received(mu, engine):
    progress = train_in_doubles(compose(TINY, FedProx(mu)), engine())

    def local(w, own, batches, mu=mu):
        return oracles.fedprox_local(w, batches, LR, DECAY, mu), own

    w, _ = run_literally([BODY, HEAD], None, local)
    assert_near(leaves(progress.server.shared), w, NEAR)
    far, _ = run_literally([BODY, HEAD], None, lambda *given: local(*given, mu=0.0))
    assert differ(far, w)  # the pull counts


def test_fedprox_without_a_pull_is_fedavg():
    one, other = (train(compose(TINY, part), CLIENTS, SETTINGS, 0) for part in (FedProx(0.0), Rounds()))
    assert_near(leaves(one.server.shared), leaves(other.server.shared), NEAR)


@every_engine
def test_fedper_shares_bodies_and_keeps_heads_that_are_trained_together(engine):
    method, engine = compose(TINY, FedPer()), engine()
    progress = train_in_doubles(method, engine)

    def local(shared, head, batches):
        body, head = oracles.fine_tune(*shared, head, batches, LR, DECAY)
        return [body], head

    (body,), heads = run_literally([BODY], HEAD, local)
    assert tree.flatten(progress.server.shared).keys() == {"body.w"}
    assert_near([progress.server.shared["body"]["w"]], [body], NEAR)
    for found, head in zip(deploy_all(method, progress, engine), heads, strict=True):
        assert_near(found, [body, head], NEAR)
    assert differ(heads[:1], heads[1:2])


@every_engine
def test_lg_fedavg_shares_heads_and_keeps_bodies_that_are_trained_together(engine):
    method, engine = compose(TINY, LGFedAvg()), engine()
    progress = train_in_doubles(method, engine)

    def local(shared, body, batches):
        body, head = oracles.fine_tune(body, *shared, batches, LR, DECAY)
        return [head], body

    (head,), bodies = run_literally([HEAD], BODY, local)
    assert tree.flatten(progress.server.shared).keys() == {"head.out"}
    for found, body in zip(deploy_all(method, progress, engine), bodies, strict=True):
        assert_near(found, [body, head], NEAR)
    assert differ(bodies[:1], bodies[1:2])


@every_engine
def test_fedbabu_trains_bodies_under_the_first_head_and_fine_tunes_both(engine):
    method, engine = compose(TINY, METHODS["fedbabu"]), engine()
    assert method.training == compose(TINY, FedBABU())
    progress = train_in_doubles(method.training, engine)
    (body,), _ = run_literally(
        [BODY], None, lambda shared, own, batches: ([oracles.fedbabu_local(*shared, HEAD, batches, LR, DECAY)], own)
    )
    assert_near([progress.server.shared["body"]["w"]], [body], NEAR)
    assert torch.equal(progress.server.shared["head"]["out"], HEAD)
    for k, found in enumerate(deploy_all(method, progress, engine)):
        batches = draw_batches(k, SETTINGS.rounds, "personal")
        assert_near(found, oracles.fine_tune(body, HEAD, batches, LR, DECAY), NEAR)
        assert differ(found, [BODY, HEAD])


@pytest.mark.parametrize("part", [PFedMe(), PFedMe(lam=2.0, inner_lr=0.05, inner_steps=3, beta=0.5)], ids=str)
@every_engine
def test_pfedme_moves_to_the_minimum_near_it_and_deploys_one(part, engine):
    method, engine = compose(TINY, part), engine()
    progress = train_in_doubles(method.training, engine)
    w = [BODY, HEAD]

    def local(w, own, batches):
        sent = oracles.pfedme_local(w, batches, LR, part.lam, part.inner_lr, part.inner_steps)
        # the server's step, taken before the mean: it is linear
        return [(1 - part.beta) * old + part.beta * new for old, new in zip(w, sent, strict=True)], own

    w, _ = run_literally(w, None, local)
    assert_near(leaves(progress.server.shared), w, NEAR)
    assert differ(w, [BODY, HEAD])
    for k, found in enumerate(deploy_all(method, progress, engine)):
        theta = oracles.ditto_round(w, w, draw_batches(k, SETTINGS.rounds, "personal"), part.inner_lr, part.lam)
        assert_near(found, theta, NEAR)
        assert differ(found, w)


def test_pfedme_reports_the_envelope():
    """The reported loss is below that of the model itself, for theta is nearer to the minimum."""
    one, other = (train(compose(TINY, part), CLIENTS, SETTINGS, 0).server for part in (PFedMe(), Rounds()))
    assert one.losses[0] < other.losses[0]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: FedProx(mu=-1.0), "fedprox: mu must not be negative"),
        (lambda: PFedMe(lam=0.0), "pfedme: lam, inner_lr and beta must be positive"),
        (lambda: PFedMe(inner_steps=0), "inner_steps at least 1"),
    ],
)
def test_values_out_of_range_are_refused(make, says):
    fails(make, says)


def test_what_does_not_compose_is_refused_in_a_sentence():
    fails(lambda: compose(TINY, (FedPer(), FineTune())), "are both personal parts; a method has one")


@every_engine
def test_ttt_ft_keeps_its_rotation_head_which_only_fine_tuning_trains(engine):
    method, engine = compose(TINY, METHODS["ttt_ft"]), engine()
    progress = train_in_doubles(method.training, engine)
    rotations = [torch.zeros(4, 4).double() for _ in CLIENTS]

    def local(w, own, batches):
        return oracles.fine_tune(*w, batches, LR, DECAY), own

    def fine_tune(w, k, number):
        return oracles.ttt_fine_tune(*w, rotations[k], draw_batches(k, number, "personal"), LR, DECAY)

    # what clients receive, by round
    models = [run_literally([BODY, HEAD], None, local, rounds)[0] for rounds in range(SETTINGS.rounds + 1)]
    for number, received in enumerate(models[:-1]):
        for k in sample(number):
            rotations[k] = fine_tune(received, k, number)[2]
    assert_near(leaves(progress.server.shared), models[-1], NEAR)  # FedAvg's, without a trace of rotations
    states = deploy(method, CLIENTS, SETTINGS, 0, progress, engine)
    for k, state in enumerate(states):
        body, head, rotation = fine_tune(models[-1], k, SETTINGS.rounds)
        assert_near([*leaves(state), state["rotation"]], [body, head, rotation], NEAR)
    assert differ([states[0]["rotation"]], [torch.zeros(4, 4).double()])
