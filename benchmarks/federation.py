"""Build the 20-client CIFAR-10 federation with every test distribution: cold, and from the cache.

usage: python benchmarks/federation.py [--natural npz:PATH]     (needs `fedthe data fetch cifar10`)

Each case is its own process: it loads the pool, partitions it, makes the manifest, and reads the pixels of all streams
of all clients. Cold means that no corrupted images are cached. Memory is the process's peak.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fedthe import store
from fedthe.data import find
from fedthe.errors import InputError

RESULT = Path(__file__).with_suffix(".json")

CHILD = """
import json, resource, sys, time
start = time.perf_counter()
import fedthe
dataset = fedthe.load_dataset("cifar10", natural=sys.argv[1] or None)
federation = fedthe.build(dataset, fedthe.Settings(clients=20, dirichlet=0.1, seed=0))
manifest = federation.manifest_hash
samples = sum(len(federation.inputs(s)) for streams in federation.tests.values() for s in streams if s is not None)
print(json.dumps({
    "seconds": time.perf_counter() - start,
    "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    "samples": samples,
    "tests": list(federation.tests),
    "natural": [shift.name for shift in dataset.natural.values()],
    "manifest": manifest,
}))
"""


def measure(home: str, natural: str) -> dict[str, object]:
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", CHILD, natural], env=os.environ | {"FEDTHE_HOME": home}, capture_output=True, text=True
    )
    if done.returncode:
        raise InputError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout) | {"process_seconds": time.perf_counter() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--natural", default="", help="a natural shift, such as npz:PATH; default: CIFAR-10.1 if it is available"
    )
    natural = parser.parse_args().natural
    place = find("cifar10")
    if place is None:
        print("skipped: CIFAR-10 is not available; run `fedthe data fetch cifar10`")
        return
    with tempfile.TemporaryDirectory() as home:
        (Path(home) / "data").symlink_to(place.parent.resolve())
        cold = measure(home, natural)
        cached = [measure(home, natural) for _ in range(3)]
    cached.sort(key=lambda run: run["seconds"])
    result = {
        "what": "20 clients, Dir(0.1), CIFAR-10, all test distributions, pixels of all streams read",
        "cores": os.cpu_count(),
        "cold": cold,
        "cached": cached[1],
        "ratio": cold["seconds"] / cached[1]["seconds"],
    }
    store.write_json(RESULT, result)
    for name in ("cold", "cached"):
        run = result[name]
        print(f"{name:7s} {run['seconds']:6.2f} s   peak {run['peak_gib']:.2f} GiB   {run['samples']:,} samples")


if __name__ == "__main__":
    main()
