"""Statistics of results: intervals and tests of paired differences, calibration, and means over clients.

Differences between two methods are paired by client and seed. Their interval is a hierarchical bootstrap (Davison &
Hinkley, "Bootstrap Methods and their Application", 1997, section 3.8): draw seeds with replacement, then the clients of
each drawn seed. The draws of few seeds or clients spread too little, so they are widened as Student's t is wider than
the normal distribution (Hesterberg, "What Teachers Should Know About the Bootstrap", 2015).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any, TypeVar

import numpy as np

from . import rng

DRAWS = 10_000
LARGEST = 5_000_000  # draws times pairs: many pairs get fewer draws, but at least FEWEST
FEWEST = 1_000
LEVEL = 0.95
BINS = 15  # of the calibration error, as in Guo et al. 2017
WORST = 0.1  # the share of clients that the mean of the worst is over


@dataclass(frozen=True)
class Interval:
    """The mean of paired differences, its 95 % interval and the p-value of no difference, by the same draws."""

    mean: float
    low: float | None  # None for a single pair
    high: float | None
    p: float | None

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


@dataclass(frozen=True)
class Difference:
    """One method or run minus another, a - b, on one test, over the clients and seeds that both have."""

    a: float  # means over clients, then over seeds, in percent
    b: float
    difference: float
    low: float | None
    high: float | None
    p: float | None
    p_holm: float | None  # corrected for all tests that were compared at once
    clients: int  # pairs, over all seeds
    seeds: int
    higher: int  # clients on which a is above b
    lower: int

    @property
    def excludes_zero(self) -> bool:
        return Interval(self.difference, self.low, self.high, self.p).excludes_zero


K = TypeVar("K", bound=Hashable)
Percents = Sequence[float | None]  # of client 0, 1, ...; None for a client that lacks the test
ByTest = Mapping[str, Mapping[str, Percents]]  # of one method: by test and seed
Pairs = Sequence[np.ndarray]  # for each seed, an array [clients, 2] with the numbers of a and b


def compare_pairs(tests: Mapping[K, Pairs]) -> dict[K, Difference]:
    """a - b for each test, with p-values corrected over these tests. Every test needs at least one pair."""
    found = {}
    for test, seeds in tests.items():
        more = [pairs[:, 0] - pairs[:, 1] for pairs in seeds]
        a, b = (float(np.mean([pairs[:, i].mean() for pairs in seeds])) for i in (0, 1))
        every, interval = np.concatenate(more), bootstrap(more)
        counts = len(every), len(seeds), int((every > 0).sum()), int((every < 0).sum())
        found[test] = Difference(a, b, interval.mean, interval.low, interval.high, interval.p, None, *counts)
    known = [test for test, each in found.items() if each.p is not None]
    corrected = dict(zip(known, holm([found[test].p or 0.0 for test in known]), strict=True))
    return {test: replace(each, p_holm=corrected.get(test)) for test, each in found.items()}


def pair(a: Mapping[str, Percents], b: Mapping[str, Percents]) -> list[np.ndarray]:
    """The clients that a and b both have, by seed; without seeds that have none."""
    found = []
    for seed in a:
        both = zip(a[seed], b.get(seed, ()), strict=False)
        pairs = [each for each in both if each[0] is not None and each[1] is not None]
        if pairs:
            found.append(np.array(pairs, dtype=np.float64))
    return found


def pair_averages(a: ByTest, b: ByTest, tests: Iterable[str]) -> list[np.ndarray]:
    """The same for the average over tests, as `average_tests` gives it; without seeds that lack a test."""
    found = []
    tests = list(tests)
    for seed in a.get(tests[0], {}) if tests else ():
        columns = [(a.get(test, {}).get(seed, ()), b.get(test, {}).get(seed, ())) for test in tests]
        clients = max(len(column) for pair in columns for column in pair)
        values = np.full((2, clients, len(tests)), np.nan)
        for t, column in enumerate(columns):
            for i in (0, 1):
                values[i, : len(column[i]), t] = [np.nan if each is None else each for each in column[i]]
        values[np.isnan(values).any(0)[None].repeat(2, 0)] = np.nan  # what one of both lacks
        if not np.isnan(values).all(1).any():
            some = ~np.isnan(values[0]).all(1)
            found.append(np.stack([average_tests(each[some]) for each in values], axis=1))
    return found


def bootstrap(seeds: Sequence[np.ndarray]) -> Interval:
    """Of differences [clients] for each seed: the mean over clients, then over seeds.

    With one seed only clients are drawn, and the interval says nothing of other seeds. The same differences always
    get the same interval: the draws depend only on the numbers of seeds and clients.
    """
    mean = float(np.mean([each.mean() for each in seeds]))
    sizes = tuple(len(each) for each in seeds)
    if sum(sizes) < 2:
        return Interval(mean, None, None, None)
    values, degrees = np.concatenate(seeds), count_degrees(seeds)
    drawn = np.sort(draw_weights(sizes) @ (values - mean))
    rounding = 1e-9 * max(1.0, float(np.abs(values).max()))  # draws of equal differences are equal but for it
    low, high = mean + widen(degrees, 1 - LEVEL) * np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(mean, float(low), float(high), find_p(mean, drawn, degrees, rounding))


def widen(degrees: float, level: float) -> float:
    """How much wider than a bootstrap's the interval that misses with probability `level` is: n / (n - 1) of the
    variance, and Student's t, whose tails are the heavier the further out."""
    from scipy.special import ndtri, stdtrit

    upper = 1 - level / 2
    return float(((degrees + 1) / degrees) ** 0.5 * stdtrit(degrees, upper) / ndtri(upper))


