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
from ..text import find_nearest, quote
from . import METHODS, STUDIES
from .base import Method, Personal, Rounds
from .compose import Parts, arrange
from .fedthe import HeadEnsemble

if TYPE_CHECKING:
    from ..config import Config


def make_methods(config: Config, net: Net) -> dict[str, Method]:
    made = {name: parts.on(net) for name, parts in find_parts(config).items()}
    for method in made.values():
        try:
            method.check(config.training.optimizer)
        except InputError:
            raise
        except Exception:  # in the method's own code: the run will report it with its traceback
            continue
    return {name: made[name] for name in config.methods}


def find_parts(config: Config) -> dict[str, Parts]:
    """The parts of every method that the settings name. Refuse unknown names and bad hyperparameters."""
    check_net(config.net)
    return {name: _find_parts(name, config) for name in dict.fromkeys((*config.methods, *config.hyper))}


def _find_parts(name: str, config: Config) -> Parts:
    known = METHODS | STUDIES
    if name not in known:
        raise InputError(f"there is no method {name!r}; {find_nearest(name, known)}")
    if not re.fullmatch(r"[\w.+ -]{1,100}", name):
        raise InputError(f"{quote(name)} cannot be part of a file's name; rename the method.")
    parts, search_lr = arrange(known[name]), find_defaults(config.net).search_lr
    if search_lr is not None and isinstance(parts.predictor, HeadEnsemble):
        parts = set_hyper(parts, {"search.lr": search_lr}, name)
    return set_hyper(parts, config.hyper.get(name, {}), name)


def set_hyper(parts: Parts, given: Mapping[str, Any], name: str) -> Parts:
    """Change hyperparameters of a method, each named by the end of its dotted path, as much of it as is unique."""
    is_one = isinstance(parts.personal, Rounds) and parts.personal == parts.rounds
    for key, setting in given.items():
        paths = [path for path in list_hyper(parts) if not (is_one and path.startswith("personal."))]
        found = [path for path in paths if f".{path}".endswith(f".{key}")]
        if not found:
            has = find_nearest(key, {path.rsplit(".", 1)[-1] for path in paths}) if paths else "it has none."
            raise InputError(f"{name} has no hyperparameter {key!r}; {has}")
        if len(found) > 1:
            ways = " or ".join(".".join(path.split(".")[-2:]) for path in found)
            raise InputError(f"{name} has several hyperparameters {key!r}; write {ways}.")
        parts = _set_one(parts, found[0].split("."), setting)
        if is_one and isinstance(parts.rounds, Personal):
            parts = replace(parts, personal=parts.rounds)
    return parts


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


def _set_one(value: Any, path: list[str], setting: Any) -> Any:
    first, *rest = path
    old = getattr(value, first)
    if rest:
        return replace(value, **{first: _set_one(old, rest, setting)})
    if isinstance(old, float) and isinstance(setting, int) and not isinstance(setting, bool):
        setting = float(setting)
    if type(setting) is not type(old):
        raise InputError(f"{first} must be like {old!r}, not {setting!r}.")
    if isinstance(setting, float) and not math.isfinite(setting):
        raise InputError(f"{first} must be finite, not {setting}.")
    return replace(value, **{first: setting})
