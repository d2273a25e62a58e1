"""The service over HTTP: it answers as the predictor does, streams are their owner's, bad input is one sentence."""

import base64
import io
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image

from deployed import make_bundle, make_card
from fedthe.cli.serve import serve
from fedthe.deploy.bundle import read_bundle, write_bundle
from fedthe.deploy.online import Online
from fedthe.deploy.serve import listen
from fedthe.deploy.service import batching
from fedthe.deploy.service.app import make_app
from fedthe.deploy.service.limits import Limits, Rate
from fedthe.deploy.service.store import Store, StoreFailed
from fedthe.errors import InputError
from trained_methods import make_federation

FREE = Limits(rate=0)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """Two bundles, as they are read from disk."""
    found = {}
    for name in ("fedthe", "fedavg"):
        path = tmp_path_factory.mktemp("bundles") / name
        write_bundle(make_bundle(name), path, make_card(name))
        found[name] = read_bundle(path)
    return found


@pytest.fixture
def store(tmp_path):
    made = Store(path=tmp_path / "streams.db")
    made.migrate()
    yield made
    made.close()


@pytest.fixture
def client(bundles, store):
    with TestClient(make_app({"one": bundles["fedthe"]}, store, limits=FREE), raise_server_exceptions=False) as made:
        yield made


def rows(count=8):
    return make_federation().pool.x[:count]


def as_png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def upload(pixels):
    return {"files": {"image": ("one.png", as_png(pixels), "image/png")}}


def begin(client, **wanted):
    made = client.post("/streams", json=wanted)
    assert made.status_code == 201, made.text
    return made.json()["id"]


def test_a_stream_is_answered_as_by_the_predictor(client, bundles):
    id, expected = begin(client), Online(bundles["fedthe"]).predict_batch(rows())
    forms = [
        upload,
        lambda pixels: {"json": {"image": base64.b64encode(as_png(pixels)).decode()}},
        lambda pixels: {"content": as_png(pixels), "headers": {"content-type": "image/png"}},
    ]
    for i, (pixels, wanted) in enumerate(zip(rows(), expected, strict=True)):
        found = client.post(f"/streams/{id}/predict", **forms[i % 3](pixels))
        assert found.status_code == 200, found.text
        told = found.json()
        assert told["label"] == wanted.label
        assert told["position"] == i + 1
        assert told["weight"] == pytest.approx(wanted.weight, abs=1e-5)
        assert told["heads"] == {"global": wanted.heads[0], "personal": wanted.heads[1]}
        np.testing.assert_allclose(list(told["probabilities"].values()), wanted.probabilities, atol=1e-5)
    told = client.get(f"/streams/{id}").json()
    assert client.get("/streams").json() == {"streams": [told]}
    created, used = (datetime.fromisoformat(told.pop(name).replace("Z", "+00:00")) for name in ("created", "used"))
    assert created.utcoffset() == used.utcoffset() == timedelta(0)
    assert created < used <= datetime.now(timezone.utc)
    assert told == {"id": id, "bundle": "one", "position": len(rows()), "status": "unwatched"}


def test_a_single_sample_is_the_first_of_a_stream(client, bundles):
    expected = Online(bundles["fedthe"]).predict(rows()[3])
    for _ in range(2):
        told = client.post("/predict", **upload(rows()[3])).json()
        assert told["probability"] == pytest.approx(expected.probability, abs=1e-5)
        assert told["position"] == 1


def test_streams_survive_a_restart(bundles, store, tmp_path):
    expected = Online(bundles["fedthe"]).predict_batch(rows())
    with TestClient(make_app({"one": bundles["fedthe"]}, store, limits=FREE)) as client:
        id = begin(client)
        assert client.get(f"/streams/{id}").json()["status"] is None
        for pixels in rows()[:4]:
            client.post(f"/streams/{id}/predict", **upload(pixels))
    again = Store(path=tmp_path / "streams.db")
    with TestClient(make_app({"one": bundles["fedthe"]}, again, limits=FREE)) as client:
        assert client.get(f"/streams/{id}").json()["status"] == "unwatched"
        for pixels, wanted in zip(rows()[4:], expected[4:], strict=True):
            told = client.post(f"/streams/{id}/predict", **upload(pixels)).json()
            assert told["weight"] == pytest.approx(wanted.weight, abs=1e-5)
        saved = client.get(f"/streams/{id}/state").content
    online = Online(bundles["fedthe"])
    online.restore(saved)
    assert online.position == len(rows())
    again.close()


