"""Files are whole or not there."""

import os
import subprocess
import sys

import numpy as np
import pytest

from fedthe import foreign, store
from fedthe.engine.loop import Loop
from fedthe.errors import InputError
from fedthe.records import describe_environment


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail():
        with store.whole_file(path) as part:
            part.write_text("half of the n")
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_left_is_swept(tmp_path):
    killed = "import os; from pathlib import Path; from fedthe import store\n"
    for kind, name in (("file", "a[1]"), ("folder", "b"), ("file", "other")):
        code = f"with store.whole_{kind}(Path({str(tmp_path / name)!r})): os._exit(9)"
        assert subprocess.run([sys.executable, "-c", killed + code], check=False).returncode == 9
    (tmp_path / "a[1]").write_text("whole")
    assert len(list(tmp_path.iterdir())) == 4
    for name in ("a[1]", "b", "none"):
        store.sweep(tmp_path, name)
    rest = sorted(each.name for each in tmp_path.iterdir())
    assert rest[1:] == ["a[1]"]
    assert rest[0].startswith(".other.")


def test_a_failed_folder_leaves_the_old_one(tmp_path):
    path = tmp_path / "folder"
    path.mkdir()
    (path / "old").touch()

    def fail():
        with store.whole_folder(path) as part:
            (part / "new").touch()
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError):
        fail()
    assert [p.name for p in path.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [path]
    with store.whole_folder(path) as part:
        (part / "new").touch()
    assert [p.name for p in path.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [path]


def test_cached_computes_once_and_again_when_the_file_is_damaged(home):
    made = []

    def make():
        made.append(1)
        return {"a": np.arange(1000)}

    assert (store.cached("kind", "key", make)["a"] == np.arange(1000)).all()
    assert (store.cached("kind", "key", make)["a"] == np.arange(1000)).all()
    assert len(made) == 1
    (path,) = (home / "cache").iterdir()
    whole = path.read_bytes()
    middle = len(whole) // 2
    for damaged in (b"", whole[:100], whole[:-30], whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]):
        path.write_bytes(damaged)
        made.clear()
        with pytest.warns(UserWarning, match="is damaged|was changed"):
            assert (store.cached("kind", "key", make)["a"] == np.arange(1000)).all()
        assert len(made) == 1
        assert path.read_bytes() == whole


def test_an_npz_with_a_pickle_inside_is_refused(tmp_path):
    path = tmp_path / "bad.npz"
    np.savez(path, a=np.array([{"an": "object"}], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match=r"bad\.npz"):
        foreign.read_npz(path)


def test_content_hash_sees_dtype_shape_and_order():
    a = np.arange(6)
    different = [a, a.astype(np.int32), a.reshape(2, 3), a[::-1], [0, 1, 2, 3, 4, 5]]
    assert len({store.content_hash(value) for value in different}) == len(different)
    assert store.content_hash(a) == store.content_hash(a.astype(">i8"))


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write in"), store.whole_file(tmp_path / "file" / "x"):
        pass


def test_a_folder_whose_replacement_fails_stays(tmp_path, monkeypatch):
    path = tmp_path / "folder"
    path.mkdir()
    (path / "old").touch()
    real = os.replace

    def fail_on_the_second(source, target):
        if str(source).endswith(".part"):
            raise OSError("disk full")
        real(source, target)

    monkeypatch.setattr(os, "replace", fail_on_the_second)
    with pytest.raises(OSError, match="disk full"), store.whole_folder(path) as part:
        (part / "new").touch()
    assert [p.name for p in path.iterdir()] == ["old"]


def test_a_cache_that_cannot_be_written_costs_a_warning_and_nothing_else(home):
    home.mkdir()
    (home / "cache").touch()
    with pytest.warns(UserWarning, match="nothing is cached|is damaged"):
        assert store.cached("kind", "key", lambda: {"a": np.arange(3)})["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        (["/venv/bin/fedthe", "run", "my file.toml"], "fedthe run 'my file.toml'"),
        (["/lib/site-packages/fedthe/__main__.py", "demo"], "fedthe demo"),
        (["study.py", "--fast"], "python study.py --fast"),
        (["/lib/site-packages/pytest/__main__.py", "-q"], ""),
        (["/lib/ipykernel_launcher.py", "-f", "kernel.json"], ""),
        (["-c"], ""),
        ([""], ""),
        ([], ""),
    ],
)
def test_a_command_is_named_as_it_was_typed(typed, named, monkeypatch):
    monkeypatch.setattr("sys.argv", typed)
    assert describe_environment(Loop())["command"] == named
