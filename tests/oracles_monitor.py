"""The monitor, literally: from the whole stream at once, one rule after the other."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from itertools import pairwise

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm

# One sample is (signals, answer, safe, probability).


def watch_all(reference, samples):
    """(status, reset, fall_back, moved) for each sample; moved: each (signal, 0 or 1) that is furthest from normal."""
    ratios = follow(literal_charts(reference) if reference else {}, samples)
    drifting, verdicts = False, []
    for t, (collapsed, reset) in enumerate(find_collapses(reference, samples)):
        highest = max((ratio[t] for ratio in ratios.values()), default=0.0)
        drifting = highest > 1 or (drifting and highest >= 0.25)
        moved = [which for which, ratio in ratios.items() if ratio[t] >= highest - 1e-9]
        status = "collapsed" if collapsed else "drifting" if drifting else "calm"
        verdicts.append((status, reset, collapsed, moved))
    return verdicts


def derive(answers, safes):
    """The two signals that the monitor makes; the first sample repeats nothing."""
    repeat = [None] + [float(a == b) for a, b in pairwise(answers)]
    return repeat, [float(a != s) for a, s in zip(answers, safes, strict=True)]


def literal_charts(reference):
    """Values, allowance and limit of the signals that are watched."""
    repeat, change = derive(reference.answers.tolist(), reference.safes.tolist())
    every = {name: values.tolist() for name, values in reference.signals.items()}
    every |= {"repeat": repeat[1:], "change": change}
    charts = {}
    for name, values in sorted(every.items()):
        variance = long_run_variance([score(values, value) for value in values])
        if len(values) / variance >= 10:
            charts[name] = values, 0.4 + math.sqrt(variance / len(values)), limit(variance, len(every))
    return charts


def score(values, value):
    same = sum(abs(each - value) <= 1e-5 * abs(value) + 1e-8 for each in values)
    below = sum(each < value - 1e-5 * abs(value) - 1e-8 for each in values)
    return quantile((below + same / 2 + 0.5) / (len(values) + 1))


@cache  # it is slow
def quantile(share):
    return norm.ppf(share)


def long_run_variance(scores):
    n, mean = len(scores), sum(scores) / len(scores)
    centred = [each - mean for each in scores]
    squares = sum(each**2 for each in centred)
    alike = sum(centred[i] * centred[i + 1] for i in range(n - 1)) / squares if squares > 0 else 0.0
    alike = alike + (1 + 3 * alike) / n + math.sqrt((1 - alike**2) / n)
    alike = min(max(alike, 0), 0.99)
    estimates, size = [(1 + alike) / (1 - alike)], 1
    while size <= n / 10:
        parts = [sum(centred[i : i + size]) ** 2 / size for i in range(n - size + 1)]
        estimates.append(np.mean(parts) / (1 - size / n))
        size *= 2
    return max(estimates)


def limit(variance, signals):
    """At which one of 2 `signals` charts passes it once in 2 signals / 0.0005 samples, by Siegmund's formula."""

    def samples(h):
        x = 2 * 0.4 * (h + 1.166) / variance
        return variance * (math.exp(x) - 1 - x) / (2 * 0.4**2)

    return brentq(lambda h: samples(h) - 2 * signals / 0.0005, -1, 40 * variance, xtol=1e-12)


def follow(charts, samples):
    """How far each chart is of its limit after each sample, by (signal, side)."""
    repeat, change = derive([answer for _, answer, _, _ in samples], [safe for _, _, safe, _ in samples])
    ratios = {}
    for name, (values, allowance, h) in charts.items():
        made = {"repeat": repeat, "change": change}
        stream = made.get(name) or [signals.get(name) for signals, *_ in samples]
        scores = [None if value is None else score(values, value) for value in stream]
        for side, sign in enumerate((-1, 1)):
            total, ratios[name, side] = 0.0, []
            for each in scores:
                if each is not None:
                    total = min(max(total + sign * each - allowance, 0.0), 1.5 * h)
                ratios[name, side].append(total / h)
    return ratios


def find_collapses(reference, samples):
    """(collapsed, reset) after each sample."""
    apart = 0.1
    if reference:
        apart = (sum(reference.answers != reference.safes) + 1) / (len(reference.answers) + 2)
    margin = max(10, 4 * math.sqrt(50 * apart * (1 - apart)))
    begin, collapsed, found = 0, False, []
    for t in range(1, len(samples) + 1):
        window, reset = samples[max(begin, t - 50) : t], False
        if len(window) == 50:
            contradicted = sum(answer != safe for _, answer, safe, _ in window)
            if collapsed:
                collapsed = reset = contradicted > 50 * apart + margin / 2
            elif contradicted > 50 * apart + margin:
                sure = sum(probability >= 0.95 for *_, probability in window) >= 45
                one = Counter(answer for _, answer, _, _ in window).most_common(1)[0][1] >= 45
                collapsed = reset = (sure and one) or contradicted >= 45
            if reset:
                begin = t
        found.append((collapsed, reset))
    return found
