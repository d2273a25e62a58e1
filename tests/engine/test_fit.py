"""Steps of optimizers, against those of torch."""

import subprocess
import sys

import pytest
import torch

from fedthe.engine.fit import Optimizer

TRAIN = """
import sys, torch
from fedthe.engine.fit import Optimizer

for name in ("sgd", "adam"):
    leaf = torch.ones(3, requires_grad=True)
    steps = Optimizer(name).over([leaf], None)
    leaf.square().sum().backward()
    steps.step()
assert "torch._dynamo" not in sys.modules
"""


@pytest.mark.parametrize(
    "settings",
    [
        Optimizer(),
        Optimizer(momentum=0.9, weight_decay=0.0),
        Optimizer("adam", 0.003),
        Optimizer("adam", weight_decay=0.1),
    ],
    ids=["sgd", "momentum", "adam", "adam with decay"],
)
@pytest.mark.parametrize("decay", [None, 0.02])
def test_steps_are_those_of_torch_bit_for_bit(settings, decay):
    torch.manual_seed(0)
    first = [torch.randn(4, 3), torch.randn(5), torch.randn(2, 3, 3, 3).contiguous(memory_format=torch.channels_last)]
    ours, theirs = ([leaf.clone().requires_grad_() for leaf in first] for _ in range(2))
    steps = settings.over(ours, decay)
    weight_decay = settings.weight_decay if decay is None else decay
    if settings.name == "adam":
        judge = torch.optim.Adam(theirs, settings.lr, weight_decay=weight_decay, foreach=True)
    else:
        judge = torch.optim.SGD(theirs, settings.lr, settings.momentum, weight_decay=weight_decay, foreach=True)
    for turn in range(6):
        for leaves, optimizer in ((ours, steps), (theirs, judge)):
            optimizer.zero_grad()
            used = leaves[turn % 2 :]  # the first leaf takes no part in every second step
            sum(((turn + 1) * leaf**3).sin().sum() for leaf in used).backward()
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(ours, first, strict=True))


def test_an_optimizer_does_not_import_the_compiler():
    subprocess.run([sys.executable, "-c", TRAIN], check=True)
