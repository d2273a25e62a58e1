"""Numbers from the user, converted to Python's, so that NumPy's give the same draws and hashes."""

from __future__ import annotations

import operator
from typing import Any

from ..errors import InputError
from ..text import flatten

LARGEST = 10**18  # larger ones make no sense here, and Python may refuse to print them


def read_whole(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise InputError(f"{name} must be a whole number, not {flatten(repr(value), 60)}.") from None
    if not -LARGEST < number < LARGEST:
        raise InputError(f"{name} must be a whole number of at most 18 digits.")
    return number


def read_number(name: str, value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        raise InputError(f"{name} is too large a number.") from None
    except (TypeError, ValueError):
        raise InputError(f"{name} must be a number, not {flatten(repr(value), 60)}.") from None
