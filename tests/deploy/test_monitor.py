from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles_monitor as oracles
from fedthe.deploy.monitor import (
    AS_BEFORE,
    CAP,
    COLLAPSES,
    FEWEST,
    SIGNALS,
    UNWATCHED,
    Monitor,
    Reference,
    Verdict,
    describe_signal,
    find_limit,
    find_variance,
    make_reference,
)
from fedthe.errors import InputError

CLASSES = 10
MIX = np.array([0.3, 0.25, 0.15, 0.1, 0.08, 0.05, 0.03, 0.02, 0.01, 0.01])  # of the client's training


# Streams, as (signals, answer, safe, probability) for each sample.


def draw(draws, rows, mix=MIX, entropy=0.5, gap=0.0, weight=0.2, apart=0.05, one=None, sure=0.8):
    """A stream of a two-head method. `one`: the only class that is answered."""
    labels = draws.choice(CLASSES, rows, p=mix)
    safes = np.where(draws.random(rows) < apart, (labels + 1) % CLASSES, labels)
    answers = labels if one is None else np.full(rows, one)
    weights = correlate(draws, rows, 0.7)
    return [
        (
            {
                "entropy": float(draws.gamma(2, entropy / 2)),
                "surprise": float(-np.log(MIX[answers[i]])),
                "gap": float(gap + draws.normal()),
                "weight": float(1 / (1 + np.exp(-weights[i])) * 2 * weight),
            },
            int(answers[i]),
            int(safes[i]),
            sure,
        )
        for i in range(rows)
    ]


def correlate(draws, rows, alike):
    """Standard normal values, each with this correlation with the one before."""
    values = draws.normal(size=rows)
    for i in range(1, rows):
        values[i] = alike * values[i - 1] + np.sqrt(1 - alike**2) * values[i]
    return values


def refer(samples):
    signals, answers, safes, _ = zip(*samples, strict=True)
    columns = {name: np.array([each[name] for each in signals]) for name in signals[0]}
    return make_reference(columns, np.array(answers), np.array(safes), CLASSES)


@lru_cache
def usual(rows=300):
    return refer(draw(np.random.default_rng(1), rows))


def watch_all(monitor, samples):
    return [monitor.watch(*sample) for sample in samples]


def seen(verdicts, status="drifting"):
    """Samples until the status."""
    return next((i + 1 for i, verdict in enumerate(verdicts) if verdict.status == status), np.inf)


# Against the literal version.


@st.composite
def cases(some):
    """A reference and a stream of few different values, so that there are ties, runs and collapses."""
    draws = np.random.default_rng(some(st.integers(0, 2**32)))
    rows, classes = some(st.integers(FEWEST, 60)), some(st.integers(2, 4))
    names = some(st.lists(st.sampled_from(["entropy", "gap", "mine"]), max_size=3, unique=True))
    alike = some(st.sampled_from([0, 0.5, 0.9]))
    apart = some(st.sampled_from([0, 0.1, 0.5]))
    answers = draws.integers(classes, size=rows)
    safes = np.where(draws.random(rows) < apart, (answers + 1) % classes, answers)
    reference = make_reference({n: correlate(draws, rows, alike).round(1) for n in names}, answers, safes, classes)
    samples = []
    for _ in range(some(st.integers(1, 3))):
        shift, apart = some(st.sampled_from([-2, 0, 1])), some(st.sampled_from([0, 0.3, 0.5, 1]))
        one, sure = some(st.booleans()), some(st.sampled_from([0.5, 0.95, 1]))
        for _ in range(some(st.integers(10, 70))):
            answer = 0 if one and draws.random() < 0.97 else int(draws.integers(classes))
            safe = (answer + 1) % classes if draws.random() < apart else answer
            there = {n: round(float(draws.normal() + shift), 1) for n in [*names, "alien"] if draws.random() < 0.9}
            samples.append((there, answer, safe, sure))
    return some(st.sampled_from([reference, reference, None])), samples


