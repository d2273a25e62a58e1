"""Streams in time: accuracy along a stream, and how a method takes its switches.

A stream is cut into segments, and every sample has a phase: what it is drawn from, such as own or ooc. All functions
take arrays that hold a value for each sample, in the order of the stream. Accuracies are shares from 0 to 1, of the
samples of known classes; others have the phase `unknown`, and keep their positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

CURVE = 15  # samples of the moving average of a curve, centred
WORST = 50  # samples of the worst window
RECOVERED = 5  # samples of the moving average that decides when a method has recovered
TOLERANCE = 0.05  # below the steady accuracy at which it has
PASS = 0.95  # of the samples of known classes, at the threshold of confidence that unknown ones are measured at
MIXED = "mixed"  # the phase of a segment whose samples have several
UNKNOWN = "unknown"  # the phase of samples of unknown classes, and of a segment that has no others


@dataclass(frozen=True)
class Track:
    """How one client's stream was answered."""

    right: np.ndarray  # bool [n]
    segment: np.ndarray  # int [n]: the number of the sample's segment; it never falls
    phase: np.ndarray  # str [n]

    def __len__(self) -> int:
        return len(self.right)

    @cached_property
    def known(self) -> np.ndarray:
        """bool [n]: the samples of known classes."""
        return np.asarray(self.phase != UNKNOWN)

    def answers(self, first: int = 0, end: int | None = None) -> np.ndarray:
        """Whether answers to the samples of known classes were right, from `first` up to `end`."""
        return np.asarray(self.right[first:end][self.known[first:end]])

    @cached_property
    def segments(self) -> list[tuple[int, int, str]]:
        """First sample, end and phase of each segment; the phase is that of its samples of known classes."""
        ends = [*(np.flatnonzero(np.diff(self.segment)) + 1).tolist(), len(self)]
        found = []
        for first, end in zip([0, *ends[:-1]], ends, strict=True):
            names = {*self.phase[first:end].tolist()} - {UNKNOWN} or {UNKNOWN}
            found.append((first, end, names.pop() if len(names) == 1 else MIXED))
        return found


@dataclass(frozen=True)
class Recovery:
    """How a method takes switches to a phase; a value for each curve."""

    samples: np.ndarray  # until it has recovered; infinite: not within half a segment; NaN: the curve has gaps
    steady: np.ndarray  # accuracy in the second half of a segment
    lost: np.ndarray  # samples: how many more of the first half would be right at the steady accuracy


