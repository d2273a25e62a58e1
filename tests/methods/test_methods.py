"""What every method and every ablation promises. A new one is covered by being registered."""

from dataclasses import fields, is_dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

from fedthe import tree
from fedthe.engine.client import Received, work
from fedthe.engine.evaluate import answer_stream, make_samples
from fedthe.engine.loop import make_fits
from fedthe.engine.train import deploy, start, train
from fedthe.methods import ABLATIONS, compose
from fedthe.methods.base import Samples
from fedthe.methods.compose import arrange
from fedthe.methods.make import set_hyper
from fedthe.methods.memo import Memo
from fedthe.methods.samples import join
from trained_methods import ALL, CLASSES, NET, PAPER, SAMPLES, SETTINGS, make_data, net_for, trained

every_method = pytest.mark.parametrize("name", ALL)


# Streams here have six samples, and networks have hardly learned anything: what it takes to see a method at work.
SHORT = {
    "tent": {"batch": 2},
    "sar": {"batch": 2, "margin": 1.5},
    "rotta": {"batch": 2, "size": 3},
    "atp": {"batch": 2},
}


def make(name):
    return set_hyper(arrange(ALL[name]), SHORT.get(name, {}), name).on(net_for(name))


@cache
def deployed(method):
    return deploy(method, make_data()[0], SETTINGS, 0, trained(method.training))


def samples_of(method, k):
    return make_samples(method, torch.from_numpy(make_data()[1][k][0]), (0, "test", k))


@cache
def answer(method, k):
    """Client k's answers to its stream, all at once, and the state after it."""
    mine = deployed(method)[k]
    with torch.no_grad():
        return method.answer(mine, method.predictor.start(method, mine, make_data()[0][k]), samples_of(method, k))


def copy(value):
    return tree.map_leaves(torch.clone, value)


