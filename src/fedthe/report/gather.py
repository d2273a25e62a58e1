"""Gather what a report shows from the files of runs, tables and figures."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ..config import Config, make_config
from ..errors import InputError
from ..experiment.notebook import name_run
from ..experiment.results import NO_EXAMPLES, Results
from ..experiment.samples import read_samples
from ..experiment.scores import find_group
from ..experiment.tables import Means, Samples, find_calibration_errors, find_short_streams, list_clients
from ..names import name_method, name_test
from ..nets import NETS
from ..study.draw import describe_settings
from ..study.reproduce import FREE, find_comparable, list_unchecked, say_unchecked, time_samples
from ..study.show import list_remarks
from ..study.sweep import list_runs
from ..study.tables import SEVERITY, Table, TableCase, find_table, load_tables, method_of, plan_cases, title_table
from ..text import clean, hide_secrets
from .cells import number_names
from .data import Cost, Curve, Example, Losses, Page, Paper, Percents, Score, SeedClients, Shown
from .groups import call_group, gather_groups, say_group, sum_up
from .read import check_record, is_record, read_json, read_losses, read_manifest, read_run
from .samples import has_labels, pick_examples, score_heads, spread_weights
from .streams import gather_streams, read_streams
from .wrong import explain

ByClient = Mapping[str, Mapping[str, Mapping[str, Percents]]]  # by method, test and seed


def gather(paths: Sequence[Path]) -> Page:
    """A page of runs, given as folders, and of tables and figures, given as records or folders of records."""
    shown: list[Shown] = []
    figures: list[Mapping[str, Any]] = []
    notes: list[str] = []
    for path in [run for given in paths for run in list_runs(given) or [given]]:
        if (path / "config.json").exists():
            results, left_out = read_run(path)
            run = show_results(results)
            shown.append(replace(run, notes=[*left_out, *run.notes]))
            continue
        files = _list_files(path)
        values = {file: read_json(file) for file in files}
        known = {file: value for file, value in values.items() if is_record(value)}
        if not known:
            raise InputError(explain(path))
        notes += [f"{file} is left out: it is not a record of a table or a figure." for file in values.keys() - known]
        for file, value in known.items():
            record = check_record(value, file)
            if "data" in record:
                figures.append(record)
            else:
                shown.append(show_record(record))
    names = [each.name for each in shown] or [str(each["title"]) for each in figures]
    several = f"{len(names)} {'experiments' if shown else 'figures'}"
    apart = [replace(each, name=name) for each, name in zip(shown, number_names(names), strict=False)]
    return Page(names[0] if len(names) == 1 else several, apart, figures, sorted(notes))


def _list_files(path: Path) -> list[Path]:
    """The file, or those files of a folder and of its folder `figures` that may be records."""
    files = sorted([*path.glob("*.json"), *path.glob("figures/*.json")]) if path.is_dir() else []
    if not files and (path.suffix != ".json" or not path.is_file()):
        raise InputError(explain(path))
    if not files and (path.parent / "config.json").is_file():
        raise InputError(explain(path))  # a part of a run
    return files or [path]


def show_results(results: Results) -> Shown:
    """All that is known of a run."""
    config, folder = results.config, results.folder
    samples = read_samples(results)
    clients = list_clients(results.rows)
    more = {"weighted": results.weighted(), "nll": results.nll(), "ece": find_calibration_errors(samples)}
    ms = time_samples(results)
    manifests = {seed: read_manifest(folder, seed, digest) for seed, digest in results.manifests.items()}
    losses = {key: read_losses(results.store, key) for key in results.trainings}
    examples = pick_examples(results, samples)
    shown = Shown(
        name=name_run(results),
        sentence=_say_what_ran(config, results.methods, results.environment) + say_group(results),
        methods={method: name_method(method) for method in results.methods},
        tests=_name_tests(results.tests, results.names),
        seeds=list(config.seeds),
        scores=_score(clients, more),
        short=find_short_streams(results.rows),
        streams=gather_streams(samples, results.tests, results.rejection()),
        groups=gather_groups(results),
        costs={
            method: Cost(ms.get(method), *map(results.costs.get(method, {}).get, ("forward", "backward")))
            for method in results.methods
        },
        paper=find_paper(results),
        classes=next((manifest["pool"]["classes"] for manifest in manifests.values() if manifest), []),
        clients={
            str(seed): SeedClients(
                [client["classes"] for client in manifest["clients"]] if manifest else [],
                _pick_seed(clients, seed),
                {
                    method: heads
                    for method in results.methods
                    if (heads := score_heads(samples.get((method, seed), {}), results.tests, config.client_count))
                },
            )
            for seed, manifest in manifests.items()
        },
        weights={
            method: weights
            for method in results.methods
            if (weights := spread_weights([kept for (name, _), kept in samples.items() if name == method]))
        },
        losses=[
            Losses(about["methods"], about["seed"], losses[key])
            for key, about in results.trainings.items()
            if losses[key]
        ],
        curves=_draw_curves(results),
        examples=examples,
        notes=[*results.notes, *_note_missing(results, samples, manifests, losses, examples)],
        failures=dict(results.failures),
        provenance={
            "command": hide_secrets(str(results.environment.get("command", ""))),
            "python": write_call(config) + call_group(results),
            "seconds": results.seconds,
            "environment": _hide(results.environment),
            "config": config.as_dict(),
            "manifests": {str(seed): digest for seed, digest in results.manifests.items()},
            "trainings": list(results.trainings.values()),
        },
    )
    # clients that joined after training have no part in its curves
    return shown if find_group(results.rows) == "trained" else replace(shown, losses=[], curves={})


def _note_missing(
    results: Results,
    samples: Mapping[tuple[str, int], Samples],
    manifests: Mapping[int, Mapping[str, Any] | None],
    losses: Mapping[str, Sequence[float]],
    examples: Sequence[Example],
) -> list[str]:
    """What is missing, and why."""
    notes = []
    missing = [f"{method}, seed {seed}" for (method, seed), kept in samples.items() if not has_labels(kept)]
    if missing:
        notes.append(
            f"No per-sample data of {'; '.join(missing)}: files in answers or samples are missing, damaged or of an "
            "earlier version. Run the same command again, which trains nothing."
        )
    elif samples and not examples and results.examples["file"] != NO_EXAMPLES:
        notes.append(f"There are no examples: examples/{results.examples['file']}.npz is missing or damaged.")
    seeds = [str(seed) for seed, manifest in manifests.items() if manifest is None]
    if seeds:
        notes.append(
            f"No class mix of seed {', '.join(seeds)}: the manifest is missing, damaged or of another run in the same "
            "folder."
        )
    trained = [key for key, about in results.trainings.items() if "failed" not in about]
    lost = [key for key in trained if not losses[key]]
    if lost:
        notes.append(f"No loss curve of {len(lost)} of {len(trained)} trainings: the checkpoint is missing or damaged.")
    return notes


def show_record(record: Mapping[str, Any], results: Results | None = None) -> Shown:
    """A table of the paper from its record; with `results`, the run of its only case, all that the run knows."""
    table, cases = find_table(record["id"]), record["cases"]
    clients: dict[str, dict[str, Any]] = {}
    more: dict[str, dict[str, dict[str, float]]] = {}
    short: dict[str, str] = {}
    for case in cases:
        # each severity is a column; otherwise all tests are, not only the paper's columns
        every = dict.fromkeys(test for tests in case["clients"].values() for test in tests)
        columns = case["columns"] if len(cases) > 1 else {test: test for test in every}

        def pick(tests: Mapping[str, Any], columns: Mapping[str, str] = columns) -> dict[str, Any]:
            return {column: tests[test] for column, test in columns.items() if test in tests}

        for method, tests in case["clients"].items():
            clients.setdefault(method, {}).update(pick(tests))
        for name, table_of in case.get("statistics", {}).items():
            for method, tests in table_of.items():
                more.setdefault(name, {}).setdefault(method, {}).update(pick(tests))
        short |= pick(case.get("short", {}))
    first = cases[0]
    config = make_config(first["config"])
    titles = {method_of(row): row for row in record["rows"] if row.startswith("(")}  # of ablations
    methods = [method for method in config.specs if method in clients]
    tests = list(dict.fromkeys(test for method in methods for test in clients[method]))
    bare = Shown(
        name=table.id,
        sentence=_say_what_ran(config, methods, record["environment"], title_table(table, config)),
        methods={method: titles.get(method) or name_method(method) for method in methods},
        tests=_name_tests(tests, record["names"]),
        seeds=list(config.seeds),
        scores=_score(clients, more),
        short=short,
        streams=read_streams(first.get("streams", {})),
        costs={method: Cost(ms) for method, ms in first["ms_per_sample"].items()},
        paper=_take_paper(table, record["compared"], list_remarks(record)),
        clients={str(seed): SeedClients([], _pick_seed(clients, seed), {}) for seed in config.seeds},
        notes=list(dict.fromkeys(note for case in cases for note in case["notes"])),
        failures={who: why for case in cases for who, why in case["failures"].items()},
        provenance={
            "command": _find_command(record, config),
            "seconds": sum(case["seconds"] for case in cases) if all("seconds" in case for case in cases) else None,
            "environment": _hide(record["environment"]),
            "config": first["config"],
            "manifests": first["manifests"],
            # cases share trainings, which are then equal in all fields
            "trainings": list({json.dumps(each): each for case in cases for each in case["trainings"]}.values()),
        },
    )
    if results is None or len(cases) > 1:
        return bare
    known = show_results(results)
    taken = ("costs", "classes", "clients", "weights", "losses", "curves", "examples", "streams")
    return replace(bare, **{name: getattr(known, name) for name in taken})


def _find_command(record: Mapping[str, Any], config: Config) -> str:
    """The command as typed, or one that runs the table if the record has none."""
    command = str(record["environment"].get("command", ""))
    if command not in ("", "fedthe"):
        return hide_secrets(command)
    return shlex.join(["fedthe", "table", record["id"], *([f"natural={config.natural}"] if config.natural else [])])


def find_paper(results: Results) -> Paper | None:
    """The paper's numbers for a run with the settings of one or more of its tables."""
    found: list[Paper] = []
    dataset, _, _ = results.config.dataset.partition(":")
    for table in load_tables().values():
        if table.columns[0].startswith(SEVERITY) or table.setting["dataset"] != dataset:
            continue
        if _settings(results.config) == _settings(plan_cases(table)[0].config):
            case = TableCase(results.config, {test: test for test in table.tests})
            found.append(_take_paper(table, find_comparable(table, [(case, results)], table.tests), []))
    if not found:
        return None
    cells: dict[str, dict[str, tuple[float, float]]] = {}
    for paper in found:
        for method, row in paper.cells.items():
            cells[method] = {**row, **cells.get(method, {})}
    apart = [test for test in results.tests if not any(test in row for row in cells.values())]
    remarks = [f"Not compared, because not in the paper or not on its data: {', '.join(apart)}."] if apart else []
    if cells and (unchecked := list_unchecked(results)):
        remarks.append(say_unchecked(unchecked))
    if results.config.seeds != (0, 1, 2):
        remarks.append("The paper's numbers are means of three seeds.")
    return replace(found[0], cells=cells, remarks=remarks)


