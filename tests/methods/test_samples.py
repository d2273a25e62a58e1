"""Windows of a stream: predictors that answer several samples together, carry a state, or scan by themselves.

Each is judged by a literal loop over its stream, in both engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch

from fedthe import tree
from fedthe.engine.evaluate import AHEAD, make_samples
from fedthe.engine.loop import Loop
from fedthe.engine.stack import Stack
from fedthe.engine.train import deploy_some
from fedthe.engine.visit import Question, Run
from fedthe.methods import compose
from fedthe.methods.base import Answers, Predictor, Samples
from fedthe.methods.finetune import FineTune
from fedthe.methods.losses import entropy
from fedthe.methods.samples import join
from fedthe.types import scale
from helpers import fails
from trained_methods import CLASSES, NET, SETTINGS, make_data, make_federation, trained

ENGINES = {"loop": Loop, "stack": Stack, "stack of two streams at a time": lambda: Stack(rows=2)}
every_engine = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)


def tell(logits, **columns) -> Answers:
    """Answers whose logits an engine passes on."""
    return Answers(logits, {f"logit {c}": logits[:, c] for c in range(CLASSES)} | columns)


@dataclass(frozen=True)
class Standardize(Predictor):
    """Answers by features that are standardized over the window."""

    window = 4
    floor: float = 0.1

    def answer(self, method, mine, state, samples):
        h = method.net.features(mine["body"], samples.x)
        standardized = (h - h.mean(0)) / (h.std(0, correction=0) + self.floor)
        return tell(method.net.head(mine["head"], standardized)), state


@dataclass(frozen=True)
class MinimizeEntropy(Predictor):
    """Before it answers a window, it moves the head by a step on the mean entropy of the window, and keeps it."""

    window: int = 4  # a hyperparameter
    lr: float = 0.5

    def start(self, method, mine, shard):
        return {"head": mine["head"]}

    def answer(self, method, mine, state, samples):
        h = method.net.features(mine["body"], samples.x)

        def mean_entropy(head):
            return entropy(method.net.head(head, h)).mean()

        gradient = torch.func.grad(mean_entropy)(state["head"])
        head = tree.map_leaves(lambda leaf, g: leaf - self.lr * g, state["head"], gradient)
        return tell(method.net.head(head, h)), {"head": head}


@dataclass(frozen=True)
class Momentum(Predictor):
    """One sample at a time (the default window): its logits are drawn to a running mean of those before."""

    rate: float = 0.3

    def start(self, method, mine, shard):
        return {"mean": shard.counts / shard.counts.sum(), "seen": torch.zeros((), dtype=torch.int64)}

    def answer(self, method, mine, state, samples):
        assert len(samples.x) == 1
        logits = method.logits(mine, samples.x)
        mean = self.rate * logits[0] + (1 - self.rate) * state["mean"]
        return tell(logits - mean, seen=state["seen"][None]), {"mean": mean, "seen": state["seen"] + 1}


@dataclass(frozen=True)
class ScanningMomentum(Momentum):
    """The same, answering any number: one pass through the network, and then a scan over logits and a column more."""

    window = None

    def answer(self, method, mine, state, samples):
        logits = method.logits(mine, samples.x)
        return samples.scan(self.step, method, mine, state, logits, samples.x.mean((1, 2, 3)))

    def step(self, method, mine, state, views, logits, brightness):
        mean = self.rate * logits[0] + (1 - self.rate) * state["mean"]
        answers = tell(logits - mean, seen=state["seen"][None], brightness=brightness)
        return answers, {"mean": mean, "seen": state["seen"] + 1}


@dataclass(frozen=True)
class Views(Predictor):
    """Answers a window by the mean over the augmented views of its samples, and of every single one beside it."""

    window = 3
    augments = 2, 2

    def answer(self, method, mine, state, samples):
        seen = samples.views(torch.arange(len(samples.x)))  # [w, steps, views, c, h, w]
        logits = method.logits(mine, seen.flatten(0, 2)).unflatten(0, seen.shape[:3]).mean((0, 1, 2))
        single = samples.each(self.one, method, mine, samples.x)
        return tell(logits + single), state

    def one(self, method, mine, views, x):
        return method.logits(mine, views.flatten(0, 1)).mean(0, keepdim=True) + method.logits(mine, x)


LENGTHS = (1, 3, 4, 5, 6, 8, 11, 3)  # few are multiples of a window
ROWS = (0, 1, 2, 0, 1, 2, 1, 2)


@cache
def world():
    """Every client deployed, and questions of all lengths to them."""
    shards, method = make_data()[0], compose(NET, FineTune())
    states = deploy_some(method, Run(0, shards), SETTINGS, trained(method.training), Loop(), range(3))
    federation = make_federation()
    images = [
        np.concatenate([federation.inputs(federation.tests[test][k]) for test in ("original", "ooc", "mixture")])
        for k in range(3)
    ]
    parts = enumerate(zip(ROWS, LENGTHS, strict=True))
    questions = [Question(row, images[row][i : i + n], (0, "test", i)) for i, (row, n) in parts]
    assert [len(asked.x) for asked in questions] == list(LENGTHS)
    return states, shards, questions


def answer_all(predictor, engine):
    """The logits [n, classes] and other columns of every question, as an engine answers it."""
    states, shards, questions = world()
    answered = engine.answer(compose(NET, (FineTune(), predictor)), states, shards, questions)
    logits = []
    for each, asked in zip(answered, questions, strict=True):
        columns = [torch.from_numpy(each.info.pop(f"logit {c}")) for c in range(CLASSES)]
        logits.append(torch.stack(columns, 1))
        assert each.finite
        assert each.classes.tolist() == logits[-1].argmax(1).tolist()
        assert len(logits[-1]) == len(asked.x)
    return logits, [each.info for each in answered]


def assert_close(ones, others, tolerance=2e-5):
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def list_streams():
    """Every question literally: the client's state, its shard, and the images x [n, c, h, w]."""
    states, shards, questions = world()
    for asked in questions:
        yield tree.take(states, asked.row), shards[asked.row], scale(torch.from_numpy(asked.x))


