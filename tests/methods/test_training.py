"""The methods that train differently from FedAvg: each against its literal version, and what all of them promise."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import oracles
from fedthe import tree
from fedthe.engine.fit import Fit, Optimizer
from fedthe.engine.train import deploy, start, train
from fedthe.engine.visit import Training
from fedthe.errors import InputError
from fedthe.methods.apfl import APFL
from fedthe.methods.base import Method, Predictor
from fedthe.methods.ditto import Ditto
from fedthe.methods.fedrep import FedRep
from fedthe.methods.fedrod import FedRoD
from fedthe.methods.fedthe import FedTHE
from fedthe.methods.finetune import BalancedFedAvg, FineTune
from fedthe.methods.gma import GMA
from fedthe.methods.memo import Memo
from fedthe.methods.per_fedavg import PerFedAvg, split
from fedthe.methods.term import TERM
from fedthe.nets import CNN
from fedthe.nets.net import Net, Start, fan_in
from fedthe.types import Batch, Shard, scale

torch.set_num_threads(1)

CASES = {
    "fedavg_ft": FineTune,
    "fedavg_ft, ablation 16": lambda net: FineTune(net, balanced=True, balanced_personal=True),
    "gma": GMA,
    "apfl": APFL,
    "fedrep": FedRep,
    "ditto": Ditto,
    "fedrod": FedRoD,
    "per_fedavg": PerFedAvg,
    "per_fedavg, second order": lambda net: PerFedAvg(net, first_order=False),
    "term": TERM,
}
CLASSES = 3
NET = CNN(CLASSES, channels=1, size=16)
LR, DECAY = 0.1, 5e-4


@dataclass(frozen=True)
class Tiny(Net):
    """The model of the oracles, in the precision of its parameters."""

    @property
    def feature_dim(self) -> int:
        return 4

    def body_starts(self) -> dict[str, Start]:
        return {"w": fan_in(4, self.channels * self.size**2)}

    def features(self, body, x):
        return torch.tanh(F.linear(x.flatten(1).to(body["w"]), body["w"]))


TINY = Tiny(CLASSES, channels=1, size=5)


def make_shard(n=14, size=16, labels=None, pad=0, seed=0) -> Shard:
    """Squares, brighter by class, in noise; then `pad` rows of noise that are not real."""
    draws = np.random.default_rng(seed)
    y = draws.integers(0, CLASSES, 100)[: n + pad].astype(np.int64)
    if labels is not None:
        y[:n] = np.resize(labels, n)
    x = draws.integers(0, 100, (n + pad, size, size, 1)) + 70 * y[:, None, None, None]
    real = torch.arange(n + pad) < n
    counts = torch.bincount(torch.from_numpy(y[:n]), minlength=CLASSES).float()
    images, labels = torch.from_numpy(x.astype(np.uint8)), torch.from_numpy(y)
    return Shard(images, labels, real, counts, images[:0], labels[:0], real[:0])


def make_fit(phase="personal", epochs=2, decay=DECAY, lr=LR, **optimizer) -> Fit:
    return Fit(Optimizer(lr=lr, weight_decay=decay, **optimizer), epochs, 4, True, 1, (0, phase, 0), 0)


def list_batches(fit: Fit, shard: Shard):
    return [(batch.x, batch.y) for epoch in range(fit.epochs) for batch in fit.batches(shard, epoch)]


def draw(like, seed=0, scale=0.3):
    """A tree of other numbers."""
    draws = torch.Generator().manual_seed(seed)
    return tree.map_leaves(lambda leaf: leaf + scale * torch.randn(leaf.shape, generator=draws).to(leaf), like)


def tiny_params(seed=0):
    return tree.map_leaves(torch.Tensor.double, TINY.init(seed))


def leaves(params):
    return [params["body"]["w"], params["head"]["out"]]


def assert_same(one, other, **tolerance):
    one, other = tree.flatten(one), tree.flatten(other)
    assert one.keys() == other.keys()
    for name in one:
        if tolerance:
            torch.testing.assert_close(one[name], other[name], **tolerance)
        else:
            assert torch.equal(one[name], other[name]), name


def differ(one, other) -> bool:
    one, other = tree.flatten(one), tree.flatten(other)
    return any(not torch.equal(one[name], other[name]) for name in one)


def assert_near(one, other):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def finite(params) -> bool:
    return all(bool(leaf.isfinite().all()) for leaf in tree.flatten(params).values())


@pytest.fixture(params=CASES)
def case(request) -> Method:
    return CASES[request.param](NET)


def begin(method: Method):
    """Shared and personal state in the middle of training: not equal, not as they started."""
    shared, mine = method.init(method.net.init(0))
    mine = draw(mine, 2, 0.02)
    if "alpha" in mine:
        mine["alpha"] = torch.tensor(0.3)
    return draw(shared, 1, 0.02), mine


# Against the oracles, in float64


@pytest.mark.parametrize("balanced", [False, True])
def test_fine_tuning(balanced):
    params, shard = draw(tiny_params()), make_shard(size=5)
    method = FineTune(TINY, balanced_personal=balanced)
    fit = make_fit()
    mine = method.personalize(fit, params, params, shard)
    log_counts = torch.log(shard.counts + 1).double() if balanced else 0.0
    assert_near(leaves(mine), oracles.fine_tune(*leaves(params), list_batches(fit, shard), LR, DECAY, log_counts))


@pytest.mark.parametrize("balanced", [False, True])
def test_balanced_softmax_in_the_training_before_the_fine_tuning(balanced):
    params, shard = draw(tiny_params()), make_shard(size=5)
    fit = make_fit("local")
    upload = FineTune(TINY, balanced=balanced).local(fit, params, {}, shard)
    log_counts = torch.log(shard.counts + 1).double() if balanced else 0.0
    assert_near(leaves(upload), oracles.fine_tune(*leaves(params), list_batches(fit, shard), LR, DECAY, log_counts))


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.4, 0.6, 1.0])
@pytest.mark.parametrize("clients", [1, 2, 5, 20])
def test_gma_masks_by_sign_agreement(threshold, clients):
    shared = draw(tiny_params())
    uploads = [draw(shared, k + 1) for k in range(clients)]
    uploads[0]["head"]["out"][0] = shared["head"]["out"][0]  # a client that did not move has no sign
    got = GMA(TINY, threshold=threshold).aggregate(shared, tree.stack(uploads), torch.arange(1.0, clients + 1))
    for leaf, at, sent in zip(leaves(got), leaves(shared), zip(*map(leaves, uploads), strict=True), strict=True):
        torch.testing.assert_close(
            leaf, torch.from_numpy(oracles.gma_step(at, sent, threshold)), rtol=1e-12, atol=1e-13
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("votes", [0, 2, 6, 14, 20])
def test_gma_lets_agreement_equal_to_the_threshold_pass(votes, dtype):
    ahead = (20 + votes) // 2
    sent = {"w": torch.tensor([1.0] * ahead + [-1.0] * (20 - ahead), dtype=dtype)[:, None]}
    got = GMA(TINY, threshold=votes / 20).aggregate({"w": torch.zeros(1, dtype=dtype)}, sent, torch.ones(20))
    assert float(got["w"]) == pytest.approx(votes / 20)
    if votes:
        masked = GMA(TINY, threshold=min(1.0, votes / 20 + 0.01)).aggregate(
            {"w": torch.zeros(1, dtype=dtype)}, sent, torch.ones(20)
        )
        assert float(masked["w"]) == pytest.approx((votes / 20) ** 2)


def test_gma_at_threshold_0_is_the_uniform_mean():
    shared = tiny_params()
    uploads = tree.stack([draw(shared, k) for k in range(3)])
    got = GMA(TINY, threshold=0.0).aggregate(shared, uploads, torch.tensor([1.0, 5.0, 9.0]))
    assert_same(got, tree.weighted_mean(uploads, [1, 1, 1]), rtol=1e-12, atol=1e-13)


def test_apfl_slope_of_alpha():
    v, w, shard = draw(tiny_params(), 1), draw(tiny_params(), 2), make_shard(size=5, pad=3)
    alpha = torch.tensor(0.3, dtype=torch.float64)
    got = float(APFL(TINY).slope(alpha, v, w, shard))
    x, y = scale(shard.images[shard.real]), shard.labels[shard.real]
    assert got == pytest.approx(oracles.apfl_slope(0.3, leaves(v), leaves(w), x, y), rel=1e-11)
    assert got == pytest.approx(oracles.apfl_slope_by_difference(0.3, leaves(v), leaves(w), x, y), rel=1e-6)
    assert float(APFL(TINY).slope(alpha, v, w, shard, chunk=4)) == pytest.approx(got, rel=1e-12)


@pytest.mark.parametrize("lr", [0.1, 1000.0])
def test_apfl(lr):
    method, shard, shared = APFL(TINY), make_shard(size=5), draw(tiny_params(), 2)
    v = draw(tiny_params(), 1)
    mine = shared | {"personal": v, "alpha": torch.tensor(0.3, dtype=torch.float64)}
    fit = make_fit(lr=lr, epochs=1, decay=0.0)
    got = method.personalize(fit, shared, mine, shard)
    x, y = scale(shard.images), shard.labels
    alpha, trained = oracles.apfl_round(
        0.3, leaves(v), leaves(shared), x, y, list_batches(fit, shard), lr, weight_decay=0.0
    )
    assert float(got["alpha"]) == pytest.approx(alpha, rel=1e-11)
    assert 0 <= alpha <= 1
    assert alpha != 0.3
    if lr < 1:
        assert_near(leaves(got["personal"]), trained)
        assert_near(leaves(got), oracles.apfl_mixture(alpha, trained, leaves(shared)))


def test_apfl_keeps_alpha_while_both_models_are_equal():
    method = APFL(NET, alpha=0.7)
    shared, mine = method.init(NET.init(0))
    got = method.personalize(make_fit(), shared, mine, make_shard())
    assert float(got["alpha"]) == pytest.approx(0.7)
    assert differ(got["personal"], shared)


def test_apfl_deploys_the_mixture():
    method = APFL(TINY)
    shared, mine = begin(method)
    got = method.personalize(make_fit(), shared, mine, make_shard(size=5))
    x = scale(make_shard(size=5).images)
    mixture = oracles.apfl_mixture(got["alpha"].double(), leaves(got["personal"]), leaves(shared))
    expected = oracles.tiny_logits(*(leaf.double() for leaf in mixture), x)
    torch.testing.assert_close(method.logits(got, x).double(), expected, rtol=1e-5, atol=1e-6)


def test_fedrep():
    method, shard, params = FedRep(TINY), make_shard(size=5), draw(tiny_params(), 1)
    shared, mine = method.init(params)
    mine = mine | {"body": draw(params["body"], 3)}  # of the round before
    personal, local = make_fit("personal"), make_fit("local")
    mine = method.personalize(personal, shared, mine, shard)
    upload = method.local(local, shared, mine, shard)
    head, body = oracles.fedrep_round(
        *leaves(params), list_batches(personal, shard), list_batches(local, shard), LR, DECAY
    )
    assert_near([mine["head"]["out"], upload["body"]["w"]], [head, body])
    assert torch.equal(mine["body"]["w"], params["body"]["w"])  # deployed: the received body


@pytest.mark.parametrize("lam", [0.0, 1.0, 5.0])
def test_ditto(lam):
    shard, shared, v = make_shard(size=5), draw(tiny_params(), 1), draw(tiny_params(), 2)
    fit = make_fit(decay=0.3)  # which Ditto does not take
    got = Ditto(TINY, lam=lam).personalize(fit, shared, v, shard)
    assert_near(leaves(got), oracles.ditto_round(leaves(v), leaves(shared), list_batches(fit, shard), LR, lam))


def test_ditto_is_pulled_the_more_the_greater_lambda():
    shard, shared, v = make_shard(size=5), draw(tiny_params(), 1), draw(tiny_params(), 2)

    def distance(lam):
        got = Ditto(TINY, lam=lam).personalize(make_fit(), shared, v, shard)
        return sum(float((a - b).square().sum()) for a, b in zip(leaves(got), leaves(shared), strict=True))

    assert distance(0.0) > distance(0.1) > distance(1.0) > distance(5.0)


def test_fedrod():
    method, shard, shared = FedRoD(TINY), make_shard(size=5), draw(tiny_params(), 1)
    personal = {"out": 0.1 * draw(tiny_params(), 2)["head"]["out"]}
    fit = make_fit()
    mine = method.personalize(fit, shared, shared | {"personal": personal}, shard)
    expected = oracles.fedrod_personal(*leaves(shared), personal["out"], list_batches(fit, shard), LR, DECAY)
    assert_near([mine["personal"]["out"], *leaves(mine)], [expected, *leaves(shared)])
    x = scale(shard.images)
    answer = oracles.tiny_logits(shared["body"]["w"], shared["head"]["out"] + expected, x)
    assert_near([method.logits(mine, x)], [answer])
    local = make_fit("local")
    upload = method.local(local, shared, mine, shard)
    log_counts = torch.log(shard.counts + 1).double()
    assert_near(leaves(upload), oracles.fine_tune(*leaves(shared), list_batches(local, shard), LR, DECAY, log_counts))


@pytest.mark.parametrize("head_layers", [1, 2])
def test_fedrod_starts_as_the_generic_model_and_learns(head_layers):
    net = replace(NET, head_layers=head_layers)
    method, shard = FedRoD(net), make_shard()
    shared, mine = method.init(net.init(0))
    x = scale(shard.images)
    assert torch.equal(method.logits(mine, x), net.logits(shared, x))
    got = method.personalize(make_fit(), shared, mine, shard)
    assert not any(torch.equal(got["personal"][name], mine["personal"][name]) for name in mine["personal"])


@pytest.mark.parametrize("first_order", [True, False])
@pytest.mark.parametrize("n", [1, 2, 13, 14])
def test_per_fedavg(first_order, n):
    shard, shared = make_shard(n, size=5), draw(tiny_params(), 1)
    method = PerFedAvg(TINY, inner_lr=0.5, first_order=first_order)
    fit = make_fit("local")
    upload = method.local(fit, shared, shared, shard)
    expected = oracles.per_fedavg_local(leaves(shared), list_batches(fit, shard), LR, DECAY, 0.5, first_order)
    assert_near(leaves(upload), expected)


def test_per_fedavg_deploys_a_fine_tuned_model():
    shard, shared = make_shard(size=5), draw(tiny_params(), 1)
    fit = make_fit()
    mine = PerFedAvg(TINY).personalize(fit, shared, draw(shared, 2), shard)
    assert_near(leaves(mine), oracles.fine_tune(*leaves(shared), list_batches(fit, shard), LR, DECAY))


def test_per_fedavg_value_is_the_outer_mean():
    shard, params = make_shard(7, size=5), draw(tiny_params(), 1)
    x, y = scale(shard.images), shard.labels
    got = PerFedAvg(TINY, inner_lr=0.0).meta_loss(params, {}, Batch(x, y, torch.ones(7), shard.counts))
    expected = oracles.mean_nll(oracles.tiny_logits(*leaves(params), x[1::2]), y[1::2])
    assert float(got.mean()) == pytest.approx(float(expected), rel=1e-12)


def test_per_fedavg_splits_the_real_rows_wherever_the_padding_stands():
    inner, outer = split(torch.tensor([1.0, 0, 1, 1, 0, 0, 1, 1]))
    assert inner.tolist() == [1, 0, 0, 1, 0, 0, 0, 1]
    assert outer.tolist() == [0, 0, 1, 0, 0, 0, 1, 0]
    inner, outer = split(torch.tensor([0.0, 1, 0]))
    assert inner.tolist() == outer.tolist() == [0, 1, 0]


def test_per_fedavg_without_an_inner_step_is_fedavg_on_half_of_the_rows():
    shard, params = make_shard(8, size=5), draw(tiny_params(), 1)
    steps = [PerFedAvg(TINY, inner_lr=0.0, first_order=order) for order in (True, False)]
    assert_same(*(step.local(make_fit("local"), params, {}, shard) for step in steps))


@pytest.mark.parametrize("tilt", [-2.0, 1e-4, 1.0, 10.0])
def test_term(tilt):
    shard, params = make_shard(size=5), draw(tiny_params(), 1, 1.0)
    batch = Batch(scale(shard.images), shard.labels, torch.ones(14, dtype=torch.float64), shard.counts)
    plain = Method(TINY).loss(params, {}, batch)
    got = TERM(TINY, tilt=tilt).loss(params, {}, batch)
    assert got.shape == plain.shape
    assert float(got.mean()) == pytest.approx(oracles.tilted_mean(plain, tilt), rel=1e-9)
    at = [leaf.requires_grad_() for leaf in leaves(params)]
    got = torch.autograd.grad(TERM(TINY, tilt=tilt).loss(params, {}, batch).mean(), at)
    losses = Method(TINY).loss(params, {}, batch)
    share = torch.exp(tilt * losses.detach())
    expected = torch.autograd.grad((share / share.sum() * losses).sum(), at)  # the paper's lemma 1
    assert_near(got, expected)


# What all of them promise


def test_uploads_are_like_shared(case):
    shared, mine = begin(case)
    upload = case.local(make_fit("local"), shared, mine, make_shard())
    assert {name: leaf.shape for name, leaf in tree.flatten(upload).items()} == {
        name: leaf.shape for name, leaf in tree.flatten(shared).items()
    }


def test_personal_state_never_leaves(case):
    shared, mine = begin(case)
    other = draw(mine, 7, 0.1)
    one, two = (case.local(make_fit("local"), shared, state, make_shard()) for state in (mine, other))
    if isinstance(case, FedRep):  # whose body is trained under the personal head
        assert differ(one, two)
        assert one.keys() == {"body"}
    else:
        assert_same(one, two)


def test_inputs_stay_as_they_are(case):
    shared, mine, shard = *begin(case), make_shard(pad=2)
    before = [tree.map_leaves(torch.clone, state) for state in (shared, mine, shard._asdict())]
    got = case.personalize(make_fit(), shared, mine, shard)
    kept = tree.map_leaves(torch.clone, got)
    upload = case.local(make_fit("local"), shared, got, shard)
    case.aggregate(shared, tree.stack([upload, shared]), torch.ones(2))
    for state, was in zip((shared, mine, shard._asdict(), got), (*before, kept), strict=True):
        assert_same(state, was)
    assert not any(leaf.requires_grad for state in (got, upload) for leaf in tree.flatten(state).values())


def test_the_same_inputs_give_the_same_bits(case):
    shared, mine, shard = *begin(case), make_shard()
    for phase in ("personal", "local"):
        act = case.personalize if phase == "personal" else case.local
        assert_same(*(act(make_fit(phase), shared, mine, shard) for _ in range(2)))


@pytest.mark.parametrize("shard", [make_shard(9, labels=[2]), make_shard(1), make_shard(5), make_shard(0)])
def test_clients_of_one_class_one_row_or_none(case, shard):
    shared, mine = begin(case)
    mine = case.personalize(make_fit(), shared, mine, shard)
    upload = case.local(make_fit("local"), shared, mine, shard)
    assert finite(mine)
    assert finite(upload)
    assert finite(case.aggregate(shared, tree.stack([upload]), torch.tensor([max(1.0, float(shard.real.sum()))])))
    assert case.logits(mine, scale(make_shard(2).images)).shape == (2, CLASSES)


@pytest.mark.parametrize("n", [1, 14])
def test_padding_changes_nothing(case, n):
    shared, mine = begin(case)
    shards = make_shard(n), make_shard(n, pad=5)
    one, two = (case.personalize(make_fit(), shared, mine, shard) for shard in shards)
    # APFL's slope is a sum over all rows, which may be added in another order
    assert_same(one, two, **({"rtol": 1e-5, "atol": 1e-6} if isinstance(case, APFL) else {}))
    assert_same(*(case.local(make_fit("local"), shared, one, shard) for shard in shards))


LOSSES = {
    "ditto": lambda m, p, g, b: m(Ditto).pulled_loss(p, g, b),
    "apfl": lambda m, p, g, b: m(APFL).mixed_loss(p, {"alpha": g["head"]["out"].sum().sigmoid(), "received": g}, b),
    "fedrep head": lambda m, p, g, b: m(FedRep).head_loss(p["head"], {"body": g["body"]}, b),
    "fedrep body": lambda m, p, g, b: m(FedRep).body_loss(p["body"], {"head": g["head"]}, b),
    "fedrod": lambda m, p, g, b: m(FedRoD).loss(p, {}, b),
    "fedrod personal": lambda m, p, g, b: m(FedRoD).personal_loss(p["head"], g, b),
    "balanced": lambda m, p, g, b: m(BalancedFedAvg).loss(p, {}, b),
    "per_fedavg": lambda m, p, g, b: m(PerFedAvg).meta_loss(p, {}, b),
    "per_fedavg, second order": lambda m, p, g, b: PerFedAvg(m(Method).net, first_order=False).meta_loss(p, {}, b),
    "term": lambda m, p, g, b: m(TERM).loss(p, {}, b),
}


def mean_of(name, net):
    def mean_loss(params, given, batch):
        losses = LOSSES[name](lambda kind: kind(net), params, given, batch)
        return (losses * batch.weight).sum() / batch.weight.sum().clamp(min=1)

    return mean_loss


def gradient_of(name, net):
    return torch.func.grad(mean_of(name, net))


def pad(batch: Batch, rows: int) -> Batch:
    extra = make_shard(rows, batch.x.shape[-1], seed=9)
    x, y = torch.cat([batch.x, scale(extra.images)]), torch.cat([batch.y, extra.labels])
    return Batch(x, y, torch.cat([batch.weight, torch.zeros(rows)]), batch.counts)


def make_batch(n, size, seed=0) -> Batch:
    shard = make_shard(n, size, seed=seed)
    return Batch(scale(shard.images), shard.labels, torch.ones(n), shard.counts)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("n", [1, 4])
def test_padding_within_a_batch_changes_no_gradient(name, n):
    params, given, batch = draw(tiny_params(), 1), draw(tiny_params(), 2), make_batch(n, 5)
    one, two = (gradient_of(name, TINY)(params, given, b) for b in (batch, pad(batch, 3)))
    assert_same(one, two, rtol=1e-11, atol=1e-12)
    empty = batch._replace(weight=torch.zeros(n))
    assert float(mean_of(name, TINY)(params, given, empty)) == 0
    assert not any(leaf.any() for leaf in tree.flatten(gradient_of(name, TINY)(params, given, empty)).values())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("net", [TINY, NET])
def test_losses_are_lifted_over_clients(name, net):
    clients = range(3)
    params = [draw(net.init(k), k, 0.05) for k in clients]
    given = [draw(net.init(k), k + 5, 0.05) for k in clients]
    batches = [pad(make_batch(4 + k, net.size, k), 2 - k) for k in clients]
    gradient = gradient_of(name, net)
    stacked = Batch(*(torch.stack(parts) for parts in zip(*batches, strict=True)))
    lifted = torch.func.vmap(gradient)(tree.stack(params), tree.stack(given), stacked)
    for k in clients:
        assert_same(tree.take(lifted, k), gradient(params[k], given[k], batches[k]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_give_torch_func_and_backward_the_same_gradient(name):
    params, given, batch = draw(tiny_params(), 1), draw(tiny_params(), 2), make_batch(5, 5)
    expected = gradient_of(name, TINY)(params, given, batch)
    at = tree.map_leaves(lambda leaf: leaf.clone().requires_grad_(), params)
    losses = LOSSES[name](lambda kind: kind(TINY), at, given, batch)
    gradients = torch.autograd.grad(losses.mean(), leaves(at), allow_unused=True, materialize_grads=True)
    assert_near(gradients, leaves(expected))


def test_apfl_slope_is_lifted_over_clients():
    shards = [make_shard(4 + k, 5, pad=2 - k, seed=k) for k in range(3)]
    v, w = [draw(tiny_params(), k) for k in range(3)], draw(tiny_params(), 9)
    alpha = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    stacked = Shard(*(torch.stack(parts) for parts in zip(*shards, strict=True)))

    def slope(alpha, v, w, *parts):
        return APFL(TINY).slope(alpha, v, w, Shard(*parts))

    lifted = torch.func.vmap(slope, in_dims=(0, 0, None, *[0] * 7))(alpha, tree.stack(v), w, *stacked)
    assert_near(lifted, [slope(alpha[k], v[k], w, *shards[k]) for k in range(3)])


# Through the engine

CLIENTS = [make_shard(10, labels=[0, 1], seed=1), make_shard(7, labels=[2], seed=2), make_shard(12, seed=3)]
SETTINGS = Training(rounds=2, local_epochs=2, batch=4, crop=1, optimizer=Optimizer(lr=0.05))


def run(method: Method):
    """Shared state, and every client's logits, after two rounds."""
    progress = train(method.trains_as(), CLIENTS, SETTINGS, 0)
    deployed = deploy(method, CLIENTS, SETTINGS, 0, progress)
    x = scale(make_shard(20, seed=4).images)
    return progress, torch.stack([method.logits(mine, x) for mine in deployed])


