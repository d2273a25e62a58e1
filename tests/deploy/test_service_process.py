"""The service as a process: it is killed under load, and started again."""

import http.client
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from contextlib import contextmanager

import numpy as np
import pytest
from PIL import Image

from deployed import make_bundle, make_card
from fedthe.deploy.bundle import read_bundle, write_bundle
from fedthe.deploy.online import Online
from trained_methods import make_federation

KILLS = int(os.environ.get("FEDTHE_KILLS", "3"))  # 20 were tried
STREAMS = 4


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("bundle") / "one"
    write_bundle(make_bundle("fedthe"), path, make_card("fedthe"))
    return path


@contextmanager
def serving(bundle, database):
    """The port of a service, and its process, which is ended if it still lives."""
    command = [sys.executable, "-m", "fedthe", "serve", bundle, "--port", "0", "--rate", "0", "--database", database]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            line = process.stderr.readline()
            assert line.startswith("serving one at http://127.0.0.1:"), line
            yield int(line.rstrip("/\n").rpartition(":")[2]), process
        finally:
            process.kill()


def as_png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def ask(port, path, body=b"{}", kind="application/json", key=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    headers = {"Content-Type": kind} | ({"Idempotency-Key": key} if key else {})
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


class Caller(threading.Thread):
    """Asks for the samples of a stream one after another; what got no answer is asked again with its key."""

    def __init__(self, stream, x):
        super().__init__(daemon=True)
        self.stream, self.x, self.port = stream, x, None
        self.answers, self.key, self.failed, self.stopped = [], str(uuid.uuid4()), 0, False

    def run(self):
        deadline = time.monotonic() + 240
        while len(self.answers) < len(self.x) and time.monotonic() < deadline and not self.stopped:
            if self.port is None:
                time.sleep(0.01)
                continue
            body = as_png(self.x[len(self.answers)])
            try:
                code, told = ask(self.port, f"/streams/{self.stream}/predict", body, "image/png", self.key)
            except (OSError, http.client.HTTPException, ValueError):  # it was killed
                self.failed += 1
                time.sleep(0.05)
                continue
            assert code == 200, told
            self.answers.append(told)
            self.key = str(uuid.uuid4())


def test_a_killed_service_loses_no_answer_and_counts_none_twice(bundle, tmp_path):
    pool, database = make_federation().pool.x, tmp_path / "streams.db"
    x = pool[np.arange(60 * KILLS) % len(pool)]
    with serving(bundle, database) as (port, process):
        ids = [ask(port, "/streams")[1]["id"] for _ in range(STREAMS)]
        process.terminate()
    callers = [Caller(id, np.roll(x, k, 0)) for k, id in enumerate(ids)]
    for each in callers:
        each.start()
    for kill in range(KILLS):
        with serving(bundle, database) as (port, process):
            goal = (kill + 1) * 40
            for each in callers:
                each.port = port
            while max(len(each.answers) for each in callers) < goal:
                time.sleep(0.005)
            process.send_signal(signal.SIGKILL)
            process.wait()
            for each in callers:
                each.port = None
    with serving(bundle, database) as (port, process):
        for each in callers:
            each.port = port
        for each in callers:
            each.join(240)
            assert [told["position"] for told in each.answers] == list(range(1, len(x) + 1))
            online = Online(read_bundle(bundle))
            for told, wanted in zip(each.answers, online.predict_batch(each.x), strict=True):
                np.testing.assert_allclose(list(told["probabilities"].values()), wanted.probabilities, atol=1e-5)
        process.terminate()
    assert sum(each.failed for each in callers) >= 1  # somebody was waiting when it was killed
