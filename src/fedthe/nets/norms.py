"""Which parameters of a network are the scales and shifts of its norm layers."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from .net import Net
from .started import Started
from .wrap import Wrapped

NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, _NormBase)


def list_norms(net: Net) -> list[list[str]]:
    """By layer, in the order of the network: the dotted names of its norms' weights and biases, such as
    body.norm.weight. A layer without them is left out."""
    if isinstance(net, Started):
        return list_norms(net.inner)
    layers = _list_modules(net) if isinstance(net, Wrapped) else _list_starts(net)
    named = [[f"{layer}.{leaf}" for leaf in ("weight", "bias")] for layer in layers]
    known = net.starts()
    found = [[name for name in layer if name in known] for layer in named]
    return [layer for layer in found if layer]


def _list_modules(net: Wrapped) -> list[str]:
    return [f"body.{name}" for name, layer in net.module.named_modules() if isinstance(layer, NORMS)]


def _list_starts(net: Net) -> list[str]:
    """Layers whose weight is a vector of ones before training, as `nets.net.norm` makes them."""
    return [
        name.removesuffix(".weight")
        for name, start in net.starts().items()
        if name.endswith(".weight") and (start.kind, start.scale, len(start.shape)) == ("constant", 1.0, 1)
    ]
