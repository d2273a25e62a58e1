"""Methods, networks and datasets from other packages, which declare them as entry points."""

from __future__ import annotations

import warnings
from importlib.metadata import entry_points
from typing import Any


def load_plugins(group: str, taken: dict[str, Any]) -> dict[str, Any]:
    """The entry points of installed packages in `group`, by name; warns of those that fail or whose name is taken."""
    found: dict[str, Any] = {}
    for point in entry_points(group=group):
        if point.name in taken or point.name in found:
            warnings.warn(f"{point.value} is ignored: the name {point.name!r} in {group} is taken.", stacklevel=2)
            continue
        try:
            found[point.name] = point.load()
        except Exception as error:  # foreign code: whatever it raises, the rest must work
            warnings.warn(f"{point.value} of {group} could not be loaded: {error!r}.", stacklevel=2)
    return found
