"""Clients' labelled rows, cut from one pool on the device on demand."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import overload

import torch
from torch import Tensor

from ..data.partition import Split
from ..data.plan import Federation
from ..types import Shard


class Shards(Sequence[Shard]):
    """Every client's shard. The pool is on the device once; each access copies a shard's rows."""

    def __init__(self, federation: Federation, device: torch.device | str = "cpu") -> None:
        self._x = torch.from_numpy(federation.pool.x).to(device)
        self._labels = torch.from_numpy(federation.pool.labels).to(device)
        self._classes = len(federation.pool.classes)
        self._splits = federation.clients

    def resplit(self, splits: Sequence[Split]) -> Shards:
        """The same pool, split differently."""
        other = copy(self)
        other._splits = tuple(splits)
        return other

    def __len__(self) -> int:
        return len(self._splits)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many rows each client trains on."""
        return tuple(len(split.train) for split in self._splits)

    @overload
    def __getitem__(self, k: int) -> Shard: ...
    @overload
    def __getitem__(self, k: slice) -> list[Shard]: ...
    def __getitem__(self, k: int | slice) -> Shard | list[Shard]:
        if isinstance(k, slice):
            return [self[i] for i in range(*k.indices(len(self)))]
        split = self._splits[k]
        train, val = torch.from_numpy(split.train), torch.from_numpy(split.val)
        images, labels, real = self._rows(train)
        counts = torch.bincount(labels, minlength=self._classes).float()
        return Shard(images, labels, real, counts, *self._rows(val))

    def _rows(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        here = rows.to(self._labels.device)
        return self._x[here], self._labels[here], torch.ones(len(rows), dtype=torch.bool, device=here.device)


def hide_labels(shard: Shard) -> Shard:
    """What a predictor may see of a client without labels: no row is real, and the counts of classes are 0."""
    nothing = {name: torch.zeros_like(getattr(shard, name)) for name in ("labels", "real", "counts")}
    return shard._replace(
        **nothing, val_labels=torch.zeros_like(shard.val_labels), val_real=torch.zeros_like(shard.val_real)
    )


def stack_shards(shards: Sequence[Shard], rows: int = 0) -> Shard:
    """One shard with a first axis over clients, padded to the longest of them, or to so many training rows."""
    longest, most_val = (max(len(shard[i]) for shard in shards) for i in (0, 4))
    longest = max(longest, rows)

    def pad(part: Tensor, rows: int) -> Tensor:
        if len(part) == rows:
            return part
        # with the first row, for a network may divide by zero on zeros; `real` is a mask, and padding is not real
        like = part[:1] if part.dtype != torch.bool and len(part) else part.new_zeros(1, *part.shape[1:])
        return torch.cat([part, like.expand(rows - len(part), *part.shape[1:])])

    lengths = (longest, longest, longest, None, most_val, most_val, most_val)
    return Shard(
        *(
            torch.stack([part if rows is None else pad(part, rows) for part in parts])
            for rows, parts in zip(lengths, zip(*shards, strict=True), strict=True)
        )
    )
