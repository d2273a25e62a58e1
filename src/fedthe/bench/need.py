"""The fewest FLOPs and bytes that a row needs, and the least time they take: its floor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from .. import tree
from ..engine.visit import Training
from ..methods.base import Method
from ..methods.fit import Loss
from ..methods.samples import Samples
from ..methods.two_heads import TwoHeads, mean_feature
from ..nets.net import Net
from ..tree import Tree
from ..types import Batch, Shard
from .machine import Ceilings
from .workload import CLASSES, PIXELS, SIDE, draw_params


@dataclass(frozen=True)
class Need:
    flops: float
    bytes: float

    def __mul__(self, times: float) -> Need:
        return Need(times * self.flops, times * self.bytes)

    def __add__(self, other: Need) -> Need:
        return Need(self.flops + other.flops, self.bytes + other.bytes)


def find_floor(need: Need, ceilings: Ceilings) -> tuple[float, str]:
    """Seconds, and whether arithmetic or bytes take them."""
    return max((need.flops / ceilings.flops, "arithmetic"), (need.bytes / ceilings.bytes, "bytes"))


def need_of_round(method: Method, settings: Training, clients: int, train: int) -> Need:
    """A round of one run. Each step reads and writes the parameters once, and reads the images as uint8."""
    net, params = method.net, draw_params(method.net)
    weights, head = (4 * tree.count(part) for part in (params, params["head"]))
    b = settings.batch
    batch = Batch(torch.zeros(b, 3, SIDE, SIDE), torch.arange(b) % CLASSES, torch.ones(b), torch.ones(CLASSES))
    shard = _make_shard(b)
    body = {"body": params["body"]}
    local = count_flops(lambda: _differentiate(net, method.rounds.loss, params, {}, batch)) / b
    personal = count_flops(lambda: _differentiate(net, TwoHeads().loss, params["head"], body, batch)) / b
    descriptor = count_flops(lambda: mean_feature(net, params["body"], shard)) / b
    steps = -(-train // b)
    an_epoch, a_personal_epoch = (
        Need(train * flops, steps * moved + train * PIXELS)
        for flops, moved in ((local, 2 * weights), (personal, weights + head))  # the body is read, not written
    )
    of_descriptor = Need(train * descriptor, weights - head + train * PIXELS)
    a_client = an_epoch * settings.local_epochs + a_personal_epoch * settings.personal_epochs + of_descriptor
    return a_client * clients


def need_of_answer(method: Method, samples_of_client: int) -> Need:
    """One sample: a step of the predictor, the bytes of the image, and its share of the client's deployed state."""
    shared, averages, kept = method.start(draw_params(method.net))
    mine, predictor = shared | averages | kept["rounds"] | kept["personal"], method.predictor
    state = predictor.start(method, mine, _make_shard(1))
    x, seen = torch.zeros(1, 3, SIDE, SIDE), torch.zeros(1, *predictor.augments, 3, SIDE, SIDE)
    with torch.no_grad():
        flops = count_flops(lambda: method.answer(mine, state, Samples(x, lambda positions: seen[positions])))
    return Need(flops, PIXELS + 4 * tree.count(mine) / samples_of_client)


def need_of_copy(images: int) -> Need:
    """Read and write the images once."""
    return Need(0, 2 * images * PIXELS)


def count_flops(work: Callable[[], object]) -> int:
    """Of convolutions and matrix products, as torch counts them: a multiplication and an addition are two."""
    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


def _differentiate(net: Net, loss: Loss, params: Tree, given: Tree, batch: Batch) -> None:
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in tree.flatten(params).items()}
    torch.autograd.grad(loss(net, tree.unflatten(leaves), given, batch).mean(), list(leaves.values()))


def _make_shard(rows: int) -> Shard:
    images, real = torch.zeros(rows, SIDE, SIDE, 3, dtype=torch.uint8), torch.ones(rows, dtype=torch.bool)
    labels = torch.arange(rows) % CLASSES
    return Shard(images, labels, real, torch.ones(CLASSES), images, labels, real)
