"""Small federations of a net that can be written out, for whole trainings against literal loops."""

from __future__ import annotations

import pytest
import torch

from fedthe.engine.fit import LoopFit, Optimizer
from fedthe.engine.loop import Loop
from fedthe.engine.server import sample_clients
from fedthe.engine.stack import Stack
from fedthe.engine.train import start_from, train
from fedthe.engine.visit import Training
from tiny_net import TINY, list_batches, make_shard, tiny_params

CLIENTS = [make_shard(10, 5, [0, 1], seed=1), make_shard(7, 5, [2], seed=2), make_shard(12, 5, seed=3)]
ROWS = [10, 7, 12]
LR = 0.1
SETTINGS = Training(rounds=4, participation=0.67, local_epochs=2, batch=4, crop=1, optimizer=Optimizer(lr=LR))
DECAY = SETTINGS.optimizer.weight_decay
ENGINES = {"loop": Loop, "stack": Stack, "stack of one row at a time": lambda: Stack(rows=1)}
every_engine = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)


def draw_batches(k, number, phase="local", settings=SETTINGS, clients=CLIENTS):
    """All that client k trains on in a round, in order: (x, y)."""
    s, path = settings, (0, phase, number)
    return list_batches(LoopFit(TINY, clients[k], s.optimizer, s.epochs(phase), s.batch, s.flip, s.crop, path, k))


def sample(number, settings=SETTINGS):
    return sample_clients(3, settings.participation, 0, number)


def run_literally(shared, own, local, rounds=SETTINGS.rounds):
    """What is shared, a list of tensors, and what every client keeps, after all rounds. The server takes the mean of
    uploads, weighted by rows. local(shared, own, batches) gives the upload, and what the client keeps."""
    own = [own for _ in CLIENTS]
    for number in range(rounds):
        sent, sampled = [], sample(number)
        assert len(sampled) == 2
        for k in sampled:
            upload, own[k] = local(shared, own[k], draw_batches(k, number))
            sent.append(upload)
        total = sum(ROWS[k] for k in sampled)
        shared = [sum(ROWS[k] * up[i] for k, up in zip(sampled, sent, strict=True)) / total for i in range(len(shared))]
    return shared, own


def train_in_doubles(method, engine=None, settings=SETTINGS, clients=CLIENTS):
    return train(method, clients, settings, 0, start_from(method, tiny_params(), len(clients)), engine)


def assert_near(ones, others, tolerance=1e-11):
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
