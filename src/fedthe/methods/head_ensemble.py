"""FedTHE's test-time head ensemble: for every sample, weigh a global and a personal head without a label.

Test-Time Robust Personalization for Federated Learning, ICLR 2023, https://arxiv.org/abs/2205.10920, Algorithm 2.

The two weights start equal and move by opposite amounts, so one number per sample is enough, and its gradient has a
closed form. Samples depend on each other only through the history of their features, a linear recurrence; so a whole
stream is one batched computation.

Everything is computed in float64, whatever the input: distances and gradients nearly cancel, and Adam divides by their
size, so the rounding of float32 could decide which head is trusted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError

Weighting = Literal["slw", "fa", "em", "half"]  # by similarity (the paper's choice), or one of its ablations
BLOCK = 128  # samples whose history is computed at a time: few enough to stay in a processor's cache
LARGEST = 1e100  # the largest magnitude of an input: sums of squares of such numbers still fit into float64


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
        if not (_is_whole(self.steps) and self.steps >= 0 and _is_within(self.lr, 0, LARGEST) and self.lr > 0):
            raise InputError(
                f"steps must be a whole number that is not negative, and lr positive and at most {LARGEST:g}, "
                f"but they are {self.steps!r} and {self.lr!r}."
            )
        if not all(_is_within(value, 0, 1) and value < 1 for value in (self.beta1, self.beta2)) or not (
            _is_within(self.eps, 0, LARGEST) and self.eps > 0
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
    if not (_is_within(alpha, 0, 1) and _is_within(beta, 0, 1)):
        raise InputError(f"alpha and beta must be from 0 to 1, but they are {alpha!r} and {beta!r}.")
    search = Search(steps, lr)
    given = {
        "features": features,
        "global_logits": global_logits,
        "local_logits": local_logits,
        "global_descriptor": global_descriptor,
        "local_descriptor": local_descriptor,
    } | ({} if history is None else {"history": history})
    tensors = {name: _take(name, value) for name, value in given.items()}
    _check(tensors)
    h, of_global, of_local, d_global, d_local, *before = (_widen(tensor) for tensor in tensors.values())
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
        before, last = _remember(h.double(), last, alpha)
        smoothed.append(beta * h.double() + (1 - beta) * before)
    return torch.cat(smoothed), last


def _remember(h: Tensor, last: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """The history before each sample of h [n, d], and after the last one.

    A scan by doubling: each pass lets every row reach back twice as far. A row only adds earlier ones to itself, so a
    NaN never reaches the rows before it, as it would in a product with a triangular matrix: 0 * NaN is NaN.
    """
    keep, reach = 1 - alpha, 1
    after = torch.cat([alpha * h[:1] + keep * last, alpha * h[1:]])
    while reach < len(h):
        after = torch.cat([after[:reach], torch.add(after[reach:], after[:-reach], alpha=keep**reach)])
        reach *= 2
    return torch.cat([last[None], after[:-1]]), after[-1]


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
) -> Tensor:
    """e [n], minimising lam * entropy(e * global + (1 - e) * local) + (1 - lam) * e * gap by Adam.

    `together` gives all samples one e, which minimises the mean.
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

    return descend(gradient, gap, search).to(dtype)


def descend(gradient: Callable[[Tensor], Tensor], like: Tensor, search: Search) -> Tensor:
    """Weights e, shaped and typed as `like`, that minimise a loss with this gradient: from 0.5, by Adam on a score."""
    score, m = torch.zeros_like(like), torch.zeros_like(like)
    v = torch.full_like(like, torch.finfo(like.dtype).tiny)  # nothing beside eps, but sqrt has no derivative at 0
    for t in range(1, search.steps + 1):
        e = torch.sigmoid(2 * score)  # the other score is -score, and softmax((s, -s))[0] = sigmoid(2 s)
        of_score = gradient(e) * e * (1 - e)
        m = search.beta1 * m + (1 - search.beta1) * of_score
        v = search.beta2 * v + (1 - search.beta2) * of_score**2
        rate = float(search.lr) / (1 - search.beta1**t)  # a float32 of NumPy would round the rest
        score = score - rate * m / ((v / (1 - search.beta2**t)).sqrt() + search.eps)
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


def _widen(value: Tensor) -> Tensor:
    wide: Tensor = _Widen.apply(value)  # type: ignore[no-untyped-call]
    return wide


class _Widen(torch.autograd.Function):
    """float64 on the way in; on the way back the type given, and finite."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor) -> Tensor:
        return value.to(torch.float64, copy=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        limit = torch.finfo(ctx.dtype).max
        return gradient.nan_to_num(nan=0.0).clamp(-limit, limit).to(ctx.dtype)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral)


def _is_within(value: object, low: float, high: float) -> bool:
    try:
        return isinstance(value, Real) and low <= float(value) <= high
    except OverflowError:
        return False


def _take(name: str, value: object) -> Tensor:
    """A dense tensor as it is, or an array as a tensor."""
    if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        native = value.dtype.newbyteorder("=")
        if native not in (np.float32, np.float64):
            raise InputError(_say_types(f"{name} is {value.dtype}"))
        # torch knows no other byte order and no negative stride, and warns of what is read-only: so a copy
        return torch.from_numpy(np.array(value, native, order="C"))
    if not isinstance(value, Tensor):
        raise InputError(
            f"head_ensemble needs torch tensors or NumPy arrays, but {name} is a {type(value).__name__}; "
            f"convert it, for example with torch.tensor({name})."
        )
    if value.layout != torch.strided or value.is_nested:
        raise InputError(f"head_ensemble needs dense tensors, but {name} is sparse or nested; pass a dense copy.")
    if value.is_meta:
        raise InputError(f"head_ensemble needs numbers, but {name} is on the meta device and holds none.")
    return value


def _say_types(fault: str) -> str:
    way_out = 'use .float(), or .astype("float32") in NumPy'
    return f"head_ensemble needs float32 or float64, the same throughout, but {fault}; {way_out}."


def _check(given: dict[str, Tensor]) -> None:
    """Refuse shapes, types, devices and numbers that do not go together."""
    n, d = given["features"].shape if given["features"].ndim == 2 else (0, 0)
    classes = given["global_logits"].shape[1] if given["global_logits"].ndim == 2 else 0
    wanted = {"features": (n, d), "global_logits": (n, classes), "local_logits": (n, classes)}
    if not (n and d and classes and all(value.shape == wanted.get(name, (d,)) for name, value in given.items())):
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in given.items())
        raise InputError(
            "head_ensemble needs features [n, d], two logits [n, classes], two descriptors [d] and a history of None "
            f"or [d], none of them empty, but got {shapes}."
        )
    features = given["features"]
    for name, value in given.items():
        if value.dtype not in (torch.float32, torch.float64):
            raise InputError(_say_types(f"{name} is {_name(value)}"))
        if value.dtype != features.dtype and name != "history":  # which is float64 in any stream
            raise InputError(_say_types(f"features is {_name(features)} and {name} {_name(value)}"))
        if value.device != features.device:
            raise InputError(
                f"head_ensemble needs everything on one device, but features is on {features.device} and {name} on "
                f"{value.device}; move it, for example with .to(features.device)."
            )
    for name, value in given.items():
        size = float(value.detach().abs().amax())
        if not math.isfinite(size):
            raise InputError(f"head_ensemble needs finite numbers, but {name} holds inf or nan.")
        if size > LARGEST:
            raise InputError(f"head_ensemble needs numbers of at most {LARGEST:g}, but {name} holds one of {size:g}.")


def _name(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
