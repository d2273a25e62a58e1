"""Methods that `fedthe.run` gets as Python objects: their names, and the recipes behind the names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from ..errors import InputError
from ..specs import Spec, Value, parse_spec
from ..text import quote
from . import METHODS, STUDIES
from .compose import PLACES, Part, Recipe, arrange
from .make import list_hyper, set_hyper

# A name or FILE.py:NAME, a class, a part, or a tuple of parts; ("mine", PARTS) gives parts a name, and a pair of any of
# these and a dict changes hyperparameters.
Given: TypeAlias = str | Recipe | tuple[str, Recipe] | tuple[str | Recipe, Mapping[str, Value]]


def name_methods(given: Iterable[Given] | Given) -> tuple[list[str], dict[str, Recipe]]:
    """The methods as settings name them, and the recipes of names that are not in the registry."""
    methods: list[str] = []
    recipes: dict[str, Recipe] = {}
    for each in [given] if isinstance(given, str | type | Part) else given:
        spec, recipe = _name(each)
        if recipe is not None:
            known = recipes.get(spec.name, (METHODS | STUDIES).get(spec.name, recipe))
            if known is not recipe and known != recipe:
                raise InputError(
                    f"{spec.name} names two methods; give one of them another name, such as "
                    f'("my_{spec.name}", {quote(recipe, 60)}).'
                )
            recipes[spec.name] = recipe
        methods.append(str(spec))
    return methods, recipes


def _name(given: Any) -> tuple[Spec, Recipe | None]:
    if isinstance(given, str):
        return parse_spec(given), None
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        spec, recipe = _name(given[0])
        return spec.vary(given[1]), recipe
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str):
        if parse_spec(given[0]) != Spec(given[0]):
            raise InputError(f"{quote(given[0])} cannot be the name of a method; use letters, digits, _ and -.")
        return Spec(given[0]), given[1]
    parts = given if isinstance(given, tuple) else (given,)
    kinds = [part if isinstance(part, type) else type(part) for part in parts]
    if not parts or not all(issubclass(kind, tuple(PLACES.values())) for kind in kinds):
        raise InputError(
            f"{quote(given)} is not a method; give a name, FILE.py:NAME, a class derived from Rounds, Personal or "
            "Predictor, or a tuple of such parts."
        )
    if isinstance(given, Part):
        return _name_part(given)
    return Spec("+".join(kind.__name__ for kind in kinds)), given


def _name_part(part: Part) -> tuple[Spec, Recipe]:
    """A part that differs from its class's default in plain hyperparameters is a variant of its class."""
    kind = type(part)
    try:
        default = list_hyper(kind())
        changed = {key: value for key, value in list_hyper(part).items() if default.get(key) != value}
        spec = Spec(kind.__name__).vary(changed)
        if set_hyper(arrange(kind), changed, kind.__name__) == arrange(part):
            return spec, kind
    except (InputError, TypeError):
        pass  # it has no default, or hyperparameters that are not plain
    return Spec(kind.__name__), part
