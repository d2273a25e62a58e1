"""`fedthe serve` and `fedthe token`."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError
from ..terminal import Commands
from .common import Json, print_grid
from .deploy import Verify

if TYPE_CHECKING:
    from ..deploy.service.store import Store

app = typer.Typer(cls=Commands, no_args_is_help=True, help="Tokens of the callers of `fedthe serve`.")
Database = Annotated[
    str | None,
    typer.Option(
        help="Where streams are kept: a file, or postgresql://USER:PASSWORD@HOST/NAME.",
        envvar="FEDTHE_DATABASE",
        show_default="fedthe-streams.db",
    ),
]
EXTRA = "the service needs FastAPI and others; install them with: pip install 'fedthe[serve]'."
DEFAULT = "fedthe-streams.db"
LONGEST = 36_500  # days until a stream expires
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
    bundles: Annotated[list[Path], typer.Argument(help="Folders of bundles, or of folders of bundles.")],
    host: Annotated[
        str, typer.Option(help="The address to listen at; tokens are needed unless it is loopback.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0: any that is free.")] = 8000,
    database: Database = None,
    verify: Verify = None,
    log: Annotated[bool, typer.Option("--log", help="Keep every answer in the database.")] = False,
    rate: Annotated[float, typer.Option(min=0, help="Requests per second of one caller; 0: as many as come.")] = 50.0,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Threads of the model.")] = 1,
    together: Annotated[int, typer.Option(min=1, max=1024, help="The most samples answered together.")] = 64,
    expire: Annotated[
        float | None,
        typer.Option(metavar="DAYS", help="Delete streams that nobody used for so long.", show_default="never"),
    ] = None,
) -> None:
    """Answer streams of samples over HTTP, with a page to try it at /.

    The state of every stream is in a database before its answer is sent. As soon as there is a token (`fedthe token
    create NAME`), callers need one.
    """
    from ..deploy.serve import listen, pick_bundles

    if expire is not None and not 0 < expire <= LONGEST:  # neither is true of NaN
        raise InputError(f"--expire is {expire:g}; give a number of days above 0, and at most {LONGEST:,}.")
    store = open_store(database, log)
    tokens = store.has_tokens()
    if host not in LOOPBACK and not tokens:
        raise InputError(f"whoever reaches {host} could ask; make a token first: fedthe token create NAME.")
    found = pick_bundles(bundles, verify)
    listen(
        found,
        store,
        host=host,
        port=port,
        tokens=tokens,
        rate=rate,
        threads=threads,
        together=together,
        expire=None if expire is None else timedelta(days=expire),
    )


@app.command("create")
def create(name: Annotated[str, typer.Argument(help="Whose it is.")], database: Database = None) -> None:
    """Make a token and print it, once; the database keeps only a hash of it."""
    print(open_store(database).create_token(name))


@app.command("list")
def list_tokens(database: Database = None, as_json: Json = False) -> None:
    """Whose tokens there are."""
    tokens = open_store(database).list_tokens()
    if as_json:
        print(json.dumps([each.name for each in tokens]))
    else:
        print_grid(["name", "made"], [[each.name, f"{each.created:%Y-%m-%d %H:%M} UTC"] for each in tokens], names=2)


@app.command("revoke")
def revoke(name: Annotated[str, typer.Argument(help="Whose it is.")], database: Database = None) -> None:
    """Refuse a token from now on."""
    open_store(database).revoke_token(name)
    print(f"the token of {name} is revoked.")


def open_store(database: str | None, log: bool = False) -> Store:
    try:
        from ..deploy.service.store import Store
    except ImportError:
        raise InputError(EXTRA) from None
    is_url = database is not None and "://" in database
    place: dict[str, Any] = {"url": database} if is_url else {"path": Path(database or DEFAULT)}
    store = Store(**place, log=log)
    store.migrate()
    return store
