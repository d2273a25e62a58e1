"""The golden run: a small benchmark whose numbers stand in golden.json.

They may change only together with a line of CHANGELOG.md that says so:

    python tests/golden.py "What changed; **moves numbers**."
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import fedthe
from fedthe import records
from fedthe.methods.make import methods_for

FILE = Path(__file__).with_name("golden.json")
# Gentle on purpose: in a longer training rounding grows, and other processors would give other numbers.
SETTINGS = {
    "dataset": "glyphs",
    "size": 20,
    "clients": 4,
    "dirichlet": 0.3,
    "rounds": 2,
    "local_epochs": 1,
    "lr": 0.05,
    "flip": False,
    "crop": 2,
    "samples": 8,
    "train_fraction": 0.25,
    "seeds": [0],
    "tests": ["original", "ooc", "mixture"],
    "device": "cpu",
    "engine": "loop",
}


def measure() -> dict[str, object]:
    """By method: accuracy in percent on each test, the loss of its training, and the mean e where there is one."""
    with tempfile.TemporaryDirectory() as folder:
        results = fedthe.run(methods=methods_for(fedthe.NETS["cnn"](2)), out=folder, **SETTINGS)
        assert not results.failures, results.failures
        losses = {}
        for key, training in results.trainings.items():
            reached = records.load_progress(Path(folder) / "trainings" / f"{key}.safetensors")
            losses |= dict.fromkeys(training["methods"], reached.server.losses[-1])
        weights: dict[str, dict[str, float]] = {}
        for path in sorted(Path(folder, "samples").glob("*.npz")):
            e = {name: values for name, values in records.read_samples(path).items() if name.endswith("/e")}
            if e:
                of_tests = {test: [e[name] for name in e if name.startswith(f"{test}/")] for test in results.tests}
                weights[path.stem.split("-")[0]] = {t: float(np.concatenate(v).mean()) for t, v in of_tests.items()}
        return {"accuracy": results.table(), "loss": losses, "e": weights, "manifests": results.manifests}


if __name__ == "__main__":
    torch.set_num_threads(1)
    FILE.write_text(json.dumps({"changelog": sys.argv[1], **measure()}, indent=1, sort_keys=True) + "\n")
