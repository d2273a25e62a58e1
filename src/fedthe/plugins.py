"""Methods, networks and datasets of others: packages name them under an entry point group, and they are listed here."""

from __future__ import annotations

import warnings
from importlib.metadata import entry_points
from typing import Any


def load_plugins(group: str, taken: dict[str, Any]) -> dict[str, Any]:
    """What installed packages offer under `group`, by name. One that fails, or whose name is taken, costs a warning."""
    found: dict[str, Any] = {}
    for point in entry_points(group=group):
        if point.name in taken or point.name in found:
            warnings.warn(f"{point.value} is passed over: the name {point.name!r} in {group} is taken.", stacklevel=2)
            continue
        try:
            found[point.name] = point.load()
        except Exception as error:  # somebody else's code: whatever it raises, the rest must work
            warnings.warn(f"{point.value} of {group} could not be loaded: {error!r}.", stacklevel=2)
    return found
