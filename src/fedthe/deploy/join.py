"""A client that never took part in training makes the shared model its own, with labels or without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import foreign, rng, tree
from ..data import npz
from ..data.folder import fit_images, list_classes, list_images, list_visible, read_folders
from ..engine.client import Received, deploy, join_unlabeled
from ..engine.fit import LoopFit, Optimizer
from ..engine.server import find_infinite
from ..engine.shards import hide_labels
from ..errors import InputError
from ..foreign import show_path
from ..methods.base import FedAvg
from ..methods.em import prior_by_em
from ..methods.label_shift import global_logits
from ..text import clean, find_nearest
from ..tree import Tree
from ..types import Shard, scale
from .bundle import Bundle, Input, read_bundle, refusing, write_bundle
from .card import write_card
from .export import check_target, finish_bundle

EPOCHS = 20  # of a personal part that starts from nothing; a client that takes part trains it in every round
VALIDATION = 0.2  # the share of rows that are set aside
CHUNK = 500


def personalize(
    bundle: Path | str,
    data: Any,
    to: Path | str,
    *,
    epochs: int = EPOCHS,
    client: int | None = None,
    verify: Path | str | None = None,
    sign: Path | str | None = None,
    net: Any = None,
) -> Path:
    """Make the bundle of a new client from that of the federation, and return its folder.

    Args:
        bundle: a folder that `fedthe export --global` wrote.
        data: the client's own rows. A folder with a folder per class, an npz file with images and labels, or (x, y);
            without labels, a folder of pictures, an npz file without labels, or x.
        to: the folder of the client's bundle. A bundle that is there is replaced.
        epochs: of training the personal part.
        client: the number that draws are keyed by. None: one more than there were.
        verify, sign: files of keys, as in `load_bundle` and `export`.
        net: the network, if it is a wrapped module of your own.
    """
    place = Path(to)
    check_target(place, sign)
    if epochs < 1:
        raise InputError(f"epochs must be at least 1, not {epochs}.")
    shared = read_bundle(bundle, verify=verify, net=net)
    if shared.kind != "global":
        raise InputError(f"{show_path(bundle)} is of one client; `fedthe export --global` writes one for new clients.")
    x, labels = read_rows(data, shared.input, shared.classes)
    shard = make_shard(x, labels, len(shared.classes), shared.seed)
    made = join(shared, shard, labels is not None, epochs, client)
    write_bundle(made, place, write_card(made), sign)
    return place


def join(shared: Bundle, shard: Shard, labeled: bool, epochs: int, client: int | None = None) -> Bundle:
    """The bundle of a client with these rows."""
    number = shared.about["clients"] if client is None else client
    begun = replace(shared, kind="client", client=number, parts={}, id="")
    if labeled:
        return finish_bundle(begun, _deploy(shared, shard, epochs, number), shard, joined="labeled")
    mine = _deploy_unlabeled(shared, shard)
    known = hide_labels(shard)._replace(counts=estimate_counts(shared, mine, shard))
    return finish_bundle(begun, mine, shard, known, joined="unlabeled", estimated=True)


def _deploy(shared: Bundle, shard: Shard, epochs: int, client: int) -> Tree:
    """The state of a client that personalizes the shared model, as the engines do it."""
    method, parts, s = shared.method, shared.parts, shared.about["training"]
    path, total = (shared.seed, "personal", int(shared.about["rounds"])), max(shared.about["clients"], client + 1)
    optimizer = Optimizer(**s["optimizer"])
    fit = LoopFit(method.net, shard, optimizer, epochs, s["batch"], s["flip"], s["crop"], path, client, total)
    with refusing(f"{clean(shared.name)} fails on these rows"):
        made, loss = deploy(method, fit, parts["shared"], Received(parts["averages"], parts["start"]), shard)
    (fault,) = find_infinite([(name, leaf[None]) for name, leaf in tree.flatten(made).items()], 1)
    if fault is not None or not loss.isfinite():
        raise InputError(f"training did not converge ({fault or 'the loss is not finite'}); use other data.")
    return {**parts["shared"], **made, **parts["beside"]}


def _deploy_unlabeled(shared: Bundle, shard: Shard) -> Tree:
    method, parts = shared.method, shared.parts
    if method.predictor.needs_labels:
        raise InputError(f"{clean(shared.name)} needs labels to start with; give a folder per class.")
    rows = hide_labels(shard)._replace(real=shard.real)
    with refusing(f"{clean(shared.name)} fails on these rows"):
        made = join_unlabeled(method, parts["shared"], Received(parts["averages"], parts["start"]), rows)
    if made is None:
        raise InputError(f"{clean(shared.name)} has no use for rows without labels; give a folder per class.")
    return {**made, **parts["beside"]}


def estimate_counts(shared: Bundle, mine: Tree, shard: Shard) -> Tensor:
    """The client's mix of classes, as counts of 1,000 rows, from what the global head makes of rows without labels.

    Only a head that was trained with balanced softmax tells the likelihood that EM needs; of others, all are 0.
    """
    if not (isinstance(shared.method.rounds, FedAvg) and shared.method.rounds.balanced):
        return torch.zeros_like(shard.counts)
    every = torch.cat([shard.x, shard.val_x])
    with torch.no_grad():
        logits = torch.cat([global_logits(shared.method, mine, scale(x)) for x in every.split(CHUNK)])
    return (1000 * prior_by_em(logits.double().softmax(-1))).float()


def make_shard(x: np.ndarray, labels: np.ndarray | None, classes: int, seed: int) -> Shard:
    """A client's rows, a fifth of which are for validation."""
    order = rng.shuffled(rng.key(seed, "join"), len(x))
    val, train = map(np.sort, np.split(order, [int(VALIDATION * len(x))]))
    y = np.zeros(len(x), dtype=np.int64) if labels is None else labels
    counts = np.bincount(y[train], minlength=classes) if labels is not None else np.zeros(classes)
    rows = (torch.from_numpy(np.ascontiguousarray(part)) for part in (x[train], y[train], x[val], y[val]))
    train_x, train_y, val_x, val_y = rows
    real, val_real = (torch.ones(len(part), dtype=torch.bool) for part in (train, val))
    return Shard(train_x, train_y, real, torch.from_numpy(counts).float(), val_x, val_y, val_real)


