"""What a method is: how clients train, what they share, what they deploy. The defaults are FedAvg.

A method is written for one client and one sample; the engine lifts it over clients, test distributions and time. It
holds hyperparameters only. State goes in and comes out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import getmembers, isfunction
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from .. import tree
from ..errors import InputError
from ..nets.net import Net
from ..tree import Tree
from ..types import Batch, Shard
from .losses import cross_entropy

Loss = Callable[[Tree, Tree, Batch], Tensor]  # what is trained, what is given, a batch -> one loss per sample


class Fit(Protocol):
    """Training by the engine. `given` reaches the loss as it is; a loss captures no tensors of its own.

    Settings left at None are those of the experiment, for the phase (local or personal) that asked.
    """

    def __call__(
        self, loss: Loss, params: Tree, shard: Shard, given: Tree | None = None, *, weight_decay: float | None = None
    ) -> Tree: ...

    @property
    def lr(self) -> float: ...


# Positions among the samples given to `stream` [m] -> their augmented views [m, steps, views, c, h, w].
Views = Callable[[Tensor], Tensor]
# What a client deploys, the views of a sample [steps, views, c, h, w], and its parts of some columns, each [1, ...] ->
# a row of the answer [1, ...]. Like a loss it captures no tensors of its own; equal ones do the same.
OneSample = Callable[..., Tensor]


class SideBySide(ABC):
    """Views of an engine that has ways of its own to answer samples: all at once, or one after another."""

    @abstractmethod
    def __call__(self, positions: Tensor) -> Tensor: ...

    @abstractmethod
    def each(self, fn: OneSample, mine: Tree, columns: tuple[Tensor, ...]) -> Tensor: ...

    @abstractmethod
    def walk(self, step: Step, mine: Tree, state: Tree, x: Tensor) -> tuple[Answers, Tree]: ...


def each_sample(fn: OneSample, mine: Tree, views: Views, *columns: Tensor) -> Tensor:
    """`fn` of every sample, where samples do not depend on each other; columns [n, ...] -> [n, ...]."""
    if isinstance(views, SideBySide):
        return views.each(fn, mine, columns)
    rows = [column.split(1) for column in columns]
    return torch.cat([fn(mine, views(torch.tensor([i]))[0], *one) for i, one in enumerate(zip(*rows, strict=True))])


@dataclass(frozen=True)
class Answers:
    """What a predictor says of a stream."""

    logits: Tensor  # [n, classes]
    info: dict[str, Tensor] = field(default_factory=dict)  # per sample, such as the weight of the global head [n]


@dataclass(frozen=True)
class Predictor:
    """How a deployed client answers unlabeled samples, one after another. The default is a plain forward pass.

    `step` is the meaning. `stream` answers many samples at once and must say the same.
    """

    # a step leaves the state as it was and says logits alone: samples may be answered side by side
    forgets: ClassVar[bool] = False

    def check(self, method: Method) -> None:
        """Refuse, before any work, a method that this predictor cannot serve."""

    def start(self, method: Method, mine: Tree, shard: Shard) -> Tree:
        """The state before the first sample."""
        return {}

    def step(self, method: Method, mine: Tree, state: Tree, x: Tensor, views: Tensor | None) -> tuple[Answers, Tree]:
        """One sample x [1, c, h, w], its augmented views [steps, views, c, h, w] -> its answer and the next state."""
        return Answers(method.logits(mine, x)), state

    def stream(self, method: Method, mine: Tree, state: Tree, x: Tensor, views: Views | None) -> tuple[Answers, Tree]:
        """Samples x [n, c, h, w] in order -> their answers, and the state after the last."""
        if type(self) is Predictor:
            return Answers(method.logits(mine, x)), state
        if self.forgets and views is not None and self.augments[0] and not state:
            return Answers(each_sample(Alone(method, self), mine, views, x)), state
        if isinstance(views, SideBySide):
            return views.walk(Step(method, self), mine, state, x)
        return self.stream_by_steps(method, mine, state, x, views)

    def stream_by_steps(
        self, method: Method, mine: Tree, state: Tree, x: Tensor, views: Views | None
    ) -> tuple[Answers, Tree]:
        answers = []
        for i in range(len(x)):
            seen = views(torch.tensor([i]))[0] if views else None
            answer, state = self.step(method, mine, state, x[i : i + 1], seen)
            answers.append(answer)
        return join(answers), state

    @property
    def looks_back(self) -> bool:
        """Whether an answer depends on the samples before it alone. No for those who answer in batches."""
        return True

    @property
    def augments(self) -> tuple[int, int]:
        """How many steps of how many augmented views it wants of every sample."""
        return 0, 0

    @property
    def passes(self) -> tuple[int, int]:
        """Forward and backward passes through the network per sample, an augmented view counting as one."""
        return 1, 0


@dataclass(frozen=True)
class Step:
    """A predictor's step. Equal ones do the same."""

    method: Method
    predictor: Predictor

    def __call__(self, mine: Tree, state: Tree, x: Tensor, seen: Tensor | None = None) -> tuple[Answers, Tree]:
        return self.predictor.step(self.method, mine, state, x, seen)


