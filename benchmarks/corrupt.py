"""The speed of the corruptions against their literal versions in tests/oracles.py, side by side in one process.

    python benchmarks/corrupt.py [--images 10000] [--subset 200] [--threads 2] [--out benchmarks/corrupt.json]

Each corruption at severity 5: the fast version on all images (best of three), and the literal one, whose cost per image
is constant, on a subset. Then what the benchmark does: one random corruption per image, both versions on all images.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from fedthe.corruptions import CORRUPTIONS, corrupt, corrupt_mixed
from fedthe.corruptions.frost import make_frost
from fedthe.store import write_json

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

import oracles  # noqa: E402

SEVERITY, SEED = 5, 0


def make_images(n: int) -> torch.Tensor:
    """Smooth colours with a sharp box and some noise, uint8 [n, 32, 32, 3]."""
    random = np.random.default_rng(0)
    ground = torch.from_numpy(random.uniform(0, 255, (n, 3, 5, 5))).float()
    images = torch.nn.functional.interpolate(ground, (32, 32), mode="bicubic").permute(0, 2, 3, 1)
    images[:, 8:20, 12:28] = images[:, 16:17, 16:17]
    images += torch.from_numpy(random.normal(0, 6, images.shape))
    return images.clamp_(0, 255).to(torch.uint8)


def time_fast(work: Callable[[], object], n: int) -> float:
    """Seconds per image."""
    work()  # tables are made once
    times = []
    for _ in range(3):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return min(times) / n


def time_literal(images: np.ndarray, names: list[str], frost: list[np.ndarray]) -> float:
    """Seconds per image, one name for each."""
    start = perf_counter()
    for item, (image, name) in enumerate(zip(images, names, strict=True)):
        oracles.corrupt_one(image, name, SEVERITY, item, SEED, frost)
    return (perf_counter() - start) / len(images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--subset", type=int, default=200, help="images per corruption for the literal version")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=HERE / "corrupt.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    images, items = make_images(options.images), torch.arange(options.images)
    frost = [texture.numpy() for texture in make_frost()]
    rows: dict[str, dict[str, float]] = {}
    print(f"{'ms per image':18}     fast  literal    ratio")

    def report(name: str, fast: float, literal: float) -> dict[str, float]:
        print(f"{name:18} {1e3 * fast:8.4f} {1e3 * literal:8.3f} {literal / fast:8.1f}", flush=True)
        return {
            "fast_ms_per_image": round(1e3 * fast, 5),
            "oracle_ms_per_image": round(1e3 * literal, 4),
            "ratio": round(literal / fast, 2),
        }

    total = np.zeros(2)
    for name in CORRUPTIONS:
        time_literal(images[:3].numpy(), [name] * 3, frost)
        literal = time_literal(images[: options.subset].numpy(), [name] * options.subset, frost)
        fast = time_fast(partial(corrupt, images, name, SEVERITY, items, SEED), options.images)
        rows[name] = report(name, fast, literal)
        total += fast, literal
    all_fifteen = report("all fifteen", *total)

    kinds = np.random.default_rng(1).integers(0, len(CORRUPTIONS), options.images)
    one_each = partial(corrupt_mixed, images, torch.from_numpy(kinds), SEVERITY, items, SEED)
    fast = time_fast(one_each, options.images)
    mixed = report("mixed", fast, time_literal(images.numpy(), [CORRUPTIONS[kind] for kind in kinds], frost))
    write_json(
        options.out,
        {
            "what": "corruptions of 32x32 RGB images at severity 5: batched against the literal loop over images, "
            "which draws the same numbers",
            "images": options.images,
            "oracle_images": {"each": options.subset, "mixed": options.images},
            "threads": options.threads,
            "cpu_cores": os.cpu_count(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "corruptions": rows,
            "total": all_fifteen,
            "mixed": mixed,
        },
    )


if __name__ == "__main__":
    main()