def cut(x, size):
    return [x[first : first + size] for first in range(0, len(x), size)]


@every_engine
def test_a_window_is_standardized_together(engine):
    expected = []
    for mine, _, x in list_streams():
        rows = []
        for part in cut(x, 4):
            h = NET.features(mine["body"], part)
            mean = sum(h) / len(h)
            deviation = (sum((one - mean) ** 2 for one in h) / len(h)).sqrt()
            rows += [NET.head(mine["head"], ((one - mean) / (deviation + 0.1))[None]) for one in h]
        expected.append(torch.cat(rows))
    logits, _ = answer_all(Standardize(), engine())
    assert_close(logits, expected)
    other, _ = answer_all(Standardize(floor=1.0), engine())
    assert not torch.allclose(logits[2], other[2])


@pytest.mark.parametrize("size", [1, 2, 4, 100])
@every_engine
def test_a_window_tunes_the_head_for_those_after_it(size, engine):
    expected = []
    for mine, _, x in list_streams():
        head, rows = mine["head"]["out"].clone(), []
        for part in cut(x, size):
            h = NET.features(mine["body"], part)
            head.requires_grad_()
            doubt = sum(-(p * p.log()).sum() for p in (h @ head.T).softmax(-1)) / len(h)
            head = (head - 0.5 * torch.autograd.grad(doubt, head)[0]).detach()
            rows.append(h @ head.T)
        expected.append(torch.cat(rows))
    logits, _ = answer_all(MinimizeEntropy(size), engine())
    assert_close(logits, expected)


@pytest.mark.parametrize("kind", [Momentum, ScanningMomentum])
@every_engine
def test_a_state_goes_from_sample_to_sample(kind, engine):
    expected, brightness = [], []
    for mine, shard, x in list_streams():
        mean, rows = shard.counts / shard.counts.sum(), []
        for one in x:
            logits = NET.logits(mine, one[None])[0]
            mean = 0.3 * logits + 0.7 * mean
            rows.append(logits - mean)
        expected.append(torch.stack(rows))
        brightness.append(x.mean((1, 2, 3)))
    logits, info = answer_all(kind(), engine())
    assert_close(logits, expected)
    for found, n in zip(info, LENGTHS, strict=True):
        assert found["seen"].tolist() == list(range(n))
    if kind is ScanningMomentum:
        assert_close([torch.from_numpy(each["brightness"]) for each in info], brightness)


