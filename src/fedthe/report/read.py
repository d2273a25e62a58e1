"""Read and check the files of runs, tables and figures. Reports read files only through this module.

Damaged results are refused. Damaged files that only add to them are left out, with a note.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from .. import records, store
from ..config import make_config
from ..errors import InputError
from ..experiment.results import Results, read_results
from ..study.figures.base import restate_figure
from ..study.reproduce import FORMAT, restate_deviations
from ..study.tables import find_table, method_of
from ..text import flatten, hide_secrets
from .shapes import AMOUNT, COUNT, NAME, PERCENT, PLAIN, SCALAR, TEXT, Malformed, Maybe, Number, check

MOST = 2**31  # samples of a stream
LARGEST = 4096  # pixels of a side of an example

TRAINING = {
    "seed": COUNT,
    "methods": [NAME],
    "rounds?": COUNT,
    "seconds?": Maybe(AMOUNT),
    "message_bytes?": COUNT,
    "failed?": TEXT,
}
ENVIRONMENT = {str: PLAIN}
SUMMARY = {
    "results?": {str: {str: PERCENT}},
    "worst_client?": {str: {str: PERCENT}},
    "costs": {str: {str: Maybe(AMOUNT)}},
    "failures": {str: TEXT},
    "trainings": {str: TRAINING},
    "notes": [TEXT],
    "names": {str: TEXT},
    "pools": {str: TEXT},
    "curves": {str: {str: {str: [Maybe(PERCENT)]}}},
    "answers": [NAME],
    "manifests": {str: NAME},
    "seconds": AMOUNT,
}
EXAMPLES = {"seed": COUNT, "file": NAME}
CONFIG = {"hyper?": {str: {str: PLAIN}}, "clients?": Number(1, 10**6, whole=True), "seeds?": PLAIN}
MANIFEST = {"pool": {"classes": [TEXT]}, "clients": [{"classes": [COUNT]}]}
ESTIMATE = {"mean": Number(-100, 100), "low": Maybe(Number()), "high": Maybe(Number())}
PHASE = {name: Maybe(AMOUNT) for name in ("steady", "recovery", "recovery_low", "recovery_high")}
STREAM = {
    "accuracy": ESTIMATE,
    "worst_window": Maybe(ESTIMATE),
    "worst_client": Maybe(PERCENT),
    "forgetting": Maybe(ESTIMATE),
    "phases": {str: {"accuracy": PERCENT, **PHASE, "lost": Maybe(Number())}},
    "auroc": Maybe(PERCENT),
    "fpr95": Maybe(PERCENT),
}
CASE = {
    "columns": {str: NAME},
    "config": CONFIG,
    "manifests": {str: NAME},
    "notes": [TEXT],
    "failures": {str: TEXT},
    "trainings": [TRAINING],
    "clients": {str: {str: {str: [Maybe(PERCENT)]}}},
    "statistics?": {f"{name}?": {str: {str: Number(0, 1e300)}} for name in ("weighted", "nll", "ece")},
    "short?": {str: TEXT},
    "streams?": {str: {str: STREAM}},
    "seconds?": Maybe(AMOUNT),
    "ms_per_sample": {str: AMOUNT},
    "passes?": {str: [AMOUNT]},
}
RECORD = {
    "format": COUNT,
    "id": NAME,
    "columns": [NAME],
    "names": {str: TEXT},
    "compared": [NAME],
    "changed": {str: [PLAIN]},
    "rows": {str: {str: [Maybe(AMOUNT)]}},
    "effective_classes?": {str: AMOUNT},
    "cases": [CASE],
    "environment": ENVIRONMENT,
}
SERIES = {"mean": [Maybe(PERCENT)], "std?": [Maybe(AMOUNT)]}
SINGLE = {"mean": PERCENT, "std?": Maybe(AMOUNT)}
TIMED = {"positions": [COUNT], "mean": [PERCENT], "std": Maybe([AMOUNT]), "segments": [Maybe(PERCENT)]}
DRAWN: dict[str, Any] = {  # figures that the page draws, by the prefix of their ids
    "alpha-beta": {"alpha": [AMOUNT], "beta": [AMOUNT], "accuracy": {str: {"mean": [[Maybe(PERCENT)]]}}},
    "interpolation-": {"e": [AMOUNT], "shared": {str: SERIES}, "best": {str: SINGLE}, "fedthe": {str: SINGLE}},
    "curves-": {"rounds": [COUNT], "curves": {str: {str: SERIES}}},
    "streams": {"streams": {str: {"bands": [[SCALAR]], "curves": {str: TIMED}}}},
}
FIGURE_CONFIG = {
    "dataset": TEXT,
    "net": NAME,
    "clients": COUNT,
    "dirichlet": Maybe(AMOUNT),
    "partition?": Maybe(NAME),
    "shards?": Maybe(COUNT),
    "rounds": COUNT,
    "seeds": [COUNT],
    "samples": Maybe(COUNT),
    "standardize?": PLAIN,
}
FIGURE = {"id": NAME, "title": TEXT, "config": FIGURE_CONFIG, "tests": {str: TEXT}}


def read_json(path: Path) -> Any:
    """As `records.read_json`, but only from a regular file: reading a pipe would block."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is not a regular file.")
    try:
        return records.read_json(path)
    except InputError as error:  # its advice, to delete the file, only helps a run
        why = flatten(error.__context__ or error, 200)
        raise InputError(f"{path} is damaged ({why}); run the command that wrote it again.") from None


