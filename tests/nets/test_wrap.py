"""A wrapped module is the module: its logits, its gradients, alone and for many clients, in every method."""

import copy
import threading
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedthe
from fedthe import tree
from fedthe.config import make_config
from fedthe.data.plan import Settings, build
from fedthe.data.pool import Dataset
from fedthe.engine.fit import Optimizer
from fedthe.engine.loop import Loop
from fedthe.engine.shards import Shards
from fedthe.engine.stack import Stack
from fedthe.engine.train import deploy_some, start, train_together
from fedthe.engine.visit import Progress, Question, Run, Training
from fedthe.errors import InputError
from fedthe.experiment.run import run_prepared
from fedthe.experiment.work import prepare
from fedthe.methods import METHODS, compose
from fedthe.methods.compose import describe
from fedthe.methods.make import methods_for
from fedthe.nets.cnn import CNN
from fedthe.nets.wrap import wrap_module
from fedthe.nets.written_out import WrittenOut, attend
from fedthe.store import content_hash
from fedthe.types import Shard
from helpers import make_pool
from torch_modules import (
    CLASSES,
    MLP,
    VOCABULARY,
    NormedMLP,
    Reader,
    Recurrent,
    ResNet18,
    draw_features,
    draw_tokens,
    group_norm,
    seeded,
)

ROWS = 14  # of each client


def as_is(module):
    """What a wrapped module should compute: itself."""
    return module


def with_group_norms(module):
    """ResNet18 written with group norms, and the weights of one with batch norms."""
    written = ResNet18(norm=group_norm)
    known = written.state_dict().keys()
    written.load_state_dict({name: leaf for name, leaf in module.state_dict().items() if name in known})
    return written


CASES = {  # a module, how it is wrapped, samples, and the module as a user would write it for the same purpose
    "mlp": (MLP, {}, draw_features(ROWS), as_is),
    "transformer": (Reader, {}, draw_tokens(ROWS), as_is),
    "attention": (lambda: Reader(fused=True), {}, draw_tokens(ROWS), as_is),
    "lstm": (Recurrent, {}, draw_features(ROWS, (5, 4)), as_is),
    "resnet18": (ResNet18, {"normalise": "group"}, draw_features(ROWS, (3, 64, 64)), with_group_norms),
}
every_case = pytest.mark.parametrize("name", CASES)


@cache
def case(name):
    """The network, the module beside it, samples and labels."""
    make, how, x, expect = CASES[name]
    module = seeded(make)
    if name == "resnet18":  # the scale and shift of a new BatchNorm are those of a new GroupNorm
        for norm in (layer for layer in module.modules() if isinstance(layer, nn.BatchNorm2d)):
            norm.weight.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(0))
            norm.bias.data.uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(1))
    return wrap_module(module, **how), expect(module), x, torch.arange(len(x)) % CLASSES


def named_as_module(params):
    """Leaves of a network with an unnested `fc` as its module names them."""
    head = {"fc.weight": params["head"]["out"], "fc.bias": params["head"]["bias"]}
    return tree.flatten(params["body"]) | head


@every_case
def test_logits_and_gradients_are_the_modules(name):
    net, module, x, y = case(name)
    params = tree.map_leaves(lambda leaf: leaf.requires_grad_(), net.init(0))
    module.train().zero_grad()
    expected, logits = module(x), net.logits(params, x)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    F.cross_entropy(expected, y).backward()
    F.cross_entropy(logits, y).backward()
    leaves = named_as_module(params)
    assert leaves.keys() == dict(module.named_parameters()).keys()
    for path, parameter in module.named_parameters():
        torch.testing.assert_close(leaves[path].grad, parameter.grad, rtol=1e-3, atol=1e-5, msg=path)


@every_case
def test_the_network_passes_its_own_check(name):
    net, _, x, _ = case(name)
    net.check(x[:3], stacked=True)


