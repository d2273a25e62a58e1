"""A client of a federation: its data and its personal state, which stay with it, and its part of a round."""

from __future__ import annotations

import hashlib
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ... import foreign, records, store, tree
from ...data import load_dataset
from ...data.partition import MIN_ROWS, split_rows
from ...data.plan import Federation, build
from ...engine.client import Received, deploy, summarize, work
from ...engine.clients import Clients
from ...engine.conclude import deploy_beside
from ...engine.evaluate import answer_stream
from ...engine.loop import make_fits
from ...engine.server import Diverged, Server
from ...engine.shards import Shards
from ...engine.train import find_faults
from ...engine.visit import Progress
from ...errors import Damaged, InputError, code_of_a_method
from ...foreign import show_path
from ...store import content_hash
from ...text import flatten
from ...tree import Tree
from ...types import Shard
from ..bundle import Bundle, read_bundle, strip, write_bundle
from ..card import write_card
from ..export import finish_bundle
from ..join import read_rows
from .status import IDS
from .terms import Terms

KEPT = 2  # states besides the newest: the one that it began with, and the one before, for a server that goes back


class Model(NamedTuple):
    """What the server sends: the shared model, and averages beside it, after some rounds."""

    round: int
    shared: Tree
    averages: Tree
    state: int = 0  # the last round that the client was part of, whose state counts; 0: none yet
    origin: str = "0"  # drawn by the server when it began; states of other beginnings are kept, and do not count


class Contribution(NamedTuple):
    """What a client sends for a round."""

    upload: Tree
    averages: Tree
    rows: int
    loss: float


class Holding(NamedTuple):
    """A client's data."""

    shard: Shard
    test_x: np.ndarray  # of its own test split
    test_labels: np.ndarray


