"""A look inside deployed clients: their answers, and the features and logits that FedTHE's answers come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...engine.evaluate import Scores, score
from ...engine.visit import Question
from ...errors import InputError
from ...experiment.training import Deployed
from ...methods.base import Answers, Method, Predictor, Samples
from ...methods.fedthe import HeadEnsemble
from ...methods.head_ensemble import find_weight, measure_gap, mix, smooth
from ...methods.two_heads import heads
from ...tree import Tree
from ...types import Shard
from .base import Found


def answer(deployed: Deployed, samples: int | None) -> list[tuple[str, int, np.ndarray, Scores]]:
    """Test, client, labels int64 [n] and scores of every stream, or of its first samples; as in a run."""
    asked = [
        (test, k, labels[:samples], Question(k, images[:samples], (deployed.seed, test, k)))
        for test, k, images, labels in deployed.streams()
    ]
    shards = [deployed.run.shards[k] for k in range(len(deployed.run.shards))]
    questions = [question for *_, question in asked]
    answers = deployed.engine.answer(deployed.method, deployed.states, shards, questions)
    return [
        (test, k, labels, score(said, labels, question.path))
        for (test, k, labels, question), said in zip(asked, answers, strict=True)
    ]


def rate(deployed: Deployed, samples: int | None) -> list[Found]:
    """The accuracy in percent on every stream, or on its first samples."""
    return [(test, deployed.seed, 100 * scores.accuracy) for test, _, _, scores in answer(deployed, samples)]


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
        """h', which is h drawn towards the history."""
        return smooth(self.h, None, alpha, beta)[0]

    def rate_fixed(self, e: float) -> float:
        """The accuracy in percent with a fixed e, the weight of the global head."""
        logits = mix(self.of_global.new_full((len(self.labels),), e), self.of_global, self.of_personal)
        return _percent(logits.argmax(-1) == self.labels)


def watch(deployed: Deployed, samples: int | None) -> list[Seen]:
    """One forward pass over every stream, from which any ensemble of the two heads can be tried."""
    states, watching = deployed.states, replace(deployed.method, predictor=Watched(ensemble_of(deployed)))

    def load(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(deployed.engine.device)

    return [
        Seen(
            test,
            k,
            100 * scores.accuracy,
            load(labels),
            load(scores.info["h"]),
            load(scores.info["of_global"]),
            load(scores.info["of_personal"]),
            states["descriptor"][k],
            states["own_descriptor"][k],
        )
        for test, k, labels, scores in answer(replace(deployed, method=watching), samples)
    ]


def ensemble_of(deployed: Deployed) -> HeadEnsemble:
    ensemble = deployed.method.predictor
    if not isinstance(ensemble, HeadEnsemble) or ensemble.batch > 1 or not ensemble.history:
        raise InputError(f"{deployed.name} must weigh heads sample by sample, with a history; leave its hyper out.")
    return ensemble


def try_pair(seen: Sequence[Seen], ensemble: HeadEnsemble, alpha: float, beta: float) -> list[float]:
    """FedTHE's accuracy in percent on every stream. Only the history needs one stream at a time."""
    gap = torch.cat([measure_gap(each.smooth(alpha, beta), each.descriptor, each.own_descriptor) for each in seen])
    of_global = torch.cat([each.of_global for each in seen])
    of_personal = torch.cat([each.of_personal for each in seen])
    e = find_weight(of_global, of_personal, gap, ensemble.search, ensemble.weighting)
    right = mix(e, of_global, of_personal).argmax(-1) == torch.cat([each.labels for each in seen])
    return [_percent(part) for part in right.split([len(each.labels) for each in seen])]


def _percent(right: Tensor) -> float:
    return 100 * float(right.double().mean())
