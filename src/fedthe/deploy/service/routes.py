"""What can be asked of the service."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import datetime
from functools import partial
from importlib import resources
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import HTMLResponse
from starlette.exceptions import HTTPException

from ...errors import InputError
from ...names import name_method
from ..bundle import Bundle
from ..picture import take_sample
from . import docs_page, shapes
from .batching import Asked, Busy, Missing
from .limits import Limits, check_pixels
from .state import Service
from .store import LARGEST, Logged, StoredStream, StreamEntry, Token

SMALL = 2**15  # bytes
LONGEST = 1000  # answers of a page of the log
FILES = {"page.js": "text/javascript", "page.css": "text/css"}
router = APIRouter()


async def get_service(request: Request) -> Service:
    # a plain function would be sent to a thread at every request
    found: Service = request.app.state.service
    return found


async def find_caller(
    request: Request, authorization: Annotated[str | None, Header(max_length=500)] = None
) -> Token | None:
    """Who asks; None where no token is needed."""
    service, token = await get_service(request), None
    if service.tokens:
        kind, _, secret = (authorization or "").partition(" ")
        token = await asyncio.to_thread(service.store.find_token, secret.strip()) if kind == "Bearer" else None
        if token is None:
            raise HTTPException(401, "send a token: Authorization: Bearer TOKEN.", {"WWW-Authenticate": "Bearer"})
    who = f"token {token.id}" if token else f"host {request.client.host if request.client else ''}"
    if wait := service.rate.take(who):
        raise HTTPException(429, "too many requests; slow down.", {"Retry-After": str(int(wait) + 1)})
    return token


Served = Annotated[Service, Depends(get_service)]
Caller = Annotated[Token | None, Depends(find_caller)]
Id = Annotated[str, Path(pattern=r"^[\w.-]{1,64}$")]
Key = Annotated[str | None, Header(alias="Idempotency-Key", pattern=r"^[\x21-\x7e]{1,128}$")]


@router.get("/", include_in_schema=False)
async def page() -> HTMLResponse:
    return HTMLResponse(_read_file("index.html"))


@router.get("/static/{name}", include_in_schema=False)
async def file(name: str) -> Response:
    if name not in FILES:
        raise Missing("there is no such file.")
    return Response(_read_file(name), media_type=FILES[name])


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    return HTMLResponse(docs_page.write_docs(request.app.openapi()))


@router.get("/health", response_model=shapes.Health)
async def health() -> dict[str, str]:
    """Whether the process lives."""
    return {"status": "ok"}


@router.get("/ready", response_model=shapes.Health)
async def ready(service: Served) -> dict[str, str]:
    """Whether it can answer: the database and the thread that computes do."""
    await _wait(service, service.batcher.call(lambda: service.store.read_stream("ready")))
    return {"status": "ok"}


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(_: Caller, service: Served) -> Response:
    """For Prometheus."""
    return Response(service.metrics.write(service.batcher.sizes), media_type="text/plain; version=0.0.4")


@router.get("/bundles", response_model=shapes.Bundles)
async def bundles(_: Caller, service: Served) -> dict[str, Any]:
    """What is served."""
    return {"bundles": [describe_bundle(name, bundle) for name, bundle in service.bundles.items()]}


def own_id(token: Token | None) -> int | None:
    """What is filed as the owner of a caller's streams."""
    return token.id if token else None


async def find_own(service: Service, stream: str, token: Token | None) -> StoredStream:
    """The stream, if it is the caller's."""
    found = await _wait(service, service.batcher.call(lambda: service.store.read_stream(stream)))
    if found is None or found.token_id != own_id(token):
        raise Missing("there is no such stream.")
    own: StoredStream = found
    return own


