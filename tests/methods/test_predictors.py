from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import oracles
from fedthe import tree
from fedthe.engine.client import Fits, Received, deploy, work
from fedthe.engine.fit import LoopFit, Optimizer
from fedthe.errors import InputError
from fedthe.methods import compose
from fedthe.methods.ablations import ABLATIONS
from fedthe.methods.authors import LogitKNN
from fedthe.methods.base import FedAvg, Method, Samples
from fedthe.methods.fedthe import HeadEnsemble
from fedthe.methods.finetune import FineTune
from fedthe.methods.knn_per import KNN
from fedthe.methods.lpft import LPFT
from fedthe.methods.memo import Memo
from fedthe.methods.probing import Probe
from fedthe.methods.t3a import T3A
from fedthe.methods.tsa import TSA
from fedthe.methods.ttt import TTT, Online
from fedthe.methods.two_heads import TwoHeads, heads
from fedthe.nets import CNN
from fedthe.types import Batch, Shard, scale

torch.set_num_threads(1)

NET = CNN(classes=4, channels=1, size=16)
RECIPES = {
    "t3a": T3A(m=3),
    "knn": KNN(k=3, scale=0.2),
    "ttt": (TTT(), Online(lr=0.05)),
    "tsa": (TwoHeads(), TSA()),
    "memo": Memo(views=4, steps=3, lr=0.05),
    "lpft": LPFT(Memo(views=4, steps=2, lr=0.05), probe_steps=2, probe_lr=0.1),
}
METHODS = {name: compose(NET, recipe) for name, recipe in RECIPES.items()}
every_predictor = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def make_mine(method, seed=0, dtype=torch.float32):
    """Parameters with opinions: a start, louder, noise where it is zero, heads that noise does not always please."""
    shared, averages, mine = method.start(method.net.init(seed))
    mine = shared | averages | mine["rounds"] | mine["personal"]
    draws = torch.Generator().manual_seed(seed)
    mine = tree.map_leaves(lambda leaf: 3 * leaf + 0.05 * torch.randn(leaf.shape, generator=draws), mine)
    usual = F.normalize(method.net.features(mine["body"], draw(50, 1, 16, 16, seed=9)).mean(0), dim=0)
    for name in {"head", "personal"} & mine.keys():
        out = mine[name]["out"]
        mine[name] = {"out": out - (out @ usual)[:, None] * usual}
    return tree.map_leaves(lambda leaf: leaf.to(dtype), mine)


def make_images(n, seed=0):
    """uint8 [n, 16, 16, 1]"""
    return torch.randint(0, 256, (n, 16, 16, 1), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def make_shard(n=12, v=9, classes=4, seed=0):
    labels = torch.arange(n) % classes
    counts = torch.bincount(labels, minlength=NET.classes).float()
    real = torch.ones(n, dtype=torch.bool), torch.ones(v, dtype=torch.bool)
    return Shard(
        make_images(n, seed), labels, real[0], counts, make_images(v, seed + 1), torch.arange(v) % classes, real[1]
    )


def pad(shard, rows):
    """Rows of noise before and behind, which are not real."""
    noise, labels, unreal = make_images(rows, 99), torch.zeros(rows, dtype=torch.int64), torch.zeros(rows).bool()

    def around(part, filling):
        return torch.cat([filling, part, filling])

    return Shard(
        around(shard.x, noise),
        around(shard.labels, labels),
        around(shard.real, unreal),
        shard.counts,
        around(shard.val_x, noise),
        around(shard.val_labels, labels),
        around(shard.val_real, unreal),
    )


def make_views(method, n, seed=5, dtype=torch.float32):
    return draw(n, *method.predictor.augments, 1, 16, 16, seed=seed, dtype=dtype)


def make_samples(method, x):
    seen = make_views(method, len(x), dtype=x.dtype)
    return Samples(x, lambda positions: seen[positions])


def make_fit(shard, epochs=1, lr=0.05, batch=5):
    return LoopFit(NET, shard, Optimizer(lr=lr), epochs, batch, flip=False, crop=0, path=(0, "test", 0), client=0)


def answer(method, mine=None, x=None, shard=None, dtype=torch.float32):
    """All of the stream at once, under no_grad where no views are asked for: the answers and the last state."""
    mine = make_mine(method, dtype=dtype) if mine is None else mine
    x = draw(8, 1, 16, 16, dtype=dtype) if x is None else x
    state = method.predictor.start(method, mine, shard or make_shard())
    with torch.set_grad_enabled(method.predictor.augments[0] > 0):
        return method.answer(mine, state, make_samples(method, x))


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype), rtol=tolerance, atol=tolerance)


