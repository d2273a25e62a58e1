"""LP-FT at test time, without labels (row (2) of the ablation of https://arxiv.org/abs/2205.10920, after Kumar et al.,
ICLR 2022, https://arxiv.org/abs/2202.10054): before MEMO tunes everything, tune the head alone by the same loss."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from .base import Answers, Method, Predictor, Samples, Tree
from .memo import Logits, Memo


@dataclass(frozen=True)
class LPFT(Predictor):
    window = None
    then: Memo = field(default_factory=Memo)
    probe_steps: int = 3  # the paper names neither this nor the rate: as many and as long as those of MEMO
    probe_lr: float = 0.0005

    def __post_init__(self) -> None:
        replace(self.then, steps=self.probe_steps, lr=self.probe_lr)  # refuses what cannot be tuned with

    def answer(self, method: Method, mine: Tree, state: Tree, samples: Samples) -> tuple[Answers, Tree]:
        return Answers(samples.each(self.probed, method, mine, samples.x)), state

    def probed(self, method: Method, mine: Tree, views: Tensor, x: Tensor) -> Tensor:
        probed = self.probe(method.logits, mine, views[: self.probe_steps])
        return self.then.tuned(method, probed, views[self.probe_steps :], x)

    def probe(self, logits: Logits, mine: Tree, views: Tensor) -> Tree:
        """Tune all but the body on views [steps, views, c, h, w]."""
        heads = {name: part for name, part in mine.items() if name != "body"}
        probe = replace(self.then, lr=self.probe_lr)
        return mine | probe.tune(lambda heads, x: logits(mine | heads, x), heads, views)

    @property
    def augments(self) -> tuple[int, int]:
        return self.probe_steps + self.then.steps, self.then.views

    @property
    def passes(self) -> tuple[int, int]:
        forward, backward = self.then.passes
        return forward + self.probe_steps * self.then.views, backward  # probing goes back through the head only
