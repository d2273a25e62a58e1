"""From parts to a method, and from a method to plain data."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeAlias

from ..errors import InputError
from ..nets.net import Net
from .base import FedAvg, Method, Personal, Rounds
from .predictor import Forward, Predictor

Part: TypeAlias = Rounds | Personal | Predictor
Recipe: TypeAlias = tuple[Part | type[Part], ...] | Part | type[Part]

PLACES: dict[str, type[Part]] = {"rounds": Rounds, "personal": Personal, "predictor": Predictor}


@dataclass(frozen=True)
class Parts:
    """A method without its network."""

    rounds: Rounds = FedAvg()
    personal: Personal = Personal()
    predictor: Predictor = Forward()

    def on(self, net: Net) -> Method:
        return Method(net, self.rounds, self.personal, self.predictor)


def arrange(recipe: Recipe) -> Parts:
    """Each part in its place. A part may be rounds and personal in one; what is missing is FedAvg's."""
    places: dict[str, Any] = {}
    for part in recipe if isinstance(recipe, tuple) else (recipe,):
        part = _make(part) if isinstance(part, type) else part
        found = [name for name, kind in PLACES.items() if isinstance(part, kind)]
        if not found:
            raise InputError(f"{part!r} is not a part of a method; derive it from Rounds, Personal or Predictor.")
        _check_fields(part)
        for name in found:
            if name in places:
                raise InputError(f"{places[name]!r} and {part!r} are both {name} parts; a method has one.")
            places[name] = part
    return Parts(**places)


def _check_fields(part: Part) -> None:
    """Equality and records know fields only: parts that differ in other attributes would share a training."""
    others = vars(part).keys() - {each.name for each in fields(part)}
    for name in sorted(others):
        if not isinstance(getattr(type(part), name, None), cached_property):
            raise InputError(f"{type(part).__name__}.{name} is not a field; make the class a frozen dataclass.")


def _make(part: type[Part]) -> Part:
    try:
        return part()
    except InputError:
        raise
    except Exception as error:  # the class may be the user's own
        why = f"{type(error).__name__}: {error}"
        raise InputError(f"{part.__name__} cannot be made without arguments ({why}); register an instance.") from None


def compose(net: Net, recipe: Recipe) -> Method:
    """The method of a recipe on a network."""
    return arrange(recipe).on(net)


def describe(value: Any) -> dict[str, Any]:
    """A method or a part as plain data, for records: its class and its hyperparameters, nested ones too.

    Fields that do not take part in a comparison are left out, as the module of a wrapped one.
    """
    values: dict[str, Any] = {"is": f"{type(value).__module__}.{type(value).__qualname__}"}
    for each in filter(attrgetter("compare"), fields(value)):
        inner = getattr(value, each.name)
        values[each.name] = describe(inner) if is_dataclass(inner) else inner
    return values
