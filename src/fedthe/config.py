"""An experiment as a flat list of settings: from a TOML file, then `key=value` words, then its network's defaults."""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from .data.plan import Settings
from .engine.fit import Optimizer
from .engine.visit import Training
from .errors import InputError
from .text import find_nearest

# What the paper trains each network with.
OPTIMIZERS = {
    "cnn": Optimizer(),
    "resnet20_gn": Optimizer(momentum=0.9),
    "cct4": Optimizer("adam", lr=0.001, weight_decay=0.0),
}


@dataclass(frozen=True)
class Config:
    """Every key of a config file. A None is decided by the network or the dataset."""

    name: str = "run"
    out: str | None = None  # the folder of the run; runs/NAME
    methods: tuple[str, ...] = ("fedavg", "fedavg_ft", "fedthe", "fedthe_plus")
    seeds: tuple[int, ...] = (0,)
    # the benchmark
    dataset: str = "glyphs"
    natural: str | None = None
    size: int | None = None
    clients: int = 20
    dirichlet: float = 0.1
    partition: Literal["balanced", "unbalanced"] = "balanced"
    severity: int = 5
    frost: str | None = None
    train_fraction: float = 1.0  # of each client's training rows
    test_fraction: float = 1.0  # of its test rows
    tests: tuple[str, ...] | None = None  # some of the test distributions; all
    samples: int | None = None  # at most so many of each client's stream; all
    # the network
    net: str = "cnn"
    width: int = 1
    head_layers: int = 1
    standardize: bool = (
        False  # images to mean 0 and deviation 1 per channel, as the authors' code does; else in [-1, 1]
    )
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
    engine: Literal["auto", "loop", "stack"] = "auto"  # stack on a GPU, loop on the CPU
    device: str = "auto"  # cpu, cuda or one such as cuda:1; a GPU if there is one
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # of convolutions in a stack on a GPU
    threads: int | None = None  # clients at a time on the CPU, one thread each; as many as there are cores
    tolerate: Literal["stop", "skip"] = "stop"  # a client whose upload cannot be used ends the run, or is left out
    checkpoint_seconds: float = 10.0
    curve: tuple[int, ...] = ()  # rounds after which methods are tested, too: their learning curves
    keep: tuple[int, ...] = ()  # rounds whose checkpoints stay, so that a run of so many rounds need not train
    # hyperparameters of methods: [hyper.fedthe] alpha = 0.2, or hyper.fedthe.alpha=0.2
    hyper: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("methods", "seeds", "tests"):
            values = getattr(self, name)
            if values is not None and (not values or len(set(values)) != len(values)):
                raise InputError(f"{name} must name at least one, and each only once, but it is {_show(values)}.")
        if len(set(self.keep)) != len(self.keep) or min(self.keep, default=1) < 1:
            raise InputError(f"keep must name rounds from 1, and each only once, but it is {_show(self.keep)}.")
        if any(before >= after for before, after in pairwise((0, *self.curve, self.rounds))) and self.curve:
            raise InputError(
                f"curve must name rounds from 1 to below the {self.rounds} of the run, in order, "
                f"but it is {_show(self.curve)}."
            )
        if self.samples is not None and self.samples < 1:
            raise InputError(f"samples must be at least 1, not {self.samples}.")
        if self.threads is not None and not 1 <= self.threads <= 1024:
            raise InputError(f"threads must be from 1 to 1024, not {self.threads}.")
        if not (0 <= self.checkpoint_seconds < float("inf")):
            raise InputError(f"checkpoint_seconds must not be negative or infinite, but is {self.checkpoint_seconds}.")
        _ = self.training, [self.settings(seed) for seed in self.seeds]  # refuse early what they refuse

    @property
    def folder(self) -> Path:
        return Path(self.out) if self.out else Path("runs") / self.name

    @property
    def training(self) -> Training:
        base = OPTIMIZERS.get(self.net, Optimizer())
        if self.optimizer is not None and self.optimizer != base.name:
            base = OPTIMIZERS["cct4"] if self.optimizer == "adam" else OPTIMIZERS["cnn"]
        given = {name: getattr(self, name) for name in ("lr", "momentum", "weight_decay")}
        optimizer = replace(base, **{name: value for name, value in given.items() if value is not None})
        names = ("rounds", "participation", "local_epochs", "personal_epochs", "batch", "flip", "crop", "tolerate")
        return Training(**{name: getattr(self, name) for name in names}, optimizer=optimizer)

    def settings(self, seed: int) -> Settings:
        fractions = self.train_fraction, self.test_fraction
        return Settings(self.clients, self.dirichlet, seed, self.partition, self.severity, self.frost, *fractions)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def measures_as(self, other: Config) -> bool:
        """Whether both give the same results: they differ at most in where and how it runs."""
        how = {name: getattr(self, name) for name in ("name", "out", "threads", "checkpoint_seconds", "keep")}
        return replace(other, **how) == self


