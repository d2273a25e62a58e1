"""`fedthe report`, `fedthe compare`, `fedthe leaderboard` and `fedthe watch`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError
from .common import Json, Loggers, Mlflow, Tensorboard, check_page, print_grid


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs, records of `fedthe table`, or folders of them."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The file to write.", show_default="report.html; other formats are printed"),
    ] = None,
    format: Annotated[str, typer.Option(help="html, md, latex (booktabs) or csv (client by client).")] = "html",
    tensorboard: Tensorboard = None,
    mlflow: Mlflow = None,
) -> None:
    """Write one page that shows what happened on every client under every shift.

    The page is a single file that needs no network. RUN is the folder of a run, such as demo or runs/quick, a record of
    `fedthe table --save`, or a folder of records.
    """
    from ..report.formats import FORMATS
    from ..report.gather import gather
    from ..report.page import write_page
    from ..store import whole_file
    from ..text import find_nearest

    if format not in {"html", *FORMATS}:
        raise InputError(f"there is no format {format!r}; {find_nearest(format, ['html', *FORMATS])}")
    check_page(out)
    loggers = Loggers(tensorboard, mlflow)
    page = gather(runs)
    if format != "html" and not page.shown:
        raise InputError("there are only figures, and only html can show them.")
    if format == "html":
        out = out or Path("report.html")
        write_page(page, out)
    elif out:
        with whole_file(out) as part, part.open("w", encoding="utf-8", newline="") as file:
            file.write(FORMATS[format](page))
    else:
        print(FORMATS[format](page), end="")
    if out:
        print(f"written to {out}")
    loggers.write(page)


def compare(
    a: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or a record of `fedthe table`.")],
    b: Annotated[Path | None, typer.Argument(metavar="[OTHER]", help="Another one.", show_default=False)] = None,
    methods: Annotated[
        str | None, typer.Option(metavar="A,B", help="Compare these two methods of RUN, instead of two runs.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also write a page with them to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Compare two runs, or two methods of a run: differences in accuracy with 95 % intervals.

    RUN and OTHER are folders of runs, or records of `fedthe table --save`. Of two runs, settings that differ are
    listed, too. Differences are paired by client and seed; p-values are corrected by Holm's method.
    """
    from dataclasses import asdict

    from ..report.compare import compare, compare_methods, lay_out, list_remarks
    from ..report.gather import gather
    from ..report.page import write_page
    from ..text import split_list

    if (b is None) == (methods is None):
        raise InputError("name two runs, or one run and --methods A,B.")
    check_page(out)
    page = gather([a] if b is None else [a, b])
    if methods is not None:
        pair = split_list(methods)
        if len(page.shown) != 1:
            raise InputError(f"{a} holds {len(page.shown)} experiments; name one of its folders.")
        if len(pair) != 2:
            raise InputError(f"--methods takes two methods of one run, such as fedthe,fedavg_ft, not {methods!r}.")
        of_methods = compare_methods(page.shown[0], *pair)
        said, remarks, value = of_methods.lay_out(), [of_methods.explain()], asdict(of_methods)
        grid = ["", *said.head], [[name, *(cell.text for cell in cells)] for name, cells in said.rows]
    else:
        if len(page.shown) != 2:
            raise InputError(f"{a} and {b} hold {len(page.shown)} experiments; name exactly two.")
        compared = compare(*page.shown)
        grid, remarks, value = lay_out(compared), list_remarks(compared), asdict(compared)
    if as_json:
        print(json.dumps(value))
    else:
        print_grid(*grid)
        for remark in remarks:
            print(remark)
    if out:
        write_page(page, out)
        print(f"written to {out}", file=sys.stderr if as_json else sys.stdout)


def leaderboard(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="Folders of records that `fedthe table --save` wrote.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file to write.", show_default="it is printed")
    ] = None,
) -> None:
    """Rank the methods in records of `fedthe table`, as Markdown: accuracy by test with intervals, costs, and commands.

    Records share a table if all their methods answered the same samples: the same settings, seeds and clients.
    """
    from ..report.leaderboard import read_boards, write_leaderboard
    from ..store import whole_file

    check_page(out)
    if out and not out.parent.is_dir():
        raise InputError(f"{out.parent} is not a folder; make it first, or name a file elsewhere.")
    boards, lost = read_boards(folders)
    if not boards:
        raise InputError(
            f"no three methods in {', '.join(map(str, folders))} share settings, tests, seeds and clients; "
            "`fedthe table main-dir0.1 --save FOLDER` makes a record."
        )
    page = write_leaderboard(boards, lost, folders)
    if out is None:
        return print(page, end="")
    with whole_file(out) as part:
        part.write_text(page, encoding="utf-8", newline="\n")
    print(f"written to {out}")
    return None


def watch(
    run: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/quick.")],
    once: Annotated[bool, typer.Option("--once", help="Show the state once, and exit.")] = False,
) -> None:
    """Watch a running experiment: round, loss, accuracy so far, time left. Ctrl-C stops watching, not the run.

    RUN is its folder, such as runs/quick.
    """
    from rich.console import Console

    from ..progress.watch import watch

    watch(run, Console(), once=once)
