"""A dict that np.save pickled into an npy file is read without running anything in it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from numpy.lib import format as npy

from fedthe.data.unpickle import load_pickle
from helpers import fails


def save(path: Path, value: object, protocol: int = 4) -> Path:
    """As np.save writes objects; older releases of NumPy used protocols 2 and 3."""
    array = np.empty((), dtype=object)
    array[()] = value
    with path.open("wb") as file:
        npy.write_array_header_1_0(file, npy.header_data_from_array_1_0(array))
        pickle.dump(array, file, protocol=protocol)
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_dict_comes_back_as_numpy_would_read_it(tmp_path: Path, protocol: int) -> None:
    parts = [np.arange(6.0).reshape(3, 2), np.ones((1, 2), np.float32)]
    file = save(tmp_path / "data.npy", {"X": parts, "y": np.array([3, 1]), "names": ["a", "b"]}, protocol)
    found, trusted = load_pickle(file), np.load(file, allow_pickle=True).item()
    for one, other in zip([*found["X"], found["y"]], [*trusted["X"], trusted["y"]], strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype
    assert found["names"] == ["a", "b"]


def test_np_save_writes_what_is_read(tmp_path: Path) -> None:
    np.save(tmp_path / "data.npy", {"y": np.arange(3)}, allow_pickle=True)
    np.testing.assert_array_equal(load_pickle(tmp_path / "data.npy")["y"], np.arange(3))


class Call:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("exit 1",)


@pytest.mark.parametrize(
    "value", [[1], {"X": [Call()]}, Call(), {"X": np.array([None])}, {"X": [np.array(["a"])]}, {1: np.arange(3)}]
)
def test_other_content_is_refused(tmp_path: Path, value: object) -> None:
    file = save(tmp_path / "data.npy", value)
    fails(lambda: load_pickle(file), file)


def test_other_npy_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "data.npy"
    np.save(file, np.arange(3))
    fails(lambda: load_pickle(file), file)
    np.save(file, np.array([{"X": 1}, {"X": 2}]), allow_pickle=True)
    fails(lambda: load_pickle(file), file)
    whole = save(file, {"X": [np.arange(9.0)]}).read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        fails(lambda: load_pickle(file), file)
