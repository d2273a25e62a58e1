"""Any torch module as a network, split at its last linear layer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .. import rng, tree
from ..errors import InputError
from ..fingerprint import digest, list_layers
from ..foreign import explain
from ..text import quote
from ..tree import Tree
from .body import Body, list_constants, put
from .net import Defaults, Net, Start, given
from .refusals import BATCH_NORMS, check_behaviour, check_layers, check_stacked, name_class, rate_of_dropout

GROUPS = 32  # of a GroupNorm in place of a BatchNorm, or the largest number that divides this and the channels

Normalise = Literal["group"] | None
Dropout = Literal["off"] | None


@dataclass(frozen=True)
class Wrapped(Net):
    """Two are equal if they have the same layers, constants and initial weights, whichever objects hold them."""

    head_at: str  # the path of the head
    normalise: Normalise
    dropout: Dropout
    architecture: str  # a hash of the layers and constants
    weights: str  # a hash of the initial weights; if they are drawn, of those of one seed
    drawn: bool  # anew for every seed, by `make`
    module: nn.Module = field(compare=False, repr=False)
    make: Callable[[], nn.Module] | None = field(compare=False, repr=False)  # draws the weights of a seed
    defaults: Defaults = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        return type(self.module).__name__

    @property
    def feature_dim(self) -> int:
        return self._head.in_features

    def body_starts(self) -> dict[str, Start]:
        return self._starts("body.")

    def head_starts(self) -> dict[str, Start]:
        return self._starts("head.")

    def _starts(self, part: str) -> dict[str, Start]:
        leaves = list_leaves(self.module, self.head_at)
        return {name.removeprefix(part): given(leaf) for name, leaf in leaves.items() if name.startswith(part)}

    def init(self, seed: int) -> Tree:
        """The module's own weights; those of a function are drawn, with torch's generator seeded by `seed`."""
        if self.make is None:
            return super().init(seed)
        drawn = prepare(_draw(self.make, seed), self.head_at, self.normalise, self.dropout)
        flat = list_leaves(drawn, self.head_at)
        if {name: leaf.shape for name, leaf in flat.items()} != {name: s.shape for name, s in self.starts().items()}:
            raise InputError(f"{quote(self.make)} makes modules of different shapes; only weights may differ.")
        return tree.unflatten(flat)

    def features(self, body: Tree, x: Tensor) -> Tensor:
        return self._body(tree.flatten(body), x)

    def with_constants(self, values: Mapping[str, Tensor]) -> Wrapped:
        """The same with other buffers and untrained parameters, by dotted name."""
        if not values:
            return self
        module = copy.deepcopy(self.module)
        with torch.no_grad():
            for name, constant in list_constants(module):
                constant.copy_(values.get(name, constant))
        return replace(self, module=module, architecture=_hash_architecture(module))

    def check(self, x: Tensor, stacked: bool = False) -> None:
        check_behaviour(self, self.module, self.head_at, x, may_differ_in_training=self.dropout == "off")
        if stacked:
            check_stacked(self, name_class(self.module), x)

    @cached_property
    def _body(self) -> Body:
        return Body(self.module, self.head_at)

    @property
    def _head(self) -> nn.Linear:
        return cast(nn.Linear, self.module.get_submodule(self.head_at))


def wrap_module(
    module: nn.Module | Callable[[], nn.Module],
    head: str = "fc",
    *,
    normalise: Normalise = None,
    dropout: Dropout = None,
    defaults: Defaults | None = None,
) -> Wrapped:
    """A module as a network: `head` is the name or path of its last layer, an nn.Linear, and all before it the body.

    Every seed starts with the module's own weights. For weights that differ between seeds, pass a function without
    arguments that makes the module (or its class): it is called with torch's generator seeded.

    A network is a pure function of its parameters. So `normalise="group"` puts GroupNorm in the place of BatchNorm, and
    `dropout="off"` turns dropout off; a module that has either is refused otherwise. Parameters with
    requires_grad=False and buffers are constants. `defaults`: how to train it where a run does not say.
    """
    for name, value, choices in (("normalise", normalise, ("group",)), ("dropout", dropout, ("off",))):
        if value is not None and value not in choices:
            raise InputError(f'{name} must be "{choices[0]}" or None, not {quote(value)}.')
    if not isinstance(defaults, Defaults | None):
        raise InputError(f"defaults must be a fedthe.Defaults, not {quote(defaults)}.")
    if not callable(module):
        raise InputError(f"{quote(module)} is no torch module, nor a function that makes one.")
    if not isinstance(head, str):
        raise InputError(f"head must be the name of the last layer, not {quote(head)}.")
    make = None if isinstance(module, nn.Module) else module
    made = module if isinstance(module, nn.Module) else _draw(module, 0)
    plain = prepare(made, head, normalise, dropout)
    layer = cast(nn.Linear, plain.get_submodule(head))
    weights = tree.hash_leaves(list_leaves(plain, head))
    if make is not None:
        again = prepare(_draw(make, 0), head, normalise, dropout)
        if weights != tree.hash_leaves(list_leaves(again, head)):
            raise InputError(
                f"{quote(make)} makes other weights in every call; draw them with torch's default generator alone."
            )
    return Wrapped(
        classes=int(layer.out_features),
        head_at=head,
        normalise=normalise,
        dropout=dropout,
        architecture=_hash_architecture(plain),
        weights=weights,
        drawn=make is not None,
        module=plain,
        make=make,
        defaults=defaults or Defaults(),
    )


def prepare(module: nn.Module, head: str, normalise: Normalise, dropout: Dropout) -> nn.Module:
    """A copy of the module in float32 on the CPU, with the layers that were asked for, and checked."""
    with explain(f"{name_class(module)} cannot be copied", "leave out the attribute that prevents it"):
        plain = copy.deepcopy(module).float().cpu().eval()
    for name, layer in list(plain.named_modules()):
        if type(layer) in BATCH_NORMS and normalise == "group":
            put(plain, name, _make_group_norm(cast(_BatchNorm, layer)))
        if rate_of_dropout(layer) and dropout == "off":
            setattr(layer, "p" if hasattr(layer, "p") else "dropout", 0.0)
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            layer.sparse = False  # the same gradients, which optimizers of all leaves can take
        if isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False  # in evaluation mode alone, it would set padding to zero
    check_layers(plain, head)
    return plain


def _make_group_norm(norm: _BatchNorm) -> nn.GroupNorm:
    """As Opacus replaces it (opacus/validators/batch_norm.py), but with the scale and shift of the BatchNorm.

    A BatchNorm1d may normalize vectors [n, channels], where groups of one channel would leave nothing: it gets one.
    """
    groups = 1 if isinstance(norm, nn.BatchNorm1d) else math.gcd(GROUPS, norm.num_features)
    made = nn.GroupNorm(groups, norm.num_features, norm.eps, norm.affine)
    if norm.affine:
        made.weight, made.bias = norm.weight, norm.bias
    return made


def _hash_architecture(module: nn.Module) -> str:
    return digest((list_layers(module), tree.hash_leaves(dict(list_constants(module)))))


def list_leaves(module: nn.Module, head: str) -> dict[str, Tensor]:
    """The trained parameters by dotted name, as the network names them."""
    body = {
        f"body.{name}": p.detach()
        for name, p in module.named_parameters()
        if p.requires_grad and name.rpartition(".")[0] != head
    }
    layer = dict(module.get_submodule(head).named_parameters())
    return body | {f"head.{'out' if name == 'weight' else name}": p.detach() for name, p in layer.items()}


def _draw(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    high, low = rng.key(seed, "init")
    with torch.random.fork_rng(devices=[]), explain(f"{quote(make)} fails"):
        torch.default_generator.manual_seed(high << 32 | low)
        made = make()
    if not isinstance(made, nn.Module):
        raise InputError(f"{quote(make)} returns {quote(type(made).__name__)}, not a torch module.")
    return made
