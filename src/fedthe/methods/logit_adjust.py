"""Logit adjustment (Menon et al., ICLR 2021, https://arxiv.org/abs/2007.07314) with the client's own class prior."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ..errors import InputError
from .base import Answers, Method, Predictor, Samples, Shard, Tree
from .label_shift import SMOOTHING, global_logits, log, smooth_prior


@dataclass(frozen=True)
class LogitAdjust(Predictor):
    """The global head's logits plus tau * log(prior), whatever the stream shows.

    The paper subtracts the log of a long-tailed training prior, to answer under equal priors. Here the head is balanced
    by training already, and the client's prior is added.
    """

    needs_labels: ClassVar[bool] = True
    window = None
    tau: float = 1.0  # the paper's scale of the adjustment; 1 is Bayes' rule
    smoothing: float = SMOOTHING  # the share of equal priors in the client's own

    def __post_init__(self) -> None:
        if not (0 <= self.tau < math.inf and 0 < self.smoothing <= 1):
            raise InputError(
                f"logit_adjust: tau must not be negative, and smoothing must be above 0 and at most 1, "
                f"but they are {self.tau} and {self.smoothing}."
            )

    def start(self, method: Method, mine: Tree, shard: Shard) -> Tree:
        return {"shift": self.tau * log(smooth_prior(shard.counts, self.smoothing))}

    def answer(self, method: Method, mine: Tree, state: Tree, samples: Samples) -> tuple[Answers, Tree]:
        logits = global_logits(method, mine, samples.x)
        return Answers((logits.double() + state["shift"]).to(logits.dtype)), state
