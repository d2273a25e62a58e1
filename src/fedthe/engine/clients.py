"""What the clients keep between rounds: their own leaves in memory or in a file, and links to the models they received.

Most of a client's state is often the shared model as it came (all of it for FedAvg). Such a leaf is kept once for each
round, whoever holds it. Own leaves stay in memory, on their device, while those of all clients fit a budget;
otherwise they live in a file, of which only the records in use are looked at.

The file is a row of slots of one size. A write never goes to a slot that a state since the last `forget_others` refers
to, so a process may be killed at any moment: the file still holds whatever the last checkpoint refers to.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import operator
import os
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from .. import store, tree
from ..errors import Damaged, InputError
from ..text import quote
from ..tree import Tree

RECEIVED = 32  # received models kept in memory; every checkpoint holds them too. Older ones go to the file.
BLOCK = 4096  # slots begin at multiples of it: a write cut short by a power failure cannot touch a neighbour
HEADER = 16  # bytes before a slot's data: the round and the client, as int64

Kind = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape, without an axis of clients


@dataclass(frozen=True, eq=False)
class Clients:
    """Every client's state. `put` gives a new one; this one stays valid until `forget_others` of a newer one.

    The tensors of `take` are fresh. Those of a single state may be the stored ones: nobody may write to them.
    """

    count: int
    first: dict[str, Tensor]  # what a client holds that was never put
    budget: int
    file: _Slots  # the same for all that come from one `start`
    rounds: np.ndarray  # [count] the round of a client's last put, or -1
    places: np.ndarray  # [count] the slot of a client's own leaves, or -1
    rows: dict[str, Tensor]  # or the own leaves in memory, [count, ...]
    received: dict[int, dict[str, Tensor]]  # round -> those leaves of its shared model that are linked
    spilled: dict[int, tuple[int, ...]]  # round -> the slots that hold the same
    layout: _Layout | None = None  # known from the first put on

    @staticmethod
    def start(first: Tree, count: int, file: Path | None = None, budget: int = 2**30) -> Clients:
        """`count` clients, all of them with the state `first`; `file` is made, or made anew, when it is needed."""
        if count < 1 or budget < 0:
            raise InputError(f"count must be at least 1 and budget not negative, but they are {count} and {budget}.")
        flat = {name: _own_storage(leaf) for name, leaf in tree.flatten(first).items()}
        nothing = np.full(count, -1, np.int64)
        return Clients(count, flat, budget, _Slots(file), nothing, nothing, {}, {}, {})

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tree]:
        return (self[k] for k in range(self.count))

    def __getitem__(self, k: int) -> Tree:
        k = operator.index(k)
        if not 0 <= k < self.count:
            raise IndexError(f"there is no client {k} among {self.count}")
        if self.layout is None or self.rounds[k] < 0:
            return tree.unflatten(self.first)
        if self.layout.on_file:
            own = _unpack(self.layout.own, self._read_own([k]), 1)
            flat = {name: leaf[0] for name, leaf in own.items()}
        else:
            flat = {name: leaf[k] for name, leaf in self.rows.items()}
        if self.layout.links:
            received, device = self._get_received(int(self.rounds[k])), self._device
            flat |= {name: received[source].to(device) for name, source in self.layout.links.items()}
        return tree.unflatten({name: flat[name] for name in self.layout.names})

    def take(self, ids: Sequence[int]) -> Tree:
        """The states of `ids`, stacked [len(ids), ...]; in fresh tensors, on the CPU where own leaves are on file."""
        index = self._check_ids(ids)
        rounds = self.rounds[index]
        if self.layout is None or (len(index) and rounds.max() < 0):
            return tree.unflatten({name: _repeat(leaf, len(index)) for name, leaf in self.first.items()})
        if self.layout.on_file:
            flat = _unpack(self.layout.own, self._read_own(index.tolist()), len(index))
        else:
            flat = {name: _pick(leaf, index) for name, leaf in self.rows.items()}
        flat |= self._take_links(self.layout, rounds)
        if (rounds < 0).any():
            self._check_first(self.layout)
            _fill(flat, np.flatnonzero(rounds < 0), self.first)
        return tree.unflatten({name: flat[name] for name in self.layout.names})

    def put(
        self, ids: Sequence[int], own: Mapping[str, Tensor], links: Mapping[str, str], shared: Tree, round: int
    ) -> Clients:
        """Clients `ids` now hold the leaves `own`, stacked [len(ids), ...], and for each (name, source) of `links` the
        leaf `source` of `shared`, which is that of `round`. Names are dotted, and the same in every put; a leaf that
        is now the one and now the other is kept as own."""
        index = self._check_ids(ids)
        if len(set(index.tolist())) < len(index) or round < 0:
            raise InputError(f"a put needs distinct clients and a round from 0, not {quote(list(ids))} and {round}.")
        if not len(index):
            return self
        if self.layout is not None and links.keys() != self.layout.links.keys():
            kept = [name for name in self.layout.links if name in own]
            if kept:
                return self._keep_as_own(kept).put(ids, own, links, shared, round)
            sent, before = tree.flatten(shared), _kinds(self.layout.own)
            more = {name: sent[source] for name, source in links.items() if name in before and source in sent}
            own = {**own, **{name: leaf.expand(len(index), *leaf.shape) for name, leaf in more.items()}}
            links = {name: source for name, source in links.items() if name not in more}
        linked = _find_linked(shared, links)
        layout = self._settle_layout(len(index), own, links, linked)
        rounds, places, rows = self.rounds.copy(), self.places, self.rows
        rounds[index] = round
        received, spilled = self._receive(layout, linked, round, rounds)
        if layout.on_file:
            places = places.copy()
            places[index] = self._write_own(layout, index, own, round)
        else:
            rows = {leaf.name: self._renew_rows(leaf, index, own[leaf.name]) for leaf in layout.own}
        return replace(self, rounds=rounds, places=places, rows=rows, received=received, spilled=spilled, layout=layout)

    def _keep_as_own(self, names: Sequence[str]) -> Clients:
        """The same states, with some of the links kept as the clients' own."""
        assert self.layout is not None
        if self.layout.on_file:  # whose slots have the size of what is own now
            raise InputError(
                f"{names[0]} is sometimes what a client received and sometimes its own, and the states are on file; "
                "let `personalize` clone it."
            )
        nothing = np.full(self.count, -1, np.int64)
        fresh = replace(self, rounds=nothing, places=nothing, rows={}, received={}, spilled={}, layout=None)
        links = {name: source for name, source in self.layout.links.items() if name not in names}
        for number in np.unique(self.rounds[self.rounds >= 0]).tolist():
            ids, shared = np.flatnonzero(self.rounds == number), tree.unflatten(self._get_received(number))
            for some in np.split(ids, range(100, len(ids), 100)):  # not all states of many clients in memory at a time
                states = tree.flatten(self.take(some.tolist()))
                own = {name: leaf for name, leaf in states.items() if name not in links}
                fresh = fresh.put(some.tolist(), own, links, shared, number)
        return fresh

    def forget_others(self) -> None:
        """What only other Clients objects refer to may be overwritten from now on."""
        self.file.keep(self._used_slots())

    def sync(self) -> None:
        """Wait until what was put is on the disk; to be done before a checkpoint that refers to it is written."""
        self.file.sync()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """For a checkpoint: tensors, and facts that JSON can say. Own leaves on file are referred to by their slots.

        The tensors may be views that share storage, which safetensors refuses: clone them first.
        """
        touched = np.flatnonzero(self.rounds >= 0)
        if len(self._used_slots()) and self.file.path is None:
            raise InputError(
                "the clients' states are in a nameless temporary file, so no checkpoint can be made of them."
            )
        first = self.first if len(touched) < self.count else {}
        tensors = {f"first.{name}": leaf for name, leaf in first.items()}
        tensors |= {"rounds": torch.from_numpy(self.rounds), "places": torch.from_numpy(self.places)}
        tensors |= {f"own.{name}": _pick(leaf, touched) for name, leaf in self.rows.items()}
        for number, leaves in self.received.items():
            tensors |= {f"received.{number}.{name}": leaf for name, leaf in leaves.items()}
        tensors |= {f"spilled.{number}": torch.tensor(slots) for number, slots in self.spilled.items()}
        hashes = [np.frombuffer(self.file.hashes[slot], np.uint8) for slot in self._used_slots().tolist()]
        tensors["hashes"] = torch.from_numpy(np.array(hashes, np.uint8).reshape(-1, 32))
        facts = {
            "budget": self.budget,
            "first": list(first),
            "received": list(self.received),
            "spilled": list(self.spilled),
            "layout": self.layout.describe() if self.layout else None,
        }
        return tensors, facts

    @staticmethod
    def restore(tensors: Mapping[str, Tensor], facts: Mapping[str, Any], file: Path | None) -> Clients:
        """What `state` told of; on the device of `tensors`. `file` is the one that was synced before."""
        first = {name: tensors[f"first.{name}"] for name in facts["first"]}
        rounds, places = (tensors[name].cpu().numpy() for name in ("rounds", "places"))
        clients = Clients(len(rounds), first, facts["budget"], _Slots(file), rounds, places, {}, {}, {})
        if facts["layout"] is None:
            return clients
        layout, touched = _Layout.read(facts["layout"]), np.flatnonzero(rounds >= 0)
        kept = {leaf.name: tensors[f"own.{leaf.name}"] for leaf in layout.own if not layout.on_file}
        rows = {name: _spread(leaf, touched, len(rounds)) for name, leaf in kept.items()}
        sources = [leaf.name for leaf in layout.received]
        received = {n: {name: tensors[f"received.{n}.{name}"] for name in sources} for n in facts["received"]}
        spilled = {n: tuple(tensors[f"spilled.{n}"].tolist()) for n in facts["spilled"]}
        clients = replace(clients, rows=rows, received=received, spilled=spilled, layout=layout)
        used = clients._used_slots()
        if len(used):
            clients.file.reopen(layout.slot, used, tensors["hashes"].cpu().numpy())
        return clients

    @property
    def _device(self) -> torch.device:
        """Where links come out: with the own leaves, or where the latest received model is."""
        assert self.layout is not None
        if self.layout.on_file:
            return torch.device("cpu")
        latest = self.received[max(self.received)] if self.received else {}
        for leaf in (*self.rows.values(), *latest.values(), *self.first.values()):
            return leaf.device
        return torch.device("cpu")

    def _check_ids(self, ids: Sequence[int]) -> np.ndarray:
        index = np.array([operator.index(k) for k in ids], np.int64)
        if len(index) and not (index.min() >= 0 and index.max() < self.count):
            raise InputError(f"clients are numbered from 0 to {self.count - 1}, but {quote(list(ids))} were asked for.")
        return index

    def _check_first(self, layout: _Layout) -> None:
        kinds = {name: (leaf.dtype, tuple(leaf.shape)) for name, leaf in self.first.items()}
        if kinds != layout.kinds:
            where = _difference(layout.kinds, kinds)
            raise InputError(f"`init` must give clients the leaves that `personalize` gives them, but {where}.")

    def _settle_layout(
        self, rows: int, own: Mapping[str, Tensor], links: Mapping[str, str], linked: Mapping[str, Tensor]
    ) -> _Layout:
        """The layout of this put, which must be that of the ones before."""
        for name, leaf in own.items():
            if leaf.ndim < 1 or len(leaf) != rows:
                raise InputError(f"{name} must have one row for each of {rows} clients, not {list(leaf.shape)}.")
            if name in links:
                raise InputError(f"{name} is both a client's own and a link; name it once.")
        kinds = {name: (leaf.dtype, tuple(leaf.shape[1:])) for name, leaf in own.items()}
        size = self.count * sum(_count_bytes(kind) for kind in kinds.values())
        names = {name: None for name in self.first if name in kinds or name in links} | dict.fromkeys([*own, *links])
        received = {name: (leaf.dtype, tuple(leaf.shape)) for name, leaf in linked.items()}
        new = _Layout(tuple(names), _place(kinds), dict(links), _place(received), size > self.budget)
        tree.unflatten(dict.fromkeys(new.names, torch.empty(0)))  # refuses names that cannot be one tree
        if self.layout is None:
            return new
        for what, now, before in (
            ("own leaves", kinds, _kinds(self.layout.own)),
            ("links", new.links, self.layout.links),
            ("received leaves", received, _kinds(self.layout.received)),
        ):
            if now != before:
                raise InputError(f"all clients must keep the same {what}, but {_difference(now, before)}.")
        return self.layout

    # Own leaves.

    def _renew_rows(self, leaf: _Leaf, index: np.ndarray, new: Tensor) -> Tensor:
        """All clients' rows of one leaf, on the device of the new ones."""
        return _spread(new, index, self.count, self.rows.get(leaf.name))

    def _write_own(self, layout: _Layout, index: np.ndarray, own: Mapping[str, Tensor], round: int) -> list[int]:
        self.file.open(layout.slot)
        slots = self.file.allocate(len(index))
        host = {name: leaf.detach().cpu() for name, leaf in own.items()}
        for i, (k, slot) in enumerate(zip(index.tolist(), slots, strict=True)):
            data = _pack(layout.own, {name: leaf[i] for name, leaf in host.items()}, layout.slot - HEADER)
            self.file.write(slot, round, k, data)
        return slots

    def _read_own(self, ids: Iterable[int]) -> Iterator[np.ndarray | None]:
        """The clients' records, one after another; None for a client that has none yet."""
        for k in ids:
            slot = int(self.places[k])
            yield self.file.read(slot, int(self.rounds[k]), k) if slot >= 0 else None

    # Received models.

    def _take_links(self, layout: _Layout, rounds: np.ndarray) -> dict[str, Tensor]:
        kinds, device = layout.kinds, self._device
        flat = {name: _make_stack(len(rounds), kinds[name], device) for name in layout.links}
        for number in np.unique(rounds[rounds >= 0]).tolist() if layout.links else []:
            received = self._get_received(number)  # one at a time: each may come from the file
            leaves = {name: received[source] for name, source in layout.links.items()}
            _fill(flat, np.flatnonzero(rounds == number), leaves)
        return flat

    def _get_received(self, number: int) -> dict[str, Tensor]:
        if number in self.received:
            return self.received[number]
        assert self.layout is not None
        parts = [self.file.read(slot, number, -1 - i) for i, slot in enumerate(self.spilled[number])]
        flat = _unpack(self.layout.received, [np.concatenate(parts)], 1)
        return {name: leaf[0] for name, leaf in flat.items()}

    def _receive(
        self, layout: _Layout, linked: dict[str, Tensor], number: int, rounds: np.ndarray
    ) -> tuple[dict[int, dict[str, Tensor]], dict[int, tuple[int, ...]]]:
        """The received models that clients with these `rounds` still hold: the latest in memory, others on file."""
        if not linked:
            return {}, {}
        needed = set(rounds.tolist())
        received = {n: leaves for n, leaves in self.received.items() if n in needed}
        spilled = {n: slots for n, slots in self.spilled.items() if n in needed}
        if number not in received and number not in spilled:
            received[number] = {name: leaf.cpu() if layout.on_file else leaf for name, leaf in linked.items()}
        else:
            before = self._get_received(number)
            if not all(leaf is before[name] or _equal(leaf, before[name]) for name, leaf in linked.items()):
                raise InputError(f"round {number} was put before with another shared model; each round has one.")
        size = sum(leaf.nbytes for leaf in layout.received)
        most = min(RECEIVED, self.budget // size) if size else RECEIVED
        for old in sorted(received)[: max(0, len(received) - most)]:
            spilled[old] = self._write_received(layout, received.pop(old), old)
        return received, spilled

    def _write_received(self, layout: _Layout, leaves: dict[str, Tensor], number: int) -> tuple[int, ...]:
        """A model has another size than a client's record; it takes as many slots as it needs."""
        room = layout.slot - HEADER
        need = max(1, math.ceil(layout.received[-1].end / room))
        data = _pack(layout.received, leaves, need * room)
        self.file.open(layout.slot)
        slots = self.file.allocate(need)
        for i, slot in enumerate(slots):
            self.file.write(slot, number, -1 - i, data[i * room : (i + 1) * room])
        return tuple(slots)

    def _used_slots(self) -> np.ndarray:
        spilled = [slot for slots in self.spilled.values() for slot in slots]
        return np.concatenate([self.places[self.places >= 0], np.array(spilled, np.int64)])


def split(mine: Tree, shared: Tree) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The own leaves of a state made from `shared`, and its links: leaves that are tensors of `shared`, under any name.

    A tensor counts as that of `shared` only if it is the same object: what is merely equal may differ next time.
    """
    received = tree.flatten(shared)
    names = {id(leaf): name for name, leaf in reversed(received.items())}  # of several names the first
    own: dict[str, Tensor] = {}
    links: dict[str, str] = {}
    for name, leaf in tree.flatten(mine).items():
        if received.get(name) is leaf:
            links[name] = name
        elif id(leaf) in names:
            links[name] = names[id(leaf)]
        else:
            own[name] = leaf
    return own, links


class _Slots:
    """A file of slots of one size. Slots are handed out once between two calls of `keep`, whoever asks."""

    # Reading maps one slot and lets go of it at once: pages that stay mapped count as the process's memory. Writing
    # does not go through a map, where a full disk is a SIGBUS, which ends the process; a write raises OSError. Slots
    # are written whole, so the file grows by itself and ends with its last slot.

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.size = 0
        self.end = 0  # slots from here on were never handed out
        self.free: list[int] = []  # the lowest last
        self.hashes: dict[int, bytes] = {}  # SHA-256 of what was written last; a checkpoint holds those it refers to
        self.opened: IO[bytes] | None = None

    def open(self, size: int) -> None:
        """A new file for slots of `size` bytes, unless it is open already."""
        if self.opened is None:
            self._hold(self._make(), size)
        elif size != self.size:
            raise InputError("all clients must keep the same leaves, but others were put into their file before.")

    def reopen(self, size: int, used: np.ndarray, hashes: np.ndarray) -> None:
        """The file as an earlier process left it, of which the slots `used` count, with their hashes [used, 32]."""
        self.hashes = {slot: data.tobytes() for slot, data in zip(used.tolist(), hashes, strict=True)}
        if self.path is None:
            raise InputError("the clients' states were in a file that is not named; name it to go on.")
        try:
            file = self.path.open("r+b", buffering=0)
        except FileNotFoundError:
            raise InputError(f"{self.path} is missing; delete the checkpoint to train again.") from None
        except OSError as error:
            raise InputError(f"cannot open {self.path} ({error.strerror}); make it readable and writable.") from None
        self._hold(file, size)
        self.end = file.seek(0, os.SEEK_END) // size
        if self.end <= used.max():
            raise InputError(f"{self.path} is shorter than it was; delete the checkpoint to train again.")
        self.keep(used)

    def keep(self, used: np.ndarray) -> None:
        self.free = np.setdiff1d(np.arange(self.end), used)[::-1].tolist()

    def allocate(self, count: int) -> list[int]:
        slots = [self.free.pop() for _ in range(min(count, len(self.free)))]
        new = range(self.end, self.end + count - len(slots))
        self.end = new.stop
        return [*slots, *new]

    def write(self, slot: int, round: int, client: int, data: np.ndarray) -> None:
        assert self.opened is not None
        self.opened.seek(slot * self.size)
        self.hashes[slot] = hashlib.sha256(data.data).digest()
        for part in (np.array([round, client], np.int64).view(np.uint8), data):
            left = part.data
            try:
                while left:  # a disk that fills up may first take a part
                    left = left[self.opened.write(left) :]
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path or "a temporary file")) from None

    def read(self, slot: int, round: int, client: int) -> np.ndarray:
        """The data of a slot, mapped: copy it and let go."""
        if self.opened is None or (slot + 1) * self.size > self.opened.seek(0, os.SEEK_END):
            raise InputError(f"{self.path} is shorter than it was; delete the checkpoint to train again.")
        record = np.memmap(self.opened, np.uint8, "r", slot * self.size, (self.size,))
        whose = record[:HEADER].view(np.int64).tolist()
        if whose != [round, client]:
            what = f"client {client}" if client >= 0 else "the model"
            raise InputError(
                f"{self.path or 'the temporary file'} no longer holds {what} of round {round}, for something newer was "
                f"written there; delete the checkpoint to train again."
            )
        data: np.ndarray = record[HEADER:]
        if hashlib.sha256(data.data).digest() != self.hashes.get(slot):
            raise Damaged(f"{self.path or 'the temporary file'} is damaged; delete the checkpoint to train again.")
        return data

    def sync(self) -> None:
        if self.opened is not None and self.path is not None:
            os.fsync(self.opened.fileno())

    def _make(self) -> IO[bytes]:
        if self.path is None:
            return tempfile.TemporaryFile(buffering=0)
        store.make_folder(self.path.parent)
        try:
            return self.path.open("w+b", buffering=0)
        except OSError as error:
            raise InputError(f"cannot write {self.path} ({error.strerror}); name another place.") from None

    def _hold(self, file: IO[bytes], size: int) -> None:
        self.opened, self.size = file, size
        weakref.finalize(self, file.close)


@dataclass(frozen=True)
class _Leaf:
    """Where a leaf lies in a record."""

    name: str
    kind: Kind
    start: int

    @property
    def nbytes(self) -> int:
        return _count_bytes(self.kind)

    @property
    def end(self) -> int:
        return self.start + self.nbytes


@dataclass(frozen=True)
class _Layout:
    """What every client keeps."""

    names: tuple[str, ...]  # in the order in which they come out
    own: tuple[_Leaf, ...]
    links: dict[str, str]  # name -> its source, a leaf of `received`
    received: tuple[_Leaf, ...]
    on_file: bool  # where own leaves are

    @property
    def kinds(self) -> dict[str, Kind]:
        received = _kinds(self.received)
        return _kinds(self.own) | {name: received[source] for name, source in self.links.items()}

    @property
    def slot(self) -> int:
        record = self.own if self.on_file else self.received
        return math.ceil((HEADER + max((leaf.end for leaf in record), default=0)) / BLOCK) * BLOCK

    def describe(self) -> dict[str, Any]:
        def plain(leaves: tuple[_Leaf, ...]) -> list[Any]:
            return [[leaf.name, str(leaf.kind[0]).removeprefix("torch."), list(leaf.kind[1])] for leaf in leaves]

        own, received = plain(self.own), plain(self.received)
        return {"names": list(self.names), "own": own, "links": self.links, "received": received, "file": self.on_file}

    @staticmethod
    def read(facts: Mapping[str, Any]) -> _Layout:
        def place(leaves: list[Any]) -> tuple[_Leaf, ...]:
            return _place({name: (getattr(torch, dtype), tuple(shape)) for name, dtype, shape in leaves})

        own, received = place(facts["own"]), place(facts["received"])
        return _Layout(tuple(facts["names"]), own, dict(facts["links"]), received, facts["file"])


def _place(kinds: Mapping[str, Kind]) -> tuple[_Leaf, ...]:
    """Leaves one after another, each at a multiple of 16 bytes, so that its bytes can be seen as any dtype."""
    leaves: list[_Leaf] = []
    for name, kind in kinds.items():
        start = math.ceil(leaves[-1].end / 16) * 16 if leaves else 0
        leaves.append(_Leaf(name, kind, start))
    return tuple(leaves)


def _kinds(leaves: tuple[_Leaf, ...]) -> dict[str, Kind]:
    return {leaf.name: leaf.kind for leaf in leaves}


def _count_bytes(kind: Kind) -> int:
    dtype, shape = kind
    return math.prod(shape) * dtype.itemsize


def _difference(now: Mapping[str, object], before: Mapping[str, object]) -> str:
    """Where two descriptions differ, by the first name in question."""
    name = next(name for name in [*now, *before] if now.get(name) != before.get(name))
    return f"{name} is {now.get(name, 'not there')} here and {before.get(name, 'not there')} before"


def _pack(leaves: Iterable[_Leaf], tensors: Mapping[str, Tensor], size: int) -> np.ndarray:
    """The leaves as `size` bytes."""
    data = np.zeros(size, np.uint8)
    for leaf in leaves:
        data[leaf.start : leaf.end] = _bytes(tensors[leaf.name]).cpu().numpy()
    return data


def _unpack(leaves: tuple[_Leaf, ...], records: Iterable[np.ndarray | None], count: int) -> dict[str, Tensor]:
    """The leaves of `count` records, stacked in fresh tensors; the row of a None is left as it is."""
    # through bytes, for numpy does not know every dtype of torch
    stacks = {leaf.name: _make_stack(count, leaf.kind, torch.device("cpu")) for leaf in leaves}
    views = {leaf.name: _bytes(stacks[leaf.name]).numpy().reshape(count, leaf.nbytes) for leaf in leaves}
    for i, record in enumerate(records):
        if record is not None:
            for leaf in leaves:
                views[leaf.name][i] = record[leaf.start : leaf.end]
        del record  # before the next is mapped
    return stacks


def _make_stack(count: int, kind: Kind, device: torch.device) -> Tensor:
    dtype, shape = kind
    if device.type != "cpu":
        return torch.empty((count, *shape), dtype=dtype, device=device)
    return _make_room(count * _count_bytes(kind)).view(dtype).view(count, *shape)


def _make_room(nbytes: int) -> Tensor:
    """Bytes on the CPU; many of them lie outside the heap.

    Blocks of some MB that come and go with every round leave holes on the heap of glibc, which small things that stay
    make useless: without this the heap grew by 300 MB in 200 rounds.
    """
    if nbytes < 2**20 or sys.platform == "win32":
        return torch.empty(nbytes, dtype=torch.uint8)
    room = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(room, dtype=torch.uint8)  # unmapped with the last tensor on it


def _find_linked(shared: Tree, links: Mapping[str, str]) -> dict[str, Tensor]:
    """The leaves of `shared` that are linked, in its order."""
    leaves = tree.flatten(shared)
    wanted = set(links.values())
    if missing := sorted(wanted - leaves.keys()):
        raise InputError(f"a link leads to {missing[0]}, which the shared model does not have.")
    return {name: _own_storage(leaf) for name, leaf in leaves.items() if name in wanted}


def _own_storage(leaf: Tensor) -> Tensor:
    """The leaf itself, or a copy if it is a part of something larger, which it would keep in memory."""
    leaf = leaf.detach() if leaf.requires_grad else leaf
    return leaf.clone() if leaf.untyped_storage().nbytes() > leaf.nbytes else leaf


def _bytes(leaf: Tensor) -> Tensor:
    """The bytes of a tensor in a row; a view, if it is contiguous."""
    return leaf.detach().contiguous().reshape(-1).view(torch.uint8)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Bit by bit: a NaN equals itself."""
    return torch.equal(_bytes(a), _bytes(b.to(a.device)))


def _repeat(leaf: Tensor, count: int) -> Tensor:
    return _make_stack(count, (leaf.dtype, tuple(leaf.shape)), leaf.device).copy_(leaf)


def _pick(leaf: Tensor, index: np.ndarray) -> Tensor:
    """The rows of a stack that `index` names."""
    rows = _make_stack(len(index), (leaf.dtype, tuple(leaf.shape[1:])), leaf.device)
    return torch.index_select(leaf, 0, torch.from_numpy(index).to(leaf.device), out=rows)


def _spread(new: Tensor, index: np.ndarray, count: int, before: Tensor | None = None) -> Tensor:
    """A stack of `count` that has the `new` rows at `index`, and else is as `before`."""
    stack = _make_stack(count, (new.dtype, tuple(new.shape[1:])), new.device)
    stack = stack.zero_() if before is None else stack.copy_(before)
    return stack.index_copy_(0, torch.from_numpy(index).to(new.device), new.detach())


def _fill(flat: Mapping[str, Tensor], rows: np.ndarray, leaves: Mapping[str, Tensor]) -> None:
    """Write each leaf into the given rows of the stack of its name."""
    for name, leaf in leaves.items():
        if len(rows) == len(flat[name]):
            flat[name].copy_(leaf)
        else:
            flat[name][torch.from_numpy(rows).to(flat[name].device)] = leaf.to(flat[name].device)
