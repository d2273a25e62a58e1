"""The figures of the FedTHE paper, https://arxiv.org/abs/2205.10920: what each of them shows, as plain data.

Measuring and drawing are apart, for a machine that measures need not have what draws: `measure_figure` gives what JSON
can say, and `draw_figure` makes a picture of it, there or elsewhere, then or later.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import tree
from ..config import Config, make_config
from ..data import load_dataset
from ..data.pool import Dataset
from ..engine.evaluate import Scores, score
from ..engine.visit import Question
from ..errors import Failed, InputError
from ..experiment import Deployed, Results, deploy_all, get_engine, name_shift, pick_tests, run
from ..methods.base import Answers, Method, Predictor, Views
from ..methods.fedthe import HeadEnsemble
from ..methods.head_ensemble import find_weight, measure_gap, mix, smooth
from ..names import TEST_NAMES
from ..progress import track
from ..records import describe_environment
from ..text import clean, find_nearest
from ..tree import Tree
from ..types import Shard
from . import draw
from .leak import deploy_reshuffled
from .probing import compare_probing

POINTS = 10  # of a learning curve
OURS = ("fedthe", "fedthe_plus")
BASELINE = "fedavg_ft"  # what gains are over
GRID = (0.01, 0.05, 0.1, 0.3, 0.5, 1.0)  # of alpha and of beta
WEIGHTS = tuple(i / 20 for i in range(21))  # fixed e, to interpolate by
BINS = 40  # of a histogram from 0 to 1
FEW_CLIENTS, FEW_SAMPLES = 4, 40  # whose features are shown, and how many of each stream

Found = tuple[str, int, Any]  # a test, a seed, and what was found for one client: a number, or an array of them


@dataclass(frozen=True)
class Figure:
    title: str
    settings: Mapping[str, Any]  # of the experiment, as keys of a config; a caller changes some
    measure: Callable[[Config], dict[str, Any]]
    draw: Callable[[Mapping[str, Any], Path], None]  # what `measure_figure` gave, into a PNG
    fixed: bool = True  # its methods are what it is about, so a caller does not choose them


def find_figure(name: str) -> Figure:
    if name not in FIGURES:
        raise InputError(f"there is no figure {name!r}; {find_nearest(name, FIGURES)}")
    return FIGURES[name]


def plan_figure(name: str, **settings: Any) -> Config:
    """The experiment that a figure needs; settings change those of the paper."""
    figure = find_figure(name)
    config = make_config({**figure.settings, **settings})
    if figure.fixed and config.methods != tuple(figure.settings["methods"]):
        raise InputError(f"{name} is about {', '.join(figure.settings['methods'])}; leave methods out.")
    return config


def measure_figure(name: str, **settings: Any) -> dict[str, Any]:
    """All that a figure shows, as plain data; settings change those of the paper."""
    figure, config = find_figure(name), plan_figure(name, **settings)
    titles = name_tests(load_dataset(config.dataset, natural=config.natural, size=config.size))
    tests = pick_tests(config, titles)
    measured = {
        "id": name,
        "title": figure.title,
        "config": config.as_dict(),
        "tests": {test: titles[test] for test in tests},
        "environment": describe_environment(get_engine(config.engine, config.device, config.precision, config.threads)),
        "data": figure.measure(config),
    }
    plain: dict[str, Any] = json.loads(json.dumps(measured, allow_nan=False))  # the same before and after a file
    return plain


def draw_figure(measured: Mapping[str, Any], path: Path) -> None:
    """A PNG of what `measure_figure` gave."""
    find_figure(measured["id"]).draw(measured, path)


def name_tests(dataset: Dataset) -> dict[str, str]:
    """Every test distribution, and what it is called in front of people; a natural shift by the pool it is."""
    titles = dict(TEST_NAMES)
    shifts = {test: clean(name_shift(test, pool)) for test, pool in dataset.natural.items()}
    first = {test: titles.pop(test) for test in ("original", "corrupted")}
    return first | shifts | titles


def average(found: Iterable[Found]) -> dict[str, dict[str, Any]]:
    """By test: the mean over clients, and of that the mean and the standard deviation over seeds, if several."""
    cells: dict[str, dict[int, list[Any]]] = {}
    for test, seed, value in found:
        cells.setdefault(test, {}).setdefault(seed, []).append(value)
    means = {test: np.array([np.mean(clients, 0) for clients in seeds.values()]) for test, seeds in cells.items()}
    return {test: {"mean": each.mean(0).tolist(), "std": _deviate(each)} for test, each in means.items()}


def _deviate(seeds: np.ndarray) -> Any:
    """The standard deviation over seeds [seeds, ...]; None in its place where there is a single seed."""
    return (seeds.std(0) if len(seeds) > 1 else np.full(seeds.shape[1:], None)).tolist()


# learning curves


def measure_curves(config: Config) -> dict[str, Any]:
    """Percent right after more and more rounds, and how many of them ours need."""
    rounds = pick_rounds(config.rounds)
    results = _run_whole(replace(config, curve=tuple(rounds[:-1])))
    curves: dict[str, dict[str, dict[str, list[Any]]]] = {}
    for method, scores in results.scores().items():
        for test, last in scores.items():
            found = [*(results.curves[number][method][test] for number in rounds[:-1]), last]
            curves.setdefault(method, {})[test] = {
                kind: [each[i] for each in found] for i, kind in enumerate(("mean", "std"))
            }
    on_mixture = {method: tests["mixture"]["mean"] for method, tests in curves.items() if "mixture" in tests}
    return {"rounds": rounds, "curves": curves, "speed": compare_speed(rounds, on_mixture)}


def pick_rounds(last: int) -> list[int]:
    """When to look: at the end, and at times evenly spaced before it."""
    if last < 1:
        raise InputError(f"rounds must be at least 1 for a learning curve, but is {last}.")
    return sorted({-(-last * i // POINTS) for i in range(1, POINTS + 1)})


def compare_speed(rounds: Sequence[int], curves: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """By our method and baseline: the rounds until ours is as good as the baseline is at the end, and the ratio.

    A baseline that was as good before the end is counted from then. `first`: ours was when it was first looked at, so
    the rounds may be fewer and the ratio greater. Both are None where ours never is.
    """
    speed: dict[str, dict[str, Any]] = {}
    for ours in (method for method in OURS if method in curves):
        for baseline in (method for method in curves if method not in OURS):
            target = curves[baseline][-1]
            needs, other = reach(rounds, curves[ours], target), reach(rounds, curves[baseline], target)
            speed.setdefault(ours, {})[baseline] = {
                "accuracy": target,
                "rounds": needs,
                "baseline_rounds": other,
                "ratio": None if needs is None or other is None else other / needs,
                "first": needs == rounds[0],
            }
    return speed


def reach(rounds: Sequence[int], curve: Sequence[float], target: float) -> float | None:
    """When a curve, straight between the rounds that were measured, first is at the target; None: never."""
    if curve[0] >= target:
        return float(rounds[0])
    for i in range(1, len(rounds)):
        if curve[i] >= target:
            share = (target - curve[i - 1]) / (curve[i] - curve[i - 1])
            return rounds[i - 1] + share * (rounds[i] - rounds[i - 1])
    return None


def _run_whole(config: Config) -> Results:
    results = run(config)
    for which, why in results.failures.items():
        raise Failed(f"{which}: {why}")  # a mean over the other seeds would be another figure
    return results


# gains


def measure_gains(config: Config) -> dict[str, Any]:
    """Percent right of every method, and how much more than the baseline's on the same seed."""
    if BASELINE not in config.methods or len(config.methods) < 2:
        raise InputError(f"gains are over {BASELINE}; name it among the methods, and another.")
    rows = _run_whole(config).rows
    base = {(row.seed, row.test, row.client): row.accuracy for row in rows if row.method == BASELINE}
    accuracy: dict[str, Any] = {}
    gains: dict[str, Any] = {}
    for method in config.methods:
        mine = [row for row in rows if row.method == method]
        accuracy[method] = average((row.test, row.seed, row.accuracy) for row in mine)
        gains[method] = average(
            (row.test, row.seed, row.accuracy - base[row.seed, row.test, row.client]) for row in mine
        )
    del gains[BASELINE]
    return {"baseline": BASELINE, "accuracy": accuracy, "gains": gains}


