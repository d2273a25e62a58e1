"""From a run to bundles: what a client of it deploys, or what a new client needs to join."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import records, rng, tree
from ..data.plan import Federation
from ..engine.conclude import conclude
from ..engine.evaluate import begin_one
from ..engine.train import can_join, deploy_some
from ..engine.visit import Progress
from ..errors import InputError
from ..experiment.results import Results, read_results
from ..experiment.work import Work, prepare_here
from ..methods.base import Method
from ..methods.given import Given, name_methods
from ..progress.events import track
from ..text import clean, find_nearest
from ..tree import Tree
from ..types import Shard
from .bundle import Bundle, check_place, strip, take_input, write_bundle
from .card import write_card
from .monitor import make_reference
from .online import Online
from .signing import read_private_key

FEWEST = 20  # validation rows that tell a monitor what a calm stream is


@dataclass(frozen=True)
class Trained:
    """A method of a run on one seed, after its training."""

    name: str
    method: Method
    work: Work
    progress: Progress
    beside: Tree  # what every client deploys beside its own
    training: str  # its id

    @property
    def clients(self) -> Sequence[int]:
        """Those that can deploy it."""
        every = range(len(self.work.run.shards))
        return every if can_join(self.method) else self.work.run.trained


def export(
    run: Path | str | Results,
    to: Path | str,
    *,
    method: str | None = None,
    client: int | None = None,
    seed: int | None = None,
    sign: Path | str | None = None,
    federation: Federation | None = None,
    net: Any = None,
    methods: Iterable[Given] | None = None,
) -> Path:
    """Write the bundle of one client of a finished run, and return its folder.

    Args:
        run: the folder of a run, or its results.
        to: the folder of the bundle. A bundle that is there is replaced.
        method: may be left out where the run has one.
        client: its number. None: the bundle is for new clients, who make it their own with `personalize`.
        seed: may be left out where the run has one.
        sign: the file of an Ed25519 private key.
        federation: the data, where the run was given a federation.
        net: the network, where the run was given one.
        methods: the methods, where the run was given objects.
    """
    check_target(Path(to), sign)
    found = open_run(run, method, seed, federation=federation, net=net, methods=methods)
    made = bundle_global(found) if client is None else bundle_client(found, client)
    write_bundle(made, Path(to), write_card(made), sign)
    return Path(to)


def check_target(place: Path, sign: Path | str | None) -> None:
    """Refuse a place or a key before the long part."""
    check_place(place)
    if sign is not None:
        read_private_key(sign)


def export_graph(run: Path | str | Results, to: Path, method: str | None, client: int, seed: int | None = None) -> Path:
    """Write one client as one ONNX file, which `fedthe.runtime` answers with."""
    if to.is_dir():
        raise InputError(f"{to} is a folder; name a file.")
    return write_graph(bundle_client(open_run(run, method, seed), client), to)


def write_graph(bundle: Bundle, to: Path) -> Path:
    try:
        from .onnx import export_onnx
    except ImportError as error:
        raise InputError(f"{error.name} is missing; install it with: pip install 'fedthe[onnx]'.") from None
    sample = bundle.input.zeros()[0].numpy()
    facts = {**bundle.about, "client": bundle.client, "seed": bundle.seed}
    parts = bundle.parts["model"], bundle.parts["state"]
    export_onnx(bundle.method, *parts, to, classes=bundle.classes, sample=sample, name=bundle.name, about=facts)
    return to


def export_all(found: Trained, to: Path, sign: Path | str | None = None) -> list[Path]:
    """The bundle of every client, each in a folder of its own."""
    width = len(str(max(found.clients)))
    places = {k: to / f"client-{k:0{width}}" for k in found.clients}
    for place in places.values():
        check_target(place, sign)
    for k, place in track("writing bundles", list(places.items())):
        made = bundle_client(found, k)
        write_bundle(made, place, write_card(made), sign)
    return list(places.values())


def open_run(
    run: Path | str | Results,
    method: str | None = None,
    seed: int | None = None,
    *,
    federation: Federation | None = None,
    net: Any = None,
    methods: Iterable[Given] | None = None,
) -> Trained:
    """A method of a finished run, on the CPU, from its checkpoint."""
    results = run if isinstance(run, Results) else read_results(run)
    name, seed = _pick_method(results, method), _pick_seed(results, seed)
    recipes = name_methods(methods)[1] if methods is not None else {}
    # where it was trained is no matter: it is deployed on a CPU, in float32
    config = replace(results.config, out=str(results.folder), device="cpu", engine="loop", precision="auto")
    dataset = federation.source if federation is not None else None
    try:
        made, works = prepare_here(replace(config, seeds=(seed,)), dataset, net=net, recipes=recipes)
    except InputError as error:
        if dataset is not None and net is not None:
            raise
        raise InputError(
            f"{error} If the run was given objects, export it in Python: "
            "fedthe.export(run, to, federation=..., net=..., methods=...)."
        ) from None
    (work,) = works
    if work.federation.manifest_hash != results.manifests[seed]:
        raise InputError("the data is not what the run was trained on; give the same data.")
    key = next((id for id, each in results.trainings.items() if _serves(each, name, seed)), None)
    folder = results.folder.parent if results.shared else results.folder
    progress = records.load_progress(folder / "trainings" / f"{key}.safetensors") if key else None
    if progress is None or key is None:
        raise InputError(f"{results.folder} has no finished training of {clean(name)}, seed {seed}; run it again.")
    return Trained(name, made[name], work, progress, conclude(made[name], work.run, progress), key)


def _serves(training: Mapping[str, Any], name: str, seed: int) -> bool:
    return training["seed"] == seed and name in training["methods"] and "failed" not in training


def _pick_method(results: Results, method: str | None) -> str:
    names = list(results.config.specs)
    if method is None and len(names) > 1:
        raise InputError(f"the run has several methods; name one of {clean(', '.join(names), 500)}.")
    if method is not None and method not in names:
        raise InputError(f"the run has no method {clean(method)!r}; {find_nearest(method, names)}")
    return names[0] if method is None else method


def _pick_seed(results: Results, seed: int | None) -> int:
    seeds = results.config.seeds
    if seed is None and len(seeds) > 1:
        raise InputError(f"the run has several seeds; name one of {', '.join(map(str, seeds))}.")
    if seed is not None and seed not in seeds:
        raise InputError(f"the run has no seed {seed}; it has {', '.join(map(str, seeds))}.")
    return seeds[0] if seed is None else seed


def bundle_client(found: Trained, client: int) -> Bundle:
    """What this client deploys, with what the monitor must know of a calm stream."""
    work = found.work
    if client not in found.clients:
        raise InputError(f"there is no client {client} that can deploy it; there are {len(found.clients)}, from 0 on.")
    deployed = deploy_some(
        found.method, work.run, work.config.training, found.progress, work.engine, [client], found.beside
    )
    shard = work.run.shards[client]
    return finish_bundle(_describe(found, client), tree.take(deployed, 0), shard)


def finish_bundle(begun: Bundle, mine: Tree, shard: Shard, known: Shard | None = None, **about: Any) -> Bundle:
    """A client's bundle from its model and rows. known: what its predictor may know of them, if labels are hidden."""
    labels, known = shard.val_labels.numpy() if known is None else None, known or shard
    state = begin_one(begun.method, mine, known)
    facts = {"counts": known.counts.tolist(), **about}
    whole = replace(begun, parts={"model": mine, "state": state, "monitor": {}}, about={**begun.about, **facts})
    order = rng.shuffled(rng.key(begun.seed, "validation"), len(shard.val_x))  # rows of a folder are sorted by class
    return _add_reference(whole, shard.val_x.numpy()[order], None if labels is None else labels[order])


