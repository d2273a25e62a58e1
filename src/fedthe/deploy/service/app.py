"""The service: bundles answer streams over HTTP. See docs/service.md."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
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
from .routes import router
from .state import Service
from .store import Store

log = logging.getLogger("fedthe.service")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
}
CODES: dict[type[InputError], int] = {Missing: 404, Reused: 422, TooLarge: 413, InputError: 400}


def make_app(
    bundles: Mapping[str, Bundle],
    store: Store,
    *,
    limits: Limits | None = None,
    tokens: bool = False,
    together: int = MOST,
) -> FastAPI:
    """The application. tokens: callers need one. together: the most samples answered at once."""
    limits = limits or Limits()
    batcher = Batcher(store, {bundle.id: bundle for bundle in bundles.values()}, together)
    service = Service(dict(bundles), store, batcher, limits, tokens, Rate(limits))

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

    @app.middleware("http")
    async def guard(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        """Headers on every answer; and an error that nobody expected is told to the operator, not to the caller."""
        try:
            response = await call(request)
        except Exception:
            log.exception("%s %s failed", request.method, clean(request.url.path))
            response = JSONResponse({"error": "something went wrong in the service."}, 500)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        if response.status_code >= 400:
            service.metrics.refused.labels(str(response.status_code)).inc()
        return response

    return app


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
