"""Methods that are wrong in one way each."""

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


def wrong(name):
    def register(kind):
        WRONG[name] = dataclass(frozen=True)(kind)
        return kind

    return register


# share


@wrong("share gives no tree")
class SharesTensor(Rounds):
    def share(self, net, params):
        return params["head"]["out"]


@wrong("share gives a tree with no tensors")
class SharesNumber(Rounds):
    def share(self, net, params):
        return params | {"step": 0}


@wrong("share leaves out the head")
class SharesBody(Rounds):
    def share(self, net, params):
        return {"body": params["body"]}


@wrong("share asks for a leaf that is not there")
class SharesMissing(Rounds):
    def share(self, net, params):
        return {"body": params["bodies"]}


@wrong("share gives nothing back")
class SharesNone(Rounds):
    def share(self, net, params):
        params["more"] = params["head"]


# keep


@wrong("keep gives no tree")
class KeepsTensor(Personal):
    def keep(self, net, params):
        return params["head"]["out"]


@wrong("keep gives a number")
class KeepsNumber(Personal):
    def keep(self, net, params):
        return {"alpha": 0.5}


@wrong("keep names a leaf that personalize gives another shape")
class KeepsOther(Personal):
    def keep(self, net, params):
        return {"head": params["head"]}

    def personalize(self, fit, shared, mine, shard):
        return Fitted({"head": {"out": mine["head"]["out"][:1]}})


@wrong("keep names a branch that personalize gives other leaves")
class KeepsBranch(Personal):
    def keep(self, net, params):
        return {"head": params["head"]}

    def personalize(self, fit, shared, mine, shard):
        return Fitted({"head": {"in": mine["head"]["out"]}})


@wrong("keep names a leaf that personalize gives another dtype")
class KeepsDouble(Personal):
    def keep(self, net, params):
        return {"head": params["head"]}

    def personalize(self, fit, shared, mine, shard):
        return Fitted(tree.map_leaves(torch.Tensor.double, mine))


@wrong("local changes a leaf that keep does not name")
class KeepsNothing(Rounds):
    def local(self, fit, shared, mine, shard):
        return fit(self.loss, shared)._replace(mine={"previous": shared["body"]})


@wrong("local changes the shape of a leaf that it keeps")
class KeepsLess(Rounds):
    def keep(self, net, params):
        return {"previous": params["head"]["out"]}

    def local(self, fit, shared, mine, shard):
        return fit(self.loss, shared)._replace(mine={"previous": mine["previous"][0]})


# local


@wrong("local gives the tree alone")
class UploadsTree(Rounds):
    def local(self, fit, shared, mine, shard):
        return fit(self.loss, shared).params


@wrong("local gives nothing")
class UploadsNothing(Rounds):
    def local(self, fit, shared, mine, shard):
        fit(self.loss, shared)


@wrong("local gives a plain tuple")
class UploadsTuple(Rounds):
    def local(self, fit, shared, mine, shard):
        return tuple(fit(self.loss, shared))


@wrong("the upload lacks a leaf")
class UploadsLess(Rounds):
    def local(self, fit, shared, mine, shard):
        params, losses, _ = fit(self.loss, shared)
        return Fitted({"body": params["body"]}, losses)


@wrong("the upload has a leaf too many")
class UploadsMore(Rounds):
    def local(self, fit, shared, mine, shard):
        params, losses, _ = fit(self.loss, shared)
        return Fitted(params | {"count": shard.counts}, losses)


@wrong("the upload has another shape")
class UploadsShape(Rounds):
    def local(self, fit, shared, mine, shard):
        params, losses, _ = fit(self.loss, shared)
        return Fitted(params | {"head": {"out": params["head"]["out"][0]}}, losses)


@wrong("the upload has another dtype")
class UploadsHalf(Rounds):
    def local(self, fit, shared, mine, shard):
        params, losses, _ = fit(self.loss, shared)
        return Fitted(tree.map_leaves(torch.Tensor.half, params), losses)


@wrong("the upload has a number")
class UploadsNumber(Rounds):
    def share(self, net, params):
        return params | {"rows": torch.zeros(())}

    def local(self, fit, shared, mine, shard):
        params, losses, _ = fit(self.loss, network(shared))
        return Fitted(params | {"rows": 3.0}, losses)