@router.post("/predict", response_model=shapes.Answer, openapi_extra=shapes.SAMPLE)
async def predict(
    request: Request, service: Served, token: Caller, bundle: Annotated[str | None, Query(max_length=200)] = None
) -> Response:
    """Answer one sample, as the first of a stream that is not kept."""
    name, chosen = service.pick(bundle)
    sample, digest = await read_sample(request, chosen, service.limits)
    return await answer(service, name, Asked(chosen, sample, digest=digest))


@router.post("/streams", status_code=201, response_model=shapes.Stream)
async def create(
    service: Served, token: Caller, wanted: shapes.NewStream, idempotency_key: Key = None
) -> dict[str, Any]:
    """Begin a stream. Its name keys the draws of augmented views. With an Idempotency-Key, a retry gets the same."""
    begin = partial(service.begin, wanted, own_id(token), idempotency_key)
    return describe_stream(service, await _wait(service, service.batcher.call(begin)))


@router.get("/streams", response_model=shapes.Streams)
async def streams(service: Served, token: Caller) -> dict[str, Any]:
    """The caller's streams."""
    found = await _wait(service, service.batcher.call(lambda: service.store.list_streams(own_id(token))))
    return {"streams": [describe_stream(service, each) for each in found]}


@router.get("/streams/{stream}", response_model=shapes.Stream)
async def read(stream: Id, service: Served, token: Caller) -> dict[str, Any]:
    return describe_stream(service, await find_own(service, stream, token))


@router.get(
    "/streams/{stream}/state",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}}},
)
async def state(stream: Id, service: Served, token: Caller) -> Response:
    """What `Online.restore` takes, to continue the stream elsewhere."""
    return Response((await find_own(service, stream, token)).state, media_type="application/octet-stream")


@router.get("/streams/{stream}/log", response_model=shapes.Log)
async def log(
    stream: Id,
    service: Served,
    token: Caller,
    first: Annotated[int, Query(ge=0, le=LARGEST)] = 0,
    limit: Annotated[int, Query(ge=1, le=LONGEST)] = 100,
) -> Response:
    """A page of the answers that are kept, from the position `first` on."""
    await find_own(service, stream, token)
    # not in the thread that computes: samples need not wait for a long page
    content = await asyncio.to_thread(lambda: write_log(service.store.read_log(stream, first, limit + 1), limit))
    return Response(content, media_type="application/json")


@router.post("/streams/{stream}/predict", response_model=shapes.Answer, openapi_extra=shapes.SAMPLE)
async def next_answer(
    stream: Id, request: Request, service: Served, token: Caller, idempotency_key: Key = None
) -> Response:
    """Answer the next sample. With an Idempotency-Key, a retry gets the same answer, and the sample counts once."""
    known = service.owners.get(stream)  # who owns a stream, and its bundle, never change
    if known is None:
        known = own_id(token), (await find_own(service, stream, token)).bundle
        service.remember(stream, *known)
    owner, id = known
    if owner != own_id(token):
        raise Missing("there is no such stream.")
    name, bundle = service.pick(service.name_of(id))
    sample, digest = await read_sample(request, bundle, service.limits)
    try:
        return await answer(service, name, Asked(bundle, sample, stream, idempotency_key, digest))
    except Missing:  # another process deleted it
        service.owners.pop(stream, None)
        raise


@router.post("/streams/{stream}/reset", response_model=shapes.Stream)
async def reset(stream: Id, service: Served, token: Caller) -> dict[str, Any]:
    """Forget what came so far."""
    found = await find_own(service, stream, token)

    def begin_again() -> None:
        service.batcher.forget(stream)
        online = service.batcher.begin(found.bundle, found.name)
        service.store.reset_stream(stream, online.state())

    await _wait(service, service.batcher.call(begin_again))
    return describe_stream(service, await find_own(service, stream, token))


@router.delete("/streams/{stream}", status_code=204)
async def delete(stream: Id, service: Served, token: Caller) -> Response:
    await find_own(service, stream, token)

    def drop() -> None:
        service.batcher.forget(stream)
        service.owners.pop(stream, None)
        service.store.delete_stream(stream)

    await _wait(service, service.batcher.call(drop))
    return Response(status_code=204)


