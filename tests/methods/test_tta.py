"""Test-time adaptation: what the papers say, on a small network that has learned its task."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch

import fedthe
import oracles_tta
from fedthe import tree
from fedthe.engine.fit import LoopFit, Optimizer
from fedthe.engine.loop import Loop
from fedthe.engine.stack import Stack
from fedthe.engine.visit import Question
from fedthe.methods import METHODS, compose
from fedthe.methods.adapting import pick_norms
from fedthe.methods.atp import ATP, AdaptationRates, mean_entropy
from fedthe.methods.base import Samples
from fedthe.methods.finetune import FineTune
from fedthe.methods.lame import LAME, find_neighbours, smooth
from fedthe.methods.make import methods_for
from fedthe.methods.rotta import RoTTA
from fedthe.methods.rotta_memory import Memory
from fedthe.methods.sar import SAR
from fedthe.methods.tent import Tent
from fedthe.nets import CCT4, CNN, ResNet20GN
from fedthe.nets.norms import list_norms
from fedthe.nets.standardized import standardize
from fedthe.nets.started import start_from_file
from fedthe.nets.wrap import wrap_module
from fedthe.types import Shard, scale
from helpers import fails
from tiny_net import Normed
from torch_modules import NormedMLP, ResNet18, group_norm, seeded

CLASSES, SIZE = 3, 8
NET = Normed(CLASSES, channels=1, size=SIZE)
ON_NORMS = {"tent": Tent, "sar": SAR, "rotta": RoTTA}


def draw_images(labels, noise=40.0, seed=0):
    """uint8 [n, 8, 8, 1]: stripes across, stripes down, or a chessboard, in noise."""
    draws = np.random.default_rng(seed)
    y, x = np.mgrid[:SIZE, :SIZE]
    patterns = np.stack([y % 4 < 2, x % 4 < 2, (x // 2 + y // 2) % 2 == 0])[np.asarray(labels)]
    pixels = 100 + 50 * patterns + draws.normal(0, noise, patterns.shape)
    return torch.from_numpy(pixels.clip(0, 255).astype(np.uint8))[..., None]


def make_shard(n=30, seed=1):
    labels = torch.arange(n) % CLASSES
    x, real = draw_images(labels, seed=seed), torch.ones(n, dtype=torch.bool)
    counts = torch.bincount(labels, minlength=CLASSES).float()
    return Shard(x, labels, real, counts, x[:6], labels[:6], real[:6])


@cache
def learned():
    """Parameters of NET after a short training, in float64."""
    params = {name: leaf.requires_grad_() for name, leaf in tree.flatten(NET.init(0)).items()}
    adam = torch.optim.Adam(list(params.values()), lr=0.03)
    labels = torch.arange(60) % CLASSES
    x = scale(draw_images(labels, seed=7)).contiguous()
    for _ in range(60):
        adam.zero_grad()
        torch.nn.functional.cross_entropy(NET.logits(tree.unflatten(params), x), labels).backward()
        adam.step()
    return tree.unflatten({name: leaf.detach().double() for name, leaf in params.items()})


def stream(labels, noise=40.0, seed=0):
    """Floats [n, 1, 8, 8], in the plain order of memory."""
    return scale(draw_images(labels, noise, seed)).double().contiguous()


def of_net(params, x):
    return NET.logits(tree.unflatten(params), x)


def make(predictor, personal=None):
    return compose(NET, (personal or FineTune(), predictor))


def answer(method, x, mine=None, views=None, state=None):
    """The answers to a stream, and the last state."""
    mine = learned() if mine is None else mine
    views = x if views is None else views
    samples = Samples(x, lambda positions: views[positions][:, None, None])
    state = method.predictor.start(method, mine, make_shard()) if state is None else state
    with torch.no_grad():
        answers, after = method.answer(mine, state, samples)
    return answers.logits, after


def close(a, b, tolerance=1e-9):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def close_to(found, expected, names):
    found = tree.flatten(found)
    assert found.keys() == set(names)
    for name in names:
        close(found[name], expected[name].detach())


def names_of(method, frozen=0.0):
    return list(tree.flatten(pick_norms(method, learned(), frozen)))


def accuracy(norms, labels, x):
    params = tree.unflatten(tree.flatten(learned()) | tree.flatten(norms))
    return float((NET.logits(params, x).argmax(1) == torch.as_tensor(labels)).double().mean())


MIXED = np.random.default_rng(3).integers(0, CLASSES, 14)
HARD = 120.0  # noise that leaves a doubt


def test_the_network_has_learned_and_has_doubts():
    labels = np.arange(60) % CLASSES
    assert accuracy({}, labels, stream(labels)) > 0.9
    assert 0.4 < accuracy({}, labels, stream(labels, HARD)) < 0.95


# which parameters are those of norms


def test_norms_are_found_in_every_kind_of_network(tmp_path):
    resnet, cct = ResNet20GN(3, size=16), CCT4(3, size=16)
    assert len(list_norms(resnet)) == 1 + 2 * 9 + 2  # the first, two in a block, two shortcuts
    assert len(list_norms(cct)) == 2 * 4 + 1
    assert list_norms(CNN(3)) == []
    assert list_norms(resnet)[0] == ["body.norm.weight", "body.norm.bias"]
    assert list_norms(cct)[-1] == ["body.norm.weight", "body.norm.bias"]
    assert list_norms(standardize(resnet, (0.0,) * 3, (1.0,) * 3)) == list_norms(resnet)
    module = ResNet18(norm=group_norm)
    wrapped = wrap_module(module)
    layers = [name for name, layer in module.named_modules() if isinstance(layer, torch.nn.GroupNorm)]
    assert list_norms(wrapped) == [[f"body.{name}.weight", f"body.{name}.bias"] for name in layers]
    assert list_norms(wrap_module(seeded(NormedMLP))) == [["body.layers.3.weight", "body.layers.3.bias"]]
    from safetensors.torch import save_file

    save_file(tree.flatten(resnet.init(0)), tmp_path / "start.safetensors")
    assert list_norms(start_from_file(resnet, tmp_path / "start.safetensors")) == list_norms(resnet)
    for net in (resnet, cct, wrapped):
        assert {name for layer in list_norms(net) for name in layer} <= tree.flatten(net.zeros()).keys()


def test_a_norm_without_parameters_is_left_out():
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LayerNorm(4, elementwise_affine=False))
    module.append(torch.nn.LayerNorm(4, bias=False)).append(torch.nn.Linear(4, 3))
    assert list_norms(wrap_module(module, head="3")) == [["body.2.weight"]]


def test_networks_without_norms_are_refused_before_any_work(tmp_path):
    assert METHODS.keys() - set(methods_for(CNN(3))) == set(ON_NORMS)
    assert set(methods_for(ResNet20GN(3))) == METHODS.keys()
    np.savez(tmp_path / "tiny.npz", images=np.zeros((60, 16, 16, 3), np.uint8), labels=np.arange(60) % 3)
    settings = {"dataset": f"npz:{tmp_path / 'tiny.npz'}", "clients": 2, "rounds": 1, "out": str(tmp_path / "run")}
    for name in ON_NORMS:
        says = fails(lambda name=name: fedthe.run(methods=[name], **settings), name, "norm layers")
        assert "CNN has none" in says
        assert "resnet20_gn" in says
    assert not (tmp_path / "run").exists()


# each against its paper


@pytest.mark.parametrize(("k", "steps"), [(5, 100), (2, 3), (20, 1), (1, 0)])
def test_lame_equals_the_paper(k, steps):
    x = stream(MIXED, HARD)
    logits, state = answer(make(LAME(batch=6, k=k, steps=steps)), x)
    assert state == {}
    for some, found in zip(x.split(6), logits.split(6), strict=True):
        h = NET.features(learned()["body"], some)
        expected = oracles_tta.lame_batch(h, NET.head(learned()["head"], h).softmax(1), k, steps)
        close(found.exp(), expected, 1e-7)
    plain = NET.logits(learned(), x)
    assert torch.allclose(logits.exp(), plain.softmax(1), atol=1e-6) is (steps == 0)


def test_lame_by_hand():
    p = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.5, 0.5]], dtype=torch.float64)
    h = torch.tensor([[10.0, 0.0], [1.0, 0.1], [0.0, 1.0]], dtype=torch.float64)
    near = find_neighbours(h, 1)  # of directions: lengths do not count
    assert near.tolist() == [[0, 1, 0], [1, 0, 0], [0, 1, 0]]
    raw = [0.4 * math.exp(0.9), 0.6 * math.exp(0.1)]  # the second sample, drawn to the first
    assert smooth(p.log(), near, 1)[1].exp().tolist() == pytest.approx([raw[0] / sum(raw), raw[1] / sum(raw)])
    assert find_neighbours(h[:1], 5).tolist() == [[0]]  # alone, a sample is answered as it is
    close(smooth(p[:1].log(), find_neighbours(h[:1], 5), 10).exp(), p[:1])


@pytest.mark.parametrize(("batch", "lr"), [(1, 0.01), (4, 0.05), (16, 0.001)])
def test_tent_equals_the_paper(batch, lr):
    method, x = make(Tent(batch=batch, lr=lr)), stream(MIXED, HARD)
    names = names_of(method)
    assert len(names) == 4
    expected, model = oracles_tta.tent_stream(of_net, tree.flatten(learned()), names, x, batch, lr)
    logits, state = answer(method, x)
    close(logits, expected)
    close_to(state["norms"], model, names)


def test_tents_first_step_by_hand():
    """Adam's first step is as long as the learning rate; the batch is answered before it."""
    method, x = make(Tent(batch=4, lr=0.01)), stream(MIXED[:4], HARD)
    logits, state = answer(method, x)
    close(logits, NET.logits(learned(), x))
    gradients = oracles_tta.entropy_gradients(of_net, tree.flatten(learned()), x)
    before = tree.flatten(learned())
    for name, leaf in tree.flatten(state["norms"]).items():
        close(before[name] - leaf, 0.01 * gradients[name].sign(), 1e-6)


