"""A torch module without its head, as a pure function of parameters."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .written_out import WrittenOut


class Body:
    """features(params, x) of a module. Parameters that need no gradient, and buffers, are constants.

    A call puts the parameters into the module, and clients train in several threads, so every thread has a copy. The
    copies have no weights of their own, and share constants.
    """

    def __init__(self, module: nn.Module, head: str) -> None:
        weights = {id(p): nn.Parameter(p.detach().to("meta")) for p in module.parameters() if p.requires_grad}
        self._bare = copy.deepcopy(module, dict(weights))
        put(self._bare, head, nn.Identity())
        self._bare.eval()
        frozen = [p for p in self._bare.parameters() if not p.is_meta]
        self._constants = [*self._bare.buffers(), *frozen]
        self._copies = threading.local()

    def __call__(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        with WrittenOut():
            features: Tensor = functional_call(self._copy_for(x.device), params, (x,))
        return features

    def _copy_for(self, device: torch.device) -> nn.Module:
        copies: dict[str, nn.Module] = vars(self._copies)
        if str(device) not in copies:
            with ThreadPoolExecutor(1) as outside:  # where no vmap, gradient or mode of the caller is active
                copies[str(device)] = outside.submit(self._copy, device).result()
        return copies[str(device)]

    def _copy(self, device: torch.device) -> nn.Module:
        if device.type == "cpu":
            return copy.deepcopy(self._bare, {id(constant): constant for constant in self._constants})
        return _move(copy.deepcopy(self._bare), device)


def put(module: nn.Module, path: str, new: nn.Module) -> None:
    """Replace the submodule at a dotted path."""
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, new)


def list_constants(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers, and parameters that are not trained, by dotted name."""
    yield from module.named_buffers()
    yield from ((name, p.detach()) for name, p in module.named_parameters() if not p.requires_grad)


def _move(module: nn.Module, device: torch.device) -> nn.Module:
    """All that has numbers, also tensors that are no buffers."""

    def move(tensor: Tensor) -> Tensor:
        return tensor if tensor.is_meta else tensor.to(device)

    module._apply(move)
    for each in module.modules():
        for name, value in vars(each).items():
            if isinstance(value, Tensor):
                setattr(each, name, move(value))
    return module