# what deployed clients answer


class Asked(NamedTuple):
    """One client's stream under one test."""

    test: str
    client: int
    labels: np.ndarray  # int64 [n]
    question: Question


def list_questions(deployed: Deployed, samples: int | None) -> list[Asked]:
    """Every stream, or its first samples: those that a run asks."""
    return [
        Asked(test, k, labels[:samples], Question(k, images[:samples], (deployed.seed, test, k)))
        for test, k, images, labels in deployed.streams()
    ]


def answer(deployed: Deployed, asked: Sequence[Asked], method: Method, states: Tree) -> list[Scores]:
    """How clients do on streams, with a method and states [clients, ...] that need not be those deployed."""
    shards = [deployed.run.shards[k] for k in range(len(deployed.run.shards))]
    answers = deployed.engine.answer(method, states, shards, [each.question for each in asked])
    return [score(said, each.labels, each.question.path) for said, each in zip(answers, asked, strict=True)]


@dataclass(frozen=True)
class Watched(Predictor):
    """A head ensemble that also says what it answers from: the features, and the logits of both heads."""

    ensemble: HeadEnsemble = HeadEnsemble()

    def start(self, method: Method, mine: Tree, shard: Shard) -> Tree:
        return self.ensemble.start(method, mine, shard)

    def step(self, method: Method, mine: Tree, state: Tree, x: Tensor, views: Tensor | None) -> tuple[Answers, Tree]:
        return self.stream(method, mine, state, x, None)

    def stream(self, method: Method, mine: Tree, state: Tree, x: Tensor, views: Views | None) -> tuple[Answers, Tree]:
        answers, after = self.ensemble.stream(method, mine, state, x, views)
        h, of_global, of_personal = method.heads(mine, x)  # type: ignore[attr-defined]
        seen = {"h": h, "of_global": of_global, "of_personal": of_personal}
        return Answers(answers.logits, answers.info | seen), after

    @property
    def looks_back(self) -> bool:
        return self.ensemble.looks_back


