"""Every module that cannot be a network is refused in a sentence that says what to do."""

import random
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedthe.errors import InputError
from fedthe.nets.wrap import wrap_module
from torch_modules import CLASSES, MLP, Reader, Recurrent, ResNet18, draw_features, draw_tokens, seeded


def changed(change, make=MLP):
    """A module after `change`."""
    module = seeded(make)
    change(module)
    return module


def replace_layer(name, layer):
    return changed(lambda module: setattr(module, name, layer))


def add_layer(layer):
    return changed(lambda module: module.layers.append(layer))


class BatchNormAct(nn.BatchNorm1d):
    """As timm's: a norm with an activation inside."""


def tie(module):
    module.encoder.layers[0].linear1.weight = module.fc.weight


BY_LAYER = {
    "no such head": (MLP, {"head": "fcc"}, r"MLP has no layer 'fcc'; name its last linear layer: did you mean fc\?"),
    "no head": (lambda: nn.Sequential(nn.Flatten(), nn.ReLU()), {}, "no layer 'fc' and no other nn.Linear"),
    "empty head": (MLP, {"head": ""}, "name its last linear layer"),
    "head in a sequence": (lambda: nn.Sequential(nn.Linear(4, 3)), {}, r"last linear layer: choose from 0\."),
    "head of another kind": (MLP, {"head": "layers"}, "the head layers must be a plain nn.Linear, but is Sequential"),
    "parametrized head": (
        lambda: changed(lambda module: nn.utils.parametrizations.weight_norm(module.fc)),
        {},
        "the head fc must be a plain nn.Linear, but is ParametrizedLinear",
    ),
    "frozen head": (lambda: changed(lambda m: m.fc.requires_grad_(False)), {}, "the head fc is frozen"),
    "head twice": (lambda: changed(lambda m: m.layers.append(m.fc)), {}, "the head fc is also its layer layers.3"),
    "tied head": (
        lambda: changed(lambda m: setattr(m.layers[1], "bias", m.fc.bias)),
        {},
        "the head fc shares its weight with layers.1.bias; give it a weight of its own",
    ),
    "head alone": (lambda: changed(lambda m: m.layers.requires_grad_(False)), {}, "trains no parameters but those of"),
    "batch norm": (ResNet18, {}, r'bn1 is BatchNorm2d, which mixes the samples of a batch; use normalise="group"'),
    "frozen batch norm": (lambda: seeded(ResNet18).eval(), {}, 'use normalise="group"'),
    "batch norm without statistics": (lambda: add_layer(nn.BatchNorm1d(8, track_running_stats=False)), {}, "mixes"),
    "kind of batch norm": (lambda: add_layer(BatchNormAct(8)), {"normalise": "group"}, "is a BatchNorm and more"),
    "instance norm": (
        lambda: add_layer(nn.InstanceNorm2d(8, track_running_stats=True)),
        {},
        "keeps running statistics; make it with track_running_stats=False",
    ),
    "dropout": (
        lambda: add_layer(nn.Dropout(0.1)),
        {},
        r'layers.3 is Dropout, which draws.* use dropout="off"',
    ),
    "dropout of attention": (lambda: Reader(dropout=0.1), {}, 'MultiheadAttention, which draws.* use dropout="off"'),
    "dropout of an lstm": (lambda: Recurrent(num_layers=2, dropout=0.1), {}, "LSTM, which draws random numbers"),
    "lazy": (lambda: add_layer(nn.LazyLinear(8)), {}, "has no weights yet; give it one batch before you wrap it"),
    "renormed embedding": (
        lambda: changed(lambda m: setattr(m.embedding, "max_norm", 1.0), Reader),
        {},
        "has max_norm or scale_grad_by_freq",
    ),
    "compiled": (lambda: torch.jit.trace(MLP(), torch.zeros(1, 12)), {}, "wrap the plain module inside"),
    "parallel": (lambda: nn.DataParallel(MLP()), {}, "DataParallel is compiled or parallel; wrap the plain module"),
    "not to be copied": (
        lambda: changed(lambda m: setattr(m, "lock", threading.Lock())),
        {},
        r"MLP cannot be copied \(.*\); leave out the attribute that prevents it",
    ),
}


@pytest.mark.parametrize("name", BY_LAYER)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_module_is_refused_by_its_layers(name):
    make, how, says = BY_LAYER[name]
    with pytest.raises(InputError, match=says) as refused:
        wrap_module(make(), **how)
    assert str(refused.value).count(". ") == 0  # one sentence


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"normalise": "layer"}, 'normalise must be "group" or None'),
        ({"dropout": 0.5}, 'dropout must be "off" or None'),
        ({"defaults": {"lr": 0.1}}, r"defaults must be a fedthe\.Defaults"),
    ],
)
def test_options_are_checked(how, says):
    with pytest.raises(InputError, match=says):
        wrap_module(MLP, **how)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: 3, "returns 'int', not a torch module"),
        (lambda: 1 / 0, r"fails \(division by zero\)"),
        (lambda: MLP(width=random.choice(range(2, 10**6))), "makes other weights in every call"),
        (5, "is no torch module"),
    ],
)
def test_functions_are_checked(make, says):
    with pytest.raises(InputError, match=says):
        wrap_module(make)