@dataclass(frozen=True)
class Member:
    terms: Terms
    number: int  # from 0 on; draws are keyed by it
    folder: Path  # of its personal state
    holding: Holding
    device: torch.device = torch.device("cpu")
    anew: bool = False  # begin again where the state is missing

    @property
    def shard(self) -> Shard:
        return self.holding.shard

    @property
    def rows(self) -> int:
        return int(self.shard.real.sum())

    def train(self, model: Model) -> Contribution:
        """A round's work. What the client keeps is on its disk before anything is sent."""
        terms, first = self.terms, self._start()
        training = terms.method.training
        fits = make_fits(training.net, terms.settings, terms.seed, model.round, self.number, terms.clients, self.shard)
        received = Received(model.averages, self._load(model, first))
        with code_of_a_method():
            done = work([training], fits, model.shared, [received], self.shard)
        (kept,), (averages,) = done.kept, done.averages
        fault = tree.find_fault(tree.flatten(first), tree.flatten(kept))
        leaves = {"upload": done.upload, "state": kept, "averages": averages}
        named = [(f"the {part}'s {name}", leaf[None]) for part in leaves for name, leaf in _flatten(leaves[part])]
        (found,) = find_faults(named, done.loss.detach().reshape(1))
        if fault or found:
            raise Diverged(model.round, self.number, f"the state's {fault}" if fault else str(found))
        self._save(model, kept)
        return Contribution(done.upload, averages, self.rows, float(done.loss))

    def summarize(self, model: Model) -> Tree:
        """What a client sends once, after the last round."""
        with code_of_a_method():
            return summarize(self.terms.method, model.shared | model.averages, self.shard)

    def deploy(self, model: Model, beside: Tree) -> Tree:
        """The client's own model of what the server has."""
        terms, method = self.terms, self.terms.method
        fits = make_fits(method.net, terms.settings, terms.seed, model.round, self.number, terms.clients, self.shard)
        received = Received(model.averages, self._load(model, self._start()))
        with code_of_a_method():
            made, loss = deploy(method, fits.personal, model.shared, received, self.shard)
        (fault,) = find_faults([(f"the state's {n}", leaf[None]) for n, leaf in _flatten(made)], loss.reshape(1))
        if fault:
            raise Diverged(model.round, self.number, fault)
        states = tree.map_leaves(lambda leaf: leaf[None], model.shared | made)
        return tree.take(deploy_beside(method, states, beside), 0)

    def rate(self, mine: Tree) -> tuple[float, int]:
        """The accuracy in percent on the client's own test split, and how many samples that has."""
        x, labels, path = self.holding.test_x, self.holding.test_labels, (self.terms.seed, "original", self.number)
        if not len(x):
            return 0.0, 0
        return 100 * answer_stream(self.terms.method, mine, self.shard, x, labels, path).accuracy, len(x)

    def export(self, model: Model, mine: Tree) -> Path:
        """Write the client's bundle."""
        from ... import __version__

        terms = self.terms
        about = {
            "fedthe": __version__,
            "torch": torch.__version__,
            "dataset": terms.config.dataset,
            "manifest": self._hash_data(),
            "training_id": f"{terms.id}-{model.round}",
            "rounds": model.round,
        }
        begun = Bundle(
            *("client", terms.name, strip(terms.method), terms.classes, terms.takes, terms.seed, self.number, {}, about)
        )
        made = finish_bundle(
            begun, tree.map_leaves(torch.Tensor.cpu, mine), Shard(*(part.cpu() for part in self.shard))
        )
        place = self.folder / "bundle"
        store.sweep(self.folder, place.name)
        _keep_bundle(place, terms.id)
        write_bundle(made, place, write_card(made))
        return place

    def _hash_data(self) -> str:
        """What identifies the rows that it trained with."""
        if self.terms.federation is not None:
            return self.terms.federation.manifest_hash
        return content_hash(*(hashlib.sha256(part.cpu().numpy().tobytes()).hexdigest() for part in self.shard))

    def _start(self) -> Tree:
        """What it keeps before its first round."""
        training = self.terms.method.training
        with code_of_a_method():
            return training.start(training.net.init(self.terms.seed)).mine

    def _load(self, model: Model, first: Tree) -> Tree:
        """What it kept after the round that counts. A state of a round that the server left it out of does not."""
        round = model.state
        path = self._path(model, round)
        if round == 0 or (self.anew and not path.exists()):
            return tree.map_leaves(lambda leaf: leaf.to(self.device), first)
        try:
            found = records.load_progress(path, self.device)
        except Damaged:
            raise InputError(
                f"{show_path(path)}, the client's state after round {round}, is damaged; put back a copy, or delete it "
                "and start the node with anew=true to begin again."
            ) from None
        if found is None:
            raise InputError(
                f"{show_path(path)}, the client's state after round {round}, is missing; put it back, or start the "
                "node with anew=true to begin again."
            )
        if tree.find_fault(tree.flatten(first), tree.flatten(found.server.shared)):
            raise InputError(f"{show_path(path)} does not fit the method; start the node with another `state` folder.")
        return found.server.shared

    def _save(self, model: Model, kept: Tree) -> None:
        round = model.round + 1
        store.sweep(self.folder, self.terms.id)
        records.save_progress(self._path(model, round), Progress(Server(round, kept), {}, Clients.start({}, 1)))
        store.sync_folder(self.folder)
        states = self._list(model)
        for number in states - {round, *sorted(each for each in states if each <= model.state)[-KEPT:]}:
            records.delete_progress(self._path(model, number))

    def _path(self, model: Model, round: int) -> Path:
        return self.folder / f"{self.terms.id}-{model.origin}-{round}.safetensors"

    def _list(self, model: Model) -> set[int]:
        """The rounds after which there is a state."""
        names = re.compile(rf"{self.terms.id}-{model.origin}-(\d{{1,9}})\.safetensors")
        found = self.folder.iterdir() if self.folder.is_dir() else []
        return {int(match[1]) for each in found if (match := names.fullmatch(each.name))}


