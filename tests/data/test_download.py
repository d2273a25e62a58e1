"""Downloads from a server on this machine that does what no server should: slow, endless, false, and elsewhere."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fedthe import store
from fedthe.data import download, fetch, package
from fedthe.data.download import follow
from fedthe.data.fetch import RECIPES, Origin, can_be_trusted
from helpers import fails

Answer = bytes | Callable[[socket.socket], None]


class Server:
    """Answers each connection with the next of `answers`, raw, and then hangs up; every loop is bounded."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.asked: list[bytes] = []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.socket.settimeout(0.05)
        self.over = threading.Event()
        self.threads: list[threading.Thread] = []
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"

    def serve(self) -> None:
        while not self.over.is_set():
            try:
                line, _ = self.socket.accept()
            except TimeoutError:
                continue
            thread = threading.Thread(target=self.answer, args=(line, self.answers.pop(0) if self.answers else b""))
            self.threads.append(thread)
            thread.start()

    def answer(self, line: socket.socket, answer: Answer) -> None:
        with line:
            line.settimeout(5)
            try:
                self.asked.append(line.recv(65536))
                if isinstance(answer, bytes):
                    line.sendall(answer)
                else:
                    answer(line)
            except OSError:
                pass  # the client has had enough


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(download, "PAUSES", (0.0, 0.0))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server()
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield server
    server.over.set()
    for each in (thread, *server.threads):
        each.join(timeout=10)
    server.socket.close()


def redirect(location: str, code: int = 302) -> bytes:
    return f"HTTP/1.1 {code} Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode("latin1")


def whole(body: bytes, *headers: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


# ---------------------------------------------------------------- redirects


def test_redirects_on_the_same_host_are_followed(server: Server, tmp_path: Path) -> None:
    server.answers = [redirect("/b"), redirect(f"{server.url}/c", 308), whole(b"content")]
    download.download(f"{server.url}/a", tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == b"content"
    assert [asked.split()[1] for asked in server.asked] == [b"/a", b"/b", b"/c"]


def test_redirects_are_counted(server: Server, tmp_path: Path) -> None:
    server.answers = [redirect("/again")] * 50
    fails(lambda: download.download(f"{server.url}/a", tmp_path / "part"), "redirects more than 5 times")
    assert len(server.asked) == 6


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("https://a.example/x", "http://a.example/x"),
        ("https://a.example/x", "file:///etc/passwd"),
        ("https://a.example/x", "ftp://a.example/x"),
        ("https://a.example/x", "data:,x"),
        ("http://a.example/x", "http://b.example/x"),
        ("http://a.example/x", "//b.example/x"),
        ("http://a.example/x", "file:///etc/passwd"),
        ("http://a.example/x", "http://[::1/x"),
        ("http://a.example/x", "http://b.example/\x1b[31m\u202e"),
    ],
)
def test_redirects_elsewhere_are_refused(old: str, new: str) -> None:
    fails(lambda: follow(old, new), old)


def test_redirects_to_https_are_followed_anywhere() -> None:
    assert follow("https://a.example/x", "https://b.example/y") == "https://b.example/y"
    assert follow("http://a.example/x", "https://b.example/y") == "https://b.example/y"
    assert follow("https://a.example/x/y", "../z w") == "https://a.example/z%20w"


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://127.0.0.1/x", "http://127.0.0.2:9/x", "gopher:x"])
def test_a_server_cannot_send_us_elsewhere(server: Server, tmp_path: Path, location: str) -> None:
    server.answers = [redirect(location)] * 3
    fails(lambda: download.download(f"{server.url}/a", tmp_path / "part"), location, "https")
    assert len(server.asked) == 1  # and is not asked again
    assert not (tmp_path / "part").exists()


def test_the_body_of_a_redirect_is_not_read(server: Server, tmp_path: Path) -> None:
    def flood(line: socket.socket) -> None:
        line.sendall(b"HTTP/1.1 302 Found\r\nLocation: /b\r\n\r\n")
        for _ in range(200):  # 200 MB, if somebody reads them
            line.sendall(bytes(1 << 20))
        flooded.append(True)

    flooded: list[bool] = []
    server.answers = [flood, whole(b"content")]
    download.download(f"{server.url}/a", tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == b"content"
    assert flooded == []


# ---------------------------------------------------------------- slow, endless and false


def drip(start: bytes, each: bytes) -> Callable[[socket.socket], None]:
    def send(line: socket.socket) -> None:
        line.sendall(start)
        for _ in range(400):  # 20 seconds: far more than the client may wait
            line.sendall(each)
            time.sleep(0.05)

    return send


@pytest.mark.parametrize(
    ("start", "each"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b"x"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"x"),
        (b"HTTP/1.1 200 OK\r\nX: ", b"x"),  # a header that does not end
        (b"", b"H"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"x"),  # the length of a chunk that does not end
    ],
)
def test_servers_that_drip_are_given_up(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: bytes, each: bytes
) -> None:
    monkeypatch.setattr(download, "WINDOW", 0.3)
    server.answers = [drip(start, each)] * 3
    fails(lambda: download.download(f"{server.url}/a", tmp_path / "part"), "/a", "less than 2000 bytes a second")
    assert len(server.asked) == 3
    server.over.set()


