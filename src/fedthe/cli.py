"""The `fedthe` command. Configuration stops here: below, everything is plain keyword arguments.

Results go to standard output, progress and errors to standard error. Heavy imports stay inside the commands, so that
`fedthe --help` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import InputError
from .terminal import Commands, guard, resumable, say

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from .bench import Bench, Change
    from .config import Config
    from .data.plan import Federation
    from .experiment.results import Results
    from .report.data import Page
    from .study.tables import Table as PaperTable

app = typer.Typer(
    name="fedthe",
    help="Personalized federated learning that stays right when the data shifts after deployment.",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # which wraps paragraphs at any width
    context_settings={"help_option_names": ["-h", "--help"]},
)
data = typer.Typer(
    cls=Commands,
    help="Datasets: list, fetch, verify, and show how they become a benchmark.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.add_typer(data, name="data")

# Small enough for two minutes on two cores, large enough to show what the paper shows.
DEMO = {
    "name": "demo",
    "dataset": "glyphs",
    "size": 24,
    "clients": 10,
    "dirichlet": 0.1,
    "rounds": 24,
    "curve": [8, 16],
    "local_epochs": 1,
    "batch": 16,
    "flip": False,  # letters have a right way round
    "crop": 2,
    "lr": 0.1,
    "momentum": 0.5,
    "samples": 16,
}

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Name = Annotated[str, typer.Argument(help="A dataset of `fedthe data list`.")]
Tensorboard = Annotated[Path | None, typer.Option(help="Write the results to this folder for TensorBoard, too.")]
Yes = Annotated[bool, typer.Option("--yes", help="Start it even if it takes long.")]
Mlflow = Annotated[str | None, typer.Option(metavar="URI", help="Log to MLflow, too: sqlite:///FILE or http://HOST.")]


def main() -> None:
    """Run the command; whatever goes wrong is one sentence on standard error, and an exit code."""
    guard(app)


def _say_version(asked: bool) -> None:
    if asked:
        from . import __version__

        print(f"fedthe {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version.")
    ] = False,
    home: Annotated[
        Path | None,
        typer.Option(envvar="FEDTHE_HOME", help="Where datasets and caches live.", show_default="~/.cache/fedthe"),
    ] = None,
) -> None:
    if home:
        os.environ["FEDTHE_HOME"] = str(home)  # everything below asks store.home()


Out = Annotated[Path, typer.Option("--out", "-o", help="The folder for pictures and the manifest.")]
Clients = Annotated[int, typer.Option(help="How many clients.")]
Dirichlet = Annotated[
    float, typer.Option(help="How alike the clients' class mixes are: 0.1 few classes each, 10 alike.")
]
Seed = Annotated[int, typer.Option(help="Decides every draw.")]


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder of the run.")] = Path("demo"),
    as_json: Json = False,
) -> None:
    """Train and deploy FedAvg, FedAvg+FT, FedTHE and FedTHE+ on embedded data: what shifts do to each of them."""
    from .config import make_config
    from .data import load_dataset
    from .data.plan import build
    from .pictures import draw_clients, draw_tests

    config = make_config(DEMO | {"out": str(out)})
    results = _run_with_progress(config)
    federation = build(load_dataset(config.dataset, size=config.size), config.settings(config.seeds[0]))
    draw_clients(federation, out / "clients.png")
    draw_tests(federation, out / "tests.png")
    report = _report_run(results, Loggers())
    _print_results(results, as_json, report)
    if not as_json:
        _stdout().print(
            "FedAvg+FT is good on its own client's data (original) and lost on other clients' (ooc); FedAvg is even. "
            "FedTHE weighs a personal and a global head for every single sample, without a label."
        )


@app.command()
def run(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; --example prints one.")] = None,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that change the file's.")
    ] = None,
    example: Annotated[bool, typer.Option("--example", help="Print a config file to copy, and run nothing.")] = False,
    tensorboard: Tensorboard = None,
    mlflow: Mlflow = None,
    as_json: Json = False,
) -> None:
    """Run an experiment, or go on with one that was stopped.

    CONFIG is a TOML file; `fedthe run --example > my.toml` writes one to start from. KEY=VALUE words change its
    settings: rounds=10 methods=fedthe,ditto seeds=0,1,2 hyper.fedthe.alpha=0.2 out=FOLDER.
    """
    from .config import read_config, read_example

    if example:
        return print(read_example(), end="")
    if config is None:
        raise InputError("name a config file; `fedthe run --example > my.toml` writes one to start from.")
    loggers = Loggers(tensorboard, mlflow)
    results = _run_with_progress(read_config(config, words or ()))
    _print_results(results, as_json, _report_run(results, loggers))
    if results.failures:
        raise typer.Exit(1)
    return None


@app.command()
def table(
    id: Annotated[str | None, typer.Argument(help="A table of the paper, such as main-dir0.1.")] = None,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that change the table's.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All tables.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Say what it would cost, and run nothing.")] = False,
    methods: Annotated[str | None, typer.Option(help="Only these rows: fedthe,fedavg_ft.")] = None,
    seeds: Annotated[str | None, typer.Option(help="These seeds.", show_default="0,1,2")] = None,
    rounds: Annotated[int | None, typer.Option(help="So many rounds.", show_default="the paper's")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Trainings and answers; all tables share them.")] = Path(
        "runs/paper"
    ),
    save: Annotated[Path | None, typer.Option(help="Write the record to this folder, as ID.json.")] = None,
    show: Annotated[Path | None, typer.Option(help="Show the record in this folder, and run nothing.")] = None,
    yes: Yes = False,
    tensorboard: Tensorboard = None,
    mlflow: Mlflow = None,
    as_json: Json = False,
) -> None:
    """Run a table of the paper, and show ours beside the paper's. Without ID: list the tables.

    KEY=VALUE words change other settings: natural=npz:FILE dataset=glyphs device=cuda samples=100. What was stopped
    goes on where it was, and trainings that tables share are done once.
    """
    from .config import read_words
    from .store import check_folder
    from .study.ask import ask_for_tables
    from .study.tables import find_table, pick_tables

    if id is not None and "=" in id:  # a setting, and no table
        words, id = [id, *(words or [])], None
    if every and id is not None:
        raise InputError("name a table or say --all, not both.")
    given = {"methods": methods, "seeds": seeds, "rounds": rounds}
    words = [*(f"{key}={value}" for key, value in given.items() if value is not None), *(words or ())]
    if not every and id is None:
        if words or plan or save or show:
            raise InputError("name a table, or say --all; `fedthe table` lists them.")
        return _list_tables(as_json)
    if show and words:
        raise InputError("--show shows a record as it was measured; leave settings out, or leave --show out.")
    settings = {"out": str(out)} | read_words(words)
    rows = settings.pop("methods", [])
    tables = pick_tables(rows) if every else [(find_table(str(id)), rows)]
    if plan:
        return _print_bills(tables, settings, as_json)
    if show:
        return _show_records([each for each, _ in tables], show, as_json, every)
    if not yes:
        ask_for_tables(tables, **settings)
    if save:
        check_folder(save)  # what cannot be written is refused before the long part
    loggers = Loggers(tensorboard, mlflow)
    done: dict[str, Any] = {}
    for each, some in tables:
        if save and (save / f"{each.id}.json").is_dir():
            raise InputError(f"{save / f'{each.id}.json'} is a folder; name another place to save in.")
        dataset = each.setting["dataset"]
        if every and "dataset" not in settings and not _is_at_hand(dataset):
            say(f"{each.id} is left out, for {dataset} is not at hand.")
        else:
            record, report = _reproduce(each, some, settings, save, loggers)
            done[each.id] = record | {"report": str(report) if report else None}
            if not as_json:
                _print_record(each, record)
                _print_report(report)
    if as_json:
        print(json.dumps(done if every else done[str(id)]))
    return None


def _is_at_hand(dataset: str) -> bool:
    from .data import find

    return find(dataset) is not None


def _list_tables(as_json: bool) -> None:
    from .study.show import lay_out_list
    from .study.tables import OWN_TABLES, load_tables

    tables = load_tables() | OWN_TABLES
    if as_json:
        print(json.dumps({name: {"title": each.title, "rows": list(each.rows)} for name, each in tables.items()}))
    else:
        _print_grid(*lay_out_list(tables.values()))


def _print_bills(tables: list[tuple[PaperTable, list[str]]], settings: dict[str, Any], as_json: bool) -> None:
    from dataclasses import asdict

    from . import bench as lab
    from .engine.pick import pick_engine
    from .study.bill import bill_tables
    from .study.show import lay_out_bills

    engine = pick_engine(device=settings.get("device", "auto"))
    kept = lab.remembered(lab.describe_machine(engine.device))
    bills = bill_tables(tables, lab.read_bench(kept) if kept.exists() else None, **settings)
    if as_json:
        print(json.dumps({name: asdict(bill) for name, bill in bills.items()}))
        return
    _print_grid(*lay_out_bills(bills))
    here = (
        "by the speed that `fedthe bench --remember` kept"
        if kept.exists()
        else "unknown: run `fedthe bench --remember`"
    )
    _stdout().print(
        f"Each line is what it adds to those above; what is there already is not taken off. Time here is {here}.",
        soft_wrap=True,
        markup=False,
    )


def _reproduce(
    table: PaperTable, rows: list[str], settings: dict[str, Any], save: Path | None, loggers: Loggers
) -> tuple[dict[str, Any], Path | None]:
    from .report.data import Page
    from .report.gather import show_record
    from .store import write_sealed
    from .study.reproduce import make_record, run_cases
    from .study.tables import plan_cases

    cases = plan_cases(table, rows, **settings)
    with resumable(), _bars():
        done = run_cases(cases)
    record = make_record(table, done)
    if save:
        write_sealed(save / f"{table.id}.json", record)
    place = (save or cases[0].config.folder) / f"{table.id}.html"
    return record, _report(lambda: Page(table.id, [show_record(record, done[0][1])]), place, loggers)


def _show_records(tables: list[PaperTable], folder: Path, as_json: bool, every: bool) -> None:
    """Those that are there, of all; one that was named must be there."""
    from .study.reproduce import read_record

    there = [table for table in tables if not every or (folder / f"{table.id}.json").exists()]
    if not there:
        raise InputError(f"{folder} holds no record of a table.")
    found = {table.id: read_record(table, folder) for table in there}
    if as_json:
        print(json.dumps(found if every else found[there[0].id]))
        return
    for table in there:
        _print_record(table, found[table.id])


def _print_record(table: PaperTable, record: dict[str, Any]) -> None:
    from .study.show import lay_out, list_remarks, say_spread

    _print_grid(
        *lay_out(table, record),
        title=f"{table.id}: {table.title}\n{say_spread(record)}; the paper's, difference",
    )
    for remark in list_remarks(record):
        _stdout().print(remark, soft_wrap=True, markup=False, highlight=False)


def _print_grid(head: list[str], rows: list[list[str]], title: str | None = None) -> None:
    shown = _table(collapse_padding=True, pad_edge=False, title=title)
    for i, name in enumerate(head):
        is_number = i > 0 and rows != [] and rows[0][i][:1].isdigit()
        shown.add_column(name, justify="right" if is_number else "left", no_wrap=is_number)
    for row in rows:
        shown.add_row(*row)
    _stdout().print(shown, markup=False, highlight=False)


@app.command()
def figure(
    id: Annotated[str | None, typer.Argument(help="A figure of the paper, such as curves-dir0.1.")] = None,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that change the figure's.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Trainings and answers; tables and figures share them.")] = (
        Path("runs/paper")
    ),
    save: Annotated[Path, typer.Option(help="The folder for ID.json and ID.png.")] = Path("figures"),
    redraw: Annotated[bool, typer.Option("--redraw", help="Draw what ID.json has, and measure nothing.")] = False,
    yes: Yes = False,
) -> None:
    """Measure and draw a figure of the paper. Without ID: list the figures.

    KEY=VALUE words change settings: natural=npz:FILE seeds=0 rounds=10 samples=100 device=cuda.
    """
    from .config import read_words
    from .store import check_folder, read_sealed, write_sealed
    from .study.ask import ask_for_figure
    from .study.figures import FIGURES, draw_figure, find_figure, measure_figure

    if id is None and not redraw:
        return _print_grid(["figure", "what it shows"], [[name, each.title] for name, each in FIGURES.items()])
    if id is None or "=" in id:
        raise InputError("name a figure; `fedthe figure` lists them.")
    find_figure(id)
    if redraw and words:
        raise InputError("--redraw draws what was measured; leave settings out, or leave --redraw out.")
    settings = {"out": str(out)} | read_words(words or ())
    if not (redraw or yes):
        ask_for_figure(id, **settings)
    if not redraw:
        check_folder(save)  # what cannot be written is refused before the long part
    path = save / f"{id}.json"
    if redraw:
        measured = read_sealed(path) or {}
        if not {"title", "config", "tests", "data"} <= measured.keys() or measured.get("id") != id:
            raise InputError(f"{path} does not hold {id}; leave --redraw out to measure it.")
    else:
        with resumable(), _bars():
            measured = measure_figure(id, **settings)
        write_sealed(path, measured, indent=None)  # thousands of numbers, a line for each would help nobody
    draw_figure(measured, path.with_suffix(".png"))
    print(f"{path.with_suffix('.png')}, and its numbers beside it")
    return None


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs, records of `fedthe table`, or folders of them."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The file.", show_default="report.html; other formats are printed"),
    ] = None,
    format: Annotated[str, typer.Option(help="html, md, latex (booktabs) or csv (client by client).")] = "html",
    tensorboard: Tensorboard = None,
    mlflow: Mlflow = None,
) -> None:
    """Write one page that shows what happened on every client, under every shift.

    The page needs no network and nothing beside it. RUN is the folder of a run, such as demo or runs/quick, a record of
    `fedthe table --save`, or a folder of records.
    """
    from .report.formats import FORMATS
    from .report.gather import gather
    from .report.page import write_page
    from .store import whole_file
    from .text import find_nearest

    if format not in {"html", *FORMATS}:
        raise InputError(f"there is no format {format!r}; {find_nearest(format, ['html', *FORMATS])}")
    if out and out.is_dir():
        raise InputError(f"{out} is a folder; name a file.")
    loggers = Loggers(tensorboard, mlflow)
    page = gather(runs)
    if format != "html" and not page.shown:
        raise InputError("there are only figures, which html alone can show.")
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


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="The folder of a run, or a record of `fedthe table`.")],
    b: Annotated[Path, typer.Argument(help="Another one.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write a page with both to this file, too.")] = None,
    as_json: Json = False,
) -> None:
    """Put two runs side by side: what both measured, the difference, and which settings differ."""
    from dataclasses import asdict

    from .report.compare import compare, lay_out, list_remarks
    from .report.gather import gather
    from .report.page import write_page

    both = gather([a, b])
    if len(both.shown) != 2:
        raise InputError(f"{a} and {b} hold {len(both.shown)} experiments; name two of them.")
    compared = compare(*both.shown)
    if as_json:
        print(json.dumps(asdict(compared)))
    else:
        _print_grid(*lay_out(compared))
        for remark in list_remarks(compared):
            _stdout().print(remark, soft_wrap=True, markup=False, highlight=False)
    if out:
        write_page(both, out)
        print(f"written to {out}", file=sys.stderr if as_json else sys.stdout)


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/quick.")],
    once: Annotated[bool, typer.Option("--once", help="Show how it stands, and leave.")] = False,
) -> None:
    """Look on while an experiment runs: round, loss, percent right so far, time left. Ctrl-C leaves it running."""
    from .progress.watch import watch

    watch(run, _stdout(), once=once)


@dataclass(frozen=True)
class Loggers:
    """Where else results go, for those who live there."""

    tensorboard: Path | None = None
    mlflow: str | None = None

    def __post_init__(self) -> None:
        from .report.loggers import check_mlflow, check_tensorboard

        if self.tensorboard:  # what is missing is refused before the long part
            check_tensorboard(self.tensorboard)
        if self.mlflow:
            check_mlflow(self.mlflow)

    def write(self, page: Page) -> None:
        from .report.loggers import write_mlflow, write_tensorboard

        if self.tensorboard:
            write_tensorboard(page, self.tensorboard)
        if self.mlflow:
            write_mlflow(page, self.mlflow)


def _report_run(results: Results, loggers: Loggers) -> Path | None:
    from .report.data import Page
    from .report.gather import show_results

    def make_page() -> Page:
        shown = show_results(results)
        return Page(shown.name, [shown])

    return _report(make_page, results.folder / "report.html", loggers)


def _report(make_page: Callable[[], Page], path: Path, loggers: Loggers) -> Path | None:
    """The page of what just ran, if it can be made: after hours of work nothing here is a reason to fail."""
    from .report.page import write_page

    try:
        page = make_page()
        loggers.write(page)
        write_page(page, path)
    except Exception as error:
        say(f"the report is not complete ({str(error) or type(error).__name__}); `fedthe report` makes it again.")
        return None
    return path


def _print_report(path: Path | None) -> None:
    if path:
        _stdout().print(f"The report is {path}: open it in a browser.\n", soft_wrap=True, markup=False, highlight=False)


@app.command()
def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repeats, and less of it on a CPU.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or one such as cuda:1.")] = "auto",
    engine: Annotated[str, typer.Option(help="auto, loop or stack.")] = "auto",
    save: Annotated[Path | None, typer.Option(help="Write the result to this file.")] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(help="Compare with this file.", show_default="what --remember kept of this machine"),
    ] = None,
    remember: Annotated[bool, typer.Option("--remember", help="Keep the result as this machine's baseline.")] = False,
    as_json: Json = False,
) -> None:
    """Measure how fast this machine trains and answers, and how fast it could.

    Each number stands beside its floor: the arithmetic it takes, or the bytes it moves, at the machine's best.
    """
    from . import bench as lab
    from .store import check_folder, home, write_json

    before = lab.read_bench(baseline) if baseline else None
    for folder in (save.parent if save else None, home() if remember else None):
        if folder:  # what cannot be written is refused before the long part
            check_folder(folder)
    if save and save.is_dir():
        raise InputError(f"{save} is a folder; name a file to save the result in.")
    with _bars():
        now = lab.measure(engine, device, quick=quick)  # type: ignore[arg-type]
    kept, notes = lab.remembered(now.machine), []
    if before is None and kept.exists():
        try:
            before = lab.read_bench(kept)
        except InputError as error:
            notes.append(f"nothing to compare with: {error}")
    changes = lab.compare(now, before) if before else []
    notes += lab.list_differences(now, before) if before else []
    for path in (save, kept if remember else None):
        if path:
            write_json(path, now.as_dict())
            notes.append(f"written to {path}")
    if as_json:
        print(json.dumps(now.as_dict() | {"changes": [change.as_dict() for change in changes], "notes": notes}))
    else:
        _print_bench(now, changes, notes)


def _print_bench(now: Bench, changes: list[Change], notes: list[str]) -> None:
    from .bench import align, list_notes, tabulate, title

    console = _stdout()
    head, *rows = tabulate(now, changes)
    table = _table(collapse_padding=True, pad_edge=False)
    for name, side in zip(head, align(head), strict=True):
        table.add_column(name, justify=side, no_wrap=True)
    marked = {change.name for change in changes if change.slower}
    for row in rows:
        table.add_row(*row, style="bold red" if row[0] in marked else None)
    console.print(title(now), markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    for note in [*list_notes(now, changes), *notes]:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    console.print(f"{now.seconds:.0f} s", highlight=False)


def _run_with_progress(config: Config) -> Results:
    from .experiment.run import run

    with resumable(), _bars():
        return run(config)


@contextmanager
def _bars() -> Iterator[None]:
    """A bar on standard error for everything that takes long within the block."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from .progress.events import Event, listening

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    remark = TextColumn("{task.fields[remark]}", markup=False)
    bars = Progress(*columns, remark, console=_stderr())
    tasks: dict[str, TaskID] = {}

    def listen(event: Event) -> None:
        bars.start()  # not before there is something to show: a refusal is one line
        what = event.describe()
        if what not in tasks:
            tasks[what] = bars.add_task(what, remark="")
        bars.update(tasks[what], completed=event.done, total=event.total, remark=event.remark)

    try:
        with listening(listen):
            yield
    finally:
        if tasks:
            bars.stop()


