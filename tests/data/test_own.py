"""Data that clients hold already, in every form that users have it in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import fedthe
from fedthe.corruptions import CORRUPTIONS, corrupt
from fedthe.data import load_dataset
from fedthe.data.feature_shift import APART
from fedthe.data.partition import Split, partition
from fedthe.data.plan import Federation, Settings, build
from fedthe.data.pool import Dataset, Pool
from helpers import fails
from written_data import write_picture

SIZES = (20, 31, 12)


def draw(kind: str = "features", sizes=SIZES, seed=0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows whose first value tells client and row apart."""
    draws = np.random.default_rng(seed)
    clients = []
    for n in sizes:
        y = draws.integers(0, 3, n)
        x = {
            "features": draws.normal(size=(n, 2, 3)).astype(np.float32),
            "tokens": draws.integers(0, 50, (n, 7)),
            "pictures": draws.integers(0, 256, (n, 16, 16, 3), dtype=np.uint8),
        }[kind]
        clients.append((x, y))
    return clients


def rows_of(federation: Federation, k: int, part: str) -> tuple[np.ndarray, np.ndarray]:
    rows = getattr(federation.clients[k], part)
    return federation.pool.x[rows], federation.pool.labels[rows]


def same_set(a, b) -> bool:
    return sorted(row.tobytes() for row in np.asarray(a)) == sorted(row.tobytes() for row in np.asarray(b))


@pytest.mark.parametrize("kind", ["features", "tokens", "pictures"])
def test_every_client_keeps_its_rows(kind):
    clients = draw(kind)
    federation = Federation.from_clients(clients, name="lab")
    assert [len(split.test) for split in federation.clients] == [4, 6, 2]
    assert [len(split.val) for split in federation.clients] == [4, 6, 2]
    for k, (x, y) in enumerate(clients):
        whole = [rows_of(federation, k, part) for part in ("train", "val", "test")]
        assert same_set(np.concatenate([part[0] for part in whole]), x)
        pairs = {row.tobytes(): label for row, label in zip(x, y.tolist(), strict=True)}
        for rows, labels in whole:
            assert [pairs[row.tobytes()] for row in rows] == labels.tolist()
    pictures = kind == "pictures"
    tests = ["original", "corrupted", "ooc", "mixture", "corrupted_ooc"] if pictures else ["original", "ooc", "mixture"]
    assert list(federation.tests) == tests
    assert any("nothing is corrupted" in note for note in federation.notes) is not pictures
    assert ("corruptions" in federation.manifest) is pictures
    for k in range(3):  # out of client: rows of others' tests only
        ooc = federation.inputs(federation.tests["ooc"][k])
        others = np.concatenate([rows_of(federation, j, "test")[0] for j in range(3) if j != k])
        assert {row.tobytes() for row in ooc} <= {row.tobytes() for row in others}


def test_the_seed_splits_and_nothing_else_does():
    clients = draw()
    a, b, c = (Federation.from_clients(clients, seed=seed) for seed in (0, 0, 1))
    assert a.content_hash == b.content_hash
    assert a.content_hash != c.content_hash
    assert not same_set(rows_of(a, 0, "test")[0], rows_of(c, 0, "test")[0])
    moved = [(x + 1, y) for x, y in clients]
    assert Federation.from_clients(moved).training_hash != a.training_hash


def test_splits_of_the_users_are_kept_in_every_seed():
    clients = [
        {"train": (x[:6], y[:6]), "val": (x[6:8], y[6:8]), "test": (x[8:], y[8:])} for x, y in draw(sizes=(12, 10))
    ]
    for seed in (0, 5):
        federation = Federation.from_clients(clients, seed=seed)
        for k, client in enumerate(clients):
            for part, (x, y) in client.items():
                got = rows_of(federation, k, part)
                assert np.array_equal(got[0], x)
                assert np.array_equal(got[1], y)


