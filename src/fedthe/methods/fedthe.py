"""FedTHE and FedTHE+ (ICLR 2023, https://arxiv.org/abs/2205.10920): a shared extractor and global head, a personal head
on each client, and at test time a weight between the two for every sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from ..errors import InputError
from ..tree import Tree
from ..types import Batch, Shard, scale
from .base import Answers, Fit, Method, Predictor, Views, each_sample
from .finetune import BalancedFedAvg
from .head_ensemble import Search, Weighting, describe_heads, find_weight, measure_gap, mix, smooth
from .losses import balanced_softmax, cross_entropy
from .memo import Memo


@dataclass(frozen=True)
class TwoHeads(Method):
    """Trains both heads. With the plain predictor it answers by their mean (the paper's "pure two-head model")."""

    balanced: bool = True  # balanced softmax for the extractor and the global head
    balanced_personal: bool = False

    def init(self, params: Tree) -> tuple[Tree, Tree]:
        zero = params["head"]["out"].new_zeros(self.net.feature_dim)
        shared = params | {"descriptor": zero}
        return shared, shared | {"personal": params["head"], "own_descriptor": zero}

    def personalize(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Tree:
        personal = fit(self.personal_loss, mine["personal"], shard, {"body": shared["body"]})
        own = mean_feature(self, shared["body"], shard)
        return shared | {"personal": personal, "own_descriptor": own}

    def local(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Tree:
        trained = fit(self.loss, {"body": shared["body"], "head": shared["head"]}, shard)
        return trained | {"descriptor": mine["own_descriptor"]}

    def loss(self, params: Tree, given: Tree, batch: Batch) -> Tensor:
        return self._loss(self.net.logits(params, batch.x), batch, self.balanced)

    def personal_loss(self, params: Tree, given: Tree, batch: Batch) -> Tensor:
        logits = self.net.head(params, self.net.features(given["body"], batch.x))
        return self._loss(logits, batch, self.balanced_personal)

    def _loss(self, logits: Tensor, batch: Batch, balanced: bool) -> Tensor:
        return balanced_softmax(logits, batch.y, batch.counts) if balanced else cross_entropy(logits, batch.y)

    def trains_as(self) -> Method:
        return TwoHeads(self.net, balanced=self.balanced, balanced_personal=self.balanced_personal)

    def sends_as(self) -> Method:
        return BalancedFedAvg(self.net) if self.balanced else Method(self.net)

    def heads(self, mine: Tree, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The features [n, d] of x, and the logits [n, classes] of the global and of the personal head."""
        h = self.net.features(mine["body"], x)
        return h, self.net.head(mine["head"], h), self.net.head(mine["personal"], h)

    def logits(self, mine: Tree, x: Tensor) -> Tensor:
        _, of_global, of_personal = self.heads(mine, x)
        return (of_global + of_personal) / 2


def mean_feature(method: Method, body: Tree, shard: Shard, chunk: int = 500) -> Tensor:
    """The descriptor: the mean feature [d] of the client's own training rows, as they are, unaugmented."""
    total = shard.counts.new_zeros(method.net.feature_dim)
    with torch.no_grad():
        for x, real in zip(shard.images.split(chunk), shard.real.split(chunk), strict=True):
            total = total + (method.net.features(body, scale(x)) * real[:, None]).sum(0)
    return total / shard.real.sum().clamp(min=1)


@dataclass(frozen=True)
class TunedEnsemble:
    """The answer to one sample after the extractor and both heads were tuned on its views, with its e fixed."""

    method: Method
    memo: Memo

    def __call__(self, mine: Tree, seen: Tensor, x: Tensor, e: Tensor) -> Tensor:
        def logits(params: Tree, x: Tensor) -> Tensor:
            return mix(e, *self.method.heads(params, x)[1:])  # type: ignore[attr-defined]

        return self.memo.answer(logits, mine, x, seen)


@dataclass(frozen=True)
class HeadEnsemble(Predictor):
    """Algorithm 2. `then=Memo(...)` makes it FedTHE+; the other settings are the paper's ablations."""

    alpha: float = 0.1
    beta: float = 0.1  # the paper's footnote corrects the 0.3 that its appendix still prints
    search: Search = Search()
    weighting: Weighting = "slw"
    history: bool = True
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

    def step(self, method: Method, mine: Tree, state: Tree, x: Tensor, views: Tensor | None) -> tuple[Answers, Tree]:
        return self.stream(method, mine, state, x, None if views is None else lambda _: views[None])

    def stream(self, method: Method, mine: Tree, state: Tree, x: Tensor, views: Views | None) -> tuple[Answers, Tree]:
        with torch.no_grad():
            h, of_global, of_personal = method.heads(mine, x)  # type: ignore[attr-defined]
            smoothed, after = self._smooth(h, state)
            gap = measure_gap(smoothed, mine["descriptor"], mine["own_descriptor"])
            e = self._find_weights(of_global, of_personal, gap)
            logits = mix(e, of_global, of_personal)
        if self.then is not None and self.then.steps and views is not None:
            logits = each_sample(TunedEnsemble(method, self.then), mine, views, x, e)
        return Answers(logits, describe_heads(e, of_global, of_personal)), after

    def _smooth(self, h: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        if not self.history:
            return h, state
        before = torch.where(state["history"].isnan(), h[0], state["history"])
        smoothed, last = smooth(h, before, self.alpha, self.beta)
        return smoothed, {"history": last}

    def _find_weights(self, of_global: Tensor, of_personal: Tensor, gap: Tensor) -> Tensor:
        if self.batch == 1:
            return find_weight(of_global, of_personal, gap, self.search, self.weighting)
        parts = zip(of_global.split(self.batch), of_personal.split(self.batch), gap.split(self.batch), strict=True)
        return torch.cat([find_weight(g, p, d, self.search, self.weighting, together=True) for g, p, d in parts])

    @property
    def looks_back(self) -> bool:
        return self.batch == 1

    @property
    def augments(self) -> tuple[int, int]:
        return (0, 0) if self.then is None else self.then.augments

    @property
    def passes(self) -> tuple[int, int]:
        if self.then is None:
            return 1, 0
        forward, backward = self.then.passes
        return forward + 1, backward


@dataclass(frozen=True)
class FedTHE(TwoHeads):
    predictor: Predictor = HeadEnsemble()


@dataclass(frozen=True)
class FedTHEPlus(TwoHeads):
    predictor: Predictor = HeadEnsemble(then=Memo(views=16))
