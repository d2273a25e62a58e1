"""Samples of a stream from files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..data.folder import list_visible
from ..errors import InputError
from ..foreign import show_path
from .bundle import Input
from .join import read_npz_rows
from .picture import take_sample


def read_samples(paths: Sequence[Path], takes: Input) -> tuple[list[str], list[Any]]:
    """A name for each sample, and the samples: of images, folders of them, or one npz file with images or x."""
    tables = [path for path in paths if path.suffix == ".npz"]
    if tables and len(paths) > 1:
        raise InputError("give one npz file, or images.")
    if tables:
        rows = read_npz_rows(tables[0])
        return [f"{tables[0].name}[{i}]" for i in range(len(rows))], list(rows)
    if not takes.is_picture:
        raise InputError("the model takes no pictures; give an npz file with x.")
    files = [file for path in paths for file in (list_visible(path) if path.is_dir() else [path])]
    if not files:
        raise InputError(f"{show_path(paths[0])} has no images; name a folder that has some.")
    if inner := next((file for file in files if file.is_dir()), None):
        raise InputError(f"{show_path(inner)} is a folder within a folder; name the folders that hold the images.")
    return [str(file) for file in files], [take_sample(file, takes) for file in files]