def _keep_bundle(place: Path, id: str) -> None:
    """Rename the bundle of another federation: this one's takes its place, but it may be in use."""
    try:
        before = str(read_bundle(place).about["training_id"]) if place.exists() else id
    except (InputError, KeyError):  # it cannot be used anyway
        return
    other, _, _ = before.partition("-")
    if other != id and IDS.fullmatch(other):
        kept = place.with_name(f"{place.name}-{other}")
        shutil.rmtree(kept, ignore_errors=True)  # an earlier one of that federation
        place.replace(kept)


def join(
    terms: Terms, number: int, folder: Path, data: Path | None = None, device: str = "cpu", anew: bool = False
) -> Member:
    """data: a folder with a folder per class, an npz file with images and labels, or a federation that was saved."""
    if not 0 <= number < terms.clients:
        raise InputError(f"partition-id={number}, but the clients of the run are 0 to {terms.clients - 1}.")
    if terms.federation is not None and data is not None:
        raise InputError("the run deals its own dataset to clients; leave `data` out, or set dataset=own.")
    where = _find_device(device)
    if terms.federation is not None:
        held = _take_holding(terms.federation, number)
    elif data is not None:
        held = _read_holding(terms, number, data)
    else:
        raise InputError("the run expects clients to bring their data; name a folder or a file as `data`.")
    shard = Shard(*(part.to(where) for part in held.shard))
    return Member(terms, number, folder, held._replace(shard=shard), where, anew)


def _find_device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch has no such device, or this machine
        raise InputError(f"device={name} cannot be used on this node ({flatten(error, 200)}).") from None


def _take_holding(federation: Federation, number: int) -> Holding:
    """What a federation deals to a client."""
    shard, stream = Shards(federation)[number], federation.tests["original"][number]
    if stream is None:
        return Holding(shard, federation.pool.x[:0], federation.pool.labels[:0])
    return Holding(shard, federation.inputs(stream), federation.labels(stream))


def _read_holding(terms: Terms, number: int, data: Path) -> Holding:
    if data.suffix == ".npz" and data.is_file() and "clients" in foreign.read_headers(data):
        dataset = load_dataset(f"npz:{data}")
        if number >= len(dataset.clients):
            raise InputError(f"{show_path(data)} has {len(dataset.clients)} clients, so none with number {number}.")
        if tuple(dataset.pool.classes) != terms.classes or dataset.pool.x.shape[1:] != terms.takes.shape:
            raise InputError(f"{show_path(data)} does not have the classes and the shape of the run.")
        settings = replace(terms.config, partition="given", clients=None, dataset="mine").settings(terms.seed)
        return _take_holding(build(dataset, replace(settings, clients=len(dataset.clients))), number)
    x, labels = read_rows(data, terms.takes, terms.classes)
    if labels is None:
        raise InputError(
            f"{show_path(data)} has no labels; give a folder per class, or an npz file with arrays images and labels."
        )
    if len(x) < MIN_ROWS:
        raise InputError(f"{show_path(data)} has {len(x)} rows; at least {MIN_ROWS} are needed.")
    split = split_rows(np.arange(len(x)), terms.seed, number)
    train, val, test = split.train, split.val, split.test
    rows = (torch.from_numpy(np.ascontiguousarray(part)) for part in (x[train], labels[train], x[val], labels[val]))
    train_x, train_labels, val_x, val_labels = rows
    real, val_real = (torch.ones(len(part), dtype=torch.bool) for part in (train, val))
    counts = torch.bincount(train_labels, minlength=len(terms.classes)).float()
    shard = Shard(train_x, train_labels, real, counts, val_x, val_labels, val_real)
    return Holding(shard, x[test], labels[test])


def _flatten(leaves: Tree) -> list[tuple[str, torch.Tensor]]:
    return list(tree.flatten(leaves).items())