@settings(max_examples=200, deadline=None)
@given(cases())
def test_watch_is_the_literal_one(case):
    reference, samples = case
    verdicts = watch_all(Monitor(reference), samples)
    for verdict, (status, reset, fall_back, moved) in zip(verdicts, oracles.watch_all(reference, samples), strict=True):
        assert verdict[:1] + verdict[2:] == (status, reset, fall_back)
        if status == "drifting":
            sentences = [SIGNALS.get(name, [describe_signal(name, i) for i in (0, 1)])[side] for name, side in moved]
            assert verdict.why in sentences
        elif status == "calm":
            assert verdict.why == (AS_BEFORE if reference else UNWATCHED)
        else:
            assert verdict.why in COLLAPSES


@settings(max_examples=50, deadline=None)
@given(cases(), st.integers(0, 200))
def test_restore_continues(case, cut):
    reference, samples = case
    whole, before = Monitor(reference), Monitor(reference)
    every = watch_all(whole, samples)
    watch_all(before, samples[:cut])
    stored = reference and Reference.of(reference.arrays())
    after = Monitor(stored)
    watch_all(after, samples[:7])  # what it saw before is forgotten
    after.restore(before.state())
    assert watch_all(after, samples[cut:]) == every[cut:]
    for name, array in after.state().items():
        np.testing.assert_array_equal(array, whole.state()[name])


def test_charts_are_the_literal_ones():
    for rows in (FEWEST, 77, 300):
        draws, samples = np.random.default_rng(3), draw(np.random.default_rng(2), rows)
        slow = correlate(draws, rows, 0.95) + 2 * draws.normal(size=rows)  # neighbours do not tell how slow
        reference = refer([({**signals, "slow": float(slow[i])}, *rest) for i, (signals, *rest) in enumerate(samples)])
        literal = oracles.literal_charts(reference)
        assert [chart.name for chart in reference.charts] == [*literal]
        for chart in reference.charts:
            values, allowance, limit = literal[chart.name]
            assert chart.allowance == pytest.approx(allowance, rel=1e-9)
            assert chart.limit == pytest.approx(limit, rel=1e-9)
            assert chart.score(values[3]) == pytest.approx(oracles.score(values, values[3]), rel=1e-9)


# Calibration.


def test_false_alarms_are_rare():
    """Under 1 in 1,000 samples, of fresh references and fresh calm streams, with an autocorrelated signal."""
    for rows, most in ((50, 1), (100, 1), (300, 0.5)):
        alarms = samples = 0
        for seed in range(60):
            draws = np.random.default_rng([rows, seed])
            statuses = [v.status for v in watch_all(Monitor(refer(draw(draws, rows))), draw(draws, 500))]
            alarms += sum(a == "calm" and b == "drifting" for a, b in zip(["calm", *statuses], statuses, strict=False))
            samples += len(statuses)
            assert "collapsed" not in statuses
        assert 1000 * alarms / samples < most


def test_charts_wander_as_the_theory_says():
    """the limit holds without sampling error of the reference: one chart passes it about as often as it should."""
    draws = np.random.default_rng(0)
    limit, step = find_limit(1.0, 1), np.zeros(2000)
    passed = 0
    for _ in range(1000):
        step = np.maximum(step + draws.normal(size=2000) - 0.4, 0)
        passed += (step > limit).sum()
        step[step > limit] = 0
    assert 0.7 < passed / (2000 * 1000) / (0.0005 / 2) < 1.4


@pytest.mark.parametrize("alike", [0.0, 0.5, 0.8])
def test_the_long_run_variance_is_not_too_low(alike):
    draws = np.random.default_rng(0)
    found = [find_variance(correlate(draws, 400, alike)) for _ in range(100)]
    true = (1 + alike) / (1 - alike)
    assert 0.9 * true < np.quantile(found, 0.2)
    assert np.median(found) < 1.5 * true


