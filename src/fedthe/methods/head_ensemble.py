"""FedTHE's test-time head ensemble: for every sample, weigh a global and a personal head without a label.

Test-Time Robust Personalization for Federated Learning, ICLR 2023, https://arxiv.org/abs/2205.10920, Algorithm 2.

The two weights start equal and move by opposite amounts, so one number per sample is enough, and its gradient has a
closed form. Samples depend on each other only through the history of their features, a linear recurrence; so a whole
stream is one batched computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError

Weighting = Literal["slw", "fa", "em", "half"]  # by similarity (the paper's choice), or one of its ablations
BLOCK = 64  # samples of the history that one matrix product carries on


class Ensemble(NamedTuple):
    logits: Tensor  # [n, classes]
    weight: Tensor  # [n]: e, the weight of the global head
    history: Tensor  # [d]: pass it in again to continue the stream


@dataclass(frozen=True)
class Search:
    """How e is searched: steps of Adam from e = 0.5."""

    steps: int = 20
    lr: float = 0.1  # 0.01 for CCT4
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if self.steps < 0 or not 0 < self.lr < math.inf:
            raise InputError(f"steps must not be negative and lr positive, but they are {self.steps} and {self.lr}.")


def head_ensemble(
    features: Tensor,
    global_logits: Tensor,
    local_logits: Tensor,
    global_descriptor: Tensor,
    local_descriptor: Tensor,
    *,
    history: Tensor | None = None,
    alpha: float = 0.1,
    beta: float = 0.1,
    steps: int = 20,
    lr: float = 0.1,
) -> Ensemble:
    """Weigh two heads over a stream of samples, in order.

    features [n, d], logits [n, classes], descriptors [d]; float32 or float64. `history` is None for the first sample
    of a stream and afterwards the `.history` of the call before: one call over n samples, n calls over one, and chunks
    give the same.
    """
    _check(features, global_logits, local_logits, global_descriptor, local_descriptor, history)
    if not (0 <= alpha <= 1 and 0 <= beta <= 1 and steps >= 0 and 0 < lr < math.inf):
        raise InputError(
            f"alpha and beta must be from 0 to 1, steps not negative and lr positive, "
            f"but they are {alpha}, {beta}, {steps} and {lr}."
        )
    smoothed, last = smooth(features, history, alpha, beta)
    gap = measure_gap(smoothed, global_descriptor, local_descriptor)
    weight = find_weight(global_logits, local_logits, gap, Search(steps, lr))
    return Ensemble(mix(weight, global_logits, local_logits), weight, last)


def mix(weight: Tensor, global_logits: Tensor, local_logits: Tensor) -> Tensor:
    """weight [n], logits [n, classes]"""
    return weight[:, None] * global_logits + (1 - weight[:, None]) * local_logits


def describe_heads(weight: Tensor, global_logits: Tensor, local_logits: Tensor) -> dict[str, Tensor]:
    """What is kept of every sample: e, and what each head alone would have answered."""
    answers = {"global": global_logits, "personal": local_logits}
    return {"e": weight, **{name: logits.argmax(-1).to(torch.int16) for name, logits in answers.items()}}


def smooth(features: Tensor, history: Tensor | None, alpha: float, beta: float) -> tuple[Tensor, Tensor]:
    """Every feature drawn to the history before it, beta * h + (1 - beta) * history [n, d], and the last history [d].

    The history starts as the first feature and moves by history = alpha * h + (1 - alpha) * history after each sample.
    """
    last = features[0] if history is None else history
    before = []
    for block in features.split(BLOCK):
        n = len(block)
        age = torch.arange(n, device=block.device)
        decay = (1 - alpha) ** (age[:, None] - age).clamp(min=0).to(block.dtype)
        reach = torch.tril(alpha * decay)  # [n, n]: how much of sample j is in the history after sample i
        after = reach @ block + ((1 - alpha) ** (age + 1).to(block.dtype))[:, None] * last
        before.append(torch.cat([last[None], after[:-1]]))
        last = after[-1]
    return beta * features + (1 - beta) * torch.cat(before), last


def measure_gap(smoothed: Tensor, global_descriptor: Tensor, local_descriptor: Tensor) -> Tensor:
    """How much farther a sample is from the global descriptor than from the local one [n]."""
    to_global: Tensor = torch.linalg.vector_norm((smoothed - global_descriptor).double(), dim=-1)
    to_local: Tensor = torch.linalg.vector_norm((smoothed - local_descriptor).double(), dim=-1)
    return (to_global - to_local).to(smoothed.dtype)


def find_weight(
    global_logits: Tensor,
    local_logits: Tensor,
    gap: Tensor,
    search: Search,
    weighting: Weighting = "slw",
    *,
    together: bool = False,
) -> Tensor:
    """e [n], minimising lam * entropy(e * global + (1 - e) * local) + (1 - lam) * e * gap by Adam.

    `together` gives all samples one e, which minimises the mean.
    """
    # in float64: where the heads agree, the slopes nearly cancel, and Adam makes the rounding of float32 count
    dtype = gap.dtype
    global_logits, local_logits, gap = global_logits.double(), local_logits.double(), gap.double()
    lam = _weigh_losses(global_logits, local_logits, weighting)
    difference = global_logits - local_logits

    def slope(e: Tensor) -> Tensor:
        log_p = mix(e, global_logits, local_logits).log_softmax(-1)
        p = log_p.exp()
        entropy = -(p * log_p).sum(-1, keepdim=True)
        of_entropy = -(p * (log_p + entropy) * difference).sum(-1)
        of_loss = lam * of_entropy + (1 - lam) * gap
        return of_loss.mean().expand_as(of_loss) if together else of_loss

    return descend(slope, gap, search).to(dtype)


def descend(slope: Callable[[Tensor], Tensor], like: Tensor, search: Search) -> Tensor:
    """Weights e, shaped and typed as `like`: from 0.5 down the slope of a loss by e, by Adam on the score behind e."""
    score, m, v = torch.zeros_like(like), torch.zeros_like(like), torch.zeros_like(like)
    for t in range(1, search.steps + 1):
        e = torch.sigmoid(2 * score)  # the other score is -score, and softmax((s, -s))[0] = sigmoid(2 s)
        gradient = slope(e) * e * (1 - e)
        m = search.beta1 * m + (1 - search.beta1) * gradient
        v = search.beta2 * v + (1 - search.beta2) * gradient**2
        rate = search.lr / (1 - search.beta1**t)
        score = score - rate * m / ((v / (1 - search.beta2**t)).sqrt() + search.eps)
    return torch.sigmoid(2 * score)


def _weigh_losses(global_logits: Tensor, local_logits: Tensor, weighting: Weighting) -> Tensor | float:
    if weighting == "slw":  # agreeing heads: trust the more confident one; disagreeing heads: trust the features
        return torch.cosine_similarity(global_logits.softmax(-1), local_logits.softmax(-1), dim=-1)
    return {"fa": 0.0, "em": 1.0, "half": 0.5}[weighting]


def _check(
    features: Tensor,
    global_logits: Tensor,
    local_logits: Tensor,
    global_descriptor: Tensor,
    local_descriptor: Tensor,
    history: Tensor | None,
) -> None:
    n, d = features.shape if features.ndim == 2 else (-1, -1)
    shapes_agree = (
        n > 0
        and global_logits.ndim == 2
        and global_logits.shape == local_logits.shape
        and len(global_logits) == n
        and global_logits.shape[1] > 0
        and all(vector.shape == (d,) for vector in (global_descriptor, local_descriptor))
        and (history is None or history.shape == (d,))
    )
    given = {
        "features": features,
        "global_logits": global_logits,
        "local_logits": local_logits,
        "global_descriptor": global_descriptor,
        "local_descriptor": local_descriptor,
    } | ({} if history is None else {"history": history})
    if not shapes_agree:
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in given.items())
        raise InputError(
            "head_ensemble needs features [n, d], two logits [n, classes] and two descriptors [d] "
            f"with n at least 1, but got {shapes}."
        )
    for name, value in given.items():
        if value.dtype != features.dtype or value.dtype not in (torch.float32, torch.float64):
            raise InputError(
                f"head_ensemble needs float32 or float64 throughout, "
                f"but features are {features.dtype} and {name} {value.dtype}."
            )
        if not torch.isfinite(value).all():
            raise InputError(f"head_ensemble needs finite numbers, but {name} holds inf or nan.")
