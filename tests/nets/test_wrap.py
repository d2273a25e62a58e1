import torch
from torch import nn

from fedthe import wrap_module


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.Tanh())
        self.fc = nn.Linear(16, 3)

    def forward(self, x):
        return self.fc(self.body(x))


def test_a():
    n = wrap_module(MLP)
    n.check(torch.randn(2, 3, 4, 4), stacked=True)
    print(n, n.init(0)["body"].keys())
    assert wrap_module(MLP) == n
    assert wrap_module(MLP()) != n
