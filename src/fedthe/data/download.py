"""One file over HTTP: resumed where it was cut, and bounded in size, time and redirects, whatever the server does."""

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

Progress = Callable[[int, "int | None"], None]  # bytes so far, bytes in all where that is known

PAUSES = (0.5, 2.0)  # seconds between tries; so there are three
TIMEOUT = 30.0  # seconds without a byte
WINDOW = 60.0  # seconds, in each of which SLOWEST bytes a second must come
SLOWEST = 2_000
LONGEST = 24 * 3600.0  # seconds for one file
REDIRECTS = 5
CHUNK = 1 << 18
LIMIT = 8 << 30  # bytes of one file; ImageNet-R, the largest, has 2.2 GB


def download(url: str, part: Path, progress: Progress | None = None) -> None:
    """`url` into `part`, from where an earlier try or run was cut; three tries."""
    deadline = monotonic() + LONGEST
    for pause in (*PAUSES, None):
        try:
            with _Watch(deadline) as watch:
                _transfer(url, part, progress, watch)
            return
        except InputError:
            raise
        except (OSError, HTTPException, ValueError) as error:  # ValueError: a header that makes no sense
            cause = error.reason if isinstance(error, urllib.error.URLError) else None
            unknown = isinstance(cause, socket.gaierror)  # an unknown host stays unknown
            if pause is None or unknown or monotonic() > deadline:
                raise InputError(
                    f"{url} failed ({say_error(cause if isinstance(cause, OSError) else error)})"
                ) from None
            sleep(pause)


def _transfer(url: str, part: Path, progress: Progress | None, watch: _Watch) -> None:
    tag_file = part.with_name(f"{part.name}.tag")  # which version of the file the bytes so far belong to
    tag = _plain(tag_file.read_text(encoding="utf-8", errors="replace")) if tag_file.exists() else ""
    have = part.stat().st_size if part.exists() and tag else 0
    headers = {"User-Agent": "fedthe", "Accept-Encoding": "identity"}
    if have:
        headers |= {"Range": f"bytes={have}-", "If-Range": tag}
    try:
        response = _open(url, headers, watch)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416 and error.headers.get("Content-Range") == f"bytes */{have}":
                return  # all of it was there already
            if error.code == 416:
                part.unlink(missing_ok=True)
            elif error.code < 500 and error.code not in (408, 429):
                raise InputError(f"{url} answers {error.code} {flatten(error.reason, 60)}") from None
            raise
    with response:
        have, total = _find_start(url, response, part, have, tag)
        if total is not None and total > LIMIT:
            raise InputError(f"{url} has more than {LIMIT} bytes")
        with part.open("ab" if have else "wb") as file:
            if not have:  # only now that the old bytes are gone: a new tag must never stand for them
                tag_file.write_text(_tag(response.headers), encoding="utf-8")
            while chunk := response.read1(CHUNK):  # what is there: `read` would wait for all of a chunk, byte by byte
                file.write(chunk)
                have += len(chunk)
                watch.received += len(chunk)
                if have > LIMIT:
                    part.unlink()
                    raise InputError(f"{url} sends more than {LIMIT} bytes")
                if progress:
                    progress(have, total)
    watch.check()
    if total is not None and have != total:
        raise OSError(f"cut after {have} of {total} bytes")


def _find_start(url: str, response: Any, part: Path, asked: int, tag: str) -> tuple[int, int | None]:
    """Where the body starts in the file, and how long the file is, if the answer says so."""
    if response.status == 200:
        return 0, _read_length(response.headers.get("Content-Length"))
    if response.status != 206:
        raise InputError(f"{url} answers {response.status}, which is no file")
    found = re.fullmatch(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18}|\*)", response.headers.get("Content-Range") or "")
    came = _tag(response.headers)
    # An answer to If-Range with an ETag must repeat the ETag; with a date, it need not repeat the date.
    same = came == tag if tag.startswith('"') else came in ("", tag)
    if not found or int(found[1]) != asked or not asked or not same:
        part.unlink(missing_ok=True)  # so that the next try starts over
        raise OSError("another part came than was asked for")
    return asked, _read_length(found[2])


def _read_length(text: str | None) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text or "") and text else None


def _tag(headers: Message) -> str:
    """What If-Range may name: a strong ETag or a date; with neither, a cut download starts over."""
    tag = _plain(headers.get("ETag") or "")
    return tag if tag and not tag.startswith("W/") else _plain(headers.get("Last-Modified") or "")


def _plain(tag: str) -> str:
    """The tag, if it may stand in a header."""
    return tag if re.fullmatch(r"[ -~]{1,200}", tag) else ""


def _open(url: str, headers: dict[str, str], watch: _Watch) -> Any:
    """The answer of the server, or of the one that it redirects to.

    urllib would follow redirects itself, but reads their bodies whole and takes other schemes.
    """
    opener = request.OpenerDirector()
    for handler in (
        request.ProxyHandler(),
        _Http(watch),
        _Https(watch),
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
    """Where a redirect leads: to https anywhere; from http also to http on the same host."""
    try:
        new = urljoin(url, quote(location, encoding="iso-8859-1", errors="replace", safe=string.punctuation))
        old_parts, parts = urlsplit(url), urlsplit(new)
        same_host = parts.hostname == old_parts.hostname
    except ValueError:
        raise InputError(f"{url} redirects to {clean(location)!r}, which is no address") from None
    if parts.scheme == "https" or (parts.scheme == old_parts.scheme == "http" and same_host):
        return new
    raise InputError(f"{url} redirects to {clean(new, 200)}, but only redirects to https are followed")


class _Watch(threading.Thread):
    """Cuts the line of a server that sends less than SLOWEST bytes a second, in its headers too, or for too long.

    A socket's own timeout is for a single read: a byte now and then would keep the reader waiting forever.
    """

    def __init__(self, deadline: float) -> None:
        super().__init__(daemon=True)
        self.deadline = deadline
        self.line: socket.socket | None = None
        self.received = 0
        self.cut = False
        self.over = threading.Event()

    def run(self) -> None:
        before = 0
        while not self.over.wait(WINDOW):
            slow = self.received - before < SLOWEST * WINDOW
            before = self.received
            if self.line is not None and (slow or monotonic() > self.deadline):
                self.cut = True
                with suppress(OSError):  # closed meanwhile
                    # the plain socket's method: that of a TLS socket would take the reader's state away
                    socket.socket.shutdown(self.line, socket.SHUT_RDWR)
                return

    def check(self) -> None:
        if self.cut:
            raise OSError(f"it sends less than {SLOWEST} bytes a second, or took more than {LONGEST / 3600:g} hours")

    def __enter__(self) -> _Watch:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.over.set()
        self.join()
        if error is not None and not isinstance(error, InputError):
            self.check()  # the true reason of what the reader has met


class _Http(request.HTTPHandler):
    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def http_open(self, req: request.Request) -> http.client.HTTPResponse:
        return self.do_open(_watched(http.client.HTTPConnection, self.watch), req)


class _Https(request.HTTPSHandler):
    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def https_open(self, req: request.Request) -> http.client.HTTPResponse:
        return self.do_open(_watched(http.client.HTTPSConnection, self.watch), req)


def _watched(kind: Any, watch: _Watch) -> Any:
    """A connection that shows its socket to `watch`."""

    class Connection(kind):  # type: ignore[misc]
        def connect(self) -> None:
            super().connect()
            watch.line = self.sock

    return Connection
