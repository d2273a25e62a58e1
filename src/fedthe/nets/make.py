"""Networks by name, and the default settings of their training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from ..errors import InputError
from ..foreign import explain
from ..plugins import is_file_spec, load_object
from ..text import find_nearest, quote
from . import NETS
from .net import Defaults as Defaults
from .net import Net, PictureNet
from .standardized import Standardized, standardize
from .started import Started, start_from_file
from .wrap import Wrapped

if TYPE_CHECKING:
    from ..config import Config

Moments = tuple[tuple[float, ...], tuple[float, ...]]  # means and standard deviations of an image's channels


# The paper's. Another network may have its own in an attribute `defaults` of its class or function.
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


def find_defaults(net: str | Net) -> Defaults:
    """Those of a network, or of a name: the paper's, the plugin's, or the general ones, even for an unknown name."""
    if isinstance(net, Started | Standardized):
        return find_defaults(net.inner)
    names = [name for name, known in NETS.items() if known is type(net)]
    name = net if isinstance(net, str) else (names or [type(net).__name__])[0]
    found = DEFAULTS.get(name) or getattr(NETS.get(name) if isinstance(net, str) else net, "defaults", Defaults())
    if not isinstance(found, Defaults):
        raise InputError(f"the network {name} has defaults that are no fedthe.nets.make.Defaults: {quote(found)}.")
    return found


def check_net(name: str) -> None:
    if name not in NETS:
        raise InputError(f"there is no network {name!r}; {find_nearest(name, NETS)}")


def takes_width(net: Any) -> bool:
    """Whether a network, given or by name, has a width."""
    made = NETS[net] if isinstance(net, str) else net
    return "width" in getattr(made, "__dataclass_fields__", {})  # a plugin's need not be a dataclass


def make_net(
    config: Config, classes: int, shape: Sequence[int], moments: Moments | None = None, given: Any = None
) -> Net:
    """The network of the settings, or of what is given, for samples of a shape: (channels, size, size) for images.

    With moments, it standardizes its images. given: a network, its class or a function, in place of a name.
    """
    name = None if given is not None else config.net
    if name is not None and is_file_spec(name):
        given = load_object(name)
    elif name is not None:
        check_net(name)
        given = NETS[name]
    options = {"width": config.width} if takes_width(given) else {}
    if config.width != 1 and not options:
        raise InputError(f"width has no effect on {name or 'the network'}; leave it out.")
    net = as_net(given, classes, shape, name, head_layers=config.head_layers, **options)
    if moments is not None:
        if not isinstance(net, PictureNet):
            raise InputError(f"{type(net).__name__} cannot standardize its samples; leave standardize out.")
        net = standardize(net, *moments)
    return net if config.init is None else start_from_file(net, config.init)


def as_net(value: Any, classes: int, shape: Sequence[int], name: str | None = None, **options: Any) -> Net:
    """A network for that many classes and samples of that shape, from a Net, a class of them, or a function.

    A class for images is called with classes, channels and size, and with `options`; any other class or function with
    classes and the shape.
    """
    name, shape = name or getattr(value, "__name__", type(value).__name__), tuple(shape)
    if isinstance(value, type) and issubclass(value, PictureNet):
        if len(shape) != 3 or shape[1] != shape[2]:
            square = "set square=crop or square=pad, or " if len(shape) == 3 else ""
            raise InputError(
                f"{name} takes square images, but a sample has the shape {list(shape)}; {square}"
                "bring a network for it: net=FILE.py:NAME, or fedthe.wrap_module."
            )
        net: Any = value(classes, *shape[:2], **options)
    elif options.get("head_layers", 1) != 1:
        raise InputError(f"{name} has a head of its own; leave head_layers out.")
    elif isinstance(value, Net | nn.Module) or not callable(value) or _is_module_class(value):
        net = value
    else:
        call = f"{name} cannot be made for {classes} classes and samples of shape {list(shape)}"
        with explain(call, f"define it as {str(name).rpartition(':')[2]}(classes, shape)"):
            net = value(classes, shape)
    asked = getattr(value, "defaults", None)
    if isinstance(net, Wrapped) and net is not value and isinstance(asked, Defaults) and net.defaults == Defaults():
        net = replace(net, defaults=asked)  # those of the function that made it
    if isinstance(net, nn.Module) or _is_module_class(net):
        raise InputError(f"{name} is a torch module; make it a network with fedthe.wrap_module(module, head=NAME).")
    if not isinstance(net, Net):
        raise InputError(f"{name} is no network, but {quote(net)}; give a fedthe.Net, its class, or a function.")
    if net.classes != classes:
        raise InputError(f"{name} tells {net.classes} classes apart, but the data has {classes}.")
    return net


def _is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)
