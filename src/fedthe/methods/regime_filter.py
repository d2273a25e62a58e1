"""The regime filter on the two heads of FedTHE (https://arxiv.org/abs/2205.10920): for every sample, the probability
that it is from the client's own mix of classes, by Bayes' rule instead of a search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..types import scale
from . import regime
from .base import Answers, Method, Predictor, Samples, Shard, Tree
from .head_ensemble import describe_heads
from .label_shift import smooth_prior
from .memo import Memo
from .regime import Regimes
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

    def start(self, method: Method, mine: Tree, shard: Shard) -> Tree:
        mix = smooth_prior(shard.counts, self.regimes.smooth)
        return {"temperatures": self._calibrate(method, mine, shard), "own": mix, **regime.begin(mix, self.regimes)}

    def answer(self, method: Method, mine: Tree, state: Tree, samples: Samples) -> tuple[Answers, Tree]:
        with torch.no_grad():
            of_global, of_personal = self._look(method, mine, samples.x)
            alone = self._answer_alone(of_global, of_personal, state)
            weights, after = regime.follow(alone, state["own"], state, self.regimes)
            logits = to_logits(regime.combine(alone, weights), of_global)
        if isinstance(self.then, Memo) and self.then.steps:
            columns = (samples.x, *weights, state["temperatures"].expand(len(logits), -1))
            logits = samples.each(self.tuned, method, mine, *columns, state["own"].expand(len(logits), -1))
        info = describe_heads(1 - weights.own, logits, of_global, of_personal)
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
    ) -> Tensor:
        """The answer to one sample after all weights of the network were tuned on its views."""
        state = {"temperatures": temperatures[0], "own": mix[0]}

        def logits(params: Tree, x: Tensor) -> Tensor:
            of_global, of_personal = heads(method.net, params, x)[1:]
            alone = self._answer_alone(of_global, of_personal, state)
            return to_logits(regime.combine(alone, regime.Weights(own, recent, ratio)), of_global)

        assert isinstance(self.then, Memo)
        with torch.no_grad():
            return logits(self.then.tune(logits, mine, views), x)

    def _look(self, method: Method, mine: Tree, x: Tensor) -> tuple[Tensor, ...]:
        """The logits of the global and of the personal head."""

        def look(x: Tensor) -> tuple[Tensor, ...]:
            return heads(method.net, mine, x)[1:]

        return self.then.average(look, x) if isinstance(self.then, Views) else look(x)

    def _answer_alone(self, of_global: Tensor, of_personal: Tensor, state: Tree) -> regime.Alone:
        both = torch.stack([of_global, of_personal]).double() / state["temperatures"][:, None, None]
        return regime.answer_alone(both[0], both[1], state["own"], self.regimes)

    def _calibrate(self, method: Method, mine: Tree, shard: Shard, chunk: int = 500) -> Tensor:
        """The temperatures of the global and of the personal head, float64 [2]."""
        if not self.calibrate or not len(shard.val_x):
            return torch.ones_like(shard.counts[:2], dtype=torch.float64)
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


def to_logits(probabilities: Tensor, like: Tensor) -> Tensor:
    return probabilities.clamp(min=torch.finfo(like.dtype).tiny).log().to(like.dtype)
