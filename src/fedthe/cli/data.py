"""`fedthe data`: list, fetch, verify and show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..terminal import Commands
from .common import Json, bars, make_table, print_rich

if TYPE_CHECKING:
    from ..data.plan import Federation

app = typer.Typer(
    cls=Commands,
    help="Datasets: list, fetch, verify, and show how they become a benchmark.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
Name = Annotated[str, typer.Argument(help="A dataset that `fedthe data list` names.")]
MOST = 40  # clients that are listed


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List the datasets, and which of them are available here."""
    from ..data import DATASETS, find

    # None: users name the path of their own datasets
    here = {name: None if source.lies == "path" else find(name) is not None for name, source in DATASETS.items()}
    if as_json:
        print(json.dumps({name: {"about": each.about, "here": here[name]} for name, each in DATASETS.items()}))
        return
    table = make_table("dataset", "available", "what it is")
    for name, each in DATASETS.items():
        table.add_row(name, {True: "yes", False: "no", None: "yours"}[here[name]], each.about)
    print_rich(table)


@app.command()
def fetch(
    name: Name,
    source: Annotated[str | None, typer.Option(help="Use only this source.")] = None,
    as_json: Json = False,
) -> None:
    """Download a dataset, check its content, and install it only if it is complete.

    NAME is a dataset that `fedthe data list` names.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from ..data.fetch import fetch

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, console=Console(stderr=True))
    task = progress.add_task(f"fetching {name}", total=None)

    def show(done: int, total: int | None) -> None:
        progress.start()  # not earlier: refused input prints a single line
        progress.update(task, completed=done, total=total)

    try:
        path = fetch(name, source=source, progress=show)
    finally:
        if progress.live.is_started:
            progress.stop()
    print(json.dumps({"name": name, "path": str(path)}) if as_json else f"{name} is at {path}")


@app.command()
def verify(name: Name, as_json: Json = False) -> None:
    """Read a whole dataset, and compare its content with the published one.

    NAME is a dataset that `fedthe data list` names.
    """
    from ..data import verify

    with bars():
        report = verify(name)
    print(json.dumps(report.__dict__) if as_json else f"{name}: {report.sentence}")
    if not report.ok:
        raise typer.Exit(2)


@app.command()
def show(
    spec: Annotated[str, typer.Argument(help="A dataset of `fedthe data list`, or NAME:PATH, such as npz:mine.npz.")],
    clients: Annotated[
        int | None, typer.Option(help="The number of clients.", show_default="those that the data has, or 20")
    ] = None,
    dirichlet: Annotated[
        float | None,
        typer.Option(help="The higher, the more similar the clients: 0.1 or 10, for example.", show_default="0.1"),
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of every random draw.")] = 0,
    partition: Annotated[
        str | None,
        typer.Option(
            help="balanced (all clients the same size), unbalanced, quantity, shards, iid, or given.",
            show_default="given if the data says who holds what, else balanced",
        ),
    ] = None,
    shards: Annotated[
        int | None, typer.Option(help="Shards of classes per client, with --partition shards.", show_default="2")
    ] = None,
    feature_shift: Annotated[
        str, typer.Option(help="What is done to all pictures of a client, in its own way: none, corruption, rotation.")
    ] = "none",
    by_client: Annotated[
        bool, typer.Option("--by-client", help="The folder holds a folder per client, each with a folder per class.")
    ] = False,
    square: Annotated[
        str | None, typer.Option(help="Your pictures that are not square: crop or pad.", show_default="refuse them")
    ] = None,
    severity: Annotated[int, typer.Option(help="The severity of the corruptions, 1 to 5.")] = 5,
    tests: Annotated[
        str | None,
        typer.Option(help="Further test distributions, such as switch50,gradual.", show_default="the standard ones"),
    ] = None,
    unknown: Annotated[
        str | None, typer.Option(help="A class that no client holds, for the test open_set.", show_default="none")
    ] = None,
    natural: Annotated[
        str | None,
        typer.Option(help="The natural shift: a name, npz:PATH, folder:PATH, or none.", show_default="its own"),
    ] = None,
    size: Annotated[int | None, typer.Option(help="The side of the images in pixels.", show_default="its own")] = None,
    frost: Annotated[str | None, typer.Option(help="A folder with the original frost photographs.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for pictures and the manifest.")] = Path(
        "federation"
    ),
    as_json: Json = False,
) -> None:
    """Turn a dataset into clients and test distributions, and draw both.

    SPEC is a dataset of `fedthe data list`, or NAME:PATH, such as npz:mine.npz or folder:photos.
    """
    from .. import pictures
    from ..config import make_config
    from ..data.plan import build
    from ..experiment.data import fit_to_data, load
    from ..store import make_folder, write_json
    from ..text import split_list

    given: dict[str, Any] = {
        "dataset": spec,
        "clients": clients,
        "dirichlet": dirichlet,
        "partition": partition,
        "shards": shards,
    }
    given |= {"feature_shift": feature_shift, "by_client": by_client, "square": square, "severity": severity}
    given |= {"tests": None if tests is None else split_list(tests), "unknown": unknown}
    given |= {"natural": natural, "size": size, "frost": frost, "seeds": [seed], "crop": 0}
    config = make_config(given)
    with bars():
        dataset = load(config)
        federation = build(dataset, fit_to_data(config, dataset).settings(seed))
        _ = federation.manifest  # reads the frost folder
        make_folder(out)  # fail now, not after the long part
        names = ["clients.png", "manifest.json"]
        pictures.draw_clients(federation, out / "clients.png")
        if federation.pool.is_pictures:
            names.insert(1, "tests.png")
            pictures.draw_tests(federation, out / "tests.png")
        write_json(out / "manifest.json", federation.manifest)
    files = [str(out / name) for name in names]
    if as_json:
        print(json.dumps(_summarize(federation) | {"files": files}))
    else:
        _print_federation(federation)
        print(f"\npictures and manifest: {', '.join(files)}")


def _summarize(federation: Federation) -> dict[str, Any]:
    return {
        "dataset": federation.pool.name,
        "settings": federation.settings.describe(),
        "classes": list(federation.pool.classes),
        "clients": federation.class_counts.tolist(),
        "tests": {
            name: [None if stream is None else len(stream) for stream in streams]
            for name, streams in federation.tests.items()
        },
        "notes": list(federation.notes),
        "manifest_hash": federation.manifest_hash,
    }


def _print_federation(federation: Federation) -> None:
    from ..data.partition import say_partition
    from ..text import clean

    pool, s = federation.pool, federation.settings
    kind = {"u": "images", "f": "samples", "i": "samples of tokens"}[pool.x.dtype.kind]
    print(
        f"{clean(pool.name)}: {len(pool):,} {kind} of {'x'.join(map(str, pool.x.shape[1:])) or 'one number'}, "
        f"{len(pool.classes)} classes; {s.clients} clients, {say_partition(s.partition, s.dirichlet, s.shards)}, "
        f"seed {s.seed}\n"
    )
    holds = make_table("client", "train", "val", "test", "classes", title="What the clients hold")
    own = federation.dataset.clients if s.partition == "given" else ()
    names = [each.name for each in own] or [str(k) for k in range(s.clients)]
    for k, split in enumerate(federation.clients[:MOST]):
        parts = (str(len(rows)) for rows in (split.train, split.val, split.test))
        holds.add_row(clean(names[k], 20), *parts, _describe_mix(federation.class_counts[k], pool.classes))
    print_rich(holds)
    if s.clients > MOST:
        print(f"(and {s.clients - MOST} more clients)")
    tests = make_table("test distribution", "clients", "samples each", "samples", title="What they are tested on")
    for name, streams in federation.tests.items():
        sizes = [len(stream) for stream in streams if stream is not None]
        least, most = min(sizes, default=0), max(sizes, default=0)
        shift = federation.dataset.natural.get(name)
        label = f"{name} ({clean(shift.name)})" if shift and shift.name != name else name
        tests.add_row(label, str(len(sizes)), f"{least}" if least == most else f"{least} to {most}", f"{sum(sizes):,}")
    print_rich(tests)
    for note in federation.notes:
        print(f"note: {clean(note, 1000)}")
    print(f"manifest {federation.manifest_hash}")


def _describe_mix(counts: Any, classes: tuple[str, ...], most: int = 4) -> str:
    """The largest shares of a class mix: 'cat 61 %, dog 22 %, 3 more'."""
    from ..text import clean

    order = [c for c in (-counts).argsort(kind="stable") if counts[c]]
    percents = {c: round(100 * counts[c] / counts.sum()) for c in order[:most]}
    said = [f"{clean(classes[c], 30)} {percent or 'under 1'} %" for c, percent in percents.items()]
    return ", ".join(said + ([f"{len(order) - most} more"] if len(order) > most else []))
