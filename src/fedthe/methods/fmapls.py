"""Online-FMAPLS (Hu and Barria 2025, https://arxiv.org/abs/2511.18615): online EM for the maximum a posteriori class
prior of a stream, under a Dirichlet distribution that is estimated along with it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from .base import Answers, Method, Predictor, Samples, Shard, Tree
from .label_shift import SMOOTHING, adjust, describe_prior, global_logits, smooth_prior


@dataclass(frozen=True)
class FMAPLS(Predictor):
    """Written from the abstract and summaries of the paper, not from its text. From there: EM estimates the prior and
    the parameters alpha of its Dirichlet distribution jointly, the E-step is a stochastic approximation, and alpha has
    a closed form. Ours: that form, alpha = 1 + strength * (anchor * own + (1 - anchor) * prior), where `own` is the
    client's class prior in training, at which the estimate starts; and the step size n ** -rate of sample n, with
    n ** rate as the number of samples that the likelihood counts for. With anchor 0, alpha follows the prior and only
    damps it; with anchor 1, alpha is fixed, as in MAPLS, which the paper improves on."""

    window = None
    strength: float = 30.0  # samples that the Dirichlet distribution counts for
    anchor: float = 0.5  # the share of the client's own prior in the mode of that distribution
    rate: float = 0.6  # above 0.5 and up to 1, where online EM converges (Cappe and Moulines 2009)
    smoothing: float = SMOOTHING  # the share of equal priors in the client's own

    def __post_init__(self) -> None:
        if not (0 <= self.strength < math.inf and 0 <= self.anchor <= 1):
            raise InputError(
                f"fmapls: strength must not be negative and anchor must be from 0 to 1, "
                f"but they are {self.strength} and {self.anchor}."
            )
        if not (0.5 < self.rate <= 1 and 0 < self.smoothing <= 1):
            raise InputError(
                f"fmapls: rate must be above 0.5 and smoothing above 0, and both at most 1, "
                f"but they are {self.rate} and {self.smoothing}."
            )

    def start(self, method: Method, mine: Tree, shard: Shard) -> Tree:
        own = smooth_prior(shard.counts, self.smoothing)
        return {"own": own, "prior": own, "share": own, "seen": torch.zeros_like(own[0])}

    def answer(self, method: Method, mine: Tree, state: Tree, samples: Samples) -> tuple[Answers, Tree]:
        logits, priors = global_logits(method, mine, samples.x), []
        for posterior in logits.double().softmax(-1):
            state = update_prior(state, posterior, self.strength, self.anchor, self.rate)
            priors.append(state["prior"])
        prior = torch.stack(priors)
        return Answers(adjust(logits, prior), describe_prior(prior)), state


def update_prior(state: Tree, posterior: Tensor, strength: float, anchor: float, rate: float) -> Tree:
    """The estimate after one more sample, whose posterior [classes] is under equal priors.

    The state has the class priors `own` and `prior`, the smoothed `share` of every class in the stream, and `seen`.
    """
    seen = state["seen"] + 1
    count = seen**rate
    found = posterior * state["prior"]
    share = state["share"] + (found / found.sum().clamp(min=torch.finfo(found.dtype).tiny) - state["share"]) / count
    mode = anchor * state["own"] + (1 - anchor) * state["prior"]  # of the Dirichlet distribution: alpha - 1, normalised
    prior = (count * share + strength * mode) / (count + strength)  # the mode after the samples
    return {"own": state["own"], "prior": prior, "share": share, "seen": seen}
