"""What tests of several rooms share: places, small data, and ways to look."""

from __future__ import annotations

import importlib.util
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from fedthe.data import DATASETS
from fedthe.data.pool import Dataset, Pool
from fedthe.errors import Failed, InputError

if TYPE_CHECKING:
    from fedthe.engine.visit import Engine, Progress, Visit

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"


def make_pool(labels: np.ndarray, name: str = "made", classes: int | None = None, size: int = 8) -> Pool:
    """A pool of noise images, for tests that look only at labels and rows."""
    seed = zlib.crc32(name.encode())  # two pools share no image
    images = np.random.default_rng(seed).integers(0, 256, (len(labels), size, size, 3), dtype=np.uint8)
    return Pool(name, images, labels, tuple(f"class {c}" for c in range(classes or int(labels.max()) + 1)))


def load_example(name: str) -> ModuleType:
    """examples/NAME.py as a module; nothing of it is run."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def fails(call: Callable[[], object], *words: object) -> str:
    """The one printable sentence with which a call is refused; it has these words."""
    with pytest.raises(InputError) as caught:
        call()
    sentence = str(caught.value)
    assert sentence.isprintable()
    for word in words:
        assert str(word) in sentence
    return sentence


def count_rounds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Of every round that is trained from now on: the personal parts that are side by side in it, by class name."""
    from fedthe.engine import train

    rounds: list[tuple[str, ...]] = []
    whole = train.train_round

    def train_round(visit: Visit, engine: Engine) -> list[list[Progress] | Failed]:
        rounds.append(tuple(type(method.personal).__name__ for method in visit.methods))
        return whole(visit, engine)

    monkeypatch.setattr(train, "train_round", train_round)
    return rounds


def count_loads(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Path]:
    """The path of every load of the dataset `name` from now on."""
    loads: list[Path] = []
    source = DATASETS[name]

    def load(path: Path, size: int | None = None) -> Dataset:
        loads.append(path)
        return source.load(path, size)

    monkeypatch.setitem(DATASETS, name, replace(source, load=load))
    return loads


def make_images(n: int, h: int, w: int, c: int, noise: float = 6.0) -> torch.Tensor:
    """Smooth ground, a box and a disk with sharp edges, a flat black and a flat white corner, and some noise."""
    from scipy.ndimage import zoom

    random = np.random.default_rng(h * w * c)
    y, x = np.mgrid[:h, :w]
    images = np.empty((n, h, w, c))
    for image in images:
        ground = random.uniform(20, 220, (6, 6, c))
        image[:] = zoom(ground, (h / 6, w / 6, 1), order=3)
        top, left = random.integers(0, (h // 2, w // 2))
        image[top : top + h // 3, left : left + w // 2] = random.uniform(0, 255, c)
        disk = (y - random.uniform(0, h)) ** 2 + (x - random.uniform(0, w)) ** 2 < (h / 5) ** 2
        image[disk] = 0.3 * image[disk] + 0.7 * random.uniform(0, 255, c)
        image += random.normal(0, noise, image.shape)
        image[:3, :3], image[-3:, -3:] = 0, 255
    return torch.from_numpy(np.clip(images, 0, 255).astype(np.uint8))
