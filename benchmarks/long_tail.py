"""What is everybody's mix of classes worth to the regime filter, where classes are not equally frequent?

Ten clients share `glyphs`, whole and with classes thinned out: the rarest keeps a tenth of its rows. The filter takes
everybody's mix to be equal classes, or that of all clients' rows. Writes long_tail.json beside this file: accuracy in
percent by test, and what the latter gains, with 95 % intervals.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import fedthe
from fedthe import store
from fedthe.data import load_dataset

TESTS = ["original", "corrupted", "ooc", "mixture", "corrupted_ooc"]
FEDERATION = "fedthe_regime(federation=true)"
SETTINGS: dict[str, Any] = {
    "clients": 10,
    "partition": "unbalanced",
    "rounds": 24,
    "local_epochs": 1,
    "batch": 16,
    "flip": False,
    "crop": 2,
    "lr": 0.1,
    "momentum": 0.5,
    "samples": 100,
    "tests": TESTS,
}


def write_tail(path: Path, rarest: float) -> None:
    """`glyphs` with geometrically fewer rows from the first class to the last."""
    pool, draws = load_dataset("glyphs", size=20).pool, np.random.default_rng(0)
    share = rarest ** (np.arange(len(pool.classes)) / (len(pool.classes) - 1))
    kept = draws.random(len(pool)) < share[pool.labels]
    np.savez(path, images=pool.x[kept], labels=pool.labels[kept], classes=np.array(pool.classes))


def measure(rarest: float, dirichlet: float, seeds: int, folder: Path) -> dict[str, Any]:
    file = folder / f"glyphs-{rarest:g}.npz"
    write_tail(file, rarest)
    results = fedthe.run(
        dataset=f"npz:{file}",
        dirichlet=dirichlet,
        methods=["fedthe", "fedthe_regime", FEDERATION],
        seeds=list(range(seeds)),
        out=str(folder / f"{rarest:g}-{dirichlet:g}"),
        **SETTINGS,
    )
    print(f"rarest {rarest:g}, Dir({dirichlet:g})\n{results}", flush=True)
    accuracy = {method: {test: round(mean, 2) for test, mean in of.items()} for method, of in results.table().items()}
    rows = results.compare(FEDERATION, "fedthe_regime").rows
    gains = {test: [round(each, 2) for each in (row.difference, row.low, row.high)] for test, row in rows.items()}
    return {"rarest": rarest, "dirichlet": dirichlet, "accuracy": accuracy, "gain": gains}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(rarest, alpha, seeds, Path(folder)) for rarest in (1.0, 0.1) for alpha in (0.1, 1.0)]
    store.write_json(Path(__file__).with_suffix(".json"), {"settings": SETTINGS, "seeds": seeds, "rows": rows})


if __name__ == "__main__":
    main()
