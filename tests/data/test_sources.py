"""Every loader on small files in the real formats, whole, cut, altered and hostile."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fedthe.data
from fedthe.data import DATASETS, Dataset, find, load_dataset, verify
from fedthe.data.folder import fit_images, read_image
from fedthe.data.idx import read_idx
from fedthe.data.imagenet32 import SHARED, read_map
from fedthe.data.source import content_digest
from fedthe.data.unpickle import load_pickle, read_batch
from fedthe.errors import InputError
from helpers import ROOT
from written_data import (
    CIFAR,
    idx_bytes,
    noise,
    python2_batch,
    tiny_files,
    write_cifar,
    write_cifar_101,
    write_imagenet32,
    write_mnist,
    write_picture,
    write_tiny,
)

SAMPLE = ROOT.parent / "shared/data/tiny-imagenet-20.zip"
SHIFT_SAMPLE = ROOT.parent / "shared/data/cifar10_natural_tiny_imagenet.npz"


def fails(call: Callable[[], object], *words: object) -> str:
    """The one sentence that `call` refuses with; it names all of `words`."""
    with pytest.raises(InputError) as caught:
        call()
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert sentence.endswith((".", "?", ")"))
    for word in words:
        assert str(word) in sentence
    return sentence


def loads_or_refuses(call: Callable[[], object], *words: object) -> None:
    """For files that may have come out right: no other error than ours."""
    try:
        call()
    except InputError as error:
        sentence = str(error)
    else:
        return
    assert "\n" not in sentence
    for word in words:
        assert str(word) in sentence


def cuts(content: bytes, count: int = 25) -> list[bytes]:
    """Beginnings of `content`: the shortest, the longest, and some between."""
    draw = random.Random(0)
    ends = {0, 1, 2, 3, len(content) // 2, len(content) - 2, len(content) - 1}
    return [content[:end] for end in sorted(ends | {draw.randrange(len(content)) for _ in range(count)})]


def refuses_cuts(file: Path, load: Callable[[], object], count: int = 25) -> None:
    whole = file.read_bytes()
    for part in cuts(whole, count):
        file.write_bytes(part)
        fails(load, file)
    file.write_bytes(whole)
    load()


def refuses_other_things(file: Path, load: Callable[[], object]) -> None:
    """Text, zeros, an image, nothing, a folder: none of them is the file that should be there."""
    picture = io.BytesIO()
    Image.new("RGB", (4, 4)).save(picture, "PNG")
    whole = file.read_bytes()
    for content in (b"", b"hello\n", bytes(5000), picture.getvalue(), b"\x80\x02.", b"\x80\x05N.", gzip.compress(b"")):
        file.write_bytes(content)
        fails(load, file.name.removesuffix(".gz"))
    file.unlink()
    fails(load, file.name.removesuffix(".gz"))
    file.mkdir()
    fails(load, file.name.removesuffix(".gz"))
    file.rmdir()
    file.write_bytes(whole)
    load()


# ---------------------------------------------------------------- the registry


def test_importing_the_datasets_imports_no_heavy_library() -> None:
    code = "import sys, fedthe.data, fedthe.data.fetch; print(sorted({'torch', 'PIL', 'sklearn'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_names_are_answered_with_the_nearest(tmp_path: Path) -> None:
    fails(lambda: load_dataset("cifar-10", home=tmp_path), "cifar-10", "did you mean cifar10?")
    fails(lambda: load_dataset("zzz", home=tmp_path), "choose from glyphs, digits")
    fails(lambda: verify("minst", home=tmp_path), "mnist")
    fails(lambda: find("minst", home=tmp_path), "mnist")


@pytest.mark.parametrize("name", [name for name, source in DATASETS.items() if source.lies == "home"])
def test_a_missing_dataset_says_where_and_how(tmp_path: Path, name: str) -> None:
    assert find(name, tmp_path) is None
    way_out = "image-net.org" if name == "imagenet32" else f"`fedthe data fetch {name}"
    fails(lambda: load_dataset(name, home=tmp_path), name, tmp_path / "data" / name, way_out)
    fails(lambda: load_dataset(f"{name}:{tmp_path / 'x'}"), tmp_path / "x", way_out)
    (tmp_path / "data" / name).mkdir(parents=True)
    fails(lambda: load_dataset(name, home=tmp_path), tmp_path / "data" / name)
    assert not verify(name, home=tmp_path).ok


def test_paths_are_asked_for_and_refused() -> None:
    fails(lambda: load_dataset("npz"), "npz:PATH")
    fails(lambda: load_dataset("folder:"), "folder:PATH")
    fails(lambda: load_dataset("digits:x"), "takes no path")
    fails(lambda: load_dataset("digits", size=0), "size")
    fails(lambda: load_dataset("digits", natural="unseen"), "digits", "unseen")
    fails(lambda: load_dataset("digits", natural="npz:"), "npz:")


def test_digits_come_with_scikit_learn(tmp_path: Path) -> None:
    digits = load_dataset("digits", home=tmp_path)
    assert digits.pool.x.shape == (1797, 32, 32, 1)
    assert digits.pool.x.max() == 255
    assert np.bincount(digits.pool.labels).min() == 174
    assert load_dataset("digits", size=8).pool.x.shape == (1797, 8, 8, 1)
    report = verify("digits", home=tmp_path)
    assert (report.ok, report.expected) == (True, None)
    assert "no published digest" in report.sentence


# ---------------------------------------------------------------- idx


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
@pytest.mark.parametrize("zipped", [False, True])
def test_idx_files_load(tmp_path: Path, name: str, zipped: bool) -> None:
    path = write_mnist(tmp_path / "data" / name, zipped)
    pool = load_dataset(name, home=tmp_path).pool
    assert pool.x.shape == (20, 28, 28, 1)
    assert pool.x.flags.writeable
    np.testing.assert_array_equal(pool.x[..., 0], noise(20, 28, 28))
    assert pool.labels.tolist() == list(range(10)) * 2
    assert len(pool.classes) == 10
    assert load_dataset(f"{name}:{path}", size=32).pool.x.shape == (20, 32, 32, 1)
    report = verify(name, home=tmp_path)
    assert not report.ok  # these are not the published images
    assert "expected" in report.sentence
    assert report.digest != report.expected
    assert len(report.files) == 4


@pytest.mark.parametrize("zipped", [False, True])
def test_damaged_idx_files_are_refused(tmp_path: Path, zipped: bool) -> None:
    path = write_mnist(tmp_path / "mnist", zipped)
    for file in sorted(path.iterdir()):
        dimensions = 3 if "images" in file.name else 1
        refuses_cuts(file, lambda file=file, dimensions=dimensions: read_idx(file, dimensions))
    refuses_other_things(sorted(path.glob("train-i*"))[0], lambda: load_dataset(f"mnist:{path}"))


def test_wrong_idx_files_are_refused(tmp_path: Path) -> None:
    path = write_mnist(tmp_path / "mnist")
    images, labels = path / "train-images-idx3-ubyte", path / "train-labels-idx1-ubyte"
    good = labels.read_bytes()
    for content, word in (
        (idx_bytes(np.zeros(19, np.uint8)), "20 rows"),
        (idx_bytes(np.full(20, 10, np.uint8)), "10"),
        (good + b"\0", "more"),
        (images.read_bytes(), "magic"),
        (struct.pack(">2I", 0x801, 0xFFFFFFFF), "claims"),
        (idx_bytes(np.zeros(0, np.uint8)), "20 rows"),
    ):
        labels.write_bytes(content)
        fails(lambda: load_dataset(f"mnist:{path}"), labels, word)
    labels.write_bytes(good)
    images.write_bytes(idx_bytes(noise(20, 32, 32)))
    fails(lambda: load_dataset(f"mnist:{path}"), images, "28x28")


def test_one_flipped_byte_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_mnist(tmp_path / "data" / "mnist")
    source = DATASETS["mnist"]
    monkeypatch.setitem(fedthe.data.DATASETS, "mnist", replace(source, digest=content_digest(source, path)))
    assert verify("mnist", tmp_path).ok
    for file in path.iterdir():
        whole = file.read_bytes()
        for position in (0, 3, 5, 8, len(whole) - 1):
            flipped = bytearray(whole)
            flipped[position] ^= 1
            file.write_bytes(flipped)
            assert not verify("mnist", tmp_path).ok
        file.write_bytes(whole)
    assert verify("mnist", tmp_path).ok


# ---------------------------------------------------------------- pickles


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("below", ["", "cifar-10-batches-py"])
def test_cifar_pickles_of_every_protocol_load(tmp_path: Path, protocol: int, below: str) -> None:
    write_cifar(tmp_path / "data/cifar10" / below, protocol)
    pool = load_dataset("cifar10", home=tmp_path).pool
    expected = np.concatenate([noise(10, 3072, seed=seed) for seed in range(5)])
    np.testing.assert_array_equal(pool.x, expected.reshape(50, 3, 32, 32).transpose(0, 2, 3, 1))
    assert pool.labels.tolist() == [(seed + row) % 10 for seed in range(5) for row in range(10)]
    assert pool.classes == tuple(CIFAR)
    assert pool.x.flags.c_contiguous
    assert load_dataset("cifar10", home=tmp_path, size=16).pool.x.shape == (50, 16, 16, 3)


def test_python_2_pickles_load_as_the_new_ones(tmp_path: Path) -> None:
    new = load_dataset(f"cifar10:{write_cifar(tmp_path / 'new')}")
    old = load_dataset(f"cifar10:{write_cifar(tmp_path / 'old', old=True)}")
    assert old.pool.digest == new.pool.digest
    file = tmp_path / "columns"
    file.write_bytes(python2_batch(noise(4, 3072), [1, 2, 3, 4], by_columns=True))
    np.testing.assert_array_equal(read_batch(file, 0, 9)[0], noise(4, 3072))


@pytest.mark.parametrize("old", [False, True])
def test_damaged_cifar_files_are_refused(tmp_path: Path, old: bool) -> None:
    path = write_cifar(tmp_path / "cifar10", old=old, rows=2)
    batch, meta = path / "data_batch_3", path / "batches.meta"
    refuses_cuts(batch, lambda: read_batch(batch, 0, 9), count=150)
    refuses_cuts(meta, lambda: load_pickle(meta))
    refuses_other_things(batch, lambda: load_dataset(f"cifar10:{path}"))
    refuses_other_things(meta, lambda: load_dataset(f"cifar10:{path}"))


@pytest.mark.parametrize("seed", range(4))
def test_altered_pickles_never_raise_anything_else(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    whole = pickle.dumps({"data": noise(1, 3072), "labels": [1]}, protocol=(2, 3, 4, 5)[seed])
    head = len(whole) - 3200 if seed != 1 else 300
    file = tmp_path / "batch"
    for _ in range(300):
        altered = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            altered[draw.choice((draw.randrange(max(head, 200)), draw.randrange(len(whole))))] = draw.randrange(256)
        file.write_bytes(altered)
        loads_or_refuses(lambda: read_batch(file, 0, 9), file)


class Call:
    """Pickles as a call of `function`, which a trusting reader would make."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_hostile_pickles_run_nothing(tmp_path: Path, protocol: int) -> None:
    marker, file = tmp_path / "marker", tmp_path / "data_batch_1"
    evil = Call(os.system, f"touch {marker}")
    write = Call(eval, f"open({str(marker)!r}, 'w')")
    objects = np.empty((1, 3072), dtype=object)
    objects[0, 0] = evil
    for value, name in (
        (evil, "system"),
        (write, "eval"),
        ({b"data": evil, b"labels": [1]}, "system"),
        ({b"data": noise(1, 3072), b"labels": [write]}, "eval"),
        ({write: 1}, "eval"),
        ({b"data": objects, b"labels": [1]}, "system"),
        (Call(Path, "x"), "Path"),
        (Call(getattr, "x", "y"), "getattr"),
    ):
        file.write_bytes(pickle.dumps(value, protocol=protocol))
        fails(lambda: read_batch(file, 0, 9), file, name)
        assert not marker.exists()


