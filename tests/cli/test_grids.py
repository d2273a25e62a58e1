"""Tables of numbers in terminals of any width: nothing in them is cut."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from fedthe.cli.common import GAP, print_grid, split_columns

TESTS = ("original", "corrupted", "corr.\nooc", "ooc_correlated", "switch10", "open_set†", "open_set\nAUROC")
METHODS = ("fedavg", "fedthe(alpha=0.2,beta=0.3)", "mine.py:Mine(" + "deep=1," * 12 + "wide=2)")


@given(st.lists(st.integers(1, 40), min_size=1, max_size=10), st.integers(20, 120), st.data())
def test_columns_are_split_over_few_tables_that_fit_and_are_as_narrow_as_can_be(widths, room, data):
    names = data.draw(st.integers(1, min(3, len(widths))))
    tables = split_columns(widths, names, room)
    assert [i for table in tables for i in table[names:]] == [*range(names, len(widths))]
    assert all(table[:names] == [*range(names)] for table in tables)

    def measure(table):
        return sum(widths[i] + GAP for i in table) if len(table) > names + 1 else 0  # one column may be too wide

    others = [*range(names, len(widths))]
    ways = [
        [[*range(names), *others[low:high]] for low, high in pairwise((0, *cuts, len(others)))]
        for few in range(max(len(others), 1))
        for cuts in combinations(range(1, len(others)), few)
    ]
    fitting = [way for way in ways if max(map(measure, way)) <= room]
    assert len(tables) == min(map(len, fitting))
    assert max(map(measure, tables)) == min(max(map(measure, way)) for way in fitting if len(way) == len(tables))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_number_and_no_name_is_cut(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    head = ["method", *(f"{test}{i}" for i in range(2) for test in TESTS), "ms"]
    numbers = [[f"{10 * i + j}.{j % 10}" for j in range(1, len(head))] for i in range(3)]
    print_grid(head, [[name, *map(Text, row)] for name, row in zip(METHODS, numbers, strict=True)], "A title")
    said = capsys.readouterr().out
    assert "…" not in said
    assert max(map(len, said.splitlines())) <= width
    for name, row in zip(METHODS[:2], numbers, strict=False):
        found = [line.split() for line in said.splitlines() if line.strip().startswith(f"{name} ")]
        assert len(found) > 1
        assert [each for line in found for each in line[1:]] == row
    folded = "".join(line[1 : width // 2 + 1].strip() for line in said.split("fedthe(", 2)[1].splitlines()[1:])
    assert METHODS[2] in folded  # over several lines
    for test in TESTS:
        assert all(f"{part}{i}" in said for i in range(2) for part in test.split("\n")[-1:])


def test_a_table_that_fits_is_one_and_prose_wraps(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    print_grid(["method", "original", "ms"], [["fedavg", "55.0", "0.10"]])
    assert capsys.readouterr().out.count("fedavg") == 1
    print_grid(["table", "what it is", "rows"], [["main", "a few words " * 12, "14"]], names=2)
    said = capsys.readouterr().out
    assert (said.count("main"), said.count("words"), said.count("14")) == (1, 12, 1)
    print_grid(["figure", "what it shows"], [], names=2)
    assert "what it shows" in capsys.readouterr().out