def test_the_long_run_variance_sees_what_neighbours_do_not_tell():
    draws = np.random.default_rng(0)
    found = [find_variance(0.6 * correlate(draws, 1000, 0.95) + 0.8 * draws.normal(size=1000)) for _ in range(50)]
    true = 0.36 * 1.95 / 0.05 + 0.64
    assert np.median(found) == pytest.approx(true, rel=0.3)


def test_slow_signals_get_higher_limits():
    draws = np.random.default_rng(0)
    none = np.zeros(200, dtype=int)
    slow, fast = (make_reference({"x": correlate(draws, 200, a)}, none, none, 2).charts[-1] for a in (0.8, 0))
    assert slow.name == fast.name == "x"
    assert slow.limit > 3 * fast.limit
    assert slow.allowance > fast.allowance


def test_a_signal_that_says_too_little_is_not_watched():
    values, none = np.linspace(0, 1, 100), np.zeros(100, dtype=int)
    assert [chart.name for chart in make_reference({"trend": values}, none, none, 2).charts] == ["change", "repeat"]


def test_a_switch_is_seen_within_50_samples():
    """To another mix of classes, with features nearer to everybody's: nine in ten of 40 streams, most sooner."""
    delays = []
    for seed in range(40):
        draws, monitor = np.random.default_rng(seed), Monitor(usual())
        watch_all(monitor, draw(draws, 100))
        if seen(watch_all(monitor, draw(draws, 1))) > 1:  # it was calm before
            delays.append(seen(watch_all(monitor, draw(draws, 100, mix=np.full(10, 0.1), gap=1.0, weight=0.4))))
    assert len(delays) > 30
    assert np.median(delays) < 25
    assert np.quantile(delays, 0.95) <= 50


# Named streams.


def test_drift_ends_soon_after_a_long_shift():
    draws, monitor = np.random.default_rng(0), Monitor(usual())
    assert watch_all(monitor, draw(draws, 2000, gap=3.0))[-1].status == "drifting"
    back = watch_all(monitor, draw(draws, 200))
    assert seen(back, "calm") < 80
    assert {verdict.status for verdict in back[100:]} == {"calm"}


def test_hysteresis():
    """Between a quarter of the limit and the limit, the stream stays what it was."""
    chart = next(chart for chart in usual().charts if chart.name == "gap")
    for before, after in ((CAP, "drifting"), (0.0, "calm")):
        monitor, middle = Monitor(usual()), Monitor(usual())
        for target, ratio in ((monitor, before), (middle, 0.6)):
            sums = np.zeros((len(usual().charts), 2))
            sums[usual().charts.index(chart), 1] = ratio * chart.limit
            target.restore({**target.state(), "sums": sums})
        monitor.watch({}, 0, 0, 1.0)
        monitor.restore({**monitor.state(), "sums": middle.state()["sums"]})
        assert monitor.watch({}, 1, 1, 1.0).status == after


def test_one_class_for_a_long_time_drifts_but_does_not_collapse():
    draws, monitor = np.random.default_rng(0), Monitor(usual())
    one = np.eye(CLASSES)[2]
    verdicts = watch_all(monitor, draw(draws, 500, mix=one, sure=1.0))
    assert seen(verdicts) <= 50
    assert {verdict.status for verdict in verdicts[50:]} == {"drifting"}
    assert not any(verdict.reset or verdict.fall_back for verdict in verdicts)
    assert verdicts[-1].why == SIGNALS["repeat"][1]


def test_noise_is_seen():
    """Noise images: uncertain answers of any class."""
    draws, monitor = np.random.default_rng(0), Monitor(usual())
    verdicts = watch_all(monitor, draw(draws, 100, mix=np.full(10, 0.1), entropy=1.5, sure=0.2))
    assert seen(verdicts) <= 20
    assert verdicts[-1].why in (SIGNALS["entropy"][1], SIGNALS["surprise"][1])