def test_pickles_of_odd_content_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "data_batch_1"
    rows, labels = noise(2, 3072), [1, 2]
    for value in (
        [1],
        {1: rows},
        {"data": rows},
        {"data": rows.astype(object), "labels": labels},
        {"data": rows.astype(np.float32), "labels": labels},
        {"data": rows[0], "labels": labels},
        {"data": rows[:, :100], "labels": labels},
        {"data": [rows], "labels": labels},
        {"data": np.zeros(2, dtype=[("a", "u1")]), "labels": labels},
        {"data": rows, "labels": [1]},
        {"data": rows, "labels": [1, 10]},
        {"data": rows, "labels": [1, -1]},
        {"data": rows, "labels": [1, 1 << 80]},
        {"data": rows, "labels": [1.0, 2.0]},
        {"data": rows, "labels": [1, True]},
        {"data": rows, "labels": "12"},
        {"data": rows, "labels": np.array([1.0, 2.0])},
        {"data": rows[:0], "labels": []},
    ):
        file.write_bytes(pickle.dumps(value, protocol=4))
        fails(lambda: read_batch(file, 0, 9), file)
    deep = b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."
    file.write_bytes(deep)
    fails(lambda: read_batch(file, 0, 9), file)
    file.write_bytes(pickle.dumps({"data": rows, "labels": np.array(labels, np.uint8)}, protocol=5))
    assert read_batch(file, 0, 9)[1].tolist() == labels