def read_rows(data: Any, takes: Input, classes: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray | None]:
    """Samples [n, ...] as the model takes them, and their labels, if they have some."""
    if isinstance(data, str | Path):
        path = Path(data)
        x, labels = _read_npz(path, classes) if path.suffix == ".npz" else _read_folder(path, takes, classes)
    else:
        x, labels = data if isinstance(data, tuple) else (data, None)
        x, labels = np.asarray(x), None if labels is None else np.asarray(labels)
    if takes.is_picture and x.dtype == np.uint8 and x.ndim == 3:
        x = x[..., None]
    if takes.is_picture and x.dtype == np.uint8 and x.ndim == 4 and len(x):
        x = fit_images(x, takes.shape, takes.square)
    if not len(x) or str(x.dtype) != takes.dtype or x.shape[1:] != takes.shape:
        raise InputError(f"the rows are {x.dtype} {list(x.shape)}, but the model takes {takes.dtype} {takes.shape}.")
    if not np.isfinite(x).all():
        raise InputError("the rows must hold finite numbers only.")
    if labels is not None:
        whole = labels.shape == (len(x),) and labels.dtype.kind in "iu"
        if not whole or labels.min() < 0 or labels.max() >= len(classes):
            raise InputError(f"labels must be {len(x)} whole numbers from 0 to {len(classes) - 1}.")
        labels = labels.astype(np.int64)
    return x, labels


def _read_folder(path: Path, takes: Input, classes: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray | None]:
    """Folders named after classes, or pictures without labels."""
    if not takes.is_picture:
        raise InputError(f"{show_path(path)}: the model takes no pictures; give an npz file with x.")
    if not path.is_dir():
        raise InputError(f"{show_path(path)} is no folder and no npz file; give one of them.")
    if not any(entry.is_dir() for entry in list_visible(path)):
        list_images(path)  # refuses an empty folder
        return read_folders([path], takes.shape, takes.square)[0], None
    names = list_classes(path)
    for name in names:
        if name not in classes:
            raise InputError(f"{show_path(path)} has a class {clean(name)!r}; {find_nearest(name, classes)}")
    x, which = read_folders([path / name for name in names], takes.shape, takes.square)
    return x, np.array([classes.index(name) for name in names])[which]


def _read_npz(path: Path, classes: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray | None]:
    if not path.exists():
        raise InputError(f"{show_path(path)} does not exist.")
    with foreign.explain(f"{show_path(path)} is not a readable npz file", "save it with numpy.savez"):
        names = foreign.read_headers(path)
        if "labels" in names:
            found = npz.read_columns(path)
            named = classes if found.classes is None else found.classes
            if unknown := [name for name in named if name not in classes]:
                raise InputError(f"{show_path(path)} has a class {clean(unknown[0])!r} that the model lacks.")
            if found.classes is None and found.labels.max() >= len(classes):
                raise InputError(
                    f"{show_path(path)} has label {found.labels.max()}; labels must be 0 to {len(classes) - 1}, for "
                    f"{', '.join(map(clean, classes[:10]))}{', ...' if len(classes) > 10 else ''}."
                )
            return found.x, np.array([classes.index(name) for name in named])[found.labels]
    return read_npz_rows(path), None


def read_npz_rows(path: Path) -> np.ndarray:
    """The samples in an npz file, without labels."""
    if not path.exists():
        raise InputError(f"{show_path(path)} does not exist.")
    with foreign.explain(f"{show_path(path)} is not a readable npz file", "save it with numpy.savez"):
        which = [name for name in ("images", "x") if name in foreign.read_headers(path)]
        if len(which) != 1:
            raise InputError(f"{show_path(path)} must have one array, images or x.")
        return foreign.read_npz(path, which)[which[0]]