def test_named_tests_belong_to_their_clients_and_to_the_mixture():
    clients, night = draw(), draw(seed=9)
    tests = {"night": [night[0], None, night[2]], "day": [None, night[1], None]}
    federation = Federation.from_clients(clients, tests=tests)
    assert list(federation.tests) == ["original", "night", "day", "ooc", "mixture"]
    assert federation.tests["night"][1] is None
    for k in (0, 2):
        stream = federation.tests["night"][k]
        assert np.array_equal(federation.inputs(stream), night[k][0])
        assert federation.labels(stream).tolist() == night[k][1].tolist()
    mixture = {row.tobytes() for row in federation.inputs(federation.tests["mixture"][0])}
    assert mixture & {row.tobytes() for row in night[0][0]}
    assert len(federation.tests["mixture"][0]) == 3 * 4  # original, night and ooc; the test has 4 rows
    assert any("night" in note and "client 1" in note for note in federation.notes)


def test_pictures_of_a_named_test_that_are_in_the_pool_are_left_out():
    clients = draw("pictures")
    leaky = (np.concatenate([clients[1][0][:2], draw("pictures", seed=5)[0][0][:3]]), np.zeros(5, int))
    federation = Federation.from_clients(clients, tests={"night": [leaky, None, None]})
    assert len(federation.tests["night"][0]) == 3
    assert any("left out" in note for note in federation.notes)


class Items(torch.utils.data.Dataset):
    def __init__(self, x, y, wrap=lambda row: row):
        self.x, self.y, self.wrap = x, y, wrap

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.wrap(self.x[i]), int(self.y[i])


class Columns(dict):
    column_names = ("label", "image", "id")


def test_the_same_data_in_other_forms_is_the_same_federation():
    plain = draw("pictures")
    wanted = Federation.from_clients(plain).content_hash
    forms = {
        "torch": [(torch.tensor(x), torch.tensor(y)) for x, y in plain],
        "dataset": [Items(x, y) for x, y in plain],
        "dataset of tensors": [Items(torch.tensor(x), torch.tensor(y)) for x, y in plain],
        "dataset of pictures": [Items(x, y, Image.fromarray) for x, y in plain],
        "columns": [Columns(image=list(x), label=y.tolist(), id=[0]) for x, y in plain],
        "columns of pictures": [Columns(image=list(map(Image.fromarray, x)), label=y.tolist()) for x, y in plain],
        "dict of columns": [{"x": x, "y": y} for x, y in plain],
    }
    for form, clients in forms.items():
        assert Federation.from_clients(clients).content_hash == wanted, form
    grey = [(x[..., 0], y) for x, y in plain]
    assert Federation.from_clients(grey).pool.x.shape[1:] == (16, 16, 1)


def test_types_of_features_and_tokens():
    x, y = draw()[0]
    for kind, wanted in ((np.float64, np.float32), (np.float16, np.float32), (np.int8, np.int64), (bool, np.float32)):
        assert Federation.from_clients([(x.astype(kind), y), (x.astype(kind), y)]).pool.x.dtype == wanted


def test_labels_may_be_names():
    x, _ = draw()[0]
    names = np.array(["cat", "dog"] * 10)
    federation = Federation.from_clients([(x, names), (x, names[::-1])])
    assert federation.pool.classes == ("cat", "dog")
    assert federation.pool.labels[:4].tolist() == [0, 1, 0, 1]
    federation = Federation.from_clients([(x, names), (x, names)], classes=["eel", "dog", "cat"])
    assert federation.pool.labels[:4].tolist() == [2, 1, 2, 1]
    assert "no client holds eel" in federation.notes
    fails(lambda: Federation.from_clients([(x, names), (x, names)], classes=["cat", "cow"]), "client 0", "'dog'")