def _settings(config: Config) -> dict[str, Any]:
    return {key: value for key, value in config.filled().as_dict().items() if key not in FREE | {"seeds", "tests"}}


def _take_paper(table: Table, compared: Iterable[str], remarks: Sequence[str]) -> Paper:
    columns = list(compared)
    rows = {
        method_of(row): {column: cells[column] for column in columns if column in cells}
        for row, cells in table.rows.items()
    }
    return Paper(table.id, table.title, {method: row for method, row in rows.items() if row}, list(remarks))


def _say_what_ran(config: Config, methods: Sequence[str], environment: Mapping[str, Any], title: str = "") -> str:
    count = f"{len(methods)} method{'s' if len(methods) != 1 else ''}"
    where = f"; device {environment['device']}" if environment.get("device") else ""
    return f"{f'{title}: ' if title else ''}{count} on {describe_settings(config.as_dict())}{where}."


def _name_tests(tests: Iterable[str], names: Mapping[str, str]) -> dict[str, str]:
    return {test: clean(names[test]) if test in names else name_test(test) for test in tests}


def _score(clients: ByClient, more: Mapping[str, Means] | None = None) -> dict[str, dict[str, Score]]:
    """`more`: tables of other fields of a score."""

    def score(method: str, test: str, seeds: Mapping[str, Percents]) -> Score:
        others = {name: table.get(method, {}).get(test) for name, table in (more or {}).items()}
        return replace(sum_up(seeds), **others)  # type: ignore[arg-type]  # these fields may be None

    return {
        method: {test: score(method, test, seeds) for test, seeds in tests.items()} for method, tests in clients.items()
    }


