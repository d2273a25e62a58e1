"""A report in TensorBoard and in MLflow, read back with their own readers."""

import importlib
import json
import logging
import math
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fedthe import store
from fedthe.errors import InputError
from fedthe.report.data import BINS, Cost, Losses, Page
from fedthe.report.gather import gather
from fedthe.report.loggers import list_points, write_mlflow, write_tensorboard
from fedthe.report.page import render
from fedthe.text import hide_secrets
from report_pages import make_page, make_shown


def make_small(**settings):
    return make_shown(methods=("fedavg", "fedthe"), clients=2, seeds=(0, 1), rounds=8, **settings)


def with_provenance(shown, **changes):
    return replace(shown, provenance={**shown.provenance, **changes})


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # so that a file beside the named ones shows


def test_points():
    losses = [Losses(["fedavg", "fedthe"], 0, [2.0, 1.0]), Losses(["fedthe"], 1, [4.0])]
    shown = replace(make_small(), losses=losses, costs={"fedavg": Cost(None, 1, 0), "fedthe": Cost(3.5, 1, 0)})
    points = list_points(shown)
    assert [point[1:] for point in points if point.name == "loss/fedavg"] == [(2.0, 1), (1.0, 2)]
    assert [point[1:] for point in points if point.name == "loss/fedthe"] == [(3.0, 1), (1.0, 2)]
    assert [point for point in points if point.name.startswith("ms")] == [("ms per sample/fedthe", 3.5, 8)]
    score = shown.scores["fedthe"]["ooc"]
    assert ("accuracy/fedthe/ooc", score.mean, 8) in points
    assert ("worst client/fedthe/ooc", score.worst, 8) in points
    curve = shown.curves["fedavg"]["mixture"]
    assert [point[1:] for point in points if point.name == "curve/fedavg/mixture"] == [
        *zip(curve.mean, curve.rounds, strict=True)
    ]


def read_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    events.Reload()
    return events


def test_tensorboard_holds_everything(tmp_path):
    shown = make_small()
    write_tensorboard(Page("", [shown]), tmp_path / "logs")
    events = read_events(tmp_path / "logs" / "made-up")
    expected = {}
    for name, value, step in list_points(shown):
        expected.setdefault(name, []).append((step, pytest.approx(value)))
    assert {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]} == expected
    weights = shown.weights["fedthe"]["ooc"]
    (histogram,) = events.Histograms("weight of the personal head/fedthe/ooc")
    assert histogram.step == 8
    assert histogram.histogram_value.bucket == pytest.approx(weights.shares)
    assert histogram.histogram_value.bucket_limit == pytest.approx([(i + 1) / BINS for i in range(BINS)])
    assert len(events.Tags()["histograms"]) == 6
    (text,) = events.Tensors("config")
    assert json.loads(text.tensor_proto.string_val[0]) == shown.provenance["config"]
    assert set(events.Tags()["tensors"]) == {"what ran", "config", "manifests", "environment"}


def test_tensorboard_again_replaces_its_own_and_nothing_else(tmp_path):
    other = tmp_path / "logs" / "made-up" / "mine.txt"
    other.parent.mkdir(parents=True)
    other.write_text("mine")
    for _ in range(2):
        write_tensorboard(Page("", [make_small()]), tmp_path / "logs")
    assert len(list(other.parent.iterdir())) == 2
    assert other.read_text() == "mine"
    assert len(read_events(other.parent).Scalars("accuracy/fedavg/ooc")) == 1


@pytest.mark.parametrize("name", ["../../x", "..", "", "a/b\\c", "/etc", "\x1b[2J", "é" * 500])
def test_tensorboard_stays_in_its_folder(tmp_path, name):
    folder = tmp_path / "deep" / "logs"
    write_tensorboard(Page("", [make_small(name=name), make_small(name=name)]), folder)
    assert [each.name for each in tmp_path.iterdir()] == ["deep"]
    assert len(list(folder.iterdir())) == 2  # two of the same name are two
    assert all(len(list(each.iterdir())) == 1 for each in folder.iterdir())


def test_tensorboard_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write in"):
        write_tensorboard(make_page(clients=2, seeds=(0,)), tmp_path / "file")


