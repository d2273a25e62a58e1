"""A dataset: a pool of images, and zero or more natural shifts of it with the same classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..errors import InputError
from ..store import content_hash
from ..text import clean

# Digest of an npz file behind published results -> its name in their manifests.
PUBLISHED = {"aeb7a9c0f16fcdf5d46178b111f959ec20b50e007185d0d564c89f9d6f5bc8e5": "Tiny-ImageNet"}


@dataclass(frozen=True)
class Pool:
    name: str
    x: np.ndarray  # uint8 [n, height, width, channels]
    labels: np.ndarray  # int64 [n]
    classes: tuple[str, ...]
    own: bool = False  # the user's file or folder, of which `name` is only the file name

    def __post_init__(self) -> None:
        shape = self.x.shape
        if self.x.dtype != np.uint8 or len(shape) != 4 or shape[3] not in (1, 3) or 0 in shape:
            raise InputError(
                f"{clean(self.name)}: images must be uint8 [n, height, width, 1 or 3] and not empty, "
                f"but they are {self.x.dtype} {list(shape)}."
            )
        if self.labels.shape != shape[:1] or self.labels.dtype.kind not in "iu":
            raise InputError(
                f"{clean(self.name)}: there must be one whole-number label per image, but there are {shape[0]} images "
                f"and labels {self.labels.dtype} {list(self.labels.shape)}."
            )
        object.__setattr__(self, "labels", self.labels.astype(np.int64))
        if self.labels.min() < 0 or self.labels.max() >= len(self.classes):
            raise InputError(
                f"{clean(self.name)}: labels run from {self.labels.min()} to {self.labels.max()}, "
                f"but there are {len(self.classes)} classes, counted from 0."
            )

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def moments(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of every channel, for pixels in [-1, 1]; from exact counts of the levels."""
        levels = np.arange(256) / 127.5 - 1
        counts = [np.bincount(channel.ravel(), minlength=256) for channel in np.moveaxis(self.x, 3, 0)]
        means = [float(np.average(levels, weights=count)) for count in counts]
        squares = [np.average((levels - mean) ** 2, weights=count) for mean, count in zip(means, counts, strict=True)]
        return tuple(means), tuple(float(square**0.5) for square in squares)

    @cached_property
    def identity(self) -> str:
        """Its name in a manifest; for a user's own pool, a hash of the content, so that renaming changes nothing."""
        return PUBLISHED.get(self.digest, f"sha256:{self.digest}") if self.own else self.name

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the decoded content, whatever file it came from."""
        return content_hash(self.x, self.labels, list(self.classes))


@dataclass(frozen=True)
class Dataset:
    pool: Pool
    natural: Mapping[str, Pool] = field(default_factory=dict)  # natural shifts by the name of their test

    def __post_init__(self) -> None:
        for shift in self.natural.values():
            if shift.classes != self.pool.classes:
                raise InputError(f"{clean(shift.name)} and {clean(self.pool.name)} have different classes.")
            if shift.x.shape[1:] != self.pool.x.shape[1:]:
                raise InputError(
                    f"{clean(shift.name)} has images of {list(shift.x.shape[1:])}, {clean(self.pool.name)} "
                    f"of {list(self.pool.x.shape[1:])}; they must agree."
                )

    @cached_property
    def repeats(self) -> dict[str, np.ndarray]:
        """By shift, which of its images are in the pool too, pixel for pixel, so may be trained on: bool [images]."""
        found = {}
        for name, shift in self.natural.items():
            images = [image.tobytes() for image in shift.x]
            wanted = set(images)
            shared = {data for image in self.pool.x if (data := image.tobytes()) in wanted}  # keeps only matches
            found[name] = np.array([image in shared for image in images])
        return found