def difference(a, b):
    a, b = tree.flatten(a), tree.flatten(b)
    assert list(a) == list(b)
    return max((float((a[name] - b[name]).abs().max()) for name in a), default=0.0)


def make_shards(x, y):
    """Two clients of different sizes, the smaller one padded."""
    shards = []
    for k, n in enumerate((ROWS, ROWS - 5)):
        real, labels = torch.arange(ROWS) < n, (y + k) % CLASSES
        counts = torch.bincount(labels[:n], minlength=CLASSES).float()
        shards.append(Shard(x.flip(k), labels, real, counts, x[:2], labels[:2], real[:2]))
    return shards


def train(method, run, settings, engine):
    begun = start(method.training, len(run.shards), run.seed, engine.device)
    ((reached,),) = train_together([method.training], [run], settings, [[begun]], engine)
    return reached


@every_case
def test_loop_and_stack_train_alike(name):
    net, _, x, y = case(name)
    method = compose(net, METHODS["fedthe"])
    settings = Training(1, local_epochs=1, batch=4, flip=False, crop=0, optimizer=Optimizer(lr=0.01, momentum=0.5))
    run = Run(0, make_shards(x, y))
    one, two = (train(method, run, settings, engine) for engine in (Loop(), Stack()))
    assert difference(one.server.shared, two.server.shared) < 1e-5
    assert max(difference(*pair) for pair in zip(one.clients, two.clients, strict=True)) < 1e-5
    assert difference(one.server.shared, start(method.training, 2, 0).server.shared) > 1e-4
    states = deploy_some(method, run, settings, one, Loop(), range(2))
    asked = [Question(k, x[:4].numpy(), (0, "test", k)) for k in range(2)]
    for alone, together in zip(
        *(engine.answer(method, states, run.shards, asked) for engine in (Loop(), Stack())), strict=True
    ):
        assert np.array_equal(alone.classes, together.classes)
        for column in alone.info:
            assert np.abs(alone.info[column] - together.info[column]).max() < 1e-4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_case
def test_a_gpu_trains_like_the_loop(name, dtype):
    net, _, x, y = case(name)
    method, shards = compose(net, METHODS["fedthe"]), make_shards(x, y)
    settings = Training(2, local_epochs=1, batch=4, flip=False, crop=0, optimizer=Optimizer(lr=0.01))
    there = [Shard(*(part.cuda() for part in shard)) for shard in shards]
    one = train(method, Run(0, shards), settings, Loop())
    two = train(method, Run(0, there), settings, Stack("cuda", dtype))
    assert isinstance(two, Progress), two
    reached = tree.map_leaves(torch.Tensor.cpu, two.server.shared)
    assert two.server.losses == pytest.approx(one.server.losses, rel=1e-4 if dtype == torch.float32 else 0.05)
    if name != "resnet18" or dtype == torch.float32:  # which is near a kink: noise of 1e-7 moves its leaves by 3e-3
        allowed = 5e-3 if name == "resnet18" else 1e-4 if dtype == torch.float32 else 2e-2
        assert difference(one.server.shared, reached) < allowed


@cache
def run_on_pictures():
    pool = make_pool(np.arange(90) % CLASSES, size=8)
    federation = build(Dataset(pool), Settings(clients=3, dirichlet=1.0))
    streams = [stream.take(np.arange(3)) for stream in federation.tests["original"]]
    asked = [Question(k, federation.inputs(stream), (0, "test", k)) for k, stream in enumerate(streams)]
    return Run(0, Shards(federation)), asked