def find_p(mean: float, drawn: np.ndarray, degrees: float, rounding: float) -> float:
    """The smallest probability to miss at which the interval excludes 0, but no less than Student's t gives.

    Of few clients the draws have no tails, and t's are right if differences are normal. drawn: deviations from the
    mean, sorted.
    """
    from scipy.special import stdtr

    toward_zero = drawn if mean > 0 else -drawn[::-1]
    places = np.linspace(0, 1, len(drawn))

    def excludes_zero(level: float) -> bool:
        return bool(abs(mean) + widen(degrees, level) * np.interp(level / 2, places, toward_zero) > rounding)

    least, most = 2 / (1 + len(drawn)), 0.999
    if abs(mean) <= rounding or not excludes_zero(most):
        return 1.0
    error = float(drawn.std()) * ((degrees + 1) / degrees) ** 0.5
    by_t = 2 * float(stdtr(degrees, -abs(mean) / error)) if error > rounding else 2.0 ** (1 - (degrees + 1))
    if excludes_zero(least):
        return max(least, by_t)
    for _ in range(30):
        middle = (least * most) ** 0.5
        least, most = (least, middle) if excludes_zero(middle) else (middle, most)
    return max(most, by_t)


def count_degrees(seeds: Sequence[np.ndarray]) -> float:
    """Degrees of freedom of the mean's variance (Satterthwaite 1946): as many as clients where seeds differ only as
    their clients do, and as few as seeds where they differ by more."""
    pairs = sum(map(len, seeds))
    several = [each for each in seeds if len(each) > 1]
    if len(seeds) == 1 or pairs == len(seeds):
        return pairs - 1
    between = float(np.var([each.mean() for each in seeds], ddof=1))
    within = float(np.mean([each.var(ddof=1) / len(each) for each in several]))  # what clients alone would give
    share = max(0.0, 1 - within / between) if between > 0 else 0.0
    return float(1 / (share**2 / (len(seeds) - 1) + (1 - share) ** 2 / (pairs - len(seeds))))


