"""A network that starts with the weights of a file, such as those of an earlier training elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import foreign, tree
from ..errors import InputError
from ..store import expand
from ..text import clean
from ..tree import Tree
from .body import list_constants
from .net import Net, Start, given
from .wrap import Wrapped

OUT = ("head.out", "head.bias")  # the last layer, which depends on the number of classes
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # of a BatchNorm


@dataclass(frozen=True)
class Started(Net):
    """Every seed starts with the loaded weights; leaves that the file lacks start as those of `inner`."""

    inner: Net
    weights: str  # a hash of the loaded ones
    loaded: Mapping[str, Tensor] = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def feature_dim(self) -> int:
        return self.inner.feature_dim

    def body_starts(self) -> dict[str, Start]:
        return self._replace("body.", self.inner.body_starts())

    def head_starts(self) -> dict[str, Start]:
        return self._replace("head.", self.inner.head_starts())

    def _replace(self, part: str, starts: dict[str, Start]) -> dict[str, Start]:
        known = self.loaded
        return {name: given(known[part + name]) if part + name in known else s for name, s in starts.items()}

    def init(self, seed: int) -> Tree:
        loaded = {name: leaf.clone() for name, leaf in self.loaded.items()}
        return tree.unflatten(tree.flatten(self.inner.init(seed)) | loaded)

    def features(self, body: Tree, x: Tensor) -> Tensor:
        return self.inner.features(body, x)

    def head(self, head: Tree, h: Tensor) -> Tensor:
        return self.inner.head(head, h)

    def check(self, x: Tensor, stacked: bool = False) -> None:
        self.inner.check(x, stacked)


def start_from_file(net: Net, path: Path | str) -> Started:
    """`net` with the weights of a safetensors file: a state_dict of the module that was wrapped, or the leaves of a
    network by dotted name, such as body.conv1. A last layer for another number of classes is not taken."""
    path = expand(Path(path))
    leaves = {name: start.shape for name, start in net.starts().items()}
    constants = dict(list_constants(net.module)) if isinstance(net, Wrapped) else {}
    names = {leaf: _name_in_file(net, leaf) for leaf in leaves}  # by leaf
    if not path.exists():
        raise InputError(f"{foreign.show_path(path)} does not exist.")
    with foreign.explain(
        f"{foreign.show_path(path)} is not a readable safetensors file",
        "write it with safetensors.torch.save_file(module.state_dict(), PATH)",
    ):
        shapes = _read_shapes(path)
    what = foreign.show_path(path)
    wanted = _pick_leaves(what, shapes, leaves, names)
    wanted |= {f"constant {name}": name for name in constants if name in shapes}
    _refuse_others(what, shapes, {*names.values(), *constants}, isinstance(net, Wrapped) and net.normalise is not None)
    with foreign.explain(f"{what} is not a readable safetensors file", "write or fetch it again"):
        found = _read_tensors(path, wanted)
    loaded = {leaf: _check_tensor(what, wanted[leaf], tensor) for leaf, tensor in found.items() if leaf in leaves}
    if isinstance(net, Wrapped):
        fixed = {
            name: _check_constant(what, name, found[f"constant {name}"], like)
            for name, like in constants.items()
            if name in shapes
        }
        net = net.with_constants(fixed)
    return Started(net.classes, net, tree.hash_leaves(loaded), loaded)


def _name_in_file(net: Net, leaf: str) -> str:
    if not isinstance(net, Wrapped):
        return leaf
    part, _, name = leaf.partition(".")
    return name if part == "body" else f"{net.head_at}.{'weight' if name == 'out' else name}"


def _pick_leaves(
    what: str, shapes: Mapping[str, tuple[int, ...]], leaves: Mapping[str, tuple[int, ...]], names: Mapping[str, str]
) -> dict[str, str]:
    """The names in the file by leaf: all, or all but the last layer."""
    out = [leaf for leaf in leaves if leaf in OUT]
    missing = [leaf for leaf in out if names[leaf] not in shapes]
    other = [leaf for leaf in out if leaf not in missing and shapes[names[leaf]][:1] != leaves[leaf][:1]]
    for leaf in other:
        if len(shapes[names[leaf]]) != len(leaves[leaf]):
            _check_shape(what, names[leaf], shapes[names[leaf]], leaves[leaf])
    if missing or other:
        why = "has none" if missing else f"is for {shapes[names[other[0]]][0]} classes, not {leaves[other[0]][0]}"
        warnings.warn(f"{what}: its last layer {why}, so the last layer starts anew.", stacklevel=4)
        leaves = {leaf: shape for leaf, shape in leaves.items() if leaf not in out}
    for leaf, shape in leaves.items():
        if names[leaf] not in shapes:
            raise InputError(f"{what} lacks {names[leaf]}; it has {_list_some(shapes)}.")
        _check_shape(what, names[leaf], shapes[names[leaf]], shape)
    return {leaf: names[leaf] for leaf in leaves}


def _refuse_others(what: str, shapes: Iterable[str], known: set[str], replaces_norms: bool) -> None:
    others = [name for name in shapes if name not in known]
    if replaces_norms:
        others = [name for name in others if name.rpartition(".")[2] not in STATISTICS]
    if others:
        raise InputError(
            f"{what} has {clean(others[0])}, which the network does not; it has {_list_some(sorted(known))}."
        )


def _check_shape(what: str, name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if found != shape:
        raise InputError(f"{what}: {clean(name)} has the shape {list(found)}, but the network's is {list(shape)}.")


def _check_tensor(what: str, name: str, tensor: Tensor) -> Tensor:
    with foreign.explain(f"{what}: {clean(name)} is {tensor.dtype}, which is not read", "save it as float32"):
        plain = tensor.float() if tensor.is_floating_point() else None
        if plain is None or not plain.isfinite().all():
            raise InputError(f"{what}: {clean(name)} must hold finite floating-point numbers.")
    return plain


def _check_constant(what: str, name: str, tensor: Tensor, like: Tensor) -> Tensor:
    _check_shape(what, name, tuple(tensor.shape), tuple(like.shape))
    if like.is_floating_point():
        return _check_tensor(what, name, tensor)
    if tensor.dtype != like.dtype:
        raise InputError(f"{what}: {clean(name)} is {tensor.dtype}, but the network's is {like.dtype}.")
    return tensor


def _list_some(names: Iterable[str]) -> str:
    names = list(names)
    return clean(", ".join(names[:5]), 200) + (", ..." if len(names) > 5 else "")


def _read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Also refuses special files, and more than fits in memory."""
    from safetensors import safe_open

    with foreign.open_file(path) as file:
        foreign.check_room(foreign.show_path(path), file.seek(0, 2), "use a smaller network")
    with safe_open(path, framework="pt") as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118


def _read_tensors(path: Path, names: Mapping[str, str]) -> dict[str, Tensor]:
    from safetensors import safe_open

    opened: Any
    with safe_open(path, framework="pt") as opened:
        return {leaf: torch.clone(opened.get_tensor(name)) for leaf, name in names.items()}