class Seen(NamedTuple):
    """What FedTHE sees of one client's stream under one test, on the device, and how it does."""

    test: str
    client: int
    labels: Tensor  # int64 [n]
    h: Tensor  # [n, d]
    of_global: Tensor  # [n, classes]
    of_personal: Tensor  # [n, classes]
    descriptor: Tensor  # [d]
    own_descriptor: Tensor  # [d]
    accuracy: float  # percent


def watch(deployed: Deployed, samples: int | None) -> list[Seen]:
    """One forward pass over every stream, from which any ensemble of the two heads can be tried."""
    asked, states, device = list_questions(deployed, samples), deployed.states, deployed.engine.device
    watched = replace(deployed.method, predictor=Watched(_ensemble_of(deployed)))

    def look(each: Asked, scores: Scores) -> Seen:
        h, of_global, of_personal = (
            torch.from_numpy(scores.info[name]).to(device) for name in ("h", "of_global", "of_personal")
        )
        return Seen(
            each.test,
            each.client,
            torch.from_numpy(each.labels).to(device),
            h,
            of_global,
            of_personal,
            states["descriptor"][each.client],
            states["own_descriptor"][each.client],
            100 * scores.accuracy,
        )

    answers = answer(deployed, asked, watched, states)
    return [look(each, scores) for each, scores in zip(asked, answers, strict=True)]


def _ensemble_of(deployed: Deployed) -> HeadEnsemble:
    ensemble = deployed.method.predictor
    if not isinstance(ensemble, HeadEnsemble) or ensemble.batch > 1 or not ensemble.history:
        raise InputError(f"{deployed.name} must weigh heads sample by sample, with a history; leave its hyper out.")
    return ensemble


