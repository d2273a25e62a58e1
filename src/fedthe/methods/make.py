"""Methods by name, with hyperparameters changed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import InputError
from ..nets import NETS
from ..nets.make import Moments, check_net, find_defaults, make_net
from ..nets.net import Net
from ..text import find_nearest, quote
from . import METHODS, STUDIES
from .base import Method
from .fedthe import HeadEnsemble

if TYPE_CHECKING:
    from ..config import Config

T = TypeVar("T")


def make_methods(
    config: Config, classes: int, channels: int, size: int, moments: Moments | None = None
) -> dict[str, Method]:
    net = make_net(config, classes, channels, size, moments)
    made = {name: _make_method(name, config, net) for name in _list_names(config)}
    return {name: made[name] for name in config.methods}


def check_methods(config: Config) -> None:
    """Refuse unknown names and bad hyperparameters before any data is loaded."""
    net = _make_unshaped(config)
    for name in _list_names(config):
        with suppress(_ShapeAsked):  # `make_methods` checks these once the data is there
            _make_method(name, config, net)


def _list_names(config: Config) -> list[str]:
    return list(dict.fromkeys((*config.methods, *config.hyper)))


class _ShapeAsked(Exception):
    pass


def _make_unshaped(config: Config) -> Net:
    """A network before the data is loaded, which decides its shapes: it has its class and `head_layers`, no more."""
    check_net(config.net)
    kind: Any = NETS[config.net]

    class Unshaped(kind if isinstance(kind, type) else Net):  # type: ignore[misc]  # a plugin may give a function
        def __init__(self) -> None:
            pass

        def __getattribute__(self, name: str) -> Any:
            if name == "head_layers":
                return config.head_layers
            if name.startswith("__"):
                return super().__getattribute__(name)
            raise _ShapeAsked

    return Unshaped()


def _make_method(name: str, config: Config, net: Net) -> Method:
    known = METHODS | STUDIES
    if name not in known:
        raise InputError(f"there is no method {name!r}; {find_nearest(name, known)}")
    if not re.fullmatch(r"[\w.+ -]{1,100}", name):
        raise InputError(f"{quote(name)} cannot be part of a file's name; call the method otherwise.")
    method, search_lr = known[name](net), find_defaults(config.net).search_lr
    if search_lr is not None and isinstance(method.predictor, HeadEnsemble):
        method = set_hyper(method, {"search.lr": search_lr}, name)
    method = set_hyper(method, config.hyper.get(name, {}), name)
    method.check()
    return method


def set_hyper(value: T, given: Mapping[str, Any], name: str) -> T:
    """Change hyperparameters of a method, each named by the end of its dotted path, as much of it as is unique."""
    for key, setting in given.items():
        paths = list_hyper(value)
        found = [path for path in paths if f".{path}".endswith(f".{key}")]
        if not found:
            has = find_nearest(key, {path.rsplit(".", 1)[-1] for path in paths}) if paths else "it has none."
            raise InputError(f"{name} has no hyperparameter {key!r}; {has}")
        if len(found) > 1:
            ways = " or ".join(".".join(path.split(".")[-2:]) for path in found)
            raise InputError(f"{name} has several hyperparameters {key!r}; write {ways}.")
        value = _set_one(value, found[0].split("."), setting)
    return value


def list_hyper(value: Any, before: str = "") -> dict[str, Any]:
    """Every hyperparameter by its dotted path, and its value."""
    listed: dict[str, Any] = {}
    for each in fields(value):
        inner = getattr(value, each.name)
        if is_dataclass(inner) and each.name != "net":
            listed |= list_hyper(inner, f"{before}{each.name}.")
        elif each.name not in ("net", "then"):  # a `then` of None is a part that is not there
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
