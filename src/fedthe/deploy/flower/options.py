"""How the server of a federation goes about it, from the run config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import InputError
from . import privacy
from .terms import NOISE, Value, read_float


@dataclass(frozen=True)
class Options:
    """How the server goes about it. Only noise, and what secure aggregation rounds, move numbers."""

    folder: Path  # of checkpoints and status
    timeout: float  # seconds that a phase may take
    wait: float  # seconds to wait for clients that are not there
    fewest: int  # clients of which a round is made
    evaluate_every: int  # rounds between evaluations; 0: only after the last one
    most_rows: int  # that a client is believed to have
    secure: bool  # whether the server learns no more of uploads than their mean
    noise: privacy.Noise | None  # of differential privacy


def read_options(given: Mapping[str, Value]) -> Options:
    secure = given["secure-aggregation"]
    if not isinstance(secure, bool):
        raise InputError(f"secure-aggregation must be true or false, not {secure}.")
    noise = privacy.read_noise(*(read_float(given, key, 0) for key in NOISE))
    if secure and noise:
        raise InputError("secure-aggregation hides the updates that noise-multiplier has the server clip; set one.")
    return Options(
        Path(str(given["folder"])).absolute(),
        read_float(given, "timeout", 1),
        read_float(given, "wait", 0),
        int(read_float(given, "fewest", 1)),
        int(read_float(given, "evaluate-every", 0)),
        int(read_float(given, "most-rows", 1)),
        secure,
        noise,
    )
