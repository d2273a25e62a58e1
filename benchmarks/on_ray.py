"""A run on Ray with two workers of one core each, against the same run with one: as two GPUs against one.

usage: python benchmarks/on_ray.py [--quick] [--out FILE]     (needs the extra ray)

Each case is a process of its own, and turns are taken. Seconds with the start are those of the whole command; seconds
of work begin with the first piece of progress that a worker reports. Beside them, the same run without Ray on one core
(threads=1) and on all (as by default). All cases must have the same numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from fedthe import store

RESULT = Path(__file__).with_suffix(".json")
METHODS = ["fedavg_ft", "fedthe", "ditto", "apfl", "scaffold", "gma"]  # six trainings a seed

CHILD = """
import json, os, sys, time
began = time.perf_counter()
import fedthe
from contextlib import nullcontext
from fedthe.progress.events import AnswerEvent, TrainEvent, listening

workers, settings = int(sys.argv[1]), json.loads(sys.argv[2])
heard = []

def hear(event):
    if isinstance(event, TrainEvent | AnswerEvent):
        heard.append(time.perf_counter())

if workers:
    from fedthe.experiment.cluster import connected
    from fedthe.experiment.on_ray import workers_on_ray
    ray, where = connected(num_cpus=workers), lambda: workers_on_ray(cpus=1)
else:
    ray, where = nullcontext(), nullcontext
with ray, where(), listening(hear):
    table = fedthe.run(**settings).table()
    end = time.perf_counter()
print(json.dumps({"seconds": end - began, "work": end - heard[0], "table": table}))
"""


def run(workers: int, settings: dict[str, Any]) -> dict[str, Any]:
    """workers: on Ray; 0: no Ray."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", CHILD, str(workers), json.dumps(settings | {"out": folder})]
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
        )
    if done.returncode:
        sys.exit(done.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, one turn")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    settings = {"dataset": "glyphs", "methods": METHODS, "seeds": [0, 1], "clients": 10, "train_fraction": 0.1}
    settings |= {
        "rounds": 1 if given.quick else 2,
        "local_epochs": 2,
        "samples": 50,
        "device": "cpu",
        "natural": "none",
    }
    run(0, settings | {"rounds": 0})  # draws the pictures, once
    cases = {
        "two workers": (2, settings),
        "one worker": (1, settings),
        "no Ray, one core": (0, settings | {"threads": 1}),
        "no Ray, all cores": (0, settings),
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    for _ in range(1 if given.quick else 3):
        for name, (workers, chosen) in cases.items():
            found[name].append(run(workers, chosen))
            print(f"{name}: {found[name][-1]['seconds']:.1f} s, work {found[name][-1]['work']:.1f} s", flush=True)
    tables = [each["table"] for runs in found.values() for each in runs]
    assert all(table == tables[0] for table in tables)
    result: dict[str, Any] = {"cores": os.cpu_count(), "settings": settings, "turns": len(found["one worker"])}
    for key in ("seconds", "work"):
        result[key] = {name: median(each[key] for each in runs) for name, runs in found.items()}
        result[f"{key}_one_over_two"] = result[key]["one worker"] / result[key]["two workers"]
    store.write_json(given.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
