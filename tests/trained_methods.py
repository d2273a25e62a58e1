"""A small federation that all methods are trained on, once for all tests of a worker."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from fedthe import tree
from fedthe.data.plan import Settings, build
from fedthe.data.pool import Dataset, Pool
from fedthe.engine.fit import Optimizer
from fedthe.engine.shards import Shards
from fedthe.engine.train import train
from fedthe.engine.visit import Training
from fedthe.methods import ABLATIONS, METHODS
from fedthe.methods.base import Rounds
from fedthe.methods.make import methods_for
from fedthe.nets.cnn import CNN
from tiny_net import Normed

ALL = METHODS | ABLATIONS
CLASSES, SIZE, SAMPLES = 3, 16, 6
NET = CNN(CLASSES, size=SIZE)
NORMED = Normed(CLASSES, size=SIZE)
ON_NORMS = METHODS.keys() - set(methods_for(NET))  # they adapt norm layers, which the CNN has not
SETTINGS = Training(rounds=2, local_epochs=1, batch=8, crop=1, optimizer=Optimizer(lr=0.05))
PAPER = (
    *("fedavg", "gma", "memo_g", "fedavg_ft", "apfl", "fedrep", "ditto", "fedrod"),
    *("knn_per", "ttt_ft", "memo_p", "t3a", "fedthe", "fedthe_plus"),
)


def net_for(name):
    return NORMED if name in ON_NORMS else NET


@cache
def make_federation():
    """Three clients with three classes that differ in brightness, under heavy noise."""
    labels = np.arange(120) % CLASSES
    noise = np.random.default_rng(0).integers(0, 200, (120, SIZE, SIZE, 3))
    images = (noise + 25 * labels[:, None, None, None]).astype(np.uint8)
    pool = Pool("made", images, labels, ("dark", "grey", "bright"))
    return build(Dataset(pool), Settings(clients=3, dirichlet=1.0))


@cache
def make_data():
    """The clients' shards, and a test stream of each."""
    federation = make_federation()
    streams = [stream.take(np.arange(SAMPLES)) for stream in federation.tests["mixture"]]
    return Shards(federation), [(federation.inputs(s), federation.labels(s)) for s in streams]


@cache
def trained(method):
    return train(method, make_data()[0], SETTINGS, seed=0)


@dataclass(frozen=True)
class Drifting(Rounds):
    """A client keeps where its head went, and uploads it with the head."""

    def keep(self, net, params):
        return {"drift": tree.map_leaves(torch.zeros_like, params["head"])}

    def local(self, fit, shared, mine, shard):
        fitted = fit(self.loss, shared)
        went = tree.map_leaves(lambda before, after: after - before, shared["head"], fitted.params["head"])
        drift = tree.map_leaves(lambda old, new: old / 2 + new, mine["drift"], went)
        head = tree.map_leaves(lambda leaf, far: leaf + far / 10, fitted.params["head"], drift)
        return fitted._replace(params=fitted.params | {"head": head}, mine={"drift": drift})
