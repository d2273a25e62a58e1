"""Linear discriminant analysis (Fisher 1936) over all clients, from sums that they send once, after the last round.

Averaging the heads of clients with few classes each gives a poor global head; class means and a common covariance of
the features average exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ..tree import Tree
from ..types import scale
from .base import Net, Shard

NEVER = -1e4  # the logit of a class that no client has


def sum_moments(net: Net, body: Tree, shard: Shard, chunk: int = 500) -> Tree:
    """Of a client's training rows, each divided by their number, in float64: how many are of a class [c], the sum of
    their features [c, d], and the sum over all classes of the features' outer products [d, d]. And how many classes the
    client has, in effect, as a share of all."""
    counts, classes = shard.counts.double(), len(shard.counts)
    sums, products = counts.new_zeros(classes, net.feature_dim), counts.new_zeros(net.feature_dim, net.feature_dim)
    with torch.no_grad():
        for x, y, real in zip(*(part.split(chunk) for part in (shard.x, shard.labels, shard.real)), strict=True):
            h = net.features(body, scale(x)).double() * real[:, None]
            sums = sums + one_hot(y, classes).to(h).T @ h
            products = products + h.T @ h
    rows = shard.real.sum().clamp(min=1)
    effective = torch.special.entr(counts / rows).sum().exp() / classes
    return {"counts": counts / rows, "sums": sums / rows, "products": products / rows, "effective": effective}


def fit_discriminant(moments: Tree, shrink: float = 0.1) -> Tree:
    """A linear classifier for equally frequent classes: weight [c, d] and bias [c].

    `shrink` is the share of a multiple of the identity in the covariance, which few rows determine badly.
    """
    counts, sums, products = moments["counts"], moments["sums"], moments["products"]
    means = sums / counts.clamp(min=torch.finfo(counts.dtype).tiny)[:, None]
    within = products - (means.T * counts) @ means  # counts add up to 1
    size = within.diagonal().mean().clamp(min=1e-9)
    within = (1 - shrink) * within + shrink * size * torch.eye(len(within), dtype=within.dtype, device=within.device)
    weight = torch.linalg.solve(within, means.T).T
    bias = -0.5 * (weight * means).sum(-1)
    return {"weight": weight, "bias": torch.where(counts > 0, bias, NEVER)}


def discriminate(discriminant: Tree, h: Tensor) -> Tensor:
    """The logits [n, c] of features [n, d]."""
    logits: Tensor = h.double() @ discriminant["weight"].T + discriminant["bias"]
    return logits