def test_two_rounds(case):
    progress, logits = run(case)
    assert progress.round == 2
    assert logits.shape == (3, 20, CLASSES)
    assert finite(progress.shared | {"logits": logits})
    assert differ(progress.shared, start(case.trains_as(), 3, 0).shared)
    personal = not isinstance(case, GMA | TERM)
    assert torch.equal(logits[0], logits[1]) is not personal


@pytest.mark.parametrize(
    ("one", "other", "same_training"),
    [
        (FineTune(NET), FineTune(NET, balanced=True), False),
        (FineTune(NET), FineTune(NET, balanced_personal=True), True),
        (GMA(NET), GMA(NET, threshold=0.9), False),
        (APFL(NET), APFL(NET, alpha=0.1), True),
        (Ditto(NET), Ditto(NET, lam=0.1), True),
        (PerFedAvg(NET), PerFedAvg(NET, inner_lr=0.1), False),
        (PerFedAvg(NET), PerFedAvg(NET, first_order=False), False),
        (TERM(NET), TERM(NET, tilt=2.0), False),
        (TERM(NET), TERM(NET, tilt=-1.0), False),
    ],
    ids=str,
)
def test_every_hyperparameter_changes_the_outcome(one, other, same_training):
    (progress, logits), (others_progress, others_logits) = run(one), run(other)
    assert not torch.equal(logits, others_logits)
    assert differ(progress.shared, others_progress.shared) is not same_training


