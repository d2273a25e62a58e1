"""The service: bundles answer streams over HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ... import __version__
from ...errors import Failed, InputError
from ...text import clean, flatten
from ..bundle import Bundle
from . import shapes
from .batching import MOST, Batcher, Busy, Missing, Reused
from .limits import Exceeded, LimitBody, Limits, Rate, TooLarge
from .metrics import Metrics
from .routes import router
from .state import Service
from .store import Store

log = logging.getLogger("fedthe.service")
HEADERS = [
    (name.lower().encode(), value.encode())
    for name, value in {
        "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
        "Cross-Origin-Opener-Policy": "same-origin",
    }.items()
]
CODES: dict[type[InputError], int] = {Missing: 404, Reused: 409, TooLarge: 413, InputError: 400}


def make_app(
    bundles: Mapping[str, Bundle],
    store: Store,
    *,
    limits: Limits | None = None,
    tokens: bool = False,
    together: int = MOST,
    expire: timedelta | None = None,
) -> FastAPI:
    """The application.

    Args:
        tokens: callers need one.
        together: the most samples answered at once.
        expire: delete streams that were not used for so long.
    """
    limits = limits or Limits()
    owners: dict[str, tuple[int | None, str]] = {}
    by_id = {bundle.id: bundle for bundle in bundles.values()}
    batcher = Batcher(store, by_id, together, expire=expire, dropped=lambda stream: owners.pop(stream, None))
    service = Service(dict(bundles), store, batcher, limits, tokens, Rate(limits), owners=owners)

    @asynccontextmanager
    async def live(app: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        try:
            yield
        finally:
            await asyncio.to_thread(batcher.stop)

    app = FastAPI(
        title="fedthe",
        version=__version__,
        description="Bundles of fedthe answer streams of samples.",
        lifespan=live,
        docs_url=None,  # which would load scripts from elsewhere; the router has a page
        redoc_url=None,
        responses=shapes.ERRORS,
    )
    app.state.service = service
    app.include_router(router)
    app.add_middleware(LimitBody, limit=limits.body)
    _handle_errors(app)

    app.add_middleware(Guard, metrics=service.metrics)
    return app


class Guard:
    """Headers on every answer; an error that nobody expected is told to the operator, not to the caller."""

    def __init__(self, app: Any, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def sending(message: Any) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message["headers"] = [*message["headers"], *HEADERS]
                if message["status"] >= 400:
                    self._metrics.refused.labels(str(message["status"])).inc()
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception:
            log.exception("%s %s failed", scope["method"], clean(scope["path"]))
            if not begun:
                await JSONResponse({"error": "something went wrong in the service."}, 500)(scope, receive, sending)


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(InputError)
    async def refuse(request: Request, error: InputError) -> JSONResponse:
        code = next(code for kind, code in CODES.items() if isinstance(error, kind))
        return JSONResponse({"error": flatten(error, 500)}, code)

    @app.exception_handler(Failed)
    async def fail(request: Request, error: Failed) -> JSONResponse:
        log.error("%s %s: %s", request.method, clean(request.url.path), flatten(error, 500))
        said = flatten(error, 200) if isinstance(error, Busy) else "the service cannot answer now"
        return JSONResponse({"error": f"{said}."}, 503, {"Retry-After": "1"})

    @app.exception_handler(HTTPException)
    async def tell(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": flatten(error.detail, 500)}, error.status_code, dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def explain(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(map(str, first.get("loc", ())))
        return JSONResponse({"error": f"{clean(where, 100)}: {flatten(first.get('msg', 'is not valid'), 200)}."}, 422)

    @app.exception_handler(Exceeded)
    async def stop(request: Request, error: Exceeded) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 413, {"Connection": "close"})
