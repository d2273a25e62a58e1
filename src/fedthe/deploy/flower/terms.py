"""What the server and the clients of a federation agree on. Both make it of the settings that come with a run."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from functools import cached_property

from ...config import Config, make_config, read_words
from ...data.folder import Square
from ...data.plan import Federation
from ...engine.robust import check_effect
from ...engine.server import count_sampled
from ...engine.visit import Training
from ...errors import InputError
from ...experiment.data import fit_to_net
from ...experiment.work import prepare_here
from ...methods.base import Method
from ...methods.compose import describe
from ...methods.make import make_methods
from ...nets import NETS
from ...nets.make import make_net
from ...store import content_hash
from ...text import clean
from ..bundle import Input, take_input

FORMAT = 3  # part of every id; raised when a change of the code moves numbers
OWN = "own"  # as dataset: each client brings data of its own
KINDS = {"pictures": "uint8", "features": "float32", "tokens": "int64"}
KEYS = ("methods", "seeds", "rounds", "clients", "dataset")  # of `fedthe run`, which are keys of the app
UNUSED = (  # settings of `fedthe run` that would change nothing here
    *("name", "engine", "device", "precision", "threads", "tolerate", "checkpoint_seconds", "curve", "keep", "out"),
    *("tests", "streams", "samples", "severity", "frost", "natural", "unknown"),
)
UNUSED_OWN = (  # with data of the clients' own
    *("size", "by_client", "partition", "dirichlet", "shards", "feature_shift", "feature_severity"),
    *("train_fraction", "test_fraction"),
)
UNUSED_NUMBERS = ("flip", "crop", "square")  # with data that is not pictures
NOISE = ("noise-multiplier", "clipping-norm")  # in the run config; they move numbers
Value = bool | float | int | str  # of Flower's run config


@dataclass(frozen=True)
class Terms:
    """A federation of one method and one seed."""

    config: Config
    name: str  # of the method
    method: Method
    classes: tuple[str, ...]
    takes: Input
    clients: int
    federation: Federation | None  # whose data the clients of an experiment hold; None: they bring their own
    noise: tuple[float, ...] = (0.0, 0.0)  # of differential privacy

    @property
    def seed(self) -> int:
        return self.config.seeds[0]

    @property
    def settings(self) -> Training:
        return self.config.training

    @cached_property
    def id(self) -> str:
        """A hash of all that the training depends on but its rounds: where it is the same, one continues another."""
        settings = self.settings.describe()
        del settings["rounds"], settings["tolerate"]
        takes = self.takes
        data = self.federation.training_hash if self.federation else [self.classes, *astuple(takes)]
        parts = describe(self.method.training), settings, data, self.seed, self.clients, self.noise
        return content_hash(FORMAT, *parts)[:16]


def make_terms(given: Mapping[str, Value]) -> Terms:
    """From a run config: the keys of the app, and under `settings` any others of `fedthe run`, as KEY=VALUE words."""
    config = _read_config(given)
    terms = _share_own(config, given) if config.dataset == OWN else _share_dataset(config)
    return replace(terms, noise=tuple(read_float({key: 0.0, **given}, key, 0) for key in NOISE))


def read_float(given: Mapping[str, Value], key: str, least: float) -> float:
    value = given[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value < float("inf"):
        raise InputError(f"{key} must be a number from {least:g} on, not {value}.")
    return float(value)


def _read_config(given: Mapping[str, Value]) -> Config:
    try:
        words = shlex.split(str(given.get("settings", "")))
    except ValueError as error:
        raise InputError(f"settings cannot be read ({error}).") from None
    for key in (word.partition("=")[0].partition(".")[0] for word in words):
        if (why := _refuse_setting(key, given)) is not None:
            raise InputError(f"settings cannot have {clean(key)}; {why}.")
    own = {
        "methods": (str(given["method"]),),
        "seeds": (_read_number(given, "seed", 0),),
        "rounds": _read_number(given, "rounds", 1),
        "clients": _read_number(given, "clients", 1),
        "dataset": str(given["dataset"]),
        "device": "cpu",
        "engine": "loop",
    }
    return make_config({**read_words(words), **own})


def _refuse_setting(key: str, given: Mapping[str, Value]) -> str | None:
    own = given["dataset"] == OWN
    if key in KEYS:
        return "it is a key of its own"
    if key == "unseen":
        return "a federation has no clients that join later"
    if key in ("attackers", "attack"):
        return "attacks are simulated by `fedthe run` alone"
    if own and key in UNUSED_OWN:
        return "it has no effect on data that clients bring"
    if own and key in UNUSED_NUMBERS and given.get("kind", "pictures") != "pictures":
        return "it has no effect on data that is not pictures"
    return "it has no effect in a federation" if key in UNUSED else None


def _read_number(given: Mapping[str, Value], key: str, least: int) -> int:
    value = given[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{key} must be a whole number from {least} on, not {value}.")
    return value


def _share_dataset(config: Config) -> Terms:
    """An experiment: every client holds its part of one dataset."""
    methods, (work,) = prepare_here(config)
    ((name, method),) = methods.items()
    pool, clients = work.federation.pool, len(work.federation.clients)
    takes = take_input(pool.x, work.config.square)
    return Terms(work.config, name, method, tuple(pool.classes), takes, clients, work.federation)


def _share_own(config: Config, given: Mapping[str, Value]) -> Terms:
    classes = tuple(name.strip() for name in str(given.get("classes", "")).split(",") if name.strip())
    if len(classes) < 2 or len(set(classes)) != len(classes):
        raise InputError(f"classes must name at least two classes, each once, such as cat,dog, not {list(classes)}.")
    takes = _read_input(str(given.get("kind", "pictures")), str(given.get("shape", "")), config.square)
    if config.standardize:
        raise InputError("standardize needs everybody's pixels, which stay with the clients; leave it out.")
    if not takes.is_picture:
        config = replace(config, flip=False, crop=0)
    elif config.crop >= min(takes.shape[:2]):
        raise InputError(f"crop must be less than the {min(takes.shape[:2])} pixels of a side, but is {config.crop}.")
    shape = (takes.shape[2], *takes.shape[:2]) if takes.is_picture else takes.shape
    net = make_net(config, len(classes), shape)
    config = config if config.net in NETS else fit_to_net(config, net)
    ((name, method),) = make_methods(config, net).items()
    if not takes.is_picture and method.predictor.pictures_only:
        raise InputError(f"{clean(name)} works on augmented or rotated pictures, and these are none.")
    assert config.clients is not None
    settings = config.training
    check_effect(settings.defense, settings.attack, config.clients, count_sampled(config.clients, config.participation))
    return Terms(config, name, method, classes, takes, config.clients, None)


def _read_input(kind: str, shape: str, square: Square | None) -> Input:
    if kind not in KINDS:
        raise InputError(f"kind must be {', '.join(KINDS)}, not {clean(kind)!r}.")
    try:
        sides = tuple(int(side) for side in shape.split("x"))
    except ValueError:
        sides = ()
    right = (len(sides) == 3 and sides[2] in (1, 3)) if kind == "pictures" else bool(sides)
    if not right or not all(0 < side < 2**16 for side in sides) or math.prod(sides) > 2**27:
        raise InputError(f"shape must be that of a sample, such as 32x32x3 for pictures, not {clean(shape)!r}.")
    return Input(KINDS[kind], sides, square or "crop")
