"""What the FedTHE authors' code (https://github.com/LINs-lab/FedTHE, commit 16097d0) runs where it is not what their
paper says, method by method. The table `deviations` measures what each difference is worth; the methods proper follow
the papers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .apfl import APFL
from .base import Answers, Batch, FedAvg, Fit, Fitted, Method, Net, Personal, Rounds, Samples, Shard, Tree, network
from .compose import Recipe
from .ditto import Ditto
from .fedrod import FedRoD
from .fedthe import HeadEnsemble
from .finetune import FineTune
from .head_ensemble import find_weight
from .knn_per import KNN
from .losses import balanced_softmax, cross_entropy
from .memo import Memo
from .scans import remember
from .two_heads import TwoHeads


@dataclass(frozen=True)
class TunedRoD(FedRoD):
    """While the personal head learns, body and generic head train on, by balanced softmax."""

    def personalize(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        return fit(self.loss, network(shared) | {"personal": mine["personal"]})

    def loss(self, net: Net, params: Tree, given: Tree, batch: Batch) -> Tensor:
        h = net.features(params["body"], batch.x)
        generic = net.head(params["head"], h)
        both = generic.detach() + net.head(params["personal"], h.detach())
        return balanced_softmax(generic, batch.y, batch.counts) + cross_entropy(both, batch.y)


@dataclass(frozen=True)
class AveragedRep(Rounds, Personal):
    """FedRep whose clients also average their heads. A round trains the received head, then the body. Before the
    test, a client does the same with the head that it keeps, and deploys both."""

    def keep(self, net: Net, params: Tree) -> Tree:
        return {"head": params["head"]}

    def local(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        return self.alternate(fit, shared["body"], shared["head"])

    def personalize(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        return self.alternate(fit, shared["body"], mine["head"])

    def alternate(self, fit: Fit, body: Tree, head: Tree) -> Fitted:
        trained, *_ = fit(self.loss, {"head": head}, {"body": body})
        under, losses, _ = fit(self.loss, {"body": body}, trained)
        return Fitted(trained | under, losses)

    def loss(self, net: Net, params: Tree, given: Tree, batch: Batch) -> Tensor:
        return super().loss(net, given | params, {}, batch)


@dataclass(frozen=True)
class LogitAPFL(APFL):
    """Mixes logits instead of models. The received model is fine-tuned beside the personal one, and deployed so."""

    def personalize(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        both = network(shared) | {"personal": mine["personal"]}
        alpha = self.step_alpha(fit, both, {"alpha": mine["alpha"]}, shard)
        both, losses, _ = fit(self.loss, both, {"alpha": alpha})
        return Fitted(both | {"alpha": alpha}, losses)

    def loss(self, net: Net, params: Tree, given: Tree, batch: Batch) -> Tensor:
        alpha, own, received = given["alpha"], net.logits(params["personal"], batch.x), net.logits(params, batch.x)
        mixed = alpha * own + (1 - alpha) * received.detach()
        return cross_entropy(received, batch.y) + cross_entropy(mixed, batch.y)

    def logits(self, net: Net, mine: Tree, x: Tensor) -> Tensor:
        alpha: Tensor = mine["alpha"]
        return alpha * net.logits(mine["personal"], x) + (1 - alpha) * net.logits(mine, x)


@dataclass(frozen=True)
class LogitKNN(KNN):
    """Mixes the neighbours' probabilities with the model's logits. Their code picks lambda on test rows; this one picks
    it on validation rows, like kNN-Per."""

    scale: float = 64.0  # the number of the CNN's features

    def answer(self, method: Method, mine: Tree, state: Tree, samples: Samples) -> tuple[Answers, Tree]:
        lam = state["lambda"]
        with torch.no_grad():
            near, model = self._ask(method, mine, state, method.net.features(mine["body"], samples.x))
        logits = lam * near + (1 - lam) * model
        return Answers(logits, {"lambda": lam.expand(len(logits))}), state

    def _ask(self, method: Method, mine: Tree, store: Tree, h: Tensor) -> tuple[Tensor, Tensor]:
        near, _ = super()._ask(method, mine, store, h)
        return near, method.net.head(mine["head"], h)


@dataclass(frozen=True)
class BatchedEnsemble(HeadEnsemble):
    """FedTHE in batches. The history that a sample sees includes the sample itself, but no history includes the first
    sample of a later batch. The search ends for all samples of a batch at once."""

    rows: int = 32  # of a batch
    stop: float = 1e-5  # the norm of a batch's gradient at which its search ends

    def _smooth(self, h: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        before = torch.where(state["history"].isnan(), h[0], state["history"])
        history, last = remember(torch.cat([before[None], h[1:].double()]), before, self.alpha)
        history = torch.cat([history[1:], last[None]])
        return self.beta * h + (1 - self.beta) * history, {"history": last}

    def _weigh(self, of_global: Tensor, of_personal: Tensor, gap: Tensor) -> Tensor:
        # their loss is a mean over the batch, which Adam notices beside its eps alone
        search = replace(self.search, eps=self.search.eps * len(gap))
        return find_weight(of_global, of_personal, gap, search, stop=self.stop)

    @property
    def window(self) -> int:
        return self.rows


BALANCED = FedAvg(balanced=True)
TUNED = Memo(steps=2, lr=0.01)  # the rate that they set, 0.0005, is on an attribute that no optimizer reads

AUTHORS: dict[str, Recipe] = {
    "authors_fedthe": (BALANCED, TwoHeads(), BatchedEnsemble()),
    "authors_memo_g": TUNED,
    "authors_memo_p": (FineTune(), TUNED),
    "authors_fedrod": (BALANCED, TunedRoD()),
    "authors_fedrep": AveragedRep(),
    "authors_apfl": LogitAPFL(),
    "authors_ditto": Ditto(lam=0.0),  # the pull is added to gradients that the optimizer has used already
    "authors_knn_per": LogitKNN(),
}
