"""Torch modules as users write them: each has a last layer `fc`, and samples to go with it."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

CLASSES, VOCABULARY, PADDING = 3, 12, 0


class MLP(nn.Module):
    def __init__(self, inputs=12, width=8, classes=CLASSES):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.Tanh())
        self.fc = nn.Linear(width, classes)

    def forward(self, x):
        return self.fc(self.layers(x))


class NormedMLP(MLP):
    def __init__(self, inputs=12, width=8, classes=CLASSES):
        super().__init__(inputs, width, classes)
        self.layers.append(nn.LayerNorm(width))


class Reader(nn.Module):
    """A small transformer over tokens; 0 is padding."""

    def __init__(self, dropout=0.0, fused=False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8, padding_idx=PADDING)
        self.register_buffer("positions", torch.linspace(-1, 1, 40).view(5, 8).sin())
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.mix = nn.Linear(8, 24) if fused else None
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions
        x = self.encoder(x, src_key_padding_mask=tokens == PADDING)
        if self.mix is not None:
            x = x + F.scaled_dot_product_attention(*self.mix(x).chunk(3, -1), is_causal=True)
        return self.fc(x.mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM, **how):
        super().__init__()
        self.recurrent = kind(4, 6, **how)
        self.fc = nn.Linear(6 * (1 + how.get("bidirectional", False)), CLASSES)

    def forward(self, x):
        steps = x if self.recurrent.batch_first else x.transpose(0, 1)
        y, last = self.recurrent(steps)
        last = last[0] if isinstance(last, tuple) else last
        return self.fc(y.mean(1 if self.recurrent.batch_first else 0) + last.mean((0, 2))[:, None])


class Block(nn.Module):
    """BasicBlock of torchvision's ResNets."""

    def __init__(self, into, out, stride, norm):
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.bn1 = norm(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = norm(out)
        self.downsample = None
        if stride != 1 or into != out:
            self.downsample = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), norm(out))

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet18(nn.Module):
    """torchvision's, narrower: 8 channels for 64."""

    def __init__(self, norm=nn.BatchNorm2d, width=8, classes=CLASSES):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = norm(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        for i in range(4):
            into, out = width * 2 ** max(0, i - 1), width * 2**i
            blocks = nn.Sequential(Block(into, out, 2 if i else 1, norm), Block(out, out, 1, norm))
            setattr(self, f"layer{i + 1}", blocks)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(out, classes)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for i in range(4):
            x = getattr(self, f"layer{i + 1}")(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


def group_norm(channels):
    return nn.GroupNorm(math.gcd(32, channels), channels)


def seeded(make, seed=0, **how):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(**how)


def draw_features(n=6, shape=(12,), seed=0):
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed))


def draw_tokens(n=6, seed=0):
    """Each row ends with some padding."""
    draws = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCABULARY, (n, 5), generator=draws)
    length = torch.randint(2, 6, (n, 1), generator=draws)
    return torch.where(torch.arange(5) < length, tokens, PADDING)
