"""The cost of checks: saving and loading checkpoints, samples and cached images with and without SHA-256.

python benchmarks/seal.py [--repeats 9] [--out benchmarks/seal.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from fedthe import records, store, tree
from fedthe.engine.clients import Clients
from fedthe.engine.server import Server
from fedthe.engine.visit import Progress
from fedthe.nets.cnn import CNN

CLIENTS = 20


def make_progress() -> Progress:
    """A CNN on CIFAR-10, and another one for every client, as Ditto keeps them."""
    shared = CNN(10, size=32).init(0)
    own = {name: torch.randn(CLIENTS, *leaf.shape) for name, leaf in tree.flatten(shared).items()}
    clients = Clients.start(shared, CLIENTS).put(range(CLIENTS), own, 6)
    return Progress(Server(7, shared, (0.5,) * 7), {}, clients)


def no_hash(*parts: object) -> str:
    return "none"


def measure(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("seal.json"))
    options = parser.parse_args()
    images = np.random.default_rng(0).integers(0, 256, (10_000, 32, 32, 3), dtype=np.uint8)
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, cache = Path(folder) / "abc-7.safetensors", Path(folder) / "corrupted-abc.npz"
        progress = make_progress()
        works: dict[str, tuple[Path, Callable[[], object]]] = {
            "save a checkpoint": (checkpoint, lambda: records.save_progress(checkpoint, progress)),
            "load a checkpoint": (checkpoint, lambda: records.load_progress(checkpoint)),
            "write cached images": (cache, lambda: store.write_arrays(cache, {"images": images})),
            "read cached images": (cache, lambda: store.read_arrays(cache)),
        }
        for name, (path, work) in works.items():
            work()
            sealed = measure(work, options.repeats)
            with (
                mock.patch.object(records, "_hash_tensors", no_hash),
                mock.patch.object(store, "content_hash", no_hash),
            ):
                if name.startswith(("load", "read")):
                    works[name.replace("load", "save").replace("read", "write")][1]()  # a file that passes unhashed
                plain = measure(work, options.repeats)
            works[name.replace("load", "save").replace("read", "write")][1]()
            rows[name] = {"mib": path.stat().st_size / 2**20, "ms": sealed, "ms_without": plain}
    options.out.write_text(json.dumps({"torch": torch.__version__, "results": rows}, indent=1) + "\n")
    for name, row in rows.items():
        print(f"{name:20} {row['mib']:6.1f} MiB {row['ms']:8.1f} ms, without hashes {row['ms_without']:8.1f} ms")


if __name__ == "__main__":
    main()
