from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedthe import tree
from fedthe.errors import InputError
from fedthe.nets import CCT4, CNN, NETS, ResNet20GN
from fedthe.nets.standardized import standardize

torch.set_num_threads(1)  # tiny tensors, and other tests beside this one


def images(n=2, channels=3, size=32, dtype=torch.float64):
    return torch.rand(n, channels, size, size, generator=torch.Generator().manual_seed(0), dtype=dtype) * 2 - 1


def jittered(net, seed=0):
    """A start in float64 whose norms and biases are not ones and zeros, so that each of them counts."""
    draws = torch.Generator().manual_seed(seed)
    return tree.map_leaves(
        lambda leaf: leaf.double() + 0.1 * torch.randn(leaf.shape, generator=draws, dtype=torch.float64), net.init(seed)
    )


# The same networks as modules, written from the papers with the layers of torch.nn.


class RefCNN(nn.Module):
    def __init__(self, channels, size, classes):
        super().__init__()
        side = ((size - 4) // 2 - 4) // 2
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 32, 5, bias=False),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, bias=False),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * side * side, 64, bias=False),
            nn.ReLU(),
            nn.Linear(64, classes, bias=False),
        )

    def forward(self, x):
        return self.layers(x)

    def ours(self, deep):
        conv1, conv2, fc, out = (self.layers[i].weight for i in (0, 3, 7, 9))
        if deep:
            return {"body": {"conv1": conv1, "conv2": conv2}, "head": {"hidden": fc, "out": out}}
        return {"body": {"conv1": conv1, "conv2": conv2, "fc": fc}, "head": {"out": out}}


def both(module):
    return {"weight": module.weight, "bias": module.bias}


class RefBlock(nn.Module):
    def __init__(self, into, out):
        super().__init__()
        stride = 1 if into == out else 2
        self.conv1 = nn.Conv2d(into, out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(2, out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(2, out)
        self.short = nn.Identity()
        if into != out:
            self.short = nn.Sequential(nn.Conv2d(into, out, 1, stride=stride, bias=False), nn.GroupNorm(2, out))

    def forward(self, x):
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.short(x))

    def ours(self):
        mine = {"conv1": self.conv1.weight, "norm1": both(self.norm1), "conv2": self.conv2.weight}
        mine |= {"norm2": both(self.norm2)}
        if isinstance(self.short, nn.Sequential):
            mine |= {"short": self.short[0].weight, "short_norm": both(self.short[1])}
        return mine


def ref_head(dim, classes, deep):
    out = nn.Linear(dim, classes, bias=False)
    return nn.Sequential(nn.Linear(dim, dim, bias=False), nn.ReLU(), out) if deep else nn.Sequential(out)


def our_head(head):
    return {"hidden": head[0].weight, "out": head[2].weight} if len(head) == 3 else {"out": head[0].weight}


class RefResNet(nn.Module):
    def __init__(self, channels, classes, deep, width):
        super().__init__()
        w = 16 * width
        self.conv, self.norm = nn.Conv2d(channels, w, 3, padding=1, bias=False), nn.GroupNorm(2, w)
        widths = [w, w, w, w, 2 * w, 2 * w, 2 * w, 4 * w, 4 * w, 4 * w]
        self.blocks = nn.Sequential(*[RefBlock(a, b) for a, b in itertools.pairwise(widths)])
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), ref_head(4 * w, classes, deep)

    def forward(self, x):
        return self.head(self.pool(self.blocks(torch.relu(self.norm(self.conv(x))))).flatten(1))

    def ours(self):
        body = {"conv": self.conv.weight, "norm": both(self.norm)}
        body |= {f"block{i}": block.ours() for i, block in enumerate(self.blocks)}
        return {"body": body, "head": our_head(self.head)}


class RefLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(128), nn.LayerNorm(128)
        self.attention = nn.MultiheadAttention(128, 2, batch_first=True)
        nn.init.zeros_(self.attention.in_proj_bias)  # the only bias of the module that CCT has not
        self.mlp = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = self.norm2(x)
        return x + self.mlp(x)

    def ours(self):
        mine = {"norm1": both(self.norm1), "norm2": both(self.norm2), "qkv": self.attention.in_proj_weight}
        mine |= {"proj": both(self.attention.out_proj)}
        return mine | {"mlp1": both(self.mlp[0]), "mlp2": both(self.mlp[2])}


