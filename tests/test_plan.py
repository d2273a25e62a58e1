"""The federation: leak-free, complete, and locked by golden hashes."""

import json

import numpy as np
import pytest

from conftest import make_pool
from fedthe.data import load_dataset
from fedthe.data.plan import Settings, build
from fedthe.data.pool import Dataset
from fedthe.data.shifts import CLEAN, CORRUPTED, NATURAL
from fedthe.errors import InputError

TESTS = ["original", "corrupted", "natural", "ooc", "mixture", "corrupted_ooc"]

# The rows of these federations may never change: every published number rests on them. Hashes of whole manifests.
GOLDEN = {
    ("balanced", 20, 0.1, 0): "e79c42622e688b11c93e97e620d5d0c6a43b44ed8b07c43edc4906fc660d371f",
    ("balanced", 20, 0.1, 1): "f13263654c075fdab7559c55b844a3934d020374ca928b1a30d137fedcbee494",
    ("balanced", 13, 1.0, 0): "1ab9d9ba9a2bcbe73b800beace9f256950a96782e5457fb56af94859887ef3e6",
    ("unbalanced", 10, 0.3, 0): "1ad04eb8104a48e4bd7fac8251867c25ff5f49b0c0a2c710cedea66429a4da25",
}

GOLDEN_CIFAR10 = [
    "c51ea9ee324cd1ae",
    "b0395bc5af399457",
    "e73b1cb039ebb8f9",
]  # 20 clients, Dir(0.1), seeds 0 to 2, without a natural shift


@pytest.mark.parametrize("setting", GOLDEN)
def test_manifests_are_golden(dataset, setting):
    kind, clients, dirichlet, seed = setting
    federation = build(dataset, Settings(clients, dirichlet, seed, kind))
    assert federation.manifest_hash == GOLDEN[setting]
    assert json.loads(json.dumps(federation.manifest)) == federation.manifest


@pytest.mark.data
def test_the_federation_of_real_cifar10_is_golden(cifar10_home):
    dataset = load_dataset("cifar10", natural="none", home=cifar10_home)
    hashes = [build(dataset, Settings(seed=seed)).manifest_hash[:16] for seed in range(3)]
    assert hashes == GOLDEN_CIFAR10


def test_no_test_row_is_trained_on_by_anyone(dataset):
    federation = build(dataset, Settings(clients=10))
    trained = set(np.concatenate([np.concatenate([s.train, s.val]) for s in federation.clients]).tolist())
    for streams in federation.tests.values():
        for stream in streams:
            if stream is not None:
                clean = stream.rows[stream.source < NATURAL]
                assert not trained & set(clean.tolist())


def test_every_distribution_is_what_it_says(dataset):
    federation = build(dataset, Settings(clients=10))
    assert list(federation.tests) == TESTS
    shift = dataset.natural["natural"]
    for k, split in enumerate(federation.clients):
        streams = {name: streams[k] for name, streams in federation.tests.items()}
        original, corrupted, natural = streams["original"], streams["corrupted"], streams["natural"]
        ooc, mixture, corrupted_ooc = streams["ooc"], streams["mixture"], streams["corrupted_ooc"]
        assert (original.rows == split.test).all()
        assert (original.source == CLEAN).all()
        assert (corrupted.rows == split.test).all()
        assert (corrupted.source == CORRUPTED).all()
        assert not set(ooc.rows.tolist()) & set(split.rows.tolist())
        assert (corrupted_ooc.rows == ooc.rows).all()
        assert (corrupted_ooc.source == CORRUPTED).all()

        parts = [original, corrupted, ooc] + ([natural] if natural is not None else [])
        smallest = min(len(part) for part in parts)
        assert len(mixture) == smallest * len(parts)
        met = {(int(s), int(r)) for s, r in zip(mixture.source, mixture.rows, strict=True)}
        assert len(met) == len(mixture)
        allowed = {(int(s), int(r)) for part in parts for s, r in zip(part.source, part.rows, strict=True)}
        assert met <= allowed
        assert (mixture.source == CORRUPTED).sum() == smallest
        if natural is not None:
            mine = np.bincount(dataset.pool.labels[split.rows], minlength=10) > 0
            assert mine[shift.labels[natural.rows]].all()
            assert (mixture.source == NATURAL).sum() == smallest
            # random order: the parts do not stand one after another
            assert (np.diff(mixture.source.astype(int)) != 0).sum() >= len(parts)


