"""Deployed clients answer their test streams."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from .. import tree
from ..data.augment import augmix
from ..errors import Failed
from ..methods.base import Method, Samples
from ..methods.checks import unchanged_state
from ..statistics import area_under_roc
from ..tree import Tree
from ..types import Shard, scale
from .visit import Answered, Question

AHEAD = 16  # samples whose views are drawn together: half the cost of one by one


@dataclass(frozen=True)
class Scores:
    """How one client did on one test stream."""

    classes: np.ndarray  # [n], the answers
    right: np.ndarray  # bool [n]
    log_probability: np.ndarray  # float64 [n], of the answer
    log_truth: np.ndarray  # float64 [n], of the true class; NaN where that is unknown
    known: np.ndarray  # bool [n], whether a sample is of a class that clients hold
    info: dict[str, np.ndarray]  # per sample, such as e [n]
    seconds: float

    @property
    def accuracy(self) -> float:
        """Of the samples of known classes."""
        return float(self.right[self.known].mean())

    @property
    def nll(self) -> float:
        """The negative log-likelihood of the true classes in nats, mean over the samples of known classes."""
        return float(-self.log_truth[self.known].mean())

    @property
    def auroc(self) -> float | None:
        """How well the probability of the answer tells known classes from an unknown one; None without such samples."""
        if self.known.all():
            return None
        return area_under_roc(self.log_probability[self.known], self.log_probability[~self.known])


def begin_one(method: Method, mine: Tree, shard: Shard) -> Tree:
    """The predictor's state before the first sample of any stream of this client."""
    with unchanged_state(method.predictor, mine):
        state = method.predictor.begin(method, mine, shard)
    return tree.map_leaves(lambda leaf: leaf.to(shard.x.device), state)


def answer_one(method: Method, mine: Tree, state: Tree, question: Question) -> Answered:
    """The answers of one deployed client to a stream, from what `begin_one` gave."""
    pixels = torch.from_numpy(question.x).to(tree.flatten(mine).popitem()[1].device)
    samples = make_samples(method, pixels, question.path)
    state = tree.map_leaves(torch.clone, state)  # the client's other streams begin with the same
    with unchanged_state(method.predictor, mine):
        began = time.perf_counter()
        with torch.no_grad():  # predictors that need a gradient enable it
            answers, _ = method.answer(mine, state, samples)
    logits = to_host(answers.logits)  # waits for the device
    seconds = time.perf_counter() - began
    info = {name: value.cpu().numpy() for name, value in answers.info.items()}
    return Answered(logits, info, seconds)


def to_host(logits: Tensor) -> np.ndarray:
    """Logits as float64, which holds every smaller type exactly."""
    return logits.detach().cpu().double().numpy()


def check_columns(method: Method, answered: Answered) -> None:
    """Refuse columns of info that cannot be filed; to look inside a predictor, they may be of any shape."""
    for name, column in answered.info.items():
        if column.ndim != 1:
            who = type(method.predictor).__name__
            raise Failed(f"{who}.answer gives info[{name!r}] with several numbers per sample; give one")


def score(answered: Answered, labels: np.ndarray, path: tuple[int | str, ...]) -> Scores:
    logits, where = answered.logits, "/".join(map(str, path))
    if logits.ndim != 2 or len(logits) != len(labels):
        shapes = f"{len(labels)} samples and logits {list(logits.shape)}"
        raise Failed(f"{where} has {shapes}; a predictor gives one row of logits per sample")
    if labels.max() >= logits.shape[1]:
        raise Failed(f"{where} has class {labels.max()}, but the logits are of {logits.shape[1]} classes")
    if not answered.finite:
        raise Failed(f"an answer to {where} is not finite")
    weight = answered.info.get("e", np.zeros(1))
    if not ((weight >= 0) & (weight <= 1)).all():
        raise Failed("the column 'e' of a predictor's info is the weight of the global head, from 0 to 1; rename it")
    for name in ("global", "personal"):
        if name in answered.info and answered.info[name].dtype.kind not in "iu":
            raise Failed(f"the column {name!r} of a predictor's info is the class that a head answers; rename it")
    classes, each = answered.classes, np.arange(len(labels))
    centred = logits - logits.max(-1, keepdims=True)
    log_p = centred - np.log(np.exp(centred).sum(-1, keepdims=True))
    known = labels >= 0
    truth = np.where(known, log_p[each, labels], np.nan)
    right = classes == labels
    return Scores(classes, right, log_p[each, classes], truth, known, answered.info, answered.seconds)


def answer_stream(
    method: Method, mine: Tree, shard: Shard, images: np.ndarray, labels: np.ndarray, path: tuple[int | str, ...]
) -> Scores:
    """Answer images [n, h, w, c] in order, and score the answers; `path` keys the draws of augmented views."""
    asked = Question(0, images, path)
    return score(answer_one(method, mine, begin_one(method, mine, shard), asked), labels, path)


def make_samples(method: Method, pixels: Tensor, path: tuple[int | str, ...], before: int = 0) -> Samples:
    """A stream of pixels uint8 [n, h, w, c], whose augmented views are drawn when they are asked for.

    before: how many samples of the stream came before these.
    """
    (steps, count), x = method.predictor.augments, scale(pixels)
    if steps == 0:
        return Samples(x, lambda positions: x.new_empty(len(positions), 0, 0, *x.shape[1:]))

    @lru_cache(maxsize=1)
    def draw_block(first: int) -> Tensor:
        rows = torch.arange(first, min(first + AHEAD, len(pixels)), device=pixels.device)
        seen = augmix(pixels[rows], (*path, "views"), before + rows, steps * count)
        last = seen.movedim(2, -1)  # channels last, the order that convolutions like
        return last.reshape(len(rows), steps, count, *last.shape[2:])

    def draw(positions: Tensor) -> Tensor:
        places = [divmod(position, AHEAD) for position in positions.tolist()]
        return torch.stack([draw_block(AHEAD * block)[place] for block, place in places]).movedim(-1, -3)

    return Samples(x, draw)
