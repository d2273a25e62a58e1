"""What FedTHE sees of every stream: its features, and the logits of its two heads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import InputError
from ...experiment.training import Deployed
from ...methods.base import Answers, Method, Predictor, Samples
from ...methods.fedthe import HeadEnsemble
from ...methods.head_ensemble import mix, smooth
from ...methods.two_heads import heads
from ...tree import Tree
from ...types import Shard
from .base import answer


@dataclass(frozen=True)
class Watched(Predictor):
    """A head ensemble that also returns the features and the logits of both heads."""

    ensemble: HeadEnsemble = HeadEnsemble()

    def start(self, method: Method, mine: Tree, shard: Shard) -> Tree:
        return self.ensemble.start(method, mine, shard)

    def answer(self, method: Method, mine: Tree, state: Tree, samples: Samples) -> tuple[Answers, Tree]:
        answers, after = replace(self.ensemble, then=None).answer(method, mine, state, samples)
        h, of_global, of_personal = heads(method.net, mine, samples.x)
        seen = {"h": h, "of_global": of_global, "of_personal": of_personal}
        return Answers(answers.logits, answers.info | seen), after

    @property
    def window(self) -> int | None:
        return self.ensemble.window


class Seen(NamedTuple):
    """One client's stream under one test as FedTHE sees it, on the device, and FedTHE's accuracy in percent."""

    test: str
    client: int
    accuracy: float
    labels: Tensor  # int64 [n]
    h: Tensor  # [n, d]
    of_global: Tensor  # [n, classes]
    of_personal: Tensor  # [n, classes]
    descriptor: Tensor  # [d]
    own_descriptor: Tensor  # [d]

    def smooth(self, alpha: float, beta: float) -> Tensor:
        """h', which is h moved towards the history."""
        return smooth(self.h, None, alpha, beta)[0]

    def rate_fixed(self, e: float) -> float:
        """The accuracy in percent with a fixed e, the weight of the global head."""
        logits = mix(self.of_global.new_full((len(self.labels),), e), self.of_global, self.of_personal)
        return percent(logits.argmax(-1) == self.labels)


def watch(deployed: Deployed, samples: int | None) -> list[Seen]:
    """One forward pass over every stream, from which any ensemble of the two heads can be computed."""
    states, watching = deployed.states, replace(deployed.method, predictor=Watched(ensemble_of(deployed)))
    seen = []
    for test, k, labels, scores in answer(replace(deployed, method=watching), samples):
        arrays = (labels, *(scores.info[name] for name in ("h", "of_global", "of_personal")))
        tensors = [torch.from_numpy(array).to(deployed.engine.device) for array in arrays]
        tensors += [states["descriptor"][k], states["own_descriptor"][k]]
        seen.append(Seen(test, k, 100 * scores.accuracy, *tensors))
    return seen


def ensemble_of(deployed: Deployed) -> HeadEnsemble:
    ensemble = deployed.method.predictor
    if not isinstance(ensemble, HeadEnsemble) or ensemble.batch > 1 or not ensemble.history:
        raise InputError(
            f"{deployed.name} must weight its heads sample by sample, with a history; leave out its hyper."
        )
    return ensemble


def percent(right: Tensor) -> float:
    return 100 * float(right.double().mean())