def test_black_frames_are_seen():
    """the same image again and again, with the commonest class and a common entropy: only repetition is unusual."""
    sample = ({"entropy": 0.4, "surprise": float(-np.log(0.3)), "gap": 0.0, "weight": 0.2}, 0, 0, 0.8)
    verdicts = watch_all(Monitor(usual()), [sample] * 300)
    assert seen(verdicts) <= 50
    assert verdicts[-1] == Verdict("drifting", "the same class is predicted again and again", False, False)


@pytest.mark.parametrize("rows", [0, 30, 300])
def test_collapse_to_one_class(rows):
    """Every 50 samples it asks for a reset, and for safe answers until it has recovered."""
    draws, monitor = np.random.default_rng(0), Monitor(usual(rows) if rows else None)
    watch_all(monitor, draw(draws, 100))
    verdicts = watch_all(monitor, draw(draws, 150, one=1, entropy=1e-4, sure=1.0))
    first = seen(verdicts, "collapsed")
    assert first <= 50
    assert [i + 1 - first for i, verdict in enumerate(verdicts) if verdict.reset] == [0, 50, 100]
    assert all(verdict.fall_back for verdict in verdicts[first - 1 :])
    assert {verdict.why for verdict in verdicts[first - 1 :]} == {COLLAPSES[0]}
    after = watch_all(monitor, draw(draws, 150))
    assert not after[-1].fall_back
    assert not any(verdict.reset for verdict in after[first:])
    assert after[-1].status == "calm"


def test_collapse_by_contradiction():
    """Answers of all classes, but not those of the model without adaptation."""
    verdicts = watch_all(Monitor(usual()), draw(np.random.default_rng(0), 120, apart=1.0))
    assert seen(verdicts, "collapsed") == 50
    assert verdicts[49] == Verdict("collapsed", COLLAPSES[1], True, True)
    assert verdicts[50] == Verdict("collapsed", COLLAPSES[1], False, True)


@pytest.mark.parametrize(("apart", "worst", "best"), [(4, 13, 7), (29, 28, 21)])
def test_collapse_begins_and_ends_by_counts(apart, worst, best):
    """98 rows, so many of them apart: 2.5 or 15 of 50 expected; more than 10, or 4 deviations, above it, or half."""
    none = np.zeros(98, dtype=int)
    reference = make_reference({}, none, (np.arange(98) < apart).astype(int), 2)
    for first, second, resets in ((worst - 1, 0, 0), (worst, best + 1, 2), (worst, best, 1)):
        monitor = Monitor(reference)
        counts = [i < contradicted for contradicted in (first, second) for i in range(50)]
        verdicts = [monitor.watch({}, 0, int(contradicted), 1.0) for contradicted in counts]
        assert sum(verdict.reset for verdict in verdicts) == resets
        assert verdicts[-1].fall_back == (resets == 2)


def test_the_first_sample_repeats_nothing():
    none = np.zeros(100, dtype=int)
    monitor = Monitor(make_reference({}, none, none, 2))
    monitor.watch({}, 0, 0, 1.0)
    assert monitor.state()["sums"].tolist() == [[0, 0], [0, 0]]
    monitor.watch({}, 1, 1, 1.0)
    assert monitor.state()["sums"][1, 0] > 1


def test_contradiction_is_usual_for_some():
    """A method that changes most answers of validation, too, has not collapsed."""
    draws = np.random.default_rng(0)
    reference = refer(draw(draws, 300, apart=0.85))
    verdicts = watch_all(Monitor(reference), draw(draws, 300, apart=0.9))
    assert seen(verdicts, "collapsed") == np.inf


def test_without_a_reference_drift_is_not_watched():
    verdicts = watch_all(Monitor(None), draw(np.random.default_rng(0), 200, gap=5.0, entropy=2.0))
    assert {*verdicts} == {Verdict("calm", UNWATCHED, False, False)}


