"""A round on the CPU with more and more clients at a time, against one client at a time on all of torch's threads.

    python benchmarks/threads.py [--clients 20] [--repeats 3] [--out benchmarks/threads.json]

CIFAR-10 shapes, the CNN, batch 32, one local epoch of 96 images a client. Needs only torch and NumPy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))  # runs where the package is not installed

import torch

from fedthe.engine import loop
from fedthe.engine.loop import Loop
from fedthe.engine.train import start, train_round
from fedthe.engine.visit import Run, Training, Visit
from fedthe.methods.base import Method
from fedthe.nets.cnn import CNN
from fedthe.types import Shard

IMAGES = 96


def make_shard(k: int) -> Shard:
    draw = torch.Generator().manual_seed(k)
    images = torch.randint(0, 256, (IMAGES, 32, 32, 3), generator=draw, dtype=torch.uint8)
    labels, real = torch.arange(IMAGES) % 10, torch.ones(IMAGES, dtype=torch.bool)
    return Shard(images, labels, real, torch.bincount(labels, minlength=10).float(), images[:8], labels[:8], real[:8])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("threads.json"))
    options = parser.parse_args()
    method, settings = Method(CNN(10, size=32)), Training(local_epochs=1)
    run = Run(0, [make_shard(k) for k in range(options.clients)])
    begun, cores = start(method, options.clients, 0), len(os.sched_getaffinity(0))

    def time_round(engine: Loop) -> float:
        times = []
        for _ in range(options.repeats + 1):
            began = time.perf_counter()
            train_round(Visit((method,), settings, [run], [[begun]]), engine)
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])

    counts = sorted({1, 2, 4, 8, 16, cores} & set(range(1, cores + 1)))
    seconds = {str(threads): round(time_round(Loop(threads=threads)), 3) for threads in counts}
    with mock.patch.object(loop, "map_in_threads", lambda fn, items, threads: map(fn, items)):
        before = round(time_round(Loop()), 3)
    facts = {
        "cores": cores,
        "torch": torch.__version__,
        "clients": options.clients,
        "torch_threads": torch.get_num_threads(),
    }
    options.out.write_text(json.dumps({**facts, "seconds": seconds, "before": before}, indent=1) + "\n")
    for threads, taken in seconds.items():
        print(f"{threads:>3} clients at a time: {taken:7.2f} s a round, {before / taken:5.2f} times as fast as before")
    print(f"one at a time on {torch.get_num_threads()} threads of torch: {before:.2f} s")


if __name__ == "__main__":
    main()
