"""Constants that AugMix's kernel shares with its reference in torch, `data.augment`."""

from __future__ import annotations

import math

import numpy as np

OPS = (
    "autocontrast",
    "equalize",
    "rotate",
    "solarize",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
    "posterize",
)
CHAINS, STEPS = 3, 3
WORDS = 16  # per view
PAD = 4
LEVEL = 10 << 24  # units in a level of 1
SHEAR = 0.3 / 10 / LEVEL  # pixels per pixel and unit
DUST = 1e-4  # added before cutting to whole levels, as Pillow does: float32 may round a whole level to below it
SINES, COSINES = (np.array([f(math.radians(degrees)) for degrees in range(360)]) for f in (math.sin, math.cos))
