"""`fedthe bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InputError
from .common import Json, bars, make_table, print_rich

if TYPE_CHECKING:
    from ..bench.result import Bench, RowChange


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repeats, and smaller sizes on a CPU.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, or one GPU such as cuda:1.")] = "auto",
    engine: Annotated[str, typer.Option(help="auto, loop or stack.")] = "auto",
    save: Annotated[Path | None, typer.Option(help="Write the result to this file.")] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="Compare with this file.", show_default="what --remember kept on this machine")
    ] = None,
    remember: Annotated[bool, typer.Option("--remember", help="Keep the result as this machine's baseline.")] = False,
    as_json: Json = False,
) -> None:
    """Measure how fast this machine trains and predicts, and how fast it could.

    The floor beside each number is the time of its arithmetic, or of the bytes it moves, at this machine's best rate.
    """
    from ..bench.measure import measure
    from ..bench.result import compare, find_baseline, list_differences, read_bench
    from ..store import check_folder, home, write_json

    before = read_bench(baseline) if baseline else None
    for folder in (save.parent if save else None, home() if remember else None):
        if folder:
            check_folder(folder)  # fail now, not after the long part
    if save and save.is_dir():
        raise InputError(f"{save} is a folder; name a file to save the result in.")
    with bars():
        now = measure(engine, device, quick=quick)  # type: ignore[arg-type]
    kept, notes = find_baseline(now.machine), []
    if before is None and kept.exists():
        try:
            before = read_bench(kept)
        except InputError as error:
            notes.append(f"not compared: {error}")
    changes = compare(now, before) if before else []
    notes += list_differences(now, before) if before else []
    for path in (save, kept if remember else None):
        if path:
            write_json(path, now.as_dict())
            notes.append(f"written to {path}")
    if as_json:
        print(json.dumps(now.as_dict() | {"changes": [change.as_dict() for change in changes], "notes": notes}))
    else:
        _print(now, changes, notes)


def _print(now: Bench, changes: list[RowChange], notes: list[str]) -> None:
    from ..bench.text import align, list_notes, tabulate, title

    head, *rows = tabulate(now, changes)
    table = make_table(collapse_padding=True, pad_edge=False)
    for name, side in zip(head, align(head), strict=True):
        table.add_column(name, justify=side, no_wrap=True)
    slower = {change.name for change in changes if change.slower}
    for row in rows:
        table.add_row(*row, style="bold red" if row[0] in slower else None)
    print(title(now))
    print_rich(table)
    for note in [*list_notes(now, changes), *notes, f"{now.seconds:.0f} s"]:
        print(note)
