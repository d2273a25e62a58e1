"""FedTHE's test-time head ensemble: for every sample, weigh a global and a personal head without a label.

Test-Time Robust Personalization for Federated Learning, ICLR 2023, https://arxiv.org/abs/2205.10920, Algorithm 2.

The two weights start equal and move by opposite amounts, so one number per sample is enough, and its gradient has a
closed form. Samples depend on each other only through the history of their features, a linear recurrence; so a whole
stream is one batched computation.

Everything is computed in float64, whatever the input: distances and gradients nearly cancel, and Adam divides by their
size, so the rounding of float32 could decide which head is trusted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from .arrays import LARGEST, check_alike, is_whole, is_within, show_shapes, take, widen
from .scans import remember

Weighting = Literal["slw", "fa", "em", "half"]  # by similarity (the paper's choice), or one of its ablations
BLOCK = 128  # samples whose history is computed at a time: few enough to stay in a processor's cache


class Ensemble(NamedTuple):
    logits: Tensor  # [n, classes]
    weight: Tensor  # [n]: e, the weight of the global head
    history: Tensor  # [d], float64: pass it in again to continue the stream


@dataclass(frozen=True)
class Search:
    """How e is searched: steps of Adam from e = 0.5."""

    steps: int = 20  # of Adam
    lr: float = 0.1  # 0.01 for CCT4
    beta1: float = 0.9  # of Adam
    beta2: float = 0.999  # of Adam
    eps: float = 1e-8  # of Adam

    def __post_init__(self) -> None:
        if not (is_whole(self.steps) and self.steps >= 0 and is_within(self.lr, 0, LARGEST) and self.lr > 0):
            raise InputError(
                f"steps must be a whole number that is not negative, and lr positive and at most {LARGEST:g}, "
                f"but they are {self.steps!r} and {self.lr!r}."
            )
        if not all(is_within(value, 0, 1) and value < 1 for value in (self.beta1, self.beta2)) or not (
            is_within(self.eps, 0, LARGEST) and self.eps > 0
        ):
            raise InputError(
                f"beta1 and beta2 must be from 0 to below 1, and eps positive, "
                f"but they are {self.beta1!r}, {self.beta2!r} and {self.eps!r}."
            )


def head_ensemble(
    features: Tensor | np.ndarray,
    global_logits: Tensor | np.ndarray,
    local_logits: Tensor | np.ndarray,
    global_descriptor: Tensor | np.ndarray,
    local_descriptor: Tensor | np.ndarray,
    *,
    history: Tensor | np.ndarray | None = None,
    alpha: float = 0.1,
    beta: float = 0.1,
    steps: int = 20,
    lr: float = 0.1,
) -> Ensemble:
    """Weigh two heads over a stream of samples, in order.

    features [n, d], logits [n, classes], descriptors [d]: torch tensors or NumPy arrays, float32 or float64. The
    answer is torch tensors: logits and weight of the type given, on the same device, and the history in float64.

    `history` is None for the first sample of a stream and afterwards the `.history` of the call before: one call over
    n samples, n calls over one, and chunks give the same.

    Gradients of `.logits` and `.weight` flow to every tensor given to this call, through all steps of the search.
    They are always finite: a derivative that overflows, as it can where the search starts at a maximum of its loss, is
    clamped. `.history` is detached, so that a stream does not keep the graphs of earlier calls.
    """
    if not (is_within(alpha, 0, 1) and is_within(beta, 0, 1)):
        raise InputError(f"alpha and beta must be from 0 to 1, but they are {alpha!r} and {beta!r}.")
    search = Search(steps, lr)
    given = {
        "features": features,
        "global_logits": global_logits,
        "local_logits": local_logits,
        "global_descriptor": global_descriptor,
        "local_descriptor": local_descriptor,
    } | ({} if history is None else {"history": history})
    tensors = {name: take("head_ensemble", name, value) for name, value in given.items()}
    _check(tensors)
    h, of_global, of_local, d_global, d_local, *before = (widen(tensor) for tensor in tensors.values())
    smoothed, last = smooth(h, before[0] if before else None, float(alpha), float(beta))
    weight = find_weight(of_global, of_local, measure_gap(smoothed, d_global, d_local), search)
    dtype = tensors["features"].dtype
    return Ensemble(mix(weight, of_global, of_local).to(dtype), weight.to(dtype), last.detach())


def mix(weight: Tensor, global_logits: Tensor, local_logits: Tensor) -> Tensor:
    """weight [n], logits [n, classes]; the answer has the type of the logits"""
    e = weight.double()[:, None]
    return (e * global_logits + (1 - e) * local_logits).to(global_logits.dtype)


def describe_heads(weight: Tensor, logits: Tensor, global_logits: Tensor, local_logits: Tensor) -> dict[str, Tensor]:
    """What is kept of every sample: e, and for each head what it alone would answer and the probability that it gives
    to the answer of both, which the logits [n, classes] say."""
    answer, kept = logits.argmax(-1, keepdim=True), {"e": weight.to(global_logits.dtype)}
    for name, of_head in (("global", global_logits), ("personal", local_logits)):
        kept[name] = of_head.argmax(-1).to(torch.int16)
        kept[f"{name}_probability"] = of_head.double().softmax(-1).gather(-1, answer)[..., 0].float()
    return kept


def smooth(features: Tensor, history: Tensor | None, alpha: float, beta: float) -> tuple[Tensor, Tensor]:
    """Every feature drawn to the history before it, beta * h + (1 - beta) * history [n, d], and the last history [d].

    The history starts as the first feature and moves by history = alpha * h + (1 - alpha) * history after each sample.
    Both are float64.
    """
    last = (features[0] if history is None else history).double()
    smoothed = []
    for h in features.split(BLOCK):
        before, last = remember(h.double(), last, alpha)
        smoothed.append(beta * h.double() + (1 - beta) * before)
    return torch.cat(smoothed), last


def measure_gap(smoothed: Tensor, global_descriptor: Tensor, local_descriptor: Tensor) -> Tensor:
    """How much farther a sample is from the global descriptor than from the local one [n], in float64."""
    from_global, from_local = smoothed.double() - global_descriptor, smoothed.double() - local_descriptor
    distances = torch.linalg.vector_norm(from_global, dim=-1) + torch.linalg.vector_norm(from_local, dim=-1)
    # a - b = (a^2 - b^2) / (a + b), and a^2 - b^2 is a dot product. Far from both descriptors a - b would be rounding.
    apart = local_descriptor.double() - global_descriptor
    gap: Tensor = (apart * (from_global + from_local)).sum(-1) / distances.clamp(min=1e-150)
    return gap


def find_weight(
    global_logits: Tensor,
    local_logits: Tensor,
    gap: Tensor,
    search: Search,
    weighting: Weighting = "slw",
    *,
    together: bool = False,
    stop: float = 0.0,
) -> Tensor:
    """e [n], minimising lam * entropy(e * global + (1 - e) * local) + (1 - lam) * e * gap by Adam.

    `together` gives all samples one e, which minimises the mean. `stop` ends the search for all samples, once the
    gradient of their mean loss by their scores is shorter than this.
    """
    gap, dtype = gap.double(), gap.dtype
    global_logits, local_logits = _centre(global_logits.double()), _centre(local_logits.double())
    lam, rest = _weigh_losses(global_logits, local_logits, weighting)
    difference = global_logits - local_logits

    def gradient(e: Tensor) -> Tensor:
        log_p = mix(e, global_logits, local_logits).log_softmax(-1)
        p = log_p.exp()
        entropy = -(p * log_p).sum(-1, keepdim=True)
        of_entropy = -(p * (log_p + entropy) * difference).sum(-1)
        of_loss = lam * of_entropy + rest * gap
        return of_loss.mean().expand_as(of_loss) if together else of_loss

    return descend(gradient, gap, search, stop).to(dtype)


def descend(gradient: Callable[[Tensor], Tensor], like: Tensor, search: Search, stop: float = 0.0) -> Tensor:
    """Weights e, shaped and typed as `like`, that minimise a loss with this gradient: from 0.5, by Adam on a score."""
    score, m = torch.zeros_like(like), torch.zeros_like(like)
    going = torch.ones((), dtype=torch.bool, device=like.device)
    v = torch.full_like(like, torch.finfo(like.dtype).tiny)  # nothing beside eps, but sqrt has no derivative at 0
    for t in range(1, search.steps + 1):
        e = torch.sigmoid(2 * score)  # the other score is -score, and softmax((s, -s))[0] = sigmoid(2 s)
        of_score = gradient(e) * e * (1 - e)
        m = search.beta1 * m + (1 - search.beta1) * of_score
        v = search.beta2 * v + (1 - search.beta2) * of_score**2
        rate = float(search.lr) / (1 - search.beta1**t)  # a float32 of NumPy would round the rest
        step = rate * m / ((v / (1 - search.beta2**t)).sqrt() + search.eps)
        if stop:  # of a mean over the samples, by both scores of each
            going = going & (2**0.5 * torch.linalg.vector_norm(of_score) / len(like) >= stop)
            step = step * going
        score = score - step
    return torch.sigmoid(2 * score)


def _centre(logits: Tensor) -> Tensor:
    """The same probabilities, without an offset whose rounding would hide the differences."""
    return logits - logits.amax(-1, keepdim=True).detach()


def _weigh_losses(
    global_logits: Tensor, local_logits: Tensor, weighting: Weighting
) -> tuple[Tensor | float, Tensor | float]:
    """lam and 1 - lam. For nearly equal heads the subtraction itself would leave nothing but rounding."""
    if weighting == "slw":  # agreeing heads: trust the more confident one; disagreeing heads: trust the features
        p, q = (logits.softmax(-1) for logits in (global_logits, local_logits))
        p, q = (each / torch.linalg.vector_norm(each, dim=-1, keepdim=True) for each in (p, q))
        return (p * q).sum(-1), ((p - q) ** 2).sum(-1) / 2
    lam = {"fa": 0.0, "em": 1.0, "half": 0.5}[weighting]
    return lam, 1 - lam


def _check(given: dict[str, Tensor]) -> None:
    """Refuse shapes, types, devices and numbers that do not go together."""
    n, d = given["features"].shape if given["features"].ndim == 2 else (0, 0)
    classes = given["global_logits"].shape[1] if given["global_logits"].ndim == 2 else 0
    wanted = {"features": (n, d), "global_logits": (n, classes), "local_logits": (n, classes)}
    if not (n and d and classes and all(value.shape == wanted.get(name, (d,)) for name, value in given.items())):
        raise InputError(
            "head_ensemble needs features [n, d], two logits [n, classes], two descriptors [d] and a history of None "
            f"or [d], none of them empty, but got {show_shapes(given)}."
        )
    check_alike("head_ensemble", given, wide=["history"])  # which is float64 in any stream
