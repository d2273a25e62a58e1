"""Intervals, corrected p-values, calibration and means, against literal versions, by hand and on simulated data."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm, t

from fedthe import rng, statistics
from fedthe.statistics import (
    average_tests,
    bootstrap,
    calibration_error,
    compare_pairs,
    count_degrees,
    deviation,
    draw_weights,
    find_average_leader,
    find_leader,
    holm,
    mean_of_worst,
    pair,
    pair_averages,
)


def bootstrap_literally(seeds, draws):
    """Draw seeds, then clients of each, one by one."""
    means = []
    for draw in range(draws):
        at = np.array([draw])
        picked = rng.integers(rng.key("bootstrap", "seeds"), at, len(seeds), 0, len(seeds))[0]
        of_seeds = []
        for place, seed in enumerate(picked):
            values = seeds[seed]
            words = rng.words(rng.key("bootstrap", "clients", place), at, len(values))[0]
            of_seeds.append(np.mean([values[int(word) * len(values) // 2**32] for word in words]))
        means.append(np.mean(of_seeds))
    return np.array(means)


def widen_literally(seeds, level=0.05):
    n, s = sum(map(len, seeds)), len(seeds)
    if s == 1:
        degrees = n - 1
    else:
        between = np.var([np.mean(each) for each in seeds], ddof=1)
        within = np.mean([np.var(each, ddof=1) / len(each) for each in seeds])
        share = max(0, (between - within) / between)
        degrees = 1 / (share**2 / (s - 1) + (1 - share) ** 2 / (n - s))
    return np.sqrt((degrees + 1) / degrees) * t.ppf(1 - level / 2, degrees) / norm.ppf(1 - level / 2)


@pytest.mark.parametrize("sizes", [(5,), (4, 4, 4), (6, 3, 5)])
@pytest.mark.parametrize("apart", [0.0, 5.0])
def test_the_bootstrap_is_the_literal_one(sizes, apart, monkeypatch):
    monkeypatch.setattr(statistics, "DRAWS", 300)
    monkeypatch.setattr(statistics, "FEWEST", 300)
    draw_weights.cache_clear()
    draw = np.random.default_rng(0)
    seeds = [draw.normal(1 + apart * i, 3, size) for i, size in enumerate(sizes)]
    found, mean = bootstrap(seeds), np.mean([each.mean() for each in seeds])
    deviations = bootstrap_literally(seeds, 300) - mean

    def interval(level):
        return mean + widen_literally(seeds, level) * np.quantile(deviations, [level / 2, 1 - level / 2])

    assert found.mean == pytest.approx(mean)
    assert (found.low, found.high) == pytest.approx(tuple(interval(0.05)), abs=1e-4)
    # p: the smallest level of a fine grid at which the interval excludes 0
    grid = np.geomspace(2 / 301, 0.999, 2000)
    excluding = [level for level in grid if interval(level)[0] > 0 or interval(level)[1] < 0]
    degrees = count_degrees(seeds)
    by_t = 2 * t.sf(abs(mean) / deviations.std() / np.sqrt((degrees + 1) / degrees), degrees)
    assert found.p == pytest.approx(max(by_t, min(excluding, default=1.0)), rel=0.01)
    draw_weights.cache_clear()


@pytest.mark.parametrize(
    ("seeds", "clients", "between", "at_least"),
    [
        (1, 20, 0.0, 0.92),
        (1, 4, 0.0, 0.92),
        (3, 20, 0.0, 0.94),
        (3, 20, 0.15, 0.93),  # as in the paper's table: a seed's mean varies 1.5 times as clients explain
        (3, 10, 3.0, 0.88),  # seeds differ by much more than clients do
        (8, 20, 0.5, 0.92),
    ],
)
def test_the_interval_covers_the_true_difference(seeds, clients, between, at_least):
    """400 simulated experiments with a true difference of 2: the interval has it in about 95 % of them."""
    draw = np.random.default_rng(1)
    covered = []
    for _ in range(400):
        means = 2 + between * draw.normal(size=seeds)
        found = bootstrap([mean + draw.normal(0, 1, clients) for mean in means])
        covered.append(found.low <= 2 <= found.high)
    assert at_least <= np.mean(covered) <= 0.995


def test_no_difference_is_rarely_found():
    draw = np.random.default_rng(2)
    found = [bootstrap([draw.normal(0, 1, 10) for _ in range(3)]) for _ in range(400)]
    assert np.mean([each.p < 0.05 for each in found]) < 0.06
    assert all(each.excludes_zero for each in found if each.p < 0.05)


def test_small_p_values_are_rare():
    """Holm's correction needs that: it compares the smallest of them with a fraction of 0.05."""
    draw = np.random.default_rng(2)
    found = []
    for _ in range(200):
        tests = {
            test: [np.stack([draw.normal(apart, 4.5, 20), np.zeros(20)], 1) for apart in draw.normal(0, 0.7, 3)]
            for test in "abcde"
        }  # the variance of seed means is 1.5 times what clients explain
        found.append(compare_pairs(tests))
    ps = np.array([each.p for tests in found for each in tests.values()])
    assert (ps < 0.01).mean() < 0.02
    assert np.mean([any(each.p_holm < 0.05 for each in tests.values()) for tests in found]) < 0.1


