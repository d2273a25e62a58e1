"""What a run and its workers send each other, as plain values and bytes: settings, files, tasks and results.

Workers need no folder in common with the run. Data and files that settings name are sent along; packages are not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import foreign, plugins, store
from ..config import Config, make_config
from ..data.frost import list_photographs
from ..data.partition import Split
from ..data.pool import Dataset
from ..errors import InputError

LARGEST_FILE = 2**33  # bytes
FOLDERS = {"samples": (".npz",), "answers": (".json",), "trainings": (".clients", ".json", ".safetensors")}
Files = Mapping[str, bytes]  # by path relative to the folder of the run, or of what settings name


@dataclass(frozen=True)
class Payload:
    """The settings of a run, and the files that they name."""

    id: str
    data: str  # the id of the dataset, which travels apart
    config: Mapping[str, Any]
    files: Files
    places: Mapping[str, str]  # by a path in the settings: that in `files`
    modules: Mapping[str, str]  # by a path in `files`: the name of its module


@dataclass(frozen=True)
class Task:
    """Train methods side by side on some seeds, or test one of them."""

    number: int
    seeds: tuple[int, ...]
    trainings: tuple[tuple[str, ...], ...]  # of each, the methods that deploy it
    tested: str | None  # the method to test, after its training; None: train
    resume: Files  # checkpoints to go on from
    outputs: tuple[str, ...]  # the names of the files that it writes, unless it fails


@dataclass(frozen=True)
class TaskResult:
    """The result of a task."""

    files: Files = field(default_factory=dict)
    failures: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)  # by file: why, and the traceback
    warnings: tuple[str, ...] = ()
    refused: str = ""  # a sentence for the user
    folder: str = ""  # that of the run on the worker, which sentences may name


@dataclass(frozen=True)
class WorkerInfo:
    """Where and how a worker computes."""

    dtype: str = ""
    together: int = 1
    environment: Mapping[str, Any] = field(default_factory=dict)
    pid: int = 0
    code: str = ""  # the hash of the package there
    refused: str = ""


def identify(data: Dataset) -> str:
    """A hash of all that it holds."""
    pools = {"pool": data.pool, **data.natural, **({"unknown": data.unknown} if data.unknown else {})}
    parts: list[Any] = [[name, pool.name, pool.digest] for name, pool in pools.items()]
    for each in data.clients:
        rows = [each.rows.train, each.rows.val, each.rows.test] if isinstance(each.rows, Split) else [each.rows]
        parts += [each.name, *rows, *(part for test in each.tests.items() for part in test)]
    return store.content_hash(*parts)


def pack(config: Config, data: str) -> Payload:
    """The settings, with methods and networks of the user's own files, starting weights and photographs of frost."""
    files: dict[str, bytes] = {}
    places: dict[str, str] = {}
    modules: dict[str, str] = {}

    def add(content: Files, kind: str, name: str = "") -> str:
        """A folder of its own: the same code is loaded once, and nothing is replaced by files of another run."""
        folder = f"{kind}/{store.content_hash(name, _hash_files(content))}"
        files.update({f"{folder}/{each}": found for each, found in content.items()})
        return folder

    for name in _list_code(config):
        path, module = Path(name).resolve(), plugins.load_file(Path(name)).__name__
        imported = [path, *plugins.list_neighbours(path)]
        folder = add({each.relative_to(path.parent).as_posix(): _read(each) for each in imported}, "code", module)
        places[name] = f"{folder}/{path.name}"
        modules[places[name]] = module
    if config.init is not None:
        path = store.expand(Path(config.init))
        places[config.init] = f"{add({path.name: _read(path)}, 'init')}/{path.name}"
    if config.frost is not None:
        places[config.frost] = add({each.name: _read(each) for each in list_photographs(config.frost)}, "frost")
    settings = config.as_dict()
    return Payload(store.content_hash(data, settings, _hash_files(files)), data, settings, files, places, modules)


def unpack(payload: Payload, folder: Path) -> Config:
    """The settings, with files below `folder` in place of those they name."""
    for name, content in payload.files.items():
        store.write_bytes(folder / name, content)
    for name, module in payload.modules.items():
        plugins.name_file(folder / name, module)
    config = make_config(payload.config)

    def move(path: str | None) -> str | None:
        return None if path is None else str(folder / payload.places[path])

    methods = [str(replace(spec, file=move(spec.file))) for spec in config.specs.values()]
    file, _, name = config.net.rpartition(":")
    net = f"{move(file)}:{name}" if plugins.is_file_spec(config.net) else config.net
    moved = {"methods": tuple(methods), "net": net, "init": move(config.init), "frost": move(config.frost)}
    return replace(config, **moved)  # type: ignore[arg-type]


def read_files(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Those that exist."""
    return {name: _read(folder / name) for name in names if (folder / name).exists()}


def list_files(folder: Path) -> list[str]:
    """The names of all files that a task may leave."""
    return [
        each.relative_to(folder).as_posix()
        for kind, suffixes in FOLDERS.items()
        for each in sorted((folder / kind).glob("[!.]*"))
        if each.suffix in suffixes
    ]


def write_files(folder: Path, files: Files) -> None:
    """Each whole or not at all, and last the file that says that the others are there."""
    kinds = list(FOLDERS)
    for name in files:
        kind, slash, stem = name.partition("/")
        if not slash or Path(stem).name != stem or not stem.endswith(FOLDERS.get(kind, ("/",))):
            raise InputError(f"a worker sent {name!r}, which is no file of a run.")
    order = sorted(files, key=lambda name: (kinds.index(name.partition("/")[0]), Path(name).suffix))
    with ExitStack() as parts:  # they take their places at the end, the last that entered first
        for name in reversed(order):
            part = parts.enter_context(store.whole_file(folder / name))
            part.write_bytes(files[name])
            store.sync_file(part)  # it takes seconds, in which the checkpoint that is there must stay
        for name in files:
            if name.endswith(".clients"):  # a checkpoint of other states must never stand beside it
                (folder / name).with_suffix(".safetensors").unlink(missing_ok=True)


def _list_code(config: Config) -> list[str]:
    """The files of Python that settings name."""
    net = [config.net.rpartition(":")[0]] if plugins.is_file_spec(config.net) else []
    return list(dict.fromkeys([*(spec.file for spec in config.specs.values() if spec.file), *net]))


def _hash_files(files: Files) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def _read(path: Path) -> bytes:
    try:
        return foreign.read_file(path, LARGEST_FILE)
    except OSError as error:
        raise InputError(f"{foreign.show_path(path)} cannot be sent to workers ({error.strerror}).") from None
