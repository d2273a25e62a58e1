"""Check values from files against a shape.

A shape is a Number, a Text, [shape] for a list, {str: shape} for a dict, {"a": shape, "b?": shape} for named fields, of
which b is optional, Maybe(shape) if null is allowed, and PLAIN for a setting of any kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..text import flatten, quote

LONGEST = 20_000  # characters of a string
MOST = 1_000_000  # entries of a list or dict


class Malformed(ValueError):
    """A value in a file has the wrong shape: where, and what is wrong."""


@dataclass(frozen=True)
class Number:
    low: float = -1e15
    high: float = 1e15
    whole: bool = False


@dataclass(frozen=True)
class Text:
    longest: int = LONGEST


@dataclass(frozen=True)
class Maybe:
    shape: Any


@dataclass(frozen=True)
class Plain:
    """A string, a number, true, false, null, or a list of these."""

    lists: bool = True


PERCENT, AMOUNT, COUNT = Number(0, 100), Number(0), Number(0, 2**53, whole=True)
NAME, TEXT, PLAIN = Text(300), Text(), Plain()
SCALAR = Plain(lists=False)


def check(value: Any, shape: Any, where: str) -> Any:
    """A copy of `value` with the fields that `shape` names and no others."""
    match shape:
        case Maybe(inner):
            return None if value is None else check(value, inner, where)
        case Number():
            return _check_number(value, shape, where)
        case Text():
            return _check_text(value, shape, where)
        case Plain():
            return _check_plain(value, shape, where)
        case [inner]:
            _refuse_unless(isinstance(value, list | tuple) and len(value) <= MOST, value, "a list", where)
            return [check(each, inner, f"{where}[{i}]") for i, each in enumerate(value)]
        case dict():
            _refuse_unless(isinstance(value, dict) and len(value) <= MOST, value, "an object", where)
            return _check_fields(value, shape, where)
    raise AssertionError(f"no shape: {shape!r}")


def _check_fields(value: dict[str, Any], shape: dict[Any, Any], where: str) -> dict[str, Any]:
    if str in shape:
        names = [_check_text(name, NAME, f"a name in {where}") for name in value]
        return {name: check(value[name], shape[str], f"{where}.{name}") for name in names}
    checked = {}
    for field, inner in shape.items():
        name = field.removesuffix("?")
        if name in value:
            checked[name] = check(value[name], inner, f"{where}.{name}")
        elif name == field:
            raise Malformed(f"{flatten(where, 100)} has no {name!r}")
    return checked


def _check_number(value: Any, shape: Number, where: str) -> float:
    kind = "a whole number" if shape.whole else "a number"
    kinds = (int,) if shape.whole else (int, float)
    _refuse_unless(type(value) in kinds, value, kind, where)
    inside = shape.low <= value <= shape.high  # False for NaN; no overflow for a large int
    _refuse_unless(inside, value, f"{kind} from {shape.low:g} to {shape.high:g}", where)
    return value  # type: ignore[no-any-return]


def _check_text(value: Any, shape: Text, where: str) -> str:
    _refuse_unless(isinstance(value, str), value, "a string", where)
    _refuse_unless(len(value) <= shape.longest, value, f"a string of at most {shape.longest} characters", where)
    return value  # type: ignore[no-any-return]


def _check_plain(value: Any, shape: Plain, where: str) -> Any:
    if shape.lists and isinstance(value, list | tuple):
        return check(value, [SCALAR], where)
    if value is None or isinstance(value, bool):
        return value
    return check(value, TEXT if isinstance(value, str) else Number(), where)


def _refuse_unless(fits: bool, value: Any, kind: str, where: str) -> None:
    if not fits:
        raise Malformed(f"{flatten(where, 100)} is {quote(value, 40)}, not {kind}")