def test_a_retry_counts_once(client):
    id = begin(client)
    key = {"headers": {"Idempotency-Key": "k-1"}}
    first = client.post(f"/streams/{id}/predict", **upload(rows()[0]), **key).json()
    client.post(f"/streams/{id}/predict", **upload(rows()[1]))
    again = client.post(f"/streams/{id}/predict", **upload(rows()[0]), **key).json()
    assert again == first
    assert client.get(f"/streams/{id}").json()["position"] == 2
    other = client.post(f"/streams/{id}/predict", **upload(rows()[2]), **key)
    assert other.status_code == 409
    assert "Idempotency-Key" in other.json()["error"]
    elsewhere = client.post(f"/streams/{begin(client)}/predict", **upload(rows()[2]), **key)
    assert elsewhere.status_code == 200


def test_a_stream_begun_again_with_its_key_is_the_same(bundles, store, tmp_path):
    mine, yours = ({"Authorization": f"Bearer {store.create_token(name)}"} for name in ("me", "you"))
    key = {"Idempotency-Key": "k"}
    served, few = {"one": bundles["fedthe"]}, Limits(rate=0, streams=1)
    with TestClient(make_app(served, store, limits=few, tokens=True)) as client:
        first = client.post("/streams", json={}, headers=mine | key)
        assert first.status_code == 201
        id = first.json()["id"]
        client.post(f"/streams/{id}/predict", **upload(rows()[0]), headers=mine)
        assert client.post("/streams", json={}, headers=mine).status_code == 400  # one is the limit
    again = Store(path=tmp_path / "streams.db")
    with TestClient(make_app(served, again, limits=few, tokens=True)) as client:
        retry = client.post("/streams", json={"name": "online"}, headers=mine | key)  # the same, with its default
        assert (retry.status_code, retry.json()["id"], retry.json()["position"]) == (201, id, 1)
        other = client.post("/streams", json={"name": "other"}, headers=mine | key)
        assert other.status_code == 409
        assert other.json() == {"error": "this Idempotency-Key was used for another stream; use a new one."}
        assert client.post("/streams", json={"name": "other"}, headers=yours | key).json()["id"] != id
    with TestClient(make_app(served, again, limits=FREE)) as client:
        ids = [client.post("/streams", json={}, headers=key).json()["id"] for _ in "ab"]  # nobody's
        assert ids[0] == ids[1] != id
        assert len({begin(client), begin(client)}) == 2
    again.close()


def test_the_log_is_read_in_pages(bundles, tmp_path):
    store = Store(path=tmp_path / "streams.db", log=True)
    store.migrate()
    mine, yours = ({"Authorization": f"Bearer {store.create_token(name)}"} for name in ("me", "you"))
    with TestClient(make_app({"one": bundles["fedthe"]}, store, limits=FREE, tokens=True)) as client:
        id = client.post("/streams", json={}, headers=mine).json()["id"]
        keys = [None, "k1", None, 'k"3', None]
        answers = [
            client.post(
                f"/streams/{id}/predict",
                **upload(pixels),
                headers=mine | ({"Idempotency-Key": key} if key else {}),
            ).json()
            for pixels, key in zip(rows(5), keys, strict=True)
        ]

        def read(headers=mine, **page):
            return client.get(f"/streams/{id}/log", params=page, headers=headers)

        whole = read().json()
        assert [each["answer"] for each in whole["answers"]] == answers
        assert [each["position"] for each in whole["answers"]] == [0, 1, 2, 3, 4]
        assert [each["key"] for each in whole["answers"]] == keys
        assert whole["next"] is None
        times = [datetime.fromisoformat(each["time"].replace("Z", "+00:00")) for each in whole["answers"]]
        assert times == sorted(times)
        assert timedelta(0) <= datetime.now(timezone.utc) - times[-1] < timedelta(minutes=5)
        first, following = (read(first=at, limit=3).json() for at in (0, 3))
        assert (first["next"], following["next"]) == (3, None)
        assert first["answers"] + following["answers"] == whole["answers"]
        assert read(first=99).json() == {"answers": [], "next": None}
        assert read(yours).status_code == 404
        for wrong in ({"limit": 1001}, {"limit": 0}, {"first": -1}, {"first": 2**63}):
            assert read(**wrong).status_code == 422
    store.close()


