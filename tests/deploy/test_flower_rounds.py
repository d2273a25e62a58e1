"""Server and clients of a federation, called by hand: the same numbers as in a simulation."""

import pytest
import torch

from fedthe import tree
from fedthe.deploy.flower.member import Model, join
from fedthe.deploy.flower.rounds import Reply, find_state, finish, finish_round, judge, name_leaves, start, take_leaves
from fedthe.deploy.flower.terms import make_terms
from fedthe.engine.conclude import conclude
from fedthe.engine.loop import Loop
from fedthe.engine.server import sample_clients
from fedthe.engine.train import deploy_some, train
from fedthe.experiment.work import prepare

SMALL = {"method": "fedthe", "dataset": "glyphs", "clients": 3, "rounds": 2, "seed": 1}
QUICK = "train_fraction=0.1 test_fraction=0.1 local_epochs=1 batch=16 size=16"
ROWS = 1e6


def make(**given):
    return make_terms(SMALL | {"settings": QUICK} | given)


def federate(terms, folder, rounds=None, progress=None, participation=1.0):
    """All rounds, as the apps do them, without messages."""
    progress = progress or start(terms)
    members = [join(terms, k, folder / str(k)) for k in range(terms.clients)]
    for number in range(progress.round, terms.settings.rounds if rounds is None else rounds):
        sent = name_leaves(progress.server.shared, progress.averages)
        replies = []
        for k in sample_clients(terms.clients, terms.settings.participation, terms.seed, number):
            done = members[k].train(take_leaves(sent, number, find_state(progress, k)))
            replies.append(Reply(k, name_leaves(done.upload, done.averages), done.rows, done.loss))
        progress = finish_round(terms, progress, judge(progress, replies[::-1], ROWS))
    return progress, members


def simulate(terms):
    methods, (work,) = prepare(terms.config)
    (method,) = methods.values()
    return work, method, train(method.training, work.run.shards, terms.settings, terms.seed, engine=Loop(threads=1))


def assert_same(one, other):
    one, other = tree.flatten(one), tree.flatten(other)
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("name", ["fedthe", "fedthe_regime", "ditto", "apfl", "scaffold", "knn_per"])
def test_clients_train_and_deploy_as_in_a_simulation(name, tmp_path):
    terms = make(method=name)
    found, members = federate(terms, tmp_path)
    work, method, expected = simulate(terms)
    assert_same(found.server.shared, expected.server.shared)
    assert_same(found.averages, expected.averages)
    assert found.server.losses == pytest.approx(expected.server.losses, rel=1e-6)
    model = Model(found.round, found.server.shared, found.averages, find_state(found, 2))
    beside = finish(terms, [(member.summarize(model), member.rows) for member in members])
    theirs = conclude(method, work.run, expected)
    for a, b in zip(tree.flatten(beside).values(), tree.flatten(theirs).values(), strict=True):
        torch.testing.assert_close(a, b)
    deployed = deploy_some(method, work.run, terms.settings, expected, Loop(), [2], beside)
    assert_same(members[2].deploy(model, beside), tree.take(deployed, 0))
