"""What the monitor says of real streams of deployed clients, and what an answer costs.

usage: python benchmarks/deployed.py [RUN]    RUN: a finished run with fedthe and fedthe_regime, as `make demo` leaves

Every client's bundle answers streams that are calm, and streams that switch after 100 samples of its own: to samples of
other clients, to noise, to black frames, and to one class of its own for a long time, which no monitor should call a
collapse. Writes deployed.json beside this file, under the name of the run.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from fedthe import rng, store
from fedthe.deploy.export import Trained, bundle_client, open_run
from fedthe.deploy.online import Online

METHODS = ("fedthe", "fedthe_regime")
BEFORE, AFTER = 100, 100  # samples before and after a switch
ALARMS = ("drifting", "collapsed")
ORDERS = 10  # of each client's test rows, for calm streams


def main(run: Path) -> None:
    torch.set_num_threads(1)
    measured = {name: measure(open_run(run, name)) for name in METHODS}
    file = Path(__file__).with_suffix(".json")
    store.write_json(file, json.loads(file.read_text()) | {run.resolve().name: measured})
    for name, found in measured.items():
        print(name)
        for what, value in found.items():
            print(f"  {what}: {value}")


def measure(found: Trained) -> dict[str, object]:
    online = {k: Online(bundle_client(found, k)) for k in found.clients}
    calm = [
        watch(each, own[rng.shuffled(rng.key(0, "calm", k, order), len(own))])
        for k, each in online.items()
        for order in range(ORDERS)
        for own in [own_rows(found, k, "original", None)]
    ]
    samples = sum(len(statuses) for statuses, _ in calm)
    alarms = sum(count_alarms(statuses) for statuses, _ in calm)
    result: dict[str, object] = {
        "clients": len(online),
        "clients without enough validation rows to watch": sum(statuses[0] == "unwatched" for statuses, _ in calm)
        // ORDERS,
        "calm samples": samples,
        "false alarms per 1,000 calm samples": round(1000 * alarms / samples, 2),
        "collapses on calm streams": sum(statuses.count("collapsed") for statuses, _ in calm),
    }
    for name in ("ooc", "noise", "black", "one class"):
        delays, collapses = [], 0
        for k, each in online.items():
            before = own_rows(found, k, "original", BEFORE)
            statuses, _ = watch(each, np.concatenate([before, after_switch(found, k, name)]))
            delays.append(find_delay(statuses[len(before) :]))
            collapses += statuses.count("collapsed")
        seen = [delay for delay in delays if delay is not None]
        result[f"switch to {name}"] = {
            "seen within 50": f"{sum(delay <= 50 for delay in seen)} of {len(delays)} clients",
            "samples until seen": statistics.median(seen) if seen else None,
            "samples called collapsed": collapses,
        }
    result["ms per sample"] = measure_cost(found, next(iter(online.values())))
    return result


def own_rows(found: Trained, client: int, test: str, most: int | None) -> np.ndarray:
    federation = found.work.federation
    stream = federation.tests[test][client]
    return federation.inputs(stream if most is None else stream.first(most))


def after_switch(found: Trained, client: int, name: str) -> np.ndarray:
    pool, split = found.work.federation.pool, found.work.federation.clients[client]
    if name == "ooc":
        return own_rows(found, client, "ooc", AFTER)
    if name == "black":
        return np.zeros((AFTER, *pool.x.shape[1:]), dtype=np.uint8)
    if name == "noise":
        drawn = rng.uniform(rng.key(0, "noise", client), np.arange(AFTER), int(np.prod(pool.x.shape[1:])))
        return (256 * drawn).astype(np.uint8).reshape(AFTER, *pool.x.shape[1:])
    rows = np.concatenate([split.test, split.val])
    most_frequent = np.bincount(pool.labels[split.train]).argmax()
    return pool.x[rows[pool.labels[rows] == most_frequent][:AFTER]]


def watch(online: Online, x: np.ndarray) -> tuple[list[str], float]:
    fresh = online.stream()
    began = time.perf_counter()
    statuses = [each.status for each in fresh.predict_batch(x)]
    return statuses, time.perf_counter() - began


def count_alarms(statuses: list[str]) -> int:
    """How often a stream begins to drift or collapses."""
    alarmed = [status in ALARMS for status in statuses]
    return sum(now and not before for before, now in zip([False, *alarmed], alarmed, strict=False))


def find_delay(statuses: list[str]) -> int | None:
    """How many samples until the first alarm."""
    return next((i + 1 for i, status in enumerate(statuses) if status in ALARMS), None)


def measure_cost(found: Trained, online: Online) -> dict[str, float]:
    """One sample at a time, with the monitor and without it, taking turns; medians."""
    x = own_rows(found, 0, "original", 100)
    plain = Online(online.bundle, monitor=False)
    spent: dict[str, list[float]] = {"with the monitor": [], "without": []}
    for sample in x:
        for name, predictor in (("with the monitor", online), ("without", plain)):
            began = time.perf_counter()
            predictor.predict(sample)
            spent[name].append(time.perf_counter() - began)
    return {name: round(1000 * statistics.median(times), 3) for name, times in spent.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo"))
