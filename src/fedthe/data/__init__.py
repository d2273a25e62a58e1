"""Datasets: `load_dataset("cifar10")` gives a pool of images and its natural shifts, wherever they come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .. import store
from ..errors import InputError
from ..plugins import load_plugins
from . import cifar, digits, folder, idx, imagenet32, npz, tiny_imagenet
from .numbers import read_whole
from .pool import Dataset, Pool
from .source import Report, Source, locate, make_report, pick_shifts, pick_source

__all__ = ["DATASETS", "Dataset", "Pool", "Report", "find", "load_dataset", "verify"]


def _load_glyphs(path: Path, size: int | None = None) -> Dataset:
    from . import glyphs  # draws with Pillow: imported only when asked for

    return glyphs.load(path) if size is None else glyphs.load(path, size=size)


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
        idx.load_mnist,
        about="60,000 handwritten digits, 28x28",
        advice="run `fedthe data fetch mnist`",
        load_test=idx.load_mnist_test,
        files=idx.list_files,
        digest="d53e603f87d8931ce48de50a8fe3aea477ca9c8eb3ff90b477c7a7748e20b4e1",
    ),
    "fashion_mnist": Source(
        idx.load_fashion_mnist,
        about="60,000 pieces of clothing, 28x28",
        advice="run `fedthe data fetch fashion_mnist`",
        load_test=idx.load_fashion_mnist_test,
        files=idx.list_files,
        digest="83a4ed90bc432942208ce134a04cabd511dce5693d94d54ac10df315dae83951",
    ),
    "cifar10": Source(
        cifar.load,
        about="50,000 photographs of ten classes, 32x32; shifts: CIFAR-10.1 v6 and v4",
        advice="run `fedthe data fetch cifar10`",
        shifts={"cifar10.1-v6": cifar.load_v6, "cifar10.1-v4": cifar.load_v4},
        load_test=cifar.load_test,
        files=cifar.list_files,
        digest="4bb1cf622e46e63621afd51ce925ccf384abbad67bac03f0517243c7941bf0fd",
    ),
    "imagenet32": Source(
        imagenet32.load,
        about="86 classes of ImageNet, 32x32; shifts: ImageNet-A, -R and -V2",
        advice="download it from image-net.org with an account of yours, and put map_clsloc.txt beside it",
        shifts={"imagenet-a": imagenet32.load_a, "imagenet-r": imagenet32.load_r, "imagenet-v2": imagenet32.load_v2},
        together=True,
        load_test=imagenet32.load_test,
        files=imagenet32.list_files,
    ),
    "tiny_imagenet": Source(
        tiny_imagenet.load,
        about="Tiny-ImageNet, 200 classes or some of them, a folder or a zip",
        advice="run `fedthe data fetch tiny_imagenet --source http`",
    ),
    "folder": Source(
        folder.load,
        about="your images, a folder per class: folder:PATH",
        advice="name a folder that holds one of images per class",
        lies="path",
        files=folder.list_files,
    ),
    "npz": Source(
        npz.load,
        about="your arrays images and labels: npz:PATH",
        advice="save one with arrays images and labels",
        lies="path",
    ),
}

DATASETS |= load_plugins("fedthe.datasets", DATASETS)

# The shifts of your own that any dataset takes: natural="npz:PATH" or "folder:PATH".
OWN_SHIFTS = {"npz": npz.load_shift, "folder": folder.load_shift}


SMALLEST = 8  # pixels of a side that corruptions need
LARGE = 128  # pixels of a side; above, whole datasets would need tens of gigabytes


def load_dataset(
    spec: str, *, natural: str | None = None, size: int | None = None, home: Path | None = None
) -> Dataset:
    """A dataset by "NAME" or "NAME:PATH".

    natural: None for what is at hand, "none", the name of a shift, or your own as "npz:PATH" or "folder:PATH".
    size: pixels of a side, where the dataset's own is not wanted.
    """
    if size is not None and not SMALLEST <= (size := read_whole("size", size)) <= 1024:
        raise InputError(f"size must be from {SMALLEST} to 1024 pixels, but is {size}.")
    name, source, path = locate(spec, DATASETS, home or store.home())
    if size is not None and size > LARGE and source.lies == "home":
        raise InputError(f"{name} is too large for images of {size} pixels; size can be at most {LARGE}.")
    dataset = source.load(path, size)
    if natural == "none":
        return Dataset(dataset.pool)
    kind, _, where = (natural or "").partition(":")
    if where and kind in OWN_SHIFTS:
        shift = OWN_SHIFTS[kind](store.expand(Path(where)), dataset.pool)
        return Dataset(dataset.pool, {"natural": shift})
    return replace(dataset, natural=pick_shifts(name, source, path, dataset, natural))


def find(name: str, home: Path | None = None) -> Path | None:
    """Where a dataset ("NAME" or "NAME:PATH") lies, or None; for one inside the package, a path that need not exist."""
    pick_source(name.partition(":")[0], DATASETS)
    try:
        _, source, path = locate(name, DATASETS, home or store.home())
        if source.lies == "home":
            source.files(path)  # a folder that a stopped fetch left is not the dataset
    except InputError:
        return None
    return path


def verify(name: str, home: Path | None = None) -> Report:
    """Decode all of a dataset ("NAME" or "NAME:PATH") and compare it with what was published."""
    return make_report(*locate(name, DATASETS, home or store.home()))
