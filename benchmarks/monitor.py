"""How often does the monitor raise a false alarm, how soon does it see a switch, and what does it cost?

Each repetition draws a fresh reference and a fresh stream, so that the reference's sampling error counts. There are
four signals, normal, and answers of ten classes; `correlated` of the signals are autocorrelated: each value has a
correlation of 0.8 with the one before. Writes monitor.json beside this file: false alarms (calm to drifting) in 1,000
samples of a calm stream and the share of its samples that are called drifting; samples until a shift of one signal, in
standard deviations, is seen (the median and the 95 % quantile; null: not within 300 samples), of streams that were
calm before; and microseconds for one sample.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from fedthe import store
from fedthe.deploy.monitor import Monitor, Reference, make_reference

ROWS = (20, 50, 100, 300, 500)
SHIFTS = (0.5, 1.0, 1.5, 3.0)
NAMES = ("entropy", "gap", "surprise", "weight")  # the last ones are autocorrelated
ALIKE = 0.8
CLASSES = 10
AGREE = 0.95
CALM = 1000  # samples of a calm stream
LONGEST = 300  # samples after a switch


def draw(draws: np.random.Generator, rows: int, correlated: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Signals [rows, 4], answers [rows] and safe answers [rows]."""
    signals = draws.normal(size=(rows, len(NAMES)))
    slow = slice(len(NAMES) - correlated, None)
    for i in range(1, rows if correlated else 1):
        signals[i, slow] = ALIKE * signals[i - 1, slow] + np.sqrt(1 - ALIKE**2) * signals[i, slow]
    answers = draws.integers(CLASSES, size=rows)
    safes = np.where(draws.random(rows) < AGREE, answers, draws.integers(CLASSES, size=rows))
    return signals, answers, safes


def refer(draws: np.random.Generator, rows: int, correlated: int) -> Reference:
    signals, answers, safes = draw(draws, rows, correlated)
    return make_reference(dict(zip(NAMES, signals.T, strict=True)), answers, safes, CLASSES)


def watch(monitor: Monitor, stream: tuple[np.ndarray, np.ndarray, np.ndarray]) -> np.ndarray:
    """Whether the stream is called drifting, for each sample."""
    rows = zip(*(column.tolist() for column in stream), strict=True)
    verdicts = [monitor.watch(dict(zip(NAMES, row, strict=True)), answer, safe, 0.8) for row, answer, safe in rows]
    return np.array([verdict.status != "calm" for verdict in verdicts])


def count_false_alarms(rows: int, correlated: int, repeats: int) -> dict[str, Any]:
    drifting = np.zeros((repeats, CALM), dtype=bool)
    for repeat in range(repeats):
        draws = np.random.default_rng([rows, correlated, repeat])
        drifting[repeat] = watch(Monitor(refer(draws, rows, correlated)), draw(draws, CALM, correlated))
    begins = (np.diff(drifting.astype(int), axis=1, prepend=0) > 0).sum(axis=1) * 1000 / CALM
    error = begins.std(ddof=1) / np.sqrt(repeats)
    found = {"false_alarms": round(float(begins.mean()), 3), "standard_error": round(float(error), 3)}
    return {"rows": rows, "correlated": correlated, **found, "drifting": round(float(drifting.mean()), 4)}


def find_delays(rows: int, correlated: int, shift: float, repeats: int) -> dict[str, Any]:
    """After 100 calm samples; the signal that moves is the last, which is autocorrelated if any is."""
    delays = []
    for repeat in range(repeats):
        draws = np.random.default_rng([rows, correlated, repeat])
        monitor = Monitor(refer(draws, rows, correlated))
        stream = draw(draws, 100 + LONGEST, correlated)
        stream[0][100:, -1] += shift
        drifting = watch(monitor, stream)
        after = drifting[100:]
        if not drifting[99]:
            delays.append(after.argmax() + 1 if after.any() else np.inf)
    median, late = (float(each) for each in np.quantile(delays, [0.5, 0.95], method="higher"))
    found = {"median": median, "late": late}
    return {
        "rows": rows,
        "correlated": correlated,
        "shift": shift,
        **{name: int(each) if np.isfinite(each) else None for name, each in found.items()},
    }


def measure_time(samples: int = 20_000) -> float:
    """Microseconds for one sample, with all six charts."""
    draws = np.random.default_rng(0)
    monitor = Monitor(refer(draws, 500, 0))
    signals, answers, safes = (column.tolist() for column in draw(draws, samples, 0))
    given = [dict(zip(NAMES, row, strict=True)) for row in signals]
    began = time.perf_counter()
    for row, answer, safe in zip(given, answers, safes, strict=True):
        monitor.watch(row, answer, safe, 0.8)
    return (time.perf_counter() - began) / samples * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=100)
    repeats = parser.parse_args().repeats
    alarms = [count_false_alarms(rows, correlated, repeats) for correlated in (0, 1, 4) for rows in ROWS]
    cases = [(rows, correlated, shift) for correlated in (0, 1) for rows in (100, 500) for shift in SHIFTS]
    delays = [find_delays(*case, repeats) for case in cases]
    for row in alarms + delays:
        print(row, flush=True)
    micros = round(measure_time(), 1)
    print(f"{micros} microseconds for a sample")
    found = {"repeats": repeats, "false_alarms": alarms, "delays": delays, "microseconds": micros}
    store.write_json(Path(__file__).with_suffix(".json"), found)


if __name__ == "__main__":
    main()
