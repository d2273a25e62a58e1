"""How methods do on streams in time: curves and scores with intervals, from the files of samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import timeline
from ..data.numbers import read_whole
from ..data.shifts import ORIGINS
from ..errors import InputError
from ..names import STREAM_NAMES
from ..statistics import LEVEL, bootstrap, draw_weights
from ..text import say_value
from ..timeline import Track
from .samples import check_known, read_samples
from .tables import Means, Samples

if TYPE_CHECKING:
    from .results import Results

DRAWS = 1000  # of the interval of a recovery

Seeds = Mapping[int, Mapping[int, Track]]  # by seed and client


@dataclass(frozen=True)
class Estimate:
    """A mean over clients, then over seeds, and its 95 % interval: a bootstrap over seeds, then over clients."""

    mean: float
    low: float | None  # None for a single client
    high: float | None


@dataclass(frozen=True)
class PhaseScore:
    """How a method does on one phase of a stream, and how it takes switches to it."""

    accuracy: float  # percent: mean over clients, then over seeds
    steady: float | None = None  # percent, in the second half of a segment; None: no switch that could be measured
    recovery: float | None = None  # samples until it has recovered; None: not within half a segment
    recovery_low: float | None = None  # its 95 % interval; None: not within half a segment
    recovery_high: float | None = None
    lost: float | None = None  # samples after a switch that would be right at the steady accuracy


@dataclass(frozen=True)
class StreamScore:
    """How a method does on a stream in time. Percent; None where it is not defined."""

    accuracy: Estimate
    worst_window: Estimate | None  # the lowest accuracy of a client over 50 samples in a row
    worst_client: float | None  # the lowest of all clients' worst windows, mean over seeds
    forgetting: Estimate | None  # points lost from the first segment to later ones of its phase
    phases: Mapping[str, PhaseScore]
    auroc: float | None = None  # of the probability of answers, for known classes against an unknown one
    fpr95: float | None = None  # samples of the unknown class that pass where 95 % of the others do


@dataclass(frozen=True)
class TimeCurve:
    """Accuracy (%) along a stream: the mean over clients, then over seeds."""

    positions: Sequence[int]  # in the stream, unknown samples counted; without those that no known sample is near
    mean: Sequence[float]
    std: Sequence[float] | None  # over seeds (n - 1); None for one seed
    segments: Sequence[float | None]  # accuracy in each of the bands; None: only unknown samples


@dataclass(frozen=True)
class StreamCurves:
    bands: Sequence[tuple[int, int, str]]  # first position, end and phase of each segment
    methods: Mapping[str, TimeCurve]


def read_tracks(samples: Samples, test: str) -> dict[int, Track]:
    """The streams of a test by client, without those of unknown classes alone; from files of earlier versions as one
    segment."""
    places = {
        int(name.rsplit("/", 2)[1]): name.removesuffix("right")
        for name in samples
        if name.rsplit("/", 2)[0::2] == [test, "right"]
    }

    def read(place: str, column: str) -> np.ndarray:
        values = samples.get(place + column)
        return np.zeros(len(samples[place + "right"]), dtype=np.int64) if values is None else values

    severities = {int(each) for place in places.values() for each in np.unique(read(place, "severity"))} - {0}
    tracks = {}
    for client, place in sorted(places.items()):
        phase = _name_phases(read(place, "origin"), read(place, "severity"), several=len(severities) > 1)
        if (shift := samples.get(place + "shift")) is not None:
            phase = np.where(shift == "", phase, shift)
        phase = np.where(read(place, "label") < 0, timeline.UNKNOWN, phase)
        tracks[client] = Track(samples[place + "right"], read(place, "segment"), phase)
    return {client: track for client, track in tracks.items() if track.known.any()}


def _name_phases(origin: np.ndarray, severity: np.ndarray, several: bool) -> np.ndarray:
    """What each sample is drawn from, with the severity of its corruption if the test has several."""
    pairs, place = np.unique(np.stack([origin, severity], axis=1), axis=0, return_inverse=True)
    names = []
    for number, level in pairs.tolist():
        name = ORIGINS[number] if number < len(ORIGINS) else f"origin{number}"  # of a later version
        names.append(f"{name} {level}" if several and level else name)
    return np.array(names, dtype=str)[place.reshape(-1)]


def list_streams(samples: Mapping[tuple[str, int], Samples], tests: Iterable[str]) -> list[str]:
    """The streams in time among these tests: those that are named so, and others that have several segments."""
    cut = find_cut(samples)
    return [test for test in tests if test in STREAM_NAMES or test in cut]


def find_cut(samples: Mapping[tuple[str, int], Samples]) -> list[str]:
    """The tests that have several segments."""
    cut = dict.fromkeys(
        name.rsplit("/", 2)[0]
        for kept in samples.values()
        for name, values in kept.items()
        if name.endswith("/segment") and len(values) and values[0] != values[-1]
    )
    return list(cut)


def score_streams(
    samples: Mapping[tuple[str, int], Samples], tests: Iterable[str], aurocs: Means | None = None
) -> dict[str, dict[str, StreamScore]]:
    """By test and method. A method that lacks the samples of a seed is left out, as its mean would be another.

    aurocs: those of an open set, in percent; see `Results.rejection`.
    """
    found: dict[str, dict[str, StreamScore]] = {}
    for test in tests:
        for method, seeds in _group(samples, test).items():
            passing = [_count_passing(samples[method, seed], test) for seed in seeds]
            auroc = (aurocs or {}).get(method, {}).get(test)
            found.setdefault(test, {})[method] = replace(_score(seeds), auroc=auroc, fpr95=_average_seeds(passing))
    return found


def _group(samples: Mapping[tuple[str, int], Samples], test: str) -> dict[str, Seeds]:
    grouped: dict[str, dict[int, dict[int, Track]]] = {}
    for (method, seed), kept in samples.items():
        grouped.setdefault(method, {})[seed] = read_tracks(kept, test)
    return {method: seeds for method, seeds in grouped.items() if all(seeds.values())}


def _score(seeds: Seeds) -> StreamScore:
    accuracy = _estimate(_measure(seeds, lambda track: float(track.answers().mean())))
    assert accuracy is not None  # every stream has samples of known classes
    worst = _measure(seeds, lambda track: timeline.find_worst_window(track.answers()))
    found = {seed: [timeline.score_phases(track) for track in tracks.values()] for seed, tracks in seeds.items()}
    phases = dict.fromkeys(phase for scores in found.values() for each in scores for phase in each)
    having = {phase: [seed for seed in seeds if any(phase in each for each in found[seed])] for phase in phases}
    return StreamScore(
        accuracy=accuracy,
        worst_window=_estimate(worst),
        worst_client=_average_seeds([[min(each)] for each in worst if each]),
        forgetting=_estimate(_measure(seeds, timeline.find_forgetting), lowest=-100.0),
        phases={
            phase: _score_phase(
                [[each[phase] for each in found[seed] if phase in each] for seed in some],
                [[timeline.align(track, phase) for track in seeds[seed].values()] for seed in some],
            )
            for phase, some in having.items()
        },
    )


def _measure(seeds: Seeds, of_track: Callable[[Track], float | None]) -> list[list[float]]:
    """By seed: the values of its clients, without clients that have none."""
    return [[value for track in of.values() if (value := of_track(track)) is not None] for of in seeds.values()]


def _estimate(found: Sequence[Sequence[float]], lowest: float = 0.0) -> Estimate | None:
    """From the values of clients by seed, in percent, from `lowest` to 100; without seeds that have none."""
    some = [100 * np.array(each) for each in found if each]
    if not some:
        return None
    interval = bootstrap(some)
    low, high = (end and min(max(end, lowest), 100.0) for end in (interval.low, interval.high))
    return Estimate(interval.mean, low, high)


def _score_phase(scores: Sequence[Sequence[float]], rows: Sequence[Sequence[np.ndarray]]) -> PhaseScore:
    """From seeds that have the phase: accuracies on it, and right answers after a switch to it of every client."""
    accuracy = _average_seeds(scores)
    assert accuracy is not None
    switched = timeline.stack([row for of_seed in rows for row in of_seed])
    sizes = tuple(map(len, rows))
    each = np.concatenate([np.full(size, 1 / (len(sizes) * size)) for size in sizes])
    found = timeline.find_recovery(timeline.average(switched, each))
    if found is None:
        return PhaseScore(accuracy)
    drawn = timeline.find_recovery(timeline.average(switched, draw_weights(sizes)[:DRAWS]))
    assert drawn is not None  # the same positions
    defined = drawn.samples[~np.isnan(drawn.samples)]
    ends = np.quantile(defined, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="inverted_cdf")
    samples, low, high = (float(value) if np.isfinite(value) else None for value in (*found.samples, *ends))
    steady, lost = 100 * float(found.steady[0]), float(found.lost[0])
    return PhaseScore(accuracy, steady, samples, low, high, lost)


def _count_passing(samples: Samples, test: str) -> list[float]:
    """For each client with samples of unknown classes: how many of them have the confidence of known ones."""
    found = []
    for name in samples:
        place = name.removesuffix("label")
        if name.rsplit("/", 2)[0::2] == [test, "label"] and place + "log_probability" in samples:
            known, confidence = samples[name] >= 0, samples[place + "log_probability"]
            found.append(timeline.count_passing(confidence[known], confidence[~known]))
    return found


def _average_seeds(seeds: Sequence[Sequence[float]]) -> float | None:
    """In percent, from values of clients by seed, without seeds that have none; None if all have none."""
    means = [np.mean(each) for each in seeds if len(each)]
    return 100 * float(np.mean(means)) if means else None


def draw_streams(
    samples: Mapping[tuple[str, int], Samples], tests: Iterable[str], window: int = timeline.CURVE
) -> dict[str, StreamCurves]:
    """Accuracy along the streams of each test, by method, up to where half of the clients' streams have ended."""
    curves = {}
    for test in tests:
        grouped = _group(samples, test)
        if grouped:
            # streams are the same for every method, but a method may have failed on a seed
            seeds = {seed: tracks for of in grouped.values() for seed, tracks in of.items()}
            bands = timeline.find_bands([track for tracks in seeds.values() for track in tracks.values()])
            end = min(int(np.median([len(track) for track in tracks.values()])) for tracks in seeds.values())
            shown = [(low, min(high, end), phase) for low, high, phase in bands if low < end]
            methods = {method: _draw(seeds, window, shown) for method, seeds in grouped.items()}
            curves[test] = StreamCurves(shown, methods)
    return curves