def _add_reference(bundle: Bundle, x: np.ndarray, labels: np.ndarray | None) -> Bundle:
    """With the accuracy on validation rows, if they are labelled, and the monitor's reference."""
    if not len(x):
        return bundle
    seen = [each.watched for each in Online(bundle, "validation").observe(x)]
    answers, safes = (np.array([each[i] for each in seen]) for i in (1, 2))
    facts: dict[str, float] = {"validation_rows": len(x)}
    if labels is not None:
        facts["validation_accuracy"] = 100 * float((answers == labels).mean())
    parts = dict(bundle.parts)
    if len(x) >= FEWEST:
        signals = {name: np.array([each[0][name] for each in seen]) for name in seen[0][0]}
        arrays = make_reference(signals, answers, safes, len(bundle.classes)).arrays()
        parts["monitor"] = tree.unflatten({name: torch.from_numpy(array) for name, array in arrays.items()})
    return replace(bundle, parts=parts, about={**bundle.about, **facts})


def bundle_global(found: Trained) -> Bundle:
    """What a client needs that joins after training."""
    if not can_join(found.method):
        raise InputError(f"only rounds train what a client of {clean(found.name)} keeps, so no client can join later.")
    start = found.method.start(found.method.net.init(found.work.run.seed)).mine
    parts = {
        "shared": found.progress.server.shared,
        "averages": found.progress.averages,
        "beside": found.beside,
        "start": start,
    }
    settings = found.work.config.training.describe()
    clients = {"clients": len(found.work.run.shards), "training": settings}
    described = _describe(found, None)
    return replace(described, kind="global", parts=parts, about={**described.about, **clients})


def _describe(found: Trained, client: int | None) -> Bundle:
    from .. import __version__

    work, pool = found.work, found.work.federation.pool
    about = {
        "fedthe": __version__,
        "torch": torch.__version__,
        "dataset": clean(pool.name),
        "manifest": work.federation.manifest_hash,
        "training_id": found.training,
        "rounds": found.progress.round,
    }
    takes, seed = take_input(pool.x, work.config.square), work.run.seed
    return Bundle("client", found.name, strip(found.method), tuple(pool.classes), takes, seed, client, {}, about)
