"""`fedthe run` and `fedthe demo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InputError
from ..terminal import resumable
from .common import Json, Loggers, Mlflow, Overrides, Tensorboard, bars, make_table, print_report, print_rich

if TYPE_CHECKING:
    from ..experiment.results import Results
    from ..report.data import Page

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
    "flip": False,  # mirrored letters are different letters
    "crop": 2,
    "lr": 0.1,
    "momentum": 0.5,
    "samples": 16,
}


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder of the run.")] = Path("demo"),
    as_json: Json = False,
) -> None:
    """Train FedAvg, FedAvg+FT, FedTHE and FedTHE+ on embedded data, and test them under every shift."""
    from ..config import make_config
    from ..experiment.run import run_prepared
    from ..experiment.work import prepare
    from ..pictures import draw_clients, draw_tests

    config = make_config(DEMO | {"out": str(out)})
    with resumable(), bars():
        methods, works = prepare(config)
        results = run_prepared(methods, works)
    draw_clients(works[0].federation, out / "clients.png")
    draw_tests(works[0].federation, out / "tests.png")
    _show(results, Loggers(), as_json)
    if not as_json:
        print_rich(
            "FedAvg+FT does well on its own client's data (original) and fails on other clients' (ooc); FedAvg does "
            "about as well on both. FedTHE weights a personal and a global head for each sample, without labels."
        )


def run(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; --example prints one.")] = None,
    overrides: Overrides = None,
    example: Annotated[bool, typer.Option("--example", help="Print an example config file, and run nothing.")] = False,
    tensorboard: Tensorboard = None,
    mlflow: Mlflow = None,
    as_json: Json = False,
) -> None:
    """Run an experiment, or resume one that was stopped.

    CONFIG is a TOML file; `fedthe run --example > my.toml` writes one to start from. KEY=VALUE arguments override its
    settings: rounds=10 methods=fedthe,ditto seeds=0,1,2 hyper.fedthe.alpha=0.2 out=FOLDER.
    """
    from ..config import read_config, read_example
    from ..experiment.run import run

    if example:
        return print(read_example(), end="")
    if config is None:
        raise InputError("name a config file; `fedthe run --example > my.toml` writes one to start from.")
    loggers = Loggers(tensorboard, mlflow)
    with resumable(), bars():
        results = run(read_config(config, overrides or ()))
    _show(results, loggers, as_json)
    if results.failures:
        raise typer.Exit(1)
    return None


def _show(results: Results, loggers: Loggers, as_json: bool) -> None:
    from ..report.data import Page
    from ..report.gather import show_results

    def make_page() -> Page:
        shown = show_results(results)
        return Page(shown.name, [shown])

    report = loggers.write_report(make_page, results.folder / "report.html")
    if as_json:
        print(json.dumps(results.summary() | {"report": str(report) if report else None}))
    else:
        _print_results(results)
        print_report(report)


def _print_results(results: Results) -> None:
    from ..text import flatten

    heads = [test.replace("corrupted_", "corr.\n") for test in results.tests]
    tight = {"collapse_padding": True, "pad_edge": False}  # fits a terminal of 80 columns
    table = make_table("method", *heads, "mean", "ms", title="Accuracy in %, mean over clients", **tight)
    table.columns[0].no_wrap = True
    for method, row in results.table().items():
        speeds = [each.ms_per_sample for each in results.rows if each.method == method]
        cells = [f"{row[test]:.1f}" if test in row else "-" for test in results.tests]
        average = f"{sum(row.values()) / len(row):.1f}"
        table.add_row(method, *cells, average, f"{sum(speeds) / len(speeds):.2f}")
    print_rich(table)
    for note in results.notes:
        print(f"note: {flatten(note, 500)}")
    if results.reused:
        asked = len(results.config.methods) * len(results.config.seeds)
        print(f"{results.reused} of {asked} results were read from disk.")
    if results.earlier:
        print(f"Earlier results that these do not replace were moved to {results.earlier}.")
    print(f"ms is per sample. The run took {results.seconds:.0f} s; its files are in {results.folder}")
