"""The regime filter: is this sample from the client's own mix of classes, or from everybody's?

FedTHE searches the weight of its two heads. Here the weight follows from Bayes' rule. The global head is trained with
balanced softmax, so its probabilities p(y|x) belong to equally frequent classes and are, up to a constant, the
likelihoods p(x|y). So sum_y own(y) p(y|x) / sum_y everybody(y) p(y|x) says how much better the client's own class mix
explains a sample than everybody's.

Two hypotheses are followed along the stream. The first is the regime: hardly any, most or nearly all samples are the
client's own. The second is whether recent answers predict the classes better than the regime does, as in a stream that
shows one class after another. Both are forward filters, so a whole stream is one batched computation, in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from ..tree import Tree
from .arrays import check_alike, is_within, show_shapes, take, widen
from .label_shift import smooth_prior
from .scans import filter_forward, remember

STATE = ("regimes", "recent", "mix")
COUNTS = ("class_counts", "federation_counts")
LEAST = 1e-6  # of what must not be 0: with it, no product of any number of samples' matrices underflows


class RegimeEnsemble(NamedTuple):
    probabilities: Tensor  # [n, classes]
    own: Tensor  # [n]: how probable it is that the sample is from the client's own mix of classes
    state: dict[str, Tensor]  # float64: pass it in again to continue the stream


@dataclass(frozen=True)
class Regimes:
    """The settings of the filter; any of them may change by half and hardly moves the accuracy."""

    own: tuple[float, ...] = (0.03, 0.6, 0.99)  # the share of samples in each regime that are the client's own
    start: tuple[float, ...] = (0.1, 0.3, 0.6)  # the probability of each regime before the first sample
    leave: float = 0.01  # the probability that a regime ends after a sample
    trust: float = 0.6  # the exponent of likelihood ratios; below 1, because the global head is overconfident
    personal: float = 0.4  # the weight of the personal head in the answer to a sample of the client's own
    smooth: float = 1 / 16  # the share of everybody's mix in the client's own: a class that it never saw may come
    recent: float = 0.02  # the probability, at the start, that recent answers predict the next class; 0: never
    forget: float = 0.2  # how fast the mix of recent answers moves towards the newest
    regress: float = 0.05  # the share of the regime's own mix in the mix of recent answers
    penalty: float = 0.95  # a factor on the likelihood of recent answers, which fit noise, too

    def __post_init__(self) -> None:
        if not (
            all(isinstance(each, tuple | list) and each for each in (self.own, self.start))
            and all(is_within(share, 0, 1) for share in self.own)
            and all(is_within(share, LEAST, 1) for share in self.start)
            and len(self.own) == len(self.start)
            and abs(sum(self.start) - 1) < 1e-6
        ):
            raise InputError(
                f"own must be shares from 0 to 1, and start as many from {LEAST:g} to 1 that add up to 1, "
                f"but they are {self.own!r} and {self.start!r}."
            )
        for name in ("leave", "smooth", "regress", "penalty"):
            if not is_within(getattr(self, name), LEAST, 1):
                raise InputError(f"{name} must be from {LEAST:g} to 1, but it is {getattr(self, name)!r}.")
        for name in ("trust", "personal", "forget"):
            if not is_within(getattr(self, name), 0, 1):
                raise InputError(f"{name} must be from 0 to 1, but it is {getattr(self, name)!r}.")
        if not is_within(self.recent, LEAST, 1 - LEAST) and self.recent != 0:
            raise InputError(f"recent must be 0, or from {LEAST:g} to 1 - {LEAST:g}, but it is {self.recent!r}.")
        object.__setattr__(self, "own", tuple(map(float, self.own)))  # a list of TOML would not be hashable
        object.__setattr__(self, "start", tuple(map(float, self.start)))


def regime_ensemble(
    global_logits: Tensor | np.ndarray,
    local_logits: Tensor | np.ndarray,
    class_counts: Tensor | np.ndarray,
    *,
    federation_counts: Tensor | np.ndarray | None = None,
    state: dict[str, Tensor] | None = None,
    temperatures: tuple[float, float] = (1.0, 1.0),
    settings: Regimes | None = None,
) -> RegimeEnsemble:
    """Answer a stream of samples by a global and a personal head, in order.

    Logits [n, classes] of a global head that was trained with balanced softmax and of a personal head, and the number
    of the client's training rows of each class [classes]: torch tensors or NumPy arrays, float32 or float64. Counts may
    be whole numbers; if all are 0, the client's mix is unknown. The answer is torch tensors: probabilities and own of
    the type given, on the same device, and the state in float64.

    `federation_counts` [classes] are the rows of each class that all clients have together. Without them, a sample that
    is not the client's own is taken to be of any class with the same probability.

    `state` is None for the first sample of a stream and afterwards the `.state` of the call before: one call over n
    samples, n calls over one, and chunks give the same. `temperatures` divide the logits of the two heads; fit them on
    validation rows.

    Gradients flow to the logits given to this call. `.state` is detached.
    """
    settings = Regimes() if settings is None else settings
    if not isinstance(settings, Regimes):
        raise InputError(f"settings must be a fedthe.Regimes, not a {type(settings).__name__}.")
    pair = temperatures if isinstance(temperatures, Sequence) and len(temperatures) == 2 else (None,)
    if not all(is_within(each, 1e-6, 1e6) for each in pair):
        raise InputError(f"temperatures must be two numbers from 1e-6 to 1e6, but they are {temperatures!r}.")
    tensors = _take_all(global_logits, local_logits, class_counts, federation_counts, state, len(settings.own))
    of_global, of_local, counts = (widen(each) for each in list(tensors.values())[:3])
    everybody = smooth_prior(tensors.get("federation_counts", torch.zeros_like(counts)), settings.smooth)
    mixes = Mixes.of(counts, everybody, settings)
    before = begin(mixes, settings) if state is None else {name: tensors[name].double() for name in STATE}
    alone = answer_alone(of_global / temperatures[0], of_local / temperatures[1], mixes, settings)
    weights, after = follow(alone, mixes, before, settings)
    dtype, after = tensors["global_logits"].dtype, {name: value.detach() for name, value in after.items()}
    return RegimeEnsemble(combine(alone, weights).to(dtype), weights.own.to(dtype), after)


class Mixes(NamedTuple):
    """Class mixes [classes]: what a sample is drawn from."""

    own: Tensor  # the client's
    everybody: Tensor  # equal classes, or those of the federation

    @classmethod
    def of(cls, counts: Tensor, everybody: Tensor, settings: Regimes) -> Mixes:
        """Of a client with this number of rows of each class."""
        return cls(smooth_prior(counts, settings.smooth, everybody), everybody)

    def expect(self, share: Tensor) -> Tensor:
        """The mix of samples of which these shares [...] are the client's own [..., classes]."""
        return share[..., None] * self.own + (1 - share[..., None]) * self.everybody