X, Y = np.zeros((10, 4)), np.arange(10) % 2
GOOD = (X, Y)


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        ([GOOD], ["at least 2 clients, not 1"]),
        ([], ["2 clients"]),
        ({"a": GOOD}, ["list"]),
        ([GOOD, (X[:4], Y[:4])], ["client 1", "4 rows"]),
        ([GOOD, (X, Y[:9])], ["client 1", "10 samples and 9 labels"]),
        ([GOOD, (X[:, :3], Y)], ["client 0", "client 1", "[3]"]),
        ([GOOD, (X.astype(int), Y)], ["float32", "int64"]),
        ([GOOD, (np.full((10, 4), np.nan), Y)], ["client 1", "not finite", "row 0"]),
        ([GOOD, (np.full((10, 4), 1e300), Y)], ["client 1", "not finite"]),
        ([GOOD, (X, Y - 1)], ["client 1", "-1"]),
        ([GOOD, (X, Y + 0.5)], ["client 1", "whole numbers"]),
        ([GOOD, (X, X)], ["client 1", "labels"]),
        ([GOOD, (X, np.array(["a"] * 10))], ["all clients"]),
        ([GOOD, (X[:0], Y[:0])], ["client 1", "no rows"]),
        ([GOOD, ([[1], [2, 3]], [0, 1])], ["client 1", "one shape"]),
        ([GOOD, (np.array([{}] * 10), Y)], ["client 1", "objects"]),
        ([GOOD, 7], ["client 1", "int"]),
        ([GOOD, {"train": GOOD, "test": GOOD}], ["client 1", "'val'"]),
        ([GOOD, {"train": GOOD, "val": GOOD, "test": GOOD, "tset": GOOD}], ["'tset'"]),
        ([GOOD, {"a": X, "y": Y}], ["client 1", "a, y", "samples"]),
        ([GOOD, {"x": X, "image": X, "y": Y}], ["several columns"]),
        ([(np.zeros((10, 3, 8, 8), np.uint8), Y)] * 2, ["client 0", "permute"]),
        ([(np.zeros((10, 7), np.uint8), Y)] * 2, ["client 0", "int64"]),
        ([GOOD, SimpleNamespace(column_names=5)], ["client 1"]),
    ],
)
def test_wrong_clients_are_refused(clients, words):
    fails(lambda: Federation.from_clients(clients), *words)


def test_wrong_tests_and_names_are_refused():
    two = [GOOD, GOOD]
    for tests, words in (
        ({"night": [GOOD]}, ["night", "2 clients"]),
        ({"ooc": two}, ["'ooc'"]),
        ({"own": two}, ["'own' has a meaning of its own"]),
        ({"unknown": two}, ["'unknown' has a meaning of its own"]),
        ({"mixed": two}, ["'mixed' has a meaning of its own"]),
        ({"train": two}, ["'train'"]),
        ({"last night": two}, ["last night"]),
        ({"night": [None, None]}, ["no samples"]),
        ({"night": [(X, Y[:3]), None]}, ["client 0, night"]),
        ([GOOD], ["dict"]),
    ):
        fails(lambda tests=tests: Federation.from_clients(two, tests=tests), *words)
    fails(lambda: Federation.from_clients(two, name="a\nb"), "name")
    fails(lambda: Federation.from_clients(two, classes=["a", "a"]), "classes")
    fails(lambda: Federation.from_clients(two, classes=["a"]), "client 0", "0 to 0")


@pytest.mark.parametrize("kind", ["features", "tokens", "pictures"])
def test_a_federation_is_saved_and_read_again(tmp_path: Path, kind):
    night = draw(kind, seed=3)
    made = Federation.from_clients(draw(kind, sizes=(20,) * 11), tests={"night": [night[0], None, *[night[1]] * 9]})
    file = made.save(tmp_path / "mine.npz")
    dataset = load_dataset(f"npz:{file}")
    again = build(dataset, Settings(11, partition="given"))
    assert again.training_hash == made.training_hash
    assert [each.name for each in dataset.clients] == [str(k) for k in range(11)]
    for test, streams in made.tests.items():
        for before, after in zip(streams, again.tests[test], strict=True):
            assert (before is None) == (after is None)
            if before is not None and after is not None:
                assert np.array_equal(made.inputs(before), again.inputs(after))
    assert not load_dataset(f"npz:{file}", natural="none").natural
    fails(lambda: made.save(tmp_path / "mine.bin"), "mine.bin", ".npz")