def same(a, b):
    return all(torch.equal(a, b) for a, b in zip(tree.flatten(a).values(), tree.flatten(b).values(), strict=True))


def of_net(params, x):
    return NET.logits(tree.unflatten(params), x)


# every predictor


@every_predictor
def test_stream_equals_windows_and_chunks(method):
    predictor, mine, x = method.predictor, make_mine(method), draw(8, 1, 16, 16)
    samples = make_samples(method, x)
    whole, last = answer(method, mine, x)
    start = state = predictor.start(method, mine, make_shard())
    one_by_one, after_all = samples.scan(predictor.answer_given, method, mine, start, x)
    close(whole.logits, one_by_one.logits)
    for name, value in whole.info.items():
        assert value.shape == (len(x),)
        close(value, one_by_one.info[name])
    parts, begun = [], 0
    for part in x.split(3):
        later = Samples(part, lambda positions, begun=begun: samples.views(positions + begun))
        answers, state = method.answer(mine, state, later)
        parts.append(answers.logits)
        begun += len(part)
    close(whole.logits, torch.cat(parts))
    for after in (state, after_all):
        tree.map_leaves(close, last, after)


@every_predictor
def test_nothing_is_changed_in_place_and_nothing_is_random(method):
    mine, shard, x = make_mine(method), make_shard(), draw(8, 1, 16, 16)
    kept = tree.map_leaves(torch.clone, mine)
    state = method.predictor.start(method, mine, shard)
    kept_state = tree.map_leaves(torch.clone, state)
    samples = make_samples(method, x)
    first, after = method.answer(mine, state, samples)
    assert same(mine, kept)
    assert same(state, kept_state)
    assert not first.logits.requires_grad
    assert not any(leaf.requires_grad for leaf in tree.flatten(after).values())
    again, after_again = method.answer(mine, state, samples)
    assert torch.equal(first.logits, again.logits)
    assert same(after, after_again)


@every_predictor
def test_every_hyperparameter_changes_the_answers(method):
    def vary(predictor):
        for field in fields(predictor):
            value = getattr(predictor, field.name)
            if isinstance(value, Memo):
                yield from (replace(predictor, **{field.name: other}) for other in vary(value))
            else:
                bigger = value + 1 if isinstance(value, int) else 3 * value
                # a grid of 3 % may well find the same lambda; one of nothing but 0 and 1 may not
                yield replace(predictor, **{field.name: 1.0 if field.name == "grid" else bigger})

    mine = make_mine(method)
    before = answer(method, mine)[0].logits
    for other in vary(method.predictor):
        assert not torch.equal(answer(replace(method, predictor=other), mine)[0].logits, before), other


@every_predictor
def test_padding_rows_and_single_class_shards(method):
    mine = make_mine(method)
    shard = make_shard()
    close(answer(method, mine, shard=shard)[0].logits, answer(method, mine, shard=pad(shard, 7))[0].logits, 1e-6)
    assert answer(method, mine, shard=make_shard(classes=1))[0].logits.isfinite().all()