def test_pickles_cannot_claim_memory(tmp_path: Path) -> None:
    """Each of these makes a plain Unpickler, or NumPy, reserve gigabytes."""
    file = tmp_path / "data_batch_1"
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
    for content in (
        b"\x80\x02Nr\xff\xff\xff\xff.",  # the memo's last place
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.",  # a terabyte of bytes
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x.",  # of bytearray
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N.",  # of frame
        b"\x80\x02}U\x04data" + empty + b"J\xff\xff\xff\x7f\x85U\x01b\x87Rs.",  # an array by its shape alone
        b"\x80\x02}U\x04data" + empty + b"K\x00\x85U\x01b\x87R(K\x01J\xff\xff\xff\x7f\x85" + dtype + b"\x89U\x00tbs.",
        b"\x80\x02c_codecs\nencode\nJ\xff\xff\xff\x7fX\x06\x00\x00\x00latin1\x86R.",
    ):
        file.write_bytes(content)
        fails(lambda: load_pickle(file), file)


def test_a_pickle_cannot_change_the_reader(tmp_path: Path) -> None:
    """BUILD on a global sets its attributes, where the global is a function or has no __setstate__."""
    file = tmp_path / "batch"
    for name in (b"numpy\nndarray", b"numpy\ndtype", b"numpy.core.multiarray\n_reconstruct", b"_codecs\nencode"):
        file.write_bytes(b"\x80\x02c" + name + b"\nN}U\x05arrayK\x01s\x86b.")
        fails(lambda: load_pickle(file), file)
    file.write_bytes(pickle.dumps({"data": noise(1, 3072), "labels": [3]}, protocol=2))
    np.testing.assert_array_equal(read_batch(file, 0, 9)[0], noise(1, 3072))


