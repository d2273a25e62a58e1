"""Losses, one number per sample. The engine takes their mean over the real rows of a batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none")


def balanced_softmax(logits: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    """Cross entropy on logits raised by the log of the class counts (Ren et al. 2020): rare classes are not drowned."""
    return cross_entropy(logits + torch.log(counts + 1), y)


def entropy(logits: Tensor) -> Tensor:
    """Shannon entropy of softmax(logits), in nats."""
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def marginal_entropy(logits: Tensor) -> Tensor:
    """Entropy of the mean prediction over views; logits: [..., views, classes]."""
    log_p = logits.log_softmax(-1).logsumexp(-2) - math.log(logits.shape[-2])
    return -(log_p.exp() * log_p).sum(-1)