async def answer(service: Service, name: str, asked: Asked) -> Response:
    with service.metrics.seconds.labels(name).time():
        found = await _wait(service, service.batcher.ask(asked))
    service.metrics.answers.labels(name, found["status"]).inc()
    if found["weight"] is not None:
        service.metrics.weight.labels(name).observe(found["weight"])
    return Response(json.dumps(found), media_type="application/json")  # to check its shape takes long


async def _wait(service: Service, future: Future[Any]) -> Any:
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), service.limits.seconds)
    except asyncio.TimeoutError:
        raise Busy("the answer takes too long; try again later") from None


async def read_sample(request: Request, bundle: Bundle, limits: Limits) -> tuple[Any, str]:
    """The sample in the body of a request, and a digest of it."""
    try:
        value, content = await asyncio.wait_for(_read_body(request), limits.seconds)
    except asyncio.TimeoutError:
        raise HTTPException(408, "the body takes too long to arrive.") from None
    if isinstance(value, bytes):
        check_pixels(value, limits.pixels)
    # a small image is decoded faster than a thread is asked to
    small = len(content) < SMALL
    sample = take_sample(value, bundle.input) if small else await asyncio.to_thread(take_sample, value, bundle.input)
    return sample, hashlib.sha256(content).hexdigest()


async def _read_body(request: Request) -> tuple[Any, bytes]:
    """What is in it: the bytes of an image, or numbers; and what a retry must equal."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        async with request.form(max_files=1, max_fields=1) as form:
            upload = form.get("image")
            if upload is None or isinstance(upload, str):
                raise InputError("the form must have a file named image.")
            content = await upload.read()
        return content, content
    content = await request.body()
    if kind.startswith("image/") or kind == "application/octet-stream":
        return content, content
    if kind == "application/json":
        return _read_json(content), content
    raise HTTPException(415, "send multipart/form-data with a file named image, an image, or JSON with image or x.")


def _read_json(content: bytes) -> Any:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        raise InputError("the body is not JSON.") from None
    if not isinstance(value, dict) or not ("image" in value) ^ ("x" in value):
        raise InputError('JSON must be {"image": BASE64} or {"x": NUMBERS}.')
    if "x" in value:
        if not isinstance(value["x"], list):
            raise InputError("x must be a list of numbers.")
        return value["x"]
    try:
        return base64.b64decode(value["image"], validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise InputError("image must be text in base64.") from None


def describe_bundle(name: str, bundle: Bundle) -> dict[str, Any]:
    takes = {"dtype": bundle.input.dtype, "shape": list(bundle.input.shape)}
    return {"name": name, "method": name_method(bundle.name), "classes": list(bundle.classes), "input": takes}


def describe_stream(service: Service, stream: StreamEntry) -> dict[str, Any]:
    told = {name: getattr(stream, name) for name in ("id", "position", "status", "created", "used")}
    return told | {"bundle": service.name_of(stream.bundle)}


def write_log(kept: Sequence[Logged], limit: int) -> str:
    """A page as JSON, of one answer more than fits on it. The answers are JSON already."""
    rows = [
        f'{{"position": {each.position}, "time": {json.dumps(each.time and write_time(each.time))}, '
        f'"key": {json.dumps(each.key)}, "answer": {each.body}}}'
        for each in kept[:limit]
    ]
    following = kept[limit].position if len(kept) > limit else None
    return f'{{"answers": [{", ".join(rows)}], "next": {json.dumps(following)}}}'


def write_time(time: datetime) -> str:
    """ISO 8601, as the other times are written."""
    return time.isoformat().replace("+00:00", "Z")


def _read_file(name: str) -> bytes:
    return resources.files(__package__).joinpath("page").joinpath(name).read_bytes()
