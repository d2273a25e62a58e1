"""Methods that send the same, trained side by side: what goes around is trained once, each client keeps what each of
the methods keeps. Every one of them ends up with the bits that it has when it is trained alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from .. import tree
from ..methods.base import Fit, Method
from ..tree import Tree
from ..types import Shard
from .clients import Clients

T = TypeVar("T")


@dataclass(frozen=True)
class Beside(Method):
    """Some methods as one. A client's state has a branch for each, by its number."""

    parts: tuple[Method, ...] = field(kw_only=True)  # the first one shares all that the others do, or more
    leaves: tuple[frozenset[str], ...] = field(kw_only=True)  # that each of them shares, by their dotted names

    def personalize(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Tree:
        return {
            str(i): part.personalize(fit, self.pick(shared, i), mine[str(i)], shard)
            for i, part in enumerate(self.parts)
        }

    def local(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Tree:
        return self.parts[0].local(fit, shared, mine["0"], shard)

    def aggregate(self, shared: Tree, uploads: Tree, weights: Tensor) -> Tree:
        return self.parts[0].aggregate(shared, uploads, weights)

    def pick(self, shared: Tree, part: int) -> Tree:
        """What one of the methods knows of what all share."""
        return tree.unflatten({name: leaf for name, leaf in tree.flatten(shared).items() if name in self.leaves[part]})


@dataclass(frozen=True)
class ClientsBeside:
    """The clients' states of several methods, as those of one."""

    parts: tuple[Clients, ...]

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, k: int) -> Tree:
        return {str(i): part[k] for i, part in enumerate(self.parts)}

    def take(self, ids: Sequence[int]) -> Tree:
        return {str(i): part.take(ids) for i, part in enumerate(self.parts)}

    def put(
        self, ids: Sequence[int], own: Mapping[str, Tensor], links: Mapping[str, str], shared: Tree, round: int
    ) -> ClientsBeside:
        return ClientsBeside(
            tuple(part.put(ids, _branch(own, i), _branch(links, i), shared, round) for i, part in enumerate(self.parts))
        )


def _branch(leaves: Mapping[str, T], part: int) -> dict[str, T]:
    before = f"{part}."
    return {name.removeprefix(before): leaf for name, leaf in leaves.items() if name.startswith(before)}
