"""The work that is timed: its sizes, and synthetic clients, images and parameters, which need only torch and NumPy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .. import rng, tree
from ..data.partition import Split
from ..data.plan import Federation, Settings
from ..data.pool import Dataset, Pool
from ..nets.net import Net, Start
from ..tree import Tree

CLASSES, SIDE = 10, 32  # CIFAR-10
PIXELS = SIDE * SIDE * 3  # bytes of an image
DIRICHLET = 0.1
SEVERITY = 5


@dataclass(frozen=True)
class Sizes:
    """How much work is timed. The defaults are the full sizes, which every number refers to."""

    runs: int = 6
    clients: int = 20
    train: int = 1500  # training images per client
    large_train: int = 1500  # the same for the larger networks
    streams: int = 6  # per client, for FedTHE
    samples: int = 500  # per stream
    tuned: int = 500  # samples per client, in one stream, for methods that fine-tune at test time
    corrupted: int = 10_000
    repeats: int = 3
    matmul: int = 8192  # side of the matrices, and 64 times the images, that measure the rate of arithmetic
    copied: int = 2**30  # bytes of the copy that measures the bandwidth


FULL = Sizes()
FULL_QUICK = replace(FULL, repeats=1)
# For a CPU, or for one client at a time: about two minutes on two cores, and about fifteen seconds.
SMALL = Sizes(clients=2, train=320, large_train=64, tuned=40, corrupted=1500, matmul=2048, copied=2**28)
SMALL_QUICK = replace(
    SMALL, train=96, large_train=32, samples=100, tuned=8, corrupted=300, repeats=1, matmul=1024, copied=2**26
)


def pick_sizes(on_gpu: bool, stacked: bool, quick: bool) -> Sizes:
    """The full sizes where they take seconds: on a GPU with all clients stacked."""
    if on_gpu and stacked:
        return FULL_QUICK if quick else FULL
    small = SMALL_QUICK if quick else SMALL
    return replace(small, matmul=FULL.matmul, copied=FULL.copied) if on_gpu else small


def make_federation(clients: int, train: int) -> Federation:
    """Clients of equal size with learnable images and Dirichlet class mixes; three fifths of the rows train.

    `partition` would need scipy, and no number depends on which client holds what.
    """
    draw, fifth = _generator("labels"), max(1, train // 3)
    rows = train + 2 * fifth
    mixes = draw.dirichlet([DIRICHLET] * CLASSES, clients)
    labels = np.concatenate([draw.choice(CLASSES, rows, p=mix) for mix in mixes])
    pool = Pool("made", make_images(labels), labels, tuple(map(str, range(CLASSES))))
    mine = np.arange(clients * rows).reshape(clients, rows)
    splits = [Split(k[:train], k[train : train + fifth], k[train + fifth :]) for k in mine]
    return Federation(Dataset(pool), Settings(clients, DIRICHLET), tuple(splits), {})


def make_images(labels: np.ndarray, noises: int = 509) -> np.ndarray:
    """A coarse pattern per class plus noise, uint8 [n, SIDE, SIDE, 3]. The noise repeats every `noises` images."""
    draw = _generator("images")
    coarse = draw.normal(128, 40, (CLASSES, 8, 8, 3)).repeat(SIDE // 8, 1).repeat(SIDE // 8, 2).astype(np.int16)
    noise = draw.normal(0, 30, (noises, SIDE, SIDE, 3)).astype(np.int16)
    images = np.empty((len(labels), SIDE, SIDE, 3), np.uint8)
    for first in range(0, len(labels), noises):  # in pieces, because the sums are int16
        some = labels[first : first + noises]
        images[first : first + noises] = (coarse[some] + noise[: len(some)]).clip(0, 255)
    return images


def _generator(what: str) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array(rng.key("bench", what), np.uint64)))


def draw_params(net: Net) -> Tree:
    """Initial parameters, drawn by torch: `Net.init` needs scipy."""
    return tree.unflatten({name: _draw_start(start, rng.key("bench", name)) for name, start in net.starts().items()})


def _draw_start(start: Start, key: rng.Key) -> Tensor:
    if start.kind == "constant":
        return torch.full(start.shape, start.scale)
    one, count = torch.zeros(1, dtype=torch.int64), int(np.prod(start.shape))
    drawn = rng.normal(key, one, count) if start.kind == "normal" else 2 * rng.uniform(key, one, count) - 1
    return (drawn * start.scale).view(start.shape)
