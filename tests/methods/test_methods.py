"""What every method and every ablation promises. A new one is covered by being registered."""

from dataclasses import fields, is_dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

from fedthe import tree
from fedthe.engine.evaluate import answer_stream, make_views
from fedthe.engine.loop import make_fit
from fedthe.engine.train import deploy, start, train
from fedthe.methods import ABLATIONS, METHODS
from fedthe.methods.memo import Memo
from fedthe.types import scale
from trained_methods import ALL, CLASSES, NET, PAPER, SAMPLES, SETTINGS, make_data, trained

every_method = pytest.mark.parametrize("name", ALL)


@cache
def deployed(method):
    return deploy(method, make_data()[0], SETTINGS, 0, trained(method.trains_as()))


def views_of(method, k, first=0):
    """The views of client k's stream, for positions that count from `first`."""
    whole = make_views(method, torch.from_numpy(make_data()[1][k][0]), (0, "test", k))
    return whole and (lambda positions: whole(positions + first))


@cache
def answer(method, k, how="stream"):
    shards, streams = make_data()
    mine, x = deployed(method)[k], scale(torch.from_numpy(streams[k][0]))
    state = method.predictor.start(method, mine, shards[k])
    with torch.no_grad():
        return getattr(method.predictor, how)(method, mine, state, x, views_of(method, k))


def copy(value):
    return tree.map_leaves(torch.clone, value)


