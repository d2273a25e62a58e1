"""The settings of an experiment: a TOML file, overridden by `key=value` arguments."""

from __future__ import annotations

import math
import os
import typing
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from . import foreign
from .data.feature_shift import FeatureShift
from .data.folder import Square
from .data.partition import USE_DIRICHLET, Partition
from .data.plan import Settings
from .engine.fit import Optimizer
from .engine.visit import Training
from .errors import InputError
from .nets import NETS
from .nets.make import DEFAULTS, Defaults, find_defaults, takes_width
from .text import clean, find_nearest, flatten, is_plain, quote

LARGEST = 2**31 - 1  # of every whole number: no machine fits more rounds, clients or pixels
LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes: the limits of file systems
LARGEST_FILE = 2**20  # bytes of a config file
DEEPEST = 8  # levels of nested tables: no method nests its hyperparameters deeper


def make_optimizer(of: Defaults) -> Optimizer:
    return Optimizer(of.optimizer, of.lr, of.momentum, of.weight_decay)


OPTIMIZERS = {name: make_optimizer(each) for name, each in DEFAULTS.items()}  # the paper's


@dataclass(frozen=True)
class Config:
    """Every key of a config file. The network or the dataset replaces None, unless a comment says otherwise."""

    name: str = "run"
    out: str | None = None  # the folder of the run; None: runs/NAME
    methods: tuple[str, ...] = ("fedavg", "fedavg_ft", "fedthe", "fedthe_plus")
    seeds: tuple[int, ...] = (0,)
    # the benchmark
    dataset: str = "glyphs"
    natural: str | None = None
    size: int | None = None
    square: Square | None = None  # your own pictures: crop or pad those that are not square; None: refuse them
    by_client: bool = False  # your folder holds a folder per client, each with a folder per class
    clients: int | None = None  # None: those that the data has, or 20
    partition: Partition | None = None  # None: as the data is held, or balanced
    dirichlet: float | None = None  # the higher, the more similar the clients; None: 0.1
    shards: int | None = None  # of each client, with partition=shards; None: 2
    feature_shift: FeatureShift = "none"  # a corruption or a rotation of its own for each client
    feature_severity: int | None = None  # of that corruption; None: 3
    severity: int = 5
    frost: str | None = None
    train_fraction: float = 1.0  # of each client's training rows
    test_fraction: float = 1.0  # of its test rows
    tests: tuple[str, ...] | None = None  # the test distributions; None: all
    samples: int | None = None  # at most this many per client and test; None: all
    # the network
    net: str = "cnn"
    width: int = 1
    head_layers: int = 1
    init: str | None = None  # a safetensors file with weights that every seed starts from; None: they are drawn
    standardize: bool = False  # pixels to mean 0, standard deviation 1 per channel, as the authors do; else to [-1, 1]
    # training
    rounds: int = 100
    participation: float = 1.0
    local_epochs: int = 5
    personal_epochs: int = 1
    batch: int = 32
    flip: bool = True
    crop: int = 4
    optimizer: Literal["sgd", "adam"] | None = None
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    # how it runs
    engine: Literal["auto", "loop", "stack"] = "auto"  # auto: stack on a GPU, loop on the CPU
    device: str = "auto"  # cpu, cuda, or one GPU such as cuda:1; auto: a GPU if there is one
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # of convolutions in a stack on a GPU
    threads: int | None = None  # clients at a time on the CPU, one thread each; None: one per core
    tolerate: Literal["stop", "skip"] = "stop"  # after an unusable upload: stop the method, or skip the client
    checkpoint_seconds: float = 10.0
    curve: tuple[int, ...] = ()  # earlier rounds after which methods are tested, for learning curves
    keep: tuple[int, ...] = ()  # rounds whose checkpoints are kept: a run of so many rounds needs no training
    # hyperparameters of methods: [hyper.fedthe] alpha = 0.2, or hyper.fedthe.alpha=0.2
    hyper: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("methods", "seeds", "tests"):
            values = getattr(self, name)
            if values is not None and (not values or len(set(values)) != len(values)):
                raise InputError(f"{name} must have at least one entry, each only once, but is {_show(values)}.")
        if len(set(self.keep)) != len(self.keep) or min(self.keep, default=1) < 1:
            raise InputError(f"keep must name rounds from 1 on, without duplicates, but is {_show(self.keep)}.")
        if any(before >= after for before, after in pairwise((0, *self.curve, self.rounds))) and self.curve:
            raise InputError(
                f"curve must name rounds from 1 to below {self.rounds}, the last one, in increasing order, "
                f"but is {_show(self.curve)}."
            )
        if self.name in (".", "..") or set(self.name) & {"/", "\\"}:
            raise InputError(
                f"name must be the name of a folder, not a path, but is {quote(self.name)}; use out=FOLDER for a path."
            )
        if self.samples is not None and self.samples < 1:
            raise InputError(f"samples must be at least 1, not {self.samples}.")
        if self.threads is not None and not 1 <= self.threads <= 1024:
            raise InputError(f"threads must be from 1 to 1024, not {self.threads}.")
        if not (0 <= self.checkpoint_seconds < float("inf")):
            raise InputError(f"checkpoint_seconds must not be negative or infinite, but is {self.checkpoint_seconds}.")
        _ = self.training, [self.settings(seed) for seed in self.seeds]  # these check their own values
        self._refuse_what_does_nothing()

    def _refuse_what_does_nothing(self) -> None:
        """Settings without effect, which a user would believe to have one."""
        if self.width != 1 and self.net in NETS and not takes_width(self.net):
            wide = ", ".join(name for name in NETS if takes_width(name))
            raise InputError(f"{self.net} has no width to set; leave width out, or use a network that has one: {wide}.")
        if self.dirichlet is not None and self.partition is not None and self.partition not in USE_DIRICHLET:
            raise InputError(f"dirichlet has no effect with partition={self.partition}; leave one of them out.")
        if self.shards is not None and self.partition != "shards":
            raise InputError("shards has no effect without partition=shards.")
        if self.feature_severity is not None and self.feature_shift != "corruption":
            raise InputError("feature_severity has no effect without feature_shift=corruption.")
        if self.momentum and self.training.optimizer.name == "adam":
            raise InputError("adam takes no momentum; leave momentum out, or set optimizer=sgd.")

    @property
    def folder(self) -> Path:
        return Path(self.out) if self.out else Path("runs") / self.name

    @property
    def training(self) -> Training:
        base = make_optimizer(find_defaults(self.net))
        if self.optimizer is not None and self.optimizer != base.name:
            base = OPTIMIZERS["cct4"] if self.optimizer == "adam" else OPTIMIZERS["cnn"]
        given = {name: getattr(self, name) for name in ("lr", "momentum", "weight_decay")}
        optimizer = replace(base, **{name: value for name, value in given.items() if value is not None})
        names = ("rounds", "participation", "local_epochs", "personal_epochs", "batch", "flip", "crop", "tolerate")
        return Training(**{name: getattr(self, name) for name in names}, optimizer=optimizer)

    @property
    def client_count(self) -> int:
        """The number of clients, unless that is left to data that clients hold already."""
        return self.settings(self.seeds[0]).clients

    def settings(self, seed: int) -> Settings:
        names = (
            *("clients", "dirichlet", "partition", "severity", "frost", "train_fraction", "test_fraction"),
            *("shards", "feature_shift", "feature_severity"),
        )
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return Settings(**given, seed=seed)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def measures_as(self, other: Config) -> bool:
        """Whether both give the same results: they differ at most in where and how they run."""
        how = {name: getattr(self, name) for name in ("name", "out", "threads", "checkpoint_seconds", "keep")}
        return replace(other, **how) == self


