"""The `fedthe` command. Configuration stops here: below, everything is plain keyword arguments.

Results go to standard output, progress and errors to standard error. Commands import heavy packages only when
they run, so that `fedthe --help` answers at once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..terminal import Commands, guard
from . import bench, data, deploy, federate, methods, paper, report, run, serve, settings
from .common import RayCommand

app = typer.Typer(
    name="fedthe",
    help="Personalized federated learning that stays accurate when the data shifts after deployment.",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # wraps paragraphs at any width
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command. An error is one sentence on standard error, and an exit code."""
    guard(app)


def _print_version(asked: bool) -> None:
    if asked:
        from .. import __version__

        print(f"fedthe {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    home: Annotated[
        Path | None,
        typer.Option(envvar="FEDTHE_HOME", help="The folder of datasets and caches.", show_default="~/.cache/fedthe"),
    ] = None,
) -> None:
    if home:
        os.environ["FEDTHE_HOME"] = str(home)  # store.home() reads it


for each in (
    *(run.demo, run.run, settings.settings, methods.methods, deploy.export, deploy.predict, deploy.personalize),
    serve.serve,
    *(paper.table, paper.figure, report.report, report.compare, report.leaderboard, report.watch, bench.bench),
):
    app.command(cls=RayCommand if each in (run.run, paper.table) else None)(each)
app.add_typer(data.app, name="data")
app.add_typer(serve.app, name="token")
app.add_typer(federate.app, name="federate")