class RefCCT(nn.Module):
    def __init__(self, channels, size, classes, deep):
        super().__init__()
        self.tokens = nn.Sequential(
            nn.Conv2d(channels, 64, 3, padding=1, bias=False),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(64, 128, 3, padding=1, bias=False),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
            nn.Flatten(2),
        )
        self.positions = nn.Parameter(torch.randn((size // 4) ** 2, 128))
        self.layers = nn.Sequential(*[RefLayer() for _ in range(4)])
        self.norm, self.pool = nn.LayerNorm(128), nn.Linear(128, 1)  # with the bias that ours does without
        self.head = ref_head(128, classes, deep)

    def forward(self, x):
        x = self.norm(self.layers(self.tokens(x).transpose(1, 2) + self.positions))
        share = torch.softmax(self.pool(x), dim=1).transpose(1, 2)
        return self.head(torch.bmm(share, x).squeeze(1))

    def ours(self):
        body = {"conv1": self.tokens[0].weight, "conv2": self.tokens[3].weight, "positions": self.positions}
        body |= {f"layer{i}": layer.ours() for i, layer in enumerate(self.layers)}
        body |= {"norm": both(self.norm), "pool": self.pool.weight}
        return {"body": body, "head": our_head(self.head)}


def pair(name, channels, size, classes, deep):
    """Our network, the module, and the module's weights as our tree."""
    kwargs = {"classes": classes, "channels": channels, "size": size, "head_layers": 2 if deep else 1}
    torch.manual_seed(0)
    if name == "cnn":
        module = RefCNN(channels, size, classes).double()
        return CNN(**kwargs), module, module.ours(deep)
    if name == "resnet20_gn":
        module = RefResNet(channels, classes, deep, width=2).double()
        net = ResNet20GN(**kwargs, width=2)
    else:
        module, net = RefCCT(channels, size, classes, deep).double(), CCT4(**kwargs)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
        for module_ in module.modules():
            if isinstance(module_, nn.MultiheadAttention):
                module_.in_proj_bias.zero_()
    return net, module, module.ours()


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize(("channels", "size", "classes"), [(3, 32, 10), (1, 28, 2)])
@pytest.mark.parametrize("name", NETS)
def test_equals_the_module(name, channels, size, classes, deep):
    net, module, params = pair(name, channels, size, classes, deep)
    start = net.init(0)
    shapes = tree.map_leaves(lambda leaf: leaf.shape, start)
    assert tree.flatten(shapes) == tree.flatten(tree.map_leaves(lambda leaf: leaf.shape, params))

    x = images(3, channels, size)
    want = module(x)
    want.square().sum().backward()
    mine = tree.map_leaves(lambda leaf: leaf.detach().clone().requires_grad_(), params)
    got = net.logits(mine, x)
    got.square().sum().backward()
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    for (place, leaf), reference in zip(tree.flatten(mine).items(), tree.flatten(params).values(), strict=True):
        torch.testing.assert_close(
            leaf.grad, reference.grad, rtol=1e-9, atol=1e-10, msg=lambda m, at=place: f"{at}: {m}"
        )


def test_counts():
    # CNN, no biases: 5*5*3*32 + 5*5*32*64 + (64*5*5)*64 + 64*10
    assert 2400 + 51200 + 102400 + 640 == 156_640
    assert tree.count(CNN(10).init(0)) == 156_640
    assert tree.count(CNN(10, head_layers=2).init(0)) == 156_640  # the same network, cut one layer earlier

    # ResNet20, every 3x3 convolution 9*in*out, every norm 2*out, a 1x1 convolution and a norm where the width changes
    stem = 9 * 3 * 16 + 2 * 16
    stage1 = 6 * (9 * 16 * 16 + 2 * 16)
    stage2 = 9 * 16 * 32 + 5 * 9 * 32 * 32 + 6 * 2 * 32 + (16 * 32 + 2 * 32)
    stage3 = 9 * 32 * 64 + 5 * 9 * 64 * 64 + 6 * 2 * 64 + (32 * 64 + 2 * 64)
    assert (stem, stage1, stage2, stage3) == (464, 14_016, 51_648, 205_696)
    resnet = tree.count(ResNet20GN(10).init(0))
    assert resnet == stem + stage1 + stage2 + stage3 + 64 * 10 == 272_464
    assert round(resnet / 1e6, 2) == 0.27  # He et al., table 6
    # their parameter-free shortcuts and a bias in the head instead: the 269,722 of the original
    assert resnet - (16 * 32 + 2 * 32) - (32 * 64 + 2 * 64) + 10 == 269_722

    # CCT-4/3x2: tokenizer, positions, layers (two norms, qkv, three biased linear layers), norm, pooling
    tokenizer, positions = 9 * 3 * 64 + 9 * 64 * 128, 64 * 128
    layer = 2 * 2 * 128 + 3 * 128 * 128 + 3 * (128 * 128 + 128)
    assert (tokenizer, positions, layer) == (75_456, 8_192, 99_200)
    cct = tree.count(CCT4(10).init(0))
    assert cct == tokenizer + positions + 4 * layer + 2 * 128 + 128 + 128 * 10 == 482_112
    assert round(cct / 1e6, 2) == 0.48  # Hassani et al., table 1


@pytest.mark.parametrize("head_layers", [1, 2])
@pytest.mark.parametrize(("channels", "size", "classes"), [(3, 32, 10), (1, 28, 2), (3, 28, 86), (1, 32, 86)])
@pytest.mark.parametrize("name", NETS)
def test_shapes(name, channels, size, classes, head_layers):
    net = NETS[name](classes, channels, size, head_layers)
    params = net.init(0)
    assert set(params) == {"body", "head"}
    x = images(2, channels, size, torch.float32)
    h = net.features(params["body"], x)
    assert h.shape == (2, net.feature_dim)
    assert net.head(params["head"], h).shape == (2, classes)
    torch.testing.assert_close(net.logits(params, x), net.head(params["head"], h), rtol=0, atol=0)


def test_feature_dims():
    assert [net(10).feature_dim for net in NETS.values()] == [64, 64, 128]
    assert ResNet20GN(86, width=4).feature_dim == 256
    assert CNN(10, head_layers=2).feature_dim == 1600


@pytest.mark.parametrize("head_layers", [1, 2])
@pytest.mark.parametrize("name", NETS)
def test_stacked_equals_loop(name, head_layers):
    net = NETS[name](10, head_layers=head_layers)
    rows = [jittered(net, seed) for seed in range(3)]
    x = torch.stack([images(2) * scale for scale in (1, 0.5, -1)])

    def loss(params, x):
        return net.logits(params, x).square().sum()

    lifted = torch.func.vmap(torch.func.grad_and_value(loss))(tree.stack(rows), x)
    for i in range(3):
        grads, value = torch.func.grad_and_value(loss)(rows[i], x[i])
        torch.testing.assert_close(lifted[1][i], value, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(tree.take(lifted[0], i), grads, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("head_layers", [1, 2])
@pytest.mark.parametrize("name", NETS)
def test_every_parameter_learns(name, head_layers):
    net = NETS[name](10, head_layers=head_layers)
    params = tree.map_leaves(lambda leaf: leaf.requires_grad_(), net.init(1))
    F.cross_entropy(net.logits(params, images(4, dtype=torch.float32)), torch.arange(4)).backward()
    silent = [place for place, leaf in tree.flatten(params).items() if not leaf.grad.abs().max() > 1e-9]
    assert silent == []


@pytest.mark.parametrize("name", NETS)
def test_starts(name):
    net = NETS[name](10)
    one, again, other = tree.flatten(net.init(3)), tree.flatten(net.init(3)), tree.flatten(net.init(4))
    for place, leaf in one.items():
        assert isinstance(leaf, torch.Tensor)
        assert leaf.dtype == torch.float32
        assert leaf.is_leaf
        assert torch.equal(leaf, again[place])
        constant = leaf.ndim == 1
        assert torch.equal(leaf, other[place]) == constant, place
        if constant:
            assert (leaf == float("norm" in place and place.endswith("weight"))).all(), place
            continue
        inputs, outputs, kernel = leaf[0].numel(), len(leaf), leaf[0, 0].numel()
        if name == "cct4":
            conv = math.sqrt(2 / inputs)
            std = conv if leaf.ndim == 4 else 0.2 if place.endswith("positions") else 0.02
        elif name == "resnet20_gn" and leaf.ndim == 4:
            std = math.sqrt(2 / (kernel * outputs))
        else:
            std = 1 / math.sqrt(3 * inputs)
            assert leaf.abs().max() <= 1 / math.sqrt(inputs)
        room = 4 / math.sqrt(2 * leaf.numel())  # four deviations of the estimate
        assert abs(float(leaf.double().std()) / std - 1) < room, place
        assert abs(float(leaf.double().mean())) < 4 * std / math.sqrt(leaf.numel()), place


def test_starts_stay_what_they_were():
    # to the last bit: a change here changes every number the package reports
    drawn = CNN(10).init(0)["body"]["conv1"].flatten()[:3]
    assert drawn.tolist() == [-0.005144941154867411, -0.008641690015792847, 0.10801948606967926]


def test_a_parameter_does_not_depend_on_the_others():
    few, many = CNN(2).init(0), CNN(86).init(0)
    assert torch.equal(few["body"]["fc"], many["body"]["fc"])
    assert torch.equal(few["head"]["out"], many["head"]["out"][:2])


@pytest.mark.parametrize("name", NETS)
def test_dtype_and_memory_layout_pass_through(name):
    net = NETS[name](10)
    params, x = net.init(0), images(2, dtype=torch.float32)
    assert net.logits(tree.map_leaves(torch.Tensor.double, params), x.double()).dtype == torch.float64
    last = net.logits(params, x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(last, net.logits(params, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NETS)
def test_samples_do_not_see_each_other(name):
    net = NETS[name](10)
    params, x = jittered(net), images(3)
    together = net.logits(params, x)
    torch.testing.assert_close(together[1:2], net.logits(params, x[1:2]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: CNN(10, size=15), "16 pixels"),
        (lambda: CNN(0), "at least one class"),
        (lambda: CCT4(10, channels=0), "channel"),
        (lambda: ResNet20GN(10, head_layers=3), "head_layers"),
        (lambda: ResNet20GN(10, groups=3), "groups"),
    ],
)
def test_refusals(make, says):
    with pytest.raises(InputError, match=says):
        make()


def test_the_smallest_images():
    for net in (CNN(10, size=16), ResNet20GN(10, size=1), CCT4(10, size=1)):
        assert net.logits(net.init(0), images(2, 3, net.size, torch.float32)).isfinite().all()


@pytest.mark.parametrize("name", NETS)
def test_standardized_images(name):
    net = NETS[name](4, 3, 16, 1)
    means, deviations = (0.1, -0.2, 0.3), (0.5, 0.25, 2.0)
    same, x = standardize(net, means, deviations), torch.rand(2, 3, 16, 16) * 2 - 1
    params = same.init(0)
    assert_same_trees(params, net.init(0))
    by_hand = torch.stack([(x[:, c] - means[c]) / deviations[c] for c in range(3)], 1)
    torch.testing.assert_close(same.features(params["body"], x), net.features(params["body"], by_hand), rtol=0, atol=0)
    torch.testing.assert_close(same.logits(params, x), net.logits(params, by_hand), rtol=0, atol=0)
    assert (same.feature_dim, same.hidden_dim, same.classes) == (net.feature_dim, net.hidden_dim, 4)


def assert_same_trees(a, b):
    a, b = tree.flatten(a), tree.flatten(b)
    assert list(a) == list(b)
    assert all(torch.equal(leaf, b[name]) for name, leaf in a.items())