def test_a_federation_that_was_dealt_keeps_its_splits(tmp_path: Path):
    dealt = build(load_dataset("digits", size=16), Settings(4, dirichlet=0.5, seed=2))
    again = build(load_dataset(f"npz:{dealt.save(tmp_path / 'x.npz')}"), Settings(4, partition="given", seed=7))
    for k in range(4):
        for part in ("train", "val", "test"):
            for before, after in zip(rows_of(dealt, k, part), rows_of(again, k, part), strict=True):
                assert np.array_equal(before, after)


def test_a_file_says_that_it_lacks_the_class_that_is_set_aside(tmp_path: Path):
    federation = build(load_dataset("digits", size=16), Settings(4, dirichlet=0.5, unknown="3"))
    with pytest.warns(UserWarning, match="has no samples of 3, which is set aside"):
        file = federation.save(tmp_path / "x.npz")
    assert "3" not in load_dataset(f"npz:{file}").pool.classes


def write_npz(path: Path, **change) -> str:
    x, y = draw(sizes=(20,))[0]
    np.savez(path, **{"x": x, "labels": y, "clients": np.repeat(["ann", "bob"], 10)} | change)
    return f"npz:{path}"


def test_a_column_of_clients_deals_the_rows(tmp_path: Path):
    spec = write_npz(tmp_path / "x.npz", clients=np.array([7, 3] * 10))
    dataset = load_dataset(spec)
    assert [each.name for each in dataset.clients] == ["7", "3"]
    assert [each.rows.tolist() for each in dataset.clients] == [list(range(0, 20, 2)), list(range(1, 20, 2))]
    splits = np.array(["train"] * 4 + ["val"] * 2 + ["test"] * 2 + ["night"] * 2 + [""] * 10)
    dataset = load_dataset(write_npz(tmp_path / "x.npz", splits=splits))
    ann, bob = dataset.clients
    assert isinstance(ann.rows, Split)
    assert (ann.rows.train.tolist(), ann.rows.test.tolist()) == ([0, 1, 2, 3], [6, 7])
    assert ann.tests["night"].tolist() == [0, 1]
    assert bob.rows.tolist() == list(range(8, 18))
    assert not bob.tests


def test_wrong_columns_are_refused(tmp_path: Path):
    file = tmp_path / "x.npz"
    for change, words in (
        ({"clients": np.zeros(19, int)}, ["clients", "20 rows"]),
        ({"clients": np.zeros(20)}, ["clients", "float64"]),
        ({"clients": np.zeros(20, int)}, ["at least 2 clients"]),
        ({"clients": np.array([0] * 17 + [1] * 3)}, ["client 1", "3 rows"]),
        ({"splits": np.zeros(20, int)}, ["splits"]),
        ({"splits": np.array(["train"] * 10 + [""] * 10)}, ["client ann", "val"]),
        ({"splits": np.array(["train"] * 5 + [""] * 15)}, ["client ann", "with and without"]),
        ({"splits": np.array(["last night"] * 5 + [""] * 15)}, ["last night"]),
        ({"x": np.full((20, 2), np.inf)}, ["not finite"]),
    ):
        spec = write_npz(file, **change)
        fails(lambda spec=spec: load_dataset(spec), *words)
    fails(lambda: load_dataset(write_npz(file), size=16), "no pictures")
    fails(lambda: load_dataset(write_npz(file), by_client=True), "by_client")


