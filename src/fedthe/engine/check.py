"""Try a method on made-up data in both engines, and say what it does or what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .. import tree
from ..errors import Failed
from ..methods.base import Method, Samples
from ..methods.checks import WrongMethod
from ..methods.compose import Parts, Recipe, compose, describe
from ..methods.make import find_recipe
from ..nets.net import PictureNet, Start, fan_in
from ..specs import Spec
from ..store import content_hash
from ..tree import Tree
from ..types import Shard
from .client import summarize
from .evaluate import check_columns, make_samples
from .fit import Optimizer
from .loop import Loop
from .stack import Stack
from .train import deploy_some, train
from .visit import Engine, Progress, Question, Run, Training

CLASSES, SIZE, SAMPLES = 3, 8, 5
ROWS = (9, 4, 6)  # of each client: in batches of 4, some run out before others do
SETTINGS = Training(rounds=2, local_epochs=1, batch=4, crop=1, optimizer=Optimizer(lr=0.05))
NEAR = 1e-4  # engines add in different orders


def check_method(recipe: Recipe | str) -> str:
    """What a method does, after two rounds of three clients, deployment and answers in both engines.

    `recipe` is a part, its class, or a tuple of them, as in `METHODS`, or the id of a method there. Raises InputError
    with one sentence if something is wrong.
    """
    if isinstance(recipe, str):
        recipe = find_recipe(Spec(recipe))
    method = compose(_TinyNet(CLASSES, channels=1, size=SIZE), recipe)
    name = _name(method)
    try:
        method.check(SETTINGS.optimizer)
        _check_fields(name, method)
        loop, again, stack = (_try(method, engine) for engine in (Loop(threads=1), Loop(threads=1), Stack()))
    except Failed as error:
        raise WrongMethod(f"{str(error).rstrip('.')}.") from error
    _compare(loop, again, 0.0, f"{name} gives other numbers when it runs again", "draw no random numbers in it")
    _compare(
        loop,
        stack,
        NEAR,
        f"{name} gives other numbers in the stacked engine than in the loop",
        "ignore rows of the shard that are not `real`, and turn no tensor into a Python number",
    )
    if method.predictor.window is None and not method.predictor.augments[0]:
        _check_stream(method, loop)
    return _describe(name, loop)


def _check_stream(method: Method, tried: _Tried) -> None:
    """A predictor without a window answers a whole stream as it answers one sample after another."""
    shard, mine = _make_shard(0, ROWS[0]), tree.take(tried.deployed, 0)
    samples = make_samples(method, shard.val_x, (0, "check"))
    state = method.predictor.begin(method, mine, shard)
    with torch.no_grad():
        whole, _ = method.answer(mine, state, samples)
        rows = []
        for x in samples.x.split(1):
            answers, state = method.answer(mine, state, Samples(x, samples.views))
            rows.append(answers.logits)
    if not torch.allclose(torch.cat(rows), whole.logits, rtol=NEAR, atol=NEAR):
        raise WrongMethod(
            f"{type(method.predictor).__name__} answers a whole stream otherwise than its samples one by one, with the "
            "state passed on; set `window`, or let each answer depend on samples before it alone."
        )


class _Tried(NamedTuple):
    """What came of a method in one engine."""

    progress: Progress
    deployed: Tree  # [clients, ...]
    sent: Tree  # by the first client, after the last round
    classes: np.ndarray  # [clients, samples], the answers


def _try(method: Method, engine: Engine) -> _Tried:
    shards = [_make_shard(client, rows) for client, rows in enumerate(ROWS)]
    clients, progress = range(len(shards)), train(method, shards, SETTINGS, 0, engine=engine)
    deployed = deploy_some(method, Run(0, shards), SETTINGS, progress, engine, clients)
    questions = [Question(k, shards[k].val_x.numpy(), (0, "check", k)) for k in clients]
    answers = engine.answer(method, deployed, shards, questions)
    for each in answers:
        check_columns(method, each)
    sent = summarize(method, progress.server.shared | progress.averages, shards[0])
    return _Tried(progress, deployed, sent, np.stack([each.classes for each in answers]))


def _compare(one: _Tried, other: _Tried, near: float, what: str, way_out: str) -> None:
    places = [_list_leaves(tried) for tried in (one, other)]
    for place in places[0]:
        for name, leaf in places[0][place].items():
            if not torch.allclose(leaf, places[1][place][name], rtol=near, atol=near):
                raise WrongMethod(f"{what}, in {name} of {place}; {way_out}.")
    # a sample between two classes may go either way by rounding
    if (one.classes != other.classes).sum() > (1 if near else 0):
        raise WrongMethod(f"{what}, in its answers; {way_out}.")


def _list_leaves(tried: _Tried) -> dict[str, dict[str, Tensor]]:
    shared, averages, clients = tried.progress.server.shared, tried.progress.averages, tried.progress.clients
    kept = {f"what client {k} keeps": tree.flatten(mine) for k, mine in enumerate(clients)}
    return {
        "the shared model": tree.flatten(shared | averages),
        **kept,
        "what clients deploy": tree.flatten(tried.deployed),
    }


def _describe(name: str, tried: _Tried) -> str:
    shared, averages, kept = tried.progress.server.shared, tried.progress.averages, tried.progress.clients[0]
    beside = f", and the mean of what it keeps as {_list_sizes(averages)}" if averages else ""
    beside += f", and after the last round {_list_sizes(tried.sent)}" if tried.sent else ""
    return (
        f"{name} gives the same numbers in both engines. A client receives and uploads {_list_sizes(shared)}{beside}; "
        f"it keeps {_list_sizes(kept.get('rounds', {}) | kept.get('personal', {}))} "
        f"and deploys {_list_sizes(tree.take(tried.deployed, 0))}."
    )


def _list_sizes(part: Tree) -> str:
    return ", ".join(f"{name} {list(leaf.shape)}" for name, leaf in tree.flatten(part).items()) or "nothing"


def _name(method: Method) -> str:
    """The classes of the parts that are not the defaults."""
    used, usual = ((each.rounds, each.personal, each.predictor) for each in (method, Parts()))
    others = [type(part).__name__ for part, default in zip(used, usual, strict=True) if part != default]
    return " + ".join(dict.fromkeys(others)) or type(method.rounds).__name__


def _check_fields(name: str, method: Method) -> None:
    """Trainings are shared, and results filed, by the values of fields."""
    try:
        hash(method), content_hash(describe(method))
    except (TypeError, ValueError) as error:
        raise WrongMethod(f"{name} has a bad field ({error}); use numbers, strings, and tuples of them.") from None


@dataclass(frozen=True)
class _TinyNet(PictureNet):
    @property
    def feature_dim(self) -> int:
        return 6

    def body_starts(self) -> dict[str, Start]:
        return {"conv": fan_in(2, self.channels, 3, 3), "linear": fan_in(6, 2 * (self.size // 2) ** 2)}

    def features(self, body: Tree, x: Tensor) -> Tensor:
        h = F.max_pool2d(torch.tanh(F.conv2d(x, body["conv"], padding=1)), 2)
        return torch.tanh(F.linear(h.flatten(1), body["linear"]))


def _make_shard(client: int, rows: int) -> Shard:
    """Noise, brighter by class, and as validation rows the samples to answer."""
    draws, n = np.random.default_rng(client), rows + SAMPLES
    labels = (np.arange(n) + client) % CLASSES
    x = draws.integers(0, 100, (n, SIZE, SIZE, 1)) + 70 * labels[:, None, None, None]
    pixels, y, real = torch.from_numpy(x.astype(np.uint8)), torch.from_numpy(labels), torch.ones(n, dtype=torch.bool)
    counts = torch.bincount(y[:rows], minlength=CLASSES).float()
    return Shard(pixels[:rows], y[:rows], real[:rows], counts, pixels[rows:], y[rows:], real[rows:])
