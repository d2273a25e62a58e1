"""Samples of a stream from files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError
from .bundle import Input
from .join import read_npz_rows
from .picture import take_sample


def read_samples(paths: Sequence[Path], takes: Input) -> tuple[list[str], list[Any]]:
    """A name for each sample, and the samples: of images, each a file, or of an npz file with images or x."""
    files = [path for path in paths if path.suffix == ".npz"]
    if files and len(paths) > 1:
        raise InputError("give one npz file, or images.")
    if files:
        rows = read_npz_rows(files[0])
        return [f"{files[0].name}[{i}]" for i in range(len(rows))], list(rows)
    if not takes.is_picture:
        raise InputError("the model takes no pictures; give an npz file with x.")
    return [str(path) for path in paths], [take_sample(path, takes) for path in paths]