SETTINGS = {"lr": 0.05, "momentum": 0.9, "margin": 0.6, "rho": 0.05, "reset": 0.2}


@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize(
    "changed", [{}, {"margin": 0.0}, {"margin": 0.1}, {"margin": 5.0, "reset": 0.0}, {"reset": 0.5}, {"rho": 1.0}]
)
def test_sar_equals_the_paper(batch, changed):
    settings = SETTINGS | changed
    method, x = make(SAR(batch=batch, frozen=0.0, **settings)), stream(MIXED, HARD)
    names = names_of(method)
    expected, model, average, _ = oracles_tta.sar_stream(of_net, tree.flatten(learned()), names, x, batch, **settings)
    logits, state = answer(method, x)
    close(logits, expected)
    close_to(state["norms"], model, names)
    assert float(state["loss"]) == pytest.approx(math.inf if average is None else average)


def test_sars_oracle_sees_all_that_can_happen():
    """Batches that are skipped in part and as a whole, resets and none: the cases of the test above."""
    x = stream(MIXED, HARD)
    doubts = oracles_tta.mean_entropies(NET.logits(learned(), x)) / math.log(CLASSES)
    assert (doubts < 0.1).any()
    assert ((doubts > 0.6) & (doubts < 5)).any()
    names = names_of(make(SAR()))
    resets = [
        oracles_tta.sar_stream(of_net, tree.flatten(learned()), names, x, 3, **SETTINGS | {"reset": reset})[3]
        for reset in (0.0, 0.5)
    ]
    assert resets[0] == 0 < resets[1]


