"""How much other work slows a run on the CPU: alone, and beside two processes that keep a core busy each.

    python benchmarks/busy.py [--repeats 5] [--cifar10 HOME] [--out benchmarks/busy.json]

Every run is its own process, so that start-up counts as it does for a user. Runs of all kinds take turns, so that slow
periods of the machine affect all of them. `before` is what the package did at first: one client at a time, each
operation on all cores. Threads then spin while they wait for the slowest one, which can take very long beside other
work; such a run is stopped after CUT seconds, and counts as that long.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BURNERS = 2
CUT = 40.0  # seconds
CASES: dict[str, dict[str, Any]] = {
    "glyphs": {"dataset": "glyphs", "size": 20, "clients": 4, "rounds": 4, "local_epochs": 1, "samples": 8},
    "demo": {
        "dataset": "glyphs",
        "size": 24,
        "clients": 10,
        "rounds": 2,
        "local_epochs": 1,
        "batch": 16,
        "flip": False,
        "crop": 2,
        "lr": 0.1,
        "samples": 8,
    },
    "cifar10": {"clients": 20, "rounds": 1, "local_epochs": 1, "samples": 8, "train_fraction": 0.2},
}
CHILD = """
import json, os, sys, tempfile
settings, how = json.loads(sys.argv[1]), sys.argv[2]
import torch
import fedthe
if how == "before":
    import fedthe.engine.loop
    # one client after another, operations spread over torch's threads
    fedthe.engine.loop.map_in_threads = lambda fn, items, threads: map(fn, items)
with tempfile.TemporaryDirectory() as folder:
    fedthe.run(out=folder, methods=["fedavg"], seeds=[0], **settings)
"""


def time_run(case: dict[str, Any], how: str, home: str) -> float:
    command = [sys.executable, "-c", CHILD, json.dumps(case), how]
    began = time.perf_counter()
    try:
        subprocess.run(command, check=True, timeout=CUT, env=os.environ | {"FEDTHE_HOME": home})
    except subprocess.TimeoutExpired:
        return CUT
    return time.perf_counter() - began


def burn() -> list[subprocess.Popen[bytes]]:
    return [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BURNERS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cifar10", help="a home of fedthe that holds CIFAR-10")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("busy.json"))
    options = parser.parse_args()
    import torch

    cases = {name: case for name, case in CASES.items() if name != "cifar10"}
    with tempfile.TemporaryDirectory() as home:
        if options.cifar10:
            cases["cifar10"] = CASES["cifar10"] | {"dataset": f"cifar10:{options.cifar10}/cifar10"}
        taken: dict[str, dict[str, list[float]]] = {name: {} for name in cases}
        for name, case in cases.items():
            time_run(case, "now", home)  # fills the cache of images
            for beside in ("alone", "busy"):
                burners = burn() if beside == "busy" else []
                try:
                    for _ in range(options.repeats if name == "glyphs" else min(3, options.repeats)):
                        for how in ("before", "now"):
                            seconds = time_run(case, how, home)
                            taken[name].setdefault(f"{how}, {beside}", []).append(round(seconds, 2))
                            print(f"{name:8} {how:6} {beside:5} {seconds:7.1f} s", flush=True)
                finally:
                    for burner in burners:
                        burner.kill()
                        burner.wait()
    results = {name: summarize(times) for name, times in taken.items()}
    facts = {"cores": len(os.sched_getaffinity(0)), "torch": torch.__version__, "burners": BURNERS, "cut": CUT}
    options.out.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")
    print(f"\n{'':8} {'before: alone':>14} {'busy':>7} {'now: alone':>12} {'busy':>7} {'busy / alone, worst':>20}")
    for name, result in results.items():
        medians = result["median"]
        print(
            f"{name:8} {medians['before, alone']:14.1f} {medians['before, busy']:7.1f} {medians['now, alone']:12.1f} "
            f"{medians['now, busy']:7.1f} {result['worst_busy_over_alone']:20.2f}"
        )


def summarize(times: dict[str, list[float]]) -> dict[str, Any]:
    median = {kind: statistics.median(taken) for kind, taken in times.items()}
    return {
        "seconds": times,
        "median": median,
        "alone_now_over_before": round(median["now, alone"] / median["before, alone"], 3),
        "worst_busy_over_alone": round(max(times["now, busy"]) / median["now, alone"], 3),
        "worst_busy_over_alone_before": round(max(times["before, busy"]) / median["before, alone"], 3),
    }


if __name__ == "__main__":
    main()