@pytest.mark.parametrize("name", ["t3a", "knn", "ttt", "tsa"])
def test_clients_can_be_stacked(name):
    method = METHODS[name]
    predictor, x = method.predictor, draw(3, 1, 1, 16, 16)
    clients = [make_mine(method, seed) for seed in (1, 2)]
    states = [predictor.start(method, mine, make_shard(seed=seed)) for seed, mine in enumerate(clients)]
    seen = draw(2, 1, *predictor.augments, 1, 16, 16)

    def three_windows(mine, state, seen):
        logits = []
        for one in x:
            answers, state = predictor.answer_given(method, mine, state, seen, one)
            logits.append(answers.logits)
        return torch.cat(logits), state

    logits, after = torch.func.vmap(three_windows)(tree.stack(clients), tree.stack(states), seen)
    for i, (mine, state) in enumerate(zip(clients, states, strict=True)):
        one_by_one, alone = three_windows(mine, state, seen[i])
        close(logits[i], one_by_one)
        tree.map_leaves(close, tree.take(after, i), alone)


# T3A


@pytest.mark.parametrize("m", [1, 2, 5, 50])
def test_t3a_equals_lists(m):
    method = compose(NET, T3A(m))
    mine, x = make_mine(method, dtype=torch.float64), draw(40, 1, 16, 16, dtype=torch.float64)
    h = NET.features(mine["body"], x).numpy()
    expected = oracles.t3a_stream(h, mine["head"]["out"].numpy(), m)
    answers, state = answer(method, mine, x)
    close(answers.logits, np.stack(expected), 1e-10)
    assert state["supports"].shape == (NET.classes, m, NET.feature_dim)
    assert (answers.logits.argmax(-1) != method.logits(mine, x).argmax(-1)).any()  # it does something


def ask_once(method, mine, state, x):
    """One sample, of which no views are asked for."""
    return method.answer(mine, state, Samples(x, lambda positions: x.new_empty(len(positions), 0, 0)))


class Plane(CNN):
    """Points, which are their own features."""

    def features(self, body, x):
        return x


def test_t3a_by_hand():
    """The sample (1, 1) leans the prototype of its class over: it is its own support."""
    method = compose(Plane(classes=2), T3A(m=2))
    mine = {"body": {}, "head": {"out": torch.tensor([[2.0, 0.0], [0.0, 3.0]])}}
    state = method.predictor.start(method, mine, make_shard())
    answers, after = ask_once(method, mine, state, torch.tensor([[1.0, 1.0]]))
    lean = F.normalize(torch.tensor([0.5**0.5, 1 + 0.5**0.5]), dim=0)
    close(answers.logits[0], torch.stack([torch.tensor(1.0), lean.sum()]))
    assert after["entropies"].isfinite().tolist() == [[True, False], [True, True]]


def test_t3a_keeps_the_older_of_equally_certain_features():
    mine = {"body": {}, "head": {"out": torch.tensor([[2.0, 0.0, 0.0], [0.0, 3.0, 0.0]])}}
    for m, points in (1, [[0.0, 3.0, 5.0]]), (2, [[1.0, 2.0, 5.0], [1.0, 2.0, -5.0]]):
        method = compose(Plane(classes=2), T3A(m))
        state = method.predictor.start(method, mine, make_shard())
        for point in points:
            _, state = ask_once(method, mine, state, torch.tensor([point]))
        expected = [[0.0, 3.0, 0.0], points[0]][:m]
        close(state["supports"][1], F.normalize(torch.tensor(expected), dim=1))


def test_t3a_refuses_a_deeper_head():
    deep = replace(NET, head_layers=2)
    with pytest.raises(InputError, match="head_layers is 2"):
        compose(deep, T3A()).check()


# kNN-Per