def _draw(seeds: Seeds, window: int, bands: Sequence[tuple[int, int, str]]) -> TimeCurve:
    """Up to the end of the last band, at the positions at which every seed has a value."""
    smooth = [timeline.stack([timeline.smooth(track, window) for track in of.values()]) for of in seeds.values()]
    rows = 100 * np.array([timeline.average(each)[: bands[-1][1]] for each in smooth])  # [seeds, positions]
    there = np.flatnonzero(~np.isnan(rows).any(axis=0))
    rows = rows[:, there]
    std = rows.std(axis=0, ddof=1).tolist() if len(rows) > 1 else None
    segments = [
        _average_seeds(
            [[t.answers(low, high).mean() for t in of.values() if t.known[low:high].any()] for of in seeds.values()]
        )
        for low, high, _ in bands
    ]
    return TimeCurve(there.tolist(), rows.mean(axis=0).tolist(), std, segments)


def tabulate_scores(results: Results, test: str) -> dict[str, list[Any]]:
    """Columns with a row for every method."""
    scores = score_streams(_read(results, test), [test], results.rejection())[test]
    columns: dict[str, list[Any]] = {"method": list(scores)}

    def add(name: str, values: Iterable[float | None]) -> None:
        listed = list(values)
        if any(value is not None for value in listed):
            columns[name] = [np.nan if value is None else value for value in listed]

    for name in ("accuracy", "worst_window", "forgetting"):
        for end in ("mean", "low", "high"):
            column = name if end == "mean" else f"{name}_{end}"
            add(column, (getattr(getattr(score, name), end, None) for score in scores.values()))
    for name in ("worst_client", "auroc", "fpr95"):
        add(name, (getattr(score, name) for score in scores.values()))
    for phase in dict.fromkeys(phase for score in scores.values() for phase in score.phases):
        for name in ("accuracy", "steady", "recovery", "recovery_low", "recovery_high", "lost"):
            add(f"{name} {phase}", (getattr(score.phases.get(phase), name, None) for score in scores.values()))
    return columns