def test_what_has_no_interval_and_what_has_no_doubt():
    one = bootstrap([np.array([3.0])])
    assert (one.mean, one.low, one.high, one.p) == (3.0, None, None, None)
    assert not one.excludes_zero
    same = bootstrap([np.zeros(4), np.zeros(3)])
    assert (same.low, same.high, same.p) == (0.0, 0.0, 1.0)
    few = bootstrap([np.array([4.0, 6.0])])  # two clients prove little, though both gain
    assert few.low < 0 < few.high
    apart = bootstrap([np.array([1.0]), np.array([3.0])])  # two seeds of one client
    assert count_degrees([np.array([1.0]), np.array([3.0])]) == 1
    assert apart.low < 0 < apart.high


def test_the_same_differences_have_the_same_interval_and_many_have_fewer_draws():
    draw = np.random.default_rng(3)
    seeds = [draw.normal(1, 1, 7) for _ in range(2)]
    first = bootstrap(seeds)
    draw_weights.cache_clear()
    assert bootstrap(seeds) == first
    assert draw_weights((2000, 2000)).shape == (1250, 4000)
    assert draw_weights((2000, 2000)).sum(1) == pytest.approx(1.0, abs=1e-4)


def test_holm_by_hand():
    """Holm 1979: the least times 4, the next times 3, ..., never below the one before."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9, 0.01]) == pytest.approx([1.0, 1.0, 0.03])
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_as_it_rejects(ps):
    """A corrected p-value is at most 0.05 just where Holm's step-down procedure rejects."""
    rejected, order = set(), sorted(range(len(ps)), key=lambda i: ps[i])
    for rank, i in enumerate(order):
        if ps[i] * (len(ps) - rank) > 0.05:
            break
        rejected.add(i)
    assert {i for i, p in enumerate(holm(ps)) if p <= 0.05} == rejected


def test_pairs_by_hand():
    a = {"0": [50.0, None, 70.0], "1": [40.0], "2": [None]}
    b = {"0": [40.0, 60.0, 75.0], "2": [3.0]}
    assert [each.tolist() for each in pair(a, b)] == [[[50.0, 40.0], [70.0, 75.0]]]
    found = compare_pairs({"x": pair(a, b), "y": [np.array([[1.0, 0.0]])]})
    assert (found["x"].a, found["x"].b, found["x"].difference) == (60.0, 57.5, 2.5)
    assert (found["x"].clients, found["x"].seeds, found["x"].higher, found["x"].lower) == (2, 1, 1, 1)
    assert (found["y"].p, found["y"].p_holm) == (None, None)
    assert found["x"].p_holm == found["x"].p  # the other has no p to correct for