def read_run(folder: Path) -> tuple[Results, list[str]]:
    """The results of a run, and notes on what is left out."""
    notes = []
    try:
        summary, config = (read_json(folder / f"{name}.json") for name in ("summary", "config"))
        if summary is not None and config is not None:  # else read_results says what is missing
            summary = check(summary, SUMMARY, "summary.json")
            check(config, CONFIG, "config.json")
        results = read_results(folder)
        check(results.examples, EXAMPLES, "summary.json.examples")
        _check_names(results)
        _check_rows(results)
        _check_tables(results, summary)
    except (InputError, Malformed, RecursionError, OverflowError) as error:  # OverflowError: a number of many digits
        again = "" if isinstance(error, InputError) else "; run it again, which trains nothing"
        why = flatten(error, 400).rstrip(".")
        raise InputError(f"{why if why.startswith(str(folder)) else f'{folder}: {why}'}{again}.") from None
    try:
        environment = check(results.environment, ENVIRONMENT, "environment.json")
    except Malformed as error:
        environment = {}
        notes.append(f"Versions and device are not shown: {error}.")
    return replace(results, environment=environment), notes


def _check_names(results: Results) -> None:
    """File names must not lead out of the run's folder."""
    for name in (*results.answers, *results.trainings, results.examples["file"]):
        if not re.fullmatch(r"[\w.+=,() -]+", name) or name.startswith("."):
            raise Malformed(f"summary.json names the file {flatten(name, 40)!r}")


def _check_rows(results: Results) -> None:
    """Rows must be consistent, match the settings, and appear once."""
    config, known = results.config, results.config.specs
    places: dict[tuple[str, int], set[tuple[str, int]]] = {}
    for i, row in enumerate(results.rows, 1):
        where = f"line {i} of results.jsonl"
        check(vars(row), _ROW, where)
        if row.method not in known or row.seed not in config.seeds or row.client >= config.client_count:
            raise Malformed(f"{where} has a method, seed or client that config.json does not name")
        if row.right > row.samples or not math.isclose(row.accuracy, 100 * row.right / row.samples, abs_tol=1e-6):
            raise Malformed(f"{where} has {row.right} of {row.samples} correct, but accuracy {row.accuracy}")
        streams = places.setdefault((row.method, row.seed), set())
        if (row.test, row.client) in streams:
            raise Malformed(f"{where} repeats an earlier one")
        streams.add((row.test, row.client))
    for (method, seed), streams in places.items():
        if any(streams != others for (_, other), others in places.items() if other == seed):
            raise Malformed(f"results.jsonl lacks rows of seed {seed} for {method} or another method")


