"""Run a table of the paper and record its numbers, with everything they depend on."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from .. import store
from ..data import load_dataset
from ..data.pool import Dataset
from ..errors import InputError
from ..experiment.results import Results
from ..experiment.run import run_prepared
from ..experiment.tables import find_short_streams, list_clients
from ..experiment.timelines import describe_streams
from ..experiment.work import Work, prepare
from ..methods.base import Method
from ..records import read_json
from ..statistics import count_effective, deviation
from ..text import flatten
from .tables import AVERAGE, SEEDS, Table, TableCase, fill_table, method_of, plan_cases, title_table

FORMAT = 1
# The paper's datasets and natural shifts, as our loaders name them. Numbers on others are not compared.
PAPER_SHIFTS = {"cifar10": {"cifar10.1-v6"}, "imagenet32": {"imagenet-a", "imagenet-r", "imagenet-v2"}}
# Digests of the decoded training images, because a name proves nothing. We have neither ImageNet-32 nor a natural shift
# of the paper, so their content is not checked, and the record says so.
PAPER_DIGESTS = {"cifar10": "52115a721773f77e52fc176838060b67ff1ff84c743c8bdf182ec0128043940d"}
# Settings that may differ from the paper's: where and how an experiment runs, and what is compared separately.
HOW = {"name", "out", "engine", "device", "precision", "threads", "tolerate", "checkpoint_seconds", "keep", "curve"}
FREE = HOW | {"methods", "dataset", "natural"}  # a dataset of another name is listed apart


def run_cases(cases: Sequence[TableCase]) -> list[tuple[TableCase, Results]]:
    """Run the cases of a table, which share a dataset, or read the results of those that have run."""
    first = cases[0].config
    dataset = load_dataset(first.dataset, natural=first.natural, size=first.size)
    return [(case, run_prepared(*prepare(case.config, dataset))) for case in cases]


def prepare_ahead(cases: Iterable[TableCase]) -> Iterator[tuple[dict[str, Method], list[Work]]]:
    """Cases as they will be run, for workers that would otherwise be idle.

    Cases that are refused are left out here, and raise when their turn comes.
    """
    held: tuple[tuple[Any, ...], Dataset] | None = None
    for config in (case.config for case in cases):
        source = config.dataset, config.natural, config.size
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they are heard then
                if held is None or held[0] != source:
                    held = source, load_dataset(config.dataset, natural=config.natural, size=config.size)
                prepared = prepare(config, held[1])
        except InputError:
            continue
        yield prepared


def make_record(table: Table, done: Sequence[tuple[TableCase, Results]]) -> dict[str, Any]:
    """`rows[method][test] = [mean, std over seeds]` as in the paper's tables, with everything they depend on."""
    rows = fill_table(table, [(case, results.scores()) for case, results in done])
    if not rows:
        reasons = sorted({why for _, results in done for why in results.failures.values()})
        raise InputError(f"nothing of {table.id} could be measured: {flatten('; '.join(reasons), 500)}.")
    columns = [column for column in table.columns if any(column in cells for cells in rows.values())]
    names = done[0][1].names
    return {
        "format": FORMAT,
        "id": table.id,
        "title": title_table(table, done[0][0].config),
        "columns": columns,
        "names": {column: names[column] for column in columns if column in names},
        "compared": find_comparable(table, done, columns),
        "unchecked": list_unchecked(done[0][1]),
        "changed": list_changes(table, done),
        "rows": {row: {column: [*cell] for column, cell in cells.items()} for row, cells in rows.items()},
        "effective_classes": count_classes(done[0][1]),
        "ddof": 1,  # standard deviations are with n - 1; records without this line have them with n
        "cases": [describe_case(case, results) for case, results in done],
        "environment": dict(done[0][1].environment),
    }


def check_place(path: Path, rows: Sequence[str] | None) -> None:
    """Refuse, before any work, to replace a record of another kind, or with other rows. rows: None for a figure."""
    if path.is_dir():
        raise InputError(f"{path} is a folder; name another place to save in.")
    try:
        held = store.read_sealed(path)
    except InputError:  # damaged: to be measured again
        held = None
    if held is None:
        return
    if ("rows" in held) != (rows is not None):
        raise InputError(f"{path} holds the {'table' if 'rows' in held else 'figure'} of that name; save elsewhere.")
    lost = [row for row in held.get("rows", ()) if row not in (rows or ())]
    if lost:
        named = f"{', '.join(lost[:3])}{f' and {len(lost) - 3} more' if len(lost) > 3 else ''}"
        raise InputError(f"{path} holds {named}, which this run does not measure; save elsewhere, or delete it first.")


def read_record(table: Table, folder: Path) -> dict[str, Any]:
    """What `make_record` gave, from its file."""
    path = folder / f"{table.id}.json"
    record = store.read_sealed(path)
    if record is None:
        raise InputError(f"{path} does not exist; run `fedthe table {table.id} --save {folder}`.")
    if (record.get("id"), record.get("format")) != (table.id, FORMAT):
        raise InputError(f"{path} is not a record of {table.id}; run `fedthe table {table.id} --save {folder}`.")
    return restate_deviations(record)


