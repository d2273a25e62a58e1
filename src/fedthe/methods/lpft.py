"""LP-FT at test time, without labels (row (2) of the ablation of https://arxiv.org/abs/2205.10920, after Kumar et al.,
ICLR 2022, https://arxiv.org/abs/2202.10054): before MEMO tunes everything, tune the head alone by the same loss."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from ..tree import Tree
from .base import Answers, Method, Predictor
from .memo import Logits, Memo


@dataclass(frozen=True)
class LPFT(Predictor):
    forgets: ClassVar[bool] = True
    then: Memo = field(default_factory=Memo)
    probe_steps: int = 3  # the paper names neither this nor the rate: as many and as long as those of MEMO
    probe_lr: float = 0.0005

    def __post_init__(self) -> None:
        replace(self.then, steps=self.probe_steps, lr=self.probe_lr)  # refuses what cannot be tuned with

    def step(self, method: Method, mine: Tree, state: Tree, x: Tensor, views: Tensor | None) -> tuple[Answers, Tree]:
        seen = x.new_empty(0) if views is None else views
        probed = self.probe(method.logits, mine, seen[: self.probe_steps])
        return Answers(self.then.answer(method.logits, probed, x, seen[self.probe_steps :])), state

    def probe(self, logits: Logits, mine: Tree, views: Tensor) -> Tree:
        """Tune all but the body on views [steps, views, c, h, w]."""
        body = {"body": mine["body"]}
        heads = {name: part for name, part in mine.items() if name != "body"}
        return replace(self.then, lr=self.probe_lr).tune(lambda heads, x: logits(heads | body, x), heads, views) | body

    @property
    def augments(self) -> tuple[int, int]:
        return self.probe_steps + self.then.steps, self.then.views

    @property
    def passes(self) -> tuple[int, int]:
        forward, backward = self.then.passes
        return forward + self.probe_steps * self.then.views, backward  # probing goes back through the head only
