"""Masks for SecAgg+ from a generator that takes the whole seed.

Flower's own folds a seed of 256 bits to 32, of which 28 vary for a pair of clients. The server knows the first number
of every upload, so it could try all seeds: one core needs seconds to unmask an upload of a round of two clients.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Sequence

import numpy as np
from flwr.client.mod import secaggplus_mod
from flwr.server.workflow import SecAggPlusWorkflow

WIDEST = 2**32


def draw_masks(seed: bytes, below: int, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """An int64 array of each shape, uniform over 0 to `below` - 1, a power of 2: the output of SHAKE-256."""
    if not 2 <= below <= WIDEST or below & (below - 1):
        raise ValueError(f"masks are below a power of 2 up to {WIDEST}, not {below}")
    sizes = [math.prod(shape) for shape in shapes]
    drawn = np.frombuffer(hashlib.shake_256(seed).digest(4 * sum(sizes)), "<u4").astype(np.int64) & (below - 1)
    parts = np.split(drawn, np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def install() -> None:
    """Have Flower's client and server draw masks with it. Both ends must; the terms of a federation see to that."""
    for user in (secaggplus_mod, SecAggPlusWorkflow):
        module = sys.modules[user.__module__]
        if not hasattr(module, "pseudo_rand_gen"):  # else Flower's weak masks would stay
            raise RuntimeError(f"{user.__module__} draws masks in another way than in Flower 1.41")
        module.pseudo_rand_gen = draw_masks  # type: ignore[attr-defined]