def test_foreign_class_names_are_refused(tmp_path: Path) -> None:
    path = write_cifar(tmp_path / "cifar10")
    (path / "batches.meta").write_bytes(pickle.dumps({"label_names": ["a"] * 10}))
    fails(lambda: load_dataset(f"cifar10:{path}"), path / "batches.meta")


# ---------------------------------------------------------------- CIFAR-10.1


def test_cifar_101_is_taken_when_it_is_there(tmp_path: Path) -> None:
    path = write_cifar(tmp_path / "data/cifar10/cifar-10-batches-py").parent
    assert dict(load_dataset("cifar10", home=tmp_path).natural) == {}
    fails(lambda: load_dataset("cifar10", natural="cifar10.1-v6", home=tmp_path), "fedthe data fetch cifar10.1-v6")
    fails(lambda: load_dataset("cifar10", natural="cifar10.1", home=tmp_path), "did you mean cifar10.1-v")
    write_cifar_101(path, "v4", 11)
    write_cifar_101(path / "cifar10.1-v6", "v6", 12)

    def loaded(natural: str | None) -> dict[str, tuple[str, int]]:
        shifts = load_dataset("cifar10", home=tmp_path, natural=natural).natural
        return {test: (pool.name, len(pool)) for test, pool in shifts.items()}

    assert loaded(None) == {"natural": ("cifar10.1-v6", 12)}  # two versions of one test; v6 is the default
    assert loaded("cifar10.1-v4") == {"natural": ("cifar10.1-v4", 11)}
    assert dict(load_dataset("cifar10", natural="none", home=tmp_path).natural) == {}
    small = load_dataset("cifar10", home=tmp_path, size=8)
    assert small.natural["natural"].x.shape == (12, 8, 8, 3)


def test_damaged_cifar_101_is_refused(tmp_path: Path) -> None:
    path = write_cifar(tmp_path / "cifar10", rows=1)
    write_cifar_101(path, "v6", 2)
    data, labels = path / "cifar10.1_v6_data.npy", path / "cifar10.1_v6_labels.npy"

    def load() -> Dataset:
        return load_dataset(f"cifar10:{path}")

    refuses_cuts(data, load)
    refuses_cuts(labels, load)
    refuses_other_things(labels, load)
    whole = data.read_bytes()
    for array in (noise(2, 3, 32, 32), noise(2, 32, 32, 3).astype(float), np.zeros((2, 32, 32, 3), dtype=object)):
        np.save(data, array, allow_pickle=True)
        fails(load, data)
    data.write_bytes(whole + b"x")
    fails(load, data)
    data.write_bytes(whole)
    np.save(labels, np.array([1, 10]))
    fails(load, labels)


# ---------------------------------------------------------------- ImageNet-32


def test_imagenet32_keeps_the_86_classes(tmp_path: Path) -> None:
    path = tmp_path / "data/imagenet32"
    kept = write_imagenet32(path)
    dataset = load_dataset("imagenet32", home=tmp_path)
    assert dataset.pool.x.shape == (86, 32, 32, 3)
    assert dataset.pool.labels.tolist() == list(range(86))
    assert dataset.pool.classes == tuple(f"name_{wnid}" for wnid in kept)
    expected = noise(1, 3072, seed=1)[0].reshape(3, 32, 32).transpose(1, 2, 0)
    np.testing.assert_array_equal(dataset.pool.x[0], expected)
    assert dict(dataset.natural) == {}
    report = verify("imagenet32", home=tmp_path)
    assert report.ok
    assert len(report.files) == 12