def test_every_hyperparameter_is_tried():
    tried = {"balanced", "balanced_personal", "threshold", "alpha", "lam", "inner_lr", "first_order", "tilt"}
    kinds = (FineTune, GMA, APFL, FedRep, Ditto, FedRoD, PerFedAvg, TERM)
    assert {name for kind in kinds for name in kind.__dataclass_fields__} - {"net", "predictor"} == tried


@pytest.mark.parametrize("kind", [FineTune, APFL])
def test_global_models_that_are_those_of_fedavg(kind):
    fedavg, _ = run(Method(NET))
    progress, _ = run(kind(NET))
    assert_same(progress.shared, fedavg.shared)
    assert progress.losses == fedavg.losses


def test_what_is_trained_once():
    memo = Memo(views=2)
    assert FineTune(NET).trains_as() == FineTune(NET, predictor=memo).trains_as() == Method(NET)
    assert Method(NET, predictor=memo).trains_as() == Method(NET)
    assert FineTune(NET, balanced_personal=True).trains_as() == Method(NET)
    balanced = FineTune(NET, balanced=True)
    assert balanced.trains_as() == replace(balanced, balanced_personal=True).trains_as() == BalancedFedAvg(NET)
    assert BalancedFedAvg(NET).trains_as() == BalancedFedAvg(NET) != Method(NET)
    for kind in (GMA, APFL, FedRep, Ditto, FedRoD, PerFedAvg, TERM):
        assert kind(NET, predictor=memo).trains_as() == kind(NET, predictor=Predictor()) != Method(NET)


