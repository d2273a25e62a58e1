"""FedTHE and FedTHE+ (ICLR 2023, https://arxiv.org/abs/2205.10920): at test time, a weight between the global and the
personal head for every sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

import torch
from torch import Tensor

from ..errors import InputError
from .base import Answers, Method, Predictor, Samples, Shard, Tree
from .head_ensemble import Search, Weighting, describe_heads, find_weight, measure_gap, mix, smooth
from .memo import Memo
from .two_heads import heads


@dataclass(frozen=True)
class HeadEnsemble(Predictor):
    """Algorithm 2. `then=Memo(...)` makes it FedTHE+; the other settings are the paper's ablations."""

    needs: ClassVar[tuple[str, ...]] = ("personal", "descriptor", "own_descriptor")
    alpha: float = 0.1  # how fast the history of features moves towards the newest sample
    beta: float = 0.1  # the share of a sample's own feature in the smoothed one (a footnote corrects the paper's 0.3)
    search: Search = Search()
    weighting: Weighting = "slw"  # of entropy and distance: by similarity, or an ablation: fa, em, half
    history: bool = True  # features are smoothed over the stream
    batch: int = 1  # samples that share one e; more than 1 is the paper's batch-wise variant
    then: Memo | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.alpha <= 1 and 0 <= self.beta <= 1 and self.batch >= 1):
            raise InputError(
                f"alpha and beta must be from 0 to 1 and batch at least 1, "
                f"but they are {self.alpha}, {self.beta} and {self.batch}."
            )
        if self.weighting not in get_args(Weighting):
            raise InputError(f"weighting must be one of {', '.join(get_args(Weighting))}, not {self.weighting!r}.")

    def start(self, method: Method, mine: Tree, shard: Shard) -> Tree:
        nothing = torch.full_like(mine["descriptor"], float("nan"), dtype=torch.float64)  # no sample seen yet
        return {"history": nothing} if self.history else {}

    def answer(self, method: Method, mine: Tree, state: Tree, samples: Samples) -> tuple[Answers, Tree]:
        with torch.no_grad():
            h, of_global, of_personal = heads(method.net, mine, samples.x)
            smoothed, after = self._smooth(h, state)
            gap = measure_gap(smoothed, mine["descriptor"], mine["own_descriptor"])
            e = self._weigh(of_global, of_personal, gap)
            logits = mix(e, of_global, of_personal)
        if self.then is not None and self.then.steps:
            logits = samples.each(self.tuned, method, mine, samples.x, e)
        return Answers(logits, describe_heads(e, logits, of_global, of_personal)), after

    def tuned(self, method: Method, mine: Tree, views: Tensor, x: Tensor, e: Tensor) -> Tensor:
        """The answer to one sample after the extractor and both heads were tuned on its views, with its e fixed."""

        def logits(params: Tree, x: Tensor) -> Tensor:
            return mix(e, *heads(method.net, params, x)[1:])

        assert self.then is not None
        with torch.no_grad():
            return logits(self.then.tune(logits, mine, views), x)

    def _weigh(self, of_global: Tensor, of_personal: Tensor, gap: Tensor) -> Tensor:
        return find_weight(of_global, of_personal, gap, self.search, self.weighting, together=self.batch > 1)

    def _smooth(self, h: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        if not self.history:
            return h, state
        before = torch.where(state["history"].isnan(), h[0], state["history"])
        smoothed, last = smooth(h, before, self.alpha, self.beta)
        return smoothed, {"history": last}

    @property
    def window(self) -> int | None:
        return None if self.batch == 1 else self.batch

    @property
    def augments(self) -> tuple[int, int]:
        return (0, 0) if self.then is None else self.then.augments

    @property
    def passes(self) -> tuple[int, int]:
        if self.then is None:
            return 1, 0
        forward, backward = self.then.passes
        return forward + 1, backward