_ROW = {
    "method": NAME,
    "seed": COUNT,
    "test": NAME,
    "client": COUNT,
    "samples": Number(1, 2**53, whole=True),
    "right": COUNT,
    "accuracy": PERCENT,
    "ms_per_sample": AMOUNT,
    "nll?": Maybe(Number(0, 1e300)),
}


def _check_tables(results: Results, summary: Mapping[str, Any]) -> None:
    """The tables of summary.json must follow from the rows."""
    for name, ours in (("results", results.table()), ("worst_client", results.worst())):
        theirs = summary.get(name, ours)
        same = {(m, t) for m, row in ours.items() for t in row} == {(m, t) for m, row in theirs.items() for t in row}
        if not same or any(abs(ours[m][t] - theirs[m][t]) > 1e-6 for m in ours for t in ours[m]):
            raise Malformed(f"results.jsonl contradicts {name!r} of summary.json")


def read_manifest(folder: Path, seed: int, digest: str) -> dict[str, Any] | None:
    """The manifest of a seed; None if it is missing, damaged, or of another run in the same folder."""
    try:
        manifest = read_json(folder / f"manifest-{seed}.json")
        if store.content_hash(manifest) != digest:
            return None
        checked: dict[str, Any] = check(manifest, MANIFEST, "manifest")
    except (InputError, Malformed, RecursionError):
        return None
    classes = checked["pool"]["classes"]
    return checked if all(len(client["classes"]) == len(classes) for client in checked["clients"]) else None


def read_losses(folder: Path, training: str) -> list[float]:
    """The mean local loss of each round; [] if the checkpoint is missing or damaged."""
    path = folder / "trainings" / f"{training}.safetensors"
    try:
        return list(check(records.read_losses(path), [Number()], "losses"))
    except (Malformed, RecursionError, TypeError, AttributeError):  # metadata of any kind
        return []


def read_examples(results: Results) -> dict[str, np.ndarray]:
    """Images [n, height, width, 1 or 3] by "test/client"; {} if the file is missing or damaged."""
    images = records.read_arrays(results.store / "examples" / f"{results.examples['file']}.npz")
    return images if all(map(_are_images, images.values())) else {}


def _are_images(array: np.ndarray) -> bool:
    if array.dtype != np.uint8 or array.ndim != 4:
        return False
    _, height, width, channels = array.shape
    return 1 <= height <= LARGEST and 1 <= width <= LARGEST and channels in (1, 3)


def is_record(value: Any) -> bool:
    """Whether a file claims to be a record of a table or a figure."""
    return isinstance(value, dict) and "id" in value and bool({"cases", "rows", "data"} & value.keys())