def test_a_whole_download_is_bounded_in_time(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "WINDOW", 0.1)
    monkeypatch.setattr(download, "SLOWEST", 0)
    monkeypatch.setattr(download, "LONGEST", 0.3)
    server.answers = [drip(b"HTTP/1.1 200 OK\r\n\r\n", bytes(100_000))] * 3
    fails(lambda: download.download(f"{server.url}/a", tmp_path / "part"), "hours")
    assert len(server.asked) == 1  # a second try would have no time left


def test_endless_and_huge_files_leave_nothing(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "LIMIT", 300_000)

    def flood(line: socket.socket) -> None:
        line.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(200):
            line.sendall(bytes(1 << 20))

    server.answers = [flood, b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\nx"]
    fails(lambda: download.download(f"{server.url}/a", tmp_path / "part"), "more than 300000 bytes")
    assert not (tmp_path / "part").exists()
    fails(lambda: download.download(f"{server.url}/a", tmp_path / "part"), "more than 300000 bytes")
    assert not (tmp_path / "part").exists()
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nwhat\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\ncut",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(5000)) + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + bytes(200_000) + b"\r\n\r\n",
        b"\x1b[31m\x00 nonsense\r\n\r\n",
        b"",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 403 \x1b[2J\xe2\x80\xae Forbidden\r\n\r\n",
        b"HTTP/1.1 503 \x1b[2J\r\n\r\n",
        b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-4/5\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes \xb2-4/5\r\n\r\nhello",
    ],
)
def test_nonsense_is_refused_in_one_sentence(server: Server, tmp_path: Path, answer: bytes) -> None:
    server.answers = [answer] * 3
    fails(lambda: download.download(f"{server.url}/a", tmp_path / "part"), f"{server.url}/a")


