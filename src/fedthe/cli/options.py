"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Tensorboard = Annotated[Path | None, typer.Option(help="Also write the results to this folder for TensorBoard.")]
Mlflow = Annotated[str | None, typer.Option(metavar="URI", help="Also log to MLflow: sqlite:///FILE or http://HOST.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to override.")]
Trainings = Annotated[
    Path, typer.Option("--out", "-o", help="The folder of trainings and answers, which tables and figures share.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Start even if it takes long.")]
