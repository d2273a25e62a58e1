"""Earlier results in the folder of a run: those that new ones do not replace are moved, never lost."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from .. import records, store
from ..config import Config, make_config
from ..errors import Damaged, InputError
from .results import FILES


def make_room(folder: Path, config: Config) -> Path | None:
    """Move results of other settings to a folder of their own, and say where. Trainings and answers stay.

    A folder where results could not be written is refused.
    """
    for name in (*FILES, *(f"manifest-{seed}.json" for seed in config.seeds)):
        if (folder / name).is_dir():
            raise InputError(f"{folder / name} is a folder, where a file of the run belongs; move it away.")
    try:
        before = make_config(records.read_json(folder / "config.json") or {})
    except (InputError, TypeError, AttributeError):
        before = None  # of another version, or damaged
    if not (folder / "summary.json").exists() or (before is not None and config.adds_to(before)):
        return None
    return _move_results(folder)


def move_others(folder: Path, answers: Sequence[str]) -> Path | None:
    """Move results of the same settings if they have answers that are not among these, and say where.

    Those are of other code, or of a method that has failed since.
    """
    try:
        before = store.read_sealed(folder / "summary.json") or {}
    except Damaged as error:
        warnings.warn(f"{error} It is written again.", stacklevel=2)
        return None
    for name, digest in before.get("files", {}).items():
        if not (folder / name).is_file() or store.file_hash(folder / name) != digest:
            warnings.warn(f"{folder / name} is missing or was changed; it is written again.", stacklevel=2)
    return _move_results(folder) if set(before.get("answers", ())) - set(answers) else None


def _move_results(folder: Path) -> Path:
    place = folder / "earlier" / store.file_hash(folder / "summary.json")[:8]
    store.make_folder(place)
    manifests = sorted(each.name for each in folder.glob("manifest-*.json"))
    for name in ("report.html", *manifests, *FILES):  # summary.json last
        if (folder / name).exists():
            os.replace(folder / name, place / name)
    return place
