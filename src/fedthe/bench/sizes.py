"""How much work is timed, at full size and smaller."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