def same(a, b):
    a, b = tree.flatten(a), tree.flatten(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@every_method
def test_it_trains_deploys_and_answers(name):
    method = ALL[name](NET)
    (shards, streams), progress = make_data(), trained(method.trains_as())
    assert progress.round == 2
    assert np.isfinite(progress.losses).all()
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
    method, shards = ALL[name](NET), make_data()[0]
    again = train(method.trains_as(), shards, SETTINGS, seed=0)
    assert same(again.shared, trained(method.trains_as()).shared)
    assert again.losses == trained(method.trains_as()).losses
    for a, b in zip(deploy(method, shards, SETTINGS, 0, again), deployed(method), strict=True):
        assert same(a, b)
    first, second = answer(method, 0), answer.__wrapped__(method, 0)
    assert torch.equal(first[0].logits, second[0].logits)
    assert same(first[1], second[1])


@every_method
def test_training_by_itself_is_the_training_it_shares(name):
    method, shards = ALL[name](NET), make_data()[0]
    assert method.trains_as().trains_as() == method.trains_as()
    alone = train(method, shards, SETTINGS, seed=0)
    assert same(alone.shared, trained(method.trains_as()).shared)
    for a, b in zip(deploy(method, shards, SETTINGS, 0, alone), deployed(method), strict=True):
        assert same(a, b)


def test_the_papers_14_methods_need_8_trainings():
    assert len(PAPER) == 14
    assert len({METHODS[name](NET).trains_as() for name in PAPER}) == 8
    assert METHODS["tsa"](NET).trains_as() == METHODS["fedthe"](NET).trains_as()
    # FedAvg and the two-head model, each with and without balanced softmax
    assert len({make(NET).trains_as() for make in ABLATIONS.values()}) == 4


@every_method
def test_personal_state_never_leaves_and_nothing_is_changed_in_place(name):
    method, (shards, _) = ALL[name](NET), make_data()
    begun, uploads = start(method, len(shards), 0), []
    shared = trained(method.trains_as()).shared  # not the start, where personal and shared parts may be equal
    keys = tree.flatten(begun.shared).keys()
    private = tree.flatten(begun.mine[0]).keys() - keys
    before = copy(shared)
    for k, shard in enumerate(shards):
        held, rows = copy(begun.mine[k]), [part.clone() for part in shard]
        mine = method.personalize(make_fit(SETTINGS, 0, "personal", 2, k), shared, begun.mine[k], shard)
        assert same(begun.mine[k], held)
        kept = copy(mine)
        upload = method.local(make_fit(SETTINGS, 0, "local", 2, k), shared, mine, shard)
        assert same(mine, kept)
        assert all(torch.equal(part, row) for part, row in zip(shard, rows, strict=True))
        assert tree.flatten(upload).keys() == keys
        assert {"personal", "alpha", "own_descriptor"}.isdisjoint(upload)
        for secret in private & tree.flatten(mine).keys() - {"own_descriptor"}:  # this one goes out as "descriptor"
            leaf = tree.flatten(mine)[secret]
            assert not any(torch.equal(leaf, sent) for sent in tree.flatten(upload).values()), secret
        uploads.append(upload)
    stacked = tree.stack(uploads)
    sent = copy(stacked)
    after = method.aggregate(shared, stacked, torch.tensor([float(len(shard.labels)) for shard in shards]))
    assert same(stacked, sent)
    assert same(shared, before)
    assert not same(shared, after)
    assert {key: leaf.shape for key, leaf in tree.flatten(after).items()} == {
        key: leaf.shape for key, leaf in tree.flatten(begun.shared).items()
    }


@every_method
def test_answering_changes_nothing_in_place(name):
    method, (shards, streams) = ALL[name](NET), make_data()
    mine, x = deployed(method)[0], scale(torch.from_numpy(streams[0][0]))
    held, seen, rows = copy(mine), x.clone(), [part.clone() for part in shards[0]]
    state = method.predictor.start(method, mine, shards[0])
    begun = copy(state)
    with torch.no_grad():
        method.predictor.stream(method, mine, state, x, views_of(method, 0))
    assert same(mine, held)
    assert all(torch.equal(a, b) or a.isnan().all() for a, b in zip(flat(state), flat(begun), strict=True))
    assert torch.equal(x, seen)
    assert all(torch.equal(part, row) for part, row in zip(shards[0], rows, strict=True))


def flat(value):
    return list(tree.flatten(value).values())


@every_method
def test_a_stream_equals_its_steps_and_its_chunks(name):
    method, (shards, streams) = ALL[name](NET), make_data()
    predictor = method.predictor
    whole, last = answer(method, 1)
    if getattr(predictor, "batch", 1) > 1:
        pytest.skip("samples of a batch share one weight, so they cannot be told apart from it")
    ways = {"steps": answer(method, 1, "stream_by_steps")}
    for size in (1, 2, 4):
        mine, x = deployed(method)[1], scale(torch.from_numpy(streams[1][0]))
        state, parts = predictor.start(method, mine, shards[1]), []
        for first in range(0, SAMPLES, size):
            with torch.no_grad():
                part, state = predictor.stream(method, mine, state, x[first : first + size], views_of(method, 1, first))
            parts.append(part)
        joined = {column: torch.cat([part.info[column] for part in parts]) for column in whole.info}
        ways[f"chunks of {size}"] = replace(whole, logits=torch.cat([p.logits for p in parts]), info=joined), state
    for way, (answers, after) in ways.items():
        torch.testing.assert_close(answers.logits, whole.logits, rtol=1e-5, atol=1e-5, msg=lambda m, way=way: way + m)
        for column, values in whole.info.items():
            # where the slope is next to nothing, Adam makes steps of its rounding; the logits hardly feel it there
            torch.testing.assert_close(answers.info[column], values, rtol=0, atol=1e-3)
        for a, b in zip(flat(after), flat(last), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# Other valid values, by the name of the hyperparameter; the first that differs is tried. True and False are swapped.
OTHERS = {
    "alpha": (0.3,),
    "batch": (3,),
    "beta": (0.3,),
    "beta1": (0.5,),
    "beta2": (0.9,),
    "eps": (0.1,),
    "grid": (0.3,),
    "inner_lr": (0.1,),
    "k": (3,),
    "lam": (0.1,),
    "lr": (0.02,),
    "m": (1,),
    "probe_lr": (0.02,),
    "probe_steps": (1,),
    "scale": (0.1,),
    "steps": (2,),
    "then": (Memo(views=2),),
    "threshold": (1.0,),
    "tilt": (-1.0,),
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
}


def list_hyper(value, path=""):
    """Every hyperparameter of a method or of a part of it, by dotted name."""
    for each in fields(value):
        inner = getattr(value, each.name)
        if each.name != "net":
            yield from list_hyper(inner, f"{path}{each.name}.") if is_dataclass(inner) else [path + each.name]


def change(value, path):
    """The method with another value of one hyperparameter."""
    first, _, rest = path.partition(".")
    now = getattr(value, first)
    if rest:
        return replace(value, **{first: change(now, rest)})
    others = (not now,) if isinstance(now, bool) else OTHERS.get(first, ())
    other = next((other for other in others if other != now), None)
    assert other is not None, f"give another value of {first} in OTHERS"
    return replace(value, **{first: other})


@pytest.mark.parametrize(("name", "path"), [(name, path) for name in ALL for path in list_hyper(ALL[name](NET))])
def test_every_hyperparameter_changes_the_answers(name, path):
    method = ALL[name](NET)
    other = change(method, path)
    differs = any(not torch.equal(answer(method, k)[0].logits, answer(other, k)[0].logits) for k in range(3))
    assert differs == ((name, path) not in IDLE)


def test_the_idle_hyperparameters_are_still_there():
    assert all(path in list_hyper(ALL[name](NET)) for name, path in IDLE)