def knn_by_loops(method, mine, shard, x):
    """lambda, and the mixture of what neighbours and the model say."""
    knn = method.predictor

    def probabilities(images):
        h = NET.features(mine["body"], images)
        near = [
            oracles.knn_probabilities(one.double().numpy(), store, labels.tolist(), NET.classes, knn.k, knn.scale)
            for one in h
        ]
        said = NET.head(mine["head"], h).double()
        return near, list((said if isinstance(knn, LogitKNN) else said.softmax(-1)).numpy())

    real, val = shard.real, shard.val_real
    store = NET.features(mine["body"], scale(shard.x[real])).double().numpy()
    labels = shard.labels[real]
    lam = oracles.knn_lambda(*probabilities(scale(shard.val_x[val])), shard.val_labels[val].tolist(), knn.grid)
    return lam, np.array([lam * p + (1 - lam) * q for p, q in zip(*probabilities(x), strict=True)])


@pytest.mark.parametrize("k", [1, 3, 10, 30])
@pytest.mark.parametrize("scale_by", [0.2, 1.0])
def test_knn_equals_loops(k, scale_by):
    method = compose(NET, KNN(k=k, scale=scale_by))
    lams = set()
    for seed in range(4):
        mine, shard, x = make_mine(method, seed), make_shard(n=14, v=20, seed=seed), draw(8, 1, 16, 16, seed=seed)
        lam, expected = knn_by_loops(method, mine, shard, x)
        answers, state = answer(method, mine, x, shard)
        assert float(state["lambda"]) == pytest.approx(lam)
        close(answers.logits.exp(), expected)
        close(answers.logits.exp().sum(-1), torch.ones(len(x)))
        lams.add(lam)
    assert len(lams) > 1


def test_knn_on_logits_equals_loops():
    """As the FedTHE authors run it."""
    method = compose(NET, LogitKNN(k=3))
    for seed in range(4):
        mine, shard, x = make_mine(method, seed), make_shard(n=14, v=20, seed=seed), draw(8, 1, 16, 16, seed=seed)
        lam, expected = knn_by_loops(method, mine, shard, x)
        answers, state = answer(method, mine, x, shard)
        assert float(state["lambda"]) == pytest.approx(lam)
        close(answers.logits, expected)


def test_knn_lambda_comes_from_validation_rows_alone():
    method, shard = METHODS["knn"], make_shard(v=30)
    mine = make_mine(method)

    def lam(shard):
        return float(method.predictor.start(method, mine, shard)["lambda"])

    neighbours_know = shard._replace(val_x=shard.x, val_labels=shard.labels, val_real=shard.real)
    model_knows = shard._replace(val_labels=method.logits(mine, scale(shard.val_x)).argmax(-1))
    assert lam(model_knows) == 0  # as right as any other, and the smallest
    assert lam(neighbours_know) > 0
    assert lam(shard._replace(val_real=torch.zeros(30).bool())) == 0
    for x in (draw(8, 1, 16, 16), 9 * draw(3, 1, 16, 16, seed=1)):
        assert (answer(method, mine, x, neighbours_know)[0].info["lambda"] == lam(neighbours_know)).all()


def test_knn_with_fewer_rows_than_k():
    method = compose(NET, KNN(k=10))
    mine = make_mine(method)
    few = make_shard(n=3)
    close(answer(method, mine, shard=few)[0].logits, answer(method, mine, shard=pad(few, 40))[0].logits, 1e-6)


def test_far_neighbours_still_count():
    method = compose(NET, KNN(k=3, scale=1e-4))
    assert answer(method)[0].logits.isfinite().all()


# TTT


@pytest.mark.parametrize("steps", [1, 2])
def test_ttt_equals_sgd(steps):
    method = compose(NET, (TTT(), Online(lr=0.05, steps=steps)))
    mine, x = make_mine(method, dtype=torch.float64), draw(6, 1, 16, 16, dtype=torch.float64)
    head = mine["head"]

    def tell_direction(params, x):
        params = tree.unflatten(params)
        return NET.features(params["body"], x) @ params["rotation"].T

    def tell_class(params, x):
        return NET.head(head, NET.features(tree.unflatten(params)["body"], x))

    trained = tree.flatten({"body": mine["body"], "rotation": mine["rotation"]})
    expected, after = oracles.ttt_stream(tell_direction, tell_class, trained, x, 0.05, steps)
    answers, state = answer(method, mine, x)
    close(answers.logits, expected, 1e-10)
    tree.map_leaves(lambda a, b: close(a, b, 1e-10), state, tree.unflatten(after))


