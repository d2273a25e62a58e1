"""Central differential privacy, by Flower's wrapper: updates are clipped, averaged with equal weights, and noised.

An update is everything that a client sends for a round: the change of the shared model and of the averages beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from torch import Tensor

from ...errors import InputError
from . import messages

WEIGHT = "weight"
SHORTEST = 1e-12


class Noise(NamedTuple):
    """Noise of the Gaussian mechanism: its standard deviation is multiplier * clipping_norm / clients."""

    multiplier: float
    clipping_norm: float  # the largest length of an update


def read_noise(multiplier: float, clipping_norm: float) -> Noise | None:
    """None: no noise."""
    if (multiplier > 0) != (clipping_norm > 0):
        raise InputError("noise-multiplier and clipping-norm go together; set both, or neither.")
    return Noise(multiplier, clipping_norm) if multiplier > 0 else None


def bound_epsilon(noise: Noise, rounds: int, delta: float) -> float:
    """An upper bound of epsilon for clients that take part in so many rounds (Bun and Steinke 2016, proposition 1.3).

    Neighbours differ by one client, whose update is in one of them zero. The bound takes no credit for rounds in which
    a client is not sampled.
    """
    rho = rounds / (2 * noise.multiplier**2)
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


def average(before: Mapping[str, Tensor], sent: Sequence[Mapping[str, Tensor]], noise: Noise) -> dict[str, Tensor]:
    """The noised mean of what clients sent, of which nothing was averaged before."""
    rule = FedAvg(weighted_by_key=WEIGHT)
    private = DifferentialPrivacyServerSideFixedClipping(rule, noise.multiplier, noise.clipping_norm, len(sent))
    private.current_arrays = _make_arrays(before)
    replies = [_make_reply(before, leaves) for leaves in sent]
    arrays, _ = private.aggregate_train(1, replies)
    if arrays is None:
        raise RuntimeError("Flower aggregated nothing.")
    noised = {name: torch.from_numpy(arrays[name].numpy().copy()) for name in before}
    return {name: noised[name].to(leaf.dtype).reshape(leaf.shape) for name, leaf in before.items()}


def _make_arrays(leaves: Mapping[str, Tensor]) -> ArrayRecord:
    """As Flower's strategies expect them, one array a leaf. Vectors: Flower's clipping leaves numbers as they are."""
    return ArrayRecord({name: Array(leaf.detach().cpu().reshape(-1).numpy()) for name, leaf in leaves.items()})


def _make_reply(before: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> Message:
    """As Flower's strategies expect it, with leaves in the order of `before`."""
    length = math.sqrt(sum(float((leaves[name] - leaf).double().square().sum()) for name, leaf in before.items()))
    if length < SHORTEST:  # Flower divides by the length: it must not be zero, not even after its square is rounded
        leaves = {n: torch.maximum(leaf + SHORTEST, leaf.nextafter(leaf + 1)) for n, leaf in before.items()}
    arrays = _make_arrays({name: leaves[name] for name in before})
    content = RecordDict({messages.ARRAYS: arrays, messages.METRICS: MetricRecord({WEIGHT: 1.0})})
    return Message(content, 1, messages.TRAIN)
