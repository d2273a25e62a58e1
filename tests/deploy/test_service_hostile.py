"""Hostile input: nothing that is sent makes the service fail, and memory does not grow."""

import gc
import io
import os
from pathlib import Path

import numpy as np
import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from PIL import Image
from schemathesis.specs.openapi.checks import positive_data_acceptance

from deployed import make_bundle, make_card
from fedthe.deploy.bundle import read_bundle, write_bundle
from fedthe.deploy.service.app import make_app
from fedthe.deploy.service.limits import Limits
from fedthe.deploy.service.store import Store

IMAGES = int(os.environ.get("FEDTHE_FUZZ", "600"))  # 10,000 were tried


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    folder = tmp_path_factory.mktemp("service")
    write_bundle(make_bundle("fedthe"), folder / "one", make_card("fedthe"))
    store = Store(path=folder / "streams.db")
    store.migrate()
    yield make_app({"one": read_bundle(folder / "one")}, store, limits=Limits(rate=0))
    store.close()


@pytest.fixture(scope="module")
def client(app):
    with TestClient(app, raise_server_exceptions=False) as made:
        yield made


def measure_memory():
    """Bytes that this process holds now."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("this system does not say how much memory a process holds")
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def damage(content, draws):
    """A few bytes changed, cut off, doubled or put elsewhere."""
    content = bytearray(content)
    for _ in range(draws.integers(1, 6)):
        at = int(draws.integers(0, len(content)))
        kind = draws.integers(0, 4)
        if kind == 0:
            content[at] = draws.integers(0, 256)
        elif kind == 1:
            content = content[: max(at, 1)]
        elif kind == 2:
            content += content[at : at + 50]
        else:
            content[at:at] = bytes(draws.integers(0, 256, 8, dtype=np.uint8))
    return bytes(content)


def test_damaged_images_are_answered_or_refused(client):
    draws, seeds = np.random.default_rng(0), []
    for format in ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM"):
        file = io.BytesIO()
        Image.fromarray(draws.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(file, format)
        seeds.append(file.getvalue())
    id = client.post("/streams", json={}).json()["id"]
    position, half = 0, 0
    for i in range(IMAGES):
        found = client.post(
            f"/streams/{id}/predict", content=damage(seeds[i % 7], draws), headers={"content-type": "image/png"}
        )
        assert found.status_code in (200, 400, 413), found.text
        position += found.status_code == 200
        if i == IMAGES // 2:
            half = measure_memory()
    assert client.get(f"/streams/{id}").json()["position"] == position
    assert position > 0
    assert measure_memory() - half < 50 * 2**20  # of the second half; a large image comes and goes


def test_no_request_of_the_schema_fails(client, app):
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    operations = [each.ok() for each in schema.get_all_operations()]
    assert len(operations) >= 10
    for operation in operations:
        _ask_at_random(operation)


def _ask_at_random(operation):
    """Requests drawn from the schema of one operation: none fails, and every answer is as the schema says."""

    @given(case=operation.as_strategy())
    @settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def check(case):
        found = case.call()
        assert found.status_code < 500, f"{case.method} {case.path}: {found.text}"
        case.validate_response(found, excluded_checks=[positive_data_acceptance])  # not every text is an image

    check()