def _pick_seed(clients: ByClient, seed: int) -> dict[str, dict[str, Percents]]:
    return {
        method: {test: seeds[str(seed)] for test, seeds in tests.items() if str(seed) in seeds}
        for method, tests in clients.items()
    }


def _draw_curves(results: Results) -> dict[str, dict[str, Curve]]:
    if not results.curves:
        return {}
    last = results.scores()
    several = len(results.config.seeds) > 1  # older files have 0 for a single seed
    points = {**results.curves, results.config.rounds: last}

    def draw(method: str, test: str) -> Curve:
        at = {rounds: scores[method][test] for rounds, scores in points.items() if test in scores.get(method, {})}
        means, stds = zip(*at.values(), strict=True)
        return Curve(list(at), means, stds if several else [None] * len(at))

    return {method: {test: draw(method, test) for test in tests} for method, tests in last.items()}


def _hide(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Hide secrets: earlier versions kept commands as typed."""
    return {name: hide_secrets(value) if isinstance(value, str) else value for name, value in environment.items()}


def write_call(config: Config) -> str:
    """The Python call that repeats a run, with every setting that is not the default."""
    default = Config()
    names = [each.name for each in fields(Config) if each.name != "out"]
    given = {name: repr(value) for name in names if (value := getattr(config, name)) != getattr(default, name)}
    if config.net not in NETS and ":" not in config.net:
        given["net"] = "..."  # it was given as an object
    if config.partition == "given" and ":" not in config.dataset:
        for name in ("dataset", "partition", "clients"):
            given.pop(name, None)
        given = {"federation": "..."} | given
    return f"fedthe.run({', '.join(f'{name}={value}' for name, value in given.items())})"
