"""What methods against label shift share: a class prior, and a head's answers under it.

They read the global head of FedTHE's training. Balanced softmax trains it, so the softmax of its logits is the
posterior p(y|x) under equal class priors. Label shift keeps p(x|y): under another prior, the posterior is proportional
to prior * softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Method, Tree

SMOOTHING = 1 / 16  # the share of equal priors in a client's own: a class that it never saw may still come


def global_logits(method: Method, mine: Tree, x: Tensor) -> Tensor:
    """[n, classes], of the shared body and head; the method's own logits mix in the personal head."""
    return method.net.logits(mine, x)


def smooth_prior(counts: Tensor, smoothing: float, other: Tensor | None = None) -> Tensor:
    """The class prior [classes] of these counts of rows, in float64, with this share of another one in it.

    The other one is that of equal classes, if it is not given. Without any rows, it is all of it.
    """
    counts = counts.double()
    total = counts.sum()
    own = (1 - smoothing) * counts / torch.where(total > 0, total, 1)
    prior = own + smoothing * (1 / len(counts) if other is None else other)
    return prior / prior.sum()


def adjust(logits: Tensor, prior: Tensor) -> Tensor:
    """Logits [n, classes] of posteriors under equal priors -> under this prior [classes] or [n, classes]."""
    return (logits.double() + log(prior)).to(logits.dtype)


def describe_prior(prior: Tensor) -> dict[str, Tensor]:
    """Columns of info: how many classes the prior [n, classes] spreads over, as the exponential of its entropy."""
    return {"effective_classes": (-(prior * log(prior)).sum(-1)).exp().float()}


def log(probabilities: Tensor) -> Tensor:
    """Finite where a probability is 0."""
    return probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()