def test_a_length_that_makes_no_sense_is_not_believed(server: Server, tmp_path: Path) -> None:
    server.answers = [b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\ncontent"]
    download.download(f"{server.url}/a", tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == b"content"


# ---------------------------------------------------------------- resuming


@pytest.mark.parametrize("headers", [['ETag: "two"'], [], ['ETag: W/"one"'], ['ETag: "one" \x7f']])
def test_a_part_of_another_version_is_not_appended(server: Server, tmp_path: Path, headers: list[str]) -> None:
    """The server ignores If-Range and sends the rest of what is now another file."""
    (tmp_path / "part").write_bytes(b"old--")
    (tmp_path / "part.tag").write_text('"one"')
    lines = ["HTTP/1.1 206 Partial Content", "Content-Range: bytes 5-9/10", "Content-Length: 5", *headers]
    part = "\r\n".join(lines).encode("latin1") + b"\r\n\r\n--new"
    server.answers = [part, whole(b"new-----new", 'ETag: "two"')]
    download.download(f"{server.url}/a", tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == b"new-----new"
    assert b"Range: bytes=5-" in server.asked[0]
    assert b"Range" not in server.asked[1]


@pytest.mark.parametrize("tag", ["Mon, 16 Nov 2026 03:00:00 GMT", '"one"'])
def test_a_part_of_the_same_version_is(server: Server, tmp_path: Path, tag: str) -> None:
    (tmp_path / "part").write_bytes(b"begin")
    (tmp_path / "part.tag").write_text(tag)
    etag = f"ETag: {tag}\r\n" if tag.startswith('"') else ""
    head = f"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 5-7/8\r\nContent-Length: 3\r\n{etag}\r\n"
    server.answers = [head.encode() + b"end"]
    download.download(f"{server.url}/a", tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == b"beginend"


def test_a_damaged_tag_is_not_sent(server: Server, tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(b"old")
    (tmp_path / "part.tag").write_bytes(b'"one"\r\nEvil: yes\xff')
    server.answers = [whole(b"new")]
    download.download(f"{server.url}/a", tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == b"new"
    assert b"Evil" not in server.asked[0]
    assert b"Range" not in server.asked[0]


# ---------------------------------------------------------------- what may be fetched, and what stays behind


def test_without_encryption_and_digest_a_source_must_be_asked_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = fails(lambda: fetch.fetch("tiny_imagenet"), "`fedthe data fetch tiny_imagenet --source http`")
    assert "digest" in sentence
    assert not home.exists()
    assert can_be_trusted("fashion_mnist", RECIPES["fashion_mnist"].origins[0])  # by its digest
    assert can_be_trusted("cifar10.1-v6", RECIPES["cifar10.1-v6"].origins[0])  # by https
    assert can_be_trusted("tiny_imagenet", Origin("debian", ("x",)))  # by apt's signature
    assert not can_be_trusted("cifar10.1-v6", Origin("http", ("https://a.example/x", "http://a.example/y")))


def test_asked_for_it_is_fetched(server: Server, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(RECIPES["tiny_imagenet"], origins=(Origin("http", (f"{server.url}/tiny-imagenet-200.zip",)),))
    monkeypatch.setitem(RECIPES, "tiny_imagenet", replace(recipe, check=lambda path: None))
    fails(lambda: fetch.fetch("tiny_imagenet"), "--source http")
    assert server.asked == []
    server.answers = [whole(b"zip")]
    path = fetch.fetch("tiny_imagenet", source="http")
    assert (path / "tiny-imagenet-200.zip").read_bytes() == b"zip"
    assert fetch.fetch("tiny_imagenet") == path  # what is there need not be asked for


def test_leftovers_are_swept(server: Server, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads = home / "data/.downloads"
    old, new, killed, running = (downloads / name for name in ("aaa", "bbb", "cifar10.work", "mnist.work"))
    for folder in (old, new, killed, running):
        folder.mkdir(parents=True)
        (folder / "x.part").write_bytes(b"x")
    for path in (old / "x.part", old):
        os.utime(path, (time.time() - 8 * 86400,) * 2)
    recipe = replace(RECIPES["tiny_imagenet"], origins=(Origin("http", (f"{server.url}/tiny-imagenet-200.zip",)),))
    monkeypatch.setitem(RECIPES, "tiny_imagenet", replace(recipe, check=lambda path: None))
    server.answers = [whole(b"zip")]
    with store.hold(downloads / "mnist.lock"):  # another process is at work there
        fetch.fetch("tiny_imagenet", source="http")
    assert [path.exists() for path in (old, new, killed, running)] == [False, True, False, True]


def test_programs_cannot_write_to_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "npm").write_text(
        "#!/bin/sh\nprintf 'bad \\033[2J\\033]0;title\\007 \\342\\200\\256 end' >&2; exit 1\n"
    )
    (tmp_path / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    sentence = fails(lambda: package.run_program(["npm", "pack", "x"], tmp_path, "do not"), "npm pack x", "end")
    assert "\\x1b" not in sentence


def test_tar_headers_cannot_claim_memory_or_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 1 << 33  # tarfile would read all of it at once
    (tmp_path / "a.tar").write_bytes(header.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    fails(lambda: package.unpack(tmp_path / "a.tar", tmp_path / "a"), "a.tar", "claims")
    monkeypatch.setattr(package, "MEMBERS", 10)
    with tarfile.open(tmp_path / "b.tar", "w") as archive:
        for number in range(11):
            archive.addfile(tarfile.TarInfo(str(number)))
    fails(lambda: package.unpack(tmp_path / "b.tar", tmp_path / "b"), "b.tar", "more than 10 files")


# ---------------------------------------------------------------- over TLS


@pytest.fixture
def secure(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The same server with a certificate of its own, which this process trusts."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("there is no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = [program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(certificate)]
    names = ["-days", "1", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, *names], check=True, capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    plain = server.answer
    monkeypatch.setattr(
        server, "answer", lambda line, answer: plain(context.wrap_socket(line, server_side=True), answer)
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    server.url = server.url.replace("http:", "https:")
    return server


def test_https_is_fetched_and_does_not_lead_to_http(secure: Server, tmp_path: Path) -> None:
    secure.answers = [redirect("/b"), whole(b"content"), redirect(secure.url.replace("https:", "http:"))]
    download.download(f"{secure.url}/a", tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == b"content"
    fails(lambda: download.download(f"{secure.url}/a", tmp_path / "other"), "only redirects to https")
    assert len(secure.asked) == 3


def test_https_that_drips_is_given_up(secure: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "WINDOW", 0.5)
    secure.answers = [drip(b"HTTP/1.1 200 OK\r\n\r\n", b"x")] * 3
    fails(lambda: download.download(f"{secure.url}/a", tmp_path / "part"), "less than 2000 bytes a second")