def _print_results(results: Results, as_json: bool, report: Path | None) -> None:
    if as_json:
        print(json.dumps(results.summary() | {"report": str(report) if report else None}))
        return
    from rich.markup import escape

    from .text import flatten

    console, table = _stdout(), results.table()
    heads = [test.replace("corrupted_", "corr.\n") for test in results.tests]
    tight = {"collapse_padding": True, "pad_edge": False}  # so that it fits a terminal of 80 columns
    shown = _table("method", *heads, "mean", "ms", title="Percent right, mean over clients", **tight)
    shown.columns[0].no_wrap = True
    for method, row in table.items():
        speeds = [each.ms_per_sample for each in results.rows if each.method == method]
        cells = [f"{row[test]:.1f}" if test in row else "-" for test in results.tests]
        average = f"{sum(row.values()) / len(row):.1f}"
        shown.add_row(method, *cells, average, f"{sum(speeds) / len(speeds):.2f}")
    console.print(shown)
    for note in results.notes:
        console.print(f"note: {escape(flatten(note, 500))}", soft_wrap=True)
    if results.reused:
        asked = len(results.config.methods) * len(results.config.seeds)
        console.print(f"{results.reused} of {asked} results were read from disk.", highlight=False)
    if results.earlier:
        console.print(
            f"Earlier results, which these do not replace, were moved to {escape(str(results.earlier))}.",
            soft_wrap=True,
        )
    folder = escape(str(results.folder))
    console.print(f"ms is per sample. {results.seconds:.0f} s; details are in {folder}", soft_wrap=True)
    _print_report(report)


