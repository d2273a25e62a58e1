"""Clients that took no part in training join: how good they are, by epochs of training, and without labels.

usage: python benchmarks/join.py

Ten clients of glyphs, two of which are held out (seeds 0 to 2). Each joins on its training rows, and answers its own
test stream and that of others; beside it, the clients that were trained. Writes join.json beside this file.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

import fedthe
from fedthe import store
from fedthe.cli.run import DEMO
from fedthe.deploy import join as joining
from fedthe.deploy.bundle import Bundle
from fedthe.deploy.export import Trained, bundle_global, open_run
from fedthe.deploy.online import Online

SEEDS = (0, 1, 2)
EPOCHS = (1, 5, 20, 50)
TESTS = ("original", "ooc")
METHODS = ("fedthe", "fedthe_regime")


def main() -> None:
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        asked = {"methods": list(METHODS), "seeds": list(SEEDS), "unseen": 0.2, "tests": list(TESTS), "curve": []}
        results = fedthe.run(**{**DEMO, **asked, "samples": None, "out": folder})
        measured = {name: measure(results, name) for name in METHODS}
    store.write_json(Path(__file__).with_suffix(".json"), {"seeds": SEEDS, "clients held out per seed": 2, **measured})
    for name, rows in measured.items():
        print(name)
        for what, scores in rows.items():
            print(f"  {what:40}", "  ".join(f"{test} {score:.1f}" for test, score in scores.items()))


def measure(results: fedthe.Results, name: str) -> dict[str, dict[str, float]]:
    rows = {"clients that were trained": {test: results.table()[name][test] for test in TESTS}}
    found = [open_run(results, name, seed) for seed in SEEDS]
    shared = [bundle_global(each) for each in found]
    for epochs in EPOCHS:
        rows[f"joined with labels, {epochs} epochs"] = average(found, shared, epochs)
    rows["joined without labels, estimated mix"] = average(found, shared, None)
    estimate, joining.estimate_counts = joining.estimate_counts, lambda _, __, shard: torch.zeros_like(shard.counts)
    rows["joined without labels, equal classes"] = average(found, shared, None)
    joining.estimate_counts = estimate
    return rows


def average(found: list[Trained], shared: list[Bundle], epochs: int | None) -> dict[str, float]:
    """The accuracy on each test, mean over clients and seeds. epochs: None without labels."""
    scores: dict[str, list[float]] = {test: [] for test in TESTS}
    for each, bundle in zip(found, shared, strict=True):
        work = each.work
        for k in work.run.unseen:
            made = joining.join(bundle, work.run.shards[k], epochs is not None, epochs or 1, client=k)
            online = Online(replace(made, id="made"), monitor=False)
            for test in TESTS:
                stream = work.federation.tests[test][k]
                answers = online.stream(test).predict_batch(work.federation.inputs(stream))
                right = np.array([answer.index for answer in answers]) == work.federation.labels(stream)
                scores[test].append(100 * float(right.mean()))
    return {test: round(sum(values) / len(values), 1) for test, values in scores.items()}


if __name__ == "__main__":
    main()