@every_engine
def test_a_window_sees_the_views_of_its_own_samples(engine):
    expected, questions = [], world()[2]
    for asked, (mine, _, x) in zip(questions, list_streams(), strict=True):
        method = compose(NET, (FineTune(), Views()))
        seen = make_samples(method, torch.from_numpy(asked.x), asked.path).views(torch.arange(len(x)))
        rows = []
        for first in range(0, len(x), 3):
            window = range(first, min(first + 3, len(x)))
            of_views = [[NET.logits(mine, seen[i, s]).mean(0) for s in range(2)] for i in window]
            together = sum(sum(each) / 2 for each in of_views) / len(window)
            rows += [together + sum(of_views[i - first]) / 2 + NET.logits(mine, x[i : i + 1])[0] for i in window]
        expected.append(torch.stack(rows))
    logits, _ = answer_all(Views(), engine())
    assert_close(logits, expected)


def test_streams_do_not_depend_on_those_beside_them():
    states, shards, questions = world()
    method = compose(NET, (FineTune(), MinimizeEntropy()))
    together = Stack().answer(method, states, shards, questions)
    for asked, found in zip(questions, together, strict=True):
        (alone,) = Stack().answer(method, states, shards, [asked])
        assert all((alone.info[name] == found.info[name]).all() for name in found.info)


def test_windows_of_any_size_are_one_window_where_the_stream_is_shorter():
    whole, _ = answer_all(MinimizeEntropy(11), Loop())
    longer, _ = answer_all(MinimizeEntropy(1000), Loop())
    assert_close(whole, longer, 0)


# Samples themselves


def make_plain(n=10, views=2):
    x = torch.arange(float(n))[:, None, None, None]
    return Samples(x, lambda positions: x[positions][:, None, None].expand(-1, 1, views, -1, -1, -1))


def add_up(method, mine, state, views, x, other):
    """x + other, the sum of views and how many came before."""
    n = len(x)
    info = {"views": views.sum((1, 2, 3, 4, 5)), "size": torch.full((n,), n), "before": state["n"].expand(n)}
    return Answers((x[:, 0, 0, 0] + other)[:, None], info), {"n": state["n"] + n}


@pytest.mark.parametrize("window", [1, 3, 5, 10, 11])
def test_a_scan_hands_each_window_its_rows_and_the_state_before(window):
    samples, other = make_plain(), 100 * torch.arange(10.0)
    answers, state = samples.scan(add_up, None, {}, {"n": torch.tensor(5)}, samples.x, other, window=window)
    assert answers.logits[:, 0].tolist() == [101 * i for i in range(10)]
    assert answers.info["views"].tolist() == [2 * i for i in range(10)]
    assert answers.info["before"].tolist() == [5 + i // window * window for i in range(10)]
    assert answers.info["size"].tolist() == [min(window, 10 - i // window * window) for i in range(10)]
    assert int(state["n"]) == 15


def test_each_hands_every_sample_its_rows_and_views():
    samples = make_plain()
    columns = samples.x, torch.arange(10.0)
    found = samples.each(lambda method, mine, views, x, y: (views.sum() + x.sum() + y)[:, None], None, {}, *columns)
    assert found[:, 0].tolist() == [4 * i for i in range(10)]


def test_columns_of_unequal_length_are_refused():
    samples = make_plain()
    with pytest.raises(ValueError, match="zip"):
        samples.scan(add_up, None, {}, {"n": torch.tensor(0)}, samples.x, torch.zeros(4), window=3)
    with pytest.raises(ValueError, match="zip"):
        samples.each(lambda *given: given[-1], None, {}, samples.x, torch.zeros(4))


def test_views_are_those_of_the_position_in_the_stream():
    """Drawn in any order, and over the edges of the blocks in which they are drawn."""
    pixels = torch.from_numpy(make_federation().pool.x[: 2 * AHEAD + 3])
    method = compose(NET, Views())
    whole = make_samples(method, pixels, (0, "test")).views(torch.arange(len(pixels)))
    assert whole.shape == (len(pixels), 2, 2, 3, NET.size, NET.size)
    some = torch.tensor([AHEAD, 0, 2 * AHEAD + 1, AHEAD - 1, 0])
    assert torch.equal(make_samples(method, pixels, (0, "test")).views(some), whole[some])
    assert not torch.equal(whole[0, 0, 0], whole[0, 0, 1])
    none = make_samples(compose(NET, ()), pixels, (0, "test")).views(some)
    assert none.shape == (5, 0, 0, 3, NET.size, NET.size)


def test_columns_that_differ_between_windows_are_refused():
    answers = [Answers(torch.zeros(1, 3), {"e": torch.zeros(1)}), Answers(torch.zeros(1, 3))]
    fails(lambda: join(answers), "the same columns of info for every sample")
