"""`fedthe federate`: a federation across machines, on Flower."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..terminal import Commands
from ..text import count
from .common import Json, print_grid, print_rich

if TYPE_CHECKING:
    from ..deploy.flower.status import RoundStatus, Status

app = typer.Typer(cls=Commands, no_args_is_help=True, help="Federations across machines, on Flower.")
LATEST = 10  # rounds that are shown


@app.callback()
def _federate() -> None:
    """A group, even while it has one command."""


@app.command()
def status(
    folder: Annotated[Path, typer.Argument(help="The server's folder: `folder` of the run config.")],
    as_json: Json = False,
) -> None:
    """Show how far a federation is: its rounds, its clients, their accuracy, and where the time goes."""
    from dataclasses import asdict

    from ..deploy.flower.status import read_status

    found = read_status(folder)
    if as_json:
        print(json.dumps(asdict(found) | {"accuracy": found.accuracy}))
        return
    when = datetime.fromtimestamp(found.at).isoformat(" ", "seconds")
    rounds = count(max(found.rounds, found.round), "round")  # fewer may be asked for than there were
    print_rich(f"{found.method}: {found.round} of {rounds} done; {found.doing}", style="bold")
    if found.accuracy is not None:
        print(f"accuracy after round {found.rated}: {found.accuracy:.2f} %, mean over the clients' own test splits")
    print(f"as of {when}")
    _print_clients(found)
    _print_rounds(found.history[-LATEST:])


def _print_clients(found: Status) -> None:
    rows = [
        [
            client,
            each.fault or "",
            each.node or "-",
            "-" if each.rows is None else f"{each.rows:,}",
            "-" if each.round is None else str(each.round),
            "-" if each.accuracy is None else f"{each.accuracy:.2f}",
        ]
        for client, each in sorted(found.seen.items(), key=lambda pair: int(pair[0]))
    ]
    if rows:
        print_grid(["client", "last fault", "node", "rows", "last round", "accuracy, %"], rows, names=2)


def _print_rounds(history: list[RoundStatus]) -> None:
    rows = [
        [
            str(each.round),
            f"{each.loss:.4f}",
            str(len(each.clients)),
            str(len(each.faults)),
            *(f"{each.seconds.get(phase, 0):.2f}" for phase in history[-1].seconds),
            *(f"{each.bytes[way] / 1e6:.2f}" for way in ("down", "up")),
        ]
        for each in history
    ]
    if rows:
        phases = [f"{phase} s" for phase in history[-1].seconds]
        head = ["round", "loss", "clients", "left out", *phases, "MB down", "MB up"]
        print_grid(head, rows)