def begin(mixes: Mixes, settings: Regimes) -> dict[str, Tensor]:
    """The state before the first sample of a stream."""
    start, own = mixes.own.new_tensor(settings.start), mixes.own.new_tensor(settings.own)
    return {
        "regimes": start,
        "recent": start.new_tensor([1 - settings.recent, settings.recent]),
        "mix": mixes.expect((start * own).sum()),  # of recent answers: at first, what the regimes expect
    }


class Alone(NamedTuple):
    """What is known of each sample by itself; probabilities [n, classes]."""

    likelihood: Tensor  # of the sample under each class, up to a constant
    of_everybody: Tensor  # the answer if it is from everybody's mix
    of_own: Tensor  # if it is the client's own
    evidence: Tensor  # [n]: how much better the client's own mix explains it than everybody's


class Weights(NamedTuple):
    own: Tensor  # [n]: the probability that a sample is the client's own
    recent: Tensor  # [n]: that recent answers predict its class
    ratio: Tensor  # [n, classes]: of the mix of recent answers to the one that the regimes expect


def answer_alone(of_global: Tensor, of_local: Tensor, mixes: Mixes, settings: Regimes) -> Alone:
    log_global = of_global.log_softmax(-1)
    adjusted = (log_global + mixes.own.log()).log_softmax(-1)
    of_own = (settings.personal * of_local.log_softmax(-1) + (1 - settings.personal) * adjusted).softmax(-1)
    p = log_global.exp()
    of_everybody = p * mixes.everybody
    by_everybody = of_everybody.sum(-1)
    evidence = ((p * mixes.own).sum(-1) / by_everybody) ** settings.trust
    return Alone(p, of_everybody / by_everybody[..., None], of_own, evidence)