def read_runs(uri):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("fedthe")
    return client, client.search_runs([experiment.experiment_id])


# of MLflow's own use of its database, met while reading back
@pytest.mark.filterwarnings("ignore")
def test_mlflow_holds_everything(tmp_path, capfd):
    hyper = {"fedthe": {f"knob{i}": i for i in range(150)}}
    config = {"name": "x", "rounds": 8, "seeds": [0, 1], "lr": None, "long": "ü" * 9000, "hyper": hyper}
    environment = {f"key {i}": i for i in range(150)}
    shown = with_provenance(make_small(), config=config, environment=environment)
    uri = f"sqlite:///{tmp_path}/new/runs.db"
    write_mlflow(Page("", [shown, replace(shown, name="second")]), uri)
    assert capfd.readouterr() == ("", "")
    assert [each.name for each in tmp_path.iterdir()] == ["new"]
    client, runs = read_runs(uri)
    assert {run.info.run_name for run in runs} == {"made-up", "second"}
    for run in runs:
        assert run.info.status == "FINISHED"
        assert run.data.params["hyper.fedthe.knob149"] == "149"
        assert run.data.params["seeds"] == "[0, 1]"
        assert len(run.data.params) == 155
        assert set(run.data.params["long"]) == {"ü"}
        assert run.data.tags["manifests.1"] == shown.provenance["manifests"]["1"]
        assert run.data.tags["environment.key 149"] == "149"
        assert run.data.tags["command"] == shown.provenance["command"]
        expected = {}
        for name, value, step in list_points(shown):
            expected.setdefault(name, []).append((step, pytest.approx(value)))
        assert set(run.data.metrics) == set(expected)
        for name in ("accuracy/fedthe/ooc", "worst client/fedavg/ooc", "loss/fedthe", "curve/fedavg/mixture"):
            history = client.get_metric_history(run.info.run_id, name)
            assert sorted((each.step, each.value) for each in history) == expected[name]


@pytest.mark.filterwarnings("ignore")
def test_mlflow_takes_odd_names_and_numbers(tmp_path):
    odd = ["a+b", "a?b", "../x", "..", "", "m" * 400, "é:ü"]
    shown = make_shown(methods=odd, clients=2, seeds=(0,), rounds=4)
    shown = replace(shown, losses=[Losses([odd[0]], 0, [math.nan, math.inf])])
    shown = with_provenance(shown, config={"a b/../?": 1, "rounds": 4}, command=None)
    uri = f"sqlite:///{tmp_path}/runs.db"
    write_mlflow(Page("", [shown]), uri)
    _, (run,) = read_runs(uri)
    assert len([name for name in run.data.metrics if name.startswith("ms per sample/")]) == len(odd)


def test_mlflow_leaves_no_trace(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "3")
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY", raising=False)
    monkeypatch.setattr(logging.root.manager, "disable", logging.DEBUG)
    before = dict(os.environ)
    write_mlflow(Page("", [make_small()]), f"sqlite:///{tmp_path}/runs.db")
    assert dict(os.environ) == before
    assert logging.root.manager.disable == logging.DEBUG


def test_mlflow_starts_no_telemetry(tmp_path):
    """In a process of its own, for it is the import that would start it; a proxy of ours would hear of it."""
    code = (
        "from report_pages import make_page; from fedthe.report.loggers import write_mlflow\n"
        f"write_mlflow(make_page(clients=2, seeds=(0,), rounds=4), 'sqlite:///{tmp_path}/runs.db')"
    )
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        # nothing in the environment that marks a test or a build, for that would keep telemetry off by itself
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "https_proxy": f"http://127.0.0.1:{proxy.getsockname()[1]}",
        }
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == ("", "")
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()


