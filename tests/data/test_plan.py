"""The federation: leak-free, complete, and locked by golden hashes."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from fedthe.corruptions import CORRUPTIONS, corrupt
from fedthe.data import load_dataset
from fedthe.data.plan import Settings, build
from fedthe.data.pool import PUBLISHED, Dataset, Pool
from fedthe.data.shifts import CLEAN, CORRUPTED, NATURAL, join
from fedthe.errors import InputError
from helpers import RESULTS, ROOT, make_pool

SHIFT_SAMPLE = ROOT.parent / "shared/data/cifar10_natural_tiny_imagenet.npz"
TESTS = ["original", "corrupted", "natural", "ooc", "mixture", "corrupted_ooc"]

# The rows of these federations may never change: every published number rests on them. Hashes of whole manifests.
GOLDEN = {
    ("balanced", 20, 0.1, 0): "23a8657980d197f707fecae93c82114a08bca9bddb112b3998dfeb17a672e9d9",
    ("balanced", 20, 0.1, 1): "8328dd482007cd9877a41bdf6ea682dd590b8660b89bf94b4428240e1f8a83a6",
    ("balanced", 13, 1.0, 0): "0ff3c54d2ba4d6212e7495c8f05d7f032644e80aabd06c1b7bc86466c3c9db9b",
    ("unbalanced", 10, 0.3, 0): "d85b8386529720567b714d06bab03e9764309070b6785e4a9d5d88a9fb65fd5a",
}
# 20 clients, Dir(0.1), seeds 0 to 2, without a natural shift
GOLDEN_CIFAR10 = [
    "14481c11b5e6f956",
    "b4ab51f74d8b055e",
    "35f4c6183b5737af",
]


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
        smallest = min(len(original) // 2, *(len(part) for part in parts))  # a row is clean or corrupted, not both
        assert len(mixture) == smallest * len(parts)
        met = {(int(s), int(r)) for s, r in zip(mixture.source, mixture.rows, strict=True)}
        assert len(met) == len(mixture)
        assert len({row for source, row in met if source < NATURAL}) == 3 * smallest
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
    images, labels = federation.inputs(mixture), federation.labels(mixture)
    for i, (source, row) in enumerate(zip(mixture.source, mixture.rows, strict=True)):
        if source == CORRUPTED:
            assert labels[i] == dataset.pool.labels[row]
            at = np.flatnonzero(federation.test_rows == row)[0]
            assert (images[i] == federation.corrupted[at]).all()
        else:
            pool = dataset.pool if source == CLEAN else dataset.natural["natural"]
            assert labels[i] == pool.labels[row]
            assert (images[i] == pool.x[row]).all()


def test_corrupted_copies_differ_come_from_the_cache_and_follow_severity(dataset, home, monkeypatch):
    federation = build(dataset, Settings(clients=10))
    clean = dataset.pool.x[federation.test_rows]
    assert ((federation.corrupted != clean).any(axis=(1, 2, 3))).mean() > 0.95
    assert len(set(federation.corruptions.tolist())) == 15

    def fail(*args, **kwargs):
        raise AssertionError("computed again")

    monkeypatch.setattr("fedthe.data.plan.corrupt_mixed", fail)
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
    assert len(federation.tests["mixture"][0]) == 3 * (len(federation.tests["original"][0]) // 2)


def test_a_client_with_one_test_row_has_no_mixture():
    pool = make_pool(np.arange(60) % 2)
    federation = build(Dataset(pool), Settings(clients=3, dirichlet=10.0, test_fraction=0.01))
    assert [len(stream) for stream in federation.tests["original"]] == [1, 1, 1]
    assert federation.tests["mixture"] == (None, None, None)


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
    assert (federation.inputs(there) == shifts["imagenet_r"].x[there.rows]).all()


@pytest.mark.parametrize(
    ("change", "says"),
    [({"severity": 6}, "severity"), ({"partition": "fair"}, "balanced, unbalanced"), ({"seed": -1}, "seed")],
)
def test_bad_settings_are_refused(change, says):
    with pytest.raises(InputError, match=says):
        Settings(**change)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("clients", value) for value in (2**63, -(2**63), 10**30)),
        *(("seed", value) for value in (2**31, 10**30, 1 << 20_000)),
        *(("severity", value) for value in (10**30, 1 << 20_000)),
        *(("dirichlet", value) for value in (float("nan"), float("inf"), 1e-320, 1e308, 0, -1, 1 << 20_000, "x", None)),
        *(("train_fraction", value) for value in (float("nan"), 1e-400, 1.1, 1 << 20_000, "x")),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_absurd_numbers_are_one_sentence(name, value):
    with pytest.raises(InputError, match=name) as caught:
        Settings(**{name: value})
    assert len(str(caught.value)) < 200


def test_settings_go_by_value():
    assert Settings(dirichlet=1, seed=np.int64(3)) == Settings(dirichlet=1.0, seed=3)
    for change in ({"seed": 1.5}, {"clients": 10.0}, {"severity": "5"}):
        with pytest.raises(InputError, match="must be a whole number"):
            Settings(**change)


def test_the_content_hash_tells_other_pixels_apart_and_the_manifest_hash_other_shapes(dataset):
    base = build(dataset, Settings(clients=10))
    inverted = Pool("made", 255 - dataset.pool.x, dataset.pool.labels, dataset.pool.classes)
    other = build(Dataset(inverted, dataset.natural), Settings(clients=10))
    assert other.manifest_hash == base.manifest_hash
    assert other.content_hash != base.content_hash
    larger = Pool("made", dataset.pool.x.repeat(2, 1).repeat(2, 2), dataset.pool.labels, dataset.pool.classes)
    assert (
        build(Dataset(larger), Settings(clients=10)).manifest_hash
        != build(Dataset(dataset.pool), Settings(clients=10)).manifest_hash
    )


def test_renaming_a_file_changes_no_manifest_and_other_pixels_do(tmp_path):
    labels, shifted = np.arange(300) % 3, np.arange(60) % 2
    arrays = {name: make_pool(of, name, classes=3) for name, of in (("a", labels), ("b", labels), ("shift", shifted))}
    for name, pool in arrays.items():
        np.savez(tmp_path / f"{name}.npz", images=pool.x, labels=pool.labels, classes=["x", "y", "z"])
        for row, (image, label) in enumerate(zip(pool.x, pool.labels, strict=True)):
            (tmp_path / name / "xyz"[label]).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(tmp_path / name / "xyz"[label] / f"{row:03}.png")
    leaky = {"images": np.r_[arrays["shift"].x, arrays["a"].x[:5]], "labels": np.r_[shifted, labels[:5]]}
    np.savez(tmp_path / "leaky.npz", **leaky)

    def hashes(kind, name, shift):
        suffix = ".npz" if kind == "npz" else ""
        dataset = load_dataset(f"{kind}:{tmp_path / name}{suffix}", natural=f"npz:{tmp_path / shift}.npz", size=8)
        federation = build(dataset, Settings(clients=3, dirichlet=1.0))
        assert any(f"natural ({shift})" in note for note in federation.notes)  # people see the name
        return federation.manifest_hash, federation.training_hash, federation.content_hash

    for kind in ("npz", "folder"):
        before = hashes(kind, "a", "leaky")
        for name, suffix in (("a", ".npz" if kind == "npz" else ""), ("leaky", ".npz")):
            (tmp_path / f"{name}{suffix}").rename(tmp_path / f"renamed {name}{suffix}")
        assert hashes(kind, "renamed a", "renamed leaky") == before
        (tmp_path / "renamed leaky.npz").rename(tmp_path / "leaky.npz")
        other = hashes(kind, "b", "shift")
        assert not set(other) & set(before)  # the same labels, other pixels


def test_published_shifts_keep_the_name_in_their_manifests():
    pool = make_pool(np.arange(30) % 3)
    own = Pool("my file", pool.x, pool.labels, pool.classes, own=True)
    assert own.identity == f"sha256:{own.digest}"
    assert pool.identity == "made"
    assert PUBLISHED["aeb7a9c0f16fcdf5d46178b111f959ec20b50e007185d0d564c89f9d6f5bc8e5"] == "Tiny-ImageNet"


@pytest.mark.data
@pytest.mark.skipif(not SHIFT_SAMPLE.exists(), reason="the sample shift is not beside this checkout")
@pytest.mark.parametrize("id", ["main-dir0.1", "regime-dir0.1"])
def test_the_manifests_of_the_published_results_are_still_the_same(id, cifar10_home, tmp_path):
    (tmp_path / "any name.npz").symlink_to(SHIFT_SAMPLE)
    dataset = load_dataset("cifar10", natural=f"npz:{tmp_path / 'any name.npz'}", home=cifar10_home)
    (case, *_) = json.loads((RESULTS / f"{id}.json").read_text())["cases"]
    for seed in case["config"]["seeds"][:2]:
        assert build(dataset, Settings(seed=seed)).manifest_hash == case["manifests"][str(seed)]


def test_images_of_a_shift_that_are_in_the_pool_are_left_out_and_it_is_said(dataset):
    shift = dataset.natural["natural"]
    images = shift.x.copy()
    images[:50] = dataset.pool.x[100:150]
    leaky = Dataset(dataset.pool, {"natural": Pool("leaky", images, shift.labels, shift.classes)})
    federation = build(leaky, Settings(clients=10))
    dealt = np.concatenate([stream.rows for stream in federation.tests["natural"] if stream is not None])
    assert dealt.min() >= 50
    assert "natural (leaky): 50 images are in made too and left out" in federation.notes
    itself = build(Dataset(dataset.pool, {"natural": dataset.pool}), Settings(clients=10))
    assert itself.tests["natural"] == (None,) * 10


def test_a_short_ooc_is_said():
    labels = np.arange(400) % 10
    federation = build(Dataset(make_pool(labels)), Settings(2, 0.05, 3, "unbalanced"))
    own, other = (np.array([len(stream) for stream in federation.tests[name]]) for name in ("original", "ooc"))
    assert (other < own).any()
    assert any(note.startswith("ooc: shorter") for note in federation.notes)


@pytest.mark.parametrize("change", ["pixels", "seed", "severity", "frost"])
def test_the_cache_of_corrupted_images_is_keyed_by_all_they_depend_on(dataset, home, tmp_path, change):
    base = build(dataset, Settings(clients=10))
    before = base.corrupted
    changed, settings = dataset, Settings(clients=10)
    if change == "pixels":
        pool = dataset.pool
        changed = Dataset(Pool(pool.name, 255 - pool.x, pool.labels, pool.classes), dataset.natural)
    elif change == "frost":
        for i in range(2):
            Image.fromarray(np.full((300, 300, 3), 40 * i, dtype=np.uint8)).save(tmp_path / f"frost{i}.png")
        settings = Settings(clients=10, frost=str(tmp_path))
    else:
        settings = Settings(clients=10, **{change: 1})
    after = build(changed, settings)
    assert len(list((home / "cache").iterdir())) == 1
    _ = after.corrupted
    assert len(list((home / "cache").iterdir())) == 2
    if change == "frost":
        frosted = base.corruptions == CORRUPTIONS.index("frost")
        differs = (before != after.corrupted).any(axis=(1, 2, 3))
        assert (differs == frosted).all()


def test_an_unknown_class_is_part_of_what_a_federation_holds():
    draws, labels = np.random.default_rng(0), np.arange(200) % 4
    x = draws.integers(0, 255, (200, 8, 8, 1), dtype=np.uint8)
    other = np.where((labels == 3)[:, None, None, None], 255 - x, x)
    pools = (Pool("made", each, labels, tuple("abcd")) for each in (x, other))
    one, two = (build(Dataset(pool), Settings(4, 1.0, unknown="d")) for pool in pools)
    assert one.manifest_hash == two.manifest_hash
    assert one.content_hash != two.content_hash


def test_every_sample_of_a_gradual_stream_has_its_own_severity():
    federation = build(Dataset(make_pool(np.arange(1200) % 10)), Settings(4, 1.0, tests=("gradual",)))
    checked = 0
    for stream in federation.tests["gradual"]:
        images = federation.inputs(stream)
        usual = stream.kind == federation.corruptions[np.searchsorted(federation.test_rows, stream.rows)]
        for i in np.flatnonzero(usual & (stream.severity != federation.settings.severity)):
            row, kind, severity = stream.rows[i : i + 1], CORRUPTIONS[stream.kind[i]], int(stream.severity[i])
            clean = torch.from_numpy(federation.pool.x[row])
            (wanted,) = corrupt(clean, kind, severity, torch.from_numpy(row), 0).numpy()
            assert (images[i] == wanted).all()
            checked += 1
    assert checked


def test_usual_and_unusual_corruptions_mix_in_a_stream():
    federation = build(Dataset(make_pool(np.arange(1200) % 10)), Settings(4, 1.0, tests=("gradual",)))
    first = federation.tests["gradual"][1].first(1)
    unusual = first.corrupt((first.kind[0] + 1) % len(CORRUPTIONS), 2)
    both = federation.inputs(join([first, unusual]))
    assert (both[0] == federation.inputs(first)[0]).all()
    assert (both[1] == federation.inputs(unusual)[0]).all()