def test_keys_of_a_batch_are_looked_up_at_once(bundles, store, monkeypatch):
    """Samples that wait together: old keys, new ones, one twice, one for another sample."""
    app = make_app({"one": bundles["fedthe"]}, store, limits=FREE)
    batcher, lookups = app.state.service.batcher, []
    monkeypatch.setattr(
        store, "find_answers", lambda pairs, find=store.find_answers: lookups.append(pairs) or find(pairs)
    )
    with TestClient(app) as client:
        a, b = begin(client), begin(client)

        def ask(*wanted):
            some = [
                batching.Asked(bundles["fedthe"], rows()[row], stream, key, f"digest {row}")
                for stream, key, row in wanted
            ]
            batcher.call(lambda: batcher._answer(some)).result(30)
            return [each.done.exception() or each.done.result() for each in some]

        old = ask((a, "k", 0), (b, "k", 1))
        found = ask((a, "k", 0), (a, "new", 2), (b, "k", 2), (a, "new", 2), (b, None, 3), (a, "new", 4))
    assert len(lookups) == 2
    assert found[0] == old[0]
    assert found[1] == found[3]
    assert [found[i]["position"] for i in (1, 4)] == [2, 2]
    assert all(isinstance(found[i], batching.Reused) for i in (2, 5))


def test_streams_that_nobody_uses_are_forgotten(bundles, tmp_path, monkeypatch):
    monkeypatch.setattr(batching, "SWEEP", 0.01)
    now = [datetime(2026, 1, 2, tzinfo=timezone.utc)]
    store = Store(path=tmp_path / "streams.db", log=True, clock=lambda: now[0])
    store.migrate()
    served = {"one": bundles["fedthe"]}
    with TestClient(make_app(served, store, limits=FREE, expire=timedelta(days=2))) as client:
        service = client.app.state.service
        old, used = begin(client), begin(client)
        for id in (old, used):
            client.post(f"/streams/{id}/predict", **upload(rows()[0]))
        now[0] += timedelta(days=1)
        client.post(f"/streams/{used}/predict", **upload(rows()[1]))
        assert old in service.owners
        now[0] += timedelta(days=1, seconds=1)
        deadline = time.monotonic() + 20
        while client.get(f"/streams/{old}").status_code != 404:
            assert time.monotonic() < deadline
        client.get("/ready")  # whatever it does after it deleted the stream is done
        assert set(service.owners) == set(service.batcher._open) == {used}
        assert store.read_log(old) == []
        assert client.post(f"/streams/{old}/predict", **upload(rows()[0])).status_code == 404
        assert client.post(f"/streams/{used}/predict", **upload(rows()[2])).json()["position"] == 3
    now[0] += timedelta(days=999)
    with TestClient(make_app(served, store, limits=FREE)) as client:  # nothing expires unless told
        assert client.get(f"/streams/{used}").status_code == 200
    with TestClient(make_app(served, store, limits=FREE, expire=timedelta(days=2))) as client:
        assert client.get(f"/streams/{used}").status_code == 404  # before the first request
    store.close()


def test_a_sweep_that_fails_is_told_and_stops_nothing(bundles, store, monkeypatch, caplog):
    def fail(_):
        raise StoreFailed("the database is away.")

    monkeypatch.setattr(store, "expire", fail)
    with TestClient(make_app({"one": bundles["fedthe"]}, store, limits=FREE, expire=timedelta(days=1))) as client:
        assert client.post(f"/streams/{begin(client)}/predict", **upload(rows()[0])).status_code == 200
    assert "streams that expired stay for now: the database is away." in caplog.text


@pytest.mark.parametrize("days", ["0", "-1", "nan", "inf", "36501"])
def test_days_that_make_no_sense_are_refused(days, tmp_path):
    with pytest.raises(InputError, match="give a number of days above 0"):
        serve([tmp_path], database=str(tmp_path / "streams.db"), expire=float(days))
    assert not (tmp_path / "streams.db").exists()


def test_a_port_that_is_taken_is_said(bundles, store):
    how = {"host": "127.0.0.1", "tokens": False, "rate": 0, "threads": torch.get_num_threads(), "together": 1}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"127.0.0.1 port {port} cannot be used"):
            listen(bundles, store, port=port, **how)