def smooth(track: Track, window: int = CURVE) -> np.ndarray:
    """The moving average of right answers [n], of the samples up to `window // 2` before and after.

    Windows end where the segment does, so that they are shorter there and no window mixes two segments. NaN where a
    window has no sample of a known class.
    """
    at = np.arange(len(track))
    right, known = (np.concatenate([[0], np.cumsum(each)]) for each in (track.right & track.known, track.known))
    low, high = np.empty_like(at), np.empty_like(at)
    for first, end, _ in track.segments:
        low[first:end], high[first:end] = first, end
    low, high = np.maximum(low, at - window // 2), np.minimum(high, at + window // 2 + 1)
    right, known = right[high] - right[low], known[high] - known[low]
    return np.where(known > 0, right / np.maximum(known, 1), np.nan)


def stack(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Rows of any lengths as one array [rows, longest]; NaN where a row has ended."""
    stacked = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
    for i, row in enumerate(rows):
        stacked[i, : len(row)] = row
    return stacked


def average(rows: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """The weighted mean of rows [rows, n] over those that are not NaN [n]; NaN where less than half of them are left.

    weights: [rows], or [draws, rows] for as many means; equal ones by default.
    """
    known = ~np.isnan(rows)
    weights = np.ones(len(rows)) if weights is None else weights
    there = weights @ known
    enough = known.mean(axis=0) >= 0.5
    sums = weights @ np.where(known, rows, 0.0)
    return np.where(enough & (there > 0), sums / np.where(there > 0, there, 1), np.nan)


def find_bands(tracks: Sequence[Track]) -> list[tuple[int, int, str]]:
    """First position, end and phase of the segments that clients have in common.

    A segment begins where it does for at least half of the clients that are there, and its phase is that of most of
    their samples. So clients whose segments begin at different positions have one segment in common.
    """
    longest = max(map(len, tracks), default=0)
    there, begins = np.zeros(longest), np.zeros(longest)
    for track in tracks:
        there[: len(track)] += 1
        begins[[first for first, *_ in track.segments]] += 1
    starts = np.flatnonzero(2 * begins >= there).tolist()
    bands = []
    for first, end in zip(starts, [*starts[1:], longest], strict=True):
        votes: dict[str, int] = {}
        for track in tracks:
            for low, high, phase in track.segments:
                votes[phase] = votes.get(phase, 0) + max(0, min(high, end) - max(low, first))
        bands.append((first, end, max(votes, key=lambda phase: votes[phase])))
    return bands


def score_phases(track: Track) -> dict[str, float]:
    """The accuracy on the samples of each phase, in the order in which phases first appear, and on mixed segments."""
    right = {name: track.right[track.phase == name] for name in dict.fromkeys(map(str, track.phase.tolist()))}
    right.pop(UNKNOWN, None)
    mixed = [track.answers(first, end) for first, end, phase in track.segments if phase == MIXED]
    if mixed:
        right[MIXED] = np.concatenate(mixed)
    return {name: float(each.mean()) for name, each in right.items()}


def score_segments(track: Track) -> list[tuple[str, float]]:
    """The phase and the accuracy of each segment that has samples of known classes."""
    return [
        (phase, float(track.answers(first, end).mean())) for first, end, phase in track.segments if phase != UNKNOWN
    ]


def find_worst_window(right: np.ndarray, window: int = WORST) -> float | None:
    """The lowest accuracy over `window` samples in a row; None for a shorter stream."""
    if len(right) < window:
        return None
    sums = np.concatenate([[0], np.cumsum(right)])
    return float((sums[window:] - sums[:-window]).min() / window)


def find_forgetting(track: Track) -> float | None:
    """The accuracy on the first segment minus that on later segments of its phase, once another phase has come between.

    The first is the first with samples of known classes. Samples of unknown classes alone are another phase. None if
    the phase does not come back.
    """
    begun = next(i for i, (*_, phase) in enumerate(track.segments) if phase != UNKNOWN)
    (first, end, phase), *others = track.segments[begun:]
    left = next((i for i, (*_, other) in enumerate(others) if other != phase), len(others))
    later = [track.answers(low, high) for low, high, other in others[left:] if other == phase]
    return float(track.answers(first, end).mean() - np.concatenate(later).mean()) if later else None


def align(track: Track, phase: str) -> np.ndarray:
    """Accuracy at each sample after a switch to `phase` [longest segment]: the mean over the segments that have it.

    The first segment is left out: nothing was switched.
    """
    rows = [track.answers(low, high) for low, high, other in track.segments[1:] if other == phase]
    known = stack(rows)
    return np.nanmean(known, axis=0) if rows else np.empty(0)


def find_recovery(curves: np.ndarray, window: int = RECOVERED, tolerance: float = TOLERANCE) -> Recovery | None:
    """From accuracy at each sample after a switch, averaged over clients [n], or from several such curves [draws, n].

    Steady is the mean over the second half. A method has recovered after the first t samples for which the mean over
    samples t to t + window - 1 is at least steady - tolerance; t must be in the first half. None if curves are shorter
    than two windows, not counting positions that are NaN in all of them.
    """
    curves = np.atleast_2d(curves)
    curves = curves[:, ~np.isnan(curves).all(axis=0)]
    if curves.shape[1] < 2 * window:
        return None
    half = curves.shape[1] // 2
    steady = curves[:, half:].mean(axis=1)
    means = np.lib.stride_tricks.sliding_window_view(curves, window, axis=1).mean(axis=2)[:, :half]
    reached = means >= steady[:, None] - tolerance - 1e-9  # for rounding
    samples = np.where(reached.any(axis=1), reached.argmax(axis=1), np.inf)
    samples[np.isnan(curves).any(axis=1)] = np.nan
    return Recovery(samples, steady, (steady[:, None] - curves[:, :half]).sum(axis=1))


def count_passing(inside: np.ndarray, outside: np.ndarray, share: float = PASS) -> float:
    """The share of `outside` that passes the highest threshold that at least `share` of `inside` pass."""
    threshold = np.sort(inside)[::-1][int(np.ceil(share * len(inside) - 1e-9)) - 1]
    return float((outside >= threshold).mean())