@pytest.mark.parametrize("name", METHODS)
def test_every_method_works_with_a_module_whose_head_has_a_bias(name):
    module = MLP if name in methods_for(CNN(CLASSES)) else NormedMLP
    method = compose(wrap_module(seeded(module, inputs=192)), METHODS[name])
    method.check()
    run, asked = run_on_pictures()
    settings = Training(1, local_epochs=1, batch=16, crop=1, optimizer=Optimizer(lr=0.05))
    one, two = (train(method, run, settings, engine) for engine in (Loop(), Stack()))
    assert difference(one.server.shared, two.server.shared) < 1e-5
    states = deploy_some(method, run, settings, one, Loop(), range(3))
    assert difference(states, deploy_some(method, run, settings, one, Stack(), range(3))) < 1e-5
    answers = [engine.answer(method, states, list(run.shards), asked) for engine in (Loop(), Stack())]
    for alone, together in zip(*answers, strict=True):
        assert alone.finite
        assert np.array_equal(alone.classes, together.classes)


def test_fedrod_starts_as_the_generic_model_with_a_bias_too():
    net = wrap_module(seeded(MLP))
    method = compose(net, METHODS["fedrod"])
    params, x = net.init(0), draw_features()
    mine = params | method.start(params).mine["personal"]
    assert torch.equal(method.logits(mine, x), net.logits(params, x))


def test_a_run_files_a_module_by_its_content(data, tmp_path):
    small = {
        "dataset": data,
        "size": 16,
        "clients": 2,
        "rounds": 1,
        "local_epochs": 1,
        "methods": ["fedavg"],
        "crop": 0,
    }
    how = {"samples": 4, "tests": ["original"], "device": "cpu", "threads": 2}
    config = make_config(small | how | {"out": str(tmp_path / "run")})

    def run(net):
        return run_prepared(*prepare(config, net=net))

    def make(seed):
        return wrap_module(seeded(MLP, seed=seed, inputs=768))

    results, again, other = run(make(0)), run(make(0)), run(make(1))
    assert not results.failures
    assert again.reused == 1
    assert again.trainings.keys() == results.trainings.keys()
    assert other.reused == 0
    assert other.trainings.keys().isdisjoint(results.trainings)
    with pytest.raises(InputError, match=r"MLP cannot take a batch of shape \[3, 3, 16, 16\] in float32"):
        run(wrap_module(MLP))
    with pytest.raises(InputError, match="tells 7 classes apart, but the data has 3"):
        run(wrap_module(lambda: MLP(768, classes=7)))


# what seeds start from


def test_a_module_is_the_start_of_every_seed_and_a_function_of_its_own_seed():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    module = seeded(MLP)
    fixed, drawn = wrap_module(module), wrap_module(MLP)
    assert torch.equal(fixed.init(0)["head"]["out"], module.fc.weight)
    assert difference(fixed.init(0), fixed.init(1)) == 0
    assert difference(drawn.init(0), drawn.init(0)) == 0
    assert difference(drawn.init(0), drawn.init(1)) > 0.1
    assert torch.equal(torch.get_rng_state(), before)  # nobody's draws but its own


def test_training_does_not_change_the_module_and_changing_the_module_does_not_change_the_network():
    module = seeded(MLP)
    net, kept = wrap_module(module), copy.deepcopy(module.state_dict())
    before = net.init(0)
    net.init(0)["head"]["out"].zero_()
    module.fc.weight.data.zero_()
    assert difference(net.init(0), before) == 0
    assert torch.equal(before["head"]["out"], kept["fc.weight"])


# equality by content


def test_networks_are_equal_by_content():
    net = wrap_module(seeded(MLP))
    assert net == wrap_module(seeded(MLP))
    assert hash(net) == hash(wrap_module(seeded(MLP)))
    assert wrap_module(MLP) == wrap_module(MLP)
    other_weights, other_layers = wrap_module(seeded(MLP, seed=1)), seeded(MLP)
    other_layers.layers[2] = nn.ReLU()  # no other weights
    assert len({net, other_weights, wrap_module(other_layers), wrap_module(MLP)}) == 4
    assert content_hash(describe(net)) == content_hash(describe(wrap_module(seeded(MLP))))
    assert describe(net)["is"] == "fedthe.nets.wrap.Wrapped"
    assert "module" not in describe(net)
    assert replace(net, weights="other") != net


