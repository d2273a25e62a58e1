"""Splits redrawn in every round: who trains on what, and what the leak adds."""

import numpy as np
import pytest
import torch

from fedthe import rng, tree
from fedthe.config import make_config
from fedthe.data.partition import Split
from fedthe.data.plan import Settings, build
from fedthe.engine.fit import LoopFit
from fedthe.experiment.training import deploy_all
from fedthe.study.figures import draw_figure, measure_figure
from fedthe.study.figures.leak import deploy_reshuffled, reshuffle
from fedthe.study.run import run
from fedthe.types import Shard

SMALL = {"clients": 3, "dirichlet": 1.0, "rounds": 2, "local_epochs": 1, "samples": 6, "crop": 0, "flip": False}


@pytest.fixture
def settings(tmp_path):
    labels = np.arange(150) % 3
    noise = np.random.default_rng(0).integers(0, 90, (150, 16, 16, 3))
    np.savez(tmp_path / "tiny.npz", images=(noise + 70 * labels[:, None, None, None]).astype(np.uint8), labels=labels)
    return SMALL | {"dataset": f"npz:{tmp_path / 'tiny.npz'}", "out": str(tmp_path / "run")}


def test_reshuffled_splits_hold_the_same_rows_in_other_places(dataset):
    splits = build(dataset, Settings(clients=4)).clients
    first, second = reshuffle(splits, 0, 0), reshuffle(splits, 0, 1)
    for frozen, one, two in zip(splits, first, second, strict=True):
        assert [len(part) for part in (one.train, one.val, one.test)] == [
            len(part) for part in (frozen.train, frozen.val, frozen.test)
        ]
        assert np.array_equal(np.sort(one.rows), np.sort(frozen.rows))
        assert set(one.train) != set(frozen.train)
        assert set(one.test) != set(two.test)
        assert set(two.test) & set(one.train)  # the leak
    again = reshuffle(splits, 0, 0)
    assert all(np.array_equal(a.train, b.train) for a, b in zip(first, again, strict=True))


def test_reshuffled_training_is_federated_averaging_on_other_rows_each_round(settings):
    """Against a plain loop: every client fits the rows of that round's split, and the mean goes on."""
    config = make_config(settings | {"methods": ["fedavg"], "rounds": 3})
    (frozen,) = deploy_all(config)
    (leaked,) = deploy_reshuffled([frozen], config)
    method, federation = frozen.method, frozen.federation
    shared, pool = method.net.init(0), federation.pool
    for number in range(3):
        uploads, sizes = [], []
        for k, split in enumerate(federation.clients):
            rows = np.sort(split.rows)
            rows = rows[rng.choose(rng.key(0, "reshuffle", number, k), len(rows), len(rows))]
            train = rows[: len(split.train)]
            images, labels = torch.from_numpy(pool.x[train]), torch.from_numpy(pool.labels[train])
            real, counts = torch.ones(len(train), dtype=torch.bool), torch.bincount(labels, minlength=3).float()
            shard = Shard(images, labels, real, counts, images[:0], labels[:0], real[:0])
            fit = LoopFit(method.net, shard, config.training.optimizer, 1, 32, False, 0, (0, "local", number), k)
            uploads.append(fit(method.rounds.loss, shared).params)
            sizes.append(len(train))
        shared = tree.weighted_mean(uploads, sizes)
    for name, leaf in tree.flatten(tree.take(leaked.states, 1)).items():
        torch.testing.assert_close(leaf, tree.flatten(shared)[name], rtol=1e-4, atol=1e-6)
    last = reshuffle(federation.clients, 0, 2)
    assert all(np.array_equal(a.test, b.test) for a, b in zip(leaked.federation.clients, last, strict=True))
    assert np.array_equal(leaked.federation.tests["original"][1].rows, last[1].test)
    assert isinstance(last[0], Split)


def test_both_ways_are_measured_and_drawn(settings, tmp_path):
    measured = measure_figure("leak", **settings | {"seeds": [0, 1], "methods": ["fedavg", "fedthe"]})
    data = measured["data"]
    assert list(data) == ["frozen", "reshuffled", "gains"]
    assert list(data["frozen"]) == list(data["reshuffled"]) == ["fedavg", "fedthe"]
    results = run(**settings | {"seeds": [0, 1], "methods": ["fedavg", "fedthe"]})
    for method, cells in results.table().items():
        for test, mean in cells.items():
            assert data["frozen"][method][test]["mean"] == pytest.approx(mean)
            gain = data["reshuffled"][method][test]["mean"] - data["frozen"][method][test]["mean"]
            assert data["gains"][method][test]["mean"] == pytest.approx(gain)
    draw_figure(measured, tmp_path / "leak.png")
    assert (tmp_path / "leak.png").stat().st_size > 10_000