def check_record(value: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The record of a table or a figure in the file at `path`."""
    is_figure = "data" in value
    try:
        value = store.unseal(path, value)
        return _check_figure(value) if is_figure else _check_table(value)
    except (Malformed, InputError, RecursionError, OverflowError) as error:
        kind = "figure" if is_figure else "table"
        why = flatten(hide_secrets(str(error)), 300).rstrip(".")
        raise InputError(
            f"{path} is not a valid record of a {kind} ({why}); `fedthe {kind}` writes a new one."
        ) from None


def _check_table(value: Mapping[str, Any]) -> dict[str, Any]:
    id = check(value.get("id"), NAME, "id")
    find_table(id)  # refuses what is none
    if value.get("format") != FORMAT:
        raise Malformed("another version wrote it")
    record: dict[str, Any] = check(value, RECORD, id)
    if not record["cases"]:
        raise Malformed("it has no case")
    held = {method for case in record["cases"] for method in case["clients"]}
    if lost := [row for row in record["rows"] if method_of(row) not in held]:
        raise Malformed(f"no client has its row {flatten(lost[0], 40)!r}")
    if any(len(pair) != 2 for pair in record["changed"].values()):
        raise Malformed("an entry of 'changed' is not a pair")
    for case, given in zip(record["cases"], value["cases"], strict=True):
        config = make_config(given["config"])
        case["config"] = config.as_dict()
        for method, tests in case["clients"].items():
            for test, seeds in tests.items():
                if method not in config.specs or seeds.keys() - set(map(str, config.seeds)) or not seeds:
                    raise Malformed(f"{method}.{test} has a method or seed that its config does not name")
                if any(len(each) > config.client_count or set(each) <= {None} for each in seeds.values()):
                    raise Malformed(f"{method}.{test} has too many clients, or none")
        for column, test in case["columns"].items():
            for row, cells in record["rows"].items():
                if column in cells:
                    _check_mean(cells[column], case["clients"].get(method_of(row), {}).get(test), f"{row}.{column}")
    if len({tuple(case["config"]["seeds"]) for case in record["cases"]}) > 1:
        raise Malformed("its cases have different seeds")
    return restate_deviations(record)


def _check_mean(cell: Sequence[float | None], seeds: Mapping[str, Sequence[float | None]] | None, where: str) -> None:
    """A number of the table must be the mean over its clients, whose numbers have three decimals."""
    means = [fmean(each for each in percents if each is not None) for percents in (seeds or {}).values()]
    if not means or not cell or cell[0] is None or abs(fmean(means) - cell[0]) > 1e-3:
        raise Malformed(f"{where} is not the mean over its clients")


def _check_figure(value: Mapping[str, Any]) -> dict[str, Any]:
    figure: dict[str, Any] = check(value, FIGURE, "the record")
    shape = next((shape for start, shape in DRAWN.items() if figure["id"].startswith(start)), None)
    if shape is None:
        return {**figure, "data": None}
    data = restate_figure({**value, "data": check(value["data"], shape, "data")})["data"]
    if len(figure["config"]["seeds"]) == 1:  # older records have 0 for a single seed
        for name in ("shared", "best", "fedthe", "curves"):
            for series in _list_series(data.get(name, {})):
                series.pop("std", None)
    for name, axis in (("accuracy", "alpha"), ("shared", "e"), ("curves", "rounds")):
        for series in _list_series(data.get(name, {})):
            if not data[axis] or any(len(each) != len(data[axis]) for each in series.values()):
                raise Malformed(f"{name} and {axis} differ in length")
            if name == "accuracy" and any(len(row) != len(data["beta"]) or None in row for row in series["mean"]):
                raise Malformed("accuracy lacks a number for some beta")
            if name == "shared" and None in series["mean"]:
                raise Malformed("shared lacks a number for some e")
    for name in ("best", "fedthe") if "shared" in data else ():
        if not data["shared"].keys() <= data[name].keys():
            raise Malformed(f"{name} lacks a test")
    for test, stream in data.get("streams", {}).items():
        _check_stream(stream, test)
    return {**figure, "data": data}


def _check_stream(stream: Mapping[str, Any], test: str) -> None:
    """Every band has a first position, an end and a phase, and every curve fits them."""
    end = 0
    for band in stream["bands"]:
        kinds = [type(each) for each in band]
        if kinds != [int, int, str] or not (end <= band[0] < band[1] < MOST):
            raise Malformed(f"{flatten(test, 40)} has a band that is none")
        end = band[1]
    for curve in stream["curves"].values():
        size = len(curve["positions"])
        if len(curve["mean"]) != size or len(curve["std"] or curve["mean"]) != size:
            raise Malformed(f"a curve of {flatten(test, 40)} lacks numbers")
        if not size or max(curve["positions"]) >= end or len(curve["segments"]) != len(stream["bands"]):
            raise Malformed(f"a curve of {flatten(test, 40)} does not fit its bands")


def _list_series(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The series of each test, or of each method and test."""
    if any("mean" in each for each in value.values()):
        return [*value.values()]
    return [series for tests in value.values() for series in tests.values()]
