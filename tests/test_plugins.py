"""Entry points of other packages, and files of the user's own."""

import sys
from importlib.metadata import EntryPoint

import pytest

from fedthe import plugins
from helpers import fails


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


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_is_a_module_of_its_own_with_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "beside_mine.py", "NUMBER = 3")
    file = write(tmp_path / "random.py", "from beside_mine import NUMBER\nclass Mine:\n    n = NUMBER")
    before = list(sys.path)
    first = plugins.load_object("random.py:Mine")
    assert first.n == 3
    assert sys.path == before
    import random

    assert not hasattr(random, "Mine")
    write(tmp_path / "plain.py", "class Mine:\n    n: int = 3")
    assert plugins.load_object("plain.py:Mine").__annotations__ == {"n": int}  # not a string: the file asks for no such
    assert plugins.load_object(f"{file}:Mine") is first  # loaded once
    write(file, "class Mine:\n    n = 4")  # within the same second, and of another size or not
    assert plugins.load_object("random.py:Mine").n == 4
    other = tmp_path / "other"
    other.mkdir()
    write(other / "random.py", "class Mine:\n    n = 5")
    assert plugins.load_object("other/random.py:Mine").n == 5
    assert plugins.load_object("random.py:Mine").n == 4
    assert len({plugins.load_object(f"{each}:Mine").__module__ for each in ("random.py", "other/random.py")}) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\ny = (2\n", ("line 2", "never closed")),
        ("\n\nx = 1 / 0", ("line 3", "division by zero")),
        ("import no_such_thing_at_all", ("line 1", "no_such_thing_at_all")),
        ("raise SystemExit(3)", ("line 1", "SystemExit")),
        ("class Minee: pass", ("did you mean Minee",)),
        ("", ("it is empty",)),
        ("\0", ("mine.py",)),
    ],
)
def test_an_error_in_a_file_is_a_sentence_with_file_and_line(text, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mine.py", text)
    fails(lambda: plugins.load_object("mine.py:Mine"), "mine.py", *says)
    write(tmp_path / "mine.py", "Mine = 1")  # mended
    assert plugins.load_object("mine.py:Mine") == 1


def test_a_file_that_is_not_there_or_no_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fails(lambda: plugins.load_object("mine.py:Mine"), "mine.py does not exist", tmp_path)
    (tmp_path / "folder.py").mkdir()
    fails(lambda: plugins.load_object("folder.py:Mine"), "folder.py is a folder")


def test_files_of_one_name_beside_two_files_are_two(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, number in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "beside.py").write_text(f"NUMBER = {number}\n")
        (tmp_path / folder / "mine.py").write_text("from beside import NUMBER\n")
    assert (plugins.load_object("a/mine.py:NUMBER"), plugins.load_object("b/mine.py:NUMBER")) == (1, 2)
    (tmp_path / "b" / "beside.py").write_text("NUMBER = 3\n")
    assert (plugins.load_object("a/mine.py:NUMBER"), plugins.load_object("b/mine.py:NUMBER")) == (1, 3)
