"""A hash of the code of a user's own method or network: edited code is another one, with other results.

The package's own code is not part of it: when a change of that changes numbers, FORMAT is raised. The hash covers the
code as it runs, not its file: bytecode, constants and defaults of every function of the class and of its module, and of
the functions, classes and plain values that those refer to. Libraries are left out: a run's environment lists their
versions.
"""

from __future__ import annotations

import dataclasses
import dis
import hashlib
import importlib
import inspect
import re
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterator
from functools import cache, cached_property, partial, partialmethod
from pathlib import Path
from typing import Any

PACKAGE = __name__.partition(".")[0]
STANDARD = Path(sysconfig.get_paths()["stdlib"])  # by path, because a user's module may have the name of one in there
PLAIN = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis))
# Attributes that Python and `dataclass` put into a class; a method's description has the fields anyway.
MADE = {
    *("__annotate__", "__annotate_func__", "__annotations__", "__annotations_cache__"),
    *("__dataclass_fields__", "__dataclass_params__", "__match_args__", "__orig_bases__", "__parameters__"),
    *("__dict__", "__doc__", "__module__", "__qualname__", "__weakref__"),
    *("__firstlineno__", "__static_attributes__"),
}
GENERATED = {"__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__", "__replace__"}


@cache
def hash_package() -> str:
    """The hash of all files of the package: two checkouts may have the same version."""
    root = Path(__file__).parent
    files = sorted(root.rglob("*.py"))
    parts = [f"{each.relative_to(root).as_posix()} {hashlib.sha256(each.read_bytes()).hexdigest()}" for each in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def fingerprint(value: Any) -> str | None:
    """The hash of all classes that a method is made of; None if all of them are the package's own, unpatched."""
    roots = [part for part in _list_parts(value) if _is_plugin(part) or _is_own(part) or list(_list_patches(part))]
    if not roots:
        return None
    walk = _Walk(frozenset(_root(part) for part in roots))
    for part in roots:
        walk.visit(part)
    return walk.sha.hexdigest()


def digest(value: Any) -> str:
    """A hash of any value by its content: what it holds, and the user's code in it."""
    walk = _Walk(frozenset())
    walk.visit(value)
    return walk.sha.hexdigest()


def list_layers(module: Any) -> list[tuple[str, type, dict[str, Any]]]:
    """The layers of a torch module: path, class, and attributes and hooks, without weights.

    The last entry says which parameters, buffers and layers stand in several places.
    """
    from torch.nn import Module

    of_torch = {*vars(Module()), "_flat_weights", "_flat_weight_refs"}
    layers = []
    for path, layer in module.named_modules(remove_duplicate=False):
        found = {name: value for name, value in sorted(vars(layer).items()) if name not in of_torch}
        kinds = (layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks)
        hooks = [(i, list(each.values())) for i, each in enumerate(kinds) if each]  # their keys count all hooks ever
        layers.append((path, type(layer), found | ({"hooks": hooks} if hooks else {})))
    layers.append(("", type(module), {"same": _list_same(module)}))
    return layers


def _list_same(module: Any) -> dict[str, str]:
    """By the path of a parameter, buffer or layer, the first path of the same object, where that is another."""
    places = (module.named_parameters, module.named_buffers, module.named_modules)
    first: dict[int, str] = {}
    same = {}
    for path, each in (found for place in places for found in place(remove_duplicate=False)):
        if first.setdefault(id(each), path) != path:
            same[path] = first[id(each)]
    return same


def _list_parts(value: Any) -> Iterator[Any]:
    """The classes of a method, its predictor, its network and all other parts; and the functions among the parts."""
    if isinstance(value, types.FunctionType | types.MethodType | partial):
        yield value
    elif _is_torch_module(value):
        for _, kind, attributes in list_layers(value):
            yield kind
            yield from _list_parts(attributes)
    elif dataclasses.is_dataclass(value):
        yield type(value)
        for each in dataclasses.fields(value):
            yield from _list_parts(getattr(value, each.name))
    elif isinstance(value, list | tuple | set | frozenset | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _list_parts(each)
    elif not isinstance(value, PLAIN):
        yield type(value)


def _root(value: Any) -> str:
    """The package a value comes from. A wrapper copies `__module__` from what it wraps, so its globals decide."""
    space = getattr(value, "__globals__", None)
    name = space.get("__name__") if isinstance(space, dict) else getattr(value, "__module__", None)
    return str(name or "").partition(".")[0]


def _is_plugin(value: Any) -> bool:
    """A part of a method that comes from another package, even an installed one."""
    return dataclasses.is_dataclass(value) and _root(value) != PACKAGE


def _is_own(value: Any) -> bool:
    """Whether the user wrote it: neither the package, nor Python, nor an installed library."""
    return not _is_library(_root(value))


@cache
def _is_library(root: str) -> bool:
    if root in (PACKAGE, "__main__"):
        return root == PACKAGE
    file = getattr(sys.modules.get(root), "__file__", None)
    if file is None:  # built in, or made at run time
        return root in sys.stdlib_module_names or root in sys.builtin_module_names or not root
    place = Path(file)
    return STANDARD in place.parents or bool({"site-packages", "dist-packages"} & set(place.parts))


def _list_patches(kind: Any) -> Iterator[tuple[str, Any]]:
    """The user's functions that were patched into a class of the package."""
    for each in getattr(kind, "__mro__", ()):
        if _root(each) == PACKAGE:
            for name, value in vars(each).items():
                function = _unwrap(value)
                inner = function.func if isinstance(function, partial | partialmethod) else function
                if name not in GENERATED and callable(function) and _is_own(inner):
                    yield name, function


def _unwrap(value: Any) -> Any:
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, cached_property):
        return value.func
    return value.fget if isinstance(value, property) else value


def _list_slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


class _Walk:
    """Adds everything reached to a hash, once each, in an order that depends only on names."""

    def __init__(self, plugins: frozenset[str]) -> None:
        self.sha = hashlib.sha256()
        self.seen: dict[int, tuple[int, Any]] = {}  # by id: the order, and the value, alive so that no id is reused
        self.plugins = plugins  # packages of the method's own classes, installed or not

    def say(self, *words: object) -> None:
        self.sha.update("\0".join(map(str, words)).encode("utf-8", "surrogatepass") + b"\1")

    def visit(self, value: Any) -> None:
        value = _unwrap(value)
        if isinstance(value, PLAIN):
            self.say("plain", repr(value))
        elif isinstance(value, tuple):
            self.say("tuple", len(value))
            for each in value:
                self.visit(each)
        elif isinstance(value, set | frozenset):
            self.say("set", sorted(map(_say, value)))
        elif id(value) in self.seen:
            self.say("again", self.seen[id(value)][0], _name(value))
        else:
            self.seen[id(value)] = len(self.seen), value
            self._visit_once(value)

    def _visit_once(self, value: Any) -> None:
        if isinstance(value, dict):
            self.say("dict", len(value))
            for key, each in value.items():
                self.visit((key, each))
        elif isinstance(value, types.MappingProxyType):
            self._visit_once(dict(value))
        elif isinstance(value, list | deque):
            self.say("list", len(value))
            for each in value:
                self.visit(each)
        elif isinstance(value, types.MethodType):
            self.visit((value.__func__, value.__self__))
        elif isinstance(value, partial | partialmethod):
            self.visit((value.func, value.args, value.keywords))
        elif isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif isinstance(value, type):
            self._visit_class(value)
        elif _root(type(value)) in ("numpy", "torch") and hasattr(value, "shape") and hasattr(value, "tolist"):
            content = hashlib.sha256(repr(value.tolist()).encode()).hexdigest()
            self.say("array", str(value.dtype), tuple(value.shape), content)
        else:
            self._visit_object(value)

    def _visit_object(self, value: Any) -> None:
        """Anything else, by its class and state."""
        # looked up without running a user's __getattr__, which may do or raise anything
        wrapped = inspect.getattr_static(value, "__wrapped__", None)  # set by functools.lru_cache, for one
        if isinstance(value, types.ModuleType | types.BuiltinFunctionType) or _is_torch_function(value):
            self.say("library", _name(value))
        elif wrapped is not None:
            self.visit(wrapped)
        elif _is_torch_module(value):
            self.visit((list_layers(value), dict(value.state_dict())))
        else:
            self.visit(type(value))
            slots = [name for kind in type(value).__mro__ for name in _list_slots(kind) if hasattr(value, name)]
            state = {name: getattr(value, name) for name in slots} | (vars(value) if hasattr(value, "__dict__") else {})
            if state:
                self.visit(dict(sorted(state.items())))
            else:
                self.say("repr", _say(value))

    def _visit_class(self, kind: type) -> None:
        self.say("class", _name(kind))
        for name, function in _list_patches(kind):
            self.say(name)
            self.visit(function)
        if not self._is_followed(kind):
            return
        for base in kind.__bases__:
            self.visit(base)
        self._visit_module(kind.__module__)
        for name, value in sorted(vars(kind).items()):
            function = _unwrap(value)
            made = isinstance(function, types.FunctionType) and function.__code__.co_filename == "<string>"
            if name not in MADE and not (name in GENERATED and (made or not isinstance(function, types.FunctionType))):
                self.say(name)
                self.visit(value)

    def _visit_module(self, name: str) -> None:
        """Functions, classes and constants of a module, used or not; not of a script, which does more than define."""
        module = sys.modules.get(name)
        if module is None or name == "__main__" or id(module) in self.seen:
            return
        self.seen[id(module)] = len(self.seen), module
        for key, value in sorted(vars(module).items()):
            defined = isinstance(value, type | types.FunctionType) and value.__module__ == name
            if defined or (isinstance(value, PLAIN) and not key.startswith("__")):
                self.say(key)
                self.visit(value)

    def _visit_function(self, function: types.FunctionType) -> None:
        self.say("function", _name(function))
        if not self._is_followed(function):
            return
        self.visit((function.__defaults__, function.__kwdefaults__))
        names = self._visit_code(function.__code__)
        for cell in function.__closure__ or ():
            try:
                self.visit(cell.cell_contents)
            except ValueError:  # an empty cell
                self.say("empty")
        for name in sorted(names & function.__globals__.keys()):
            self.say(name)
            self._visit_global(function.__globals__[name], names)
        for name in sorted(_list_imports(function)):
            self.say(name)
            self._visit_global(_import(name), names)

    def _visit_global(self, value: Any, names: set[str]) -> None:
        """What a function refers to by name; for a module, what the function uses of it."""
        if not isinstance(value, types.ModuleType):
            self.visit(value)
        elif not _is_library(value.__name__.partition(".")[0]):
            for name in sorted(names & vars(value).keys()):
                self.say(name)
                if vars(value)[name] is not value:
                    self._visit_global(vars(value)[name], names - {name})

    def _visit_code(self, code: types.CodeType) -> set[str]:
        """Visit the code and all nested code; returns every name in them."""
        self.say("code", code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, code.co_argcount)
        names = set(code.co_names)
        for const in code.co_consts:
            if isinstance(const, types.CodeType):
                names |= self._visit_code(const)
            else:
                self.visit(const)
        return names

    def _is_followed(self, value: Any) -> bool:
        return _is_own(value) or _root(value) in self.plugins


def _list_imports(function: types.FunctionType) -> set[str]:
    """The full names of the modules that a function imports when called."""
    found: set[str] = set()
    package = str(function.__globals__.get("__package__") or "")
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        levels, module = [0], ""  # the level of a relative import is a constant loaded before it
        for step in dis.get_instructions(code):
            if isinstance(step.argval, int) and "LOAD" in step.opname:
                levels.append(step.argval)
            if step.opname == "IMPORT_NAME":
                above = f"{package.rsplit('.', levels[-1] - 1)[0]}." if levels[-1] else ""
                module = f"{above}{step.argval}".rstrip(".")
                found.add(module)
            if step.opname == "IMPORT_FROM":
                found.add(f"{module}.{step.argval}")  # may be a module, too
    return found


def _import(name: str) -> Any:
    """A module, imported as the method would; None if that fails."""
    root = name.partition(".")[0]
    try:
        if root == PACKAGE or (root in sys.stdlib_module_names and root not in sys.modules):
            return None
        return importlib.import_module(name)
    except Exception:
        return None


def _is_torch_module(value: Any) -> bool:
    return hasattr(type(value), "state_dict") and hasattr(type(value), "named_modules")


def _is_torch_function(value: Any) -> bool:
    return callable(value) and type(value).__module__ in ("torch", "torch._C", "numpy") and hasattr(value, "__name__")


def _say(value: Any) -> str:
    """The repr of a value without its memory address, which changes from process to process."""
    try:
        return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    except Exception:
        return _name(type(value))


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