def test_a_function_must_make_modules_of_one_shape():
    net = wrap_module(lambda: MLP(width=int(torch.randint(2, 10**6, ()))))
    with pytest.raises(InputError, match="makes modules of different shapes; only weights may differ"):
        net.init(1)


def test_dropout_can_be_turned_off():
    net = wrap_module(seeded(Reader, dropout=0.5), dropout="off")
    assert net != wrap_module(seeded(Reader, dropout=0.5).eval(), dropout="off", normalise="group")
    module = seeded(Reader)
    tokens = draw_tokens()
    torch.testing.assert_close(net.logits(net.init(0), tokens), module(tokens))
    net.check(tokens, stacked=True)


class Own(MLP):
    """Behaves as `act` says, which sees the module and the features."""

    def __init__(self, act):
        super().__init__()
        self.act = act
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        return self.fc(self.act(self, self.layers(x)))


def count(module, h):
    if module.training:
        module.seen += h.detach().mean(0)
    return h


def remember(module, h):
    if not hasattr(module, "copied"):
        module.copied = module.layers[1].weight.detach().clone()
    return h + module.copied.sum()


class Late(MLP):
    def forward(self, x):
        return super().forward(x).log_softmax(-1)


class Named(MLP):
    def forward(self, x):
        return {"logits": super().forward(x)}


class Picky(MLP):
    def forward(self, x):
        return super().forward(x)[:, :CLASSES]


class Reshaped(MLP):
    def forward(self, x):
        return super().forward(x).reshape(len(x), CLASSES)


BY_BEHAVIOUR = {
    "random": (lambda: Own(lambda m, h: h + torch.rand_like(h)), "draws random numbers in every forward pass"),
    "dropout function": (lambda: Own(lambda m, h: F.dropout(h, 0.5)), "draws random numbers in every forward pass"),
    "dropout in training": (
        lambda: Own(lambda m, h: F.dropout(h, 0.5, m.training)),
        'gives other logits in training mode, as with dropout; use dropout="off"',
    ),
    "batch": (lambda: Own(lambda m, h: h - h.mean(0)), "gives a sample other logits in another batch"),
    "buffer": (lambda: Own(count), "changes its buffer seen in the forward pass"),
    "late layer": (Late, "split at fc; its head fc is not its last layer: end with it, and return its logits"),
    "stale copy": (lambda: Own(remember), "it keeps copies of its parameters"),
    "no tensor": (Named, "returns 'dict'; its forward must return a tensor of logits"),
    "cut": (Picky, r"gives features of shape \[4, 3\] for 4 samples, not \[4, 8\]"),
    "reshaped": (Reshaped, r"cannot be split at fc \(shape .* is invalid.*\); end with it, and return its logits"),
    "infinite": (lambda: Own(lambda m, h: h / 0), "gives logits that are not finite"),
    "other samples": (lambda: MLP(inputs=5), r"cannot take a batch of shape \[4, 12\] in float32 \(mat1 and mat2"),
    "floats for tokens": (Reader, r"cannot take a batch of shape \[4, 12\] in float32"),
    "one output less": (lambda: Own(lambda m, h: h[:-1]), r"gives logits of shape \[3, 3\] for 4 samples"),
}


@pytest.mark.parametrize("name", BY_BEHAVIOUR)
def test_a_module_is_refused_by_what_it_does(name):
    make, says = BY_BEHAVIOUR[name]
    net, before = wrap_module(seeded(make)), torch.get_rng_state()
    with pytest.raises(InputError, match=says):
        net.check(draw_features(4))
    assert torch.equal(torch.get_rng_state(), before)


def test_with_dropout_off_training_mode_does_not_count():
    net = wrap_module(seeded(lambda: Own(lambda m, h: F.dropout(h, 0.5, m.training))), dropout="off")
    net.check(draw_features(4), stacked=True)
    with pytest.raises(InputError, match="changes its buffer seen"):
        wrap_module(seeded(lambda: Own(count)), dropout="off").check(draw_features(4))


class Branching(MLP):
    def forward(self, x):
        return super().forward(x if self.layers[1].bias.sum() > 0 else x.clone())


def test_what_cannot_be_stacked_is_refused_for_stacks_alone():
    net = wrap_module(seeded(Branching))
    net.check(draw_features(4))
    with pytest.raises(InputError, match=r"cannot run for several clients at once \(.*\); use engine=loop"):
        net.check(draw_features(4), stacked=True)


class Doubled(torch.autograd.Function):
    """Its gradient is wrong under vmap alone."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return 2 * g

    @staticmethod
    def vmap(info, in_dims, x):
        return 2 * x.detach() + x - x.detach(), in_dims[0]


def test_another_gradient_in_a_stack_is_refused():
    net = wrap_module(seeded(lambda: Own(lambda m, h: Doubled.apply(h))))
    net.check(draw_features(4))
    with pytest.raises(InputError, match=r"another gradient of body.* for several clients at once; use engine=loop"):
        net.check(draw_features(4), stacked=True)


def test_a_head_has_as_many_classes_as_the_layer():
    assert wrap_module(MLP).classes == CLASSES
    assert wrap_module(lambda: MLP(classes=7)).classes == 7
    assert wrap_module(lambda: MLP(width=5)).feature_dim == 5