def test_imagenet32_shifts_are_read_from_their_folders(tmp_path: Path) -> None:
    path = tmp_path / "data/imagenet32"
    kept = write_imagenet32(path)
    for number, wnid in enumerate([*kept, "n99999999"]):
        write_picture(path / "imagenet-a" / wnid / "a.jpg", (number, 0, 0))
        write_picture(path / "imagenet-r" / wnid / "r.png", (0, number, 0))
    (path / "imagenet-r" / "README.txt").write_text("hello")
    for position in range(1000):
        if position in SHARED:
            write_picture(path / "imagenetv2-matched-frequency-format-val" / str(position) / "v.png", (0, 0, 9))
    natural = load_dataset("imagenet32", home=tmp_path).natural
    assert list(natural) == [
        "imagenet_a",
        "imagenet_r",
        "imagenet_v2",
    ]  # three tests, under the ids of the paper's table
    assert natural["imagenet_r"].x[:, 0, 0, 1].tolist() == list(range(86))
    assert natural["imagenet_v2"].labels.tolist() == list(range(86))
    only = load_dataset("imagenet32", home=tmp_path, natural="imagenet-r", size=16).natural
    assert only["natural"].x.shape == (86, 16, 16, 3)
    (path / "imagenet-a" / kept[5] / "a.jpg").write_bytes(b"no")
    fails(lambda: load_dataset("imagenet32", home=tmp_path), path / "imagenet-a" / kept[5] / "a.jpg")
    (path / "imagenet-a" / kept[5] / "a.jpg").unlink()
    (path / "imagenet-a" / kept[5]).rmdir()
    fails(lambda: load_dataset("imagenet32", home=tmp_path), kept[5], "fedthe data fetch imagenet-a")


def test_imagenet32_wants_all_its_files(tmp_path: Path) -> None:
    path = tmp_path / "imagenet32"
    write_imagenet32(path)
    batch = path / "train_data_batch_7"
    refuses_cuts(batch, lambda: load_dataset(f"imagenet32:{path}"), count=5)
    refuses_other_things(batch, lambda: load_dataset(f"imagenet32:{path}"))
    names = path / "map_clsloc.txt"
    whole = names.read_text()
    for content in ("", whole[:-30], whole + "n1 1001 x\n", whole.replace(" 7 ", " 8 "), "\0" * 100, "a b c\n" * 1000):
        names.write_text(content)
        fails(lambda: read_map(names), names)
    names.write_bytes(b"\xff\xfe\x00")
    fails(lambda: read_map(names), names)
    names.unlink()
    fails(lambda: load_dataset(f"imagenet32:{path}"), names, "PatrykChrabaszcz/Imagenet32_Scripts")
    names.write_text(whole)
    (path / "val_data").write_bytes((path / "train_data_batch_1").read_bytes())
    report = verify(f"imagenet32:{path}")
    assert not report.ok
    assert "50 images" in report.sentence


# ---------------------------------------------------------------- Tiny-ImageNet


@pytest.mark.parametrize("target", ["tiny", "tiny.zip", "data/tiny_imagenet", "data/tiny_imagenet/tiny-200.zip"])
@pytest.mark.parametrize("top", ["", "tiny-imagenet-200/"])
def test_tiny_imagenet_loads_from_folders_and_zips(tmp_path: Path, target: str, top: str) -> None:
    path = write_tiny(tmp_path / target, tiny_files(), top)
    by_name = target.startswith("data")
    pool = load_dataset("tiny_imagenet" if by_name else f"tiny_imagenet:{path}", home=tmp_path).pool
    assert pool.x.shape == (6, 32, 32, 3)
    assert pool.labels.tolist() == [0, 0, 1, 1, 1, 0]  # train by class in the order of wnids.txt, then val
    assert pool.classes == ("goldfish", "crane")
    assert pool.x[:, 5, 5].tolist()[:4] == [[0, 0, 0]] * 2 + [[255, 255, 255]] * 2
    assert pool.x[5, 5, 5].tolist() == [90, 90, 90]
    assert load_dataset(f"tiny_imagenet:{path}", size=64).pool.x.shape == (6, 64, 64, 3)
    assert verify(f"tiny_imagenet:{path}").ok


def test_incomplete_tiny_imagenet_is_refused(tmp_path: Path) -> None:
    files = tiny_files()
    for name, content in (
        ("wnids.txt", None),
        ("words.txt", None),
        ("val/val_annotations.txt", None),
        ("val/images/val_1.JPEG", None),
        ("val/images/val_1.JPEG", b"not an image"),
        ("wnids.txt", b""),
        ("wnids.txt", b"n01\nn01\n"),
        ("wnids.txt", b"n01\nn09\n"),
        ("wnids.txt", b"\xff\xfe"),
        ("train/n01/images/n01_1.JPEG", files["train/n01/images/n01_1.JPEG"][:300]),
    ):
        damaged = {key: value for key, value in {**files, name: content}.items() if value is not None}
        for target in ("folder", "some.zip"):
            path = write_tiny(tmp_path / str(len(list(tmp_path.iterdir()))) / target, damaged)
            fails(lambda path=path: load_dataset(f"tiny_imagenet:{path}"), path)


