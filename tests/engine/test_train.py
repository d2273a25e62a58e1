"""Training on one client and over rounds: against a literal loop, and what it must never depend on."""

import numpy as np
import pytest
import torch

from fedthe import tree
from fedthe.data.plan import Settings, build
from fedthe.data.pool import Dataset
from fedthe.engine import train as engine
from fedthe.engine.fit import Fit, Optimizer, crop
from fedthe.engine.loop import Loop
from fedthe.engine.loop import make_fit as fit_of
from fedthe.engine.server import Diverged
from fedthe.engine.shards import Shards
from fedthe.engine.train import deploy, sample_clients, start, train
from fedthe.engine.visit import Run, Training
from fedthe.methods.base import Method
from fedthe.methods.fedthe import TwoHeads
from fedthe.nets.cnn import CNN
from fedthe.types import Shard, scale
from helpers import make_pool

NET = CNN(3, size=16)


def make_shard(rows=20, padding=0, seed=0):
    g = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (rows + padding, 16, 16, 3), generator=g, dtype=torch.uint8)
    labels = torch.randint(0, 3, (rows + padding,), generator=g)
    real = torch.arange(rows + padding) < rows
    counts = torch.bincount(labels[:rows], minlength=3).float()
    return Shard(images, labels, real, counts, images[:5], labels[:5], real[:5])


def make_fit(optimizer=None, epochs=2, flip=True, crop=2, batch=8, client=3):
    return Fit(optimizer or Optimizer(), epochs, batch, flip, crop, (0, "local", 1), client)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(tree.flatten(a).values(), tree.flatten(b).values(), strict=True))


@pytest.mark.parametrize(
    "optimizer", [Optimizer(), Optimizer(momentum=0.9), Optimizer("adam", lr=0.001, weight_decay=0.0)]
)
def test_fit_equals_a_literal_loop(optimizer):
    """The same batches, stepped by formulas written out."""
    shard, method, params = make_shard(), Method(NET), NET.init(0)
    fit = make_fit(optimizer)
    trained = fit(method.loss, params, shard)
    flat = {name: leaf.clone() for name, leaf in tree.flatten(params).items()}
    first = {name: torch.zeros_like(leaf) for name, leaf in flat.items()}
    second = {name: torch.zeros_like(leaf) for name, leaf in flat.items()}
    t = 0
    for epoch in range(2):
        for batch in fit.batches(shard, epoch):
            t += 1
            leaves = {name: leaf.clone().requires_grad_() for name, leaf in flat.items()}
            torch.nn.functional.cross_entropy(NET.logits(tree.unflatten(leaves), batch.x), batch.y).backward()
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
    for name, leaf in tree.flatten(trained).items():
        assert (leaf - flat[name]).abs().max() < 2e-6, name


def test_every_row_comes_once_an_epoch_in_another_order():
    shard = make_shard()
    fit = make_fit(flip=False, crop=0)
    orders = []
    for epoch in range(2):
        x = torch.cat([batch.x for batch in fit.batches(shard, epoch)])
        order = [int((x[i] == scale(shard.images)).all((1, 2, 3)).nonzero()) for i in range(len(x))]
        assert sorted(order) == list(range(20))
        orders.append(order)
    assert orders[0] != orders[1]


def test_padding_changes_nothing_and_a_shard_of_padding_leaves_parameters_as_they_are():
    method, params = Method(NET), NET.init(0)
    alone, padded = make_shard(20), make_shard(20, padding=13)
    padded = padded._replace(images=torch.cat([alone.images, padded.images[20:]]))
    padded = padded._replace(labels=torch.cat([alone.labels, padded.labels[20:]]), counts=alone.counts)
    assert same(make_fit()(method.loss, params, alone), make_fit()(method.loss, params, padded))
    nothing = padded._replace(real=torch.zeros(33, dtype=torch.bool))
    assert same(make_fit()(method.loss, params, nothing), params)


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
        images=images, labels=torch.zeros(4000, dtype=torch.int64), real=torch.ones(4000, dtype=torch.bool)
    )
    x = torch.cat([batch.x for batch in make_fit(crop=0).batches(shard, 0)])
    assert (x[:, 0, 0, 7] > 0).float().mean() == pytest.approx(0.5, abs=0.03)
    x = torch.cat([batch.x for batch in make_fit(crop=1, flip=False).batches(shard, 0)])
    assert (x[:, 0, 0, 0] > 0).float().mean() == pytest.approx(1 / 9, abs=0.02)
    assert (x > 0).any(1).flatten(1).any(1).float().mean() == pytest.approx(4 / 9, abs=0.03)


