"""Values of settings: from words of the command line, or from TOML, to the type that a setting takes."""

from __future__ import annotations

import math
import os
import typing
from collections.abc import Mapping
from typing import Any, Literal

from .errors import InputError
from .specs import parse_spec
from .text import clean, find_nearest, guess_value, is_plain, quote, split_list

LARGEST = 2**31 - 1  # of every whole number: no machine fits more rounds, clients or pixels
LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes: the limits of file systems
DEEPEST = 8  # levels of nested tables: no method nests its hyperparameters deeper


def from_text(text: str, hint: Any, optional: bool = False) -> Any:
    """A word of the command line as the type that the setting takes."""
    if optional and text.lower() == "none":
        return None
    if typing.get_origin(hint) is tuple:
        kind = typing.get_args(hint)[0]
        parts = split_list(text) if text else []  # curve= is empty
        return [from_text(part, kind) for part in parts]
    return text if hint is str else guess_value(text)


def convert(key: str, value: Any, hint: Any, optional: bool = False) -> Any:
    """The value as the type `hint`, or an error that names the setting."""
    if value is None and optional:
        return None
    if hint is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    origin = typing.get_origin(hint)
    if origin is tuple:
        kind = typing.get_args(hint)[0]
        values = value if isinstance(value, list | tuple) else [value]
        return tuple(convert(key, each, kind) for each in values)
    if origin is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            near = find_nearest(value if isinstance(value, str) else "", choices)
            raise InputError(f"{key} cannot be {quote(value)}; {near}")
        return value
    if hint == dict[str, str]:
        if not isinstance(value, Mapping):
            raise InputError(f"{key} must be a table with a text per stream, such as [{key}], not {quote(value)}.")
        return dict(value)  # which the streams themselves check
    if origin is dict:
        if not (isinstance(value, Mapping) and all(isinstance(each, Mapping) for each in value.values())):
            raise InputError(f"{key} must hold a table per method, such as [hyper.fedthe], not {quote(value)}.")
        return {_check_text(key, method): _flatten(f"{key}.{method}", given) for method, given in value.items()}
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is str and key in ("name", "unknown") and is_number:
        value = str(_check_number(key, value))
    if not (is_number if hint is float else isinstance(value, hint)) or (hint is int and not is_number):
        raise InputError(f"{key} must be {_KINDS[hint]}, not {quote(value)}.")
    if hint is str:
        return str(parse_spec(_check_text(key, value))) if key == "methods" else _check_text(key, value)
    if hint is bool:
        return value
    return float(_check_number(key, value, whole=False)) if hint is float else _check_number(key, value)


def _check_number(key: str, value: float, whole: bool = True) -> float:
    """The number, if it is finite and not too large. `whole`: integers stay integers."""
    if not whole and isinstance(value, int):
        value = float(value) if abs(value) < 10**300 else math.inf
    if isinstance(value, int):
        if abs(value) > LARGEST:
            raise InputError(f"{key} is too large: whole numbers go up to {LARGEST}, but this is {quote(value, 40)}.")
        return value
    if not math.isfinite(value):
        raise InputError(f"{key} must be a finite number, not {value}.")
    return value + 0.0  # turns -0.0, which would have another hash, into 0.0


def _check_text(key: str, value: Any) -> str:
    """The text, if it is printable and short enough for a path."""
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{key} must not be empty; leave it out for its default.")
    if not is_plain(value):
        raise InputError(f"{key} must be text without control characters, not {quote(value)}.")
    if max(map(len, os.fsencode(value).split(b"/"))) > LONGEST_NAME or len(os.fsencode(value)) > LONGEST_PATH:
        raise InputError(f"{key} is too long for the name of a file or folder: {quote(value)}.")
    return value


def _flatten(key: str, given: Mapping[str, Any], depth: int = DEEPEST) -> dict[str, Any]:
    """[hyper.fedthe_plus.then] lr = 0.1 is the same as then.lr = 0.1"""
    flat: dict[str, Any] = {}
    if not depth:
        raise InputError(f"{clean(key)} nests tables too deep; write hyper.METHOD.NAME.")
    for name, value in given.items():
        whole = f"{key}.{_check_text(key, name)}"
        if isinstance(value, Mapping):
            flat |= {f"{name}.{rest}": each for rest, each in _flatten(whole, value, depth - 1).items()}
        elif isinstance(value, str):
            flat[name] = _check_text(clean(whole), value)
        elif isinstance(value, list | tuple):
            if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in value):
                raise InputError(f"{clean(whole)} must be numbers, such as 0.1,0.9, not {quote(value)}.")
            flat[name] = [_check_number(clean(whole), each) for each in value]
        elif isinstance(value, int | float):
            flat[name] = value if isinstance(value, bool) else _check_number(clean(whole), value)
        else:
            raise InputError(f"{clean(whole)} must be a number, numbers, a word, true or false, not {quote(value)}.")
    return flat


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