def test_many_callers_at_once(client, bundles):
    """Streams side by side, some with two samples in flight: each stream is as if it were alone."""
    ids = [begin(client, name=f"s{i}") for i in range(6)]
    with ThreadPoolExecutor(12) as pool:
        for pixels in rows():
            together = [
                pool.submit(client.post, f"/streams/{id}/predict", **upload(pixels)) for id in ids for _ in "ab"
            ]
            answers = [each.result() for each in together]
            assert {each.status_code for each in answers} == {200}
    for id, name in zip(ids, range(6), strict=True):
        online = Online(bundles["fedthe"]).stream(f"s{name}")
        for pixels in rows():
            online.predict_batch([pixels, pixels])
        assert client.get(f"/streams/{id}").json()["position"] == 2 * len(rows())
        found = Online(bundles["fedthe"])
        found.restore(client.get(f"/streams/{id}/state").content)
        assert found.name == f"s{name}"
        np.testing.assert_allclose(
            found.predict(rows()[0]).weight, online.predict(rows()[0]).weight, atol=1e-5
        )  # the history of both is the same
    assert client.get("/metrics").text.count("fedthe_batch_size") >= 1


def test_reset_and_delete(client, bundles):
    id = begin(client)
    first = client.post(f"/streams/{id}/predict", **upload(rows()[0])).json()
    client.post(f"/streams/{id}/predict", **upload(rows()[1]))
    assert client.post(f"/streams/{id}/reset").json()["position"] == 0
    assert client.post(f"/streams/{id}/predict", **upload(rows()[0])).json() == first
    assert [each["id"] for each in client.get("/streams").json()["streams"]] == [id]
    assert client.delete(f"/streams/{id}").status_code == 204
    for call in (client.get(f"/streams/{id}"), client.post(f"/streams/{id}/predict", **upload(rows()[0]))):
        assert call.status_code == 404
        assert call.json() == {"error": "there is no such stream."}


def test_several_bundles(bundles, store):
    with TestClient(make_app({"a": bundles["fedthe"], "b": bundles["fedavg"]}, store, limits=FREE)) as client:
        told = client.get("/bundles").json()["bundles"]
        assert [(each["name"], each["method"]) for each in told] == [("a", "FedTHE"), ("b", "FedAvg")]
        assert "name a bundle" in client.post("/predict", **upload(rows()[0])).json()["error"]
        assert client.post("/predict?bundle=c", **upload(rows()[0])).status_code == 404
        plain = client.post("/predict?bundle=b", **upload(rows()[0])).json()
        assert plain["weight"] is None
        assert plain["heads"] is None
        ids = [begin(client, bundle=name) for name in "ab"]
        for id in ids:
            assert client.post(f"/streams/{id}/predict", **upload(rows()[0])).status_code == 200


@pytest.mark.parametrize(
    ("call", "code", "word"),
    [
        ({"files": {"image": ("x", b"no picture", "image/png")}}, 400, "not a readable image"),
        ({"files": {"other": ("x", b"abc", "image/png")}}, 400, "named image"),
        ({"data": {"image": "text"}}, 415, "multipart"),
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 400, "not JSON"),
        ({"json": {"image": "!!"}}, 400, "base64"),
        ({"json": {"image": 3}}, 400, "base64"),
        ({"json": {}}, 400, "JSON must be"),
        ({"json": {"x": [[0.5]]}}, 400, "uint8"),
        ({"json": {"x": "text"}}, 400, "list of numbers"),
        ({"json": []}, 400, "JSON must be"),
        ({"content": b"", "headers": {"content-type": "image/png"}}, 400, "image"),
        ({"content": b"abc", "headers": {"content-type": "text/plain"}}, 415, "multipart"),
        ({"content": b"[" * 100_000, "headers": {"content-type": "application/json"}}, 400, "not JSON"),
    ],
)
def test_bad_samples_change_nothing(client, call, code, word):
    id = begin(client)
    client.post(f"/streams/{id}/predict", **upload(rows()[0]))
    before = client.get(f"/streams/{id}/state").content
    found = client.post(f"/streams/{id}/predict", **call)
    assert found.status_code == code, found.text
    assert word in found.json()["error"]
    assert client.get(f"/streams/{id}/state").content == before