@dataclass(frozen=True)
class Alone:
    """The answer to one sample by a predictor that forgets."""

    method: Method
    predictor: Predictor

    def __call__(self, mine: Tree, seen: Tensor, x: Tensor) -> Tensor:
        return self.predictor.step(self.method, mine, {}, x, seen)[0].logits


def join(answers: list[Answers]) -> Answers:
    return Answers(
        torch.cat([a.logits for a in answers]),
        {name: torch.cat([a.info[name] for a in answers]) for name in answers[0].info},
    )


@dataclass(frozen=True)
class Method:
    net: Net
    predictor: Predictor = Predictor()

    def init(self, params: Tree) -> tuple[Tree, Tree]:
        """What is shared at the start, and what each client starts with: the leaves that `personalize` gives."""
        return params, params

    def personalize(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Tree:
        """What a client keeps and deploys, after it received `shared`."""
        return shared

    def local(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Tree:
        """What a client uploads: the keys of `shared`."""
        return fit(self.loss, shared, shard)

    def aggregate(self, shared: Tree, uploads: Tree, weights: Tensor) -> Tree:
        """The next `shared`, from stacked uploads [clients, ...] and the clients' numbers of rows [clients]."""
        return tree.weighted_mean(uploads, weights)

    def loss(self, params: Tree, given: Tree, batch: Batch) -> Tensor:
        return cross_entropy(self.net.logits(params, batch.x), batch.y)

    def logits(self, mine: Tree, x: Tensor) -> Tensor:
        return self.net.logits(mine, x)

    def trains_as(self) -> Method:
        """The method whose federated training this one deploys; methods with an equal one are trained once."""
        return replace(self, predictor=Predictor())

    def sends_as(self) -> Method:
        """The plain method whose rounds do the same to the network that goes around: methods with an equal one are
        trained side by side, and the network once. What a class says of itself does not hold for its subclasses."""
        return self.trains_as()

    def check(self) -> None:
        """Refuse, before any work, what would not be done as it is written."""
        self.predictor.check(self)
        trained = self.trains_as()
        ignored = list_ignored(type(self), type(trained))
        if ignored:
            raise InputError(
                f"{type(self).__name__} overrides {ignored[0]}, which training would ignore, for it is trained as "
                f"{type(trained).__name__}; override trains_as as well."
            )


ANSWERING = ("logits", "heads", "check", "trains_as", "sends_as")  # what no round calls


def list_ignored(kind: type[Method], trained: type[Method]) -> list[str]:
    """What a class overrides, but not the `trains_as` that it inherits from another."""
    says = next(each for each in kind.__mro__ if "trains_as" in vars(each))
    if says is Method:  # which trains what it is asked for
        return []
    names = [name for name, _ in getmembers(says, isfunction) if not name.startswith("__") and name not in ANSWERING]
    if trained.personalize is Method.personalize:  # clients only personalize to deploy
        names.remove("personalize")
    return [name for name in names if getattr(kind, name) is not getattr(says, name)]


def find_sender(method: Method) -> Method:
    """Its `sends_as`, if its very class says so: a subclass may send something else."""
    return method.sends_as() if "sends_as" in vars(type(method)) else method.trains_as()


def describe(method: Any) -> dict[str, Any]:
    """A method as plain data, for records: its class and its hyperparameters, nested ones too."""
    values: dict[str, Any] = {"is": f"{type(method).__module__}.{type(method).__qualname__}"}
    for name in method.__dataclass_fields__:
        value = getattr(method, name)
        values[name] = describe(value) if hasattr(value, "__dataclass_fields__") else value
    return values