@pytest.mark.parametrize("change", ["buffer", "frozen", "attribute", "hook"])
def test_constants_and_attributes_make_another_network(change):
    module = seeded(Reader)
    module.factor = 1.0
    module.mix = nn.Linear(8, 24).requires_grad_(False)
    module.mix.load_state_dict(seeded(nn.Linear, in_features=8, out_features=24).state_dict())
    before = wrap_module(module)
    assert wrap_module(copy.deepcopy(module)) == before
    if change == "buffer":
        module.positions[0] += 1
    elif change == "frozen":
        module.mix.weight.data += 1
    elif change == "attribute":
        module.factor = 2.0
    else:
        module.fc.register_forward_hook(lambda layer, given, made: 2 * made)
    after = wrap_module(module)
    assert after != before
    assert after.weights == before.weights


# constants and threads


def test_frozen_parameters_and_buffers_are_no_leaves_but_count():
    module = seeded(lambda: Reader(fused=True))
    module.embedding.requires_grad_(False)
    net, x = wrap_module(module), draw_tokens()
    assert "embedding" not in net.init(0)["body"]
    assert "positions" not in net.init(0)["body"]
    torch.testing.assert_close(net.logits(net.init(0), x), module.train()(x))
    net.check(x, stacked=True)


def test_shared_parameters_are_one_leaf():
    module = seeded(MLP)
    module.layers.append(nn.Linear(8, 8))
    module.layers.append(nn.Linear(8, 8))
    module.layers[4].weight = module.layers[3].weight
    net, x = wrap_module(module), draw_features()
    assert sorted(net.init(0)["body"]["layers"]) == ["1", "3", "4"]
    assert list(net.init(0)["body"]["layers"]["4"]) == ["bias"]
    net.check(x, stacked=True)


def test_threads_do_not_see_each_others_parameters():
    net, x = wrap_module(seeded(lambda: Reader(fused=True))), draw_tokens()
    inits = [tree.map_leaves(lambda leaf, k=k: leaf * (1 + k), net.init(0)) for k in range(4)]
    expected, wrong = [net.logits(params, x) for params in inits], []

    def work(k):
        for _ in range(20):
            if not torch.equal(net.logits(inits[k], x), expected[k]):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# group norm in the place of batch norm


def test_batch_norms_become_group_norms_with_their_scale_and_shift():
    norms = [nn.BatchNorm2d(24), nn.BatchNorm3d(64, affine=False), nn.BatchNorm1d(5, eps=0.1), nn.SyncBatchNorm(7)]
    module = seeded(MLP)
    module.norms = nn.ModuleList(norms)
    norms[0].weight.data.fill_(3)
    made = wrap_module(module, normalise="group").module.norms
    assert [type(each) for each in made] == [nn.GroupNorm] * 4
    assert [each.num_groups for each in made] == [8, 32, 1, 1]
    assert [each.affine for each in made] == [True, False, True, True]
    assert made[0].weight.tolist() == [3] * 24
    assert made[2].eps == 0.1
    assert [type(each) for each in module.norms] == [type(each) for each in norms]  # the user's module stays


# functions written out


def test_an_embedding_keeps_its_padding_row_for_every_client():
    """Under vmap, torch's own gives all clients but the first a gradient there."""
    tokens, weight = draw_tokens(), torch.randn(2, VOCABULARY, 4, generator=torch.Generator().manual_seed(0))

    def total(weight):
        with WrittenOut():
            return F.embedding(tokens, weight, padding_idx=0).square().sum()

    leaf = weight.clone().requires_grad_()
    torch.vmap(total)(leaf).sum().backward()
    for row, gradient in zip(weight, leaf.grad, strict=True):
        alone = row.clone().requires_grad_()
        F.embedding(tokens, alone, padding_idx=0).square().sum().backward()
        torch.testing.assert_close(gradient, alone.grad)
    assert (leaf.grad[:, 0] == 0).all()


