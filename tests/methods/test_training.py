"""The methods that train differently from FedAvg: each against its literal version, and what all of them promise."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch.nn import functional as F

import oracles
from fedthe import tree
from fedthe.engine.client import Received
from fedthe.engine.client import deploy as deploy_one
from fedthe.engine.fit import LoopFit, Optimizer
from fedthe.engine.train import deploy, start, train
from fedthe.engine.visit import Training
from fedthe.errors import InputError
from fedthe.methods import compose
from fedthe.methods.apfl import APFL, differentiate_alpha
from fedthe.methods.authors import AUTHORS, AveragedRep, LogitAPFL, TunedRoD
from fedthe.methods.base import FedAvg, Method, Personal
from fedthe.methods.ditto import Ditto
from fedthe.methods.fedrep import FedRep
from fedthe.methods.fedrod import FedRoD
from fedthe.methods.finetune import FineTune
from fedthe.methods.gma import GMA
from fedthe.methods.memo import Memo
from fedthe.methods.per_fedavg import PerFedAvg, split
from fedthe.methods.term import TERM
from fedthe.nets import CNN
from fedthe.types import Batch, Shard, scale
from tiny_net import CLASSES, TINY, draw, leaves, list_batches, make_shard, tiny_params

torch.set_num_threads(1)

BALANCED = FedAvg(balanced=True)
CASES = {
    "fedavg_ft": FineTune(),
    "fedavg_ft, ablation 16": (BALANCED, FineTune(balanced_personal=True)),
    "gma": GMA(),
    "apfl": APFL(),
    "fedrep": FedRep(),
    "ditto": Ditto(),
    "fedrod": (BALANCED, FedRoD()),
    "per_fedavg": (PerFedAvg(), FineTune()),
    "per_fedavg, second order": (PerFedAvg(first_order=False), FineTune()),
    "term": TERM(),
    "authors_fedrod": AUTHORS["authors_fedrod"],
    "authors_fedrep": AUTHORS["authors_fedrep"],
    "authors_apfl": AUTHORS["authors_apfl"],
}
NET = CNN(CLASSES, channels=1, size=16)
LR, DECAY = 0.1, 5e-4


def make_fit(shard, phase="personal", epochs=2, decay=DECAY, lr=LR, net=NET, **optimizer) -> LoopFit:
    settings = Optimizer(lr=lr, weight_decay=decay, **optimizer)
    return LoopFit(net, shard, settings, epochs, 4, True, 1, (0, phase, 0), 0)


def tiny_fit(shard, phase="personal", **settings) -> LoopFit:
    return make_fit(shard, phase, net=TINY, **settings)


def personalize(method: Method, fit: LoopFit, shared, mine):
    """What a client deploys that received `shared` and keeps `mine` for its personal part."""
    return shared | deploy_one(method, fit, shared, Received({}, {"personal": mine}), fit.shard)[0]


def upload(method: Method, fit: LoopFit, shared, mine):
    return method.rounds.local(fit, shared, mine, fit.shard).params


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
    return compose(NET, CASES[request.param])


def begin(method: Method):
    """Shared and personal state in the middle of training: not equal, not as they started."""
    shared, averages, mine = method.start(method.net.init(0))
    assert not averages
    assert not mine["rounds"]
    mine = draw(mine["personal"], 2, 0.02)
    if "alpha" in mine:
        mine["alpha"] = torch.tensor(0.3)
    return draw(shared, 1, 0.02), mine


# Against the oracles, in float64


@pytest.mark.parametrize("balanced", [False, True])
def test_fine_tuning(balanced):
    params, shard = draw(tiny_params()), make_shard(size=5)
    fit = tiny_fit(shard)
    mine = personalize(compose(TINY, FineTune(balanced_personal=balanced)), fit, params, {})
    log_counts = torch.log(shard.counts + 1).double() if balanced else 0.0
    assert_near(leaves(mine), oracles.fine_tune(*leaves(params), list_batches(fit), LR, DECAY, log_counts))


@pytest.mark.parametrize("balanced", [False, True])
def test_balanced_softmax_in_the_training_before_the_fine_tuning(balanced):
    params, shard = draw(tiny_params()), make_shard(size=5)
    fit = tiny_fit(shard, "local")
    sent = upload(compose(TINY, (FedAvg(balanced), FineTune())), fit, params, {})
    log_counts = torch.log(shard.counts + 1).double() if balanced else 0.0
    assert_near(leaves(sent), oracles.fine_tune(*leaves(params), list_batches(fit), LR, DECAY, log_counts))


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.4, 0.6, 1.0])
@pytest.mark.parametrize("clients", [1, 2, 5, 20])
def test_gma_masks_by_sign_agreement(threshold, clients):
    shared = draw(tiny_params())
    uploads = [draw(shared, k + 1) for k in range(clients)]
    uploads[0]["head"]["out"][0] = shared["head"]["out"][0]  # a client that did not move has no sign
    got = GMA(threshold=threshold).aggregate(shared, tree.stack(uploads), torch.arange(1.0, clients + 1))
    for leaf, at, sent in zip(leaves(got), leaves(shared), zip(*map(leaves, uploads), strict=True), strict=True):
        torch.testing.assert_close(
            leaf, torch.from_numpy(oracles.gma_step(at, sent, threshold)), rtol=1e-12, atol=1e-13
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("votes", [0, 2, 6, 14, 20])
def test_gma_lets_agreement_equal_to_the_threshold_pass(votes, dtype):
    ahead = (20 + votes) // 2
    sent = {"w": torch.tensor([1.0] * ahead + [-1.0] * (20 - ahead), dtype=dtype)[:, None]}
    got = GMA(threshold=votes / 20).aggregate({"w": torch.zeros(1, dtype=dtype)}, sent, torch.ones(20))
    assert float(got["w"]) == pytest.approx(votes / 20)
    if votes:
        masked = GMA(threshold=min(1.0, votes / 20 + 0.01)).aggregate(
            {"w": torch.zeros(1, dtype=dtype)}, sent, torch.ones(20)
        )
        assert float(masked["w"]) == pytest.approx((votes / 20) ** 2)


def test_gma_at_threshold_0_is_the_uniform_mean():
    shared = tiny_params()
    uploads = tree.stack([draw(shared, k) for k in range(3)])
    got = GMA(threshold=0.0).aggregate(shared, uploads, torch.tensor([1.0, 5.0, 9.0]))
    assert_same(got, tree.weighted_mean(uploads, [1, 1, 1]), rtol=1e-12, atol=1e-13)


def test_apfl_gradient_of_alpha():
    v, w, shard = draw(tiny_params(), 1), draw(tiny_params(), 2), make_shard(size=5, pad=3)
    alpha = torch.tensor(0.3, dtype=torch.float64)
    given = {"alpha": alpha, "received": w}
    got = float(differentiate_alpha(APFL().loss, TINY, v, given, shard))
    x, y = scale(shard.x[shard.real]), shard.labels[shard.real]
    assert got == pytest.approx(oracles.apfl_gradient(0.3, leaves(v), leaves(w), x, y), rel=1e-11)
    assert got == pytest.approx(oracles.apfl_gradient_by_difference(0.3, leaves(v), leaves(w), x, y), rel=1e-6)
    in_chunks = differentiate_alpha(APFL().loss, TINY, v, given, shard, chunk=4)
    assert float(in_chunks) == pytest.approx(got, rel=1e-12)


@pytest.mark.parametrize("lr", [0.1, 1000.0])
def test_apfl(lr):
    shard, shared = make_shard(size=5), draw(tiny_params(), 2)
    v = draw(tiny_params(), 1)
    mine = {"personal": v, "alpha": torch.tensor(0.3, dtype=torch.float64)}
    fit = tiny_fit(shard, lr=lr, epochs=1, decay=0.0)
    got = personalize(compose(TINY, APFL()), fit, shared, mine)
    x, y = scale(shard.x), shard.labels
    alpha, trained = oracles.apfl_round(0.3, leaves(v), leaves(shared), x, y, list_batches(fit), lr, weight_decay=0.0)
    assert float(got["alpha"]) == pytest.approx(alpha, rel=1e-11)
    assert 0 <= alpha <= 1
    assert alpha != 0.3
    if lr < 1:
        assert_near(leaves(got["personal"]), trained)
        assert_near(leaves(got), oracles.apfl_mixture(alpha, trained, leaves(shared)))


def test_apfl_keeps_alpha_while_both_models_are_equal():
    method = compose(NET, APFL(alpha=0.7))
    shared, _, mine = method.start(NET.init(0))
    got = personalize(method, make_fit(make_shard()), shared, mine["personal"])
    assert float(got["alpha"]) == pytest.approx(0.7)
    assert differ(got["personal"], shared)


def test_apfl_deploys_the_mixture():
    method = compose(TINY, APFL())
    shared, mine = begin(method)
    got = personalize(method, tiny_fit(make_shard(size=5)), shared, mine)
    x = scale(make_shard(size=5).x)
    mixture = oracles.apfl_mixture(got["alpha"].double(), leaves(got["personal"]), leaves(shared))
    expected = oracles.tiny_logits(*(leaf.double() for leaf in mixture), x)
    torch.testing.assert_close(method.logits(got, x).double(), expected, rtol=1e-5, atol=1e-6)


def test_fedrep():
    method, shard, params = compose(TINY, FedRep()), make_shard(size=5), draw(tiny_params(), 1)
    shared, _, mine = method.start(params)
    assert mine["personal"].keys() == {"head"}  # no body of the round before
    personal, local = tiny_fit(shard), tiny_fit(shard, "local")
    mine = personalize(method, personal, shared, mine["personal"])
    sent = upload(method, local, shared, {"head": mine["head"]})
    head, body = oracles.fedrep_round(*leaves(params), list_batches(personal), list_batches(local), LR, DECAY)
    assert_near([mine["head"]["out"], sent["body"]["w"]], [head, body])
    assert torch.equal(mine["body"]["w"], params["body"]["w"])  # deployed: the received body


@pytest.mark.parametrize("lam", [0.0, 1.0, 5.0])
def test_ditto(lam):
    shard, shared, v = make_shard(size=5), draw(tiny_params(), 1), draw(tiny_params(), 2)
    method, fit = compose(TINY, Ditto(lam=lam)), tiny_fit(shard, decay=0.3)  # which Ditto does not take
    got = personalize(method, fit, shared, v)
    assert_near(leaves(got), oracles.ditto_round(leaves(v), leaves(shared), list_batches(fit), LR, lam))
    local = tiny_fit(shard, "local", decay=0.3)
    sent = upload(method, local, shared, v)
    assert_near(leaves(sent), oracles.fine_tune(*leaves(shared), list_batches(local), LR, 0.0))


def test_ditto_is_pulled_the_more_the_greater_lambda():
    shard, shared, v = make_shard(size=5), draw(tiny_params(), 1), draw(tiny_params(), 2)

    def distance(lam):
        got = personalize(compose(TINY, Ditto(lam=lam)), tiny_fit(shard), shared, v)
        return sum(float((a - b).square().sum()) for a, b in zip(leaves(got), leaves(shared), strict=True))

    assert distance(0.0) > distance(0.1) > distance(1.0) > distance(5.0)


def test_fedrod():
    method, shard, shared = compose(TINY, (BALANCED, FedRoD())), make_shard(size=5), draw(tiny_params(), 1)
    personal = {"out": 0.1 * draw(tiny_params(), 2)["head"]["out"]}
    fit = tiny_fit(shard)
    mine = personalize(method, fit, shared, {"personal": personal})
    expected = oracles.fedrod_personal(*leaves(shared), personal["out"], list_batches(fit), LR, DECAY)
    assert_near([mine["personal"]["out"], *leaves(mine)], [expected, *leaves(shared)])
    x = scale(shard.x)
    answer = oracles.tiny_logits(shared["body"]["w"], shared["head"]["out"] + expected, x)
    assert_near([method.logits(mine, x)], [answer])
    local = tiny_fit(shard, "local")
    sent = upload(method, local, shared, {"personal": mine["personal"]})
    log_counts = torch.log(shard.counts + 1).double()
    assert_near(leaves(sent), oracles.fine_tune(*leaves(shared), list_batches(local), LR, DECAY, log_counts))


@pytest.mark.parametrize("head_layers", [1, 2])
def test_fedrod_starts_as_the_generic_model_and_learns(head_layers):
    net = replace(NET, head_layers=head_layers)
    method, shard = compose(net, (BALANCED, FedRoD())), make_shard()
    shared, _, kept = method.start(net.init(0))
    x, mine = scale(shard.x), kept["personal"]
    assert torch.equal(method.logits(shared | mine, x), net.logits(shared, x))
    got = personalize(method, make_fit(shard, net=net), shared, mine)
    assert not any(torch.equal(got["personal"][name], mine["personal"][name]) for name in mine["personal"])


def test_fedrod_as_the_authors_run_it():
    method, shard, shared = compose(TINY, (BALANCED, TunedRoD())), make_shard(size=5), draw(tiny_params(), 1)
    personal = {"out": 0.1 * draw(tiny_params(), 2)["head"]["out"]}
    fit = tiny_fit(shard)
    mine = personalize(method, fit, shared, {"personal": personal})
    log_counts = torch.log(shard.counts + 1).double()
    expected = oracles.tuned_rod(*leaves(shared), personal["out"], list_batches(fit), LR, DECAY, log_counts)
    assert_near([*leaves(mine), mine["personal"]["out"]], expected)
    x = scale(shard.x)
    assert_near([method.logits(mine, x)], [oracles.tiny_logits(expected[0], expected[1] + expected[2], x)])


def test_fedrep_as_the_authors_run_it():
    method, shard, params = compose(TINY, AveragedRep()), make_shard(size=5), draw(tiny_params(), 1)
    shared, _, mine = method.start(params)
    own = {"head": draw(tiny_params(), 2)["head"]}
    assert mine["personal"].keys() == {"head"}
    for phase, head in (("local", shared["head"]), ("personal", own["head"])):
        fit = tiny_fit(shard, phase)
        got = upload(method, fit, shared, own) if phase == "local" else personalize(method, fit, shared, own)
        batches = list_batches(fit)
        head, body = oracles.fedrep_round(params["body"]["w"], head["out"], batches, batches, LR, DECAY)
        assert_near(leaves(got), [body, head])


def test_apfl_as_the_authors_run_it():
    method, shard, shared = compose(TINY, LogitAPFL()), make_shard(size=5), draw(tiny_params(), 2)
    v = draw(tiny_params(), 1)
    mine = {"personal": v, "alpha": torch.tensor(0.3, dtype=torch.float64)}
    fit = tiny_fit(shard)
    got = personalize(method, fit, shared, mine)
    x, y = scale(shard.x), shard.labels
    alpha, own, received = oracles.logit_apfl_round(0.3, leaves(v), leaves(shared), x, y, list_batches(fit), LR, DECAY)
    assert float(got["alpha"]) == pytest.approx(alpha, rel=1e-7)
    for tuned, expected in ((got["personal"], own), (got, received)):
        torch.testing.assert_close(leaves(tuned), expected, rtol=1e-7, atol=1e-8)  # alpha was found by a difference
    answer = alpha * oracles.tiny_logits(*own, x) + (1 - alpha) * oracles.tiny_logits(*received, x)
    torch.testing.assert_close(method.logits(got, x), answer, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("first_order", [True, False])
@pytest.mark.parametrize("n", [1, 2, 13, 14])
def test_per_fedavg(first_order, n):
    shard, shared = make_shard(n, size=5), draw(tiny_params(), 1)
    method = compose(TINY, PerFedAvg(inner_lr=0.5, first_order=first_order))
    fit = tiny_fit(shard, "local")
    expected = oracles.per_fedavg_local(leaves(shared), list_batches(fit), LR, DECAY, 0.5, first_order)
    assert_near(leaves(upload(method, fit, shared, {})), expected)


def test_per_fedavg_deploys_a_fine_tuned_model():
    shared, fit = draw(tiny_params(), 1), tiny_fit(make_shard(size=5))
    mine = personalize(compose(TINY, CASES["per_fedavg"]), fit, shared, {})
    assert_near(leaves(mine), oracles.fine_tune(*leaves(shared), list_batches(fit), LR, DECAY))


def test_per_fedavg_value_is_the_outer_mean():
    shard, params = make_shard(7, size=5), draw(tiny_params(), 1)
    x, y = scale(shard.x), shard.labels
    got = PerFedAvg(inner_lr=0.0).meta_loss(TINY, params, {}, Batch(x, y, torch.ones(7), shard.counts))
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
    methods = [compose(TINY, PerFedAvg(inner_lr=0.0, first_order=order)) for order in (True, False)]
    assert_same(*(upload(method, tiny_fit(shard, "local"), params, {}) for method in methods))


@pytest.mark.parametrize("tilt", [-2.0, 1e-4, 1.0, 10.0])
def test_term(tilt):
    shard, params = make_shard(size=5), draw(tiny_params(), 1, 1.0)
    batch = Batch(scale(shard.x), shard.labels, torch.ones(14, dtype=torch.float64), shard.counts)
    plain = FedAvg().loss(TINY, params, {}, batch)
    got = TERM(tilt=tilt).loss(TINY, params, {}, batch)
    assert got.shape == plain.shape
    assert float(got.mean()) == pytest.approx(oracles.tilted_mean(plain, tilt), rel=1e-9)
    at = [leaf.requires_grad_() for leaf in leaves(params)]
    got = torch.autograd.grad(TERM(tilt=tilt).loss(TINY, params, {}, batch).mean(), at)
    losses = FedAvg().loss(TINY, params, {}, batch)
    share = torch.exp(tilt * losses.detach())
    expected = torch.autograd.grad((share / share.sum() * losses).sum(), at)  # the paper's lemma 1
    assert_near(got, expected)


# What all of them promise


def test_uploads_are_like_shared(case):
    shared, mine = begin(case)
    sent = upload(case, make_fit(make_shard(), "local"), shared, mine)
    assert {name: leaf.shape for name, leaf in tree.flatten(sent).items()} == {
        name: leaf.shape for name, leaf in tree.flatten(shared).items()
    }


def test_personal_state_never_leaves(case):
    shared, mine = begin(case)
    other = draw(mine, 7, 0.1)
    one, two = (upload(case, make_fit(make_shard(), "local"), shared, state) for state in (mine, other))
    if isinstance(case.rounds, FedRep):  # whose body is trained under the personal head
        assert differ(one, two)
        assert one.keys() == {"body"}
    else:
        assert_same(one, two)


def test_inputs_stay_as_they_are(case):
    shared, mine, shard = *begin(case), make_shard(pad=2)
    before = [tree.map_leaves(torch.clone, state) for state in (shared, mine, shard._asdict())]
    got = personalize(case, make_fit(shard), shared, mine)
    kept = {name: got[name] for name in mine}
    was_kept = tree.map_leaves(torch.clone, kept)
    sent = upload(case, make_fit(shard, "local"), shared, kept)
    case.rounds.aggregate(shared, tree.stack([sent, shared]), torch.ones(2))
    for state, was in zip((shared, mine, shard._asdict(), kept), (*before, was_kept), strict=True):
        assert_same(state, was)
    assert not any(leaf.requires_grad for state in (got, sent) for leaf in tree.flatten(state).values())


def test_the_same_inputs_give_the_same_bits(case):
    shared, mine, shard = *begin(case), make_shard()
    for phase, act in (("personal", personalize), ("local", upload)):
        assert_same(*(act(case, make_fit(shard, phase), shared, mine) for _ in range(2)))


@pytest.mark.parametrize("shard", [make_shard(9, labels=[2]), make_shard(1), make_shard(5), make_shard(0)])
def test_clients_of_one_class_one_row_or_none(case, shard):
    shared, mine = begin(case)
    got = personalize(case, make_fit(shard), shared, mine)
    sent = upload(case, make_fit(shard, "local"), shared, {name: got[name] for name in mine})
    assert finite(got)
    assert finite(sent)
    weights = torch.tensor([max(1.0, float(shard.real.sum()))])
    assert finite(case.rounds.aggregate(shared, tree.stack([sent]), weights))
    assert case.logits(got, scale(make_shard(2).x)).shape == (2, CLASSES)


@pytest.mark.parametrize("n", [1, 14])
def test_padding_changes_nothing(case, n):
    shared, mine = begin(case)
    shards = make_shard(n), make_shard(n, pad=5)
    one, two = (personalize(case, make_fit(shard), shared, mine) for shard in shards)
    # APFL's gradient of alpha is a sum over all rows, which may be added in another order
    assert_same(one, two, **({"rtol": 1e-5, "atol": 1e-6} if isinstance(case.personal, APFL) else {}))
    kept = {name: one[name] for name in mine}
    assert_same(*(upload(case, make_fit(shard, "local"), shared, kept) for shard in shards))


def pick(params, *names):
    return {name: params[name] for name in names}


LOSSES = {
    "ditto": lambda net, p, g, b: Ditto().pulled_loss(net, p, g, b),
    "apfl": lambda net, p, g, b: APFL().loss(net, p, {"alpha": g["head"]["out"].sum().sigmoid(), "received": g}, b),
    "fedrep head": lambda net, p, g, b: FedRep().loss(net, pick(p, "head"), pick(g, "body"), b),
    "fedrep body": lambda net, p, g, b: FedRep().loss(net, pick(p, "body"), pick(g, "head"), b),
    "fedrod personal": lambda net, p, g, b: FedRoD().loss(net, {"personal": p["head"]}, g, b),
    "balanced": lambda net, p, g, b: BALANCED.loss(net, p, {}, b),
    "per_fedavg": lambda net, p, g, b: PerFedAvg().meta_loss(net, p, {}, b),
    "per_fedavg, second order": lambda net, p, g, b: PerFedAvg(first_order=False).meta_loss(net, p, {}, b),
    "term": lambda net, p, g, b: TERM().loss(net, p, {}, b),
}


def mean_of(name, net):
    def mean_loss(params, given, batch):
        losses = LOSSES[name](net, params, given, batch)
        return (losses * batch.weight).sum() / batch.weight.sum().clamp(min=1)

    return mean_loss


def gradient_of(name, net):
    return torch.func.grad(mean_of(name, net))


def pad(batch: Batch, rows: int) -> Batch:
    extra = make_shard(rows, batch.x.shape[-1], seed=9)
    x, y = torch.cat([batch.x, scale(extra.x)]), torch.cat([batch.y, extra.labels])
    return Batch(x, y, torch.cat([batch.weight, torch.zeros(rows)]), batch.counts)


def make_batch(n, size, seed=0) -> Batch:
    shard = make_shard(n, size, seed=seed)
    return Batch(scale(shard.x), shard.labels, torch.ones(n), shard.counts)


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
    losses = LOSSES[name](TINY, at, given, batch)
    gradients = torch.autograd.grad(losses.mean(), leaves(at), allow_unused=True, materialize_grads=True)
    assert_near(gradients, leaves(expected))


def test_apfl_gradient_is_lifted_over_clients():
    shards = [make_shard(4 + k, 5, pad=2 - k, seed=k) for k in range(3)]
    v, w = [draw(tiny_params(), k) for k in range(3)], draw(tiny_params(), 9)
    alpha = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    stacked = Shard(*(torch.stack(parts) for parts in zip(*shards, strict=True)))

    def gradient(alpha, v, w, *parts):
        return differentiate_alpha(APFL().loss, TINY, v, {"alpha": alpha, "received": w}, Shard(*parts))

    lifted = torch.func.vmap(gradient, in_dims=(0, 0, None, *[0] * 7))(alpha, tree.stack(v), w, *stacked)
    assert_near(lifted, [gradient(alpha[k], v[k], w, *shards[k]) for k in range(3)])


# Through the engine

CLIENTS = [make_shard(10, labels=[0, 1], seed=1), make_shard(7, labels=[2], seed=2), make_shard(12, seed=3)]
SETTINGS = Training(rounds=2, local_epochs=2, batch=4, crop=1, optimizer=Optimizer(lr=0.05))


def run(method: Method):
    """The server, and every client's logits, after two rounds."""
    progress = train(method.training, CLIENTS, SETTINGS, 0)
    deployed = deploy(method, CLIENTS, SETTINGS, 0, progress)
    x = scale(make_shard(20, seed=4).x)
    return progress.server, torch.stack([method.logits(mine, x) for mine in deployed])


