"""Methods that are wrong in one way each, and what is said of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from fedthe import tree
from fedthe.methods.base import Answers, Fitted, Personal, Predictor, Rounds, network
from fedthe.methods.finetune import FineTune

WRONG = {}


def wrong(name, says):
    def register(kind):
        WRONG[name] = dataclass(frozen=True)(kind), says
        return kind

    return register


# share


@wrong("share gives no tree", "SharesTensor.share returns must be a nested dict of tensors, not a Tensor")
class SharesTensor(Rounds):
    def share(self, net, params):
        return params["head"]["out"]


@wrong(
    "share gives a tree with no tensors",
    "SharesNumber.share returns must be a nested dict of tensors, but its step is an int",
)
class SharesNumber(Rounds):
    def share(self, net, params):
        return params | {"step": 0}


@wrong(
    "share leaves out the head",
    "SharesBody.local raised KeyError: 'head'; `shared` has body and `mine` has nothing: share it",
)
class SharesBody(Rounds):
    def share(self, net, params):
        return {"body": params["body"]}


@wrong("share asks for a leaf that is not there", "SharesMissing.share raised KeyError: 'bodies'")
class SharesMissing(Rounds):
    def share(self, net, params):
        return {"body": params["bodies"]}


@wrong("share gives nothing back", "SharesNone.share returns must be a nested dict of tensors, not nothing")
class SharesNone(Rounds):
    def share(self, net, params):
        params["more"] = params["head"]


# keep


@wrong("keep gives no tree", "KeepsTensor.keep returns must be a nested dict of tensors, not a Tensor")
class KeepsTensor(Personal):
    def keep(self, net, params):
        return params["head"]["out"]


@wrong("keep gives a number", "KeepsNumber.keep returns must be a nested dict of tensors, but its alpha is a float")
class KeepsNumber(Personal):
    def keep(self, net, params):
        return {"alpha": 0.5}


@wrong(
    "keep names a leaf that personalize gives another shape",
    "; KeepsOther must return the leaves, shapes and dtypes of its `keep`",
)
class KeepsOther(Personal):
    def keep(self, net, params):
        return {"head": params["head"]}

    def personalize(self, fit, shared, mine, shard):
        return Fitted({"head": {"out": mine["head"]["out"][:1]}})


@wrong(
    "keep names a branch that personalize gives other leaves", "personal.head.out is missing; KeepsBranch must return"
)
class KeepsBranch(Personal):
    def keep(self, net, params):
        return {"head": params["head"]}

    def personalize(self, fit, shared, mine, shard):
        return Fitted({"head": {"in": mine["head"]["out"]}})


@wrong(
    "keep names a leaf that personalize gives another dtype",
    "personal.head.out is float64, not float32; KeepsDouble must return",
)
class KeepsDouble(Personal):
    def keep(self, net, params):
        return {"head": params["head"]}

    def personalize(self, fit, shared, mine, shard):
        return Fitted(tree.map_leaves(torch.Tensor.double, mine))


@wrong(
    "local changes a leaf that keep does not name",
    "KeepsNothing.local returned 'previous' for a client to keep, but `keep` does not name it",
)
class KeepsNothing(Rounds):
    def local(self, fit, shared, mine, shard):
        return fit(self.loss, shared)._replace(mine={"previous": shared["body"]})


@wrong(
    "local changes the shape of a leaf that it keeps",
    "; KeepsLess must return the leaves, shapes and dtypes of its `keep`",
)
class KeepsLess(Rounds):
    def keep(self, net, params):
        return {"previous": params["head"]["out"]}

    def local(self, fit, shared, mine, shard):
        return fit(self.loss, shared)._replace(mine={"previous": mine["previous"][0]})


# local


@wrong("local gives the tree alone", "UploadsTree.local must return Fitted(params, losses), but it returned a dict")
class UploadsTree(Rounds):
    def local(self, fit, shared, mine, shard):
        return fit(self.loss, shared).params


@wrong("local gives nothing", "UploadsNothing.local must return Fitted(params, losses), but it returned nothing")
class UploadsNothing(Rounds):
    def local(self, fit, shared, mine, shard):
        fit(self.loss, shared)


@wrong("local gives a plain tuple", "UploadsTuple.local must return Fitted(params, losses), but it returned a tuple")
class UploadsTuple(Rounds):
    def local(self, fit, shared, mine, shard):
        return tuple(fit(self.loss, shared))


@wrong("the upload lacks a leaf", "the upload's head.out is missing; UploadsLess.local must return the leaves")
class UploadsLess(Rounds):
    def local(self, fit, shared, mine, shard):
        params, losses, _ = fit(self.loss, shared)
        return Fitted({"body": params["body"]}, losses)


@wrong("the upload has a leaf too many", "the upload's count is not expected; UploadsMore.local must return the leaves")
class UploadsMore(Rounds):
    def local(self, fit, shared, mine, shard):
        params, losses, _ = fit(self.loss, shared)
        return Fitted(params | {"count": shard.counts}, losses)


@wrong("the upload has another shape", "; UploadsShape.local must return the leaves, shapes and dtypes of `shared`")
class UploadsShape(Rounds):
    def local(self, fit, shared, mine, shard):
        params, losses, _ = fit(self.loss, shared)
        return Fitted(params | {"head": {"out": params["head"]["out"][0]}}, losses)


@wrong("the upload has another dtype", "is float16, not float32; UploadsHalf.local must return the leaves")
class UploadsHalf(Rounds):
    def local(self, fit, shared, mine, shard):
        params, losses, _ = fit(self.loss, shared)
        return Fitted(tree.map_leaves(torch.Tensor.half, params), losses)


@wrong(
    "the upload has a number",
    "UploadsNumber.local returns as params must be a nested dict of tensors, but its rows is a float",
)
class UploadsNumber(Rounds):
    def share(self, net, params):
        return params | {"rows": torch.zeros(())}

    def local(self, fit, shared, mine, shard):
        params, losses, _ = fit(self.loss, network(shared))
        return Fitted(params | {"rows": 3.0}, losses)


@wrong("local reads a leaf that is not there", "ReadsMissing.local raised KeyError: 'head' (line")
class ReadsMissing(Rounds):
    def local(self, fit, shared, mine, shard):
        return fit(self.loss, shared | mine["head"])


@wrong("local has other arguments", "TakesLess.local() takes 3 positional arguments but 5 were given")
class TakesLess(Rounds):
    def local(self, fit, shared):
        return fit(self.loss, shared)


@wrong("losses are no tensor", "LosesList.local must return the losses that `fit` gave")
class LosesList(Rounds):
    def local(self, fit, shared, mine, shard):
        return Fitted(fit(self.loss, shared).params, [1.0])


# personalize and logits


@wrong(
    "personalize gives the tree alone",
    "DeploysTree.personalize must return Fitted(params, losses), but it returned a dict",
)
class DeploysTree(Personal):
    def personalize(self, fit, shared, mine, shard):
        return network(shared)


@wrong(
    "personalize gives nothing",
    "DeploysNothing.personalize must return Fitted(params, losses), but it returned nothing",
)
class DeploysNothing(Personal):
    def personalize(self, fit, shared, mine, shard):
        pass


@wrong("logits have too many columns", "WideLogits.logits must give one row of logits per sample")
class WideLogits(Personal):
    def logits(self, net, mine, x):
        logits = net.logits(mine, x)
        return torch.cat([logits, logits], -1)


@wrong("logits have no columns", "FlatLogits.logits must give one row of logits per sample")
class FlatLogits(Personal):
    def logits(self, net, mine, x):
        return net.logits(mine, x)[:, 0]


@wrong("logits are no tensor", "TwoLogits.logits must give one row of logits per sample")
class TwoLogits(Personal):
    def logits(self, net, mine, x):
        return net.logits(mine, x), x


@wrong("averages names no leaf", "AveragesNone.averages names a leaf that its `keep` does not return")
class AveragesNone(Personal):
    averages: ClassVar[Mapping[str, str]] = {"mean": "own"}


# losses


@wrong("the loss is a mean", "MeanLoss.local: a loss must give one number per sample, but it gave [] for a batch of 4")
class MeanLoss(Rounds):
    def loss(self, net, params, given, batch):
        return super().loss(net, params, given, batch).mean()


@wrong("the loss has two columns", "TwoLosses.local: a loss must give one number per sample, but it gave [4, 3]")
class TwoLosses(Rounds):
    def loss(self, net, params, given, batch):
        return net.logits(params, batch.x)


@wrong("the loss is no tensor", "NumberLoss.local: a loss must give one number per sample, but it gave a float")
class NumberLoss(Rounds):
    def loss(self, net, params, given, batch):
        return 0.0


@wrong(
    "the loss captures a tensor",
    "Captures.local: the loss captures the tensor 'head'; pass it as fit(loss, params, given)",
)
class Captures(Rounds):
    def local(self, fit, shared, mine, shard):
        head = shared["head"]["out"]

        def pulled(net, params, given, batch):
            return self.loss(net, params, {}, batch) + (params["head"]["out"] - head).square().sum()

        return fit(pulled, shared)


@wrong("the loss captures a tree", "CapturesTree.local: the loss captures the tensor 'shared'")
class CapturesTree(Rounds):
    def local(self, fit, shared, mine, shard):
        def pulled(net, params, given, batch):
            return self.loss(net, params, {}, batch) + (params["head"]["out"] - shared["head"]["out"]).square().sum()

        return fit(pulled, shared)


@wrong("the loss branches on a tensor", "branches in Python on the value of a tensor")
class Branches(Rounds):
    def loss(self, net, params, given, batch):
        losses = super().loss(net, params, given, batch)
        return losses * 2 if losses.mean() > 1 else losses


@wrong("the loss does not fit the given", "GivenMissing.local raised KeyError: 'pull' (line")
class GivenMissing(Rounds):
    def loss(self, net, params, given, batch):
        return super().loss(net, params, given, batch) + given["pull"].sum()


@wrong("a shape error deep inside", "Mismatched.local raised RuntimeError: ")
class Mismatched(Rounds):
    def loss(self, net, params, given, batch):
        return super().loss(net, params, given, batch) + params["head"]["out"] @ params["head"]["out"]


# randomness and changes in place


@wrong("the loss draws with torch", "RandomLoss.local draws random numbers")
class RandomLoss(Rounds):
    def loss(self, net, params, given, batch):
        return super().loss(net, params, given, batch) * torch.rand(())


@wrong("local draws with torch", "RandomLocal.local draws random numbers")
class RandomLocal(Rounds):
    def local(self, fit, shared, mine, shard):
        params, losses, _ = fit(self.loss, shared)
        return Fitted(tree.map_leaves(lambda leaf: leaf + 0.1 * torch.randn_like(leaf), params), losses)


@wrong("personalize draws with torch", "RandomPersonal.personalize draws random numbers")
class RandomPersonal(Personal):
    def personalize(self, fit, shared, mine, shard):
        return Fitted(tree.map_leaves(lambda leaf: leaf + 0.1 * torch.randn_like(leaf), network(shared)))


@wrong("local draws with NumPy", "RandomNumpy gives other numbers when it runs again, in body.")
class RandomNumpy(Rounds):
    def local(self, fit, shared, mine, shard):
        params, losses, _ = fit(self.loss, shared)
        return Fitted(tree.map_leaves(lambda leaf: leaf + np.random.default_rng().normal(), params), losses)


@wrong(
    "local changes the shared model in place",
    "InPlace or Personal changes head.out of the shared model in place; return new tensors",
)
class InPlace(Rounds):
    def local(self, fit, shared, mine, shard):
        shared["head"]["out"].mul_(0.5)
        return fit(self.loss, shared)


@wrong("personalize changes the shared model in place", "InPlacePersonal changes head.out of the shared model in place")
class InPlacePersonal(Personal):
    def personalize(self, fit, shared, mine, shard):
        shared["head"]["out"].mul_(0.5)
        return fit(Rounds().loss, network(shared))


@wrong("local changes the shard in place", "InPlaceShard or Personal changes the shard's counts in place")
class InPlaceShard(Rounds):
    def local(self, fit, shared, mine, shard):
        shard.counts.add_(1)
        return fit(self.loss, shared)


# aggregate


@wrong("aggregate drops a leaf", "head.out is missing; Drops.aggregate must return the leaves of `shared`")
class Drops(Rounds):
    def aggregate(self, shared, uploads, weights):
        return {"body": super().aggregate(shared, uploads, weights)["body"]}


@wrong("aggregate gives nothing", "AggregatesNothing.aggregate returns must be a nested dict of tensors, not nothing")
class AggregatesNothing(Rounds):
    def aggregate(self, shared, uploads, weights):
        super().aggregate(shared, uploads, weights)


@wrong(
    "aggregate gives all uploads",
    "AggregatesAll.aggregate must return the leaves of `shared`, without an axis over clients",
)
class AggregatesAll(Rounds):
    def aggregate(self, shared, uploads, weights):
        return uploads


@wrong("aggregate reads a leaf that is not there", "AggregatesMissing.aggregate raised KeyError: 'bodies'")
class AggregatesMissing(Rounds):
    def aggregate(self, shared, uploads, weights):
        return {"body": uploads["bodies"].mean(0)}


# predictors


@wrong("a predictor without answer", "NoAnswer has no `answer`; write answer(")
class NoAnswer(Predictor):
    pass


@wrong("answer gives logits alone", "BareAnswer.answer must return Answers and the next state")
class BareAnswer(Predictor):
    def answer(self, method, mine, state, samples):
        return method.logits(mine, samples.x)


@wrong("answer gives too many columns", "WideAnswer.answer must give one row of logits per sample")
class WideAnswer(Predictor):
    window = None

    def answer(self, method, mine, state, samples):
        logits = method.logits(mine, samples.x)
        return Answers(torch.cat([logits, logits], -1)), state


@wrong("answer gives too few rows", "ShortAnswer.answer must give one row of logits per sample")
class ShortAnswer(Predictor):
    window = None

    def answer(self, method, mine, state, samples):
        return Answers(method.logits(mine, samples.x)[:1]), state


@wrong("answer changes the state's leaves", "GrowingState.answer must return a state with the leaves")
class GrowingState(Predictor):
    def answer(self, method, mine, state, samples):
        return Answers(method.logits(mine, samples.x)), state | {"seen": samples.x}


@wrong("answer changes the state's shape", "GrowingLeaf.answer must return a state with the leaves")
class GrowingLeaf(Predictor):
    def start(self, method, mine, shard):
        return {"seen": shard.counts[:1]}

    def answer(self, method, mine, state, samples):
        return Answers(method.logits(mine, samples.x)), {"seen": torch.cat([state["seen"], state["seen"]])}


@wrong("start gives no tree", "StateTensor.start returns must be a nested dict of tensors")
class StateTensor(Predictor):
    def start(self, method, mine, shard):
        return shard.counts

    def answer(self, method, mine, state, samples):
        return Answers(method.logits(mine, samples.x)), state


@wrong("answer draws with torch", "RandomAnswer.answer draws random numbers")
class RandomAnswer(Predictor):
    window = None

    def answer(self, method, mine, state, samples):
        logits = method.logits(mine, samples.x)
        return Answers(logits + torch.rand_like(logits)), state


@wrong("answer reads a leaf that is not there", "AnswersMissing.answer raised KeyError: 'personal'")
class AnswersMissing(Predictor):
    def answer(self, method, mine, state, samples):
        return Answers(method.net.head(mine["personal"], method.net.features(mine["body"], samples.x))), state


@wrong("info is not one number per sample", "OddInfo.answer must give info['e'] as a tensor with one number per sample")
class OddInfo(Predictor):
    def answer(self, method, mine, state, samples):
        return Answers(method.logits(mine, samples.x), {"e": samples.x.sum()}), state


@wrong("answer changes the client's state in place", "changes head.out of `mine` in place; return")
class InPlaceAnswer(Predictor):
    def answer(self, method, mine, state, samples):
        logits = method.logits(mine, samples.x)
        mine["head"]["out"].mul_(0.9)
        return Answers(logits), state


@wrong("info with several numbers per sample", "WideInfo.answer gives info['all'] with several numbers per sample")
class WideInfo(Predictor):
    def answer(self, method, mine, state, samples):
        logits = method.logits(mine, samples.x)
        return Answers(logits, {"all": logits}), state


@wrong("info of a reserved name", "TakenInfo.answer gives info['label'], but samples have a column of that name")
class TakenInfo(Predictor):
    def answer(self, method, mine, state, samples):
        logits = method.logits(mine, samples.x)
        return Answers(logits, {"label": logits.argmax(-1)}), state


@wrong(
    "a whole stream is not the same as its samples", "Foresees answers a whole stream otherwise than its samples one by"
)
class Foresees(Predictor):
    window = None

    def answer(self, method, mine, state, samples):
        logits = method.logits(mine, samples.x)
        return Answers(logits - 5 * logits.mean(0)), state


# fields


@wrong("a field that has no hash", "ListField has a bad field (unhashable type: 'list'); use numbers")
class ListField(Rounds):
    rates: list = field(default_factory=lambda: [0.1])


@wrong("a field without a default", "Needy cannot be made without arguments")
class Needy(Rounds):
    mu: float


@wrong("a field that is a tensor", "TensorField has a bad field")
class TensorField(Rounds):
    pull: torch.Tensor = field(default_factory=lambda: torch.ones(1))


class NoDataclass(Rounds):
    def __init__(self):
        object.__setattr__(self, "mu", 0.1)


WRONG["a class that is no dataclass"] = NoDataclass, "NoDataclass.mu is not a field; make the class a frozen dataclass"
WRONG["no part at all"] = dict, "is not a part of a method; derive it from Rounds, Personal or Predictor"
WRONG["two personal parts"] = (FineTune, DeploysNothing()), "are both personal parts; a method has one"

IN_A_CHECK = {
    "a whole stream is not the same as its samples",
    "local draws with NumPy",
    "a field that has no hash",
    "a field that is a tensor",
}  # not in a single run
IN_THE_STACK = {"the loss branches on a tensor"}  # the loop can do it