def read_config(path: Path | None, words: Iterable[str] = ()) -> Config:
    """A file's settings, changed by words such as `rounds=10` or `methods=fedthe,ditto`."""
    values: dict[str, Any] = {"name": path.stem} if path else {}
    if path:
        values |= _read_toml(path)
    return make_config(read_words(words, values))


def read_words(words: Iterable[str], values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The settings of words such as `rounds=10`, over those that are there."""
    values = dict(values or {})
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise InputError(f"{word!r} is not a setting; write key=value, such as rounds=10.")
        if key.startswith("hyper."):
            _put_hyper(values, key, _guess(value))
        else:
            # natural=none is a word of its own: no shift; without it, whatever is at hand
            values[key] = value if key == "natural" else _from_text(value, _hint(key))
    return values


def make_config(values: Mapping[str, Any]) -> Config:
    return Config(**{key: _convert(key, value, _hint(key)) for key, value in values.items()})


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib
    try:
        return dict(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; configs/quick.toml is one to copy.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}).") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not TOML: {error}.") from None


def _put_hyper(values: dict[str, Any], key: str, value: Any) -> None:
    _, method, *path = key.split(".")
    if not method or not all(path) or not path:
        raise InputError(f"{key!r} must be hyper.METHOD.NAME, such as hyper.fedthe.alpha=0.2.")
    hyper = _convert("hyper", values.get("hyper", {}), _hint("hyper"))
    hyper.setdefault(method, {})[".".join(path)] = value
    values["hyper"] = hyper


def _hint(key: str) -> Any:
    hints = typing.get_type_hints(Config)
    known = [each.name for each in fields(Config)]
    if key not in known:
        raise InputError(f"there is no setting {key!r}; {find_nearest(key, known)}")
    return hints[key]


def _from_text(text: str, hint: Any) -> Any:
    """A word of the command line as the kind of value that the setting takes."""
    if _optional(hint) and text.lower() == "none":
        return None
    if typing.get_origin(_bare(hint)) is tuple:
        return [_guess(part) if part else part for part in text.split(",")] if text else []  # curve= is none
    return text if _bare(hint) is str else _guess(text)


def _guess(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)


def _convert(key: str, value: Any, hint: Any) -> Any:
    if value is None and _optional(hint):
        return None
    hint = _bare(hint)
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
            raise InputError(f"{key} cannot be {value!r}; {find_nearest(str(value), choices)}")
        return value
    if origin is dict:
        if not (isinstance(value, Mapping) and all(isinstance(each, Mapping) for each in value.values())):
            raise InputError(f"{key} must be tables by method, such as [hyper.fedthe], not {value!r}.")
        return {method: _flatten(given) for method, given in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and key == "name" and isinstance(value, int | float):
        return str(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise InputError(f"{key} must be {_KINDS[hint]}, not {value!r}.")
    return value


def _flatten(given: Mapping[str, Any]) -> dict[str, Any]:
    """[hyper.fedthe_plus.then] lr = 0.1 is the same as then.lr = 0.1"""
    flat: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{rest}": each for rest, each in _flatten(value).items()}
        else:
            flat[name] = value
    return flat


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _optional(hint: Any) -> bool:
    return isinstance(hint, types.UnionType) or type(None) in typing.get_args(hint)


def _bare(hint: Any) -> Any:
    rest = [each for each in typing.get_args(hint) if each is not type(None)]
    return rest[0] if _optional(hint) else hint


def _show(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values)) or "empty"