def test_two_rounds(case):
    server, logits = run(case)
    assert server.round == 2
    assert logits.shape == (3, 20, CLASSES)
    assert finite(server.shared | {"logits": logits})
    assert differ(server.shared, start(case.training, 3, 0).server.shared)
    personal = not isinstance(case.rounds, GMA | TERM)
    assert torch.equal(logits[0], logits[1]) is not personal


@pytest.mark.parametrize(
    ("one", "other", "same_training"),
    [
        (FineTune(), (BALANCED, FineTune()), False),
        (FineTune(), FineTune(balanced_personal=True), True),
        (GMA(), GMA(threshold=0.9), False),
        (APFL(), APFL(alpha=0.1), True),
        (Ditto(), Ditto(lam=0.1), True),
        (PerFedAvg(), PerFedAvg(inner_lr=0.1), False),
        (PerFedAvg(), PerFedAvg(first_order=False), False),
        (TERM(), TERM(tilt=2.0), False),
        (TERM(), TERM(tilt=-1.0), False),
    ],
    ids=str,
)
def test_every_hyperparameter_changes_the_outcome(one, other, same_training):
    (server, logits), (others_server, others_logits) = run(compose(NET, one)), run(compose(NET, other))
    assert not torch.equal(logits, others_logits)
    assert differ(server.shared, others_server.shared) is not same_training


