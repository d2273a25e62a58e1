"""Studies and plugins."""

from importlib.metadata import EntryPoint

import numpy as np
import pytest
import torch

from fedthe import plugins, tree
from fedthe.data.plan import Settings
from fedthe.data.pool import Dataset, Pool
from fedthe.engine.fit import Optimizer
from fedthe.engine.visit import Training
from fedthe.errors import InputError
from fedthe.study.probing import compare_probing, keep_classes, pretrain
from helpers import make_pool

TRAINING = Training(local_epochs=1, personal_epochs=3, batch=16, crop=0, flip=False, optimizer=Optimizer(lr=0.05))


def make_bright(rows=300):
    noise = make_pool(np.arange(rows) % 6, size=16)
    images = (noise.images // 4 + 30 * noise.labels[:, None, None, None]).astype(np.uint8)
    return Pool("bright", images, noise.labels, noise.classes)


def test_probing_compares_three_ways_on_classes_the_extractor_never_saw():
    table = compare_probing(Dataset(make_bright()), (0, 2, 4), Settings(3, 1.0), TRAINING, pretrain_epochs=2, samples=5)
    assert list(table) == ["lp", "ft", "lpft"]
    assert all(set(row) == {"original", "corrupted", "ooc", "mixture", "corrupted_ooc"} for row in table.values())
    assert all(0 <= value <= 100 for row in table.values() for value in row.values())
    again = compare_probing(Dataset(make_bright()), (0, 2, 4), Settings(3, 1.0), TRAINING, pretrain_epochs=2, samples=5)
    assert again == table


def test_pretraining_learns_and_keeps_only_its_classes():
    pool = keep_classes(make_bright(), (4, 1))
    assert pool.classes == ("class 4", "class 1")
    assert (pool.images[pool.labels == 0].mean() > pool.images[pool.labels == 1].mean()).all()
    before, after = (pretrain(pool, "cnn", TRAINING, 0, epochs) for epochs in (0, 3))
    assert not torch.equal(tree.flatten(before)["conv1"], tree.flatten(after)["conv1"])
    with pytest.raises(InputError, match="leave two"):
        compare_probing(Dataset(make_bright()), (0, 1, 2, 3, 4), Settings(3), TRAINING)


def test_plugins_are_listed_and_a_broken_one_costs_only_a_warning(monkeypatch):
    points = [
        EntryPoint("mine", "fedthe.methods.base:Method", "fedthe.methods"),
        EntryPoint("broken", "no_such_package:Thing", "fedthe.methods"),
        EntryPoint("fedavg", "fedthe.methods.base:Predictor", "fedthe.methods"),
    ]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points)
    with pytest.warns(UserWarning, match=r"no_such_package|is taken") as warned:
        found = plugins.load_plugins("fedthe.methods", {"fedavg": object})
    assert list(found) == ["mine"]
    assert len(warned) == 2
