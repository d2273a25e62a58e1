"""Can `glyphs` be learned? The CNN, trained centrally on 80 % of the pool, with and without flips.

Writes glyphs.json beside this file: accuracy in percent on the other 20 % and on unseen typefaces, over three seeds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedthe import rng, store, tree
from fedthe.data import glyphs
from fedthe.data.pool import Pool
from fedthe.nets import CNN

EPOCHS, BATCH, LR, MOMENTUM, DECAY = 12, 32, 0.02, 0.9, 5e-4


def to_input(images: np.ndarray) -> Tensor:
    """[-1, 1], channels last in memory, which is the faster layout on a CPU."""
    return (torch.from_numpy(images).float() / 127.5 - 1).permute(0, 3, 1, 2)


def augment(x: Tensor, draws: torch.Generator, flip: bool) -> Tensor:
    """A crop of the image padded by four pixels, and a flip for every second one."""
    n, _, height, width = x.shape
    padded = F.pad(x, (4, 4, 4, 4)).permute(0, 2, 3, 1)
    shift = torch.randint(9, (2, n, 1), generator=draws)
    rows, columns = shift[0] + torch.arange(height), shift[1] + torch.arange(width)
    if flip:
        mirrored = torch.rand(n, 1, generator=draws) < 0.5
        columns = torch.where(mirrored, columns.flip(1), columns)
    return padded[torch.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def accuracy(net: CNN, params: tree.Tree, pool: Pool) -> tuple[float, list[float]]:
    """Accuracy in percent, overall and for each class."""
    with torch.no_grad():
        said = torch.cat([net.logits(params, to_input(chunk)).argmax(1) for chunk in np.array_split(pool.x, 8)])
    right = said.numpy() == pool.labels
    return 100 * float(right.mean()), [100 * float(right[pool.labels == c].mean()) for c in range(len(pool.classes))]


def train(pool: Pool, seed: int, flip: bool) -> tuple[CNN, tree.Tree]:
    net = CNN(classes=len(pool.classes), channels=pool.x.shape[3], size=pool.x.shape[1])
    params = tree.map_leaves(lambda leaf: leaf.requires_grad_(), net.init(seed))
    optimizer = torch.optim.SGD(tree.flatten(params).values(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    steps = EPOCHS * (len(pool) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    draws = torch.Generator().manual_seed(seed)
    x, labels = to_input(pool.x), torch.from_numpy(pool.labels)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(pool), generator=draws).split(BATCH)[: len(pool) // BATCH]:
            loss = F.cross_entropy(net.logits(params, augment(x[rows], draws, flip)), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return net, tree.map_leaves(torch.Tensor.detach, params)


def mean_and_std(values: np.ndarray) -> list[float]:
    return [round(float(values.mean()), 2), round(float(values.std()), 2)]


def mean_of(rows: list[list[float]]) -> list[float]:
    return [round(float(value), 1) for value in np.mean(rows, axis=0)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--flips", choices=["both", "yes", "no"], default="both")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as home:  # an empty cache, so that the images are drawn
        os.environ["FEDTHE_HOME"] = home
        began = time.perf_counter()
        data = glyphs.load()
        drawn = time.perf_counter()
        glyphs.load()
        read = time.perf_counter()
    result: dict[str, object] = {
        "draw_s": round(drawn - began, 2),
        "read_s": round(read - drawn, 2),
        "settings": {"epochs": EPOCHS, "batch": BATCH, "lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY},
        "torch": torch.__version__,
        "digest": data.pool.digest,
        "digest_unseen": data.natural["unseen-typefaces"].digest,
    }
    for flip in {"both": (True, False), "yes": (True,), "no": (False,)}[arguments.flips]:
        runs = []
        for seed in range(arguments.seeds):
            began = time.perf_counter()
            order = rng.shuffled(rng.key(seed, "benchmark", "split"), len(data.pool))
            cut = len(order) * 4 // 5
            inside, outside = (
                Pool(data.pool.name, data.pool.x[rows], data.pool.labels[rows], data.pool.classes)
                for rows in (order[:cut], order[cut:])
            )
            net, params = train(inside, seed, flip)
            held, by_class = accuracy(net, params, outside)
            unseen, unseen_by_class = accuracy(net, params, data.natural["unseen-typefaces"])
            runs.append((held, unseen, by_class, unseen_by_class))
            took = time.perf_counter() - began
            print(f"flips {flip} seed {seed}: {held:.1f} held out, {unseen:.1f} unseen, {took:.0f} s", flush=True)
        helds, unseens = np.array([run[0] for run in runs]), np.array([run[1] for run in runs])
        result["with flips" if flip else "without flips"] = {
            "held_out": mean_and_std(helds),
            "unseen": mean_and_std(unseens),
            "drop": mean_and_std(helds - unseens),
            "held_out_by_class": dict(zip(data.pool.classes, mean_of([run[2] for run in runs]), strict=True)),
            "unseen_by_class": dict(zip(data.pool.classes, mean_of([run[3] for run in runs]), strict=True)),
        }
    store.write_json(arguments.out, result)


if __name__ == "__main__":
    main()