def _percent(right: Tensor) -> float:
    return 100 * float(right.double().mean())


# alpha and beta


def measure_alpha_beta(config: Config) -> dict[str, Any]:
    """FedTHE's percent right by alpha and beta. All pairs are tried on the same features and logits."""
    found: list[Found] = []
    for deployed in deploy_all(config):
        seen, ensemble = watch(deployed, config.samples), _ensemble_of(deployed)
        pairs = track("alpha and beta", [(alpha, beta) for alpha in GRID for beta in GRID])
        rates = np.array([try_pair(seen, ensemble, alpha, beta) for alpha, beta in pairs])  # [pairs, streams]
        tables = rates.T.reshape(-1, len(GRID), len(GRID))
        found += [(each.test, deployed.seed, table) for each, table in zip(seen, tables, strict=True)]
    return {"alpha": GRID, "beta": GRID, "accuracy": average(found)}  # accuracy[test]["mean"][alpha][beta]


def try_pair(seen: Sequence[Seen], ensemble: HeadEnsemble, alpha: float, beta: float) -> list[float]:
    """The percent right on every stream. Only the history ties samples together; the rest is done for all at once."""
    smoothed = (smooth(each.h, None, alpha, beta)[0] for each in seen)
    gap = torch.cat(
        [measure_gap(h, each.descriptor, each.own_descriptor) for h, each in zip(smoothed, seen, strict=True)]
    )
    of_global = torch.cat([each.of_global for each in seen])
    of_personal = torch.cat([each.of_personal for each in seen])
    e = find_weight(of_global, of_personal, gap, ensemble.search, ensemble.weighting)
    right = mix(e, of_global, of_personal).argmax(-1) == torch.cat([each.labels for each in seen])
    return [_percent(part) for part in right.split([len(each.labels) for each in seen])]


# interpolation with a fixed weight


def measure_head_interpolation(config: Config) -> dict[str, Any]:
    """Percent right where logits of the two heads are mixed by a fixed e, and FedTHE's, which finds e itself."""
    fixed: list[Found] = []
    ours: list[Found] = []
    for deployed in deploy_all(config):
        for each in watch(deployed, config.samples):
            rates = [_percent(_mix_fixed(e, each).argmax(-1) == each.labels) for e in WEIGHTS]
            fixed.append((each.test, deployed.seed, np.array(rates)))
            ours.append((each.test, deployed.seed, each.accuracy))
    return _sum_up_interpolation(fixed, ours)


def _mix_fixed(e: float, seen: Seen) -> Tensor:
    return mix(seen.of_global.new_full((len(seen.labels),), e), seen.of_global, seen.of_personal)


def measure_model_interpolation(config: Config) -> dict[str, Any]:
    """The same where parameters are mixed: FedAvg's, and those that a client made of them by fine-tuning."""
    received: dict[int, Tree] = {}
    fixed: list[Found] = []
    ours: list[Found] = []
    for deployed in deploy_all(config):
        seed = deployed.seed
        if deployed.name == "fedavg":
            received[seed] = deployed.states
            continue
        asked = list_questions(deployed, config.samples)
        if deployed.name == "fedavg_ft":
            shared = received.pop(seed)
            rates = np.array([_rate_models(deployed, asked, e, shared) for e in track("interpolating", WEIGHTS)])
            fixed += [(each.test, seed, rates[:, i]) for i, each in enumerate(asked)]
        else:
            ours += rate(deployed, config.samples)
    return _sum_up_interpolation(fixed, ours)


def _rate_models(personal: Deployed, asked: Sequence[Asked], e: float, shared: Tree) -> list[float]:
    """Percent right on every stream of models e of which is the global one."""
    mixed = tree.map_leaves(lambda of_global, own: e * of_global + (1 - e) * own, shared, personal.states)
    return [100 * scores.accuracy for scores in answer(personal, asked, personal.method, mixed)]


