"""Log each run of a report to TensorBoard or MLflow."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import fmean
from textwrap import indent
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from ..errors import InputError
from ..store import check_folder, make_folder, whole_file
from ..text import clean, flatten, hide_secrets
from .cells import find_free, list_settings
from .data import BINS, Page, Shown, Weights

EVENTS = "events.out.tfevents.fedthe"  # a fixed name, so that writing a run again replaces it
EXPERIMENT = "fedthe"
SQLITE = "sqlite:///"
LONGEST_KEY, LONGEST_VALUE = 250, 5000  # bytes that all MLflow stores accept
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}
PATIENCE = {  # unless the user sets them: a server that is down fails in seconds, not minutes
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class Point(NamedTuple):
    name: str
    value: float
    step: int


def list_points(shown: Shown, join: Callable[..., str] = lambda *words: "/".join(words)) -> list[Point]:
    """All numbers of a run; `join` makes a name of the kind of number, the method and the test."""
    rounds = int(list_settings(shown).get("rounds") or 0)
    points = []
    for method, scores in shown.scores.items():
        for test, score in scores.items():
            points.append(Point(join("accuracy", method, test), score.mean, rounds))
            points.append(Point(join("worst client", method, test), score.worst, rounds))
    for method, cost in shown.costs.items():
        if cost.ms is not None:
            points.append(Point(join("ms per sample", method), cost.ms, rounds))
    for method in shown.methods:
        trained = [each.losses for each in shown.losses if method in each.methods]
        for i in range(max(map(len, trained), default=0)):
            loss = fmean(losses[i] for losses in trained if i < len(losses))
            points.append(Point(join("loss", method), loss, i + 1))
    for method, curves in shown.curves.items():
        for test, curve in curves.items():
            name = join("curve", method, test)
            points += [Point(name, mean, at) for at, mean in zip(curve.rounds, curve.mean, strict=True)]
    return points


def check_tensorboard(folder: Path) -> None:
    """Raise what `write_tensorboard` would raise, but create nothing."""
    _load_tensorboard()
    check_folder(folder)


def write_tensorboard(page: Page, folder: Path) -> None:
    """Write an events file for each run, in a folder of its own; replaces only those of the same runs."""
    _load_tensorboard()
    make_folder(folder)
    taken: list[str] = []
    for shown in page.shown:
        taken.append(find_free(re.sub(r"[^\w.-]+", "-", clean(shown.name)).strip(".-") or "run", taken))
        _write_events(shown, folder / taken[-1])


def _load_tensorboard() -> list[Any]:
    needed = "writing for TensorBoard needs tensorboard: pip install 'fedthe[tensorboard]'."
    messages = [f"compat.proto.{each}_pb2" for each in ("event", "summary", "tensor", "tensor_shape", "types")]
    return [_load(f"tensorboard.{module}", needed) for module in (*messages, "summary.writer.record_writer")]


def _write_events(shown: Shown, folder: Path) -> None:
    event, summary, tensor, shape, kinds, records = _load_tensorboard()
    now = time.time()
    values = [(point.step, {"tag": point.name, "simple_value": point.value}) for point in list_points(shown)]
    rounds = int(list_settings(shown).get("rounds") or 0)
    for method, tests in shown.weights.items():
        for test, weights in tests.items():
            histogram = summary.HistogramProto(**_describe_weights(weights))
            values.append((rounds, {"tag": f"weight of the personal head/{method}/{test}", "histo": histogram}))
    for tag, text in _list_texts(shown).items():
        plugin = summary.SummaryMetadata.PluginData(plugin_name="text")
        held = tensor.TensorProto(
            dtype=kinds.DT_STRING,
            string_val=[text.encode("utf-8", "replace")],
            tensor_shape=shape.TensorShapeProto(dim=[shape.TensorShapeProto.Dim(size=1)]),
        )
        values.append((0, {"tag": tag, "metadata": summary.SummaryMetadata(plugin_data=plugin), "tensor": held}))
    with whole_file(folder / EVENTS) as part, part.open("wb") as file:
        lines = records.RecordWriter(file)
        lines.write(event.Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        for step, value in values:
            said = summary.Summary(value=[summary.Summary.Value(**value)])
            lines.write(event.Event(wall_time=now, step=step, summary=said).SerializeToString())


def _describe_weights(weights: Weights) -> dict[str, Any]:
    """A histogram of shares of the samples; sum_squares uses bin centres, because samples are not kept."""
    squares = sum(share * ((i + 0.5) / BINS) ** 2 for i, share in enumerate(weights.shares))
    limits = [(i + 1) / BINS for i in range(BINS)]
    values = {"min": 0.0, "max": 1.0, "num": 1.0, "sum": weights.mean, "sum_squares": squares}
    return {**values, "bucket_limit": limits, "bucket": list(weights.shares)}


def _list_texts(shown: Shown) -> dict[str, str]:
    """What ran, indented by four so that Markdown shows it verbatim."""
    names = [name for name in ("config", "manifests", "environment") if name in shown.provenance]
    texts = {name: json.dumps(shown.provenance[name], indent=1, default=str) for name in names}
    return {tag: indent(text, " " * 4) for tag, text in ({"what ran": shown.sentence} | texts).items()}


def check_mlflow(uri: str) -> None:
    """Raise what `write_mlflow` would raise, but create nothing."""
    with _connect(uri) as make_client:
        if not uri.startswith(SQLITE):  # a query would create tables in the database
            make_client().get_experiment_by_name(EXPERIMENT)


def write_mlflow(page: Page, uri: str) -> None:
    """Log each run as a new run of the experiment "fedthe", to a file (sqlite:///FILE) or a server."""
    with _connect(uri) as make_client:
        if uri.startswith(SQLITE):
            make_folder(_name_file(uri).parent)
        client = make_client()
        found = client.get_experiment_by_name(EXPERIMENT)
        experiment = found.experiment_id if found else client.create_experiment(EXPERIMENT)
        for shown in page.shown:
            _log_run(client, experiment, shown)


@contextmanager
def _connect(uri: str) -> Iterator[Callable[[], Any]]:
    """Yield a function that makes a client; an error in the block becomes an InputError."""
    place = _check_uri(uri)
    needed = "logging to MLflow needs mlflow: pip install 'fedthe[mlflow]'."
    with _set_environment(), _silence():  # before the import, which starts telemetry
        more = ["sqlalchemy", "alembic"] if uri.startswith(SQLITE) else []
        tracking, *_ = [_load(module, needed) for module in ("mlflow.tracking", "mlflow.entities", *more)]
        try:
            yield lambda: tracking.MlflowClient(tracking_uri=uri)
        except InputError:
            raise
        except Exception as error:  # of the network, the database or the server
            why = flatten(hide_secrets(str(error), _list_secrets(uri)), 200)
            raise InputError(f"cannot log to MLflow at {place} ({why}); check that it runs and accepts runs.") from None


def _log_run(client: Any, experiment: str, shown: Shown) -> None:
    from mlflow import entities

    run = client.create_run(experiment, run_name=clean(shown.name)).info.run_id
    now = int(time.time() * 1000)
    tags = {"mlflow.note.content": shown.sentence, "command": shown.provenance.get("command") or ""}
    for kind in ("manifests", "environment"):
        tags |= {f"{kind}.{name}": value for name, value in (shown.provenance.get(kind) or {}).items()}
    client.log_batch(  # splits them into requests that servers accept
        run,
        [entities.Metric(name, value, now, step) for name, value, step in list_points(shown, join=_join_key)],
        [entities.Param(*pair) for pair in _list_pairs(list_settings(shown))],
        [entities.RunTag(*pair) for pair in _list_pairs(tags)],
    )
    client.set_terminated(run)


def _list_pairs(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        yield _join_key(name), _shorten(str(value), LONGEST_VALUE)


def _join_key(*words: str) -> str:
    """A key of words. Characters that MLflow refuses or reads as a path become their code, so keys stay distinct."""

    def encode(found: re.Match[str]) -> str:
        return "".join(f"_{ord(mark):x}_" for mark in found[0])

    return _shorten("/".join(re.sub(r"^\.+$|[^\w.\- ]", encode, word) or "_" for word in words), LONGEST_KEY)


def _shorten(text: str, limit: int) -> str:
    return text.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")


def _load(module: str, needed: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise InputError(needed) from None


def _check_uri(uri: str) -> str:
    """The URI to show, without a password. Refuses a file that is not a writable database."""
    if uri.startswith(SQLITE) and str(_name_file(uri)) != ".":
        _check_database(_name_file(uri))
        return str(_name_file(uri))
    why = ""
    try:
        parts = urlsplit(uri)
        _ = parts.port  # raises ValueError unless it is a number
        if parts.scheme in ("http", "https") and parts.hostname:
            return hide_secrets(uri)
    except ValueError as error:
        why = f" ({hide_secrets(str(error), [uri])})"
    shown = hide_secrets(clean(uri))
    raise InputError(f"{shown!r} is not an MLflow URI{why}; name sqlite:///FILE, http://HOST or https://HOST.")


def _name_file(uri: str) -> Path:
    return Path(uri.removeprefix(SQLITE).partition("?")[0])


def _check_database(path: Path) -> None:
    """Fail early: MLflow would retry for minutes."""
    if not path.exists():
        check_folder(path.parent)
        return
    try:
        where = f"{path.absolute().as_uri()}?mode=rw"  # does not create it
        with closing(sqlite3.connect(where, uri=True, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            database.execute("ROLLBACK")
    except sqlite3.Error as error:
        raise InputError(f"{path} is not a writable database ({error}); name another file.") from None


def _list_secrets(uri: str) -> list[str]:
    """The password of a URI, or its user name if that stands alone, quoted and unquoted."""
    login, _, _ = urlsplit(uri).netloc.rpartition("@")
    name, _, password = login.partition(":")
    return [each for secret in (login, password or name) for each in (secret, unquote(secret))]


@contextmanager
def _set_environment() -> Iterator[None]:
    before = {name: os.environ[name] for name in (*PATIENCE, *QUIET) if name in os.environ}
    os.environ.update(PATIENCE | before | QUIET)
    try:
        yield
    finally:
        for name in (*PATIENCE, *QUIET):
            os.environ.pop(name, None)
        os.environ.update(before)


@contextmanager
def _silence() -> Iterator[None]:
    """Suppress MLflow's log lines and warnings; exceptions still pass."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
