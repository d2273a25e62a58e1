"""`fedthe run` and `fedthe demo`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InputError
from ..terminal import resumable
from .common import (
    Json,
    Loggers,
    Mlflow,
    Overrides,
    Ray,
    RayCpus,
    Tensorboard,
    bars,
    on_ray,
    print_grid,
    print_report,
    print_rich,
)

if TYPE_CHECKING:
    from ..experiment.results import Results
    from ..report.data import Page
    from ..study.sweep import Sweep

MOST_FAILURES = 5  # of a sweep that are printed
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
    "methods": ["fedavg", "fedavg_ft", "fedthe", "fedthe_regime"],
    "samples": 100,
}


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder of the run.")] = Path("demo"),
    as_json: Json = False,
) -> None:
    """Train FedAvg, FedAvg+FT and FedTHE on embedded data, and test them and the regime filter under every shift."""
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
            "about as well on both. FedTHE weights a personal and a global head for each sample, without labels; the "
            "regime filter (fedthe_regime) does so by Bayes' rule, and follows the stream."
        )
        print(f"Deploy one of its clients: fedthe export {out} --method fedthe_regime --client 3 -o bundle")


def run(
    config: Annotated[str | None, typer.Argument(help="A TOML file, if any; --example prints one.")] = None,
    overrides: Overrides = None,
    example: Annotated[bool, typer.Option("--example", help="Print an example config file, and run nothing.")] = False,
    tensorboard: Tensorboard = None,
    mlflow: Mlflow = None,
    by_client: Annotated[
        bool, typer.Option("--by-client", help="The dataset's folder holds a folder per client: by_client=true.")
    ] = False,
    ray: Ray = None,
    ray_cpus: RayCpus = None,
    as_json: Json = False,
) -> None:
    """Run an experiment, or resume one that was stopped.

    CONFIG is a TOML file; `fedthe run --example > my.toml` writes one to start from. KEY=VALUE arguments override its
    settings, or do without a file: dataset=digits methods=fedthe,mine.py:FedPer seeds=0,1,2 hyper.fedthe.alpha=0.2
    out=FOLDER. `fedthe settings` lists all keys. sweep.KEY=A,B,C runs every value, in one table and one plot.
    """
    from ..config import make_config, read_example, read_settings
    from ..study.run import run

    if example:
        return print(read_example(), end="")
    words = [*(overrides or ()), *(["by_client=true"] if by_client else [])]
    if config is not None and "=" in config and not Path(config).exists():
        words, config = [config, *words], None
    if config is None and not words:
        raise InputError(
            "name a config file, or settings such as dataset=digits methods=fedavg; "
            "`fedthe run --example > my.toml` writes a file to start from."
        )
    loggers = Loggers(tensorboard, mlflow)
    settings = read_settings(Path(config) if config is not None else None, words)
    sweep = settings.pop("sweep", None)
    asked = make_config(settings)
    with resumable(), bars(), on_ray(ray, ray_cpus):
        results: Results | Sweep = run(asked) if sweep is None else run(asked, sweep=sweep)
    _show(results, loggers, as_json)
    if results.failures:
        raise typer.Exit(1)
    return None


def _show(results: Results | Sweep, loggers: Loggers, as_json: bool) -> None:
    from ..report.data import Page
    from ..report.gather import show_results
    from ..study.sweep import Sweep

    def make_page() -> Page:
        runs = results.runs.values() if isinstance(results, Sweep) else [results]
        shown = [show_results(each) for each in runs]
        return Page(shown[0].name if len(shown) == 1 else f"{len(shown)} experiments", shown)

    report = loggers.write_report(make_page, results.folder / "report.html")
    if as_json:
        print(json.dumps(results.summary() | {"report": str(report) if report else None}))
    else:
        _print_sweep(results) if isinstance(results, Sweep) else _print_results(results)
        print_report(report)


def _print_sweep(sweep: Sweep) -> None:
    from ..specs import say_plain
    from ..text import flatten

    tests, rows = sweep.tests, []
    for row in sweep.rows:
        values = [say_plain(row.values[key]) if key in row.values else "" for key in sweep.keys]
        cells = [f"{row.scores[test][0]:.1f}" if test in row.scores else "-" for test in tests]
        rows.append([row.method, *values, *cells, f"{row.mean:.1f}"])
    head, title = ["method", *sweep.keys, *_break_heads(tests), "mean"], "Accuracy in %, mean over clients"
    print_grid(head, rows, title, names=1 + len(sweep.keys))
    reused = sum(results.reused for results in sweep.runs.values())
    asked = sum(len(results.config.methods) * len(results.config.seeds) for results in sweep.runs.values())
    if reused:
        print(f"{reused} of {asked} results were read from disk.")
    for who, why in list(sweep.failures.items())[:MOST_FAILURES]:
        print(f"failed: {flatten(f'{who}: {why}', 500)}")
    if len(sweep.failures) > MOST_FAILURES:
        print(f"{len(sweep.failures) - MOST_FAILURES} more failed; sweep.json lists them.")
    seconds = sum(results.seconds for results in sweep.runs.values())
    place = sweep.folder / "sweep.png"
    print(f"The sweep took {seconds:.0f} s; the plot is {place}, its numbers are in sweep.csv and sweep.json.")


def _break_heads(heads: Sequence[str]) -> list[str]:
    """Narrow heads, so that more of them fit a terminal."""
    short = {"average": "mean"}
    return [short.get(head, head).replace("corrupted_", "corr.\n").replace(" AUROC", "\nAUROC") for head in heads]


def _print_group(results: Results, name: str) -> None:
    from ..experiment.notebook import lay_out
    from ..experiment.scores import GROUPS

    grid = lay_out(results)
    rows = [[method, *(cell.text.split(" ± ")[0] for cell in row)] for method, row in grid.rows]
    print_grid(["method", *_break_heads(grid.head)], rows, f"Clients that {GROUPS[name]}")


def _print_results(results: Results) -> None:
    from rich.text import Text

    from ..experiment.notebook import AUROC, DAGGER, lay_out
    from ..experiment.scores import GROUPS
    from ..experiment.tables import say_messages
    from ..text import flatten

    grid = lay_out(results)
    rows: list[list[str | Text]] = []
    which = f" that {GROUPS['trained']}" if results.config.unseen else ""
    for method, (name, row) in zip(results.table(), grid.rows, strict=True):
        speeds = [each.ms_per_sample for each in results.rows if each.method == method]
        cells = [Text(cell.text.split(" ± ")[0], "bold" if cell.bold else "") for cell in row]
        rows.append([name, *cells, f"{sum(speeds) / len(speeds):.2f}"])
    print_grid(["method", *_break_heads(grid.head), "ms"], rows, f"Accuracy in %, mean over clients{which}")
    for note in grid.notes:
        if note.startswith(("Bold", DAGGER, AUROC)):
            print(note)
    for name in results.groups[1:]:
        _print_group(results.group(name), name)
    for note in results.notes:
        print(f"note: {flatten(note, 500)}")
    if results.reused:
        asked = len(results.config.methods) * len(results.config.seeds)
        print(f"{results.reused} of {asked} results were read from disk.")
    if results.earlier:
        print(f"Earlier results that these do not replace were moved to {results.earlier}.")
    if size := say_messages(results.trainings.values()):
        print(f"Messages: {size}.")
    print(f"ms is per sample. The run took {results.seconds:.0f} s; its files are in {results.folder}")