class Server(BaseHTTPRequestHandler):
    """As much of an MLflow server as one run needs."""

    def do_GET(self):
        self.answer(404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such thing"})

    def do_POST(self):
        said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        what = self.path.rpartition("mlflow/")[2]
        self.server.heard.append((what, said))
        info = {"run_id": "r1", "run_uuid": "r1", "experiment_id": "7", "status": "RUNNING"}
        answers = {
            "experiments/create": {"experiment_id": "7"},
            "runs/create": {"run": {"info": info, "data": {}}},
            "runs/update": {"run_info": {**info, "status": "FINISHED"}},
        }
        self.answer(self.server.status, answers.get(what, {}))

    def answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as httpd:
        httpd.heard, httpd.status, httpd.daemon_threads = [], 200, True
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield httpd
        httpd.shutdown()
        thread.join()


def test_mlflow_over_http_keeps_to_the_limits(server, capfd):
    hyper = {"fedthe": {f"knob{i}": "x" * 9000 for i in range(150)}}
    shown = with_provenance(make_shown(clients=2), config={"rounds": 100, "hyper": hyper})
    write_mlflow(Page("", [shown]), f"http://127.0.0.1:{server.server_port}")
    assert capfd.readouterr() == ("", "")
    batches = [said for what, said in server.heard if what == "runs/log-batch"]
    for said in batches:
        assert sum(len(said.get(kind, ())) for kind in ("metrics", "params", "tags")) <= 1000
        assert len(said.get("params", ())) <= 100
        assert len(said.get("tags", ())) <= 100
        assert all(len(each["value"]) <= 5000 for each in said.get("params", ()))
        assert len(json.dumps(said)) <= 1_000_000
    assert sum(len(said.get("metrics", ())) for said in batches) == len(list_points(shown)) > 1000
    assert sum(len(said.get("params", ())) for said in batches) == 151
    assert server.heard[-1][0] == "runs/update"
    assert server.heard[-1][1]["status"] == "FINISHED"


def refuse(uri, **page):
    with pytest.raises(InputError) as raised:
        write_mlflow(make_page(clients=2, seeds=(0,), rounds=4, **page), uri)
    assert "\n" not in str(raised.value)
    assert str(raised.value).endswith(".")
    return str(raised.value)


def test_mlflow_server_that_refuses(server):
    server.status = 403
    assert f"cannot log to MLflow at http://127.0.0.1:{server.server_port} (" in refuse(
        f"http://127.0.0.1:{server.server_port}"
    )


def test_mlflow_server_that_is_down(monkeypatch, capfd):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # taken, and nobody listens
        port = closed.getsockname()[1]
        said = refuse(f"http://me:secret@127.0.0.1:{port}")
    assert said.startswith(f"cannot log to MLflow at http://***@127.0.0.1:{port} (")
    assert "secret" not in said
    assert capfd.readouterr() == ("", "")


def test_mlflow_patience_is_bounded(monkeypatch):
    """Without a word of the user's it is ours, and only for the call."""
    seen = {}
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    from mlflow.tracking import MlflowClient

    def look(self, name):
        seen.update(os.environ)
        raise OSError("down")

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", look)
    assert "(down)" in refuse("http://127.0.0.1:9")
    assert int(seen["MLFLOW_HTTP_REQUEST_MAX_RETRIES"]) <= 3
    assert int(seen["MLFLOW_HTTP_REQUEST_TIMEOUT"]) <= 30
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ


@pytest.mark.parametrize("uri", ["", "runs", "file:///tmp/x", "sqlite://", "sqlite:///", "http://", "ftp://x", "http"])
def test_places_that_are_none(uri):
    assert "name sqlite:///FILE, http://HOST or https://HOST" in refuse(uri)


def test_mlflow_files_that_are_no_database(tmp_path):
    (tmp_path / "text.db").write_text("this is not a database, and it is longer than a header\n" * 20)
    assert "is not a writable database" in refuse(f"sqlite:///{tmp_path}/text.db")
    assert "is not a writable database" in refuse(f"sqlite:///{tmp_path}")
    assert "cannot write in" in refuse(f"sqlite:///{tmp_path}/text.db/x.db")


@pytest.mark.parametrize(
    ("missing", "write", "words"),
    [
        (
            "tensorboard",
            lambda page, path: write_tensorboard(page, path),
            "needs tensorboard: pip install 'fedthe[tensorboard]'.",
        ),
        (
            "mlflow",
            lambda page, path: write_mlflow(page, f"sqlite:///{path}/x.db"),
            "needs mlflow: pip install 'fedthe[mlflow]'.",
        ),
        (
            "sqlalchemy",
            lambda page, path: write_mlflow(page, f"sqlite:///{path}/x.db"),
            "pip install 'fedthe[mlflow]'.",
        ),
    ],
)
def test_packages_that_are_missing(tmp_path, monkeypatch, missing, write, words):
    importlib.import_module("mlflow.tracking")  # imported without SQLAlchemy, it would lack it in all later tests
    for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError) as raised:
        write(make_page(clients=2, seeds=(0,), rounds=4), tmp_path)
    assert str(raised.value).endswith(words)


