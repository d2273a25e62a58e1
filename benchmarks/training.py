"""One client's local epoch (1,500 images of 32x32, the CNN, batch 32), against the usual implementation.

usage: python benchmarks/training.py

That is a Dataset of Pillow images with random crop and flip, a DataLoader, an nn.Module and torch.optim.SGD.
The DataLoader is measured without workers and with one; the faster counts.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset

from fedthe import store
from fedthe.engine.fit import LoopFit, Optimizer
from fedthe.methods.base import FedAvg
from fedthe.nets.cnn import CNN
from fedthe.types import Shard
from testtime import Module, measure

RESULT = Path(__file__).with_suffix(".json")
ROWS = 1500


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images, self.labels = [Image.fromarray(image) for image in images], labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = ImageOps.expand(self.images[index], 4)
        left, top = random.randint(0, 8), random.randint(0, 8)
        image = image.crop((left, top, left + 32, top + 32))
        if random.random() < 0.5:
            image = ImageOps.mirror(image)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)
        return (pixels - 0.5) / 0.5, int(self.labels[index])


def main() -> None:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (ROWS, 32, 32, 3), dtype=np.uint8)
    labels = generator.integers(0, 10, ROWS)

    y, real = torch.from_numpy(labels), torch.ones(ROWS, dtype=torch.bool)
    shard = Shard(torch.from_numpy(images), y, real, torch.ones(10), torch.from_numpy(images[:1]), y[:1], real[:1])
    net = CNN(10)
    params = net.init(0)

    def ours() -> None:
        LoopFit(net, shard, Optimizer(), 1, 32, True, 4, (0, "bench"), 0)(FedAvg().loss, params)

    def field(workers: int) -> None:
        module = Module(1)
        optimizer = torch.optim.SGD(module.parameters(), 0.01, weight_decay=5e-4)
        for x, target in DataLoader(Pictures(images, labels), 32, shuffle=True, num_workers=workers):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(x), target).backward()
            optimizer.step()

    seconds = {
        "ours": measure(ours, 5),
        "field": measure(lambda: field(0), 5),
        "field_worker": measure(lambda: field(1), 5),
    }
    best = min(seconds["field"], seconds["field_worker"])
    gflop = ROWS * 3 * 2e-9 * (28 * 28 * 2400 + 10 * 10 * 51200 + 102400 + 640)
    for name, value in seconds.items():
        print(f"{name:14s} {value:6.3f} s an epoch")
    print(f"ratio {best / seconds['ours']:.2f}; ours runs at {gflop / seconds['ours']:.0f} GFLOP/s")
    facts = {"threads": torch.get_num_threads(), "torch": torch.__version__, "gflop": gflop}
    result = {"what": "seconds of one local epoch of 1,500 images", "seconds": seconds, "ratio": best / seconds["ours"]}
    store.write_json(RESULT, result | facts)


if __name__ == "__main__":
    main()
