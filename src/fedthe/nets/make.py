"""Networks by name, and the default settings of their training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..errors import InputError
from ..text import find_nearest, quote
from . import NETS
from .net import Net
from .standardized import standardize

if TYPE_CHECKING:
    from ..config import Config

Moments = tuple[tuple[float, ...], tuple[float, ...]]  # means and standard deviations of an image's channels


@dataclass(frozen=True)
class Defaults:
    """How a network is trained unless the settings say otherwise."""

    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 5e-4
    search_lr: float | None = None  # of FedTHE's search for e; None: the method's


# The paper's. A plugin's network may have its own in a class attribute `defaults`.
DEFAULTS = {
    "cnn": Defaults(),
    "resnet20_gn": Defaults(momentum=0.9),
    "cct4": Defaults("adam", lr=0.001, weight_decay=0.0, search_lr=0.01),
}
# The models of the paper's tables, as settings of an experiment.
MODELS: dict[str, dict[str, Any]] = {
    **{name: {"net": name} for name in DEFAULTS},
    "resnet20_gn x4": {"net": "resnet20_gn", "width": 4, "batch": 128},
}


def find_defaults(name: str) -> Defaults:
    """The paper's, the plugin's, or the general ones, even for an unknown name."""
    found = DEFAULTS.get(name) or getattr(NETS.get(name), "defaults", Defaults())
    if not isinstance(found, Defaults):
        raise InputError(f"the network {name} has defaults that are no fedthe.nets.make.Defaults: {quote(found)}.")
    return found


def check_net(name: str) -> None:
    if name not in NETS:
        raise InputError(f"there is no network {name!r}; {find_nearest(name, NETS)}")


def takes_width(name: str) -> bool:
    """Whether a network has a width."""
    return "width" in getattr(NETS[name], "__dataclass_fields__", {})  # a plugin's need not be a dataclass


def make_net(config: Config, classes: int, channels: int, size: int, moments: Moments | None = None) -> Net:
    """The network of the settings; with moments, it standardizes its images."""
    check_net(config.net)
    more = {"width": config.width} if takes_width(config.net) else {}
    net = NETS[config.net](classes, channels, size, config.head_layers, **more)
    return net if moments is None else standardize(net, *moments)
