"""What a caller may not exceed: bytes of a body, pixels of an image, requests per second."""

from __future__ import annotations

import io
import time
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from ...data.decode import FORMATS
from ...errors import InputError

CALLERS = 10_000  # whose rates are remembered


@dataclass(frozen=True)
class Limits:
    body: int = 10 * 2**20  # bytes
    pixels: int = 25_000_000  # of an image, according to its header
    rate: float = 50.0  # requests per second of one caller, on average; 0: as many as come
    burst: int = 100  # and at once
    seconds: float = 30.0  # for the body to arrive, and for the answer
    streams: int = 10_000  # of one caller


class TooLarge(InputError):
    """More bytes or pixels than the limit."""


class Rate:
    """A bucket of tokens for each caller, which fills at the rate."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, and when

    def take(self, caller: str, now: float | None = None) -> float:
        """Take a token: 0, or the seconds to wait for one."""
        if not self._limits.rate:
            return 0.0
        now = time.monotonic() if now is None else now
        tokens, when = self._buckets.pop(caller, (float(self._limits.burst), now))
        tokens = min(float(self._limits.burst), tokens + (now - when) * self._limits.rate)
        wait = max(0.0, (1 - tokens) / self._limits.rate)
        self._buckets[caller] = (tokens if wait else tokens - 1, now)
        while len(self._buckets) > CALLERS:
            self._buckets.popitem(last=False)
        return wait


def check_pixels(content: bytes, most: int) -> None:
    """Refuse an image by its header, before it is decoded. What is no image is refused when it is decoded."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                size = image.width * image.height
        except Image.DecompressionBombError:
            size = most + 1
        except Exception:  # of any kind, from damaged headers
            return
    if size > most:
        raise TooLarge(f"the image has more than {most:,} pixels; make it smaller.")


class Exceeded(Exception):
    """A body with more bytes than the limit."""


class LimitBody:
    """Counts the bytes of bodies as they arrive, and stops at the limit."""

    def __init__(self, app: Any, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        count = 0

        async def counting() -> Any:
            nonlocal count
            message = await receive()
            count += len(message.get("body", b""))
            if count > self._limit:
                raise Exceeded(f"the body has more than {self._limit:,} bytes; send less.")
            return message

        await self._app(scope, counting if scope["type"] == "http" else receive, send)
