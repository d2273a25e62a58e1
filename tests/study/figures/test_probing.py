"""Linear probing and fine-tuning of an extractor that was pre-trained on other classes."""

import numpy as np
import pytest
import torch

from fedthe import tree
from fedthe.data.pool import Dataset, Pool
from fedthe.engine.loop import Loop
from fedthe.errors import InputError
from fedthe.study.figures import measure_figure, plan_figure, probing
from helpers import make_pool

CONFIG = plan_figure(
    "probing", clients=3, seeds=[0], local_epochs=1, personal_epochs=3, batch=16, crop=0, flip=False, lr=0.05
)


def make_bright(rows=300):
    noise = make_pool(np.arange(rows) % 6, size=16)
    images = (noise.x // 4 + 30 * noise.labels[:, None, None, None]).astype(np.uint8)
    return Pool("bright", images, noise.labels, noise.classes)


def test_three_modes_start_from_one_extractor_that_never_saw_the_classes(monkeypatch):
    monkeypatch.setattr(probing, "PRETRAIN_EPOCHS", 2)
    pool = make_bright()
    body = probing.pretrain(probing.keep_classes(pool, (0, 1, 2)), "cnn", CONFIG.training, 0, torch.device("cpu"))
    first, again = ({p.name: p for p in probing.deploy_probes(Dataset(pool), CONFIG, 0, Loop())} for _ in range(2))
    assert list(first) == ["lp", "ft", "lpft"]
    for mode, deployed in first.items():
        assert deployed.federation.pool.classes == ("class 3", "class 4", "class 5")
        assert deployed.tests == ["original", "corrupted", "ooc", "mixture", "corrupted_ooc"]
        mine = tree.flatten(tree.take(deployed.states, 1))
        same = [torch.equal(leaf, mine[f"body.{name}"]) for name, leaf in tree.flatten(body).items()]
        assert all(same) == (mode == "lp")  # which leaves the extractor alone
        assert all(torch.equal(leaf, tree.flatten(again[mode].states)[name][1]) for name, leaf in mine.items())


def test_pretraining_learns_and_keeps_only_its_classes(monkeypatch):
    pool = probing.keep_classes(make_bright(), (4, 1))
    assert pool.classes == ("class 4", "class 1")
    assert (pool.x[pool.labels == 0].mean() > pool.x[pool.labels == 1].mean()).all()
    bodies = []
    for epochs in (0, 3):
        monkeypatch.setattr(probing, "PRETRAIN_EPOCHS", epochs)
        bodies.append(tree.flatten(probing.pretrain(pool, "cnn", CONFIG.training, 0, torch.device("cpu"))))
    assert not torch.equal(bodies[0]["conv1"], bodies[1]["conv1"])


def test_too_few_classes_are_refused(tmp_path):
    np.savez(tmp_path / "three.npz", images=make_bright().x[:90], labels=np.arange(90) % 3)
    with pytest.raises(InputError, match="at least four classes, but three has 3"):
        measure_figure("probing", dataset=f"npz:{tmp_path / 'three.npz'}", natural="none")


@pytest.mark.parametrize("setting", [{"width": 2, "net": "resnet20_gn"}, {"head_layers": 2}, {"standardize": True}])
def test_probing_refuses_another_network(setting):
    with pytest.raises(InputError, match="probing does not change networks; leave out width, head_layers"):
        measure_figure("probing", dataset="glyphs", natural="none", **setting)
