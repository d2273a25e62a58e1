"""ImageNet at 32x32 (Chrabaszcz et al., 2017): the 86 classes that ImageNet-A and -R share; A, R and V2 as shifts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..errors import InputError
from ..foreign import explain, read_file
from .folder import fit_images, read_folders
from .pool import Dataset, Pool
from .source import name_classes
from .unpickle import read_batch, stack_images

TRAIN = tuple(f"train_data_batch_{number}" for number in range(1, 11))
MAP = "map_clsloc.txt"
V2 = "imagenetv2-matched-frequency-format-val"
# The classes of both ImageNet-A and ImageNet-R, as positions among the 1,000 WordNet ids in sorted order.
# fmt: off
SHARED = (
    6, 11, 13, 22, 23, 39, 47, 71, 76, 79, 90, 94, 96, 97, 99, 105, 107, 113, 125, 130, 132, 144, 150, 151, 207, 234,
    235, 254, 277, 291, 301, 308, 309, 310, 311, 314, 315, 319, 323, 327, 330, 334, 335, 347, 361, 372, 397, 401, 407,
    425, 428, 430, 437, 457, 462, 470, 472, 483, 579, 609, 658, 701, 763, 768, 774, 776, 779, 780, 815, 820, 833, 847,
    907, 932, 933, 934, 937, 943, 945, 947, 951, 954, 957, 980, 981, 988,
)
# fmt: on


def load(path: Path, size: int | None = None) -> Dataset:
    return Dataset(_read_pool(path, TRAIN, size))


def load_test(path: Path) -> Pool:
    """The validation images: in the published file, fifty per class."""
    pool = _read_pool(path, ("val_data",))
    if (np.bincount(pool.labels, minlength=len(SHARED)) != 50).any():
        raise InputError(f"{path / 'val_data'} must have 50 images per class; download it from image-net.org again.")
    return pool


def load_shift(name: str, path: Path, pool: Pool) -> Pool | None:
    """imagenet-a, imagenet-r or imagenet-v2; in V2, a class folder is named by its position among the sorted ids."""
    folder = path / (V2 if name == "imagenet-v2" else name)
    if not folder.exists():
        return None
    folders = [folder / each for each in (map(str, SHARED) if folder.name == V2 else _shared_wnids(path))]
    for each in folders:
        if not each.is_dir():
            raise InputError(f"{each} is missing; run `fedthe data fetch {name}`.")
    # Squeezed rather than cropped: the benchmark's "bilinear to 32".
    images, labels = read_folders(folders, pool.x.shape[1:], "stretch")
    return Pool(name, images, labels, pool.classes)


def list_files(path: Path) -> list[Path]:
    return [_find_file(path, name) for name in (*TRAIN, "val_data", MAP)]


def read_map(file: Path) -> tuple[list[str], dict[str, str]]:
    """WordNet ids in the order of the labels 1 to 1000, and their names, from lines like "n02119789 1 kit_fox"."""
    with explain(f"{file} is not a list of 'wnid number name' lines", "download it again"):
        rows = [line.split() for line in read_file(file, 1 << 20).decode("utf-8").splitlines() if line.strip()]
        wnids = {int(number): wnid for wnid, number, _ in rows}
    if len(rows) != 1000 or sorted(wnids) != list(range(1, 1001)) or len(set(wnids.values())) != 1000:
        raise InputError(f"{file} must number 1,000 classes from 1 to 1000, each once; download it again.")
    return [wnids[number] for number in range(1, 1001)], {wnid: name for wnid, _, name in rows}


def _shared_wnids(path: Path) -> list[str]:
    wnids = sorted(read_map(_find_file(path, MAP))[0])
    return [wnids[position] for position in SHARED]


def _read_pool(path: Path, files: tuple[str, ...], size: int | None = None) -> Pool:
    wnids, names = read_map(_find_file(path, MAP))
    kept = _shared_wnids(path)
    new_label = np.full(1001, -1)
    new_label[[wnids.index(wnid) + 1 for wnid in kept]] = np.arange(len(kept))
    found = [_find_file(path, name) for name in files]  # a missing file is reported before any is read
    batches, labels = [], []
    for file in found:  # one at a time: a whole batch has 400 MB, a twelfth of which is kept
        rows, old = read_batch(file, 1, 1000)
        new = new_label[old]
        batches.append(rows[new >= 0])
        labels.append(new[new >= 0])
    if not sum(map(len, labels)):
        raise InputError(f"{path} has no image of the 86 classes; download it from image-net.org again.")
    images = fit_images(stack_images(batches), (size or 32, size or 32, 3))
    return Pool("imagenet32", images, np.concatenate(labels), name_classes(kept, names))


def _find_file(path: Path, name: str) -> Path:
    if not (path / name).exists():
        site = "github.com/PatrykChrabaszcz/Imagenet32_Scripts" if name == MAP else "image-net.org, with an account"
        raise InputError(f"{path / name} is missing; download it from {site}.")
    return path / name
