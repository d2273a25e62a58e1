"""The discriminant that all clients make: what they send, what the server makes of it, and the filter on it."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

import fedthe
from fedthe import tree
from fedthe.data import load_dataset
from fedthe.data.plan import Settings, build
from fedthe.data.pool import Dataset, Pool
from fedthe.engine.conclude import conclude
from fedthe.engine.evaluate import make_samples
from fedthe.engine.fit import Optimizer
from fedthe.engine.loop import Loop
from fedthe.engine.shards import Shards, stack_shards
from fedthe.engine.stack import Stack
from fedthe.engine.train import deploy_some, deploy_unlabeled, train
from fedthe.engine.visit import Run, Training
from fedthe.errors import Failed, InputError
from fedthe.methods import METHODS, compose
from fedthe.methods.base import FedAvg, Forward, Predictor
from fedthe.methods.discriminant import discriminate, fit_discriminant, sum_moments
from fedthe.methods.memo import Memo
from fedthe.methods.regime_filter import RegimeFilter
from fedthe.methods.two_heads import heads
from fedthe.methods.views import Views
from fedthe.nets import CNN
from fedthe.types import Shard, scale
from oracles_regime import best_temperature, regime_stream

NET = CNN(10, size=16)
SETTINGS = Training(
    rounds=2, local_epochs=1, batch=32, crop=0, flip=False, participation=0.5, optimizer=Optimizer(lr=0.05)
)
CLIENTS, UNSEEN = 4, (2,)


@cache
def trained():
    """A small federation after FedTHE's rounds, in which not every client took part, and one never."""
    pool = load_dataset("glyphs", size=16).pool
    few = Pool("few glyphs", pool.x[:600], pool.labels[:600], pool.classes)
    federation = build(Dataset(few), Settings(clients=CLIENTS, dirichlet=0.3))
    method, shards = compose(NET, METHODS["fedthe_regime_lda"]), Shards(federation)
    run = Run(0, shards, unseen=UNSEEN)
    return method, run, train(method.training, shards, SETTINGS, seed=0), federation


def pool_rows():
    """The features and labels of all rows that clients trained on, as if one machine had them."""
    _, run, reached, _ = trained()
    body = reached.server.shared["body"]
    with torch.no_grad():
        h = [NET.features(body, scale(run.shards[k].x)).double().numpy() for k in run.trained]
    return np.concatenate(h), np.concatenate([run.shards[k].labels.numpy() for k in run.trained])


def test_it_is_that_of_the_rows_of_all_clients_that_trained():
    method, run, reached, _ = trained()
    found = conclude(method, run, reached)["discriminant"]
    h, y = pool_rows()
    assert len(h) == sum(run.sizes) - run.sizes[2]
    within, means = np.zeros((NET.feature_dim, NET.feature_dim)), {}
    known = sorted({*y.tolist()})
    assert len(known) > 5
    for c in known:
        rows = h[y == c]
        means[c] = rows.mean(0)
        for row in rows - means[c]:
            within += np.outer(row, row) / len(h)
    within = 0.9 * within + 0.1 * np.trace(within) / len(within) * np.eye(len(within))
    for c in known:
        weight = np.linalg.inv(within) @ means[c]
        np.testing.assert_allclose(found["weight"][c], weight, rtol=1e-6, atol=1e-8)
        assert float(found["bias"][c]) == pytest.approx(-0.5 * means[c] @ weight, rel=1e-6)


