"""`fedthe table` and `fedthe figure`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError
from ..terminal import resumable, say
from .common import (
    Json,
    Loggers,
    Mlflow,
    Overrides,
    Ray,
    RayCpus,
    Tensorboard,
    Trainings,
    Yes,
    bars,
    on_ray,
    print_grid,
    print_report,
)

if TYPE_CHECKING:
    from ..experiment.on_ray import RayWorkers
    from ..study.tables import Table, TableCase

    Chosen = list[tuple[Table, list[str]]]  # tables with the methods of their rows; none means all


def table(
    id: Annotated[str | None, typer.Argument(help="A table of the paper, such as main-dir0.1.")] = None,
    overrides: Overrides = None,
    every: Annotated[bool, typer.Option("--all", help="All tables.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Print what it would cost, and run nothing.")] = False,
    methods: Annotated[str | None, typer.Option(help="Only these: rows, other methods, mine.py:NAME.")] = None,
    seeds: Annotated[str | None, typer.Option(help="The seeds.", show_default="0,1,2; 0 to 7 for main tables")] = None,
    rounds: Annotated[int | None, typer.Option(help="The number of rounds.", show_default="the paper's")] = None,
    out: Trainings = Path("runs/paper"),
    save: Annotated[Path | None, typer.Option(help="Write the record to this folder, as ID.json.")] = None,
    show: Annotated[Path | None, typer.Option(help="Show the record in this folder, and run nothing.")] = None,
    yes: Yes = False,
    tensorboard: Tensorboard = None,
    mlflow: Mlflow = None,
    ray: Ray = None,
    ray_cpus: RayCpus = None,
    as_json: Json = False,
) -> None:
    """Run a table of the paper, and show our numbers beside the paper's. Without ID, list the tables.

    KEY=VALUE arguments override other settings: natural=npz:FILE dataset=glyphs device=cuda samples=100. The same
    command resumes a table that was stopped, and tables share their trainings.
    """
    from ..config import read_words
    from ..store import check_folder
    from ..study.ask import ask_for_tables
    from ..study.tables import find_table, pick_tables

    if id is not None and "=" in id:  # a setting, not a table
        overrides, id = [id, *(overrides or [])], None
    if every and id is not None:
        raise InputError("name a table or give --all, not both.")
    given = {"methods": methods, "seeds": seeds, "rounds": rounds}
    words = [*(f"{key}={value}" for key, value in given.items() if value is not None), *(overrides or ())]
    if not every and id is None:
        if words or plan or save or show or ray:
            raise InputError("name a table, or give --all; `fedthe table` lists them.")
        return list_tables(as_json)
    if show and words:
        raise InputError("--show prints a record as it was measured; leave out either the settings or --show.")
    settings = {"out": str(out)} | read_words(words)
    rows = settings.pop("methods", [])
    tables = pick_tables(rows) if every else [(find_table(str(id)), rows)]
    if plan:
        return _print_bills(tables, settings, as_json)
    if show:
        return _show_records([each for each, _ in tables], show, as_json, every)
    if not yes and ray is None:  # nobody knows how fast a cluster is
        ask_for_tables(tables, **settings)
    if save:
        check_folder(save)  # fail now, not after the long part
    loggers = Loggers(tensorboard, mlflow)
    with resumable(), on_ray(ray, ray_cpus) as workers:
        done = _run_tables(tables, settings, save, loggers, workers, skip=every, quiet=as_json)
    if as_json:
        print(json.dumps(done if every else done[str(id)]))
    return None


def list_tables(as_json: bool) -> None:
    from ..study.tables import OWN_TABLES, load_tables

    tables = load_tables() | OWN_TABLES
    if as_json:
        print(json.dumps({name: {"title": each.title, "rows": list(each.rows)} for name, each in tables.items()}))
    else:
        rows = [[name, each.title, str(len(each.rows))] for name, each in tables.items()]
        print_grid(["table", "what it is", "rows"], rows, names=2)


def _print_bills(tables: Chosen, settings: dict[str, Any], as_json: bool) -> None:
    from dataclasses import asdict

    from ..bench.machine import describe_machine
    from ..bench.result import read_baseline
    from ..engine.pick import pick_engine
    from ..study.bill import bill_tables
    from ..study.show import lay_out_bills

    bench = read_baseline(describe_machine(pick_engine(device=settings.get("device", "auto")).device))
    bills = bill_tables(tables, bench, **settings)
    if as_json:
        print(json.dumps({name: asdict(bill) for name, bill in bills.items()}))
        return
    print_grid(*lay_out_bills(bills))
    known = "estimated from `fedthe bench --remember`" if bench else "unknown: run `fedthe bench --remember`"
    print(f"Each row is what it adds to the rows above, including work that is already done. Time here is {known}.")


def _run_tables(
    tables: Chosen,
    settings: dict[str, Any],
    save: Path | None,
    loggers: Loggers,
    workers: RayWorkers | None,
    skip: bool,
    quiet: bool,
) -> dict[str, Any]:
    """The records by table. `skip`: leave out tables without data; `quiet`: print none of them."""
    from ..data import find
    from ..study.reproduce import check_place, prepare_ahead
    from ..study.tables import pick_rows, plan_cases

    for table, rows in tables:
        if save:
            check_place(save / f"{table.id}.json", pick_rows(table, rows))
    plans = []
    for table, rows in tables:
        dataset = table.setting["dataset"]
        if skip and "dataset" not in settings and find(dataset) is None:
            say(f"skipping {table.id}: {dataset} is not available.")
        else:
            plans.append((table, plan_cases(table, rows, **settings)))
    if workers:
        workers.look_ahead(prepare_ahead([case for _, cases in plans for case in cases][1:]))
    done: dict[str, Any] = {}
    for table, cases in plans:
        record, report = _reproduce(table, cases, save, loggers)
        done[table.id] = record | {"report": str(report) if report else None}
        if not quiet:
            _print_record(table, record)
            print_report(report)
    return done


def _reproduce(
    table: Table, cases: list[TableCase], save: Path | None, loggers: Loggers
) -> tuple[dict[str, Any], Path | None]:
    from ..report.data import Page
    from ..report.gather import show_record
    from ..store import write_sealed
    from ..study.reproduce import make_record, run_cases

    with resumable(), bars():
        done = run_cases(cases)
    record = make_record(table, done)
    if save:
        write_sealed(save / f"{table.id}.json", record)
    place = (save or cases[0].config.folder) / f"{table.id}.html"
    return record, loggers.write_report(lambda: Page(table.id, [show_record(record, done[0][1])]), place)


def _show_records(tables: list[Table], folder: Path, as_json: bool, every: bool) -> None:
    """The record of the named table, which must exist, or with `every` all records that exist."""
    from ..study.reproduce import read_record

    there = [table for table in tables if not every or (folder / f"{table.id}.json").exists()]
    if not there:
        raise InputError(f"{folder} holds no record of a table.")
    found = {table.id: read_record(table, folder) for table in there}
    if as_json:
        print(json.dumps(found if every else found[there[0].id]))
        return
    for table in there:
        _print_record(table, found[table.id])


def _print_record(table: Table, record: dict[str, Any]) -> None:
    from ..config import make_config
    from ..study.show import lay_out, list_remarks, say_spread
    from ..study.streams import lay_out_streams
    from ..study.tables import title_table

    below = "; below, the paper's and the difference" if record["compared"] else ""
    title = title_table(table, make_config(record["cases"][0]["config"]))
    named = title if title.startswith(table.id) else f"{table.id}: {title}"
    print_grid(*lay_out(table, record), title=f"{named}\n{say_spread(record)}{below}")
    for title, grid in lay_out_streams(record).items():
        print_grid(*grid, title=title)
    for remark in list_remarks(record):
        print(remark)


def figure(
    id: Annotated[str | None, typer.Argument(help="A figure of the paper, such as curves-dir0.1.")] = None,
    overrides: Overrides = None,
    seeds: Annotated[str | None, typer.Option(help="The seeds.", show_default="0,1,2")] = None,
    out: Trainings = Path("runs/paper"),
    save: Annotated[Path, typer.Option(help="The folder for ID.json and ID.png.")] = Path("figures"),
    redraw: Annotated[bool, typer.Option("--redraw", help="Draw ID.json again, and measure nothing.")] = False,
    yes: Yes = False,
) -> None:
    """Measure and draw a figure of the paper. Without ID, list the figures.

    KEY=VALUE arguments override settings: natural=npz:FILE rounds=10 samples=100 device=cuda.
    """
    from ..config import read_words
    from ..store import check_folder, read_sealed, write_sealed
    from ..study.ask import ask_for_figure
    from ..study.figures import FIGURES, draw_figure, find_figure, measure_figure
    from ..study.reproduce import check_place

    if id is None and not redraw:
        return print_grid(["figure", "what it shows"], [[name, each.title] for name, each in FIGURES.items()], names=2)
    if id is None or "=" in id:
        raise InputError("name a figure; `fedthe figure` lists them.")
    find_figure(id)
    words = [*([f"seeds={seeds}"] if seeds is not None else []), *(overrides or ())]
    if redraw and words:
        raise InputError("--redraw draws what was measured; leave out either the settings or --redraw.")
    settings = {"out": str(out)} | read_words(words)
    path = save / f"{id}.json"
    if redraw:
        measured = read_sealed(path) or {}
        if not {"title", "config", "tests", "data"} <= measured.keys() or measured.get("id") != id:
            raise InputError(f"{path} does not hold {id}; leave out --redraw to measure it.")
    else:
        if not yes:
            ask_for_figure(id, **settings)
        check_folder(save)  # fail now, not after the long part
        check_place(path, None)
        with resumable(), bars():
            measured = measure_figure(id, **settings)
        write_sealed(path, measured, indent=None)  # thousands of numbers, so not one per line
    draw_figure(measured, path.with_suffix(".png"))
    print(f"written to {path.with_suffix('.png')}, with its numbers in {path.name}")
    return None