@pytest.mark.parametrize(
    ("kind", "hook"),
    [
        *((kind, hook) for kind in (FineTune, FedTHE) for hook in ("init", "local", "aggregate", "loss")),
        *((FedTHE, hook) for hook in ("personalize", "personal_loss", "_loss")),
    ],
)
def test_what_training_would_ignore_is_refused(kind, hook):
    lost = type("Mine", (kind,), {hook: lambda self, *args: None})
    with pytest.raises(InputError, match=f"Mine overrides {hook}, .* override trains_as as well"):
        lost(NET).check()
    type("Mine", (lost,), {"trains_as": Method.trains_as})(NET).check()
    type("Mine", (Method,), {hook: lambda self, *args: None})(NET).check()


def test_what_training_does_not_call_may_be_overridden():
    for kind, hook in ((FineTune, "personalize"), (FineTune, "logits"), (FedTHE, "logits"), (FedTHE, "heads")):
        type("Mine", (kind,), {hook: lambda self, *args: None})(NET).check()
    with pytest.raises(InputError, match="Mine overrides loss"):
        type("Mine", (FineTune, TERM), {})(NET).check()  # TERM's


def test_fine_tuning_is_the_same_whether_trained_as_fedavg_or_as_itself():
    method = FineTune(NET, balanced=True)
    _, logits = run(method)
    progress = train(method, CLIENTS, SETTINGS, 0)
    deployed = deploy(method, CLIENTS, SETTINGS, 0, progress)
    x = scale(make_shard(20, seed=4).images)
    assert torch.equal(torch.stack([method.logits(mine, x) for mine in deployed]), logits)


def test_deployed_clients_fit_their_own_rows(case):
    settings = replace(SETTINGS, rounds=4)
    progress = train(case.trains_as(), CLIENTS, settings, 0)
    deployed = deploy(case, CLIENTS, settings, 0, progress)

    def mean_loss(method, mine):
        losses = [
            F.cross_entropy(method.logits(mine[k], scale(shard.images)), shard.labels)
            for k, shard in enumerate(CLIENTS)
        ]
        return float(torch.stack(losses).mean())

    assert mean_loss(case, deployed) < mean_loss(case, start(case, 3, 0).mine)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (GMA, {"threshold": 1.1}),
        (GMA, {"threshold": float("nan")}),
        (APFL, {"alpha": -0.1}),
        (Ditto, {"lam": -1.0}),
        (PerFedAvg, {"inner_lr": -0.1}),
        (TERM, {"tilt": 0.0}),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(kind, wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        kind(NET, **wrong)
