"""Stateless draws: a number depends on what it is for, never on earlier draws.

Every draw is keyed by a path of names and integers, such as `key(seed, "corrupt", "fog")`, and by an item (a sample, a
client, a round). So results do not depend on batch size, order, number of threads or device. The generator is
Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), written once for NumPy arrays and
torch tensors.
"""

from __future__ import annotations

import hashlib
import operator
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch

    Array = TypeVar("Array", np.ndarray, torch.Tensor)

Key = tuple[int, int]

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def key(*path: int | str) -> Key:
    """Two 32-bit words that identify what the draws are for."""
    # as Python integers: the repr of NumPy's differs between versions
    plain = tuple(part if isinstance(part, str) else operator.index(part) for part in path)
    digest = hashlib.sha256(repr(plain).encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def philox(
    counter: tuple[Array, Array, Array, Array], key: Key | tuple[Array, Array]
) -> tuple[Array, Array, Array, Array]:
    """Ten rounds of Philox4x32; each word is an int64 in [0, 2**32). A key of arrays has a key per counter."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 products overflow but keep their low 64 bits; the masks below remove the sign
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & _WORD) ^ c1 ^ k0, p1 & _WORD, (p0 >> 32 & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def words(key: Key, items: Array, count: int) -> Array:
    """`count` 32-bit words for each item: int64 [items, count]. A longer draw begins with the shorter one."""
    blocks = -(-count // 4)
    item = items[:, None]
    if isinstance(items, np.ndarray):
        block = np.arange(blocks, dtype=np.int64)[None] + 0 * item
        drawn = np.stack(philox((block, 0 * block, item & _WORD, item >> 32 & _WORD), key), axis=-1)
    else:
        import torch

        block = torch.arange(blocks, device=items.device)[None] + 0 * item
        drawn = torch.stack(philox((block, 0 * block, item & _WORD, item >> 32 & _WORD), key), dim=-1)
    return drawn.reshape(len(items), 4 * blocks)[:, :count]


def uniform(key: Key, items: Array, count: int) -> Array:
    """In (0, 1), never 0 or 1: the centres of 2**23 cells, exact in float32. Float64 in NumPy, float32 in torch."""
    cells = words(key, items, count) >> 9
    if isinstance(cells, np.ndarray):
        return (cells + 0.5) * 2.0**-23
    return (cells.float() + 0.5) * 2.0**-23


def normal(key: Key, items: Array, count: int) -> Array:
    """Standard normal, by the inverse of its distribution function."""
    u = uniform(key, items, count)
    if isinstance(u, np.ndarray):
        from scipy.special import ndtri

        return np.asarray(ndtri(u))
    return (2 * u - 1).erfinv_().mul_(2**0.5)


def integers(key: Key, items: Array, count: int, low: int, high: int) -> Array:
    """Integers in [low, high)."""
    return (words(key, items, count) * (high - low) >> 32) + low


def shuffled(key: Key, n: int) -> np.ndarray:
    """A permutation of range(n)."""
    drawn = words(key, np.arange(n, dtype=np.int64), 2)
    return np.argsort(drawn[:, 0] << 31 | drawn[:, 1] >> 1, kind="stable")


def choose(key: Key, n: int, count: int) -> np.ndarray:
    """`count` distinct members of range(n), in random order."""
    if count <= n // 8:
        # few out of many: draw one by one and skip repeats, instead of shuffling all n
        drawn = integers(key, np.zeros(1, dtype=np.int64), 2 * count + 16, 0, n)[0]
        first = np.sort(np.unique(drawn, return_index=True)[1])
        if len(first) >= count:
            return np.asarray(drawn[first[:count]])
    return shuffled(key, n)[:count]