def test_rounding_makes_no_drift():
    """Values of float32 tie with those of validation."""
    draws = np.random.default_rng(0)
    monitor, plain = Monitor(usual()), Monitor(usual())
    for signals, *rest in draw(draws, 200):
        rounded = {name: np.float32(value * (1 + 1e-6)) for name, value in signals.items()}
        assert monitor.watch({"surprise": rounded["surprise"]}, *rest) == plain.watch(
            {"surprise": signals["surprise"]}, *rest
        )
    np.testing.assert_array_equal(monitor.state()["sums"], plain.state()["sums"])


# Refusals.


@pytest.mark.parametrize(
    "sample",
    [
        ({"entropy": np.nan}, 0, 0, 1.0),
        ({"alien": np.inf}, 0, 0, 1.0),
        ({"entropy": 1.0, "gap": -np.inf}, 0, 0, 1.0),
        ({}, -1, 0, 1.0),
        ({}, 0, CLASSES, 1.0),
        ({}, 0, 0, np.nan),
        ({}, 0, 0, 1.1),
    ],
)
def test_a_refused_sample_changes_nothing(sample):
    monitor = Monitor(usual())
    watch_all(monitor, draw(np.random.default_rng(0), 60))
    before = monitor.state()
    with pytest.raises(InputError):
        monitor.watch(*sample)
    for name, array in monitor.state().items():
        np.testing.assert_array_equal(array, before[name])


def test_a_reference_says_what_it_holds():
    reference = make_reference({}, np.arange(20) % 4, np.arange(20) % 2, 5)
    assert reference.shares.tolist() == [0.25, 0.25, 0.25, 0.25, 0]
    assert reference.agreement == 0.5


def test_a_reference_comes_back():
    arrays = usual().arrays()
    assert {array.dtype.kind for array in arrays.values()} == {"i", "f"}  # no text: any format stores them
    back = Reference.of(arrays)
    assert back.charts == usual().charts
    assert (back.classes, back.agreement) == (CLASSES, usual().agreement)


@pytest.mark.parametrize(
    "change",
    [
        {"answers": None},
        {"classes": None},
        {"alien": np.zeros(30)},
        {"classes": np.array([3.0])},
        {"classes": np.array(10)},
        {"classes": np.array([1])},
        {"safes": np.zeros(29, dtype=int)},
        {"safes": np.full(30, -1)},
        {"answers": np.zeros(30)},
        {"answers": np.zeros(19, dtype=int)},
        {"signal.gap": np.zeros(29)},
        {"signal.gap": np.full(30, np.nan)},
        {"signal.gap": np.full(30, "a")},
        {"signal.repeat": np.zeros(30)},
    ],
)
def test_malformed_references_are_refused(change):
    arrays = {**usual(30).arrays(), **change}
    with pytest.raises(InputError, match=r"^[a-z][^\n]*\.$"):
        Reference.of({name: array for name, array in arrays.items() if array is not None})


@pytest.mark.parametrize(
    "change",
    [
        {"sums": None},
        {"alien": np.zeros(3)},
        {"sums": np.zeros((2, 2))},
        {"sums": np.full((6, 2), np.nan)},
        {"sums": np.full((6, 2), 200.0)},
        {"sums": np.full((6, 2), -1.0)},
        {"sums": np.zeros((6, 2), dtype=int)},
        {"window": np.zeros((3, 51), dtype=int)},
        {"window": np.zeros((2, 5), dtype=int)},
        {"window": np.full((3, 5), 2)},
        {"window": np.array([[CLASSES], [0], [0]])},
        {"flags": np.array([2, 0, 0])},
        {"flags": np.array([0, 3, 0])},
        {"flags": np.array([0, 0, CLASSES])},
        {"flags": np.array([0, 0])},
    ],
)
def test_malformed_states_are_refused(change):
    monitor = Monitor(usual())
    assert monitor.state()["sums"].shape == (6, 2)
    state = {**monitor.state(), **change}
    with pytest.raises(InputError, match=r"^[a-z][^\n]*\.$"):
        monitor.restore({name: array for name, array in state.items() if array is not None})
