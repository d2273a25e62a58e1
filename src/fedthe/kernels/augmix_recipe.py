"""What AugMix's kernel and its reference in torch, `data.augment`, must agree on."""

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
LEVEL = 10 << 24  # units of a level between 0 and 1
SHEAR = 0.3 / 10 / LEVEL  # pixels per pixel in a unit of a level
DUST = 1e-4  # Pillow cuts to whole levels; what is meant as a whole level must not fall below it by float32's rounding
SINES, COSINES = (np.array([f(math.radians(degrees)) for degrees in range(360)]) for f in (math.sin, math.cos))
