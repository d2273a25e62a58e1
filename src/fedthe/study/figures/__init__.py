"""The figures of the FedTHE paper, https://arxiv.org/abs/2205.10920, one a file.

Measuring and drawing are separate, so that the machine that measures needs no Matplotlib: `measure_figure` returns
plain data, which JSON can hold, and `draw_figure` draws it.

To add a figure, write a file like `gains.py`, and add it to FIGURES.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...config import Config, make_config
from ...data import load_dataset
from ...data.pool import Dataset
from ...errors import InputError
from ...experiment.results import name_shift
from ...experiment.work import get_engine, pick_tests
from ...names import STREAM_NAMES, TEST_NAMES, name_test
from ...records import describe_environment
from ...text import clean, find_nearest
from . import alpha_beta, attacks, curves, features, gains, interpolation, leak, probing, regime, streams, weights
from .base import Figure, restate_figure

FIGURES: dict[str, Figure] = {
    "gains": gains.FIGURE,
    **curves.FIGURES,
    "alpha-beta": alpha_beta.FIGURE,
    "interpolation-heads": interpolation.HEADS,
    "interpolation-models": interpolation.MODELS,
    "weights": weights.FIGURE,
    "features": features.FIGURE,
    "leak": leak.FIGURE,
    "probing": probing.FIGURE,
    "streams": streams.FIGURE,
    "regime": regime.FIGURE,
    "attacks": attacks.FIGURE,
}


def find_figure(name: str) -> Figure:
    if name not in FIGURES:
        raise InputError(f"there is no figure {name!r}; {find_nearest(name, FIGURES)}")
    return FIGURES[name]


def plan_figure(name: str, **settings: Any) -> Config:
    """The experiment that a figure needs; `settings` override the paper's."""
    figure = find_figure(name)
    config = make_config({**figure.settings, **settings})
    if figure.fixed and config.methods != tuple(figure.settings["methods"]):
        raise InputError(f"{name} is about {', '.join(figure.settings['methods'])}; leave methods out.")
    return config


def measure_figure(name: str, **settings: Any) -> dict[str, Any]:
    """All that a figure shows, as plain data; `settings` override the paper's."""
    figure, config = find_figure(name), plan_figure(name, **settings)
    dataset = load_dataset(config.dataset, natural=config.natural, size=config.size)
    titles = name_tests(dataset) | name_streams(config)
    tests = pick_tests(config, titles)
    measured = {
        "id": name,
        "title": figure.title,
        "config": config.filled().as_dict(),
        "tests": {test: titles[test] for test in tests},
        "environment": describe_environment(get_engine(config.engine, config.device, config.precision, config.threads)),
        "ddof": 1,  # standard deviations are with n - 1; records without this line have them with n
        "data": figure.measure(config, dataset),
    }
    plain: dict[str, Any] = json.loads(json.dumps(measured, allow_nan=False))  # the same before and after a file
    return plain


def draw_figure(measured: Mapping[str, Any], path: Path) -> None:
    """Draw what `measure_figure` returned, as a PNG."""
    find_figure(measured["id"]).draw(restate_figure(measured), path)


def name_tests(dataset: Dataset) -> dict[str, str]:
    """The display name of every test distribution; a natural shift is named after its pool."""
    titles = dict(TEST_NAMES)
    shifts = {test: clean(name_shift(test, pool)) for test, pool in dataset.natural.items()}
    first = {test: titles.pop(test) for test in ("original", "corrupted")}
    return first | shifts | titles


def name_streams(config: Config) -> dict[str, str]:
    """The display names of the streams in time that an experiment asks for."""
    asked = config.streams if config.tests is None else config.tests
    return {test: name_test(test) for test in (*STREAM_NAMES, *config.streams) if test in asked}
