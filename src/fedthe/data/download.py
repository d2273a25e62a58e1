"""Download a file over HTTP: interrupted downloads resume; size, time and redirects are bounded."""

from __future__ import annotations

import http.client
import re
import socket
import string
import threading
import urllib.error
from collections.abc import Callable
from contextlib import suppress
from email.message import Message
from http.client import HTTPException
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Any
from urllib import request
from urllib.parse import quote, urljoin, urlsplit

from ..errors import InputError
from ..foreign import say_error
from ..text import clean, flatten

OnProgress = Callable[[int, "int | None"], None]  # bytes so far, and in total if known

PAUSES = (0.5, 2.0)  # seconds between the three tries
TIMEOUT = 30.0  # seconds without a byte
WINDOW = 60.0  # seconds over which at least SLOWEST bytes a second must arrive
SLOWEST = 2_000
LONGEST = 24 * 3600.0  # seconds for one file
REDIRECTS = 5
CHUNK = 1 << 18
LIMIT = 8 << 30  # bytes of one file; ImageNet-R, the largest, has 2.2 GB


def download(url: str, part: Path, progress: OnProgress | None = None) -> None:
    """Download `url` to `part` in at most three tries, resuming what an earlier try or run left."""
    deadline = monotonic() + LONGEST
    for pause in (*PAUSES, None):
        try:
            with _Watchdog(deadline) as watchdog:
                _transfer(url, part, progress, watchdog)
            return
        except InputError:
            raise
        except (OSError, HTTPException, ValueError) as error:  # ValueError: a malformed header
            cause = error.reason if isinstance(error, urllib.error.URLError) else None
            unknown = isinstance(cause, socket.gaierror)  # another try would not help
            if pause is None or unknown or monotonic() > deadline:
                raise InputError(
                    f"{url} failed ({say_error(cause if isinstance(cause, OSError) else error)})"
                ) from None
            sleep(pause)


def _transfer(url: str, part: Path, progress: OnProgress | None, watchdog: _Watchdog) -> None:
    tag_file = part.with_name(f"{part.name}.tag")  # the version of the file that the bytes so far belong to
    tag = _plain(tag_file.read_text(encoding="utf-8", errors="replace")) if tag_file.exists() else ""
    have = part.stat().st_size if part.exists() and tag else 0
    headers = {"User-Agent": "fedthe", "Accept-Encoding": "identity"}
    if have:
        headers |= {"Range": f"bytes={have}-", "If-Range": tag}
    try:
        response = _open(url, headers, watchdog)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416 and error.headers.get("Content-Range") == f"bytes */{have}":
                return  # it is complete already
            if error.code == 416:
                part.unlink(missing_ok=True)
            elif error.code < 500 and error.code not in (408, 429):
                raise InputError(f"{url} returned {error.code} {flatten(error.reason, 60)}") from None
            raise
    with response:
        have, total = _find_start(url, response, part, have, tag)
        if total is not None and total > LIMIT:
            raise InputError(f"{url} has more than {LIMIT} bytes")
        with part.open("ab" if have else "wb") as file:
            if not have:  # only after the old bytes are gone: the new tag must not describe them
                tag_file.write_text(_tag(response.headers), encoding="utf-8")
            while chunk := response.read1(CHUNK):  # whatever has arrived; `read` would wait for a whole chunk
                file.write(chunk)
                have += len(chunk)
                watchdog.received += len(chunk)
                if have > LIMIT:
                    part.unlink()
                    raise InputError(f"{url} sends more than {LIMIT} bytes")
                if progress:
                    progress(have, total)
    watchdog.check()
    if total is not None and have != total:
        raise OSError(f"interrupted after {have} of {total} bytes")


def _find_start(url: str, response: Any, part: Path, asked: int, tag: str) -> tuple[int, int | None]:
    """The offset at which the body starts, and the length of the file if the response gives it."""
    if response.status == 200:
        return 0, _read_length(response.headers.get("Content-Length"))
    if response.status != 206:
        raise InputError(f"{url} returned {response.status} instead of a file")
    found = re.fullmatch(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18}|\*)", response.headers.get("Content-Range") or "")
    came = _tag(response.headers)
    # A response to If-Range must repeat an ETag, but need not repeat a date.
    same = came == tag if tag.startswith('"') else came in ("", tag)
    if not found or int(found[1]) != asked or not asked or not same:
        part.unlink(missing_ok=True)  # so that the next try starts over
        raise OSError("the server sent another range than requested")
    return asked, _read_length(found[2])