def test_fit_leaves_its_inputs_alone():
    params, shard = NET.init(0), make_shard()
    before = tree.map_leaves(torch.clone, params)
    make_fit()(Method(NET).loss, params, shard)
    assert same(params, before)


def federation(clients=4, **more):
    return build(Dataset(make_pool(np.arange(240) % 3, size=16)), Settings(clients=clients, dirichlet=1.0, **more))


SETTINGS = Training(rounds=3, local_epochs=1, batch=16)


@pytest.mark.parametrize("method", [Method(NET), TwoHeads(NET)])
def test_the_same_seed_gives_the_same_bits_and_stopping_changes_nothing(method):
    shards = Shards(federation())
    whole = train(method, shards, SETTINGS, seed=0)
    again = train(method, shards, SETTINGS, seed=0)
    half = train(method, shards, Training(rounds=1, local_epochs=1, batch=16), seed=0)
    resumed = train(method, shards, SETTINGS, seed=0, progress=half)
    other = train(method, shards, SETTINGS, seed=1)
    assert same(whole.shared, again.shared)
    assert same(whole.shared, resumed.shared)
    assert all(same(a, b) for a, b in zip(whole.mine, resumed.mine, strict=True))
    assert whole.losses == resumed.losses
    assert not same(whole.shared, other.shared)


def test_the_mean_is_weighted_by_rows():
    fed = federation(clients=3, partition="unbalanced")
    shards = Shards(fed)
    sizes = [len(split.train) for split in fed.clients]
    assert len(set(sizes)) > 1
    method, settings = Method(NET), Training(rounds=1, local_epochs=1)
    begun = start(method, 3, 0)
    uploads = [method.local(fit_of(settings, 0, "local", 0, k), begun.shared, {}, shards[k]) for k in range(3)]
    expected = sum(size * upload["head"]["out"] for size, upload in zip(sizes, uploads, strict=True)) / sum(sizes)
    assert torch.allclose(train(method, shards, settings, 0).shared["head"]["out"], expected, atol=1e-7)


def test_participation_samples_clients_and_the_others_keep_their_state():
    assert len(sample_clients(20, 0.1, 0, 3)) == 2
    assert sample_clients(20, 1.0, 0, 3) == list(range(20))
    drawn = [tuple(sample_clients(20, 0.1, 0, number)) for number in range(50)]
    assert len(set(drawn)) > 25
    shards, method = Shards(federation()), TwoHeads(NET)
    settings = Training(rounds=1, participation=0.5, local_epochs=1)
    begun = start(method, 4, 0)
    (after,) = engine.train_round(method, [Run(0, shards)], settings, [begun], Loop())
    chosen = sample_clients(4, 0.5, 0, 0)
    for k in range(4):
        assert same(after.mine[k], begun.mine[k]) == (k not in chosen)
    assert all(not same(mine, begun.mine[0]) for mine in deploy(method, shards, settings, 0, after))


def test_a_loss_that_is_not_finite_stops_with_round_client_and_loss():
    shards = Shards(federation())
    with pytest.raises(Diverged, match=r"client \d in round \d+: the loss is (nan|inf)"):
        train(Method(NET), shards, Training(rounds=9, local_epochs=3, optimizer=Optimizer(lr=1e4)), seed=0)


def test_two_heads_keep_the_personal_head_and_descriptor_at_home():
    shards, method = Shards(federation()), TwoHeads(NET)
    progress = train(method, shards, SETTINGS, seed=0)
    assert tree.flatten(progress.shared).keys() == tree.flatten(start(method, 4, 0).shared).keys()
    assert "personal" not in progress.shared
    assert not torch.equal(progress.mine[0]["personal"]["out"], progress.mine[1]["personal"]["out"])
    # the descriptor is the mean over clients of the mean feature under the extractor that was received
    received = train(method, shards, Training(rounds=2, local_epochs=1, batch=16), seed=0).shared["body"]
    means = [NET.features(received, scale(shard.images)).mean(0) for shard in shards]
    assert torch.allclose(progress.shared["descriptor"], torch.stack(means).mean(0), atol=1e-5)