def test_a_folder_by_client(tmp_path: Path):
    for client, classes in (("ann", ("cat", "dog")), ("bob", ("dog", "eel"))):
        for c, name in enumerate(classes):
            for i in range(4):
                write_picture(tmp_path / client / name / f"{i}.png", (10 * i, c, ord(client[0])), (40, 40))
    dataset = load_dataset(f"folder:{tmp_path}", by_client=True, size=16)
    assert dataset.pool.classes == ("cat", "dog", "eel")
    assert [each.name for each in dataset.clients] == ["ann", "bob"]
    assert np.bincount(dataset.pool.labels).tolist() == [4, 8, 4]
    for each in dataset.clients:
        assert (dataset.pool.x[each.rows, 0, 0, 2] == ord(each.name[0])).all()
    fails(lambda: load_dataset(f"folder:{tmp_path}"), "by_client")
    (tmp_path / "cid").mkdir()
    fails(lambda: load_dataset(f"folder:{tmp_path}", by_client=True), tmp_path / "cid", "class")


# partitions

LABELS = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 60))


def hands(kind, clients=12, **more):
    splits = partition(LABELS, clients, more.pop("dirichlet", 0.1), 3, kind, **more)
    rows = [split.rows for split in splits]
    assert len(np.unique(np.concatenate(rows))) == sum(map(len, rows))  # no row twice
    return rows


def test_shards_give_each_client_few_classes():
    for shards in (1, 2, 3):
        dealt = hands("shards", clients=10, shards=shards)
        assert {len(rows) for rows in dealt} == {60}
        assert sum(map(len, dealt)) == len(LABELS)
        assert all(len(np.unique(LABELS[rows])) <= shards + 1 for rows in dealt)
    assert all(len(np.unique(LABELS[rows])) == 1 for rows in hands("shards", clients=10, shards=1))
    fails(lambda: hands("shards", clients=10, shards=13), "shards", "1 to 12")
    fails(lambda: hands("shards", shards=0), "shards")


def test_quantity_skew_changes_sizes_not_mixes():
    dealt = hands("quantity", dirichlet=0.5, clients=6)
    sizes = sorted(map(len, dealt))
    assert sum(sizes) == len(LABELS)
    assert sizes[-1] > 3 * sizes[0]
    big = max(dealt, key=len)
    assert np.abs(np.bincount(LABELS[big], minlength=10) / len(big) - 0.1).max() < 0.06
    even = sorted(map(len, hands("quantity", dirichlet=1e4, clients=6)))
    assert even[-1] - even[0] < 10


def test_no_skew():
    dealt = hands("iid", clients=6)
    assert {len(rows) for rows in dealt} == {100}
    mixes = np.stack([np.bincount(LABELS[rows], minlength=10) / len(rows) for rows in dealt])
    assert np.abs(mixes - 0.1).max() < 0.12
    assert not np.array_equal(dealt[0], hands("iid", clients=5)[0])


# feature shift between clients


def shifted(kind, **more) -> tuple[Federation, Federation]:
    draws = np.random.default_rng(0)
    pool = Pool("noise", draws.integers(0, 256, (90, 16, 16, 3), np.uint8), np.arange(90) % 3, ("a", "b", "c"))
    shift = Pool("other", draws.integers(0, 256, (30, 16, 16, 3), np.uint8), np.arange(30) % 3, ("a", "b", "c"))
    made = [
        build(Dataset(pool, {"natural": shift}), Settings(6, 1.0, feature_shift=each, **more))
        for each in ("none", kind)
    ]
    assert [list(split.rows) for split in made[0].clients] == [list(split.rows) for split in made[1].clients]
    return made[0], made[1]


def test_every_client_sees_pictures_rotated_in_its_own_way():
    plain, turned = shifted("rotation")
    for k, split in enumerate(plain.clients):
        assert np.array_equal(turned.pool.x[split.rows], np.rot90(plain.pool.x[split.rows], k % 4, axes=(1, 2)))
        stream = plain.tests["natural"][k]
        assert np.array_equal(turned.inputs(stream), np.rot90(plain.inputs(stream), k % 4, axes=(1, 2)))
    assert plain.training_hash != turned.training_hash
    assert "feature_shift" not in plain.manifest["settings"]
    assert turned.manifest["settings"]["feature_shift"] == "rotation"


