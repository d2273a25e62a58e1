"""EM for the class prior (Saerens, Latinne and Decaestecker, Neural Computation 2002,
https://doi.org/10.1162/089976602753284446): the prior under which a stream's samples are most likely."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from .base import Answers, Method, Predictor, Samples, Shard, Tree
from .label_shift import adjust, describe_prior, global_logits

CHUNK = 128  # samples whose windows are in memory together


@dataclass(frozen=True)
class EM(Predictor):
    """The paper has all test samples at hand. In a stream, a sample is answered under the prior of the latest ones and
    itself: for every sample, EM starts again from equal priors and takes its steps over this buffer."""

    window = None
    buffer: int = 200  # the latest samples, whose posteriors are kept
    steps: int = 20  # of EM; on CIFAR-10, 100 change the mean accuracy by 0.1 points

    def __post_init__(self) -> None:
        if self.buffer < 1 or self.steps < 0:
            raise InputError(
                f"em: buffer must be at least 1 and steps not negative, but they are {self.buffer} and {self.steps}."
            )

    def start(self, method: Method, mine: Tree, shard: Shard) -> Tree:
        return {"latest": shard.counts.new_zeros((self.buffer, method.net.classes), dtype=torch.float64)}

    def answer(self, method: Method, mine: Tree, state: Tree, samples: Samples) -> tuple[Answers, Tree]:
        logits = global_logits(method, mine, samples.x)
        seen = torch.cat([state["latest"], logits.double().softmax(-1)])  # [buffer + n, classes]
        windows = seen[1:].unfold(0, self.buffer, 1).mT  # [n, buffer, classes], each up to its sample
        prior = torch.cat([prior_by_em(part, self.steps) for part in windows.split(CHUNK)])
        return Answers(adjust(logits, prior), describe_prior(prior)), {"latest": seen[len(logits) :]}


def prior_by_em(posteriors: Tensor, steps: int = 20) -> Tensor:
    """The class prior [..., classes] of samples [..., m, classes], from equal priors on by so many steps of EM.

    posteriors: under equal priors; a row of zeros stands for no sample.
    """
    count = (posteriors.sum(-1, keepdim=True) > 0).sum(-2)
    prior = torch.full_like(posteriors[..., 0, :], 1 / posteriors.shape[-1])
    for _ in range(steps):
        # a sample's posterior under the prior is prior * posteriors / density; the next prior is the mean of them
        density = (posteriors @ prior[..., None])[..., 0].clamp(min=torch.finfo(prior.dtype).tiny)
        prior = prior * ((1 / density)[..., None, :] @ posteriors)[..., 0, :] / count
    return prior
