"""Every corruption with its function and its settings at severities 1 to 5, which are those of CIFAR-10-C."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from . import blur, digital, noise, weather


class Corruption(NamedTuple):
    apply: Callable[..., Tensor]  # (images uint8 [n, h, w, c], draws, **setting) -> the same shape and type
    settings: Mapping[str, tuple[float, float, float, float, float]]  # by parameter of `apply`
    grouped: bool = False  # faster on large batches, because it handles images with the same draw together


TABLE: dict[str, Corruption] = {
    "gaussian_noise": Corruption(noise.gaussian_noise, {"scale": (0.04, 0.06, 0.08, 0.09, 0.10)}),
    "shot_noise": Corruption(noise.shot_noise, {"photons": (500, 250, 100, 75, 50)}),
    "impulse_noise": Corruption(noise.impulse_noise, {"amount": (0.01, 0.02, 0.03, 0.05, 0.07)}),
    "defocus_blur": Corruption(
        blur.defocus_blur, {"radius": (0.3, 0.4, 0.5, 1, 1.5), "rim": (0.4, 0.5, 0.6, 0.2, 0.1)}
    ),
    "glass_blur": Corruption(blur.glass_blur, {"sigma": (0.05, 0.25, 0.4, 0.25, 0.4), "passes": (1, 1, 1, 2, 2)}),
    "motion_blur": Corruption(
        blur.motion_blur, {"radius": (6, 6, 6, 8, 9), "sigma": (1.0, 1.5, 2.0, 2.0, 2.5)}, grouped=True
    ),
    "zoom_blur": Corruption(blur.zoom_blur, {"end": (1.06, 1.11, 1.16, 1.21, 1.26)}),
    "snow": Corruption(
        weather.snow,
        {
            "mean": (0.1, 0.1, 0.15, 0.25, 0.3),
            "std": (0.2, 0.2, 0.3, 0.3, 0.3),
            "zoom": (1.0, 1.0, 1.75, 2.25, 1.25),
            "floor": (0.6, 0.5, 0.55, 0.6, 0.65),
            "radius": (8, 10, 10, 12, 14),
            "sigma": (3.0, 4.0, 4.0, 6.0, 12.0),
            "keep": (0.95, 0.9, 0.9, 0.85, 0.8),
        },
        grouped=True,
    ),
    "frost": Corruption(weather.frost, {"keep": (1.0, 1.0, 0.9, 0.85, 0.75), "add": (0.2, 0.3, 0.4, 0.4, 0.45)}),
    "fog": Corruption(weather.fog, {"thickness": (0.2, 0.5, 0.75, 1.0, 1.5), "decay": (3.0, 3.0, 2.5, 2.0, 1.75)}),
    "brightness": Corruption(weather.brightness, {"more": (0.05, 0.1, 0.15, 0.2, 0.3)}),
    "contrast": Corruption(digital.contrast, {"keep": (0.75, 0.5, 0.4, 0.3, 0.15)}),
    "elastic_transform": Corruption(
        digital.elastic_transform,
        {
            "push": (0.0, 0.05, 0.08, 0.1, 0.1),
            "sigma": (0.0, 0.2, 0.06, 0.04, 0.03),
            "jitter": (0.08, 0.07, 0.06, 0.05, 0.03),
        },
    ),
    "pixelate": Corruption(digital.pixelate, {"share": (0.95, 0.9, 0.85, 0.75, 0.65)}),
    "jpeg_compression": Corruption(digital.jpeg_compression, {"quality": (80, 65, 58, 50, 40)}),
}
