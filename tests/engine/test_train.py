"""Training on one client and over rounds: against a literal loop, and what it must never depend on."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fedthe import tree
from fedthe.data.plan import Settings, build
from fedthe.data.pool import Dataset
from fedthe.engine.fit import LoopFit, Optimizer, crop
from fedthe.engine.loop import Loop, make_fits
from fedthe.engine.server import Diverged, sample_clients
from fedthe.engine.shards import Shards
from fedthe.engine.train import deploy, start, train, train_round
from fedthe.engine.visit import Run, Training, Visit
from fedthe.errors import Failed
from fedthe.methods.base import FedAvg, Fitted, Method, Personal
from fedthe.methods.finetune import FineTune
from fedthe.methods.two_heads import TwoHeads
from fedthe.nets.cnn import CNN
from fedthe.types import Shard, scale
from helpers import fails, make_pool

NET = CNN(3, size=16)
PLAIN, TWO_HEADS = Method(NET), Method(NET, FedAvg(balanced=True), TwoHeads())
LOSS = FedAvg().loss


def make_shard(rows=20, padding=0, seed=0):
    g = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (rows + padding, 16, 16, 3), generator=g, dtype=torch.uint8)
    labels = torch.randint(0, 3, (rows + padding,), generator=g)
    real = torch.arange(rows + padding) < rows
    counts = torch.bincount(labels[:rows], minlength=3).float()
    return Shard(images, labels, real, counts, images[:5], labels[:5], real[:5])


def make_fit(shard, optimizer=None, epochs=2, flip=True, crop=2, batch=8, client=3):
    return LoopFit(NET, shard, optimizer or Optimizer(), epochs, batch, flip, crop, (0, "local", 1), client)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(tree.flatten(a).values(), tree.flatten(b).values(), strict=True))


@pytest.mark.parametrize(
    "optimizer", [Optimizer(), Optimizer(momentum=0.9), Optimizer("adam", lr=0.001, weight_decay=0.0)]
)
def test_fit_equals_a_literal_loop(optimizer):
    """The same batches, stepped by formulas written out."""
    shard, params = make_shard(), NET.init(0)
    fit = make_fit(shard, optimizer)
    trained, losses, _ = fit(LOSS, params)
    flat = {name: leaf.clone() for name, leaf in tree.flatten(params).items()}
    first = {name: torch.zeros_like(leaf) for name, leaf in flat.items()}
    second = {name: torch.zeros_like(leaf) for name, leaf in flat.items()}
    t, means = 0, []
    for epoch in range(2):
        total = 0.0
        for batch in fit.batches(shard, epoch):
            t += 1
            leaves = {name: leaf.clone().requires_grad_() for name, leaf in flat.items()}
            loss = torch.nn.functional.cross_entropy(NET.logits(tree.unflatten(leaves), batch.x), batch.y)
            loss.backward()
            total += float(loss.detach()) * len(batch.y)
            for name, leaf in leaves.items():
                gradient = leaf.grad + optimizer.weight_decay * flat[name]
                if optimizer.name == "sgd":
                    first[name] = optimizer.momentum * first[name] + gradient
                    flat[name] = flat[name] - optimizer.lr * first[name]
                else:
                    first[name] = 0.9 * first[name] + 0.1 * gradient
                    second[name] = 0.999 * second[name] + 0.001 * gradient**2
                    scaled = (second[name] / (1 - 0.999**t)).sqrt() + 1e-8
                    flat[name] = flat[name] - optimizer.lr * (first[name] / (1 - 0.9**t)) / scaled
        means.append(total / len(shard.labels))
    for name, leaf in tree.flatten(trained).items():
        assert (leaf - flat[name]).abs().max() < 2e-6, name
    assert losses.tolist() == pytest.approx(means, rel=1e-5)


def test_every_row_comes_once_an_epoch_in_another_order():
    shard = make_shard()
    fit = make_fit(shard, flip=False, crop=0)
    orders = []
    for epoch in range(2):
        x = torch.cat([batch.x for batch in fit.batches(shard, epoch)])
        order = [int((x[i] == scale(shard.x)).all((1, 2, 3)).nonzero()) for i in range(len(x))]
        assert sorted(order) == list(range(20))
        orders.append(order)
    assert orders[0] != orders[1]


def test_padding_changes_nothing_and_a_shard_of_padding_leaves_parameters_as_they_are():
    params = NET.init(0)
    alone, padded = make_shard(20), make_shard(20, padding=13)
    padded = padded._replace(x=torch.cat([alone.x, padded.x[20:]]))
    padded = padded._replace(labels=torch.cat([alone.labels, padded.labels[20:]]), counts=alone.counts)
    one, other = (make_fit(shard)(LOSS, params) for shard in (alone, padded))
    assert same(one.params, other.params)
    assert torch.equal(one.losses, other.losses)
    nothing = padded._replace(real=torch.zeros(33, dtype=torch.bool))
    assert same(make_fit(nothing)(LOSS, params).params, params)


def test_other_rows_another_decay_and_what_is_given():
    """Of the client's own rows and of the optimizer's decay, unless a method says otherwise."""
    shard, other, params = make_shard(), make_shard(12, seed=1), NET.init(0)
    fit = make_fit(shard)
    assert same(fit(LOSS, params, shard=other).params, make_fit(other)(LOSS, params).params)
    plain = make_fit(shard, Optimizer(weight_decay=0.0))(LOSS, params)
    assert same(fit(LOSS, params, weight_decay=0.0).params, plain.params)
    assert not same(fit(LOSS, params).params, plain.params)

    def lose(net, params, given, batch):
        assert not any(leaf.requires_grad for leaf in tree.flatten(given).values())
        return LOSS(net, {"head": params} | given, {}, batch)

    body = tree.map_leaves(lambda leaf: leaf.clone().requires_grad_(), params["body"])
    head = fit(lose, params["head"], {"body": body}).params
    assert head.keys() == params["head"].keys()
    assert not same(head, params["head"])
    assert all(leaf.grad is None for leaf in body.values())


def test_a_loss_that_is_not_one_number_per_sample_is_refused():
    fails(lambda: make_fit(make_shard())(lambda *args: LOSS(*args).mean(), NET.init(0)), "one number per sample", "[]")


def test_crop_moves_the_image_and_fills_with_black():
    images = torch.arange(1, 33, dtype=torch.uint8).view(2, 4, 4, 1)
    moved = crop(images, 2, torch.tensor([2, 0]), torch.tensor([2, 3]))
    assert torch.equal(moved[0], images[0])
    expected = torch.zeros(4, 4, dtype=torch.uint8)
    expected[2:, :3] = images[1, :2, 1:, 0]
    assert torch.equal(moved[1, ..., 0], expected)


def test_flips_and_crops_happen_at_their_rates():
    images = torch.zeros(4000, 8, 8, 3, dtype=torch.uint8)
    images[:, 0, 0] = 255
    shard = make_shard()._replace(
        x=images, labels=torch.zeros(4000, dtype=torch.int64), real=torch.ones(4000, dtype=torch.bool)
    )
    x = torch.cat([batch.x for batch in make_fit(shard, crop=0).batches(shard, 0)])
    assert (x[:, 0, 0, 7] > 0).float().mean() == pytest.approx(0.5, abs=0.03)
    x = torch.cat([batch.x for batch in make_fit(shard, crop=1, flip=False).batches(shard, 0)])
    assert (x[:, 0, 0, 0] > 0).float().mean() == pytest.approx(1 / 9, abs=0.02)
    assert (x > 0).any(1).flatten(1).any(1).float().mean() == pytest.approx(4 / 9, abs=0.03)


def test_fit_leaves_its_inputs_alone():
    params, shard = NET.init(0), make_shard()
    before = tree.map_leaves(torch.clone, params)
    trained = make_fit(shard)(LOSS, params).params
    assert same(params, before)
    assert not any(leaf.requires_grad for leaf in tree.flatten(trained).values())
    assert same(make_fit(shard, epochs=0)(LOSS, params).params, before)


def federation(clients=4, **more):
    return build(Dataset(make_pool(np.arange(240) % 3, size=16)), Settings(clients=clients, dirichlet=1.0, **more))


SETTINGS = Training(rounds=3, local_epochs=1, batch=16)


@pytest.mark.parametrize("method", [PLAIN, TWO_HEADS])
def test_the_same_seed_gives_the_same_bits_and_stopping_changes_nothing(method):
    shards = Shards(federation())
    whole = train(method, shards, SETTINGS, seed=0)
    again = train(method, shards, SETTINGS, seed=0)
    half = train(method, shards, Training(rounds=1, local_epochs=1, batch=16), seed=0)
    resumed = train(method, shards, SETTINGS, seed=0, progress=half)
    other = train(method, shards, SETTINGS, seed=1)
    assert same(whole.server.shared, again.server.shared)
    assert same(whole.server.shared, resumed.server.shared)
    assert same(whole.averages, resumed.averages)
    assert all(same(a, b) for a, b in zip(whole.clients, resumed.clients, strict=True))
    assert whole.server.losses == resumed.server.losses
    assert not same(whole.server.shared, other.server.shared)


def test_the_mean_is_weighted_by_rows():
    fed = federation(clients=3, partition="unbalanced")
    shards = Shards(fed)
    sizes = [len(split.train) for split in fed.clients]
    assert len(set(sizes)) > 1
    settings = Training(rounds=1, local_epochs=1)
    begun = start(TWO_HEADS, 3, 0)
    fits = [make_fits(TWO_HEADS.net, settings, 0, 0, k, 3, shards[k]).local for k in range(3)]
    uploads = [TWO_HEADS.rounds.local(fits[k], begun.server.shared, {}, shards[k]).params for k in range(3)]
    expected = sum(size * upload["head"]["out"] for size, upload in zip(sizes, uploads, strict=True)) / sum(sizes)
    trained = train(TWO_HEADS, shards, settings, 0)
    assert torch.allclose(trained.server.shared["head"]["out"], expected, atol=1e-7)
    kept = [mine["personal"]["own_descriptor"] for mine in trained.clients]
    mean = sum(size * own for size, own in zip(sizes, kept, strict=True)) / sum(sizes)
    assert torch.allclose(trained.averages["descriptor"], mean, atol=1e-7)


def test_participation_samples_clients_and_the_others_keep_their_state():
    assert len(sample_clients(20, 0.1, 0, 3)) == 2
    assert sample_clients(20, 1.0, 0, 3) == list(range(20))
    drawn = [tuple(sample_clients(20, 0.1, 0, number)) for number in range(50)]
    assert len(set(drawn)) > 25
    shards, method = Shards(federation()), TWO_HEADS
    settings = Training(rounds=1, participation=0.5, local_epochs=1)
    begun = start(method, 4, 0)
    (result,) = train_round(Visit((method,), settings, [Run(0, shards)], [[begun]]), Loop())
    (after,) = result
    chosen = sample_clients(4, 0.5, 0, 0)
    for k in range(4):
        assert same(after.clients[k], begun.clients[k]) == (k not in chosen)
    for state in deploy(method, shards, settings, 0, after):
        assert not same(state["personal"], begun.clients[0]["personal"]["personal"])


def test_a_loss_that_is_not_finite_stops_with_round_client_and_loss():
    shards = Shards(federation())
    with pytest.raises(Diverged, match=r"client \d in round \d+: the loss is (nan|inf)"):
        train(PLAIN, shards, Training(rounds=9, local_epochs=3, optimizer=Optimizer(lr=1e4)), seed=0)


def test_two_heads_keep_the_personal_head_and_descriptor_at_home():
    shards, method = Shards(federation()), TWO_HEADS
    progress = train(method, shards, SETTINGS, seed=0)
    assert tree.flatten(progress.server.shared).keys() == NET.starts().keys()
    assert progress.averages.keys() == {"descriptor"}
    kept = [mine["personal"] for mine in progress.clients]
    assert all(mine.keys() == {"personal", "own_descriptor"} for mine in kept)
    assert not torch.equal(kept[0]["personal"]["out"], kept[1]["personal"]["out"])
    # the descriptor is the mean over clients of the mean feature under the extractor that was received
    received = train(method, shards, Training(rounds=2, local_epochs=1, batch=16), seed=0).server.shared["body"]
    means = [NET.features(received, scale(shard.x)).mean(0) for shard in shards]
    assert torch.allclose(progress.averages["descriptor"], torch.stack(means).mean(0), atol=1e-5)


@pytest.mark.parametrize("method", [PLAIN, TWO_HEADS, Method(NET, personal=FineTune())])
def test_what_is_deployed_is_the_shared_model_with_what_is_a_clients_own(method):
    shards = Shards(federation())
    progress = train(method, shards, SETTINGS, seed=0)
    before = tree.map_leaves(torch.clone, progress.server.shared)
    states = deploy(method, shards, SETTINGS, 0, progress)
    for k, state in enumerate(states):
        fit = make_fits(method.net, SETTINGS, 0, progress.round, k, len(shards), shards[k]).personal
        received = progress.server.shared | progress.averages
        mine = progress.clients[k].get("personal", {})
        made = method.personal.personalize(fit, received, mine, shards[k]).params
        assert same(state, received | mine | made)
    assert same(progress.server.shared, before)


@dataclass(frozen=True)
class Uneven(Personal):
    """Clients with many rows of class 0 deploy a leaf that the others do not have, or the other way round."""

    most: bool

    def personalize(self, fit, shared, mine, shard):
        counts = [int(each.counts[0]) for each in Shards(federation())]
        has = (int(shard.counts[0]) == counts[0]) == self.most
        return Fitted({"more": torch.ones(2)} if has else {})


@pytest.mark.parametrize("most", [True, False])
def test_clients_that_deploy_other_leaves_are_named_and_none_is_filled_with_what_was_in_memory(most):
    method, shards = Method(NET, personal=Uneven(most)), Shards(federation())
    assert len({int(shard.counts[0]) for shard in shards}) == 4
    with pytest.raises(Failed, match=r"client 1 in round 1: its state's more is .*, unlike other clients'"):
        deploy(method, shards, SETTINGS, 0, start(method, 4, 0))
