"""Inside FedTHE: its features, its two heads and their weights, and both heads or whole models mixed by a fixed e."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ... import tree
from ...config import Config
from ...data.pool import Dataset
from ...errors import InputError
from ...experiment.training import Deployed, deploy_all
from ...methods.base import Answers, Method, Predictor, Samples
from ...methods.fedthe import HeadEnsemble
from ...methods.head_ensemble import find_weight, measure_gap, mix, smooth
from ...methods.two_heads import heads
from ...progress.events import track
from ...tree import Tree
from ...types import Shard
from .. import draw
from .base import PAPER, Figure, Found, answer, average, rate

GRID = (0.01, 0.05, 0.1, 0.3, 0.5, 1.0)  # of alpha and of beta
WEIGHTS = tuple(i / 20 for i in range(21))  # fixed e
BINS = 40  # of the weights, from 0 to 1
FEW_CLIENTS, FEW_SAMPLES = 4, 40  # clients in the figure of features, and samples of each of their streams


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
        return _percent(logits.argmax(-1) == self.labels)


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


def measure_pairs(config: Config, dataset: Dataset) -> dict[str, Any]:
    """Accuracy in percent by alpha and beta, on the same features and logits."""
    found: list[Found] = []
    for deployed in deploy_all(config, dataset):
        seen, ensemble = watch(deployed, config.samples), ensemble_of(deployed)
        pairs = track("alpha and beta", [(alpha, beta) for alpha in GRID for beta in GRID])
        rates = np.array([try_pair(seen, ensemble, alpha, beta) for alpha, beta in pairs])  # [pairs, streams]
        tables = rates.T.reshape(-1, len(GRID), len(GRID))
        found += [(each.test, deployed.seed, table) for each, table in zip(seen, tables, strict=True)]
    return {"alpha": GRID, "beta": GRID, "accuracy": average(found)}  # accuracy[test]["mean"][alpha][beta]


def measure_heads(config: Config, dataset: Dataset) -> dict[str, Any]:
    """Accuracy in percent with the logits of the two heads mixed by a fixed e, and FedTHE's, which finds e itself."""
    fixed: list[Found] = []
    ours: list[Found] = []
    for deployed in deploy_all(config, dataset):
        for each in watch(deployed, config.samples):
            fixed.append((each.test, deployed.seed, np.array([each.rate_fixed(e) for e in WEIGHTS])))
            ours.append((each.test, deployed.seed, each.accuracy))
    return _sum_up(fixed, ours)


def measure_models(config: Config, dataset: Dataset) -> dict[str, Any]:
    """The same with parameters mixed: FedAvg's, and those that each client fine-tuned from them."""
    received: dict[int, Tree] = {}
    fixed: list[Found] = []
    ours: list[Found] = []
    for deployed in deploy_all(config, dataset):
        if deployed.name == "fedavg":
            received[deployed.seed] = deployed.states
        elif deployed.name == "fedavg_ft":
            shared = received.pop(deployed.seed)
            rates = [rate(_mix_models(deployed, shared, e), config.samples) for e in track("interpolating", WEIGHTS)]
            for stream in zip(*rates, strict=True):  # the same stream at every e
                test, seed, _ = stream[0]
                fixed.append((test, seed, np.array([value for *_, value in stream])))
        else:
            ours += rate(deployed, config.samples)
    return _sum_up(fixed, ours)


def _mix_models(personal: Deployed, shared: Tree, e: float) -> Deployed:
    mixed = tree.map_leaves(lambda of_global, own: e * of_global + (1 - e) * own, shared, personal.states)
    return replace(personal, states=mixed)


def _sum_up(fixed: list[Found], ours: list[Found]) -> dict[str, Any]:
    best = [(test, seed, rates.max()) for test, seed, rates in fixed]  # each client's own e, chosen by its test labels
    return {"e": WEIGHTS, "shared": average(fixed), "best": average(best), "fedthe": average(ours)}


def measure_weights(config: Config, dataset: Dataset) -> dict[str, Any]:
    """A histogram of 1 - e over all samples, by method and test."""
    weights: dict[str, dict[str, list[np.ndarray]]] = {}
    for deployed in deploy_all(config, dataset):
        for test, _, _, scores in answer(deployed, config.samples):
            own = 1 - scores.info["e"].astype(np.float64)
            weights.setdefault(deployed.name, {}).setdefault(test, []).append(own)
    histograms = {
        method: {test: _count(np.concatenate(parts)) for test, parts in tests.items()}
        for method, tests in weights.items()
    }
    return {"edges": np.linspace(0, 1, BINS + 1).tolist(), "weights": histograms}


def _count(values: np.ndarray) -> dict[str, Any]:
    density, _ = np.histogram(values, BINS, (0, 1), density=True)
    return {"density": density.tolist(), "mean": float(values.mean()), "samples": len(values)}


def measure_features(config: Config, dataset: Dataset) -> dict[str, Any]:
    """The features h of some samples, and h', moved towards the history, for a few clients of the first seed."""
    (deployed,) = deploy_all(replace(config, seeds=config.seeds[:1]), dataset)
    streams, ensemble = deployed.federation.tests, ensemble_of(deployed)
    whole = [k for k in range(config.clients) if all(streams[test][k] is not None for test in deployed.tests)]
    clients = (whole or list(range(config.clients)))[:FEW_CLIENTS]
    found: dict[str, list[Any]] = {"test": [], "client": [], "without": [], "with": []}
    for each in watch(deployed, config.samples):
        if each.client in clients:
            # spread over the stream, since the history covers all samples before, shown or not
            picked = np.unique(np.linspace(0, len(each.labels) - 1, FEW_SAMPLES).round().astype(int))
            found["test"] += [each.test] * len(picked)
            found["client"] += [each.client] * len(picked)
            found["without"] += _list_features(each.h, picked)
            found["with"] += _list_features(each.smooth(ensemble.alpha, ensemble.beta), picked)
    return {"seed": deployed.seed, **found}


def _list_features(h: Tensor, picked: np.ndarray) -> list[list[float]]:
    rounded: list[list[float]] = h.cpu().numpy()[picked].astype(np.float64).round(2).tolist()
    return rounded


ONLY_FEDTHE = PAPER | {"methods": ["fedthe"]}
MODELS = PAPER | {"methods": ["fedavg", "fedavg_ft", "fedthe"]}
WITHOUT_HISTORY = PAPER | {"methods": ["fedthe", "ablation_11"]}
FIGURES = {
    "alpha-beta": Figure("FedTHE's accuracy by alpha and beta", ONLY_FEDTHE, measure_pairs, draw.draw_alpha_beta),
    "interpolation-heads": Figure(
        "Global and personal head mixed by a fixed e", ONLY_FEDTHE, measure_heads, draw.draw_interpolation
    ),
    "interpolation-models": Figure(
        "Global and fine-tuned model mixed by a fixed e", MODELS, measure_models, draw.draw_interpolation
    ),
    "weights": Figure("Weight of the personal head, 1 - e", WITHOUT_HISTORY, measure_weights, draw.draw_weights),
    "features": Figure("Features, with and without history", ONLY_FEDTHE, measure_features, draw.draw_features),
}