def test_every_hyperparameter_is_tried():
    tried = {"balanced", "balanced_personal", "threshold", "alpha", "lam", "inner_lr", "first_order", "tilt"}
    kinds = (FedAvg, FineTune, GMA, APFL, FedRep, Ditto, FedRoD, PerFedAvg, TERM)
    assert {each.name for kind in kinds for each in fields(kind)} == tried


@pytest.mark.parametrize("kind", [FineTune, APFL, Ditto])
def test_global_models_that_are_those_of_fedavg(kind):
    settings = replace(SETTINGS, optimizer=replace(SETTINGS.optimizer, weight_decay=0.0))  # which Ditto does not take
    fedavg, server = (train(compose(NET, each), CLIENTS, settings, 0).server for each in (FedAvg, kind))
    assert_same(server.shared, fedavg.shared)
    assert server.losses == fedavg.losses


def test_what_is_trained_once():
    memo = Memo(views=2)
    fedavg, balanced = Method(NET), Method(NET, BALANCED)
    assert compose(NET, FineTune()).training == compose(NET, (FineTune(), memo)).training == fedavg
    assert compose(NET, memo).training == fedavg
    assert compose(NET, FineTune(balanced_personal=True)).training == fedavg
    for part in (FineTune(), FineTune(balanced_personal=True)):
        assert compose(NET, (BALANCED, part)).training == balanced
    assert balanced.training == balanced != fedavg
    for kind in (GMA, APFL, FedRep, Ditto, FedRoD, PerFedAvg, TERM):
        assert compose(NET, (kind(), memo)).training == compose(NET, kind) != fedavg


