"""Personalized federated learning that stays accurate when the data shifts after deployment.

Names are loaded when they are first used, so that `import fedthe` costs little.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import Config as Config
    from .data import DATASETS as DATASETS
    from .data import load_dataset as load_dataset
    from .data.plan import Federation as Federation
    from .data.plan import Settings as Settings
    from .data.plan import build as build
    from .data.pool import Dataset as Dataset
    from .data.pool import Pool as Pool
    from .deploy.export import export as export
    from .deploy.join import personalize as personalize
    from .deploy.online import Online as Online
    from .deploy.online import Prediction as Prediction
    from .deploy.online import load_bundle as load_bundle
    from .engine.check import check_method as check_method
    from .errors import InputError as InputError
    from .experiment.on_ray import workers_on_ray as workers_on_ray
    from .experiment.results import Results as Results
    from .experiment.results import read_results as read_results
    from .methods import METHODS as METHODS
    from .methods.base import Method as Method
    from .methods.base import Personal as Personal
    from .methods.base import Rounds as Rounds
    from .methods.head_ensemble import head_ensemble as head_ensemble
    from .methods.predictor import Predictor as Predictor
    from .methods.regime import Regimes as Regimes
    from .methods.regime import regime_ensemble as regime_ensemble
    from .nets import NETS as NETS
    from .nets.net import Defaults as Defaults
    from .nets.net import Net as Net
    from .nets.net import PictureNet as PictureNet
    from .nets.wrap import wrap_module as wrap_module
    from .progress.events import Round as Round
    from .study.run import run as run
    from .study.sweep import Sweep as Sweep
    from .study.sweep import read_sweep as read_sweep

__version__ = "0.1.0"

_HOMES = {
    "Config": ".config",
    "DATASETS": ".data",
    "load_dataset": ".data",
    "Federation": ".data.plan",
    "Settings": ".data.plan",
    "build": ".data.plan",
    "Dataset": ".data.pool",
    "Pool": ".data.pool",
    "export": ".deploy.export",
    "personalize": ".deploy.join",
    "load_bundle": ".deploy.online",
    "Online": ".deploy.online",
    "Prediction": ".deploy.online",
    "InputError": ".errors",
    "check_method": ".engine.check",
    "NETS": ".nets",
    "Defaults": ".nets.net",
    "Net": ".nets.net",
    "PictureNet": ".nets.net",
    "wrap_module": ".nets.wrap",
    "METHODS": ".methods",
    "Method": ".methods.base",
    "Personal": ".methods.base",
    "Rounds": ".methods.base",
    "Predictor": ".methods.predictor",
    "head_ensemble": ".methods.head_ensemble",
    "Regimes": ".methods.regime",
    "regime_ensemble": ".methods.regime",
    "run": ".study.run",
    "Round": ".progress.events",
    "Sweep": ".study.sweep",
    "read_sweep": ".study.sweep",
    "workers_on_ray": ".experiment.on_ray",
    "Results": ".experiment.results",
    "read_results": ".experiment.results",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedthe' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