def test_ttt_learns_on_while_memo_forgets():
    x = draw(6, 1, 16, 16)
    back = torch.arange(5, -1, -1)
    for name, forgets in (("memo", True), ("lpft", True), ("tsa", True), ("ttt", False), ("t3a", False)):
        method = METHODS[name]
        mine, samples = make_mine(method), make_samples(method, x)
        state = method.predictor.start(method, mine, make_shard())
        forth, after = method.answer(mine, state, samples)
        reversed_samples = Samples(x[back], lambda positions, samples=samples: samples.views(back[positions]))
        reverse, _ = method.answer(mine, state, reversed_samples)
        assert torch.allclose(forth.logits, reverse.logits[back], atol=1e-5) is forgets
        assert (after == {}) is forgets
        if not forgets:
            assert not same(state, after)


def test_ttt_trains_both_tasks():
    method, shard = compose(NET, TTT()), make_shard(n=40)
    shared, _, mine = method.start(NET.init(0))
    upload = method.rounds.local(make_fit(shard), shared, {}, shard).params
    assert upload.keys() == shared.keys() == {"body", "head", "rotation"}
    upright = make_images(40) // 8 + (torch.arange(16)[:, None, None] * 14).byte()  # brighter below
    shard = shard._replace(x=upright)
    mine, _ = deploy(method, make_fit(shard, 30), shared, Received({}, mine), shard)
    x = scale(upright)[:10]
    told = [(NET.features(mine["body"], x.rot90(way, (-2, -1))) @ mine["rotation"].T).argmax(-1) for way in range(4)]
    assert (torch.stack(told) == torch.arange(4)[:, None]).float().mean() > 0.9
    close(answer(replace(method, predictor=Online(lr=0.0)), mine, x)[0].logits, NET.logits(mine, x))


def test_ttt_loss_by_hand():
    params = make_mine(compose(NET, TTT()), dtype=torch.float64)
    x, y = draw(6, 1, 16, 16, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0, 1])
    losses = TTT().loss(NET, params, {}, Batch(x, y, torch.ones(6), torch.ones(4)))
    for i in range(6):
        image = x[i]
        for _ in range(i % 4):
            image = image.flip(-1).transpose(-1, -2)
        turned = NET.features(params["body"], image[None]) @ params["rotation"].T
        close(
            losses[i],
            -NET.logits(params, x[i : i + 1]).log_softmax(1)[0, y[i]] - turned.log_softmax(1)[0, i % 4],
            1e-10,
        )
    fewer = TTT().loss(NET, params, {}, Batch(x[:4], y[:4], torch.ones(4), torch.ones(4)))
    close(losses[:4], fewer, 1e-10)  # rows behind, such as padding, change nothing


# TSA


@pytest.mark.parametrize(("steps", "lr"), [(10, 0.1), (3, 0.02), (0, 0.1)])
def test_tsa_equals_autograd(steps, lr):
    method = compose(NET, (TwoHeads(), TSA(steps=steps, lr=lr)))
    mine, x = make_mine(method, dtype=torch.float64), draw(6, 1, 16, 16, dtype=torch.float64)
    seen = make_views(method, 6, dtype=torch.float64)
    answers, _ = answer(method, mine, x, dtype=torch.float64)
    _, of_global, of_personal = heads(NET, mine, x)
    for i in range(6):
        e = oracles.tsa_weight(*heads(NET, mine, seen[i, 0])[1:], steps, lr)
        assert float(answers.info["e"][i]) == pytest.approx(e, abs=1e-6)  # Adam divides small gradients by small ones
        close(answers.logits[i], e * of_global[i] + (1 - e) * of_personal[i], 1e-5)
    assert ((answers.info["e"] - 0.5).abs() > 0.01).any() == (steps > 0)


