"""Sensor data: which exercise is the wearer of this smartwatch doing?

Ten people did seven shoulder exercises, with a watch on the left arm and then on the right (Burns et al. 2018,
https://arxiv.org/abs/1802.01489). Each person is a client, who trains on one arm and on four of the seven exercises:
their programme. Later the watch moves to the other arm, or the programme changes: two shifts after deployment.

    pip install --no-deps seglearn      # the package that ships the recordings, under a BSD licence
    python examples/watch.py            # or: python examples/watch.py PATH/TO/watch_dataset.npy
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import fedthe
from fedthe.data.unpickle import load_pickle
from fedthe.errors import InputError
from fedthe.foreign import explain

EXERCISES = ["pendulum", "abduction", "elevation", "internal rotation", "external rotation", "trapezius", "row"]
METHODS = ("fedavg", "fedavg_ft", "knn_per", "fedthe")
WIDTH = 100  # readings in a window: two seconds at 50 Hz
Rows = tuple[np.ndarray, np.ndarray]  # windows float32 [n, WIDTH, 6], labels [n]


class WatchNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv1d(6, 32, 9, stride=2), nn.GroupNorm(1, 32), nn.ReLU()),
            *(nn.Conv1d(32, 64, 9, stride=2), nn.GroupNorm(1, 64), nn.ReLU()),
        )
        self.head = nn.Linear(64, len(EXERCISES))

    def forward(self, x: Tensor) -> Tensor:  # [n, WIDTH, 6]: acceleration in g, rotation in rad/s
        return self.head(self.body(x.transpose(1, 2)).mean(2))


def find_recordings() -> Path:
    """The file in the package seglearn, which is not imported."""
    package = find_spec("seglearn")
    if package is None or not package.submodule_search_locations:
        raise InputError("the recordings are not here; run `pip install --no-deps seglearn`.")
    return Path(package.submodule_search_locations[0]) / "data" / "watch_dataset.npy"


def read_recordings(path: Path) -> dict[tuple[int, int, int], np.ndarray]:
    """Readings [time, 6] by (person, arm, exercise). The file is a pickle, and nothing in it is run."""
    found = load_pickle(path)
    with explain(f"{path} does not hold the recordings of seglearn", "install it again"):
        keys = zip(*(np.asarray(found[name]).astype(int).tolist() for name in ("subject", "side", "y")), strict=True)
        readings = [np.asarray(each, dtype=np.float32).reshape(-1, 6) for each in found["X"]]
        return dict(zip(keys, readings, strict=True))


def cut(recordings: dict[int, np.ndarray], step: int, start: float = 0.0, stop: float = 1.0) -> Rows:
    """Windows from the part of each recording between `start` and `stop`, one every `step` readings."""
    x, y = [], []
    for exercise, readings in recordings.items():
        part = readings[int(start * len(readings)) : int(stop * len(readings))]
        windows = [part[at : at + WIDTH] for at in range(0, len(part) - WIDTH + 1, step)]
        x += windows
        y += [exercise] * len(windows)
    return np.stack(x), np.array(y)


def make_federation(recordings: dict[tuple[int, int, int], np.ndarray]) -> fedthe.Federation:
    clients, other_arm, new_exercises = [], [], []
    for i, person in enumerate(sorted({person for person, _, _ in recordings})):
        arms = [{e: x for (p, arm, e), x in recordings.items() if (p, arm) == (person, side)} for side in (0, 1)]
        worn, other = arms[i % 2], arms[1 - i % 2]
        programme = {(3 * i + k) % 7 for k in range(4)}
        own = {e: x for e, x in worn.items() if e in programme}
        # earlier windows train, later ones test: neighbours in time are alike
        parts = {"train": cut(own, 25, 0.0, 0.5), "val": cut(own, 50, 0.5, 0.7), "test": cut(own, 50, 0.7, 1.0)}
        clients.append(parts)
        other_arm.append(cut({e: x for e, x in other.items() if e in programme}, 50))
        new_exercises.append(cut({e: x for e, x in worn.items() if e not in programme}, 50))
    tests = {"other_arm": other_arm, "new_exercises": new_exercises}
    return fedthe.Federation.from_clients(clients, classes=EXERCISES, tests=tests, name="watch")


def main(path: Path, methods: Sequence[str] = METHODS) -> fedthe.Results:
    torch.set_num_threads(1)  # batches are small: a second thread gains little
    results = fedthe.run(
        name="watch",
        methods=methods,
        federation=make_federation(read_recordings(path)),
        net=fedthe.wrap_module(WatchNet, head="head"),
        seeds=[0, 1, 2],
        rounds=40,
        local_epochs=1,
        batch=16,
        lr=0.1,
        momentum=0.5,
    )
    print(results, results.compare("fedthe", "fedavg_ft"), sep="\n\n")
    return results


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else find_recordings())
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