def test_sar_leaves_the_last_layers_alone():
    assert names_of(make(SAR()), 0.5) == ["body.norm1.weight", "body.norm1.bias"]
    _, state = answer(make(SAR(batch=2, margin=2.0, frozen=0.5)), stream(MIXED, HARD))
    assert list(tree.flatten(state["norms"])) == ["body.norm1.weight", "body.norm1.bias"]
    resnet = compose(ResNet20GN(3, size=16), METHODS["sar"])
    kept = tree.flatten(pick_norms(resnet, resnet.net.zeros(), 0.25)).keys()
    assert len(kept) == 2 * 16  # of 21 layers
    assert "body.block8.norm2.weight" not in kept


@pytest.mark.parametrize(
    ("size", "timeliness", "uncertainty"), [(64, 1, 1), (4, 1, 1), (4, 0, 1), (2, 1, 0), (5, 1, 5)]
)
def test_rotta_equals_the_paper(size, timeliness, uncertainty):
    x, views = stream(MIXED, HARD), stream(MIXED, HARD, seed=9)
    method = make(RoTTA(batch=4, lr=0.05, nu=0.2, memory=Memory(size, timeliness, uncertainty)))
    names = names_of(method)
    memory = oracles_tta.ClassMemory(size, CLASSES, timeliness, uncertainty)
    params = tree.flatten(learned())
    expected, student, teacher = oracles_tta.rotta_stream(of_net, params, names, x, views, 4, 0.05, 0.2, memory)
    logits, state = answer(method, x, views=views)
    close(logits, expected, 1e-8)
    close_to(state["student"], student, names)
    close_to(state["teacher"], teacher, names)
    kept = state["memory"]
    for c, items in enumerate(memory.held):
        here = kept["label"] == c
        assert sorted(kept["age"][here].tolist()) == sorted(age for _, _, _, age in items)
        assert sorted(kept["doubt"][here].tolist()) == pytest.approx(sorted(doubt for _, _, doubt, _ in items))