def test_damaged_zips_are_refused(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.zip", tiny_files())
    refuses_cuts(path, lambda: load_dataset(f"tiny_imagenet:{path}"))
    refuses_other_things(path, lambda: load_dataset(f"tiny_imagenet:{path}"))
    whole, draw = path.read_bytes(), random.Random(1)
    for _ in range(150):
        altered = bytearray(whole)
        altered[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(altered)
        loads_or_refuses(lambda: load_dataset(f"tiny_imagenet:{path}"), path)


def test_zip_bombs_are_refused(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.zip", {**tiny_files(), "words.txt": bytes(1 << 27)})
    fails(lambda: load_dataset(f"tiny_imagenet:{path}"), path, "words.txt")


@pytest.mark.skipif(not SAMPLE.exists(), reason="the sample of Tiny-ImageNet is not beside this checkout")
def test_the_sample_of_tiny_imagenet_loads() -> None:
    pool = load_dataset(f"tiny_imagenet:{SAMPLE}").pool
    assert pool.x.shape == (6000, 32, 32, 3)
    assert np.bincount(pool.labels).tolist() == [300] * 20
    assert len(set(pool.classes)) == 20


# ---------------------------------------------------------------- folders of images


def read(file: Path, shape: tuple[int, ...] = (8, 8, 3)) -> np.ndarray:
    return read_image(str(file), file.read_bytes, shape)


def test_folders_become_classes(tmp_path: Path) -> None:
    for name, colour in (("dog", (9, 0, 0)), ("cat", (0, 9, 0)), ("a fox", (0, 0, 9))):
        for number in range(2):
            write_picture(tmp_path / name / f"{number}.png", colour)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "dog" / ".DS_Store").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("x")
    fails(lambda: load_dataset(f"folder:{tmp_path}"), tmp_path / "a fox" / "0.png", "square=crop", "square=pad")
    pool = load_dataset(f"folder:{tmp_path}", square="crop").pool
    assert pool.classes == ("a fox", "cat", "dog")
    assert pool.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert pool.x.shape == (6, 32, 32, 3)
    assert pool.x[:, 0, 0].tolist() == [[0, 0, 9]] * 2 + [[0, 9, 0]] * 2 + [[9, 0, 0]] * 2
    assert len(verify(f"folder:{tmp_path}").files) == 6
    (tmp_path / "dog" / "more").mkdir()
    fails(lambda: load_dataset(f"folder:{tmp_path}"), tmp_path / "dog" / "more", "by_client")
    (tmp_path / "dog" / "more").rmdir()
    (tmp_path / "eel").mkdir()
    fails(lambda: load_dataset(f"folder:{tmp_path}"), tmp_path / "eel")


def test_folders_without_classes_are_refused(tmp_path: Path) -> None:
    fails(lambda: load_dataset(f"folder:{tmp_path}"), tmp_path)
    write_picture(tmp_path / "a.png", (1, 2, 3))
    fails(lambda: load_dataset(f"folder:{tmp_path}"), tmp_path)
    fails(lambda: load_dataset(f"folder:{tmp_path / 'a.png'}"), tmp_path / "a.png")


def test_odd_images_are_understood(tmp_path: Path) -> None:
    file = tmp_path / "x.png"
    Image.new("RGBA", (5, 9), (10, 20, 30, 0)).save(file)
    assert read(file)[4, 4].tolist() == [255, 255, 255]  # transparent is white
    Image.new("LA", (5, 9), (10, 255)).save(file)
    assert read(file)[4, 4].tolist() == [10, 10, 10]
    palette = Image.new("P", (9, 5), 1)
    palette.putpalette([0, 0, 0, 200, 100, 50])
    palette.save(file)
    assert read(file)[4, 4].tolist() == [200, 100, 50]
    palette.save(file, transparency=1)
    assert read(file)[4, 4].tolist() == [255, 255, 255]
    Image.fromarray(np.full((6, 6), 32896, np.uint16)).save(file)
    assert read(file)[4, 4].tolist() == [128, 128, 128]
    assert read(file, (8, 8, 1))[4, 4].tolist() == [128]
    Image.new("1", (6, 6), 1).save(file)
    assert read(file)[4, 4].tolist() == [255, 255, 255]
    file = tmp_path / "x.jpg"
    Image.new("CMYK", (6, 6), (255, 0, 0, 0)).save(file)
    cyan = read(file)[4, 4].astype(int)
    assert cyan[0] < 40
    assert cyan[2] > 200
    file = tmp_path / "x.tiff"
    Image.new("F", (6, 6), 0.5).save(file)
    fails(lambda: read(file), file, "floating")
    file = tmp_path / "x.gif"
    Image.new("L", (6, 6), 7).save(file, save_all=True, append_images=[Image.new("L", (6, 6), 99)])
    assert read(file)[4, 4].tolist() == [7, 7, 7]  # the first frame


def test_pictures_are_turned_upright_and_cropped_in_the_middle(tmp_path: Path) -> None:
    wide = np.zeros((20, 60, 3), np.uint8)
    wide[:, 20:30] = (255, 0, 0)
    wide[:, 30:40] = (0, 255, 0)
    file = tmp_path / "x.png"
    Image.fromarray(wide).save(file)
    image = read(file, (20, 20, 3))
    assert image[3, :10].tolist() == [[255, 0, 0]] * 10
    assert image[3, 10:].tolist() == [[0, 255, 0]] * 10
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise to stand upright
    Image.fromarray(wide).save(file, exif=exif)
    image = read(file, (20, 20, 3))
    assert image[:10, 3].tolist() == [[255, 0, 0]] * 10
    assert image[10:, 3].tolist() == [[0, 255, 0]] * 10
    squeezed = read_image("x", file.read_bytes, (20, 20, 3), "stretch")
    assert squeezed[1, 3].tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", ["png", "jpg", "gif", "bmp", "tiff", "webp", "ppm"])
def test_damaged_images_are_refused(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "cat" / f"x.{kind}"
    file.parent.mkdir()
    Image.fromarray(noise(30, 30, 3)).save(file)
    whole = file.read_bytes()
    for part in cuts(whole)[:-3]:  # a decoder may do without the last bytes
        file.write_bytes(part)
        fails(lambda: load_dataset(f"folder:{tmp_path}"), file)
    draw = random.Random(2)
    for _ in range(60):
        altered = bytearray(whole)
        altered[draw.randrange(min(len(whole), 400))] = draw.randrange(256)
        file.write_bytes(altered)
        loads_or_refuses(lambda: load_dataset(f"folder:{tmp_path}"), file)


@pytest.mark.parametrize("limit", [100, 60])
def test_pixel_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Above Pillow's limit it warns, above twice that it raises; both are refused."""
    file = tmp_path / "cat" / "x.png"
    write_picture(file, (1, 2, 3), (11, 11))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    fails(lambda: load_dataset(f"folder:{tmp_path}"), file, "too many pixels")


def test_arrays_are_fitted() -> None:
    images = noise(3, 32, 32, 3)
    assert fit_images(images, (32, 32, 3)) is images
    assert fit_images(images, (16, 20, 1)).shape == (3, 16, 20, 1)
    grey = np.full((2, 8, 8, 1), 77, np.uint8)
    assert (fit_images(grey, (32, 32, 3)) == 77).all()


# ---------------------------------------------------------------- npz, and shifts of one's own


def test_npz_files_load(tmp_path: Path) -> None:
    file = tmp_path / "mine.npz"
    np.savez(file, images=noise(4, 10, 12, 3), labels=np.array([0, 2, 1, 2], np.uint8))
    pool = load_dataset(f"npz:{file}").pool
    assert (pool.name, pool.classes, pool.x.shape) == ("mine", ("0", "1", "2"), (4, 10, 12, 3))
    fails(lambda: load_dataset(f"npz:{file}", size=16), file, "10 x 12", "square=pad")
    assert load_dataset(f"npz:{file}", size=16, square="crop").pool.x.shape == (4, 16, 16, 3)
    assert load_dataset(f"npz:{file}", square="crop").pool.x.shape == (4, 10, 10, 3)
    padded = load_dataset(f"npz:{file}", square="pad").pool.x
    assert (padded[:, 1:11] == pool.x).all()
    assert padded.shape == (4, 12, 12, 3)
    assert not padded[:, [0, 11]].any()
    np.savez_compressed(file, images=noise(4, 10, 12), labels=[0, 1, 1, 0], classes=["cat", "dog", "eel"])
    pool = load_dataset(f"npz:{file}").pool
    assert (pool.classes, pool.x.shape) == (("cat", "dog", "eel"), (4, 10, 12, 1))
    assert verify(f"npz:{file}").ok


def test_wrong_npz_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.npz"
    good = {"images": noise(4, 10, 12, 3), "labels": np.array([0, 1, 1, 0])}
    for change in (
        {"images": noise(4, 10, 12, 4)},
        {"images": noise(4, 10)},
        {"images": noise(0, 10, 12, 3), "labels": np.array([], int)},
        {"images": good["images"].astype(float)},
        {"labels": np.array([0, 1, 1])},
        {"labels": np.array([0, 1, 1, -1])},
        {"labels": np.array([0, 1, 1, 1 << 40])},
        {"labels": np.array([0.0, 1, 1, 1])},
        {"classes": np.array(["a"])},
        {"classes": np.array(["a", "a"])},
        {"classes": np.array([1, 2])},
        {"classes": np.array("ab")},
        {"images": np.array([[None]], dtype=object)},
    ):
        np.savez(file, **{**good, **change}, allow_pickle=True)  # type: ignore[arg-type]
        fails(lambda: load_dataset(f"npz:{file}"), file)
    np.savez(file, pictures=good["images"], labels=good["labels"])
    fails(lambda: load_dataset(f"npz:{file}"), file, "pictures", "images")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damaged_npz_files_are_refused(tmp_path: Path, save: Callable[..., None]) -> None:
    file = tmp_path / "mine.npz"
    save(file, images=noise(2, 8, 8), labels=[0, 1], classes=["a", "b"])
    refuses_cuts(file, lambda: load_dataset(f"npz:{file}"))
    refuses_other_things(file, lambda: load_dataset(f"npz:{file}"))
    whole, draw = file.read_bytes(), random.Random(3)
    for _ in range(300):
        altered = bytearray(whole)
        altered[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        file.write_bytes(altered)
        loads_or_refuses(lambda: load_dataset(f"npz:{file}"), file)


def test_an_npz_file_can_be_a_shift(tmp_path: Path) -> None:
    spec, file = f"cifar10:{write_cifar(tmp_path / 'cifar10')}", tmp_path / "photos.npz"
    np.savez(file, images=noise(3, 64, 64, 3), labels=np.array([9, 3, 3], np.uint8))
    natural = load_dataset(spec, natural=f"npz:{file}").natural
    assert natural["natural"].name == "photos"
    assert natural["natural"].x.shape == (3, 32, 32, 3)
    assert natural["natural"].labels.tolist() == [9, 3, 3]
    assert natural["natural"].classes == tuple(CIFAR)
    np.savez(file, images=noise(3, 32, 32), labels=[0, 1, 0], classes=["truck", "bird"])
    assert load_dataset(spec, natural=f"npz:{file}").natural["natural"].labels.tolist() == [9, 2, 9]
    np.savez(file, images=noise(3, 32, 32), labels=[0, 1, 0], classes=["truck", "birds"])
    fails(lambda: load_dataset(spec, natural=f"npz:{file}"), file, "'birds'", "did you mean bird?")
    np.savez(file, images=noise(3, 32, 32), labels=[0, 1, 10])
    fails(lambda: load_dataset(spec, natural=f"npz:{file}"), file, "0 to 9")
    fails(lambda: load_dataset(spec, natural=f"npz:{tmp_path / 'no.npz'}"), tmp_path / "no.npz")


def test_a_folder_can_be_a_shift(tmp_path: Path) -> None:
    spec, path = f"mnist:{write_mnist(tmp_path / 'mnist')}", tmp_path / "street"
    write_picture(path / "7" / "a.png", (50, 50, 50))
    write_picture(path / "3" / "b.png", (60, 60, 60))
    fails(lambda: load_dataset(spec, natural=f"folder:{path}"), "square=crop")
    fails(lambda: load_dataset(spec, square="crop"), "mnist")
    shutil.rmtree(path)
    write_picture(path / "7" / "a.png", (50, 50, 50), (10, 10))
    write_picture(path / "3" / "b.png", (60, 60, 60), (10, 10))
    shift = load_dataset(spec, natural=f"folder:{path}").natural["natural"]
    assert shift.x.shape == (2, 28, 28, 1)
    assert shift.labels.tolist() == [3, 7]
    assert shift.x[:, 0, 0, 0].tolist() == [60, 50]
    write_picture(path / "seven" / "a.png", (50, 50, 50))
    fails(lambda: load_dataset(spec, natural=f"folder:{path}"), path, "'seven'")
    fails(lambda: load_dataset(spec, natural=f"folder:{tmp_path / 'no'}"), tmp_path / "no")


@pytest.mark.skipif(not SHIFT_SAMPLE.exists(), reason="the sample shift is not beside this checkout")
def test_the_sample_shift_loads(tmp_path: Path) -> None:
    spec = f"cifar10:{write_cifar(tmp_path / 'cifar10')}"
    (shift,) = load_dataset(spec, natural=f"npz:{SHIFT_SAMPLE}").natural.values()
    assert np.bincount(shift.labels, minlength=10).tolist() == [0, 300, 300, 300, 0, 300, 300, 0, 300, 300]


# ---------------------------------------------------------------- the real thing


@pytest.mark.data
def test_the_real_cifar10_is_the_published_one(cifar10_home: Path) -> None:
    pool = load_dataset("cifar10", home=cifar10_home, natural="none").pool
    assert pool.x.shape == (50_000, 32, 32, 3)
    assert np.bincount(pool.labels).tolist() == [5000] * 10
    means = pool.x.mean(axis=(0, 1, 2), dtype=np.float64) / 255
    np.testing.assert_allclose(means, [0.49139968, 0.48215841, 0.44653091], atol=1e-8)
    report = verify("cifar10", home=cifar10_home)
    assert report.ok
    assert report.digest == report.expected == DATASETS["cifar10"].digest