@pytest.mark.parametrize(
    "how", [{}, {"is_causal": True}, {"scale": 0.3}, {"mask": True}, {"added": True}, {"gqa": True}]
)
def test_attention_is_torchs(how):
    q, k, v = draw_features(3, (2, 4, 5, 6)).transpose(0, 1).unbind(1)
    how = dict(how)
    if how.pop("gqa", False):
        k, v, how = k[:, :2], v[:, :2], {"enable_gqa": True}
    if how.pop("mask", False):
        how["attn_mask"] = torch.arange(5)[:, None] > torch.arange(5) - 2
    if how.pop("added", False):
        how["attn_mask"] = draw_features(5, (5,))
    with WrittenOut():
        made = F.scaled_dot_product_attention(q, k, v, **how)
    torch.testing.assert_close(made, F.scaled_dot_product_attention(q, k, v, **how))


BOTH_WAYS = {"num_layers": 2, "bidirectional": True, "batch_first": True}


@pytest.mark.parametrize(
    ("kind", "how"),
    [(kind, how) for kind in (nn.RNN, nn.GRU, nn.LSTM) for how in ({}, BOTH_WAYS, {"bias": False})]
    + [(nn.RNN, {"nonlinearity": "relu"})],
)
def test_recurrent_layers_are_torchs(kind, how):
    module, x = seeded(Recurrent, kind=kind, **how), draw_features(4, (5, 4))
    net = wrap_module(module)
    torch.testing.assert_close(net.logits(net.init(0), x), module(x))
    net.check(x, stacked=True)


def test_a_timm_model():
    timm = pytest.importorskip("timm", exc_type=ImportError)  # it needs torchvision
    how = {"num_classes": CLASSES, "img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 2}
    net = fedthe.wrap_module(lambda: timm.create_model("vit_tiny_patch16_224", **how), head="head")
    net.check(draw_features(3, (3, 16, 16)), stacked=True)


class Tied(nn.Module):
    """Layers, weights, constants and lists, of which one stands in two places."""

    def __init__(self, kind, which):
        super().__init__()
        torch.manual_seed(0)
        a, b = nn.Linear(4, 4), nn.Linear(4, 4)
        again = (a, b)[which]
        self.register_buffer("c", torch.ones(4))
        self.register_buffer("d", torch.ones(4))
        self.layers = nn.ModuleList([a, b, again] if kind == "layer" else [a, b, nn.Linear(4, 4)])
        if kind == "weight":
            self.layers[2].weight = again.weight
        if kind == "list":
            first, second = ["+"], ["+"]
            self.signs = [first, second, (first, second)[which]]
        if kind == "hook":
            scale = which + 1
            a.register_full_backward_hook(lambda layer, into, out: (into[0] * scale,))
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.fc(x)


@pytest.mark.parametrize("kind", ["layer", "weight", "list", "hook"])
def test_modules_that_share_otherwise_are_others(kind):
    one, same, other = (wrap_module(Tied(kind, which)) for which in (0, 0, 1))
    assert one == same
    assert one != other


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


def test_attributes_in_slots_count():
    def make(value):
        module = seeded(MLP)
        module.setting = Slotted(value)
        return wrap_module(module)

    assert make(1) == make(1)
    assert make(1) != make(2)


def test_a_function_that_draws_is_not_the_module_of_its_first_seed():
    drawn = wrap_module(lambda: MLP())
    assert wrap_module(drawn.module) != drawn


def test_a_query_that_attends_to_nothing_gets_zeros():
    query, mask = torch.randn(2, 3, 4), torch.tensor([[True, True, False], [False] * 3, [True] * 3])
    query.requires_grad_()
    expected = F.scaled_dot_product_attention(query, query, query, mask)
    found = attend(query, query, query, mask)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert query.grad.isfinite().all()