def test_the_average_over_tests_is_that_of_the_tables_and_varies_as_it_does():
    values = np.array([[80.0, 10.0], [60.0, np.nan], [40.0, 30.0]])
    each = average_tests(values)
    assert each.mean() == pytest.approx((60 + 20) / 2)
    assert average_tests(values[[0, 2]]) == pytest.approx([45.0, 35.0])  # where none is missing, a client's own mean
    # leave out a client: the average moves as its value says, to first order
    draw = np.random.default_rng(0)
    large = draw.normal(50, 10, (200, 3))
    large[draw.random((200, 3)) < 0.2] = np.nan
    whole, each = np.nanmean(large, 0).mean(), average_tests(large)
    assert each.mean() == pytest.approx(whole)
    for k in range(5):
        without = np.nanmean(np.delete(large, k, 0), 0).mean()
        assert whole - without == pytest.approx((each[k] - whole) / 199, abs=2e-3)


def test_averages_are_paired_over_what_both_have():
    a = {"x": {"0": [10.0, 20.0]}, "y": {"0": [30.0, None]}}
    b = {"x": {"0": [11.0, 22.0]}, "y": {"0": [35.0, 99.0]}}
    (pairs,) = pair_averages(a, b, ["x", "y"])
    assert pairs.mean(0) == pytest.approx([(15 + 30) / 2, (16.5 + 35) / 2])
    assert pair_averages(a, {"x": {"0": [1.0, 2.0]}}, ["x", "y"]) == []  # b lacks y


def test_a_leader_is_ahead_on_clients_and_not_by_chance():
    steady = {"best": {"0": [70.0, 61.0, 82.0, 74.0]}, "next": {"0": [68.0, 60.0, 80.0, 71.0]}}
    assert find_leader(steady) == "best"
    chance = {"best": {"0": [90.0, 40.0, 82.0, 74.0]}, "next": {"0": [68.0, 60.0, 80.0, 71.0]}}
    assert find_leader(chance) is None
    assert find_leader({"alone": {"0": [70.0, 71.0]}}) is None
    assert find_leader({}) is None
    equal = {"a": steady["best"], "b": steady["best"]}
    assert find_leader(equal) is None
    tests = {method: {"x": seeds, "y": seeds} for method, seeds in steady.items()}
    assert find_average_leader(tests, ["x", "y"]) == "best"
    assert find_average_leader({**tests, "best": {"x": steady["best"]}}, ["x", "y"]) is None  # an average of both alone


def test_deviation_and_the_worst():
    assert deviation([1.0, 3.0]) == pytest.approx(2**0.5)
    assert deviation([5.0]) is None
    assert mean_of_worst([5.0, 1.0, 9.0]) == 1.0
    assert mean_of_worst(list(range(20))) == 0.5
    assert mean_of_worst(list(range(21))) == 1.0  # a tenth of 21, and so three
    assert mean_of_worst(list(range(30))) == 1.0


def calibration_error_literally(probabilities, right, bins=15):
    total = 0.0
    for i in range(bins):
        inside = [(p, r) for p, r in zip(probabilities, right, strict=True) if i / bins < p <= (i + 1) / bins]
        if inside:
            accuracy = sum(r for _, r in inside) / len(inside)
            confidence = sum(p for p, _ in inside) / len(inside)
            total += len(inside) / len(probabilities) * abs(accuracy - confidence)
    return 100 * total


def test_the_calibration_error_is_that_of_guo_et_al():
    draw = np.random.default_rng(0)
    p = draw.uniform(0.05, 1, 500)
    right = draw.random(500) < p**2
    assert calibration_error(p, right) == pytest.approx(calibration_error_literally(p, right))
    assert calibration_error(np.array([0.8, 0.8]), np.array([True, False])) == pytest.approx(30.0)
    assert calibration_error(np.ones(3), np.ones(3, bool)) == 0.0
    edge = np.array([1 / 15, 2 / 15, 1.0, 0.5])
    assert calibration_error(edge, right[:4]) == pytest.approx(calibration_error_literally(edge, right[:4]), abs=1e-6)
