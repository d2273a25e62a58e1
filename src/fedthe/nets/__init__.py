"""Every network, by name."""

from __future__ import annotations

from collections.abc import Callable

from ..plugins import load_plugins
from .cct import CCT4
from .cnn import CNN
from .net import Net, PictureNet
from .resnet_gn import ResNet20GN

__all__ = ["CCT4", "CNN", "NETS", "Net", "PictureNet", "ResNet20GN"]

# by name: a class for images, or a function of the number of classes and the shape of a sample
NETS: dict[str, Callable[..., Net]] = {"cnn": CNN, "resnet20_gn": ResNet20GN, "cct4": CCT4}
NETS |= load_plugins("fedthe.nets", NETS)
