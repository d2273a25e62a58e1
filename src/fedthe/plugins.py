"""Methods, networks and datasets from elsewhere: other packages' entry points, and files of the user's own."""

from __future__ import annotations

import hashlib
import importlib
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from . import foreign
from .errors import InputError
from .text import find_nearest, flatten, quote

LARGEST_FILE = 2**24  # bytes of a file of code

_loaded: dict[Path, tuple[str, ModuleType]] = {}  # by file: the hash of its content, and the module
_named: dict[Path, str] = {}  # by file: the name that its module is to have
_neighbours: dict[Path, dict[Path, str | None]] = {}  # by file: the files beside it that it imports, and their hashes


def load_plugins(group: str, taken: dict[str, Any]) -> dict[str, Any]:
    """The entry points of installed packages in `group`, by name; warns of those that fail or whose name is taken."""
    found: dict[str, Any] = {}
    for point in entry_points(group=group):
        if point.name in taken or point.name in found:
            warnings.warn(f"{point.value} is ignored: the name {point.name!r} in {group} is taken.", stacklevel=2)
            continue
        try:
            found[point.name] = point.load()
        except Exception as error:  # foreign code: whatever it raises, the rest must work
            warnings.warn(f"{point.value} of {group} could not be loaded: {error!r}.", stacklevel=2)
    return found


def is_file_spec(text: str) -> bool:
    """Whether text is FILE.py:NAME."""
    return ".py:" in text


def load_object(spec: str) -> Any:
    """What FILE.py:NAME names. The file is relative to the working directory, and loaded again once it was edited."""
    file, _, name = spec.rpartition(":")
    module = load_file(Path(file))
    if name not in vars(module):
        known = [each for each in vars(module) if not each.startswith("_")]
        raise InputError(f"{file} has no {quote(name)}; {find_nearest(name, known) if known else 'it is empty.'}")
    return vars(module)[name]


def load_file(path: Path) -> ModuleType:
    """A file of Python as a module of its own. While it is loaded, it can import the files beside it."""
    try:
        source = foreign.read_file(path, LARGEST_FILE)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist in {Path.cwd()}, where the command runs.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}).") from None
    place, digest = path.resolve(), hashlib.sha256(source).hexdigest()
    before = _loaded.get(place)
    if before and before[0] == digest and all(_hash(file) == known for file, known in _neighbours[place].items()):
        return before[1]
    module = ModuleType(before[1].__name__ if before else _named.get(place) or _name_module(place))
    module.__file__ = str(place)
    with _as_module(module), _importable(place):
        try:
            # Compiled here: Python's cache would take an edit within the same second for no edit.
            exec(compile(source, str(place), "exec", dont_inherit=True), vars(module))
        except (Exception, SystemExit) as error:  # whatever the user's code raises
            raise InputError(f"{path} cannot be loaded{_say_where(error, place)}") from error
    _loaded[place] = digest, module
    return module


def name_file(path: Path, name: str) -> None:
    """Have a file loaded under the name that a copy of it has elsewhere: names of classes are part of hashes."""
    _named[path.resolve()] = name


def list_neighbours(path: Path) -> list[Path]:
    """The files beside a loaded file, or below its folder, that it imports."""
    return sorted(_neighbours.get(path.resolve(), ()))


def _name_module(place: Path) -> str:
    """mine_py for mine.py. It is part of the hash of results, so it must not depend on the folder."""
    name = re.sub(r"\W", "_", place.name)
    taken = {module.__name__ for _, module in _loaded.values()} | sys.modules.keys()
    return next(each for each in (name, *(f"{name}_{n}" for n in range(2, len(taken) + 3))) if each not in taken)


@contextmanager
def _as_module(module: ModuleType) -> Iterator[None]:
    """Dataclasses and fingerprints look modules up by name. After a failure, the one before stays."""
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module
    try:
        yield
    except BaseException:
        del sys.modules[module.__name__]
        if before is not None:
            sys.modules[module.__name__] = before
        raise


@contextmanager
def _importable(place: Path) -> Iterator[None]:
    """The files beside `place` can be imported. They stay its own: another folder may have files of the same names."""
    folder, before, cached = str(place.parent), set(sys.modules), sys.dont_write_bytecode
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True  # Python's cache would take an edit within the same second for no edit
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.dont_write_bytecode = cached
        if folder in sys.path:
            sys.path.remove(folder)
        found = {}
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and place.parent in Path(file).resolve().parents:
                found[Path(file).resolve()] = _hash(Path(file))
                del sys.modules[name]
        _neighbours[place] = found


def _hash(file: Path) -> str | None:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


def _say_where(error: BaseException, place: Path) -> str:
    """The line of the file, and what is wrong there."""
    if isinstance(error, SyntaxError) and error.filename == str(place):
        return f" (line {error.lineno}: {flatten(error.msg, 200)})."
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(place)]
    where = f"line {lines[-1]}: " if lines else ""
    return f" ({where}{flatten(f'{type(error).__name__}: {error}', 200)})."
