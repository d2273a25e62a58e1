"""A bundle answers as the benchmark does: one by one, in batches, from a saved state."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from PIL import Image

from deployed import make_bundle, make_method, make_model, stack_probabilities
from fedthe import tree
from fedthe.deploy.monitor import make_reference
from fedthe.deploy.online import Online, predict_together
from fedthe.engine.evaluate import answer_one, begin_one, make_samples
from fedthe.engine.visit import Question
from fedthe.errors import InputError
from fedthe.methods import METHODS
from fedthe.methods.base import Answers
from fedthe.methods.predictor import Predictor
from helpers import fails
from trained_methods import make_data, make_federation

CLOSE = 1e-5


def stream(count=24):
    """Samples of client 0, more than the longest window of a method with few."""
    federation = make_federation()
    pool = federation.pool.x
    return pool[np.arange(count) * 5 % len(pool)]


def benchmark(name, x, test="mixture"):
    """The probabilities that the benchmark's own evaluation gives."""
    method, mine, shard = make_method(name), make_model(name), make_data()[0][0]
    answered = answer_one(method, mine, begin_one(method, mine, shard), Question(0, x, (0, test, 0)))
    weights = np.exp(answered.logits - answered.logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def is_windowed(name):
    return (make_method(name).predictor.window or 1) > 1


@pytest.mark.parametrize("name", METHODS)
def test_every_method_answers_as_in_the_benchmark(name):
    slow = make_method(name).predictor.passes[0] > 10
    x = stream(6 if slow else 24)
    expected = benchmark(name, x)
    online = Online(make_bundle(name), "mixture")
    batch = online.predict_batch(x)
    np.testing.assert_allclose(stack_probabilities(batch), expected, atol=CLOSE)
    assert [each.label for each in batch] == [online.classes[i] for i in expected.argmax(-1)]
    if not is_windowed(name):
        one_by_one = online.stream("mixture")
        np.testing.assert_allclose(stack_probabilities(map(one_by_one.predict, x)), expected, atol=CLOSE)
        chunks = online.stream("mixture")
        parts = [stack_probabilities(chunks.predict_batch(part)) for part in (x[:1], x[1:4], x[4:])]
        np.testing.assert_allclose(np.concatenate(parts), expected, atol=CLOSE)
    assert online.position == len(x)


@pytest.mark.parametrize("name", [name for name in METHODS if is_windowed(name)])
def test_a_window_is_answered_from_what_there_is_of_it(name):
    """One by one: every sample with those of its window before it, from the state at the window's beginning."""
    method, mine, shard, x = make_method(name), make_model(name), make_data()[0][0], stream(23)
    window, state, expected = method.predictor.window, begin_one(method, mine, shard), []
    for first in range(0, len(x), window):
        for last in range(first + 1, min(first + window, len(x)) + 1):
            samples = make_samples(method, torch.from_numpy(x[first:last]), (0, "mixture", 0), first)
            with torch.no_grad():
                answers, after = method.answer(mine, {**state}, samples)
            expected.append(answers.logits[-1].double().softmax(-1).numpy())
        state = after
    online = Online(make_bundle(name), "mixture", monitor=False)
    np.testing.assert_allclose(stack_probabilities(map(online.predict, x)), np.stack(expected), atol=CLOSE)


@pytest.mark.parametrize("name", ["fedthe", "fedthe_regime", "fedthe_plus", "ttt", "t3a", "tent", "knn_per", "em"])
def test_a_saved_state_continues_the_stream(name):
    x = stream(12)
    first, later = Online(make_bundle(name)), Online(make_bundle(name))
    first.predict_batch(x[:5])
    saved = first.state()
    assert isinstance(saved, bytes)
    rest = first.predict_batch(x[5:])
    later.restore(saved)
    again = later.predict_batch(x[5:])
    np.testing.assert_array_equal(stack_probabilities(again), stack_probabilities(rest))
    assert later.state() == first.state()
    assert [each.status for each in again] == [each.status for each in rest]


def test_streams_do_not_touch_each_other():
    x = stream(10)
    alone = stack_probabilities(Online(make_bundle("fedthe")).predict_batch(x))
    one = Online(make_bundle("fedthe"))
    other = one.stream()
    mixed = []
    for sample in x:
        other.predict(255 - sample)
        mixed.append(one.predict(sample))
    np.testing.assert_allclose(stack_probabilities(mixed), alone, atol=CLOSE)
    one.reset()
    np.testing.assert_allclose(stack_probabilities(one.predict_batch(x)), alone, atol=CLOSE)
    assert one.position == 10


def test_a_name_of_a_stream_keys_its_views():
    x, online = stream(3), Online(make_bundle("memo_p"))
    one, same, other = (stack_probabilities(online.stream(name).predict_batch(x)) for name in ("a", "a", "b"))
    np.testing.assert_array_equal(one, same)
    assert np.abs(one - other).max() > 0


def test_the_same_picture_in_every_form(tmp_path):
    pixels = stream(1)[0]
    Image.fromarray(pixels).save(tmp_path / "one.png")
    forms = [
        pixels,
        torch.from_numpy(pixels),
        torch.from_numpy(pixels).movedim(-1, 0),
        Image.fromarray(pixels),
        tmp_path / "one.png",
        str(tmp_path / "one.png"),
        (tmp_path / "one.png").read_bytes(),
    ]
    answers = [Online(make_bundle("fedthe")).predict(form) for form in forms]
    for answer in answers[1:]:
        np.testing.assert_array_equal(answer.probabilities, answers[0].probabilities)
    assert Online(make_bundle("fedthe")).predict(np.kron(pixels, np.ones((2, 2, 1), dtype=np.uint8))).label


def test_an_answer_says_how_and_why():
    answer = Online(make_bundle("fedthe")).predict(stream(1)[0])
    assert answer.label == ("dark", "grey", "bright")[answer.index]
    assert answer.probability == answer.probabilities.max()
    np.testing.assert_allclose(answer.probabilities.sum(), 1)
    assert 0 <= answer.weight <= 1
    assert answer.heads is not None
    assert "head" in answer.why
    plain = Online(make_bundle("fedavg")).predict(stream(1)[0])
    assert plain.weight is None
    assert plain.heads is None
    assert plain.why == "one model answers"


def test_a_stream_that_nobody_watches_is_not_called_calm():
    bundle = make_bundle("fedthe")
    rows = Online(bundle).observe(stream(24))
    signals = {name: np.array([each.signals[name] for each in rows]) for name in rows[0].signals}
    answers, safes = (np.array([getattr(each, of).argmax() for each in rows]) for of in ("adapted", "safe"))
    arrays = make_reference(signals, answers, safes, len(bundle.classes)).arrays()
    reference = tree.unflatten({name: torch.from_numpy(array) for name, array in arrays.items()})
    watched = replace(bundle, parts={**bundle.parts, "monitor": reference})
    for online, status in (
        (Online(watched), "calm"),
        (Online(watched, monitor=False), "unwatched"),
        (Online(bundle), "unwatched"),
    ):
        assert online.predict(stream(1)[0]).status == status


@pytest.mark.parametrize(
    ("sample", "word"),
    [
        (np.zeros((16, 16, 3), dtype=np.float32), "uint8"),
        (np.full((16, 16, 3), np.nan), "uint8"),
        (np.zeros(5, dtype=np.uint8), "shape"),
        (np.zeros((0, 4, 3), dtype=np.uint8), "shape"),
        (np.zeros((4, 4, 3, 2), dtype=np.uint8), "shape"),
        ("no such file.png", "does not exist"),
        (b"no picture", "not a readable image"),
        (None, "must be an array"),
        ([[1, 2], [3]], "of one shape"),
        (object(), "must be an array"),
    ],
)
def test_bad_samples_leave_the_stream_as_it_is(sample, word):
    online = Online(make_bundle("fedthe"))
    online.predict_batch(stream(3))
    before = online.state()
    fails(lambda: online.predict(sample), word)
    fails(lambda: online.predict_batch([stream(1)[0], sample]), word)
    assert online.state() == before
    assert online.position == 3


@dataclass(frozen=True)
class Fragile(Predictor):
    """Counts samples; a bright one breaks the answer, a dark one the state, a grey one its code."""

    window = None

    def start(self, method, mine, shard):
        return {"seen": torch.zeros(1)}

    def answer(self, method, mine, state, samples):
        level = samples.x.mean((1, 2, 3))
        logits = method.logits(mine, samples.x)
        logits = torch.where(level[:, None] > 0.9, torch.nan, logits)
        seen = state["seen"] + len(samples.x)
        if (level.abs() < 0.01).any():
            raise ArithmeticError("grey")
        return Answers(logits), {"seen": torch.where((level < -0.9).any(), torch.inf, seen)}


def test_what_is_not_finite_is_refused_and_the_state_kept():
    bundle = make_bundle("fedavg")
    parts = {**bundle.parts, "state": {"seen": torch.zeros(1)}}
    online = Online(replace(bundle, method=replace(bundle.method, predictor=Fragile()), parts=parts))
    good = np.full((16, 16, 3), 180, dtype=np.uint8)
    online.predict(good)
    before = online.state()
    for level, word in ((255, "not finite"), (0, "not finite"), (128, "grey")):
        fails(lambda level=level: online.predict(np.full((16, 16, 3), level, dtype=np.uint8)), word)
        fails(lambda level=level: online.predict_batch([good, np.full((16, 16, 3), level, dtype=np.uint8)]), word)
        assert online.state() == before
    online.predict(good)
    assert online.position == 2


def test_a_state_of_something_else_is_refused():
    online = Online(replace(make_bundle("fedthe"), id="one"))
    online.predict(stream(1)[0])
    saved = online.state()
    other = Online(replace(make_bundle("fedthe"), id="two"))
    fails(lambda: other.restore(saved), "another bundle")
    fails(lambda: Online(replace(make_bundle("fedthe_regime"), id="one")).restore(saved), "not the state")
    for bad in (b"", b"nonsense", saved[:40], saved[:-3], b"\xff" * 100):
        before = online.state()
        fails(lambda bad=bad: online.restore(bad), "not the state of a stream")
        assert online.state() == before


def test_nothing_is_answered_without_samples():
    online = Online(make_bundle("fedthe"))
    assert online.predict_batch([]) == []
    assert online.position == 0


@pytest.mark.parametrize("name", METHODS)
def test_streams_side_by_side_answer_as_alone(name):
    """Each at its own place, some of their samples refused."""
    slow = make_method(name).predictor.passes[0] > 10
    x, bundle = stream(9), make_bundle(name)
    alone, together = ([Online(bundle).stream(f"s{i}") for i in range(3)] for _ in range(2))
    for k, (one, other) in enumerate(zip(alone, together, strict=True)):
        for sample in x[:k]:
            one.predict(sample)
            other.predict(sample)
    for first in range(0, 3 if slow else 9, 3):
        samples = [*x[first : first + 2], "no such file" if first == 3 else x[first + 2]]
        for one, sample, found in zip(alone, samples, predict_together(together, samples), strict=True):
            if isinstance(sample, str):
                assert "does not exist" in str(found)
                continue
            expected = one.predict(sample)
            np.testing.assert_allclose(found.probabilities, expected.probabilities, atol=CLOSE)
            assert found.weight == (None if expected.weight is None else pytest.approx(expected.weight, abs=CLOSE))
            assert (found.status, found.label) == (expected.status, expected.label)
    assert [one.position for one in alone] == [other.position for other in together]


def test_a_sample_that_breaks_a_model_breaks_no_other_stream():
    bundle = make_bundle("fedavg")
    parts = {**bundle.parts, "state": {"seen": torch.zeros(1)}}
    bundle = replace(bundle, method=replace(bundle.method, predictor=Fragile()), parts=parts)
    good, bright, grey = (np.full((16, 16, 3), level, dtype=np.uint8) for level in (180, 255, 128))
    streams = [Online(bundle) for _ in range(3)]
    first = predict_together(streams, [good, bright, good])
    assert [isinstance(each, InputError) for each in first] == [False, True, False]
    second = predict_together(streams, [good, grey, good])
    assert [isinstance(each, InputError) for each in second] == [False, True, False]
    assert [each.position for each in streams] == [2, 0, 2]
