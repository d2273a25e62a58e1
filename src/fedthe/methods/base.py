"""A method is three parts: rounds train the model that clients share, a personal part makes it a client's own, and a
predictor answers samples. Every part is written for one client; engines run it on many.

Parts are frozen dataclasses that hold hyperparameters only. State is passed in and returned. So methods with equal
parts do the same, and are trained once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torch import Tensor

from .. import tree
from ..errors import InputError
from ..nets.net import Net
from ..tree import Tree
from ..types import Batch, Shard
from .checks import check_logits, check_parts, code_of, start_parts
from .fit import Fit, Fitted, network
from .losses import balanced_softmax, cross_entropy
from .predictor import Forward, Predictor
from .samples import Answers, Samples

if TYPE_CHECKING:
    from ..engine.fit import Optimizer

__all__ = ["Answers", "Batch", "FedAvg", "Fit", "Fitted", "Method", "Net", "Personal", "Predictor", "Rounds"]
__all__ += ["Samples", "Shard", "Tree", "network"]  # all that a file with a method needs


@dataclass(frozen=True)
class Rounds:
    """How clients train the shared model. The default is FedAvg."""

    plain_sgd: ClassVar[bool] = False  # whether it is defined for SGD without momentum only
    mean_is_enough: ClassVar[bool] = False  # whether an `aggregate` of its own needs no more than the weighted mean
    changes: ClassVar[tuple[str, ...]] = ()  # of `shared`: what clients upload in their place is added, not averaged

    def share(self, net: Net, params: Tree) -> Tree:
        """The shared model before the first round, of a network with these parameters."""
        return params

    def keep(self, net: Net, params: Tree) -> Tree:
        """What each client keeps of its own from round to round, as it is before the first."""
        return {}

    def local(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        """What a client uploads: the leaves of `shared`. Leaves that it keeps may change, too."""
        return fit(self.loss, shared)

    def loss(self, net: Net, params: Tree, given: Tree, batch: Batch) -> Tensor:
        return cross_entropy(net.logits(params, batch.x), batch.y)

    def aggregate(self, shared: Tree, uploads: Tree, weights: Tensor) -> Tree:
        """The next `shared`, from stacked uploads [clients, ...] and the numbers of training rows [clients]."""
        return tree.weighted_mean(uploads, weights)


@dataclass(frozen=True)
class FedAvg(Rounds):
    """FedAvg (McMahan et al. 2017, https://arxiv.org/abs/1602.05629)."""

    balanced: bool = False  # balanced softmax instead of cross-entropy

    def loss(self, net: Net, params: Tree, given: Tree, batch: Batch) -> Tensor:
        logits = net.logits(params, batch.x)
        return balanced_softmax(logits, batch.y, batch.counts) if self.balanced else cross_entropy(logits, batch.y)


@dataclass(frozen=True)
class Personal:
    """How a client makes the shared model its own. The default deploys the shared model as it is."""

    averages: ClassVar[Mapping[str, str]] = {}  # leaves beside the shared ones: weighted means of what clients keep

    def keep(self, net: Net, params: Tree) -> Tree:
        """What each client keeps of its own from round to round, as it is before the first."""
        return {}

    def personalize(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        """What a client deploys in place of leaves of `shared`, or beside them. Leaves that `keep` names are kept."""
        return Fitted({})

    def personalize_unlabeled(self, net: Net, shared: Tree, shard: Shard) -> Tree | None:
        """The same for a client that has no labels: those of its rows are 0, and so are counts. None: it cannot."""
        return {} if type(self).personalize is Personal.personalize else None

    def logits(self, net: Net, mine: Tree, x: Tensor) -> Tensor:
        return net.logits(mine, x)


class InitialState(NamedTuple):
    """A method before its first round."""

    shared: Tree
    averages: Tree
    mine: Tree  # what each client keeps, in the branches "rounds" and "personal"; the latter for one part that is both


@dataclass(frozen=True)
class Method:
    """A network and the three parts of a method; `fedthe.METHODS` has the parts by name."""

    net: Net
    rounds: Rounds = FedAvg()
    personal: Personal = Personal()
    predictor: Predictor = Forward()

    def start(self, params: Tree) -> InitialState:
        shared, of_rounds, kept = start_parts(self, params)
        averages = {name: kept.get(source) for name, source in self.personal.averages.items()}
        if any(leaf is None for leaf in averages.values()):
            raise InputError(f"{type(self.personal).__name__}.averages names a leaf that its `keep` does not return.")
        clash = averages.keys() & (shared | of_rounds | kept).keys() | of_rounds.keys() & kept.keys()
        if clash:
            raise InputError(f"two parts of the method use the name {min(clash)!r}; rename one of them.")
        return InitialState(shared, averages, {"rounds": of_rounds, "personal": kept})

    @property
    def message_bytes(self) -> int:
        """What the server sends to a client in a round, in bytes. A client answers with as much."""
        first = self.start(self.net.zeros())
        return tree.count_bytes(tree.flatten({"shared": first.shared, "averages": first.averages}))

    @property
    def state_bytes(self) -> int:
        """What a client keeps from round to round, in bytes."""
        return tree.count_bytes(tree.flatten(self.start(self.net.zeros()).mine))

    def logits(self, mine: Tree, x: Tensor) -> Tensor:
        with code_of(self.personal, "logits", mine=mine):
            logits = self.personal.logits(self.net, mine, x)
        return check_logits(self.personal, "logits", logits, len(x), self.net.classes)

    def answer(self, mine: Tree, state: Tree, samples: Samples) -> tuple[Answers, Tree]:
        """The answers to a whole stream, and the predictor's state after it."""
        if (window := self.predictor.window) is None:
            return self.predictor.respond(self, mine, state, samples)
        return samples.scan(self.predictor.answer_given, self, mine, state, samples.x, window=window)

    @property
    def training(self) -> Method:
        """All that federated training depends on: methods with equal ones are trained once."""
        keeps = self.personal.keep(self.net, self.net.zeros())
        return replace(self, personal=self.personal if keeps else Personal(), predictor=Forward())

    @property
    def core(self) -> Method:
        """The training of the shared model alone. Methods with equal cores are trained side by side."""
        return training if (training := self.training).is_one_part else replace(training, personal=Personal())

    @property
    def is_one_part(self) -> bool:
        """Whether rounds and personal are one value, of a class that is both."""
        return isinstance(self.personal, Rounds) and self.personal == self.rounds

    def check(self, optimizer: Optimizer | None = None) -> None:
        """Refuse, before any work, parts that do not fit together, or the optimizer."""
        check_parts(self, optimizer)
