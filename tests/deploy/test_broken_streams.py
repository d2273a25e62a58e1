"""Streams that break methods which adapt, in public reports: noise, black frames, one class for long, a switch."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from fedthe.deploy.bundle import Bundle, take_input
from fedthe.deploy.export import finish_bundle
from fedthe.deploy.join import make_shard
from fedthe.deploy.online import Online
from fedthe.engine.fit import Optimizer
from fedthe.engine.train import deploy, train
from fedthe.engine.visit import Training
from fedthe.methods import METHODS
from fedthe.methods.compose import compose
from fedthe.methods.predictor import Forward
from fedthe.methods.tent import Tent
from tiny_net import Normed

SETTINGS = Training(
    rounds=6, local_epochs=2, batch=16, flip=False, crop=0, optimizer=Optimizer(lr=0.1, momentum=0.9)
)  # fmt: skip
CALM, ODD, AFTER = 100, 300, 200  # samples of a stream


def make_rows(count, seed, classes=(0, 1, 2)):
    """Stripes in two directions, and a chess board, in noise."""
    draws = np.random.default_rng(seed)
    labels = draws.choice(classes, count)
    down, across = np.mgrid[:16, :16] // 2
    patterns = 120 * np.stack([down % 2, across % 2, (down + across) % 2])[labels]
    return np.clip(patterns[..., None] + draws.normal(60, 60, (count, 16, 16, 3)), 0, 255).astype(np.uint8), labels


@cache
def make_bundle(name):
    """Of a client that mostly has two of the classes."""
    shards = [make_shard(*make_rows(250, k, [0, 0, 0, 1, 1, 1, 2]), 3, 0) for k in range(2)]
    shards.append(make_shard(*make_rows(250, 2, [2, 2, 2, 0, 1]), 3, 0))
    method = compose(Normed(3, size=16), METHODS[name])
    mine = deploy(method, shards, SETTINGS, 0, train(method, shards, SETTINGS, 0))[0]
    takes = take_input(shards[0].x.numpy(), None)
    return finish_bundle(Bundle("client", name, method, ("a", "b", "c"), takes, 0, 0, {}, {}), mine, shards[0])


def make_odd(kind):
    if kind == "noise":
        return np.random.default_rng(7).integers(0, 256, (ODD, 16, 16, 3)).astype(np.uint8)
    if kind == "black":
        return np.zeros((ODD, 16, 16, 3), dtype=np.uint8)
    return make_rows(ODD, 8, {"one class": [1], "switch": [2]}[kind])[0]


def play(bundle, kind, monitor=True):
    """A stream that is calm, then odd, then calm: the share of right answers at its end, and the statuses by part."""
    own = [0, 0, 0, 1, 1, 1, 2]
    (before, _), (after, labels) = make_rows(CALM, 11, own), make_rows(AFTER, 13, own)
    stream, online = np.concatenate([before, make_odd(kind), after]), Online(bundle, monitor=monitor)
    answers = []
    for first in range(0, len(stream), 16):
        answers += online.predict_batch(stream[first : first + 16])
    right = np.mean([each.index for each in answers[-AFTER:]] == labels)
    statuses = [each.status for each in answers]
    return right, statuses[:CALM], statuses[CALM : CALM + ODD], statuses[CALM + ODD :]


def break_tent():
    """With a rate of learning at which noise ruins it."""
    bundle = make_bundle("tent")
    return replace(bundle, method=replace(bundle.method, predictor=Tent(lr=0.2)))


def test_a_collapse_is_seen_and_undone():
    broken, *_ = play(break_tent(), "noise", monitor=False)
    assert broken < 0.6  # it answers one class from then on
    right, before, odd, after = play(break_tent(), "noise")
    assert right > 0.9
    assert "collapsed" not in before
    assert "collapsed" in odd
    assert after[-1] != "collapsed"


@pytest.mark.parametrize("name", ["fedthe", "fedthe_regime", "tent", "t3a", "ttt"])
@pytest.mark.parametrize("kind", ["noise", "black", "one class", "switch"])
def test_what_is_odd_is_seen_and_forgotten(name, kind):
    right, before, odd, after = play(make_bundle(name), kind)
    assert right > 0.9
    assert before.count("calm") >= 95
    assert "drifting" in odd[:50]
    if kind in ("one class", "switch"):
        assert "collapsed" not in odd
    assert "collapsed" not in after[-50:]


def test_a_fallback_answers_without_adaptation():
    """While it is collapsed, answers are those of the model as it was deployed."""
    bundle = break_tent()
    plain = replace(bundle, method=replace(bundle.method, predictor=Forward()), parts=bundle.parts)
    noise = make_odd("noise")
    online, fixed = Online(bundle), Online(replace(plain, parts={**bundle.parts, "state": {}}), monitor=False)
    fell = 0
    for first in range(0, ODD, 16):
        for got, safe in zip(
            online.predict_batch(noise[first : first + 16]), fixed.predict_batch(noise[first : first + 16]), strict=True
        ):
            if got.status == "collapsed":
                np.testing.assert_allclose(got.probabilities, safe.probabilities, atol=1e-6)
                assert "without adaptation" in got.why
                fell += 1
    assert fell > 10


def test_one_by_one_and_batches_agree_through_a_reset():
    """A method without a window, whose state is reset in the middle of a batch."""
    from fedthe.deploy import online as module

    bundle, rows = make_bundle("fedthe_regime"), make_odd("noise")[:80]
    seen = []

    class Resets(module.Monitor):
        def watch(self, *observed):
            seen.append(1)
            verdict = super().watch(*observed)
            return verdict._replace(reset=len(seen) % 80 == 30)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Monitor", Resets)
        batch = [each.weight for each in Online(bundle).predict_batch(rows)]
        one_by_one = [each.weight for each in map(Online(bundle).predict, rows)]
    plain = [each.weight for each in Online(bundle).predict_batch(rows)]
    np.testing.assert_allclose(batch, one_by_one, atol=1e-6)
    assert np.abs(np.array(batch) - plain)[30:].max() > 1e-4
    np.testing.assert_allclose(batch[:30], plain[:30], atol=1e-6)
