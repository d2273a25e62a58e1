"""`fedthe figure`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError
from ..terminal import resumable
from .common import Overrides, Trainings, Yes, bars, print_grid


def figure(
    id: Annotated[str | None, typer.Argument(help="A figure of the paper, such as curves-dir0.1.")] = None,
    overrides: Overrides = None,
    out: Trainings = Path("runs/paper"),
    save: Annotated[Path, typer.Option(help="The folder for ID.json and ID.png.")] = Path("figures"),
    redraw: Annotated[bool, typer.Option("--redraw", help="Draw ID.json again, and measure nothing.")] = False,
    yes: Yes = False,
) -> None:
    """Measure and draw a figure of the paper. Without ID, list the figures.

    KEY=VALUE arguments override settings: natural=npz:FILE seeds=0 rounds=10 samples=100 device=cuda.
    """
    from ..config import read_words
    from ..store import check_folder, read_sealed, write_sealed
    from ..study.ask import ask_for_figure
    from ..study.figures import FIGURES, draw_figure, find_figure, measure_figure

    if id is None and not redraw:
        return print_grid(["figure", "what it shows"], [[name, each.title] for name, each in FIGURES.items()])
    if id is None or "=" in id:
        raise InputError("name a figure; `fedthe figure` lists them.")
    find_figure(id)
    if redraw and overrides:
        raise InputError("--redraw draws what was measured; leave out either the settings or --redraw.")
    settings = {"out": str(out)} | read_words(overrides or ())
    path = save / f"{id}.json"
    if redraw:
        measured = read_sealed(path) or {}
        if not {"title", "config", "tests", "data"} <= measured.keys() or measured.get("id") != id:
            raise InputError(f"{path} does not hold {id}; leave out --redraw to measure it.")
    else:
        if not yes:
            ask_for_figure(id, **settings)
        check_folder(save)  # refused now, before the long part
        with resumable(), bars():
            measured = measure_figure(id, **settings)
        write_sealed(path, measured, indent=None)  # thousands of numbers: a line for each would help nobody
    draw_figure(measured, path.with_suffix(".png"))
    print(f"written to {path.with_suffix('.png')}, with its numbers in {path.name}")
    return None
