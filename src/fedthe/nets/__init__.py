"""Every network, by name."""

from __future__ import annotations

from ..plugins import load_plugins
from .cct import CCT4
from .cnn import CNN
from .net import Net
from .resnet_gn import ResNet20GN

__all__ = ["CCT4", "CNN", "NETS", "Net", "ResNet20GN"]

NETS: dict[str, type[Net]] = {"cnn": CNN, "resnet20_gn": ResNet20GN, "cct4": CCT4}
NETS |= load_plugins("fedthe.nets", NETS)
