"""The settings of an experiment: a TOML file, overridden by `key=value` arguments."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from . import foreign
from .convert import convert, from_text
from .data.feature_shift import FeatureShift
from .data.folder import Square
from .data.partition import USE_DIRICHLET, Partition
from .data.plan import Settings
from .engine.fit import Optimizer
from .engine.robust import Attack, Defense, Rule
from .engine.visit import Training
from .errors import InputError
from .nets import NETS
from .nets.make import DEFAULTS, Defaults, find_defaults, takes_width
from .specs import Spec, parse_spec
from .text import clean, find_nearest, flatten, guess_value, quote, split_list

LARGEST_FILE = 2**20  # bytes of a config file


def make_optimizer(of: Defaults) -> Optimizer:
    return Optimizer(of.optimizer, of.lr, of.momentum, of.weight_decay)


OPTIMIZERS = {name: make_optimizer(each) for name, each in DEFAULTS.items()}  # the paper's


@dataclass(frozen=True)
class Config:
    """Every key of a config file. `fedthe settings` prints the comments, and those of whole lines as headings."""

    name: str = "run"  # of the run
    out: str | None = None  # the folder of the run; None: runs/NAME
    methods: tuple[str, ...] = ("fedavg", "fedavg_ft", "fedthe", "fedthe_plus")  # also FILE.py:NAME, NAME(KEY=VALUE)
    seeds: tuple[int, ...] = (0,)  # one federation and training each; tables give the mean
    # the benchmark
    dataset: str = "glyphs"  # a name of `fedthe data list`, npz:FILE or folder:PATH
    natural: str | None = None  # a naturally shifted dataset, or none; None: those that the dataset brings
    size: int | None = None  # pixels of a side to resize images to; None: as they are
    square: Square | None = None  # your own images that are not square: crop or pad them; None: refuse them
    by_client: bool = False  # the folder of a dataset holds a folder per client, each with a folder per class
    clients: int | None = None  # how many clients there are; None: those that the data has, or 20
    partition: Partition | None = None  # how rows are dealt to clients; None: given if the data says so, or balanced
    dirichlet: float | None = None  # the higher, the more similar the clients; None: 0.1
    shards: int | None = None  # pieces of sorted classes for each client, with partition=shards; None: 2
    feature_shift: FeatureShift = "none"  # all images of a client: corrupted or rotated in its own way
    feature_severity: int | None = None  # of that corruption, from 1 to 5; None: 3
    severity: int = 5  # of the corruptions of tests, from 1 to 5
    frost: str | None = None  # a folder of frost photographs for that corruption; None: generated textures
    train_fraction: float = 1.0  # of each client's training rows that are used
    test_fraction: float = 1.0  # of each client's test rows that are used
    unseen: float = 0.0  # the share of clients that join after training, with their labels and without; 0: none
    unknown: str | None = None  # a class, by name or number, that no client holds, for the test open_set; None: none
    tests: tuple[str, ...] | None = None  # the test distributions; None: the standard ones, and those of `streams`
    streams: dict[str, str] = field(default_factory=dict)  # tests of your own: streams.mine="own 100, ooc 50, own 100"
    samples: int | None = None  # at most this many per client and test; None: all
    # the network
    net: str = "cnn"  # cnn, resnet20_gn, cct4, one of a plugin, or FILE.py:NAME
    width: int = 1  # times the channels of resnet20_gn
    head_layers: int = 1  # linear layers of the head, 1 or 2
    init: str | None = None  # a safetensors file with weights that every seed starts from; None: they are drawn
    standardize: bool = False  # pixels to mean 0, standard deviation 1 per channel, as the authors do; else to [-1, 1]
    # training
    rounds: int = 100  # of federated training
    participation: float = 1.0  # the fraction of clients sampled in each round
    local_epochs: int = 5  # of a client's training of the shared model, in each round
    personal_epochs: int = 1  # of a client's training of its personal part, in each round and before testing
    batch: int = 32  # training rows per step
    flip: bool = True  # flip training images at random
    crop: int = 4  # pixels by which training images are shifted at random; 0: not at all
    optimizer: Literal["sgd", "adam"] | None = None  # None: the network's
    lr: float | None = None  # the learning rate; None: the network's
    momentum: float | None = None  # of SGD; None: the network's
    weight_decay: float | None = None  # None: the network's
    # the server
    aggregation: Rule = "mean"  # of uploads; mean: the method's own rule, on all of them
    byzantine: float | None = None  # the share of wrong uploads that trimmed_mean and multi_krum bear; None: 0.2
    clip: float | None = None  # shorten updates to so many times their median length; None: leave them
    attackers: float = 0.0  # the share of clients that attack, to test this
    attack: float | None = None  # what attackers multiply their updates by; None: -1, which flips the sign
    # how it runs
    engine: Literal["auto", "loop", "stack"] = "auto"  # auto: stack on a GPU, loop on the CPU
    device: str = "auto"  # cpu, cuda, or one GPU such as cuda:1; auto: a GPU if there is one
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # of convolutions in a stack on a GPU
    threads: int | None = None  # clients at a time on the CPU, one thread each; None: one per core
    tolerate: Literal["stop", "skip"] = "stop"  # after an unusable upload: stop the method, or skip the client
    checkpoint_seconds: float = 10.0  # how often a training is saved
    curve: tuple[int, ...] = ()  # earlier rounds after which methods are tested, for learning curves
    keep: tuple[int, ...] = ()  # rounds whose checkpoints are kept: a run of so many rounds needs no training
    # hyperparameters
    hyper: dict[str, dict[str, Any]] = field(default_factory=dict)  # by method: hyper.fedthe.alpha=0.2

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
        _ = self.specs, self.training, [self.settings(seed) for seed in self.seeds]  # these check their own values
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
        if self.byzantine is not None and self.aggregation not in ("trimmed_mean", "multi_krum"):
            raise InputError("byzantine has no effect without aggregation=trimmed_mean or multi_krum.")
        if self.attack is not None and not self.attackers:
            raise InputError("attack has no effect without attackers, such as attackers=0.2.")
        if self.momentum and self.training.optimizer.name == "adam":
            raise InputError("adam takes no momentum; leave momentum out, or set optimizer=sgd.")

    @property
    def specs(self) -> dict[str, Spec]:
        """The methods by id, which is what results call them."""
        specs: dict[str, Spec] = {}
        for spec in map(parse_spec, self.methods):
            if spec.id in specs:
                raise InputError(f"{specs[spec.id]} and {spec} would have the same name; rename one of them.")
            specs[spec.id] = spec
        return specs

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
        wrong = {} if self.byzantine is None else {"byzantine": self.byzantine}
        factor = {} if self.attack is None else {"factor": self.attack}
        return Training(
            **{name: getattr(self, name) for name in names},
            optimizer=optimizer,
            defense=Defense(self.aggregation, clip=self.clip, **wrong),
            attack=Attack(self.attackers, **factor),
        )

    @property
    def client_count(self) -> int:
        """The number of clients, unless that is left to data that clients hold already."""
        return self.settings(self.seeds[0]).clients

    def settings(self, seed: int) -> Settings:
        names = [each.name for each in fields(Settings) if each.name != "seed"]
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return Settings(**given, seed=seed)

    def filled(self) -> Config:
        """With what the config leaves to the data, where the data does not say who holds it."""
        settings = self.settings(self.seeds[0])
        uses = settings.describe()  # only settings with an effect
        return replace(
            self,
            partition=settings.partition,
            clients=settings.clients,
            dirichlet=uses.get("dirichlet"),
            shards=uses.get("shards"),
            feature_severity=uses.get("feature_severity"),
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def measures_as(self, other: Config) -> bool:
        """Whether both give the same results: they differ at most in where and how they run."""
        how = {name: getattr(self, name) for name in ("name", "out", "threads", "checkpoint_seconds", "keep")}
        return replace(other, **how) == self

    def adds_to(self, other: Config) -> bool:
        """Whether it gives all results of the other, and perhaps those of more methods and seeds."""
        more = set(self.methods) >= set(other.methods) and set(self.seeds) >= set(other.seeds)
        return more and self.measures_as(replace(other, methods=self.methods, seeds=self.seeds))


def read_config(path: Path, words: Iterable[str] = ()) -> Config:
    """A file's settings, overridden by words such as `rounds=10` or `methods=fedthe,ditto`."""
    return make_config(read_settings(path, words))