def _read_length(text: str | None) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text or "") and text else None


def _tag(headers: Message) -> str:
    """The validator for If-Range: a strong ETag, or a date. Without either, an interrupted download starts over."""
    tag = _plain(headers.get("ETag") or "")
    return tag if tag and not tag.startswith("W/") else _plain(headers.get("Last-Modified") or "")


def _plain(tag: str) -> str:
    """The tag if a header may contain it, else an empty string."""
    return tag if re.fullmatch(r"[ -~]{1,200}", tag) else ""


def _open(url: str, headers: dict[str, str], watchdog: _Watchdog) -> Any:
    """The response, after redirects. urllib's own would read redirect bodies whole and accept other schemes."""
    opener = request.OpenerDirector()
    for handler in (
        request.ProxyHandler(),
        _WatchedHandler(watchdog),
        request.HTTPDefaultErrorHandler(),
        request.HTTPErrorProcessor(),
        request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    here = url
    for _ in range(REDIRECTS + 1):
        try:
            return opener.open(request.Request(here, headers=headers), timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            if error.code not in (301, 302, 303, 307, 308) or not error.headers.get("Location"):
                raise
            with error:
                here = follow(here, error.headers["Location"])
    raise InputError(f"{url} redirects more than {REDIRECTS} times")


def follow(url: str, location: str) -> str:
    """The target of a redirect: https anywhere; from http, also http on the same host."""
    try:
        new = urljoin(url, quote(location, encoding="iso-8859-1", errors="replace", safe=string.punctuation))
        old_parts, parts = urlsplit(url), urlsplit(new)
        same_host = parts.hostname == old_parts.hostname
    except ValueError:
        raise InputError(f"{url} redirects to {clean(location)!r}, which is not a URL") from None
    if parts.scheme == "https" or (parts.scheme == old_parts.scheme == "http" and same_host):
        return new
    raise InputError(f"{url} redirects to {clean(new, 200)}, but only redirects to https are followed")


class _Watchdog(threading.Thread):
    """Disconnects a server that sends less than SLOWEST bytes a second, headers included, or takes too long.

    A socket's own timeout applies to a single read: a byte now and then would keep the reader waiting forever.
    """

    def __init__(self, deadline: float) -> None:
        super().__init__(daemon=True)
        self.deadline = deadline
        self.socket: socket.socket | None = None
        self.received = 0
        self.cut = False
        self.over = threading.Event()

    def run(self) -> None:
        before = 0
        while not self.over.wait(WINDOW):
            slow = self.received - before < SLOWEST * WINDOW
            before = self.received
            if self.socket is not None and (slow or monotonic() > self.deadline):
                self.cut = True
                with suppress(OSError):  # already closed
                    # not a TLS socket's own method, which would drop state that the reader uses
                    socket.socket.shutdown(self.socket, socket.SHUT_RDWR)
                return

    def check(self) -> None:
        if self.cut:
            raise OSError(f"it sends less than {SLOWEST} bytes a second, or took more than {LONGEST / 3600:g} hours")

    def __enter__(self) -> _Watchdog:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.over.set()
        self.join()
        if error is not None and not isinstance(error, InputError):
            self.check()  # the real cause of the reader's error


class _WatchedHandler(request.HTTPSHandler, request.HTTPHandler):
    """http and https over connections whose sockets the watchdog sees."""

    def __init__(self, watchdog: _Watchdog) -> None:
        super().__init__()
        self.watchdog = watchdog

    def http_open(self, req: request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._watch(http.client.HTTPConnection), req)

    def https_open(self, req: request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._watch(http.client.HTTPSConnection), req)

    def _watch(self, kind: Any) -> Any:
        watchdog = self.watchdog

        class Connection(kind):  # type: ignore[misc]
            def connect(self) -> None:
                super().connect()
                watchdog.socket = self.sock

        return Connection
