"""What commands share: options, tables and progress bars in the terminal, and the report after a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from ..errors import InputError
from ..terminal import say

if TYPE_CHECKING:
    import click
    from rich.progress import TaskID
    from rich.text import Text

    from ..experiment.on_ray import RayWorkers
    from ..report.data import Page

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Tensorboard = Annotated[Path | None, typer.Option(help="Also write the results to this folder for TensorBoard.")]
Mlflow = Annotated[str | None, typer.Option(metavar="URI", help="Also log to MLflow: sqlite:///FILE or http://HOST.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to override.")]
Trainings = Annotated[
    Path, typer.Option("--out", "-o", help="The folder of trainings and answers, which tables and figures share.")
]
DATA = (".json", ".jsonl", ".npz", ".safetensors", ".toml", ".py")  # what records and runs consist of
LIKE_ADDRESS = re.compile(r"auto|local|[\d.]+|[^=]*:[^=]*")  # of Ray, or meant as one: words beside it do not look so
GAP = 2  # spaces per column of a table, and those at its sides
Yes = Annotated[bool, typer.Option("--yes", help="Start even if it takes more than half an hour.")]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="[ADDRESS]",
        help="Compute on Ray: on this machine, or on a cluster with auto or HOST:PORT (needs the extra ray).",
    ),
]
RayCpus = Annotated[
    int | None,
    typer.Option("--ray-cpus", min=1, help="Cores of each worker on Ray.", show_default="uses all cores"),
]


class RayCommand(TyperCommand):
    """A command whose --ray has an address or none."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for i, word in enumerate(args):
            if word == "--":
                break
            if word == "--ray" and not (args[i + 1 :] and LIKE_ADDRESS.fullmatch(args[i + 1])):
                args = [*args[:i], "--ray=local", *args[i + 1 :]]
        return super().parse_args(ctx, args)


def on_ray(address: str | None, cpus: int | None) -> AbstractContextManager[RayWorkers | None]:
    """Within the block, workers on Ray compute, if there is an address."""
    if address is None:
        if cpus is not None:
            raise InputError("--ray-cpus has no effect without --ray.")
        return nullcontext()
    from ..experiment.on_ray import workers_on_ray

    return workers_on_ray(address, cpus)


def make_table(*columns: str, **options: Any) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table

    return Table(*columns, box=SIMPLE, title_justify="left", title_style="bold", **options)


def print_rich(what: Any, style: str | None = None) -> None:
    """A table, or prose that wraps; text in it is no markup."""
    from rich.console import Console

    Console().print(what, style=style, markup=False, highlight=False)


def print_grid(
    head: Sequence[str], rows: Sequence[Sequence[str | Text]], title: str | None = None, names: int = 1
) -> None:
    """A table of numbers, below a title that may be wider; the first `names` columns are text, the first never cut.

    Columns that do not fit the terminal go to further tables, each with the columns of text: a number that is cut would
    be another number.
    """
    from rich.console import Console

    if title:
        print_rich(title, style="bold")
    room = Console().width
    head = [_fold(each, room // 2) for each in head]
    rows = [[_fold(str(row[0]), room // 2), *row[1:]] for row in rows]
    wraps = [0 < i < names for i in range(len(head))]
    widths = [_measure([head[i], *(row[i] for row in rows)], wrap) for i, wrap in enumerate(wraps)]
    for columns in split_columns(widths, names, room):
        table = make_table(collapse_padding=True, pad_edge=False)
        for i in columns:
            table.add_column(head[i], justify="left" if i < names else "right", no_wrap=not wraps[i], overflow="fold")
        for row in rows:
            table.add_row(*(row[i] for i in columns))
        print_rich(table)


def split_columns(widths: Sequence[int], names: int, room: int) -> list[list[int]]:
    """The columns of as few tables as there is room for, each with the first `names`; all as narrow as can be."""
    tables = _fill(widths, names, room)
    for narrower in range(room - 1, 0, -1):  # so that none is left with a column alone
        if len(found := _fill(widths, names, narrower)) > len(tables):
            break
        tables = found
    return tables


def _fill(widths: Sequence[int], names: int, room: int) -> list[list[int]]:
    """Tables that each have as many columns as there is room for, and at least one beside the first `names`."""
    tables = [[*range(names)]]
    for i in range(names, len(widths)):
        if len(tables[-1]) > names and sum(widths[j] + GAP for j in (*tables[-1], i)) > room:
            tables.append([*range(names)])
        tables[-1].append(i)
    return tables


def _fold(text: str, width: int) -> str:
    """In lines of at most this width."""
    from rich.cells import chop_cells

    return "\n".join(part for line in text.split("\n") for part in chop_cells(line, width) or [""])


def _measure(cells: Iterable[str | Text], wraps: bool) -> int:
    """The width of the widest line of these cells, or of the widest word if they wrap."""
    from rich.cells import cell_len

    parts = (part for cell in cells for part in (str(cell).split() if wraps else str(cell).split("\n")))
    return max(map(cell_len, parts), default=0)


@contextmanager
def bars() -> Iterator[None]:
    """Progress bars on standard error for whatever takes long within the block."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from ..progress.events import Event, listening

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    remark = TextColumn("{task.fields[remark]}", markup=False)
    progress = Progress(*columns, remark, console=Console(stderr=True))
    tasks: dict[str, TaskID] = {}

    def listen(event: Event) -> None:
        what = event.describe()
        line = event.worker or what  # a line for each worker, whatever it does
        progress.start()  # not earlier: refused input prints a single line
        if line not in tasks:
            tasks[line] = progress.add_task(what, remark="")
        task = tasks[line]
        progress.update(task, description=what, completed=event.done, total=event.total, remark=event.remark)

    try:
        with listening(listen):
            yield
    finally:
        if tasks:
            progress.stop()


@dataclass(frozen=True)
class Loggers:
    """TensorBoard and MLflow, if asked for. A missing one is refused at once, before the long part."""

    tensorboard: Path | None = None
    mlflow: str | None = None

    def __post_init__(self) -> None:
        from ..report.loggers import check_mlflow, check_tensorboard

        if self.tensorboard:
            check_tensorboard(self.tensorboard)
        if self.mlflow:
            check_mlflow(self.mlflow)

    def write(self, page: Page) -> None:
        from ..report.loggers import write_mlflow, write_tensorboard

        if self.tensorboard:
            write_tensorboard(page, self.tensorboard)
        if self.mlflow:
            write_mlflow(page, self.mlflow)

    def write_report(self, make_page: Callable[[], Page], path: Path) -> Path | None:
        """Report what just ran. None if that fails: after hours of work, a report must not fail the command."""
        from ..report.page import write_page

        try:
            page = make_page()
            self.write(page)
            write_page(page, path)
        except Exception as error:
            say(f"the report is not complete ({str(error) or type(error).__name__}); `fedthe report` writes it again.")
            return None
        return path


def print_report(path: Path | None) -> None:
    if path:
        print(f"The report is {path}: open it in a browser.\n")


def check_page(out: Path | None) -> None:
    """Refuse, before any work, to write a page to a folder, or in place of a file that holds data."""
    if out and out.is_dir():
        raise InputError(f"{out} is a folder; name a file.")
    if out and out.exists() and out.suffix in DATA:
        raise InputError(f"{out} exists and is no page; name another file.")