def follow(alone: Alone, mixes: Mixes, state: Tree, settings: Regimes) -> tuple[Weights, dict[str, Tensor]]:
    """The weights for each sample, and the state after the last."""
    p, of_everybody, of_own, evidence = alone
    shares = p.new_tensor(settings.own)
    likely = shares * evidence[:, None] + 1 - shares  # [n, regimes]
    regimes, regimes_after = filter_forward(likely, state["regimes"], p.new_tensor(settings.start), settings.leave)
    share = (regimes * shares).sum(-1)  # of the client's own samples, before this one was seen
    own = (share * evidence / (regimes * likely).sum(-1)).clamp(max=1)  # rounding may go beyond

    answers = own[:, None] * of_own + (1 - own[:, None]) * of_everybody
    expected = mixes.expect(share)
    seen, seen_after = remember(answers, state["mix"], settings.forget)
    seen = (1 - settings.regress) * seen + settings.regress * expected
    gain = settings.penalty * ((p * seen).sum(-1) / (p * expected).sum(-1)) ** settings.trust
    start = p.new_tensor([1 - settings.recent, settings.recent])
    likely = torch.stack([torch.ones_like(gain), gain if settings.recent else torch.zeros_like(gain)], -1)
    recent, recent_after = filter_forward(likely, state["recent"], start, settings.leave)
    posterior = recent[:, 1] * likely[:, 1] / (recent * likely).sum(-1)
    return Weights(own, posterior, seen / expected), {
        "regimes": regimes_after,
        "recent": recent_after,
        "mix": seen_after,
    }


def combine(alone: Alone, weights: Weights) -> Tensor:
    """The answer [n, classes]: probabilities."""
    own, recent = weights.own[:, None], weights.recent[:, None]
    answer = own * alone.of_own + (1 - own) * alone.of_everybody
    shifted = answer * weights.ratio
    return (1 - recent) * answer + recent * shifted / shifted.sum(-1, keepdim=True)


def fit_temperature(logits: Tensor, labels: Tensor, real: Tensor) -> Tensor:
    """The temperature [] that gives rows [n] the highest likelihood, on a grid from 0.3 to 6; 1 if there is no row.

    `real` is False for padding.
    """
    grid = torch.logspace(-0.5229, 0.7782, 40, dtype=logits.dtype, device=logits.device)
    log_p = (logits / grid[:, None, None]).log_softmax(-1)  # [40, n, classes]
    of_label = log_p.gather(-1, labels.clamp(min=0).expand(len(grid), -1)[..., None])[..., 0]
    best = grid[(of_label * real).sum(-1).argmax()]
    return torch.where(real.any(), best, torch.ones_like(best))


def _take_all(
    global_logits: object,
    local_logits: object,
    class_counts: object,
    federation_counts: object,
    state: object,
    regimes: int,
) -> dict[str, Tensor]:
    who = "regime_ensemble"
    given = {
        name: take(who, name, value)
        for name, value in (("global_logits", global_logits), ("local_logits", local_logits))
    }
    given["class_counts"] = take(who, "class_counts", _count(class_counts, given["global_logits"]))
    if federation_counts is not None:
        given["federation_counts"] = take(who, "federation_counts", _count(federation_counts, given["global_logits"]))
    if state is not None:
        if not isinstance(state, dict) or state.keys() != set(STATE):
            raise InputError(
                f"state must be the .state of the call before, with {', '.join(STATE)}; None begins a stream."
            )
        given |= {name: take(who, f"state[{name!r}]", state[name]) for name in STATE}
    n, classes = given["global_logits"].shape if given["global_logits"].ndim == 2 else (0, 0)
    wanted = {"global_logits": (n, classes), "local_logits": (n, classes), "regimes": (regimes,), "recent": (2,)}
    if not (n and classes and all(value.shape == wanted.get(name, (classes,)) for name, value in given.items())):
        raise InputError(
            "regime_ensemble needs two logits [n, classes], counts [classes] and a state of None or of a call "
            f"with the same classes and regimes, none of them empty, but got {show_shapes(given)}."
        )
    check_alike(who, given, wide=(*COUNTS, *STATE))
    for name in COUNTS:
        if name in given and given[name].min() < 0:
            raise InputError(f"regime_ensemble needs {name} that are not negative.")
    if any(given[name].min() < 0 or abs(float(given[name].sum()) - 1) > 1e-6 for name in STATE if name in given):
        raise InputError("regime_ensemble needs a state of probabilities, as a call returned it.")
    return given


def _count(counts: object, like: Tensor) -> object:
    """Whole numbers as float64, on the device of the logits if they were an array."""
    if isinstance(counts, np.ndarray) and counts.dtype.kind in "iu":
        return torch.from_numpy(counts.astype(np.float64)).to(like.device)
    if isinstance(counts, Tensor) and not (
        counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool
    ):
        return counts.double()
    return counts
