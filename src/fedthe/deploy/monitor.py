"""A monitor of one client's stream: calm, drifting or collapsed.

**Drift.** A signal is a number for each sample, such as the entropy of the answer. Its rank among the client's
validation rows makes it a standard normal score, whatever its distribution. Two CUSUM charts (Page, "Continuous
Inspection Schemes", 1954) add up how far scores are above and below what chance allows; the stream drifts when a chart
passes its limit, and is calm again when all are below a quarter of it. The limit follows from how often a calm stream
may raise an alarm (Siegmund, "Sequential Analysis", 1985, section 2.6), and corrects for two things. Neighbours that
resemble each other make charts wander: limits are multiplied by the long-run variance of scores. And few validation
rows do not say exactly where the middle is: what chance allows includes the standard error of their mean.

**Collapse.** Adaptation has gone wrong if, over 50 samples, nearly all answers are one class with near certainty, while
the answers of the model without adaptation contradict them much more often than in validation; or if the two contradict
each other nearly always. A stream that really shows one class is no collapse: both models say so. On collapse the
monitor asks for a reset and for the safe answers, those without adaptation, until the two agree again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import inf, isfinite, log, sqrt
from operator import index
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np

from ..errors import InputError

FEWEST = 20  # validation rows that a reference needs
FALSE_ALARMS = 0.0005  # per sample of a calm stream, over all charts, by the theory; measured: benchmarks/monitor.py
ALLOWANCE = 0.4  # standard deviations: charts only add what is beyond; about half of the shift that is seen soonest
OVERSHOOT = 1.166  # Siegmund's correction: a chart passes its limit by steps, not continuously
INDEPENDENT = 10  # a signal whose validation rows are worth fewer independent ones is not watched
CAP = 1.5  # limits: no chart goes higher, so that it comes back soon after a long shift
CALM = 0.25  # limits: drift ends when all charts are below
WINDOW = 50  # samples that a collapse is judged by
NEARLY = 45  # of them: nearly all
SURE = 0.95  # the probability of an answer without doubt
MARGIN = 10  # a collapse needs so many more contradicted answers in the window than validation had,
DEVIATIONS = 4  # and so many of the standard deviations of their number
UNKNOWN_APART = 0.1  # the share of contradicted answers on a calm stream, without a reference

REPEAT = "repeat"  # signals that the monitor makes itself: 1 if the answer is that of the sample before,
CHANGE = "change"  # and 1 if it is not the safe answer; else 0
PREFIX = "signal."  # of the names of signals among stored arrays

SIGNALS = {  # what it means if a signal is lower or higher than in validation
    "entropy": ("the answers are more certain than in validation", "the answers are less certain than in validation"),
    "surprise": ("the predicted classes are the commonest in training", "the predicted classes are rare in training"),
    "gap": (
        "the features are nearer to this client's average than in validation",
        "the features are nearer to everybody's average than in validation",
    ),
    "weight": (
        "the global head has less weight than in validation",
        "the global head has more weight than in validation",
    ),
    REPEAT: (
        "the predicted class changes more often than in validation",
        "the same class is predicted again and again",
    ),
    CHANGE: (
        "adaptation changes fewer answers than in validation",
        "adaptation changes more answers than in validation",
    ),
}
AS_BEFORE = "the stream looks like the validation rows"
UNWATCHED = "drift is not watched, since there are too few validation rows"
COLLAPSES = (
    "one class is predicted with certainty where the model without adaptation sees others",
    "the model without adaptation contradicts nearly all answers",
)

Status = Literal["calm", "drifting", "collapsed"]


class Verdict(NamedTuple):
    status: Status
    why: str  # one sentence, without a capital and a full stop
    reset: bool  # undo the adaptation, now
    fall_back: bool  # give the safe answer in place of the adapted one


@dataclass(frozen=True)
class Chart:
    """How a signal is judged."""

    name: str
    values: list[float]  # of the validation rows, in ascending order
    scores: list[float]  # by rank: 0, 1/2, 1, ..., the number of values
    allowance: float
    limit: float

    def score(self, value: float) -> float:
        """The normal score of a value, by its rank; equal ones count half."""
        near = 1e-5 * abs(value) + 1e-8  # values are computed in batches for validation, one by one afterwards
        return self.scores[bisect_left(self.values, value - near) + bisect_right(self.values, value + near)]


@dataclass(frozen=True)
class Reference:
    """How validation rows were answered as a stream: what is normal. `make_reference` checks and makes it."""

    signals: Mapping[str, np.ndarray]  # float64 [rows] each, in the order of the stream
    answers: np.ndarray  # int64 [rows]
    safes: np.ndarray  # int64 [rows]: what the model answers without adaptation
    classes: int

    @cached_property
    def shares(self) -> np.ndarray:
        """Of predicted classes [classes]."""
        return np.bincount(self.answers, minlength=self.classes) / len(self.answers)

    @cached_property
    def agreement(self) -> float:
        """The share of rows on which the answer is the safe one."""
        return float((self.answers == self.safes).mean())

    @cached_property
    def charts(self) -> tuple[Chart, ...]:
        """In alphabetical order; without signals whose validation rows are too alike to say what is normal."""
        every = dict(self.signals)
        every[REPEAT] = (self.answers[1:] == self.answers[:-1]).astype(np.float64)
        every[CHANGE] = (self.answers != self.safes).astype(np.float64)
        charts = (make_chart(name, every[name], len(every)) for name in sorted(every))
        return tuple(chart for chart in charts if chart is not None)

    def arrays(self) -> dict[str, np.ndarray]:
        """For storage."""
        own = {"answers": self.answers, "safes": self.safes, "classes": np.array([self.classes])}
        return {**own, **{PREFIX + name: values for name, values in self.signals.items()}}

    @staticmethod
    def of(arrays: Mapping[str, np.ndarray]) -> Reference:
        """From `arrays()`."""
        own = ("answers", "safes", "classes")
        wrong = [name for name in arrays if name not in own and not name.startswith(PREFIX)]
        wrong += [name for name in own if name not in arrays]
        if wrong:
            raise InputError(f"the monitor's reference is malformed at {wrong[0]!r}; export the client again.")
        classes = np.asarray(arrays["classes"])
        if classes.shape != (1,) or classes.dtype.kind not in "iu":
            raise InputError("the monitor's reference must have one number of classes; export the client again.")
        signals = {name[len(PREFIX) :]: values for name, values in arrays.items() if name.startswith(PREFIX)}
        return make_reference(signals, arrays["answers"], arrays["safes"], int(classes[0]))


def make_reference(
    signals: Mapping[str, np.ndarray], answers: np.ndarray, safes: np.ndarray, classes: int
) -> Reference:
    """From validation rows that were answered as a stream, in random order; all [rows], with at least 20 rows."""
    taken = {REPEAT, CHANGE} & {*signals}
    if taken:
        raise InputError(f"the monitor makes the signal {min(taken)!r} itself; give yours another name.")
    classes, rows = int(classes), np.size(answers)
    if rows < FEWEST:
        raise InputError(
            f"a monitor's reference needs at least {FEWEST} validation rows, not {rows}; use none instead."
        )
    return Reference(
        {name: _check_signal(name, values, rows) for name, values in signals.items()},
        _check_classes("answers", answers, rows, classes),
        _check_classes("safe answers", safes, rows, classes),
        classes,
    )


def _check_signal(name: str, values: np.ndarray, rows: int) -> np.ndarray:
    array = np.asarray(values)
    if array.shape != (rows,) or array.dtype.kind not in "fiub" or not np.isfinite(array).all():
        raise InputError(f"the signal {name!r} of a monitor's reference must have {rows} finite numbers.")
    return array.astype(np.float64)


def _check_classes(name: str, values: np.ndarray, rows: int, classes: int) -> np.ndarray:
    array = np.asarray(values)
    whole = array.shape == (rows,) and array.dtype.kind in "iu"
    if not whole or array.min() < 0 or array.max() >= classes:
        raise InputError(f"the {name} of a monitor's reference must be {rows} whole numbers from 0 to {classes - 1}.")
    return array.astype(np.int64)


def make_chart(name: str, values: np.ndarray, signals: int) -> Chart | None:
    """Of one of so many signals; None if its validation rows are worth too few independent ones."""
    rows, normal = len(values), NormalDist()
    scores = [normal.inv_cdf((rank / 2 + 0.5) / (rows + 1)) for rank in range(2 * rows + 1)]
    chart = Chart(name, np.sort(values).tolist(), scores, ALLOWANCE, inf)
    variance = find_variance(np.array([chart.score(value) for value in values.tolist()]))
    if rows / variance < INDEPENDENT:
        return None
    return Chart(name, chart.values, scores, ALLOWANCE + sqrt(variance / rows), find_limit(variance, signals))


def find_variance(scores: np.ndarray) -> float:
    """The long-run variance of standard normal scores: n times that of the mean of n in a row. At least 1.

    The larger of two estimates: by the correlation of neighbours, as if it faded geometrically, without its bias and
    plus a standard error, since too low a value costs false alarms; and by sums of 1, 2, 4, ... scores in a row.
    """
    rows = len(scores)
    centred = scores - scores.mean()
    squares = float(centred @ centred)
    alike = float(centred[1:] @ centred[:-1]) / squares if squares > 0 else 0.0
    alike += (1 + 3 * alike) / rows + sqrt((1 - alike * alike) / rows)
    alike = min(max(alike, 0.0), 0.99)
    variance = (1 + alike) / (1 - alike)
    sums, size = np.concatenate([[0.0], np.cumsum(centred)]), 1
    while 10 * size <= rows:
        parts = sums[size:] - sums[:-size]
        variance = max(variance, float(parts @ parts) / len(parts) / size / (1 - size / rows))
        size *= 2
    return variance


def find_limit(variance: float, signals: int) -> float:
    """The limit at which two charts for each signal together raise a false alarm in FALSE_ALARMS of the samples."""
    samples = 2 * signals / FALSE_ALARMS  # between false alarms of one chart: variance (e^x - 1 - x) / (2 allowance^2)
    target = 2 * ALLOWANCE**2 * samples / variance
    x = 5.0
    for _ in range(50):
        x = log(1 + x + target)
    return x * variance / (2 * ALLOWANCE) - OVERSHOOT


class Monitor:
    """Watches one stream. Without a reference it sees collapses, but no drift."""

    def __init__(self, reference: Reference | None) -> None:
        self._charts = reference.charts if reference else ()
        self._classes = reference.classes if reference else inf
        rows = len(reference.answers) if reference else 0
        apart = ((1 - reference.agreement) * rows + 1) / (rows + 2) if reference else UNKNOWN_APART
        self._expected = WINDOW * apart  # contradicted answers in a window
        self._margin = max(MARGIN, DEVIATIONS * sqrt(self._expected * (1 - apart)))
        self._sums = [[0.0, 0.0] for _ in self._charts]  # below and above
        self._answers: deque[int] = deque(maxlen=WINDOW)  # since the last reset
        self._apart: deque[bool] = deque(maxlen=WINDOW)
        self._sure: deque[bool] = deque(maxlen=WINDOW)
        self._last = -1  # the last answer
        self._drifting = False
        self._collapse = 0  # its number in COLLAPSES, from 1

    def watch(self, signals: Mapping[str, float], answer: int, safe: int, probability: float) -> Verdict:
        """The next sample: its signals, the adapted answer with its probability, and the safe answer.

        Signals that the reference lacks are ignored; for one that is missing, time stands still.
        """
        answer, safe = index(answer), index(safe)
        self._check(signals, answer, safe, probability)
        why = self._judge_drift({**signals, REPEAT: float(answer == self._last), CHANGE: float(answer != safe)})
        self._last = answer
        self._answers.append(answer)
        self._apart.append(answer != safe)
        self._sure.append(probability >= SURE)
        reset = self._judge_collapse()
        if self._collapse:
            return Verdict("collapsed", COLLAPSES[self._collapse - 1], reset, True)
        return Verdict("drifting" if self._drifting else "calm", why, False, False)

    def _check(self, signals: Mapping[str, float], answer: int, safe: int, probability: float) -> None:
        for name, value in signals.items():
            if not isfinite(value):
                raise InputError(f"the signal {name!r} is {value}; the monitor needs finite numbers.")
        if not (0 <= answer < self._classes and 0 <= safe < self._classes):
            raise InputError(f"the answer {answer} or {safe} is not the number of a class that the reference has.")
        if not 0 <= probability <= 1.0001:  # for rounding
            raise InputError(f"the probability of an answer must be from 0 to 1, not {probability}.")

    def _judge_drift(self, signals: Mapping[str, float]) -> str:
        """Update the charts and whether the stream drifts; returns why."""
        highest, moved, side = 0.0, "", 0
        for chart, sums in zip(self._charts, self._sums, strict=True):
            value = signals.get(chart.name)
            if value is not None and (chart.name != REPEAT or self._last >= 0):
                score, cap = chart.score(float(value)), CAP * chart.limit
                sums[0] = min(max(sums[0] - score - chart.allowance, 0.0), cap)
                sums[1] = min(max(sums[1] + score - chart.allowance, 0.0), cap)
            for i in (0, 1):
                if sums[i] > highest * chart.limit:
                    highest, moved, side = sums[i] / chart.limit, chart.name, i
        self._drifting = highest > 1 or (self._drifting and highest >= CALM)
        if not self._drifting:
            return AS_BEFORE if self._charts else UNWATCHED
        return SIGNALS[moved][side] if moved in SIGNALS else describe_signal(moved, side)

    def _judge_collapse(self) -> bool:
        """Update whether the model has collapsed; returns whether to reset.

        While it has, a window is judged as a whole, and begins after a reset: either the answers agree again, or
        whatever broke the model has broken it again, and it must be reset again to have a chance later.
        """
        if len(self._apart) < WINDOW:
            return False
        apart = sum(self._apart)
        if self._collapse:
            if apart <= self._expected + self._margin / 2:
                self._collapse = 0
                return False
        else:
            self._collapse = self._find_collapse(apart)
        if self._collapse:
            for window in (self._answers, self._apart, self._sure):
                window.clear()
        return self._collapse > 0

    def _find_collapse(self, apart: int) -> int:
        if apart <= self._expected + self._margin:
            return 0
        if sum(self._sure) >= NEARLY and max(Counter(self._answers).values()) >= NEARLY:
            return 1
        return 2 if apart >= NEARLY else 0

    def state(self) -> dict[str, np.ndarray]:
        """All that watching has changed, for `restore`."""
        return {
            "sums": np.array(self._sums, dtype=np.float64).reshape(-1, 2),
            "window": np.array([self._answers, self._apart, self._sure], dtype=np.int64),  # [3, samples]
            "flags": np.array([self._drifting, self._collapse, self._last], dtype=np.int64),
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue where a monitor with an equal reference was."""
        kinds = {"sums": "f", "window": "iu", "flags": "iu"}
        if {*state} != {*kinds} or any(np.asarray(state[name]).dtype.kind not in kinds[name] for name in kinds):
            raise InputError("the monitor's state must have the arrays sums, window and flags, as state() gives them.")
        sums, window, flags = (np.asarray(state[name]) for name in kinds)
        caps = (
            1.001 * CAP * np.array([chart.limit for chart in self._charts])[:, None]
        )  # they round differently elsewhere
        if sums.shape != (len(self._charts), 2) or not ((sums >= 0) & (sums <= caps)).all():
            raise InputError("the monitor's state was made with another reference; begin with a new monitor.")
        if not self._fits(window, flags):
            raise InputError("the monitor's state is malformed; begin with a new monitor.")
        self._sums = sums.tolist()
        self._answers = deque(window[0].tolist(), WINDOW)
        self._apart, self._sure = (deque((row > 0).tolist(), WINDOW) for row in window[1:])
        drifting, self._collapse, self._last = flags.tolist()
        self._drifting = drifting > 0

    def _fits(self, window: np.ndarray, flags: np.ndarray) -> bool:
        if window.ndim != 2 or len(window) != 3 or window.shape[1] > WINDOW or flags.shape != (3,):
            return False
        drifting, collapse, last = flags.tolist()
        return (
            all(0 <= answer < self._classes for answer in window[0].tolist())
            and all(each in (0, 1) for each in chain([drifting], window[1:].ravel().tolist()))
            and 0 <= collapse <= len(COLLAPSES)
            and -1 <= last < self._classes
        )


def describe_signal(name: str, side: int) -> str:
    return f"{name} is {('lower', 'higher')[side]} than in validation"