def test_limits(bundles, store):
    small = Limits(body=2000, pixels=100, rate=0)
    with TestClient(make_app({"one": bundles["fedthe"]}, store, limits=small)) as client:
        assert client.post("/predict", content=bytes(3000), headers={"content-type": "image/png"}).status_code == 413
        chunked = client.post("/predict", content=iter([bytes(900)] * 4), headers={"content-type": "image/png"})
        assert chunked.status_code == 413
        found = client.post("/predict", content=as_png(rows()[0]), headers={"content-type": "image/png"})
        assert (found.status_code, "pixels" in found.json()["error"]) == (413, True)
    slow = Limits(rate=1, burst=2)
    with TestClient(make_app({"one": bundles["fedthe"]}, store, limits=slow)) as client:
        codes = [client.get("/bundles").status_code for _ in range(4)]
        assert codes == [200, 200, 429, 429]
        assert client.get("/bundles").headers["retry-after"] == "1"
        assert client.get("/health").status_code == 200


def test_a_bucket_fills_again():
    rate = Rate(Limits(rate=2, burst=3))
    assert [rate.take("a", 0.0) for _ in range(5)] == [0, 0, 0, 0.5, 0.5]
    assert rate.take("b", 0.0) == 0
    assert rate.take("a", 0.25) == 0.25
    assert rate.take("a", 0.5) == 0
    assert rate.take("a", 0.5) == 0.5
    assert [rate.take("a", 100.0) for _ in range(4)] == [0, 0, 0, 0.5]


def test_tokens_keep_streams_apart(bundles, store):
    mine, yours = ({"Authorization": f"Bearer {store.create_token(name)}"} for name in ("me", "you"))
    with TestClient(make_app({"one": bundles["fedthe"]}, store, limits=FREE, tokens=True)) as client:
        for headers in ({}, {"Authorization": "Bearer nonsense"}, {"Authorization": "Basic abc"}):
            for path in ("/bundles", "/streams", "/metrics"):
                found = client.get(path, headers=headers)
                assert found.status_code == 401
                assert "token" in found.json()["error"]
        assert client.get("/health").status_code == 200
        id = client.post("/streams", json={}, headers=mine).json()["id"]
        for call in (client.get, client.delete):
            assert call(f"/streams/{id}", headers=yours).status_code == 404
        assert client.post(f"/streams/{id}/predict", **upload(rows()[0]), headers=yours).status_code == 404
        assert client.post(f"/streams/{id}/predict", **upload(rows()[0]), headers=mine).status_code == 200
        assert client.get("/streams", headers=yours).json() == {"streams": []}
        store.revoke_token("me")
        assert client.get("/bundles", headers=mine).status_code == 401


def test_pages_headers_and_schema(client):
    for path in ("/", "/docs", "/static/page.js", "/static/page.css"):
        found = client.get(path)
        assert found.status_code == 200, path
        assert "script-src 'self'" in found.headers["content-security-policy"]
        assert found.headers["x-content-type-options"] == "nosniff"
        assert "http://" not in found.text.replace("http://www.w3.org", "")
    assert client.get("/static/../app.py").status_code == 404
    assert client.get("/static/app.py").status_code == 404
    assert client.get("/ready").json() == {"status": "ok"}
    schema = client.get("/openapi.json").json()
    assert "/streams/{stream}/predict" in schema["paths"]
    assert client.get("/nothing").json() == {"error": "Not Found"}


def test_what_nobody_expected_is_not_shown(client, monkeypatch, caplog):
    def explode(*_):
        raise RuntimeError("secret detail")

    monkeypatch.setattr("fedthe.deploy.service.routes.describe_bundle", explode)
    found = client.get("/bundles")
    assert found.status_code == 500
    assert "secret" not in found.text
    assert "secret detail" in caplog.text


def test_metrics_count(client):
    id = begin(client)
    client.post(f"/streams/{id}/predict", **upload(rows()[0]))
    client.get("/streams/nothing")
    text = client.get("/metrics").text
    assert 'fedthe_answers_total{bundle="one",status="unwatched"} 1.0' in text
    assert 'fedthe_refused_total{code="404"} 1.0' in text
    assert "fedthe_answer_seconds_bucket" in text
    assert json.loads(client.get("/health").text) == {"status": "ok"}