# MEMO and LP-FT


def test_memo_equals_sgd():
    method = METHODS["memo"]
    mine, x = make_mine(method, dtype=torch.float64), draw(4, 1, 16, 16, dtype=torch.float64)
    seen = make_views(method, 4, dtype=torch.float64)
    answers, _ = answer(method, mine, x, dtype=torch.float64)
    for i in range(4):
        expected, _ = oracles.memo_answer(of_net, tree.flatten(mine), x[i : i + 1], seen[i], 0.05)
        close(answers.logits[i : i + 1], expected, 1e-7)


def test_lpft_equals_sgd_on_the_head_and_then_on_all():
    method = METHODS["lpft"]
    mine, x = make_mine(method, dtype=torch.float64), draw(4, 1, 16, 16, dtype=torch.float64)
    seen = make_views(method, 4, dtype=torch.float64)
    assert method.predictor.augments == (4, 4)
    answers, _ = answer(method, mine, x, dtype=torch.float64)
    for i in range(4):
        one = x[i : i + 1]
        _, probed = oracles.memo_answer(of_net, tree.flatten(mine), one, seen[i, :2], 0.1, {"head.out"})
        expected, _ = oracles.memo_answer(of_net, probed, one, seen[i, 2:], 0.05)
        close(answers.logits[i : i + 1], expected, 1e-7)
    without = replace(method, predictor=LPFT(Memo(views=4, steps=3, lr=0.05), probe_steps=0))
    close(
        answer(without, mine, x, dtype=torch.float64)[0].logits,
        answer(METHODS["memo"], mine, x, dtype=torch.float64)[0].logits,
        0,
    )


def test_lpft_probes_both_heads_of_two():
    method = compose(NET, TwoHeads())
    mine = make_mine(method)
    probed = LPFT(probe_lr=0.1).probe(method.logits, mine, draw(2, 4, 1, 16, 16))
    moved = {name for name in mine if not same({name: mine[name]}, {name: probed[name]})}
    assert moved == {"head", "personal"}


# probing


def test_probing_and_fine_tuning():
    shared, shard = NET.init(0), make_shard()

    def tune(part, shared=shared):
        return shared | part.personalize(make_fit(shard, 2), shared, {}, shard).params

    lp, ft, both = (tune(Probe(mode)) for mode in ("lp", "ft", "lpft"))
    assert same(lp["body"], shared["body"])
    assert not same(lp["head"], shared["head"])
    assert same(ft, tune(FineTune()))
    assert same(both, tune(FineTune(), lp))
    assert not same(both["body"], ft["body"])
    assert compose(NET, Probe("lp")).training == compose(NET, Probe("ft")).training == Method(NET, FedAvg())


# ablations


def test_ablations_are_the_rows_of_the_table():
    assert sorted(int(name[1:].split(")")[0]) for name in ABLATIONS) == list(range(1, 17))
    made = [compose(NET, recipe) for recipe in ABLATIONS.values()]
    assert len(set(made)) == 16


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_ablation_trains_and_answers(name):
    method = compose(NET, ABLATIONS[name])
    if isinstance(method.predictor, HeadEnsemble) and method.predictor.then:
        method = replace(method, predictor=replace(method.predictor, then=Memo(views=2)))
    (shared, averages, mine), shard = method.start(NET.init(0)), make_shard()
    fit, received = make_fit(shard), Received(averages, mine)
    assert work((method,), Fits(fit, fit), shared, [received], shard).upload.keys() == shared.keys()
    mine = shared | deploy(method, fit, shared, received, shard)[0]
    answers, _ = answer(method, mine, draw(3, 1, 16, 16))
    assert answers.logits.shape == (3, 4)
    assert answers.logits.isfinite().all()