def test_what_is_trained_side_by_side():
    fedavg, balanced = Method(NET), Method(NET, BALANCED)
    assert compose(NET, APFL()).core == compose(NET, APFL(alpha=0.1)).core == fedavg
    assert compose(NET, (BALANCED, FedRoD())).core == balanced.core == balanced
    for part in (FedRep(), Ditto()):  # rounds that see what the client personalized
        assert compose(NET, part).core == compose(NET, part)
    assert compose(NET, (PerFedAvg(), APFL())).core == Method(NET, PerFedAvg(), Personal())


def test_fine_tuning_is_the_same_whether_trained_as_fedavg_or_as_itself():
    method = compose(NET, (BALANCED, FineTune()))
    _, logits = run(method)
    progress = train(method, CLIENTS, SETTINGS, 0)
    deployed = deploy(method, CLIENTS, SETTINGS, 0, progress)
    x = scale(make_shard(20, seed=4).x)
    assert torch.equal(torch.stack([method.logits(mine, x) for mine in deployed]), logits)


def test_deployed_clients_fit_their_own_rows(case):
    settings = replace(SETTINGS, rounds=4)
    progress = train(case.training, CLIENTS, settings, 0)
    deployed = deploy(case, CLIENTS, settings, 0, progress)

    def mean_loss(mine):
        losses = [
            F.cross_entropy(case.logits(mine[k], scale(shard.x)), shard.labels) for k, shard in enumerate(CLIENTS)
        ]
        return float(torch.stack(losses).mean())

    shared, _, mine = case.start(NET.init(0))
    assert mean_loss(deployed) < mean_loss([shared | mine["personal"]] * 3)


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
        kind(**wrong)
