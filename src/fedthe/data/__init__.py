"""Datasets: `load_dataset("cifar10")` gives a pool of images and its natural shifts, wherever they come from."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from .. import store
from ..errors import InputError
from ..plugins import load_plugins
from ..text import quote
from . import cifar, digits, folder, idx, imagenet32, npz, tiny_imagenet
from .folder import Square
from .numbers import read_whole
from .pool import Dataset, Pool
from .source import Report, Source, locate, make_report, pick_shifts, pick_source

__all__ = ["DATASETS", "Dataset", "Pool", "Report", "find", "load_dataset", "verify"]


def _load_glyphs(path: Path, size: int | None = None) -> Dataset:
    from . import glyphs  # imports Pillow

    return glyphs.load(path, size=size or folder.SIZE)


DATASETS: dict[str, Source] = {
    "glyphs": Source(
        _load_glyphs,
        about="ten characters drawn in many typefaces; shift: unseen typefaces",
        advice="it comes with the package",
        lies="nowhere",
    ),
    "digits": Source(
        digits.load,
        about="1,797 handwritten digits, 8x8 enlarged to 32x32",
        advice="it comes with scikit-learn",
        lies="nowhere",
    ),
    "mnist": Source(
        partial(idx.load, "mnist"),
        about="60,000 handwritten digits, 28x28",
        advice="run `fedthe data fetch mnist`",
        load_test=partial(idx.load_test, "mnist"),
        files=idx.list_files,
        digest="d53e603f87d8931ce48de50a8fe3aea477ca9c8eb3ff90b477c7a7748e20b4e1",
    ),
    "fashion_mnist": Source(
        partial(idx.load, "fashion_mnist"),
        about="60,000 pieces of clothing, 28x28",
        advice="run `fedthe data fetch fashion_mnist`",
        load_test=partial(idx.load_test, "fashion_mnist"),
        files=idx.list_files,
        digest="83a4ed90bc432942208ce134a04cabd511dce5693d94d54ac10df315dae83951",
    ),
    "cifar10": Source(
        cifar.load,
        about="50,000 photographs of ten classes, 32x32; shifts: CIFAR-10.1 v6 and v4",
        advice="run `fedthe data fetch cifar10`",
        shifts={f"cifar10.1-{version}": partial(cifar.load_shift, version) for version in ("v6", "v4")},
        load_test=cifar.load_test,
        files=cifar.list_files,
        digest="4bb1cf622e46e63621afd51ce925ccf384abbad67bac03f0517243c7941bf0fd",
    ),
    "imagenet32": Source(
        imagenet32.load,
        about="86 classes of ImageNet, 32x32; shifts: ImageNet-A, -R and -V2",
        advice="download it from image-net.org with your account, and put map_clsloc.txt beside it",
        shifts={f"imagenet-{part}": partial(imagenet32.load_shift, f"imagenet-{part}") for part in ("a", "r", "v2")},
        together=True,
        load_test=imagenet32.load_test,
        files=imagenet32.list_files,
    ),
    "tiny_imagenet": Source(
        tiny_imagenet.load,
        about="Tiny-ImageNet, all 200 classes or some of them, as a folder or a zip",
        advice="run `fedthe data fetch tiny_imagenet --source http`",
    ),
    "folder": Source(
        folder.load,
        about="your images, a folder per class: folder:PATH",
        advice="name a folder that has a folder of images per class",
        lies="path",
        files=folder.list_files,
        options=("square", "by_client"),
    ),
    "npz": Source(
        npz.load,
        about="your arrays images and labels: npz:PATH",
        advice="save one with the arrays images and labels",
        lies="path",
        options=("square",),
    ),
}

DATASETS |= load_plugins("fedthe.datasets", DATASETS)

# A user's own natural shift, for any dataset: natural="npz:PATH" or "folder:PATH".
OWN_SHIFTS = {"npz": npz.load_shift, "folder": folder.load_shift}

SMALLEST = 8  # pixels per side that corruptions need
LARGE = 128  # pixels per side; with more, whole datasets would need tens of gigabytes


def load_dataset(
    spec: str,
    *,
    natural: str | None = None,
    size: int | None = None,
    square: Square | None = None,
    by_client: bool = False,
    home: Path | None = None,
) -> Dataset:
    """A dataset by "NAME" or "NAME:PATH".

    Args:
        spec: a name of `fedthe data list`, or one with a path, such as npz:mine.npz or folder:photos.
        natural: None for what is on disk, "none", the name of a shift, or your own as "npz:PATH" or "folder:PATH".
        size: pixels per side; None for the dataset's own.
        square: how your own pictures that are not square become so: "crop" or "pad".
        by_client: your folder has a folder per client, each with a folder per class.
        home: the folder of datasets and caches; None for $FEDTHE_HOME or ~/.cache/fedthe.
    """
    if square not in (None, *get_args(Square)):
        raise InputError(f"square must be crop or pad, not {quote(square)}.")
    if size is not None and not SMALLEST <= (size := read_whole("size", size)) <= 1024:
        raise InputError(f"size must be from {SMALLEST} to 1024 pixels, but is {size}.")
    name, source, path = locate(spec, DATASETS, home or store.home())
    if size is not None and size > LARGE and source.lies == "home":
        raise InputError(f"{name} is too large for images of {size} pixels; size can be at most {LARGE}.")
    options = _pick_options(name, source, square, by_client)
    dataset = source.load(path, size, **options)
    if natural == "none":
        return Dataset(dataset.pool, clients=tuple(replace(each, tests={}) for each in dataset.clients))
    kind, _, where = (natural or "").partition(":")
    held = {test for each in dataset.clients for test in each.tests}
    if natural in held:
        chosen = tuple(
            replace(each, tests={natural: each.tests[natural]} if natural in each.tests else {})
            for each in dataset.clients
        )
        return replace(dataset, natural={natural: dataset.natural[natural]}, clients=chosen)
    if where and kind in OWN_SHIFTS:
        if "natural" in held:
            raise InputError(f"{name} has a test 'natural' of its own; rename it, or leave natural out.")
        shift = OWN_SHIFTS[kind](store.expand(Path(where)), dataset.pool, square)
        return replace(dataset, natural={**dataset.natural, "natural": shift})
    if dataset.clients and natural is None:
        return dataset  # with the tests that its file names
    return replace(dataset, natural=pick_shifts(name, source, path, dataset, natural))


def _pick_options(name: str, source: Source, square: Square | None, by_client: bool) -> dict[str, Any]:
    """The options that are set. Refuse those that the source does not take."""
    given = {option: value for option, value in (("square", square), ("by_client", by_client)) if value}
    for option in given:
        if option not in source.options:
            what = "pictures" if option == "square" else "folders"
            raise InputError(f"{option} is for {what} of your own, not for {name}; leave it out.")
    return given


def find(name: str, home: Path | None = None) -> Path | None:
    """The path of a dataset ("NAME" or "NAME:PATH"), or None if it is not on disk; one in the package needs no path."""
    pick_source(name.partition(":")[0], DATASETS)
    try:
        _, source, path = locate(name, DATASETS, home or store.home())
        if source.lies == "home":
            source.files(path)  # raises if an interrupted fetch left only a part
    except InputError:
        return None
    return path


def verify(name: str, home: Path | None = None) -> Report:
    """Decode all of a dataset ("NAME" or "NAME:PATH") and compare it with the published digest."""
    return make_report(*locate(name, DATASETS, home or store.home()))