def same(a, b):
    a, b = tree.flatten(a), tree.flatten(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@every_method
def test_it_trains_deploys_and_answers(name):
    method = make(name)
    method.check()
    (shards, streams), progress = make_data(), trained(method.training)
    assert progress.round == 2
    assert np.isfinite(progress.server.losses).all()
    for k, (mine, (images, labels)) in enumerate(zip(deployed(method), streams, strict=True)):
        scores = answer_stream(method, mine, shards[k], images, labels, (0, "test", k))
        answers, _ = answer(method, k)
        assert answers.logits.shape == (SAMPLES, CLASSES)
        assert torch.isfinite(answers.logits).all()
        assert (scores.right == (answers.logits.argmax(-1).numpy() == labels)).all()
        for column, values in answers.info.items():
            assert values.shape == (SAMPLES,), column
            assert np.array_equal(scores.info[column], values), column


@every_method
def test_the_same_seed_gives_the_same_bits(name):
    method, shards = make(name), make_data()[0]
    again, before = train(method.training, shards, SETTINGS, seed=0), trained(method.training)
    assert_same_training(again, before)
    for a, b in zip(deploy(method, shards, SETTINGS, 0, again), deployed(method), strict=True):
        assert same(a, b)
    first, second = answer(method, 0), answer.__wrapped__(method, 0)
    assert torch.equal(first[0].logits, second[0].logits)
    assert same(first[1], second[1])


def assert_same_training(one, other):
    assert (one.round, one.server.losses) == (other.round, other.server.losses)
    assert same(one.server.shared, other.server.shared)
    assert same(one.averages, other.averages)
    assert all(same(a, b) for a, b in zip(one.clients, other.clients, strict=True))


@every_method
def test_training_by_itself_is_the_training_it_shares(name):
    method, shards = make(name), make_data()[0]
    assert method.training.training == method.training
    assert method.core.core == method.core == method.training.core
    alone = train(method, shards, SETTINGS, seed=0)
    assert_same_training(alone, trained(method.training))
    for a, b in zip(deploy(method, shards, SETTINGS, 0, alone), deployed(method), strict=True):
        assert same(a, b)
    assert same(alone.server.shared, trained(method.core).server.shared)


def test_the_papers_14_methods_need_8_trainings_and_5_cores():
    methods = [make(name) for name in PAPER]
    assert len(methods) == 14
    assert len({method.training for method in methods}) == 8
    assert len({method.core for method in methods}) == 5
    assert make("tsa").training == make("fedthe").training
    assert make("apfl").core == make("ttt_ft").core == make("fedavg").core
    assert make("fedrod").core == make("fedthe").core
    # FedAvg and the two-head model, each with and without balanced softmax
    ablations = [compose(NET, recipe) for recipe in ABLATIONS.values()]
    assert len({method.training for method in ablations}) == 4
    assert len({method.core for method in ablations}) == 2


@every_method
def test_personal_state_never_leaves_and_nothing_is_changed_in_place(name):
    method, (shards, _) = make(name), make_data()
    begun, uploads = start(method, len(shards), 0), []
    reached = trained(method.training)  # not the start, where personal and shared parts may be equal
    shared, averages, keys = reached.server.shared, reached.averages, tree.flatten(begun.server.shared).keys()
    before = copy(shared | averages)
    for k, shard in enumerate(shards):
        mine, rows = begun.clients[k], [part.clone() for part in shard]
        held, fits = copy(mine), make_fits(method.net, SETTINGS, 0, reached.round, k, len(shards), shard)
        of_rounds, own = mine.get("rounds", {}), mine.get("personal", {})
        made = method.personal.personalize(fits.personal, shared | averages, own, shard)
        assert same(mine, held)
        own = own | {leaf: made.params[leaf] for leaf in own.keys() & made.params.keys()}
        was = copy(own)
        local = method.rounds.local(fits.local, shared, own if method.is_one_part else of_rounds, shard)
        assert same(own, was)
        assert same(mine, held)
        changed = {"rounds": of_rounds, "personal": own}
        branch = "personal" if method.is_one_part else "rounds"
        changed[branch] = changed[branch] | local.mine
        assert all(torch.equal(part, row) for part, row in zip(shard, rows, strict=True))
        worked = work((method,), fits, shared, [Received(averages, mine)], shard)
        assert same(worked.upload, local.params)
        assert same(worked.kept[0], changed)
        assert tree.flatten(worked.kept[0]).keys() == tree.flatten(mine).keys()
        assert worked.averages[0].keys() == method.personal.averages.keys()
        assert tree.flatten(local.params).keys() == keys
        assert {"personal", "alpha", "own_descriptor"}.isdisjoint(local.params)
        for secret, leaf in tree.flatten(of_rounds | own | made.params | local.mine).items():
            assert not any(torch.equal(leaf, sent) for sent in tree.flatten(local.params).values()), secret
        uploads.append(local.params)
    stacked = tree.stack(uploads)
    sent = copy(stacked)
    after = method.rounds.aggregate(shared, stacked, torch.tensor([float(len(shard.labels)) for shard in shards]))
    assert same(stacked, sent)
    assert same(shared | averages, before)
    assert not same(shared, after)
    assert {key: leaf.shape for key, leaf in tree.flatten(after).items()} == {
        key: leaf.shape for key, leaf in tree.flatten(begun.server.shared).items()
    }


@every_method
def test_answering_changes_nothing_in_place(name):
    method, shard = make(name), make_data()[0][0]
    mine, samples = deployed(method)[0], samples_of(method, 0)
    held, seen, rows = copy(mine), samples.x.clone(), [part.clone() for part in shard]
    state = method.predictor.start(method, mine, shard)
    begun = copy(state)
    with torch.no_grad():
        method.answer(mine, state, samples)
    assert same(mine, held)
    assert all(torch.equal(a, b) or a.isnan().all() for a, b in zip(flat(state), flat(begun), strict=True))
    assert torch.equal(samples.x, seen)
    assert all(torch.equal(part, row) for part, row in zip(shard, rows, strict=True))


def flat(value):
    return list(tree.flatten(value).values())


def answer_in_chunks(method, k, size):
    """`size` samples per call, each with the state of the call before."""
    mine, whole, parts = deployed(method)[k], samples_of(method, k), []
    state = method.predictor.start(method, mine, make_data()[0][k])
    for first in range(0, SAMPLES, size):
        part = Samples(whole.x[first : first + size], lambda positions, first=first: whole.views(positions + first))
        with torch.no_grad():
            answers, state = method.answer(mine, state, part)
        parts.append(answers)
    return join(parts), state


def answer_in_windows(method, k, window):
    """As an engine that scans calls it, with the views of a window drawn before."""
    mine, samples = deployed(method)[k], samples_of(method, k)
    state = method.predictor.start(method, mine, make_data()[0][k])
    with torch.no_grad():
        return samples.scan(method.predictor.answer_given, method, mine, state, samples.x, window=window)


@every_method
def test_a_stream_equals_its_windows_and_its_chunks(name):
    method = make(name)
    if (method.predictor.window or 1) > SAMPLES:  # the whole stream would be one window
        method = replace(method, predictor=replace(method.predictor, batch=2))
    assert (method.predictor.window or 2) <= 2
    window = method.predictor.window or 1
    whole, last = answer(method, 1)
    ways = {f"chunks of {size}": answer_in_chunks(method, 1, size) for size in (1, 2, 4) if size % window == 0}
    ways["windows"] = answer_in_windows(method, 1, window)
    if method.predictor.window is None:
        ways["windows of 5"] = answer_in_windows(method, 1, 5)
    for way, (answers, after) in ways.items():
        torch.testing.assert_close(answers.logits, whole.logits, rtol=1e-5, atol=1e-5, msg=lambda m, way=way: way + m)
        assert answers.info.keys() == whole.info.keys()
        for column, values in whole.info.items():
            # where the gradient is next to nothing, Adam steps by its rounding; the logits hardly feel it there
            torch.testing.assert_close(answers.info[column], values, rtol=0, atol=1e-3)
        for a, b in zip(flat(after), flat(last), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# Other valid values, by the name of the hyperparameter; the first that differs is tried. True and False are swapped.
OTHERS = {
    "discriminant": (0.25,),
    "alpha": (0.3,),
    "anchor": (0.9,),
    "batch": (3,),
    "beta": (0.3,),
    "beta1": (0.5,),
    "beta2": (0.9,),
    "buffer": (2,),
    "eps": (0.1,),
    "forget": (0.5,),
    "frozen": (0.5,),
    "grid": (0.3,),
    "inner_lr": (0.1,),
    "inner_steps": (2,),
    "k": (3,),
    "lam": (0.1,),
    "leave": (0.1,),
    "lr": (0.02,),
    "m": (1,),
    "margin": (0.0,),
    "momentum": (0.1,),
    "mu": (1.0,),
    "nu": (0.5,),
    "own": ((0.1, 0.5, 0.9),),
    "penalty": (0.7,),
    "personal": (0.9,),
    "probe_lr": (0.02,),
    "probe_steps": (1,),
    "pseudo": (3.0,),
    "rate": (0.9,),
    "rate_lr": (1.0,),
    "recent": (0.3,),
    "regress": (0.3,),
    "reset": (5.0,),
    "rho": (0.5,),
    "ridge": (0.5,),
    "scale": (0.1,),
    "server_lr": (0.5,),
    "shrinkage": (2.0,),
    "size": (2,),
    "smooth": (0.05,),
    "smoothing": (0.5,),
    "start": ((0.3, 0.3, 0.4),),
    "steps": (2,),
    "strength": (2.0,),
    "tau": (0.5,),
    "then": (Memo(views=2),),
    "threshold": (1.0,),
    "tilt": (-1.0,),
    "timeliness": (0.0,),
    "trust": (1.0,),
    "uncertainty": (50.0,),
    "views": (4,),
    "weighting": ("half", "fa"),
}

# Hyperparameters that mean nothing beside the others of an ablation.
IDLE = {
    ("(7) (5) + EM only", "predictor.alpha"): "entropy alone: features are not looked at",
    ("(7) (5) + EM only", "predictor.beta"): "entropy alone: features are not looked at",
    ("(7) (5) + EM only", "predictor.history"): "entropy alone: features are not looked at",
    ("(11) (9) without test history", "predictor.alpha"): "there is no history to move",
    ("(11) (9) without test history", "predictor.beta"): "there is no history to be drawn to",
    ("logit_adjust", "personal.balanced_personal"): "only the global head answers",
    ("em", "personal.balanced_personal"): "only the global head answers",
    ("bbse", "personal.balanced_personal"): "only the global head answers",
    ("fmapls", "personal.balanced_personal"): "only the global head answers",
}


def list_hyper(value, path=""):
    """Every hyperparameter of a part, by dotted name."""
    for each in fields(value):
        inner = getattr(value, each.name)
        yield from list_hyper(inner, f"{path}{each.name}.") if is_dataclass(inner) else [path + each.name]


def list_all(method):
    """Every hyperparameter of a method. A part that is both rounds and personal is listed once."""
    places = ("rounds", "predictor") if method.is_one_part else ("rounds", "personal", "predictor")
    return [path for place in places for path in list_hyper(getattr(method, place), f"{place}.")]


def change(value, path):
    """The part with another value of one hyperparameter."""
    first, _, rest = path.partition(".")
    now = getattr(value, first)
    if rest:
        return replace(value, **{first: change(now, rest)})
    others = (not now,) if isinstance(now, bool) else OTHERS.get(first, ())
    other = next((other for other in others if other != now), None)
    assert other is not None, f"give another value of {first} in OTHERS"
    return replace(value, **{first: other})


@pytest.mark.parametrize(("name", "path"), [(name, path) for name in ALL for path in list_all(make(name))])
def test_every_hyperparameter_changes_the_answers(name, path):
    method = make(name)
    other = change(method, path)
    if method.is_one_part and path.startswith("rounds."):
        other = replace(other, personal=other.rounds)
    differs = any(not torch.equal(answer(method, k)[0].logits, answer(other, k)[0].logits) for k in range(3))
    assert differs == ((name, path) not in IDLE)


def test_the_idle_hyperparameters_are_still_there():
    assert all(path in list_all(make(name)) for name, path in IDLE)


def test_hyperparameters_are_listed():
    assert list_all(make("fedavg")) == ["rounds.balanced"]
    assert list_all(make("ditto")) == ["rounds.lam"]
    assert "predictor.then.views" in list_all(make("fedthe_plus"))