def write_config(folder, data):
    path = folder / "mine.toml"
    settings = f'dataset = "{data}"\nmethods = ["fedavg"]\nclients = 2\nrounds = 1\nlocal_epochs = 1\nsamples = 3\n'
    path.write_text(settings + 'natural = "none"\n')
    return path


def test_a_password_is_nowhere(server, fedthe, data, tmp_path, monkeypatch):
    """Not in a file of the run, not in what is printed, and not in what the server is told."""
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "of-the-environment")
    uri = f"http://me:pass%40word@127.0.0.1:{server.server_port}/?api_key=of-the-query"
    folder = tmp_path / "run"
    said = fedthe("run", write_config(tmp_path, data), f"out={folder}", "--mlflow", uri)
    assert server.heard
    server.status = 500
    again = fedthe("run", tmp_path / "mine.toml", f"out={folder}", "--mlflow", uri)  # fails at the end
    assert "the report is not complete" in again.err
    report = fedthe("report", folder, "-o", folder / "again.html", "--mlflow", uri, exits=2)
    told = [each for said in (said, again, report) for each in said] + [json.dumps(server.heard)]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert "***@127.0.0.1" in (folder / "environment.json").read_text(encoding="utf-8")
    for secret in ("pass%40word", "pass@word", "of-the-query", "of-the-environment"):
        assert not [path for path in files if secret.encode() in path.read_bytes()]
        assert not [each for each in told if secret in each]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("see http://me:secret@host:5/x?a=1.", "see http://***@host:5/x?a=1."),
        ("'https://me:se@cr/et@host/'", "'https://***@host/'"),
        ("https://secret@host", "https://***@host"),
        ("http:/me:secret@host", "http:/***@host"),  # as a path is written
        ("x://h/?token=secret&b=2 and c", "x://h/?token=***&b=2 and c"),
        ("x://h/?b=2&aws_secret_access_key=secret#d", "x://h/?b=2&aws_secret_access_key=***#d"),
        ("sqlite:///runs@home/m.db", "sqlite:///runs@home/m.db"),
        ("http://host/a@b?page=2", "http://host/a@b?page=2"),
        ("me@example.org", "me@example.org"),
    ],
)
def test_secrets_are_hidden(text, said):
    assert hide_secrets(text) == said


def test_a_command_of_an_earlier_version_is_shown_without_its_password(ran_before):
    page = gather([ran_before])
    assert "hunter22" not in render(page)
    assert "http://***@host" in render(page)


@pytest.fixture
def ran_before(fedthe, data, tmp_path):
    folder = tmp_path / "run"
    fedthe("run", write_config(tmp_path, data), f"out={folder}")
    path = folder / "environment.json"
    known = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(known | {"command": "fedthe run x.toml --mlflow http://me:hunter22@host"}))
    summary = store.read_sealed(folder / "summary.json")
    files = summary["files"] | {path.name: store.file_hash(path)}
    store.write_sealed(folder / "summary.json", summary | {"files": files})
    return folder


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "nothing.toml"], "does not exist"),
        (["run", "mine.toml", "rounds=x"], "rounds must be"),
        (["report", "nothing"], "does not exist"),
        (["table", "main-dir0.1", "rounds=x"], "rounds must be"),
    ],
)
def test_what_is_refused_leaves_nothing_behind(fedthe, data, tmp_path, arguments, says):
    write_config(tmp_path, data)
    before = sorted(tmp_path.rglob("*"))
    loggers = ["--mlflow", "sqlite:///new/m.db", "--tensorboard", "board"]
    assert says in fedthe(*arguments, *loggers, exits=2).err
    save = ["--save", "saved"] if arguments[0] == "table" else ["--mlflow", "sqlite:///m.db"]
    assert says in fedthe(*arguments, *save, exits=2).err
    assert sorted(tmp_path.rglob("*")) == before