def _sum_up_interpolation(fixed: list[Found], ours: list[Found]) -> dict[str, Any]:
    best = [(test, seed, rates.max()) for test, seed, rates in fixed]  # a client's own e, chosen by its test labels
    return {"e": WEIGHTS, "shared": average(fixed), "best": average(best), "fedthe": average(ours)}


# what the history does


def measure_weights(config: Config) -> dict[str, Any]:
    """How the personal head's weight 1 - e is spread over all samples, by method and test."""
    weights: dict[str, dict[str, list[np.ndarray]]] = {}
    for deployed in deploy_all(config):
        asked = list_questions(deployed, config.samples)
        for each, scores in zip(asked, answer(deployed, asked, deployed.method, deployed.states), strict=True):
            weights.setdefault(deployed.name, {}).setdefault(each.test, []).append(
                1 - scores.info["e"].astype(np.float64)
            )
    spread = {
        method: {test: _spread(np.concatenate(parts)) for test, parts in tests.items()}
        for method, tests in weights.items()
    }
    return {"edges": np.linspace(0, 1, BINS + 1).tolist(), "weights": spread}


def _spread(values: np.ndarray) -> dict[str, Any]:
    density, _ = np.histogram(values, BINS, (0, 1), density=True)
    return {"density": density.tolist(), "mean": float(values.mean()), "samples": len(values)}


def measure_features(config: Config) -> dict[str, Any]:
    """Some samples' features h, and h' drawn to the history, of a few clients of the first seed."""
    (deployed,) = deploy_all(replace(config, seeds=config.seeds[:1]))
    streams, ensemble = deployed.federation.tests, _ensemble_of(deployed)
    whole = [k for k in range(config.clients) if all(streams[test][k] is not None for test in deployed.tests)]
    clients = (whole or list(range(config.clients)))[:FEW_CLIENTS]
    found: dict[str, list[Any]] = {"test": [], "client": [], "without": [], "with": []}
    for each in watch(deployed, config.samples):
        if each.client in clients:
            # spread over the stream, for the history is of the samples before, whether they are shown or not
            picked = np.unique(np.linspace(0, len(each.labels) - 1, FEW_SAMPLES).round().astype(int))
            smoothed, _ = smooth(each.h, None, ensemble.alpha, ensemble.beta)
            found["test"] += [each.test] * len(picked)
            found["client"] += [each.client] * len(picked)
            found["without"] += _list_features(each.h, picked)
            found["with"] += _list_features(smoothed, picked)
    return {"seed": deployed.seed, **found}


def _list_features(h: Tensor, picked: np.ndarray) -> list[list[float]]:
    rounded: list[list[float]] = h.cpu().numpy()[picked].astype(np.float64).round(2).tolist()
    return rounded


# linear probing and fine-tuning


