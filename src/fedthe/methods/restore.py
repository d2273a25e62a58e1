"""From plain data back to a method: the inverse of `describe`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

from ..errors import InputError
from ..nets import NETS
from ..text import clean, flatten
from . import METHODS, STUDIES
from .base import Method
from .compose import arrange, describe

OWN = ("fedthe.methods.", "fedthe.nets.")  # modules that data from elsewhere may name


def restore(described: Mapping[str, Any], **given: Any) -> Any:
    """The method, part or network that `describe` told of. given: fields in place of those described, as net=NET.

    Only classes of this package and those of registered plugins are made: data from elsewhere runs no other code.
    """
    values = dict(described)
    kind = _find_class(values.pop("is", None))
    names = {each.name for each in fields(kind) if each.compare}
    if unknown := sorted(values.keys() - names):
        raise InputError(f"{kind.__name__} has no {clean(unknown[0])} in this version of fedthe.")
    if hidden := [each.name for each in fields(kind) if not each.compare and each.name not in given]:
        raise InputError(f"{kind.__name__} holds a {hidden[0]} that no description has; give the network itself.")
    made = {name: _restore(value) for name, value in values.items() if name not in given} | given
    try:
        return kind(**made)
    except InputError:
        raise
    except Exception as error:  # a plugin's class may raise anything
        raise InputError(f"{kind.__name__} cannot be made again ({flatten(error, 200)}).") from None


def restore_method(described: Mapping[str, Any], net: Any = None) -> Method:
    """The same of a method. net: the network, where it is a module of the user's own, which no description holds."""
    made = restore(described) if net is None else restore(described, net=net)
    if not isinstance(made, Method):
        raise InputError(f"a method is expected, not a {type(made).__name__}.")
    if net is not None and json.dumps(describe(net)) != json.dumps(described["net"]):
        raise InputError(
            f"the network given is not the one that was trained, {clean(str(described['net'].get('is')))}."
        )
    return made


def _restore(value: Any) -> Any:
    """JSON has no tuples, and no field holds a list."""
    if isinstance(value, Mapping):
        return restore(value)
    return tuple(map(_restore, value)) if isinstance(value, list | tuple) else value


def _find_class(name: Any) -> type[Any]:
    if not isinstance(name, str):
        raise InputError("a description names no class.")
    module, _, last = name.rpartition(".")
    found: Any = {f"{each.__module__}.{each.__qualname__}": each for each in _list_plugins()}.get(name)
    if found is None and f"{module}.".startswith(OWN) and all(part.isidentifier() for part in name.split(".")):
        try:
            found = getattr(import_module(module), last, None)
        except ImportError:
            found = None
    if not (isinstance(found, type) and is_dataclass(found)):
        raise InputError(f"there is no {clean(name, 200)} in this installation of fedthe; install what defines it.")
    return found


def _list_plugins() -> Iterator[type[Any]]:
    """The classes of registered methods and networks, wherever they are defined."""
    for recipe in (METHODS | STUDIES).values():
        yield from _list_classes(arrange(recipe))
    yield from (net for net in NETS.values() if isinstance(net, type))


def _list_classes(value: Any) -> Iterator[type[Any]]:
    yield type(value)
    for each in fields(value):
        if is_dataclass(inner := getattr(value, each.name)):
            yield from _list_classes(inner)