def test_every_client_sees_pictures_corrupted_in_its_own_way(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDTHE_HOME", str(tmp_path))
    plain, worse = shifted("corruption", feature_severity=2)
    (note,) = (note for note in worse.notes if "feature shift" in note)
    kinds = [CORRUPTIONS.index(word.split(" ", 1)[1]) for word in note.rpartition(": ")[2].split(", ")]
    assert len(set(kinds)) == 6
    for k, split in enumerate(plain.clients):
        rows = torch.from_numpy(split.rows)
        clean = torch.from_numpy(plain.pool.x[split.rows])
        wanted = corrupt(clean, CORRUPTIONS[kinds[k]], 2, rows + APART, 0)
        assert np.array_equal(worse.pool.x[split.rows], wanted.numpy())
    fails(lambda: Settings(feature_shift="fog"), "feature_shift")
    fails(lambda: Settings(feature_severity=6), "feature_severity")


def test_a_feature_shift_and_an_unknown_class_are_refused_together():
    pool = Pool("noise", np.zeros((90, 16, 16, 3), np.uint8), np.arange(90) % 3, ("a", "b", "c"))
    settings = Settings(6, 1.0, feature_shift="rotation", unknown="c")
    fails(lambda: build(Dataset(pool), settings), "does not shift samples of an unknown class")


def test_features_cannot_be_shifted():
    dataset = Federation.from_clients(draw()).dataset
    settings = Settings(3, partition="given", feature_shift="rotation")
    fails(lambda: build(dataset, settings), "pictures")


def test_federations_are_public():
    assert fedthe.Federation is Federation


def test_a_feature_shift_is_applied_once_in_a_run_of_the_federation(tmp_path):
    dataset = Federation.from_clients(draw("pictures")).dataset
    made = build(dataset, Settings(3, partition="given", feature_shift="rotation"))
    small = {"methods": ["fedavg"], "rounds": 1, "local_epochs": 1, "crop": 2, "samples": 2, "out": str(tmp_path)}
    results = fedthe.run(federation=made, tests=["original"], **small)
    assert results.digests["pool"] == made.pool.digest
    again = build(load_dataset(f"npz:{made.save(tmp_path / 'x.npz')}"), made.settings)
    assert again.pool.digest == made.pool.digest


def test_natural_keeps_the_rows_of_a_held_test(tmp_path):
    clients, night = draw(), draw(seed=9)
    made = Federation.from_clients(clients, tests={"night": list(night), "day": [night[0], None, None]})
    dataset = load_dataset(f"npz:{made.save(tmp_path / 'x.npz')}", natural="night")
    federation = build(dataset, Settings(3, partition="given"))
    assert list(federation.tests) == ["original", "night", "ooc", "mixture"]
    for k in range(3):
        assert np.array_equal(federation.inputs(federation.tests["night"][k]), night[k][0])
    other = Federation.from_clients(clients, tests={"natural": list(night)}).save(tmp_path / "y.npz")
    np.savez(tmp_path / "z.npz", x=night[0][0], labels=night[0][1])
    fails(lambda: load_dataset(f"npz:{other}", natural=f"npz:{tmp_path / 'z.npz'}"), "natural")


def test_a_fraction_of_given_splits_is_random():
    y = np.repeat(np.arange(3), 20)
    part = (np.random.default_rng(0).normal(size=(60, 2)), y)
    dataset = Federation.from_clients([{"train": part, "val": part, "test": part}] * 2).dataset
    made = build(dataset, Settings(2, partition="given", train_fraction=0.5, test_fraction=0.5))
    for split in made.clients:
        for rows in (split.train, split.test):
            assert len(rows) == 30
            assert len(np.unique(made.pool.labels[rows])) == 3
            assert (np.diff(rows) > 0).all()