def tabulate_curves(results: Results, test: str, window: int) -> dict[str, list[Any]]:
    """Columns with a row for every method and position."""
    window = read_whole("window", window)
    if window < 1 or window % 2 == 0:
        raise InputError(f"window must be an odd number from 1 on, as it is centred, but it is {window}.")
    found = draw_streams(_read(results, test), [test], window)[test]
    columns: dict[str, list[Any]] = {name: [] for name in ("method", "position", "accuracy", "std", "phase")}
    phases = [phase for low, high, phase in found.bands for _ in range(low, high)]
    for method, curve in found.methods.items():
        size = len(curve.positions)
        columns["method"] += [method] * size
        columns["position"] += curve.positions
        columns["accuracy"] += curve.mean
        columns["std"] += curve.std or [np.nan] * size
        columns["phase"] += [phases[position] for position in curve.positions]
    return columns


def _read(results: Results, test: str) -> dict[tuple[str, int], Samples]:
    check_known("test", test, results.tests)
    samples = read_samples(results)
    if _group(samples, test):
        return samples
    tested = {row.seed for row in results.rows if row.test == test}
    lacking = [seed for seed in dict.fromkeys(row.seed for row in results.rows) if seed not in tested]
    if lacking:
        raise InputError(
            f"no client of the group {results.rows[0].group} has the test {test} on seed {say_value(lacking)}; run it "
            "on other seeds, or make the stream shorter."
        )
    raise InputError(f"{results.folder} has no samples of {test}; run it again, which trains nothing.")


def read_score(plain: Mapping[str, Any]) -> StreamScore:
    """From what `describe_streams` gives for a method."""
    known = dict(plain)
    for name in ("accuracy", "worst_window", "forgetting"):
        known[name] = Estimate(**known[name]) if known[name] else None
    known["phases"] = {phase: PhaseScore(**each) for phase, each in known["phases"].items()}
    return StreamScore(**known)


def find_slowest(score: StreamScore) -> PhaseScore | None:
    """The phase after whose switches a method takes longest to recover; None if no switch could be measured."""
    known = [each for each in score.phases.values() if each.steady is not None]
    return max(known, key=lambda each: math.inf if each.recovery is None else each.recovery, default=None)


def describe_streams(results: Results) -> dict[str, dict[str, Any]]:
    """The scores on all streams in time, by test and method, as plain data."""
    samples = read_samples(results)
    scores = score_streams(samples, list_streams(samples, results.tests), results.rejection())
    return {test: {method: asdict(score) for method, score in of.items()} for test, of in scores.items()}