@data.command("list")
def list_(as_json: Json = False) -> None:
    """What datasets there are, and which of them are at hand."""
    from .data import DATASETS, find

    # a dataset of the user's own lies where the user says, so there is no telling
    here = {name: None if source.lies == "path" else find(name) is not None for name, source in DATASETS.items()}
    rows = {name: {"about": source.about, "here": here[name]} for name, source in DATASETS.items()}
    if as_json:
        print(json.dumps(rows))
        return
    table = _table("dataset", "at hand", "what it is")
    for name, row in rows.items():
        table.add_row(name, {True: "yes", False: "no", None: "yours"}[here[name]], str(row["about"]))
    _stdout().print(table)


@data.command()
def fetch(
    name: Name,
    source: Annotated[str | None, typer.Option(help="Use only this source.")] = None,
    as_json: Json = False,
) -> None:
    """Download a dataset, check its content, and put it in place when it is whole."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from .data.fetch import fetch

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, console=_stderr())
    task = progress.add_task(f"fetching {name}", total=None)

    def show(done: int, total: int | None) -> None:
        progress.start()  # not before something comes: a refusal is one line
        progress.update(task, completed=done, total=total)

    try:
        path = fetch(name, source=source, progress=show)
    finally:
        if progress.live.is_started:
            progress.stop()
    print(json.dumps({"name": name, "path": str(path)}) if as_json else f"{name} is at {path}")


@data.command()
def verify(name: Name, as_json: Json = False) -> None:
    """Read a dataset whole and compare its content with what is published."""
    from .data import verify

    with _bars():
        report = verify(name)
    print(json.dumps(report.__dict__) if as_json else f"{name}: {report.sentence}")
    if not report.ok:
        raise typer.Exit(2)


@data.command()
def show(
    spec: Annotated[str, typer.Argument(help="A dataset of `fedthe data list`, or NAME:PATH, such as npz:mine.npz.")],
    clients: Clients = 20,
    dirichlet: Dirichlet = 0.1,
    seed: Seed = 0,
    partition: Annotated[str, typer.Option(help="balanced (all clients the same size) or unbalanced.")] = "balanced",
    severity: Annotated[int, typer.Option(help="How strong the corruptions are, 1 to 5.")] = 5,
    natural: Annotated[
        str | None,
        typer.Option(help="The natural shift: a name, npz:PATH, folder:PATH, or none.", show_default="its own"),
    ] = None,
    size: Annotated[int | None, typer.Option(help="Side in pixels, for images that come in other sizes.")] = None,
    frost: Annotated[str | None, typer.Option(help="A folder with the original frost photographs.")] = None,
    out: Out = Path("federation"),
    as_json: Json = False,
) -> None:
    """Turn a dataset into clients and test distributions, and draw both.

    SPEC is a name of `fedthe data list`, or NAME:PATH, such as npz:mine.npz or folder:photos.
    """
    from .data.plan import Settings

    settings = Settings(clients, dirichlet, seed, partition, severity, frost)  # type: ignore[arg-type]
    _show(spec, natural, size, settings, out, as_json)


def _show(spec: str, natural: str | None, size: int | None, settings: Any, out: Path, as_json: bool) -> None:
    from . import pictures
    from .data import load_dataset
    from .data.plan import build
    from .store import make_folder, write_json

    with _bars():
        dataset = load_dataset(spec, natural=natural, size=size)
        federation = build(dataset, settings)
        _ = federation.manifest  # reads the frost folder
        make_folder(out)  # what cannot be written is refused before the long part
        _ = federation.corrupted
        pictures.draw_clients(federation, out / "clients.png")
        pictures.draw_tests(federation, out / "tests.png")
        write_json(out / "manifest.json", federation.manifest)
    files = [str(out / name) for name in ("clients.png", "tests.png", "manifest.json")]
    if as_json:
        print(json.dumps(_summarize(federation) | {"files": files}))
    else:
        _print_federation(federation)
        _stdout().print(f"\npictures and manifest: {', '.join(files)}", soft_wrap=True, markup=False)


def _summarize(federation: Federation) -> dict[str, Any]:
    return {
        "dataset": federation.pool.name,
        "settings": federation.settings.__dict__,
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
    from rich.markup import escape

    from .text import clean

    console, pool, s = _stdout(), federation.pool, federation.settings
    height, width, channels = pool.images.shape[1:]
    console.print(
        f"[bold]{escape(clean(pool.name))}[/]: {len(pool):,} images of {height}x{width}x{channels}, "
        f"{len(pool.classes)} classes; "
        f"{s.clients} clients, {s.partition} Dirichlet({s.dirichlet:g}), seed {s.seed}\n"
    )
    holds = _table("client", "train", "val", "test", "holds", title="Who holds which classes")
    for k, split in enumerate(federation.clients[:40]):
        parts = (str(len(rows)) for rows in (split.train, split.val, split.test))
        holds.add_row(str(k), *parts, escape(_say_mix(federation.class_counts[k], pool.classes)))
    console.print(holds)
    if s.clients > 40:
        console.print(f"(and {s.clients - 40} clients more)")

    tests = _table("test distribution", "clients", "samples each", "samples", title="What they are tested on")
    for name, streams in federation.tests.items():
        sizes = [len(stream) for stream in streams if stream is not None]
        least, most = min(sizes, default=0), max(sizes, default=0)
        each = f"{least}" if least == most else f"{least} to {most}"
        label = name
        if name in federation.dataset.natural:
            label += f" ({clean(federation.dataset.natural[name].name)})"
        tests.add_row(escape(label), str(len(sizes)), each, f"{sum(sizes):,}")
    console.print(tests)
    for note in federation.notes:
        console.print(f"note: {escape(clean(note, 1000))}", soft_wrap=True)
    console.print(f"manifest {federation.manifest_hash}", soft_wrap=True)


def _say_mix(counts: Any, classes: tuple[str, ...], most: int = 4) -> str:
    """The largest shares of a class mix in words: 'cat 61 %, dog 22 %, 3 more'."""
    from .text import clean

    order = [c for c in (-counts).argsort(kind="stable") if counts[c]]
    percents = {c: round(100 * counts[c] / counts.sum()) for c in order[:most]}
    said = [f"{clean(classes[c], 30)} {percent or 'under 1'} %" for c, percent in percents.items()]
    return ", ".join(said + ([f"{len(order) - most} more"] if len(order) > most else []))


def _table(*columns: str, **options: Any) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table

    return Table(*columns, box=SIMPLE, title_justify="left", title_style="bold", **options)


def _stdout() -> Console:
    from rich.console import Console

    return Console()


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True)