def test_it_finds_normal_classes_of_one_covariance():
    """The differences of its logits are log-ratios of the classes' densities."""
    draw = np.random.default_rng(0)
    mixing, means = draw.normal(size=(3, 3)), 2 * draw.normal(size=(2, 3))
    y = np.arange(40_000) % 4 % 3 % 2  # the classes are not equally frequent
    h = means[y] + draw.normal(size=(len(y), 3)) @ mixing.T
    one_hot = np.eye(2)[y]
    moments = {"counts": one_hot.mean(0), "sums": one_hot.T @ h / len(h), "products": h.T @ h / len(h)}
    found = fit_discriminant({name: torch.from_numpy(each) for name, each in moments.items()}, shrink=0.0)
    x = draw.normal(size=(5, 3))
    inverse = np.linalg.inv(mixing @ mixing.T)
    log_density = np.stack([-0.5 * np.einsum("nd,de,ne->n", x - m, inverse, x - m) for m in means], -1)
    logits = discriminate(found, torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(np.diff(logits), np.diff(log_density), rtol=0.1, atol=0.1)


def test_a_class_that_no_client_has_is_never_answered_and_constant_features_are_no_fault():
    h = torch.randn(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts = torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64)
    sums = torch.stack([h[:25].mean(0) / 2, torch.zeros(4), h[25:].mean(0) / 2])
    found = fit_discriminant({"counts": counts, "sums": sums, "products": h.T @ h / 50})
    assert 1 not in discriminate(found, 100 * h).argmax(-1)
    nothing = fit_discriminant({"counts": counts, "sums": 0 * sums, "products": 0 * h.T @ h})
    assert all(leaf.isfinite().all() for leaf in nothing.values())


@pytest.mark.parametrize("engine", [Loop(), Stack()], ids=["loop", "stack"])
def test_every_client_deploys_it_labels_or_not(engine):
    method, run, reached, _ = trained()
    concluded = conclude(method, run, reached)
    states = deploy_some(method, run, SETTINGS, reached, engine, range(CLIENTS))
    unlabeled = deploy_unlabeled(method, run, reached, UNSEEN, concluded)
    for k, state in enumerate([*(tree.take(states, k) for k in range(CLIENTS)), tree.take(unlabeled, 0)]):
        for name, leaf in concluded["discriminant"].items():
            assert torch.equal(state["discriminant"][name], leaf), k
    plain = replace(method, predictor=RegimeFilter())
    assert conclude(plain, run, reached) == {}
    assert deploy_some(plain, run, SETTINGS, reached, engine, [0]).keys() == states.keys() - {"discriminant"}


def answer(predictor):
    method, run, reached, federation = trained()
    method = replace(method, predictor=predictor)
    mine = tree.take(deploy_some(method, run, SETTINGS, reached, Loop(), [0]), 0)
    x = torch.from_numpy(federation.inputs(federation.tests["mixture"][0])[:30])
    state = predictor.start(method, mine, run.shards[0])
    return method.answer(mine, state, make_samples(method, x, (0, "test", 0)))[0], mine, x


@pytest.mark.parametrize("weight", [0.5, 0.2, 1.0])
@pytest.mark.parametrize("then", [None, Memo(views=2, steps=1, lr=0.0)], ids=["", "memo"])
def test_the_filter_takes_the_geometric_mean_of_both_global_classifiers(weight, then):
    found, mine, x = answer(RegimeFilter(discriminant=weight, then=then))
    shard = trained()[1].shards[0]

    def look(x):
        h, of_global, of_personal = heads(NET, mine, scale(x))
        return of_global.double(), of_personal.double(), discriminate(mine["discriminant"], h).float().double()

    with torch.no_grad():
        seen, of_val = look(x), look(shard.val_x)
    grid = list(np.geomspace(0.3, 6, 40))
    t = [best_temperature(z.tolist(), shard.val_labels.tolist(), grid) for z in of_val]
    logs = [(z / temperature).log_softmax(-1) for z, temperature in zip(seen, t, strict=True)]
    shares = []
    for k in trained()[1].trained:  # the effective classes of each client
        p = np.bincount(trained()[1].shards[k].labels.numpy(), minlength=10) / trained()[1].sizes[k]
        shares += [np.exp(-(p[p > 0] * np.log(p[p > 0])).sum()) / 10] * trained()[1].sizes[k]
    weight = weight * (1 - np.mean(shares))
    both = (1 - weight) * logs[0] + weight * logs[2]
    answers, _ = regime_stream(both.tolist(), logs[1].tolist(), shard.counts.tolist())
    np.testing.assert_allclose(found.logits.exp(), [p for p, _ in answers], atol=1e-5)


def test_views_and_memo_work_on_it():
    plain, mirrored, tuned = (
        answer(RegimeFilter(discriminant=0.5, then=then))[0].logits
        for then in (None, Views(), Memo(views=2, steps=1, lr=0.01))
    )
    assert plain.shape == mirrored.shape == tuned.shape
    assert not torch.allclose(plain, mirrored)
    assert not torch.allclose(plain, tuned)


@pytest.mark.parametrize("then", [None, Memo(views=2, steps=1, lr=0.0)], ids=["", "memo"])
def test_everybodys_mix_may_be_that_of_all_clients_that_trained(then):
    found, mine, x = answer(RegimeFilter(federation=True, calibrate=False, then=then))
    _, run, reached, _ = trained()
    rows = np.bincount(pool_rows()[1], minlength=10)
    assert len({*rows.tolist()}) > 3
    np.testing.assert_allclose(mine["everybody"], 15 / 16 * rows / rows.sum() + 1 / 160, rtol=1e-6)
    with torch.no_grad():
        _, of_global, of_personal = heads(NET, mine, scale(x))
    counts = run.shards[0].counts.tolist()
    answers, _ = regime_stream(of_global.tolist(), of_personal.tolist(), counts, federation=rows.tolist())
    np.testing.assert_allclose(found.logits.exp(), [p for p, _ in answers], atol=1e-5)
    equal, _ = regime_stream(of_global.tolist(), of_personal.tolist(), counts)
    assert np.abs(np.array([p for p, _ in answers]) - np.array([p for p, _ in equal])).max() > 0.01
    both = conclude(replace(trained()[0], predictor=RegimeFilter(federation=True, discriminant=0.5)), run, reached)
    assert both.keys() == {"everybody", "discriminant"}
    assert torch.allclose(both["everybody"], mine["everybody"], rtol=1e-6)


def test_weights_out_of_range_are_refused():
    for weight in (-0.1, 1.1, float("nan"), None):
        with pytest.raises(InputError, match=r"discriminant must be from 0 to 1"):
            RegimeFilter(discriminant=weight)


@dataclass(frozen=True)
class Counting(Predictor):
    """What clients send may be anything: here, the share of their rows that are of class 0."""

    window = None
    name: str = "share"
    factor: float = 1.0

    def summarize(self, method, shared, shard):
        return {self.name: shard.counts[:1] / shard.counts.sum()}

    def conclude(self, method, mean):
        return {name: self.factor * leaf for name, leaf in mean.items()}

    def answer(self, method, mine, state, samples):
        return Forward().answer(method, mine, state, samples)


def test_the_mean_is_weighted_by_training_rows():
    _, _, reached, federation = trained()
    splits = [replace(split, train=split.train[: 20 * (k + 1)]) for k, split in enumerate(federation.clients)]
    run = Run(0, Shards(federation).resplit(splits), unseen=UNSEEN)
    method = compose(NET, (FedAvg(balanced=True), Counting(factor=2.0)))
    labels = np.concatenate([run.shards[k].labels.numpy() for k in run.trained])
    assert len({run.sizes[k] for k in run.trained}) > 1
    assert float(conclude(method, run, reached)["share"]) == pytest.approx(2 * (labels == 0).mean(), rel=1e-6)


@pytest.mark.parametrize(
    ("predictor", "error", "words"),
    [
        (Counting(name="head"), InputError, r"Counting.conclude returns 'head', which another part .* uses; rename it"),
        (Counting(factor=float("inf")), Failed, r"Counting.conclude: .* not finite"),
    ],
    ids=["clash", "infinite"],
)
def test_what_cannot_be_deployed_is_said_in_a_sentence(predictor, error, words):
    _, run, reached, _ = trained()
    method = compose(NET, (FedAvg(balanced=True), predictor))
    with pytest.raises(error, match=words):
        deploy_some(method, run, SETTINGS, reached, Loop(), [0])


def test_what_is_sent_is_told():
    said = fedthe.check_method("fedthe_regime_lda")
    assert "and after the last round counts [3], sums [3, 6], products [6, 6], effective [];" in said
    assert "discriminant.weight [3, 6], discriminant.bias [3], discriminant.share []." in said
    assert "after the last round" not in fedthe.check_method("fedthe_regime")


def test_rows_of_padding_do_not_count():
    _, run, reached, _ = trained()
    body, shard = reached.server.shared["body"], run.shards[0]
    padded = Shard(*(column[0] for column in stack_shards([shard], rows=len(shard.x) + 7)))
    assert len(padded.x) == len(shard.x) + 7
    for name, leaf in sum_moments(NET, body, shard).items():
        torch.testing.assert_close(sum_moments(NET, body, padded)[name], leaf)


def test_clients_see_what_the_server_averages_beside_the_model():
    @dataclass(frozen=True)
    class Averages(Counting):
        def summarize(self, method, shared, shard):
            return {"share": shared["rates"]}

    _, run, reached, _ = trained()
    method = compose(NET, (FedAvg(balanced=True), Averages()))
    assert float(conclude(method, run, replace(reached, averages={"rates": torch.ones(1)}))["share"]) == 1


def test_one_leaf_that_is_not_finite_is_enough():
    @dataclass(frozen=True)
    class Half(Counting):
        def conclude(self, method, mean):
            return {"share": mean["share"], "other": mean["share"] / 0}

    _, run, reached, _ = trained()
    with pytest.raises(Failed, match="not finite"):
        conclude(compose(NET, (FedAvg(balanced=True), Half())), run, reached)
