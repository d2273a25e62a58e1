"""The memory of many clients: 10,000 of them at 1 % participation, against 100, on the same 50,000 images.

usage: python benchmarks/clients.py [--rounds 20]

Every case is its own process, whose peak resident memory is read at the end. Ditto is the hardest method: every client
keeps a whole CNN of 627 KB, so that 10,000 clients would hold 6.3 GB. In the end all clients deploy and answer one
sample of their own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

RESULT = Path(__file__).with_suffix(".json")
CHILD = """
import json, resource, sys, time
import fedthe
clients, method, rounds, data, out = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5]
began = time.perf_counter()
results = fedthe.run(dataset=data, methods=[method], clients=clients, participation=0.01, rounds=rounds, local_epochs=1,
                     dirichlet=1.0, tests=["original"], samples=1, checkpoint_seconds=5.0, out=out, device="cpu")
assert len(results.rows) == clients and not results.failures, results.failures
(training,) = results.trainings.values()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
whole = time.perf_counter() - began
print(json.dumps({"peak_mib": peak, "seconds": whole, "training_seconds": training["seconds"]}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    result: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        generator = np.random.default_rng(0)
        labels = np.arange(50_000) % 10
        images = generator.integers(0, 256, (50_000, 32, 32, 3), dtype=np.uint8)
        np.savez(Path(folder) / "pool.npz", images=images, labels=labels)
        for method in ("fedthe", "ditto"):
            cases = {}
            for clients in (100, 10_000):
                out = str(Path(folder) / f"{method}-{clients}")
                words = [str(clients), method, str(rounds), f"npz:{folder}/pool.npz", out]
                done = subprocess.run(
                    [sys.executable, "-c", CHILD, *words], check=True, stdout=subprocess.PIPE, text=True
                )
                case = json.loads(done.stdout)
                case["disk_mib"] = sum(file.stat().st_size for file in Path(out).rglob("*")) / 2**20
                cases[str(clients)] = case
                print(f"{method:8s} {clients:6d} clients", {name: round(value, 1) for name, value in case.items()})
            ratio = cases["10000"]["peak_mib"] / cases["100"]["peak_mib"]
            print(f"{method:8s} peak memory, 10,000 against 100 clients: {ratio:.2f}")
            result[method] = {"cases": cases, "peak_ratio": ratio}
    text = json.dumps(
        {"what": "peak memory of 10,000 clients against 100", "rounds": rounds, "methods": result}, indent=1
    )
    RESULT.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
