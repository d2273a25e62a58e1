"""Trees: nested dicts of tensors. A model, a client's state and an upload are all trees."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from .errors import InputError

if TYPE_CHECKING:
    import torch

# The values are tensors and trees. `Any` lets a method write params["body"]["conv1"] without casts.
Tree: TypeAlias = dict[str, Any]


def flatten(tree: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The leaves by dotted name, in the tree's order. Empty subtrees have no leaves, so they vanish."""
    flat: dict[str, torch.Tensor] = {}
    for name, value in tree.items():
        if not name or "." in name:
            raise InputError(f"the tree's key {name!r} is empty or has a dot, so it cannot be part of a dotted name.")
        if isinstance(value, Mapping):
            flat.update({f"{name}.{rest}": leaf for rest, leaf in flatten(value).items()})
        else:
            flat[name] = value
    return flat


def unflatten(flat: Mapping[str, torch.Tensor]) -> Tree:
    """The tree whose leaves have these dotted names."""
    tree: Tree = {}
    for dotted, leaf in flat.items():
        *path, last = dotted.split(".")
        branch = tree
        for name in path:
            branch = branch.setdefault(name, {})
            if not isinstance(branch, dict):
                raise InputError(f"{dotted} goes through {name}, which is a leaf; rename one of them.")
        if last in branch:
            raise InputError(f"{dotted} occurs twice, or as a leaf and as a branch; rename one of them.")
        branch[last] = leaf
    return tree


def map_leaves(fn: Callable[..., Any], *trees: Mapping[str, Any]) -> Tree:
    """`fn` of the leaves at the same place; all trees must have the same keys, in any order."""
    first, *others = trees
    for other in others:
        if first.keys() != other.keys():
            raise InputError(
                f"trees must have the same keys, but they differ in {sorted(first.keys() ^ other.keys())[:5]}."
            )
    result: Tree = {}
    for name in first:
        values = [tree[name] for tree in trees]
        branches = sum(isinstance(value, Mapping) for value in values)
        if branches not in (0, len(values)):
            raise InputError(f"trees must have the same keys, but {name} is a leaf in one and a branch in another.")
        result[name] = map_leaves(fn, *values) if branches else fn(*values)
    return result


def stack(trees: Sequence[Tree]) -> Tree:
    """One tree whose leaves have a new first axis; row i is trees[i]."""
    import torch

    if not trees:
        raise InputError("stack needs at least one tree.")
    return map_leaves(lambda *leaves: torch.stack(leaves), *trees)


def take(tree: Tree, index: Any) -> Tree:
    """Row `index` of a stack, or the rows of a slice, list or tensor of indices."""
    return map_leaves(lambda leaf: leaf[index], tree)


def weighted_mean(trees: Tree | Sequence[Tree], weights: Sequence[float] | torch.Tensor) -> Tree:
    """The mean over a list of trees, or over the first axis of a stack, with weights that need not sum to one.

    Weights in a list are checked; a tensor of weights is not, because it may be on a device or under vmap.
    """
    import torch

    stacked = trees if isinstance(trees, dict) else stack(trees)
    if not isinstance(weights, torch.Tensor):
        if not weights or not all(math.isfinite(w) and w >= 0 for w in weights) or not sum(weights) > 0:
            raise InputError(
                f"weights must be finite, not negative and not all zero, but they begin with {list(weights)[:5]}."
            )
        weights = torch.tensor(weights, dtype=torch.float64)
    shares = weights / weights.sum()

    def mean(leaf: torch.Tensor) -> torch.Tensor:
        if not (leaf.is_floating_point() or leaf.is_complex()):
            raise InputError(f"a mean needs floating-point numbers, but a leaf is {leaf.dtype}; upload it as a float.")
        if len(leaf) != len(shares):
            raise InputError(f"there are {len(leaf)} trees but {len(shares)} weights; give one weight per tree.")
        # a product and a sum, because a GPU may compute a matrix product in TF32
        return (leaf * shares.to(leaf).view(-1, *[1] * (leaf.ndim - 1))).sum(0)

    return map_leaves(mean, stacked)


def count(tree: Mapping[str, Any]) -> int:
    """How many numbers the tree holds."""
    return sum(leaf.numel() for leaf in flatten(tree).values())


def count_bytes(flat: Mapping[str, torch.Tensor]) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in flat.values())


def hash_leaves(flat: Mapping[str, torch.Tensor]) -> str:
    """A hash of named tensors on the CPU, whatever their order."""
    import torch

    sha = hashlib.sha256()
    for name, leaf in sorted(flat.items()):
        sha.update(f"{name}\0{leaf.dtype}\0{list(leaf.shape)}\0".encode())
        sha.update(leaf.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def find_fault(expected: Mapping[str, torch.Tensor], given: Mapping[str, Any], batched: bool = False) -> str | None:
    """How `given` differs from `expected` in its leaves, their shapes or dtypes; None if it does not.

    batched: the leaves of `given` have a first axis over clients.
    """
    import torch

    for name in expected:
        if name not in given:
            return f"{name} is missing"
    for name, leaf in given.items():
        if name not in expected:
            return f"{name} is not expected"
        if not isinstance(leaf, torch.Tensor):
            return f"{name} is a {type(leaf).__name__}, not a tensor"
        wanted, shape = list(expected[name].shape), list(leaf.shape[1:] if batched else leaf.shape)
        if shape != wanted:
            return f"{name} has shape {shape}, not {wanted}"
        if leaf.dtype != expected[name].dtype:
            return f"{name} is {_name(leaf.dtype)}, not {_name(expected[name].dtype)}"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
