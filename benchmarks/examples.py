"""Eight methods on the two examples that are not pictures; docs/examples.md shows the numbers.

    python benchmarks/examples.py PATH/TO/watch_dataset.npy PATH/TO/packages.txt      # ten minutes on a CPU

Writes examples.json beside this file: accuracy in percent (mean and standard deviation over seeds), and by how much
FedTHE is ahead of every other method, with 95 % intervals.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

import fedthe
from fedthe import store

HERE = Path(__file__).parent
METHODS = ("fedavg", "fedavg_ft", "fedrod", "fedrep", "ditto", "knn_per", "t3a", "fedthe")


def run_example(name: str, path: Path) -> fedthe.Results:
    spec = importlib.util.spec_from_file_location(name, HERE.parent / "examples" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(path, METHODS)


def describe(results: fedthe.Results) -> dict[str, Any]:
    assert not results.failures
    scores = results.scores()
    return {
        "accuracy": {m: {t: [round(x, 4) for x in cell] for t, cell in row.items()} for m, row in scores.items()},
        "fedthe_ahead_of": {
            other: {
                test: [round(x, 4) for x in (row.difference, row.low, row.high)]
                for test, row in results.compare("fedthe", other).rows.items()
            }
            for other in METHODS[:-1]
        },
        "digests": results.digests,
    }


def main() -> None:
    paths = dict(zip(("watch", "descriptions"), map(Path, sys.argv[1:]), strict=True))
    found = {name: describe(run_example(name, path)) for name, path in paths.items()}
    store.write_json(HERE / "examples.json", {"torch": torch.__version__, **found})


if __name__ == "__main__":
    main()
