"""Methods by name, with hyperparameters changed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..nets.make import check_net, find_defaults
from ..nets.net import Net
from ..plugins import is_file_spec, load_object
from ..specs import LONGEST, Spec
from ..text import find_nearest, flatten, quote
from . import METHODS, STUDIES
from .base import Method, Personal, Rounds
from .compose import Parts, Recipe, arrange
from .fedthe import HeadEnsemble

if TYPE_CHECKING:
    from ..config import Config

Recipes = Mapping[str, Recipe]  # by name


def make_methods(config: Config, net: Net, recipes: Recipes | None = None) -> dict[str, Method]:
    """The methods by id. `recipes`: objects in place of what the settings would name."""
    parts = find_parts(config, recipes, net)
    made = {name: parts[name].on(net) for name in config.specs}
    for method in made.values():
        try:
            method.check(config.training.optimizer)
        except InputError:
            raise
        except Exception:  # in the method's own code: the run will report it with its traceback
            continue
    return made


def methods_for(net: Net) -> list[str]:
    """The names of the methods that run on a network: some need norm layers, or a head of one layer."""
    return [name for name, recipe in METHODS.items() if _fits(arrange(recipe).on(net))]


def _fits(method: Method) -> bool:
    try:
        method.check()
    except InputError:
        return False
    return True


def find_parts(config: Config, recipes: Recipes | None = None, net: Any = None) -> dict[str, Parts]:
    """By id, the parts of every method that the settings name. Refuse unknown names and bad hyperparameters."""
    if net is None and not is_file_spec(config.net):
        check_net(config.net)
    named = {spec.name for spec in config.specs.values()}
    asked = [*config.specs.values(), *(Spec(name) for name in config.hyper if name not in named)]
    search_lr = find_defaults(net if isinstance(net, Net) else config.net).search_lr
    return {spec.id: _find_parts(spec, config, recipes or {}, search_lr) for spec in asked}


def _find_parts(spec: Spec, config: Config, recipes: Recipes, search_lr: float | None) -> Parts:
    parts = arrange_spec(spec, recipes)
    if search_lr is not None and isinstance(parts.predictor, HeadEnsemble):
        parts = set_hyper(parts, {"search.lr": search_lr}, spec.name)
    parts = set_hyper(parts, config.hyper.get(spec.name, {}), spec.name)
    return set_hyper(parts, dict(spec.hyper), spec.name)


def arrange_spec(spec: Spec, recipes: Recipes | None = None) -> Parts:
    """The parts of what a spec names, without its hyperparameters."""
    try:
        return arrange(find_recipe(spec, recipes))
    except InputError as error:
        if not spec.file or str(error).startswith(spec.file):
            raise
        raise InputError(f"{spec}: {error}") from error


def find_recipe(spec: Spec, recipes: Recipes | None = None) -> Recipe:
    """What a spec names, in its file, among the given recipes or in the registry."""
    name = spec.name
    if not re.fullmatch(r"[\w.+ -]{1,100}", name) or len(spec.id) > LONGEST:
        raise InputError(f"{quote(spec.id)} cannot be part of a file's name; rename the method.")
    if spec.file:
        recipe: Recipe = load_object(f"{spec.file}:{name}")
        return recipe
    known = METHODS | STUDIES | dict(recipes or {})
    if name not in known:
        hint = f"write {name}:NAME." if name.endswith(".py") else find_nearest(name, known)
        raise InputError(f"there is no method {name!r}; {hint}")
    return known[name]


def set_hyper(parts: Parts, given: Mapping[str, Any], name: str) -> Parts:
    """Change hyperparameters of a method, each named by the end of its dotted path, as much of it as is unique."""
    is_one = isinstance(parts.personal, Rounds) and parts.personal == parts.rounds
    paths = [path for path in list_hyper(parts) if not (is_one and path.startswith("personal."))]
    keys: dict[str, str] = {}  # by path
    for key in given:
        path = _find_path(paths, key, name)
        if path in keys:
            raise InputError(f"{name}: {keys[path]} and {key} are one hyperparameter; set it once.")
        keys[path] = key
    try:
        parts = _set_all(parts, {path: given[key] for path, key in keys.items()})
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
    except Exception as error:  # of the user's own class
        why = flatten(f"{type(error).__name__}: {error}", 200)
        settings = ", ".join(f"{key}={setting!r}" for key, setting in given.items())
        raise InputError(f"{name} cannot have {settings} ({why}).") from error
    return replace(parts, personal=parts.rounds) if is_one and isinstance(parts.rounds, Personal) else parts


def _find_path(paths: list[str], key: str, name: str) -> str:
    found = [path for path in paths if f".{path}".endswith(f".{key}")]
    if not found:
        has = find_nearest(key, {path.rsplit(".", 1)[-1] for path in paths}) if paths else "it has none."
        raise InputError(f"{name} has no hyperparameter {key!r}; {has}")
    if len(found) > 1:
        ways = " or ".join(".".join(path.split(".")[-2:]) for path in found)
        raise InputError(f"{name} has several hyperparameters {key!r}; write {ways}.")
    return found[0]


def list_hyper(value: Any, before: str = "") -> dict[str, Any]:
    """Every hyperparameter by its dotted path, and its value."""
    listed: dict[str, Any] = {}
    for each in fields(value):
        inner = getattr(value, each.name)
        if is_dataclass(inner):
            listed |= list_hyper(inner, f"{before}{each.name}.")
        elif each.name != "then":  # a `then` of None is a part that is not there
            listed[f"{before}{each.name}"] = inner
    return listed


def _set_all(value: Any, settings: Mapping[str, Any]) -> Any:
    """The same with other values at some paths. A part is made once, for its values may be valid only together."""
    by_field: dict[str, dict[str, Any]] = {}
    for path, setting in settings.items():
        first, _, rest = path.partition(".")
        by_field.setdefault(first, {})[rest] = setting
    changes = {}
    for first, inner in by_field.items():
        old = getattr(value, first)
        changes[first] = _fit_type(first, old, inner[""]) if "" in inner else _set_all(old, inner)
    return replace(value, **changes)


def _fit_type(name: str, old: Any, setting: Any) -> Any:
    """The setting, if it is of the type that it replaces."""
    if isinstance(old, float) and isinstance(setting, int) and not isinstance(setting, bool):
        setting = float(setting)
    if isinstance(old, tuple) and isinstance(setting, list | tuple):
        setting = tuple(setting)
    if type(setting) is not type(old):
        like = ",".join(map(str, old)) if isinstance(old, tuple) else repr(old)
        raise InputError(f"{name} must be like {like}, not {setting!r}.")
    if isinstance(setting, float) and not math.isfinite(setting):
        raise InputError(f"{name} must be finite, not {setting}.")
    return setting
