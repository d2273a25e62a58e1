"""Small files in the real formats of datasets, made up by the tests."""

from __future__ import annotations

import gzip
import io
import pickle
import random
import struct
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

from fedthe.data.imagenet32 import SHARED

CIFAR = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()


def write_mnist(path: Path, zipped: bool = False, rows: int = 20) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for part, n in (("train", rows), ("t10k", rows // 2)):
        for kind, array in (
            ("images-idx3", noise(n, 28, 28)),
            ("labels-idx1", np.arange(n, dtype=np.uint8) % 10),
        ):
            content = idx_bytes(array)
            name = f"{part}-{kind}-ubyte" + (".gz" if zipped else "")
            (path / name).write_bytes(gzip.compress(content, mtime=0) if zipped else content)
    return path


def python2_batch(data: np.ndarray, labels: list[int], by_columns: bool = False) -> bytes:
    """A batch as Python 2 pickled the published ones: byte strings, and the NumPy names of 2009."""
    order = b"\x88" if by_columns else b"\x89"
    content = data.tobytes("F" if by_columns else "C")
    shape = b"".join(b"J" + struct.pack("<i", length) for length in data.shape)
    return (
        b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03U\x06labelsq\x04]q\x05("
        + b"".join(b"K" + bytes([label]) for label in labels)
        + b"eU\x04dataq\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\x09"
        + (b"(K\x01" + shape + b"\x86cnumpy\ndtype\nq\x0aU\x02u1K\x00K\x01\x87Rq\x0b")
        + (b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb" + order)
        + (b"T" + struct.pack("<i", len(content)) + content + b"tbU\tfilenamesq\x0c]q\x0d(")
        + b"".join(b"U\x05a.png" for _ in labels)
        + b"eu."
    )


def write_cifar(path: Path, protocol: int = 3, rows: int = 10, old: bool = False) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        data, labels = noise(rows, 3072, seed=seed), [(seed + row) % 10 for row in range(rows)]
        batch = {b"data": data, b"labels": labels, b"filenames": [b"x.png"] * rows}
        (path / name).write_bytes(python2_batch(data, labels) if old else pickle.dumps(batch, protocol=protocol))
    names = [name.encode() for name in CIFAR] if protocol < 5 else CIFAR
    (path / "batches.meta").write_bytes(pickle.dumps({"label_names": names, "num_vis": 3072}, protocol=protocol))
    return path


def write_cifar_101(folder: Path, version: str, rows: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / f"cifar10.1_{version}_data.npy", noise(rows, 32, 32, 3, seed=7))
    np.save(folder / f"cifar10.1_{version}_labels.npy", np.arange(rows, dtype=np.int32) % 10)


def write_imagenet32(path: Path) -> list[str]:
    """Ten tiny training batches, a validation batch, and a map whose order, like the real one's, is not sorted."""
    path.mkdir(parents=True)
    wnids = [f"n{number:08d}" for number in range(1000)]
    order = wnids.copy()
    random.Random(0).shuffle(order)
    (path / "map_clsloc.txt").write_text("".join(f"{wnid} {n} name_{wnid}\n" for n, wnid in enumerate(order, 1)))
    label_of = {wnid: n for n, wnid in enumerate(order, 1)}
    kept = [label_of[wnids[position]] for position in SHARED]
    for number in range(1, 11):
        labels = [*kept[(number - 1) * 9 : number * 9], *(label for label in range(1, 40) if label not in kept)]
        data = noise(len(labels), 3072, seed=number)
        batch = {"data": data, "labels": labels, "mean": np.zeros(3072)}
        (path / f"train_data_batch_{number}").write_bytes(pickle.dumps(batch, protocol=3))
    labels = [label for label in kept for _ in range(50)]
    (path / "val_data").write_bytes(pickle.dumps({"data": noise(len(labels), 3072), "labels": labels}, protocol=3))
    return [wnids[position] for position in SHARED]


def write_picture(file: Path, colour: tuple[int, int, int], size: tuple[int, int] = (40, 30)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(file)


def tiny_files() -> dict[str, bytes]:
    def jpeg(mode: str, colour: object) -> bytes:
        file = io.BytesIO()
        Image.new(mode, (64, 64), colour).save(file, "JPEG")  # type: ignore[arg-type]
        return file.getvalue()

    files = {
        "wnids.txt": b"n02\nn01\n",
        "words.txt": b"n01\tcrane, wading bird\nn02\tgoldfish, Carassius auratus\nn03\tcrane\n",
        "val/val_annotations.txt": b"val_0.JPEG\tn01\t0\t0\t9\t9\nval_1.JPEG\tn02\t0\t0\t9\t9\nval_2.JPEG\tn03\n",
        "val/images/val_0.JPEG": jpeg("RGB", (200, 0, 0)),
        "val/images/val_1.JPEG": jpeg("L", 90),
        "test/images/test_0.JPEG": b"never read",
    }
    for wnid, colour in (("n01", (255, 255, 255)), ("n02", (0, 0, 0))):
        for number in range(2):
            files[f"train/{wnid}/images/{wnid}_{number}.JPEG"] = jpeg("RGB", colour)
        files[f"train/{wnid}/{wnid}_boxes.txt"] = b"boxes"
    return files


def write_tiny(target: Path, files: dict[str, bytes], top: str = "") -> Path:
    if target.suffix != ".zip":
        for name, content in files.items():
            (target / top / name).parent.mkdir(parents=True, exist_ok=True)
            (target / top / name).write_bytes(content)
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(f"{top}{name}", content)
    return target