@wrong("local reads a leaf that is not there")
class ReadsMissing(Rounds):
    def local(self, fit, shared, mine, shard):
        return fit(self.loss, shared | mine["head"])


@wrong("local has other arguments")
class TakesLess(Rounds):
    def local(self, fit, shared):
        return fit(self.loss, shared)


@wrong("losses are no tensor")
class LosesList(Rounds):
    def local(self, fit, shared, mine, shard):
        return Fitted(fit(self.loss, shared).params, [1.0])


# personalize and logits


@wrong("personalize gives the tree alone")
class DeploysTree(Personal):
    def personalize(self, fit, shared, mine, shard):
        return network(shared)


@wrong("personalize gives nothing")
class DeploysNothing(Personal):
    def personalize(self, fit, shared, mine, shard):
        pass


@wrong("logits have too many columns")
class WideLogits(Personal):
    def logits(self, net, mine, x):
        logits = net.logits(mine, x)
        return torch.cat([logits, logits], -1)


@wrong("logits have no columns")
class FlatLogits(Personal):
    def logits(self, net, mine, x):
        return net.logits(mine, x)[:, 0]


@wrong("logits are no tensor")
class TwoLogits(Personal):
    def logits(self, net, mine, x):
        return net.logits(mine, x), x


@wrong("averages names no leaf")
class AveragesNone(Personal):
    averages: ClassVar[Mapping[str, str]] = {"mean": "own"}


# losses


@wrong("the loss is a mean")
class MeanLoss(Rounds):
    def loss(self, net, params, given, batch):
        return super().loss(net, params, given, batch).mean()


@wrong("the loss has two columns")
class TwoLosses(Rounds):
    def loss(self, net, params, given, batch):
        return net.logits(params, batch.x)


@wrong("the loss is no tensor")
class NumberLoss(Rounds):
    def loss(self, net, params, given, batch):
        return 0.0


@wrong("the loss captures a tensor")
class Captures(Rounds):
    def local(self, fit, shared, mine, shard):
        head = shared["head"]["out"]

        def pulled(net, params, given, batch):
            return self.loss(net, params, {}, batch) + (params["head"]["out"] - head).square().sum()

        return fit(pulled, shared)


@wrong("the loss captures a tree")
class CapturesTree(Rounds):
    def local(self, fit, shared, mine, shard):
        def pulled(net, params, given, batch):
            return self.loss(net, params, {}, batch) + (params["head"]["out"] - shared["head"]["out"]).square().sum()

        return fit(pulled, shared)


@wrong("the loss branches on a tensor")
class Branches(Rounds):
    def loss(self, net, params, given, batch):
        losses = super().loss(net, params, given, batch)
        return losses * 2 if losses.mean() > 1 else losses


@wrong("the loss does not fit the given")
class GivenMissing(Rounds):
    def loss(self, net, params, given, batch):
        return super().loss(net, params, given, batch) + given["pull"].sum()


@wrong("a shape error deep inside")
class Mismatched(Rounds):
    def loss(self, net, params, given, batch):
        return super().loss(net, params, given, batch) + params["head"]["out"] @ params["head"]["out"]


# randomness and changes in place


@wrong("the loss draws with torch")
class RandomLoss(Rounds):
    def loss(self, net, params, given, batch):
        return super().loss(net, params, given, batch) * torch.rand(())


@wrong("local draws with torch")
class RandomLocal(Rounds):
    def local(self, fit, shared, mine, shard):
        params, losses, _ = fit(self.loss, shared)
        return Fitted(tree.map_leaves(lambda leaf: leaf + 0.1 * torch.randn_like(leaf), params), losses)


@wrong("personalize draws with torch")
class RandomPersonal(Personal):
    def personalize(self, fit, shared, mine, shard):
        return Fitted(tree.map_leaves(lambda leaf: leaf + 0.1 * torch.randn_like(leaf), network(shared)))


@wrong("local draws with NumPy")
class RandomNumpy(Rounds):
    def local(self, fit, shared, mine, shard):
        params, losses, _ = fit(self.loss, shared)
        return Fitted(tree.map_leaves(lambda leaf: leaf + np.random.default_rng().normal(), params), losses)


