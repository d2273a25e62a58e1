"""scikit-learn's handwritten digits: 1,797 images of 8x8, inside its wheel, so there is nothing to fetch."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .folder import SIZE, fit_images
from .pool import Dataset, Pool


def load(path: Path, size: int | None = None) -> Dataset:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., None]  # [1797, 8, 8, 1], from 0..16
    images = fit_images(images, (size or SIZE, size or SIZE, 1))
    return Dataset(Pool("digits", images, digits.target, tuple("0123456789")))