def read_settings(path: Path | None, words: Iterable[str] = ()) -> dict[str, Any]:
    """The settings of a file, if there is one, and of words; and under "sweep" the values to sweep."""
    return read_words(words, {"name": path.stem} | _read_toml(path) if path else {})


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
            guessed = [guess_value(part) for part in value.split(",")]
            _put_hyper(values, key, guessed if len(guessed) > 1 else guessed[0])
        elif key.startswith("streams."):
            streams = convert("streams", values.get("streams", {}), *_hint("streams"))
            values["streams"] = streams | {key.removeprefix("streams."): value}
        elif key.startswith("sweep."):
            swept = key.removeprefix("sweep.")
            parts = split_list(value)
            each = parts if swept == "natural" else [from_text(p, *_hints().get(swept, (Any, False))) for p in parts]
            before_it = values.get("sweep")
            values["sweep"] = {**(before_it if isinstance(before_it, Mapping) else {}), swept: each}
        else:
            # natural=none means no shift, while None means whatever is available
            values[key] = value if key == "natural" else from_text(value, *_hint(key))
        before = word
    return values


def make_config(values: Mapping[str, Any]) -> Config:
    return Config(**{key: convert(key, value, *_hint(key)) for key, value in values.items()})


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
    hyper = convert("hyper", values.get("hyper", {}), *_hint("hyper"))
    hyper.setdefault(method, {})[".".join(path)] = value
    values["hyper"] = hyper


@cache
def _hints() -> dict[str, tuple[Any, bool]]:
    """By setting: its type without None, and whether None is allowed."""
    hints = {name: (hint, typing.get_args(hint)) for name, hint in typing.get_type_hints(Config).items()}
    return {name: (of[0], True) if type(None) in of else (hint, False) for name, (hint, of) in hints.items()}


def _hint(key: str) -> tuple[Any, bool]:
    if key not in _hints():
        hint = f"a hyperparameter is set by hyper.METHOD.{key}=VALUE" if key.isidentifier() else "see `fedthe settings`"
        raise InputError(f"there is no setting {quote(key)}; {find_nearest(key, _hints()).rstrip('.')}; {hint}.")
    return _hints()[key]


def _show(values: Iterable[Any]) -> str:
    return clean(", ".join(map(str, values)), 200) or "empty"
