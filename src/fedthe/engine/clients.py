"""What every client keeps between rounds: in memory, on the device, while that of all clients fits a budget; otherwise
in a file, of which only the records in use are read."""

from __future__ import annotations

import math
import mmap
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import tree
from ..errors import InputError
from ..text import quote
from ..tree import Tree
from .slots import HEADER, Slots

BLOCK = 4096  # slots begin at multiples of it: a write cut short by a power failure cannot touch a neighbour
CHUNK = 2**26  # bytes that are copied at a time


@dataclass(frozen=True, eq=False)
class Clients:
    """Every client's leaves. `put` gives a new object; this one stays valid until `forget_others` of a newer one.

    The tensors of `take` are fresh. Those of a single client may be the stored ones: nobody may write to them.
    """

    count: int
    first: dict[str, Tensor]  # what a client keeps before its first put
    budget: int
    file: Slots  # the same for all that come from one `start`
    rounds: np.ndarray  # [count] the round of a client's last put, or -1
    places: np.ndarray  # [count] the slot of a client's record, or -1
    rows: dict[str, Tensor]  # or the leaves in memory, [count, ...], from the first put on

    @staticmethod
    def start(first: Tree, count: int, file: Path | None = None, budget: int = 2**30) -> Clients:
        """`count` clients that keep `first`. The file is made, or made anew, when it is needed."""
        if count < 1 or budget < 0:
            raise InputError(f"count must be at least 1 and budget not negative, but they are {count} and {budget}.")
        flat = {name: leaf.detach().clone() for name, leaf in tree.flatten(first).items()}
        never = np.full(count, -1, np.int64)
        return Clients(count, flat, budget, Slots(file), never, never, {})

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tree]:
        return (self[k] for k in range(self.count))

    def __getitem__(self, k: int) -> Tree:
        k = operator.index(k)
        if not 0 <= k < self.count:
            raise IndexError(f"there is no client {k} among {self.count}")
        if self.rounds[k] < 0:
            return tree.unflatten(self.first)
        if self._on_file:
            return tree.map_leaves(
                lambda leaf, like: leaf[0].to(like.device), self.take([k]), tree.unflatten(self.first)
            )
        return tree.unflatten({name: leaf[k] for name, leaf in self.rows.items()})

    def take(self, ids: Sequence[int]) -> Tree:
        """The leaves of clients `ids`, stacked [len(ids), ...], in fresh tensors; on the CPU if they are on file."""
        index = self._check_ids(ids)
        if not self._on_file and self.rows:
            return tree.unflatten({name: _pick(leaf, index) for name, leaf in self.rows.items()})
        here = {name: leaf.cpu() if self._on_file else leaf for name, leaf in self.first.items()}
        flat = {name: _make_stack(len(index), leaf).copy_(leaf) for name, leaf in here.items()}
        for i, k in enumerate(index.tolist()):
            if self.places[k] >= 0:
                record = self.file.read(int(self.places[k]), int(self.rounds[k]), k)
                for name, (start, end) in self._layout.items():
                    _bytes(flat[name][i]).copy_(torch.from_numpy(record[start:end].copy()))
                del record  # before the next is mapped
        return tree.unflatten(flat)

    def put(self, ids: Sequence[int], leaves: Mapping[str, Tensor], round: int) -> Clients:
        """Clients `ids` keep these leaves, by dotted name and stacked [len(ids), ...], since `round`."""
        index = self._check_ids(ids)
        if len(set(index.tolist())) < len(index) or round < 0:
            raise InputError(f"a put needs distinct clients and a round from 0, not {quote(list(ids))} and {round}.")
        self._check_leaves(len(index), leaves)
        rounds, places, rows = self.rounds.copy(), self.places, self.rows
        rounds[index] = round
        if self._on_file:
            places = places.copy()
            places[index] = self._write(index, leaves, round)
        else:
            rows = {name: _spread(leaves[name], index, self._all(name)) for name in self.first}
        return replace(self, rounds=rounds, places=places, rows=rows)

    def copy_to(self, file: Path) -> Clients:
        """The same in another file, which holds the slots in use alone."""
        copy = Clients.start(tree.unflatten(self.first), self.count, file, self.budget)
        many = max(1, CHUNK // self._slot)
        for round in np.unique(self.rounds[self.rounds >= 0]).tolist():
            ids = np.flatnonzero(self.rounds == round).tolist()
            for some in (ids[i : i + many] for i in range(0, len(ids), many)):
                copy = copy.put(some, tree.flatten(self.take(some)), round)
        return copy

    @property
    def has_gaps(self) -> bool:
        """Whether the file has slots that are not in use."""
        return self.file.end > int((self.places >= 0).sum())

    def forget_others(self) -> None:
        """What only other Clients objects refer to may be overwritten from now on."""
        self.file.keep(self.places[self.places >= 0])

    def sync(self) -> None:
        """Wait until what was put is on the disk; to be done before a checkpoint that refers to it is written."""
        self.file.sync()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """For a checkpoint: tensors, and facts for JSON. Records on file are referred to by their slots."""
        used = self.places[self.places >= 0]
        if len(used) and self.file.path is None:
            raise InputError(
                "the clients' states are in a nameless temporary file, so no checkpoint can be made of them."
            )
        tensors = {f"first.{name}": leaf for name, leaf in self.first.items()}
        tensors |= {f"own.{name}": _pick(leaf, np.flatnonzero(self.rounds >= 0)) for name, leaf in self.rows.items()}
        tensors |= {"rounds": torch.from_numpy(self.rounds), "places": torch.from_numpy(self.places)}
        hashes = [np.frombuffer(self.file.hashes[slot], np.uint8) for slot in used.tolist()]
        tensors["hashes"] = torch.from_numpy(np.array(hashes, np.uint8).reshape(-1, 32))
        return tensors, {"budget": self.budget, "leaves": list(self.first), "rows": bool(self.rows)}

    @staticmethod
    def restore(tensors: Mapping[str, Tensor], facts: Mapping[str, Any], file: Path | None) -> Clients:
        """What `state` told of; on the device of `tensors`. `file` is the one that was synced before."""
        first = {name: tensors[f"first.{name}"] for name in facts["leaves"]}
        rounds, places = (tensors[name].cpu().numpy() for name in ("rounds", "places"))
        clients = Clients(len(rounds), first, facts["budget"], Slots(file), rounds, places, {})
        used = places[places >= 0]
        if len(used):
            clients.file.reopen(clients._slot, used, tensors["hashes"].cpu().numpy())
        if not facts["rows"]:
            return clients
        touched = np.flatnonzero(rounds >= 0)
        rows = {name: _spread(tensors[f"own.{name}"], touched, clients._all(name)) for name in first}
        return replace(clients, rows=rows)

    @property
    def _on_file(self) -> bool:
        return self.count * sum(leaf.nbytes for leaf in self.first.values()) > self.budget

    @cached_property
    def _layout(self) -> dict[str, tuple[int, int]]:
        """Where each leaf lies in a record; at multiples of 16 bytes, so that its bytes can be seen as any dtype."""
        places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, leaf in self.first.items():
            start = math.ceil(end / 16) * 16
            end = start + leaf.nbytes
            places[name] = start, end
        return places

    @property
    def _slot(self) -> int:
        """The bytes of a slot."""
        return math.ceil((HEADER + max((end for _, end in self._layout.values()), default=0)) / BLOCK) * BLOCK

    def _write(self, index: np.ndarray, leaves: Mapping[str, Tensor], round: int) -> list[int]:
        self.file.open(self._slot)
        slots = self.file.allocate(len(index))
        host = {name: leaf.detach().cpu() for name, leaf in leaves.items()}
        for i, (k, slot) in enumerate(zip(index.tolist(), slots, strict=True)):
            data = np.zeros(self._slot - HEADER, np.uint8)
            for name, (start, end) in self._layout.items():
                data[start:end] = _bytes(host[name][i].contiguous()).numpy()
            self.file.write(slot, round, k, data)
        return slots

    def _all(self, name: str) -> Tensor:
        """A leaf of all clients [count, ...]; a view, where nothing was put yet."""
        first = self.first[name]
        return self.rows[name] if self.rows else first.expand(self.count, *first.shape)

    def _check_ids(self, ids: Sequence[int]) -> np.ndarray:
        index = np.array([operator.index(k) for k in ids], np.int64)
        if len(index) and not (index.min() >= 0 and index.max() < self.count):
            raise InputError(f"clients are numbered from 0 to {self.count - 1}, but {quote(list(ids))} were asked for.")
        return index

    def _check_leaves(self, rows: int, leaves: Mapping[str, Tensor]) -> None:
        if leaves.keys() != self.first.keys():
            name = min(leaves.keys() ^ self.first.keys())
            raise InputError(f"clients keep {', '.join(self.first) or 'nothing'}, but {name} is not in both.")
        for name, leaf in leaves.items():
            wanted = (rows, *self.first[name].shape)
            if tuple(leaf.shape) != wanted or leaf.dtype != self.first[name].dtype:
                raise InputError(
                    f"{name} must be {self.first[name].dtype} {list(wanted)}, but is {leaf.dtype} {list(leaf.shape)}."
                )


def _bytes(leaf: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, as a view."""
    return leaf.reshape(-1).view(torch.uint8)


def _pick(leaf: Tensor, index: np.ndarray) -> Tensor:
    """The rows of a stack that `index` names."""
    return torch.index_select(leaf, 0, torch.from_numpy(index).to(leaf.device), out=_make_stack(len(index), leaf[0]))


def _spread(new: Tensor, index: np.ndarray, before: Tensor) -> Tensor:
    """A copy of a stack with the `new` rows at `index`."""
    stack = _make_stack(len(before), before[0]).copy_(before)
    return stack.index_copy_(0, torch.from_numpy(index).to(stack.device), new.detach().to(stack.device))


def _make_stack(count: int, like: Tensor) -> Tensor:
    """Room for `count` tensors; on the CPU, much of it lies outside the heap.

    Blocks of some MB that come and go with every round leave holes on the heap of glibc, which small things that stay
    make useless: without this the heap grew by 300 MB in 200 rounds.
    """
    nbytes = count * like.nbytes
    if like.device.type != "cpu" or nbytes < 2**20 or sys.platform == "win32":
        return torch.empty((count, *like.shape), dtype=like.dtype, device=like.device)
    room = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(room, dtype=torch.uint8).view(like.dtype).view(count, *like.shape)  # unmapped with its last
