"""The regime filter on the two heads of FedTHE (https://arxiv.org/abs/2205.10920): for every sample, the probability
that it is from the client's own mix of classes, by Bayes' rule instead of a search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import InputError
from ..types import scale
from . import regime
from .arrays import is_within
from .base import Answers, Method, Predictor, Samples, Shard, Tree
from .discriminant import discriminate, fit_discriminant, sum_moments
from .head_ensemble import describe_heads
from .label_shift import smooth_prior
from .memo import Memo
from .regime import Mixes, Regimes
from .two_heads import heads
from .views import Views


@dataclass(frozen=True)
class RegimeFilter(Predictor):
    """`then=Views()` averages the heads over views of an image; `then=Memo(...)` tunes all weights as FedTHE+ does."""

    needs: ClassVar[tuple[str, ...]] = ("personal",)
    window = None
    regimes: Regimes = Regimes()
    calibrate: bool = True  # fit the temperature of each head on the client's validation rows
    then: Views | Memo | None = None
    discriminant: float = 0.0  # the weight of a discriminant beside the global head, if clients had a class each
    federation: bool = False  # everybody's mix is that of all clients' rows, which they send once; else equal classes

    def __post_init__(self) -> None:
        if not is_within(self.discriminant, 0, 1):
            raise InputError(f"discriminant must be from 0 to 1, but it is {self.discriminant!r}.")

    def summarize(self, method: Method, shared: Tree, shard: Shard) -> Tree:
        if self.discriminant:
            return sum_moments(method.net, shared["body"], shard)
        return {"counts": shard.counts.double() / shard.counts.sum().clamp(min=1)} if self.federation else {}

    def conclude(self, method: Method, mean: Tree) -> Tree:
        concluded: Tree = {"everybody": smooth_prior(mean["counts"], self.regimes.smooth)} if self.federation else {}
        if self.discriminant:
            # the fewer classes a client has, the more harm averaging heads does
            share = self.discriminant * (1 - mean["effective"])
            concluded["discriminant"] = fit_discriminant(mean) | {"share": share}
        return concluded

    def start(self, method: Method, mine: Tree, shard: Shard) -> Tree:
        everybody = mine["everybody"] if self.federation else smooth_prior(torch.zeros_like(shard.counts), 1.0)
        mixes = Mixes.of(shard.counts, everybody, self.regimes)
        state = {"temperatures": self._calibrate(method, mine, shard), **mixes._asdict()}
        return state | regime.begin(mixes, self.regimes)

    def answer(self, method: Method, mine: Tree, state: Tree, samples: Samples) -> tuple[Answers, Tree]:
        with torch.no_grad():
            seen = self._look(method, mine, samples.x)
            alone = self._answer_alone(seen, mine, state)
            weights, after = regime.follow(alone, mixes_of(state), state, self.regimes)
            logits = to_logits(regime.combine(alone, weights), seen[0])
        if isinstance(self.then, Memo) and self.then.steps:
            same = (each.expand(len(logits), -1) for each in (state["temperatures"], *mixes_of(state)))
            logits = samples.each(self.tuned, method, mine, samples.x, *weights, *same)
        info = describe_heads(1 - weights.own, logits, seen[0], seen[1])
        return Answers(logits, info | {"recent": weights.recent.to(logits.dtype)}), {**state, **after}

    def tuned(
        self,
        method: Method,
        mine: Tree,
        views: Tensor,
        x: Tensor,
        own: Tensor,
        recent: Tensor,
        ratio: Tensor,
        temperatures: Tensor,
        mix: Tensor,
        everybody: Tensor,
    ) -> Tensor:
        """The answer to one sample after all weights of the network were tuned on its views."""
        state = {"temperatures": temperatures[0], "own": mix[0], "everybody": everybody[0]}

        def logits(params: Tree, x: Tensor) -> Tensor:
            seen = self._see(method, params, mine, x)
            alone = self._answer_alone(seen, mine, state)
            return to_logits(regime.combine(alone, regime.Weights(own, recent, ratio)), seen[0])

        assert isinstance(self.then, Memo)
        with torch.no_grad():
            return logits(self.then.tune(logits, mine, views), x)

    def _look(self, method: Method, mine: Tree, x: Tensor) -> tuple[Tensor, ...]:
        """What `_see` gives, or its mean over views."""

        def see(x: Tensor) -> tuple[Tensor, ...]:
            return self._see(method, mine, mine, x)

        return self.then.average(see, x) if isinstance(self.then, Views) else see(x)

    def _see(self, method: Method, params: Tree, mine: Tree, x: Tensor) -> tuple[Tensor, ...]:
        """The logits of the global and of the personal head, and of the discriminant, if there is one."""
        h, of_global, of_personal = heads(method.net, params, x)
        both = of_global, of_personal
        return (*both, discriminate(mine["discriminant"], h).to(h.dtype)) if self.discriminant else both

    def _answer_alone(self, seen: tuple[Tensor, ...], mine: Tree, state: Tree) -> regime.Alone:
        z = torch.stack(seen).double() / state["temperatures"][:, None, None]
        of_global = z[0]
        if self.discriminant:  # the geometric mean of two classifiers for equally frequent classes
            share = mine["discriminant"]["share"]
            of_global = (1 - share) * z[0].log_softmax(-1) + share * z[2].log_softmax(-1)
        return regime.answer_alone(of_global, z[1], mixes_of(state), self.regimes)

    def _calibrate(self, method: Method, mine: Tree, shard: Shard, chunk: int = 500) -> Tensor:
        """The temperatures of the global and of the personal head, and of the discriminant, float64."""
        count = 3 if self.discriminant else 2
        if not self.calibrate or not len(shard.val_x):
            return torch.ones_like(shard.counts[:1], dtype=torch.float64).expand(count)
        with torch.no_grad():
            seen = [self._look(method, mine, scale(x)) for x in shard.val_x.split(chunk)]
            of_heads = (torch.cat(parts).double() for parts in zip(*seen, strict=True))
            return torch.stack([regime.fit_temperature(z, shard.val_labels, shard.val_real) for z in of_heads])

    @property
    def pictures_only(self) -> bool:
        return self.then is not None

    @property
    def augments(self) -> tuple[int, int]:
        return self.then.augments if isinstance(self.then, Memo) else (0, 0)

    @property
    def passes(self) -> tuple[int, int]:
        if isinstance(self.then, Views):
            return self.then.count, 0
        forward, backward = self.then.passes if self.then else (0, 0)
        return forward + 1, backward


def mixes_of(state: Tree) -> Mixes:
    return Mixes(state["own"], state["everybody"])


def to_logits(probabilities: Tensor, like: Tensor) -> Tensor:
    return probabilities.clamp(min=torch.finfo(like.dtype).tiny).log().to(like.dtype)