def test_rottas_memory_by_hand():
    """Two slots and two classes, so one slot for each; scores are entropies, as nothing is old enough to matter."""
    memory, kept = Memory(2, timeliness=0.0), None
    kept = memory.start(make_shard(), torch.zeros(1))

    def offer(kept, label, doubt, value):
        x = torch.full((1, SIZE, SIZE), float(value))
        return memory.offer(kept, {"x": x, "view": -x, "label": torch.tensor(label), "doubt": torch.tensor(doubt)}, 2)

    def held(kept):
        return {float(x[0, 0, 0]): int(label) for x, label in zip(kept["x"], kept["label"], strict=True) if label >= 0}

    kept = offer(kept, 0, 0.5, 1)
    assert held(kept) == {1.0: 0}
    kept = offer(kept, 0, 0.6, 2)  # its class has its slot, and it is less certain
    assert held(kept) == {1.0: 0}
    kept = offer(kept, 0, 0.4, 3)  # more certain
    assert held(kept) == {3.0: 0}
    assert kept["age"][0] == 1
    kept = offer(kept, 1, 0.9, 4)  # an empty slot
    assert held(kept) == {3.0: 0, 4.0: 1}
    assert torch.equal(kept["view"], -kept["x"])
    weights = memory.weigh(kept)
    assert weights.tolist() == pytest.approx([1 / (1 + math.exp(2 / 2)) / 2, 1 / (1 + math.exp(1 / 2)) / 2])


