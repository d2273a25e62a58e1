"""Corrupted copies of rows by kind and severity, for streams in which these change over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..corruptions import CORRUPTION_VERSION, corrupt_mixed
from ..store import cached, content_hash
from .shifts import Stream

if TYPE_CHECKING:
    from torch import Tensor


def encode(stream: Stream) -> np.ndarray:
    """A number for each row, kind and severity: int64 [n]."""
    return np.asarray((stream.rows << 7) + (stream.kind.astype(np.int64) << 3) + stream.severity)


def make(x: np.ndarray, codes: np.ndarray, seed: int, frost: list[Tensor] | None, digest: str | None) -> np.ndarray:
    """The copies of rows of x with these codes, uint8 [codes, h, w, c], computed once and cached on disk."""
    rows, kinds, severities = codes >> 7, codes >> 3 & 15, codes & 7
    clean = x[rows]

    def corrupt() -> dict[str, np.ndarray]:
        from torch import from_numpy

        images = np.empty_like(clean)
        for severity in np.unique(severities):
            here = severities == severity
            picked = from_numpy(clean[here]), from_numpy(kinds[here])
            images[here] = corrupt_mixed(*picked, int(severity), from_numpy(rows[here]), seed, frost).numpy()
        return {"images": images}

    return cached("copies", content_hash(clean, codes, seed, digest, CORRUPTION_VERSION), corrupt)["images"]