def measure_probing(config: Config) -> dict[str, Any]:
    """Percent right by way of fine-tuning: the extractor saw the first half of the classes, clients hold the others."""
    dataset = load_dataset(config.dataset, natural=config.natural, size=config.size)
    seen = range(len(dataset.pool.classes) // 2)
    if (config.width, config.head_layers, config.standardize) != (1, 1, False):
        raise InputError("probing takes networks as they are; leave width, head_layers and standardize out.")
    engine = get_engine(config.engine, config.device, config.precision)
    found: dict[str, list[Found]] = {}
    for seed in config.seeds:
        settings, training = config.settings(seed), config.training
        table = compare_probing(
            dataset, seen, settings, training, net=config.net, samples=config.samples, engine=engine
        )
        for mode, scores in table.items():
            for test, value in scores.items():
                if config.tests is None or test in config.tests:
                    found.setdefault(mode, []).append((test, seed, value))
    return {
        "seen": [dataset.pool.classes[c] for c in seen],
        "accuracy": {mode: average(f) for mode, f in found.items()},
    }


# splits that are drawn anew in every round


def measure_leak(config: Config) -> dict[str, Any]:
    """Percent right with frozen splits and with splits drawn anew in every round, by method."""
    frozen = list(deploy_all(config))
    rates: dict[str, list[list[Found]]] = {method: [[], []] for method in config.methods}
    for which, some in enumerate((frozen, deploy_reshuffled(frozen, config))):
        for each in sorted(some, key=lambda each: each.seed):
            rates[each.name][which] += rate(each, config.samples)
    return {
        "frozen": {method: average(before) for method, (before, _) in rates.items()},
        "reshuffled": {method: average(after) for method, (_, after) in rates.items()},
        "gains": {method: average(_subtract(before, after)) for method, (before, after) in rates.items()},
    }


def _subtract(before: Sequence[Found], after: Sequence[Found]) -> list[Found]:
    """By stream, which are the same clients' in the same order."""
    return [(test, seed, new - old) for (test, seed, old), (_, _, new) in zip(before, after, strict=True)]


def rate(deployed: Deployed, samples: int | None) -> list[Found]:
    """Percent right on every stream, as deployed."""
    asked = list_questions(deployed, samples)
    scores = answer(deployed, asked, deployed.method, deployed.states)
    return [(each.test, deployed.seed, 100 * one.accuracy) for each, one in zip(asked, scores, strict=True)]


_PAPER: dict[str, Any] = {
    "name": "figures",  # one folder for all of them, so that they share trainings
    "dataset": "cifar10",
    "net": "cnn",
    "clients": 20,
    "dirichlet": 0.1,
    "rounds": 100,
    "seeds": [0, 1, 2],
}
_CURVES = _PAPER | {"methods": ["fedavg", BASELINE, "memo_p", "t3a", "fedrod", *OURS]}
_GAINS = _PAPER | {"methods": [BASELINE, "memo_p", "t3a", "fedrod", "fedrep", *OURS]}
_FEDTHE = _PAPER | {"methods": ["fedthe"]}
_MODELS = _PAPER | {"methods": ["fedavg", "fedavg_ft", "fedthe"]}
_HISTORY = _PAPER | {"methods": ["fedthe", "ablation_11"]}
# ten epochs, for a head that starts from nothing is not made in one
_PROBING = _PAPER | {"methods": ["probe_lp", "probe_ft", "probe_lpft"], "dirichlet": 1.0, "personal_epochs": 10}

_LEAK = _PAPER | {"methods": ["fedavg", "fedavg_ft", "fedthe"]}


def _curves(title: str, **settings: Any) -> Figure:
    return Figure(title, _CURVES | settings, measure_curves, draw.draw_curves, fixed=False)


FIGURES: dict[str, Figure] = {
    "gains": Figure("Accuracy gain over FedAvg + FT", _GAINS, measure_gains, draw.draw_gains, fixed=False),
    "curves-dir0.1": _curves("Learning curves at Dir(0.1)"),
    "curves-dir1": _curves("Learning curves at Dir(1.0)", dirichlet=1.0),
    "curves-500": _curves("Learning curves over 500 rounds", rounds=500, tests=["mixture"]),
    "curves-1000": _curves("Learning curves over 1,000 rounds", rounds=1000, tests=["mixture"]),
    "alpha-beta": Figure("FedTHE's accuracy by alpha and beta", _FEDTHE, measure_alpha_beta, draw.draw_alpha_beta),
    "interpolation-heads": Figure(
        "Global and personal head mixed by a fixed e", _FEDTHE, measure_head_interpolation, draw.draw_interpolation
    ),
    "interpolation-models": Figure(
        "Global and fine-tuned model mixed by a fixed e",
        _MODELS,
        measure_model_interpolation,
        draw.draw_interpolation,
    ),
    "weights": Figure("Weight of the personal head, 1 - e", _HISTORY, measure_weights, draw.draw_weights),
    "features": Figure("Features, with and without history", _FEDTHE, measure_features, draw.draw_features),
    "leak": Figure("Splits drawn anew in every round", _LEAK, measure_leak, draw.draw_leak, fixed=False),
    "probing": Figure("Linear probing and fine-tuning", _PROBING, measure_probing, draw.draw_probing),
}