def test_atp_learns_rates_as_the_paper():
    shard = make_shard()
    params = tree.map_leaves(torch.Tensor.float, learned())
    part = AdaptationRates(rate_lr=20.0)
    begun = part.keep(NET, params)["own_rates"]
    fit = LoopFit(NET, shard, Optimizer(lr=0.01), 2, 7, flip=False, crop=0, path=(0, "personal", 0), client=0)
    made = part.personalize(fit, params | {"rates": begun}, {"own_rates": begun}, shard)
    batches = [
        (batch.x.double().contiguous(), batch.y) for epoch in range(2) for batch in fit.batches(fit.shard, epoch)
    ]
    flat = {name: leaf.double() for name, leaf in tree.flatten(params).items()}
    expected = oracles_tta.atp_rates(of_net, flat, dict.fromkeys(flat, 0.0), batches, 20.0)
    found = tree.flatten(made.params["own_rates"])
    assert found.keys() == expected.keys()
    assert max(abs(rate) for rate in expected.values()) > 1e-3
    for name, rate in expected.items():
        assert float(found[name]) == pytest.approx(rate, rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("batch", [1, 4, 20])
def test_atp_answers_as_the_paper(batch):
    x, method = stream(MIXED, HARD), make(ATP(batch=batch), AdaptationRates())
    draws = np.random.default_rng(0)
    rates = tree.map_leaves(lambda leaf: torch.tensor(draws.normal(0, 0.5)), learned())
    logits, state = answer(method, x, learned() | {"rates": rates})
    expected = oracles_tta.atp_stream(of_net, tree.flatten(learned()), tree.flatten(rates), x, batch)
    close(logits, expected)
    assert float(state["batches"]) == math.ceil(len(x) / batch)
    still = tree.map_leaves(torch.zeros_like, rates)
    close(answer(method, x, learned() | {"rates": still})[0], NET.logits(learned(), x))


def test_atp_needs_the_rates_that_clients_average():
    fails(lambda: compose(NET, (FineTune(), ATP())).check(), "ATP needs 'rates'")
    method = compose(NET, METHODS["atp"])
    assert method.core == compose(NET, METHODS["fedavg"]).core  # the shared model is FedAvg's
    assert method.training != compose(NET, METHODS["fedavg"]).training


# streams


PREDICTORS = {
    "lame": LAME(batch=4),
    "tent": Tent(batch=4, lr=0.05),
    "sar": SAR(batch=4, lr=0.05, margin=0.8, reset=0.0),
    "rotta": RoTTA(batch=4, lr=0.05, nu=0.3, memory=Memory(5)),
    "atp": ATP(batch=4),
}


def make_any(name):
    return make(PREDICTORS[name], AdaptationRates() if name == "atp" else FineTune())


def deployed(seed=0, dtype=torch.float32):
    draws = torch.Generator().manual_seed(seed)
    mine = tree.map_leaves(lambda leaf: leaf + 0.05 * torch.randn(leaf.shape, generator=draws), learned())
    rates = tree.map_leaves(lambda leaf: torch.randn((), generator=draws), learned())
    return tree.map_leaves(lambda leaf: leaf.to(dtype), mine | {"rates": rates})


@pytest.mark.parametrize("name", PREDICTORS)
def test_the_state_is_carried_from_chunk_to_chunk(name):
    method, x, mine = make_any(name), stream(MIXED, HARD), deployed(dtype=torch.float64)
    whole, last = answer(method, x, mine)
    first, state = answer(method, x[:8], mine)
    rest, after = answer(method, x[8:], mine, state=state)
    close(torch.cat([first, rest]), whole)
    for a, b in zip(tree.flatten(after).values(), tree.flatten(last).values(), strict=True):
        close(a, b)
    anew, _ = answer(method, x[8:], mine)
    assert torch.equal(anew, rest) is (name == "lame")  # which keeps nothing


@pytest.mark.parametrize("name", PREDICTORS)
def test_engines_agree_on_streams_of_many_windows(name):
    method, shards = make_any(name), [make_shard(30 + k, seed=k) for k in range(2)]
    mine = tree.stack([deployed(k) for k in range(2)])
    asked = [
        Question(k, draw_images(MIXED[: 14 - test], HARD, seed=k + test).numpy(), (0, "test", k))
        for k in range(2)
        for test in (0, 1)  # 14 and 13 samples: the last windows have 2 and 1
    ]
    loop, stack = (engine.answer(method, mine, shards, asked) for engine in (Loop(threads=1), Stack()))
    for one, other in zip(loop, stack, strict=True):
        assert one.finite
        np.testing.assert_allclose(one.logits, other.logits, rtol=1e-3, atol=1e-3)
    alone = Stack().answer(method, mine, shards, asked[2:3])
    np.testing.assert_allclose(alone[0].logits, stack[2].logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["tent", "rotta"])
@pytest.mark.parametrize("net", [ResNet20GN(CLASSES, 1, SIZE), CCT4(CLASSES, 1, SIZE)])
def test_engines_agree_on_the_norms_of_real_networks(net, name):
    method = compose(net, (FineTune(), PREDICTORS[name]))
    method.check()
    mine, shards = tree.stack([net.init(k) for k in range(2)]), [make_shard()] * 2
    asked = [Question(k, draw_images(MIXED[:9], seed=k).numpy(), (0, "test", k)) for k in range(2)]
    loop, stack = (engine.answer(method, mine, shards, asked) for engine in (Loop(threads=1), Stack()))
    plain = Loop(threads=1).answer(compose(net, FineTune()), mine, shards, asked)
    for one, other, before in zip(loop, stack, plain, strict=True):
        np.testing.assert_allclose(one.logits, other.logits, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(one.logits[:4], before.logits[:4], rtol=1e-5, atol=1e-5)  # before the first step
        assert np.abs(one.logits[4:] - before.logits[4:]).max() > 0.01


def test_a_stream_of_one_class_collapses_tent_and_not_sar():
    """Niu et al. 2023, figure 2: entropy minimization on one class ends in a model that knows no other."""
    one, labels = stream(np.ones(160, dtype=int), 90.0), np.arange(60) % CLASSES
    x, how = stream(labels, seed=5), {"batch": 4, "lr": 0.1}
    before = accuracy({}, labels, x)
    tent, sar = (answer(make(part), one)[1]["norms"] for part in (Tent(**how), SAR(**how)))
    assert before > 0.9
    assert accuracy(tent, labels, x) < 0.5
    assert accuracy(sar, labels, x) > before - 0.1


def test_sar_puts_a_collapsed_model_back():
    method, x = make(SAR(batch=4, frozen=0.0)), stream(MIXED[:4])
    state = method.predictor.start(method, learned(), make_shard())
    wrong = tree.map_leaves(lambda leaf: leaf + 3.0, state["norms"])
    certain = torch.tensor(0.05, dtype=torch.float64)
    _, after = answer(method, x, state=state | {"norms": wrong, "velocity": wrong, "loss": certain})
    assert float(after["loss"]) < 0.2
    tree.map_leaves(lambda a, b: close(a, b, 0), after["norms"], pick_norms(method, learned()))
    assert all((leaf == 0).all() for leaf in tree.flatten(after["velocity"]).values())
    _, after = answer(method, x, state=state | {"norms": wrong, "loss": certain + 5})
    assert not torch.equal(after["norms"]["body"]["norm1"]["bias"], learned()["body"]["norm1"]["bias"])


def test_adaptation_changes_what_it_should_and_nothing_else():
    x = stream(MIXED, HARD)
    for name in PREDICTORS:
        mine = deployed(dtype=torch.float64)
        kept = tree.map_leaves(torch.clone, mine)
        answer(make_any(name), x, mine)
        for a, b in zip(tree.flatten(mine).values(), tree.flatten(kept).values(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (lambda: Tent(batch=0), "tent: batch"),
        (lambda: Tent(lr=-1.0), "lr"),
        (lambda: SAR(momentum=1.0), "sar: margin"),
        (lambda: SAR(frozen=1.0), "frozen"),
        (lambda: SAR(rho=-0.1), "rho"),
        (lambda: LAME(k=0), "lame: batch and k"),
        (lambda: RoTTA(nu=2.0), "rotta: nu"),
        (lambda: Memory(size=0), "rotta: size"),
        (lambda: ATP(batch=0), "atp: batch"),
        (lambda: AdaptationRates(rate_lr=math.inf), "atp: rate_lr"),
    ],
)
def test_bad_hyperparameters_are_refused(part, words):
    fails(part, words)


def test_the_rates_of_atp_do_not_decay():
    shard, params = make_shard(), tree.map_leaves(torch.Tensor.float, learned())
    part, made = AdaptationRates(rate_lr=20.0), []
    begun = part.keep(NET, params)["own_rates"]
    for decay in (0.0, 5.0):
        settings = Optimizer(lr=0.01, weight_decay=decay)
        fit = LoopFit(NET, shard, settings, 2, 7, flip=False, crop=0, path=(0, "personal", 0), client=0)
        made.append(part.personalize(fit, params | {"rates": begun}, {"own_rates": begun}, shard).params)
    tree.map_leaves(lambda a, b: close(a, b, 1e-7), *made)


def test_rows_of_padding_do_not_count_in_the_entropy_of_atp():
    x = stream(MIXED)
    weight = torch.ones(len(x), dtype=torch.float64)
    weight[-4:] = 0
    close(mean_entropy(learned(), NET, x, weight), mean_entropy(learned(), NET, x[:-4], weight[:-4]))


def test_passes_of_rotta():
    assert RoTTA(batch=16, memory=Memory(64)).passes == (9, 4)


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("em", {"buffer": 200, "steps": 20}),
        ("bbse", {"shrinkage": 10.0, "ridge": 0.1, "pseudo": 50.0}),
        ("fmapls", {"strength": 30.0, "anchor": 0.5, "rate": 0.6}),
        ("lame", {"batch": 64, "k": 5, "steps": 100}),
        ("sar", {"batch": 16, "lr": 0.001, "margin": 0.4, "rho": 0.05, "reset": 0.2}),
        ("rotta", {"batch": 16, "lr": 0.001, "nu": 0.001}),
        ("atp", {"batch": 20}),
    ],
)
def test_results_were_measured_with_these_defaults(name, defaults):
    predictor = compose(NET, METHODS[name]).predictor
    assert {key: getattr(predictor, key) for key in defaults} == defaults
