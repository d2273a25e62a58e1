"""Our tables of the regime filter, on seeds that nobody looked at while its settings were chosen (0, 1 and 2)."""

from __future__ import annotations

from typing import Any

from ..names import NET_NAMES
from .streams import AS_USUAL

SEEDS = tuple(range(31, 39))
TESTS = ("original", "corrupted", "natural", "ooc", "mixture", "corrupted_ooc")
# on FedTHE's training alone, so that nothing else is trained
METHODS = (
    "fedthe",
    "fedthe_plus",
    "logit_adjust",
    "em",
    "bbse",
    "fmapls",
    "fedthe_regime",
    "regime_mirror",
    "regime_memo",
)
TINY = AS_USUAL | {"dataset": "tiny_imagenet", "size": 32, "model": "resnet20_gn x4", "dirichlet": 1.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "regime-dir0.1": AS_USUAL,
    "regime-dir1": AS_USUAL | {"dirichlet": 1.0},
    "regime-dir10": AS_USUAL | {"dirichlet": 10.0},
    "regime-resnet20gn": AS_USUAL | {"model": "resnet20_gn", "dirichlet": 1.0},
    "regime-cct4": AS_USUAL | {"model": "cct4", "dirichlet": 1.0},
    "regime-clients100": AS_USUAL | {"clients": 100},
    "regime-participation0.1": AS_USUAL | {"participation": 0.1},
    "regime-tiny-imagenet-20": TINY,
}


def title_of(setting: dict[str, Any]) -> str:
    return f"The regime filter on new seeds: {name_setting(setting)}"


def name_setting(setting: dict[str, Any]) -> str:
    """What tells it from the others."""
    net = NET_NAMES[setting["model"].partition(" ")[0]]
    data = "20 classes of Tiny-ImageNet" if setting["dataset"] == "tiny_imagenet" else "CIFAR-10"
    parts = [f"{net} on {data}", f"Dir({setting['dirichlet']:.1f})"]
    parts += [f"{setting['clients']} clients"] if setting["clients"] != 20 else []
    parts += [f"{setting['participation']:.0%} of the clients in a round"] if setting["participation"] < 1 else []
    return ", ".join(parts)