@lru_cache(maxsize=4)
def draw_weights(sizes: tuple[int, ...]) -> np.ndarray:
    """The weight of each client in each draw [draws, clients of all seeds]; the weights of a draw sum to 1.

    All differences between clients of these numbers share the draws, so an interval costs one product.
    """
    pairs, seeds = sum(sizes), len(sizes)
    draws = np.arange(max(FEWEST, min(DRAWS, LARGEST // pairs)))
    clients, first = np.array(sizes), np.cumsum((0, *sizes[:-1]))
    weights = np.zeros((len(draws), pairs), dtype=np.float32)
    picked = rng.integers(rng.key("bootstrap", "seeds"), draws, seeds, 0, seeds)
    for place in range(seeds):
        seed = picked[:, place]
        words = rng.words(rng.key("bootstrap", "clients", place), draws, max(sizes))
        who = words * clients[seed][:, None] >> 32  # of a seed with fewer clients, the first so many count
        real = np.arange(max(sizes)) < clients[seed][:, None]
        rows = np.broadcast_to(draws[:, None], who.shape)[real]
        share = np.broadcast_to(1 / (seeds * clients[seed])[:, None], who.shape)[real]
        np.add.at(weights, (rows, (first[seed][:, None] + who)[real]), share)
    weights.flags.writeable = False  # it is shared
    return weights


def holm(ps: Sequence[float]) -> list[float]:
    """p-values corrected so that any false claim among them has the nominal probability (Holm 1979)."""
    corrected, highest = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[i]))
        corrected[i] = highest
    return corrected


def average_tests(tests: np.ndarray) -> np.ndarray:
    """Values [clients] of one seed whose mean is the average over tests, from [clients, tests].

    NaN: a client lacks a test. The average is the mean over tests of the mean over the clients that have the test. A
    client's value is the average plus the client's influence on it, so resampled clients vary as the average does.
    """
    known = ~np.isnan(tests)
    means, shares = np.nanmean(tests, axis=0), known.mean(axis=0)
    return np.asarray((means + np.where(known, tests - means, 0.0) / shares).mean(axis=1))


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation with n - 1; None for a single value, since 0 would claim a measurement."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def mean_of_worst(values: Sequence[float], share: float = WORST) -> float:
    """The mean of the lowest tenth; of at least one."""
    lowest = np.sort(np.asarray(values))[: max(1, ceil(share * len(values) - 1e-9))]
    return float(lowest.mean())


def count_effective(counts: Sequence[int]) -> float:
    """How many classes a client holds in effect: the exponential of the entropy of its mix, from rows by class."""
    shares = np.asarray(counts, dtype=np.float64) / max(1, sum(counts))
    return float(np.exp(-np.sum(shares * np.log(np.where(shares > 0, shares, 1.0)))))


def calibration_error(probabilities: np.ndarray, right: np.ndarray, bins: int = BINS) -> float:
    """The expected calibration error in percent: the gap between the probability of answers and how many are correct,
    in bins of equal width, weighted by their samples (Guo et al., "On Calibration of Modern Neural Networks", 2017)."""
    place = np.clip(np.ceil(np.asarray(probabilities, dtype=np.float64) * bins).astype(int) - 1, 0, bins - 1)
    gaps = np.bincount(place, weights=np.asarray(right, dtype=np.float64) - probabilities, minlength=bins)
    return 100 * float(np.abs(gaps).sum()) / len(place)


def area_under_roc(high: np.ndarray, low: np.ndarray) -> float:
    """The probability that a draw of `high` is above one of `low`, where equal ones count half: 0.5 is chance."""
    ordered = np.sort(low)
    below = np.searchsorted(ordered, high, "left") + np.searchsorted(ordered, high, "right")
    return float(below.mean() / (2 * len(ordered)))


def find_leader(methods: Mapping[str, Mapping[str, Percents]]) -> str | None:
    """The best method on a test, if the interval of its lead over the best other is above 0; from percents by seed."""
    known = {method: seeds for method, seeds in methods.items() if pair(seeds, seeds)}
    means = {method: np.mean([pairs.mean() for pairs in pair(seeds, seeds)]) for method, seeds in known.items()}
    return _lead(means, lambda best, other: pair(known[best], known[other]))


def find_average_leader(methods: Mapping[str, ByTest], tests: Sequence[str]) -> str | None:
    """The same for the average over tests, of the methods that have all tests."""
    whole = {method: of for method, of in methods.items() if tests and all(of.get(test) for test in tests)}
    means = {
        method: np.mean([np.mean([pairs.mean() for pairs in pair(of[test], of[test])]) for test in tests])
        for method, of in whole.items()
    }
    return _lead(means, lambda best, other: pair_averages(whole[best], whole[other], tests))


def _lead(means: Mapping[str, Any], pair_up: Callable[[str, str], Pairs]) -> str | None:
    ranked = sorted(means, key=lambda method: -means[method])
    if len(ranked) < 2:
        return None
    pairs = pair_up(ranked[0], ranked[1])
    low = bootstrap([each[:, 0] - each[:, 1] for each in pairs]).low if pairs else None
    return ranked[0] if low is not None and low > 0 else None