@wrong("local changes the shared model in place")
class InPlace(Rounds):
    def local(self, fit, shared, mine, shard):
        shared["head"]["out"].mul_(0.5)
        return fit(self.loss, shared)


@wrong("personalize changes the shared model in place")
class InPlacePersonal(Personal):
    def personalize(self, fit, shared, mine, shard):
        shared["head"]["out"].mul_(0.5)
        return fit(Rounds().loss, network(shared))


@wrong("local changes the shard in place")
class InPlaceShard(Rounds):
    def local(self, fit, shared, mine, shard):
        shard.counts.add_(1)
        return fit(self.loss, shared)


# aggregate


@wrong("aggregate drops a leaf")
class Drops(Rounds):
    def aggregate(self, shared, uploads, weights):
        return {"body": super().aggregate(shared, uploads, weights)["body"]}


@wrong("aggregate gives nothing")
class AggregatesNothing(Rounds):
    def aggregate(self, shared, uploads, weights):
        super().aggregate(shared, uploads, weights)


@wrong("aggregate gives all uploads")
class AggregatesAll(Rounds):
    def aggregate(self, shared, uploads, weights):
        return uploads


@wrong("aggregate reads a leaf that is not there")
class AggregatesMissing(Rounds):
    def aggregate(self, shared, uploads, weights):
        return {"body": uploads["bodies"].mean(0)}


# predictors


@wrong("a predictor without answer")
class NoAnswer(Predictor):
    pass


@wrong("answer gives logits alone")
class BareAnswer(Predictor):
    def answer(self, method, mine, state, samples):
        return method.logits(mine, samples.x)


@wrong("answer gives too many columns")
class WideAnswer(Predictor):
    window = None

    def answer(self, method, mine, state, samples):
        logits = method.logits(mine, samples.x)
        return Answers(torch.cat([logits, logits], -1)), state


@wrong("answer gives too few rows")
class ShortAnswer(Predictor):
    window = None

    def answer(self, method, mine, state, samples):
        return Answers(method.logits(mine, samples.x)[:1]), state


@wrong("answer changes the state's leaves")
class GrowingState(Predictor):
    def answer(self, method, mine, state, samples):
        return Answers(method.logits(mine, samples.x)), state | {"seen": samples.x}


@wrong("answer changes the state's shape")
class GrowingLeaf(Predictor):
    def start(self, method, mine, shard):
        return {"seen": shard.counts[:1]}

    def answer(self, method, mine, state, samples):
        return Answers(method.logits(mine, samples.x)), {"seen": torch.cat([state["seen"], state["seen"]])}


@wrong("start gives no tree")
class StateTensor(Predictor):
    def start(self, method, mine, shard):
        return shard.counts

    def answer(self, method, mine, state, samples):
        return Answers(method.logits(mine, samples.x)), state


@wrong("answer draws with torch")
class RandomAnswer(Predictor):
    window = None

    def answer(self, method, mine, state, samples):
        logits = method.logits(mine, samples.x)
        return Answers(logits + torch.rand_like(logits)), state


@wrong("answer reads a leaf that is not there")
class AnswersMissing(Predictor):
    def answer(self, method, mine, state, samples):
        return Answers(method.net.head(mine["personal"], method.net.features(mine["body"], samples.x))), state


@wrong("info is not one number per sample")
class OddInfo(Predictor):
    def answer(self, method, mine, state, samples):
        return Answers(method.logits(mine, samples.x), {"e": samples.x.sum()}), state


# fields


@wrong("a field that has no hash")
class ListField(Rounds):
    rates: list = field(default_factory=lambda: [0.1])


@wrong("a field without a default")
class Needy(Rounds):
    mu: float


@wrong("a field that is a tensor")
class TensorField(Rounds):
    pull: torch.Tensor = field(default_factory=lambda: torch.ones(1))


class NoDataclass(Rounds):
    def __init__(self):
        object.__setattr__(self, "mu", 0.1)


WRONG["a class that is no dataclass"] = NoDataclass
WRONG["no part at all"] = dict
WRONG["two personal parts"] = (FineTune, WRONG["personalize gives nothing"])