def restate_deviations(record: dict[str, Any]) -> dict[str, Any]:
    """A record whose standard deviations over seeds are with n - 1, from its clients; earlier ones have them with n."""
    rows = {row: dict(cells) for row, cells in record["rows"].items()}
    for case in record["cases"]:
        for column, test in case["columns"].items():
            for row, cells in rows.items():
                seeds = case["clients"].get(method_of(row), {}).get(test)
                if column in cells and seeds:
                    means = [fmean(each for each in percents if each is not None) for percents in seeds.values()]
                    cells[column] = [cells[column][0], deviation(means)]
    return record | {"rows": rows}


def find_comparable(table: Table, done: Sequence[tuple[TableCase, Results]], columns: Sequence[str]) -> list[str]:
    """The columns measured on the paper's data: by digest if it is known, else by name."""
    case, results = done[0]
    dataset = table.setting["dataset"]
    if not any(table.rows.values()):  # a table of our own
        return []
    if case.config.dataset.partition(":")[0] != dataset or dataset not in PAPER_SHIFTS:
        return []
    if dataset in PAPER_DIGESTS and results.digests.get("pool") != PAPER_DIGESTS[dataset]:
        return []
    papers, shifts = PAPER_SHIFTS[dataset], results.pools
    others = {test for test, shift in shifts.items() if shift not in papers}
    if set(shifts.values()) != papers:
        others.add("mixture")  # part of it is not the paper's, or is missing
    tests = {column: test for case, _ in done for column, test in case.columns.items()}
    alike = [column for column in columns if column in tests and tests[column] not in others]
    return [*alike, AVERAGE] if AVERAGE in columns and len(alike) == len(columns) - 1 else alike


def list_unchecked(results: Results) -> list[str]:
    """Datasets that have the name of the paper's, but whose digest we do not know."""
    dataset = results.config.dataset.partition(":")[0]
    pool = [dataset] if dataset in PAPER_SHIFTS and dataset not in PAPER_DIGESTS else []
    return [*pool, *(name for name in results.pools.values() if name in PAPER_SHIFTS.get(dataset, ()))]


def say_unchecked(names: Sequence[str]) -> str:
    return f"Compared by name: no digest of {', '.join(names)} is known, so its content was not checked."


def list_changes(table: Table, done: Sequence[tuple[TableCase, Results]]) -> dict[str, list[Any]]:
    """Settings that differ from the paper's, by name: ours and the paper's. More seeds than its three do not count."""
    dataset, papers_own = done[0][0].config.dataset, table.setting["dataset"]
    same = dataset.partition(":")[0] == papers_own  # wherever it lies
    changed: dict[str, list[Any]] = {} if same else {"dataset": [dataset, papers_own]}
    for (case, _), planned in zip(done, plan_cases(table), strict=True):
        ours, papers = (_list_settings(each.config.filled().as_dict()) for each in (case, planned))
        papers["seeds"] = ours["seeds"] if len(ours["seeds"]) >= len(SEEDS) else SEEDS
        apart = [key for key in ours | papers if key not in FREE and ours.get(key) != papers.get(key)]
        changed |= {key: [ours.get(key), papers.get(key)] for key in apart}
    return changed


def _list_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Each setting by the name that a command gives it, such as hyper.fedthe.alpha."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        inner = _list_settings(value) if isinstance(value, Mapping) else None
        found |= {key: value} if inner is None else {f"{key}.{name}": each for name, each in inner.items()}
    return found


def describe_case(case: TableCase, results: Results) -> dict[str, Any]:
    return {
        "columns": dict(case.columns),
        "config": results.config.as_dict(),
        "manifests": {str(seed): digest for seed, digest in results.manifests.items()},
        "notes": list(results.notes),
        "failures": dict(results.failures),
        "trainings": [dict(training) for training in results.trainings.values()],
        "clients": list_clients(results.rows),
        "statistics": {"weighted": results.weighted(), "nll": results.nll(), "ece": results.calibration()},
        "short": find_short_streams(results.rows),
        **({"streams": scores} if (scores := describe_streams(results)) else {}),
        "seconds": results.seconds,  # of this run, without what it reused
        "ms_per_sample": time_samples(results),
        "passes": {name: [each["forward"], each["backward"]] for name, each in results.costs.items()},  # per sample
    }


def count_classes(results: Results) -> dict[str, float]:
    """By seed: the effective classes of a client, the mean over clients. Without seeds whose manifest is missing."""
    manifests = {seed: read_json(results.folder / f"manifest-{seed}.json") for seed in results.manifests}
    return {
        str(seed): fmean(count_effective(client["classes"]) for client in manifest["clients"])
        for seed, manifest in manifests.items()
        if manifest is not None
    }


def time_samples(results: Results) -> dict[str, float]:
    """Milliseconds per sample by method, over all test streams."""
    spent: dict[str, float] = {}
    samples: dict[str, int] = {}
    for row in results.rows:
        answered = row.samples + row.unknown
        spent[row.method] = spent.get(row.method, 0.0) + row.ms_per_sample * answered
        samples[row.method] = samples.get(row.method, 0) + answered
    return {name: spent[name] / samples[name] for name in spent}