def test_pixels_and_labels_of_a_stream(dataset):
    federation = build(dataset, Settings(clients=10))
    mixture = federation.tests["mixture"][0]
    images, labels = federation.images(mixture), federation.labels(mixture)
    for i, (source, row) in enumerate(zip(mixture.source, mixture.rows, strict=True)):
        if source == CORRUPTED:
            assert labels[i] == dataset.pool.labels[row]
            at = np.flatnonzero(federation.test_rows == row)[0]
            assert (images[i] == federation.corrupted[at]).all()
        else:
            pool = dataset.pool if source == CLEAN else dataset.natural["natural"]
            assert labels[i] == pool.labels[row]
            assert (images[i] == pool.images[row]).all()


def test_corrupted_copies_differ_come_from_the_cache_and_follow_severity(dataset, home, monkeypatch):
    federation = build(dataset, Settings(clients=10))
    clean = dataset.pool.images[federation.test_rows]
    assert ((federation.corrupted != clean).any(axis=(1, 2, 3))).mean() > 0.95
    assert len(set(federation.corruptions.tolist())) == 15

    import fedthe.data.corrupt

    def fail(*args, **kwargs):
        raise AssertionError("computed again")

    monkeypatch.setattr(fedthe.data.corrupt, "corrupt_mixed", fail)
    assert (build(dataset, Settings(clients=10)).corrupted == federation.corrupted).all()
    with pytest.raises(AssertionError, match="computed again"):
        _ = build(dataset, Settings(clients=10, severity=1)).corrupted


def test_a_row_is_corrupted_in_one_way_whoever_holds_it():
    pool = make_pool(np.arange(600) % 10)
    few, many = (build(Dataset(pool), Settings(clients=n)) for n in (3, 6))
    shared = np.intersect1d(few.test_rows, many.test_rows)
    assert len(shared) > 10
    for federation in (few, many):
        at = np.searchsorted(federation.test_rows, shared)
        assert (federation.corruptions[at] == few.corruptions[np.searchsorted(few.test_rows, shared)]).all()
        assert (federation.corrupted[at] == few.corrupted[np.searchsorted(few.test_rows, shared)]).all()


def test_a_missing_natural_shift_is_said_and_the_mixture_has_three_parts():
    federation = build(Dataset(make_pool(np.arange(600) % 10)), Settings(clients=5))
    assert federation.notes == ("natural: not available, mixture made of three parts",)
    assert "natural" not in federation.tests
    assert len(federation.tests["mixture"][0]) == 3 * len(federation.tests["original"][0])


def test_a_client_without_any_shifted_class_has_no_such_test_and_it_is_said():
    pool = make_pool(np.arange(1000) % 10)
    shift = make_pool(np.full(40, 3), "only threes", classes=10)
    federation = build(Dataset(pool, {"natural": shift}), Settings(clients=10, dirichlet=0.1))
    holds = federation.class_counts[:, 3] > 0
    assert 0 < holds.sum() < 10
    for k, stream in enumerate(federation.tests["natural"]):
        assert (stream is not None) == holds[k] or federation.class_counts[k, 3] < 10
        parts = 4 if stream is not None else 3
        assert len(federation.tests["mixture"][k]) % parts == 0
    assert any("no such test for client" in note for note in federation.notes)


def test_several_natural_shifts_are_several_tests():
    pool = make_pool(np.arange(1000) % 10)
    shifts = {name: make_pool(np.arange(200) % 10, name) for name in ("imagenet_a", "imagenet_r")}
    federation = build(Dataset(pool, shifts), Settings(clients=5, dirichlet=10.0))
    assert list(federation.tests) == [
        *("original", "corrupted", "imagenet_a", "imagenet_r", "ooc", "mixture", "corrupted_ooc")
    ]
    mixture = federation.tests["mixture"][0]
    assert set(mixture.source.tolist()) == {CLEAN, CORRUPTED, NATURAL, NATURAL + 1}
    there = federation.tests["imagenet_r"][0]
    assert (federation.images(there) == shifts["imagenet_r"].images[there.rows]).all()


@pytest.mark.parametrize(
    ("change", "says"),
    [({"severity": 6}, "severity"), ({"partition": "fair"}, "balanced or unbalanced"), ({"seed": -1}, "seed")],
)
def test_bad_settings_are_refused(change, says):
    with pytest.raises(InputError, match=says):
        Settings(**change)