def read_config(path: Path, words: Iterable[str] = ()) -> Config:
    """A file's settings, overridden by words such as `rounds=10` or `methods=fedthe,ditto`."""
    return make_config(read_words(words, {"name": path.stem} | _read_toml(path)))


def read_words(words: Iterable[str], values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`values`, overridden by words such as `rounds=10`."""
    values, before = dict(values or {}), ""
    for word in words:
        key, equals, value = word.partition("=")
        if not equals and (before.endswith(",") or word.startswith(",")):
            joined = f"{before} {word}".strip()
            raise InputError(
                f"{quote(word)} is separated from the list before it; write a list without spaces, "
                f'or in quotes: {clean(joined.replace("=", "=" + chr(34), 1), 200)}".'
            )
        if not equals:
            raise InputError(f"{quote(word)} is not a setting; write key=value, such as rounds=10.")
        if key.startswith("hyper."):
            _put_hyper(values, key, _guess(value))
        else:
            # natural=none means no shift, while None means whatever is available
            values[key] = value if key == "natural" else _from_text(value, *_hint(key))
        before = word
    return values


def make_config(values: Mapping[str, Any]) -> Config:
    return Config(**{key: _convert(key, value, *_hint(key)) for key, value in values.items()})


def read_example() -> str:
    """A config file to copy, which comes with the package."""
    return resources.files(__package__).joinpath("quick.toml").read_text(encoding="utf-8")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib
    try:
        text = foreign.read_file(path, LARGEST_FILE).decode("utf-8-sig")  # Windows editors add a byte order mark
        return dict(tomllib.loads(text))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; `fedthe run --example > my.toml` writes one.") from None
    except OSError as error:
        raise InputError(f"{flatten(path, 200)} cannot be read ({error.strerror}).") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not TOML: {flatten(error, 200)}.") from None
    except RecursionError:
        raise InputError(f"{path} nests its values too deep; a config is flat except for [hyper.METHOD].") from None
    except InputError:
        raise
    except ValueError as error:  # not UTF-8, or a number with thousands of digits
        raise InputError(f"{path} cannot be read ({flatten(error, 200)}).") from None


def _put_hyper(values: dict[str, Any], key: str, value: Any) -> None:
    _, method, *path = key.split(".")
    if not method or not all(path) or not path:
        raise InputError(f"{quote(key)} must be hyper.METHOD.NAME, such as hyper.fedthe.alpha=0.2.")
    hyper = _convert("hyper", values.get("hyper", {}), *_hint("hyper"))
    hyper.setdefault(method, {})[".".join(path)] = value
    values["hyper"] = hyper


@cache
def _hints() -> dict[str, tuple[Any, bool]]:
    """By setting: its type without None, and whether None is allowed."""
    hints = {name: (hint, typing.get_args(hint)) for name, hint in typing.get_type_hints(Config).items()}
    return {name: (of[0], True) if type(None) in of else (hint, False) for name, (hint, of) in hints.items()}


def _hint(key: str) -> tuple[Any, bool]:
    if key not in _hints():
        raise InputError(f"there is no setting {quote(key)}; {find_nearest(key, _hints())}")
    return _hints()[key]


def _from_text(text: str, hint: Any, optional: bool = False) -> Any:
    """A word of the command line as the type that the setting takes."""
    if optional and text.lower() == "none":
        return None
    if typing.get_origin(hint) is tuple:
        kind = typing.get_args(hint)[0]
        parts = [part.strip() for part in text.split(",")] if text else []  # curve= is empty
        return [_from_text(part, kind) for part in parts]
    return text if hint is str else _guess(text)


def _guess(text: str) -> Any:
    for kind in (int, float) if text.isascii() else ():  # Python would also accept digits of other scripts
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)


def _convert(key: str, value: Any, hint: Any, optional: bool = False) -> Any:
    """The value as the type `hint`, or an error that names the setting."""
    if value is None and optional:
        return None
    if hint is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    origin = typing.get_origin(hint)
    if origin is tuple:
        kind = typing.get_args(hint)[0]
        values = value if isinstance(value, list | tuple) else [value]
        return tuple(_convert(key, each, kind) for each in values)
    if origin is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            near = find_nearest(value if isinstance(value, str) else "", choices)
            raise InputError(f"{key} cannot be {quote(value)}; {near}")
        return value
    if origin is dict:
        if not (isinstance(value, Mapping) and all(isinstance(each, Mapping) for each in value.values())):
            raise InputError(f"{key} must hold a table per method, such as [hyper.fedthe], not {quote(value)}.")
        return {_check_text(key, method): _flatten(f"{key}.{method}", given) for method, given in value.items()}
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is str and key == "name" and is_number:
        value = str(_check_number(key, value))
    if not (is_number if hint is float else isinstance(value, hint)) or (hint is int and not is_number):
        raise InputError(f"{key} must be {_KINDS[hint]}, not {quote(value)}.")
    if hint is str:
        return _check_text(key, value)
    if hint is bool:
        return value
    return float(_check_number(key, value, whole=False)) if hint is float else _check_number(key, value)


def _check_number(key: str, value: float, whole: bool = True) -> float:
    """The number, if it is finite and not too large. `whole`: integers stay integers."""
    if not whole and isinstance(value, int):
        value = float(value) if abs(value) < 10**300 else math.inf
    if isinstance(value, int):
        if abs(value) > LARGEST:
            raise InputError(f"{key} is too large: whole numbers go up to {LARGEST}, but this is {quote(value, 40)}.")
        return value
    if not math.isfinite(value):
        raise InputError(f"{key} must be a finite number, not {value}.")
    return value + 0.0  # turns -0.0, which would have another hash, into 0.0


def _check_text(key: str, value: Any) -> str:
    """The text, if it is printable and short enough for a path."""
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{key} must not be empty; leave it out for its default.")
    if not is_plain(value):
        raise InputError(f"{key} must be text without control characters, not {quote(value)}.")
    if max(map(len, os.fsencode(value).split(b"/"))) > LONGEST_NAME or len(os.fsencode(value)) > LONGEST_PATH:
        raise InputError(f"{key} is too long for the name of a file or folder: {quote(value)}.")
    return value


def _flatten(key: str, given: Mapping[str, Any], depth: int = DEEPEST) -> dict[str, Any]:
    """[hyper.fedthe_plus.then] lr = 0.1 is the same as then.lr = 0.1"""
    flat: dict[str, Any] = {}
    if not depth:
        raise InputError(f"{clean(key)} nests tables too deep; write hyper.METHOD.NAME.")
    for name, value in given.items():
        whole = f"{key}.{_check_text(key, name)}"
        if isinstance(value, Mapping):
            flat |= {f"{name}.{rest}": each for rest, each in _flatten(whole, value, depth - 1).items()}
        elif isinstance(value, str):
            flat[name] = _check_text(clean(whole), value)
        elif isinstance(value, int | float):
            flat[name] = value if isinstance(value, bool) else _check_number(clean(whole), value)
        else:
            raise InputError(f"{clean(whole)} must be a number, a word, true or false, not {quote(value)}.")
    return flat


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def _show(values: Iterable[Any]) -> str:
    return clean(", ".join(map(str, values)), 200) or "empty"
