"""A report as Markdown, LaTeX and CSV: the numbers, the best of them, and texts of users that stay texts."""

import csv
import io
import re
from dataclasses import replace

import pytest

from fedthe.report import cells
from fedthe.report.data import Cost, Page, Paper, Score
from fedthe.report.formats import FORMATS, write_csv, write_latex, write_markdown
from report_pages import make_page, make_shown, spread_clients

NASTY = "a_b & 50% $x$ #1 {c} ~d ^e \\f <img src=x onerror=alert(1)> |g `h` *i* [j]\nnew\x1b[2J"


def make_small(**changes):
    """Two methods, two tests, numbers of which everything follows by hand."""
    scores = {
        "fedavg": {"original": Score(71.26, 0.44, 40.0), "ooc": Score(50.0, 1.0, 30.0, 31.0, 51.0, 1.234, 12.0)},
        "fedthe": {"original": Score(71.34, 0.36, 45.0), "ooc": Score(60.0, 2.0, 20.0, 21.0, 61.0, 0.5, 9.99)},
    }
    shown = replace(
        make_shown(methods=("fedavg", "fedthe"), clients=2, seeds=(0, 1), paper=False),
        tests={"original": "original", "ooc": "out-of-client"},
        scores=scores,
        clients=spread_clients(scores, apart=["original"]),
        short={},
        costs={"fedavg": Cost(0.01234, 1.0, 0.0), "fedthe": Cost(1234.5, 33.0, 1.0)},
        paper=Paper("main", "a title", {"fedthe": {"ooc": (62.5, 0.5)}}, ["mind the gap."]),
    )
    return Page("A page", [replace(shown, **changes)])


def read_markdown(text):
    """Every table as rows of cells, split at the bars that are not escaped."""
    tables = [part for part in text.split("\n\n") if part.startswith("|")]
    return [[re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines()] for table in tables]


def find_row(table, name):
    return next([cell.strip() for cell in row[1:]] for row in table if row[0].strip() == name)


def read_latex_rows(text):
    """The cells of every row of every tabular, after a check that all of them have as many."""
    tables = []
    for columns, body in re.findall(r"\\begin\{tabular\}\{(l r*|lr*)\}(.*?)\\end\{tabular\}", text, re.S):
        rows = [line.removesuffix(r" \\") for line in body.splitlines() if line.endswith(r" \\")]
        split = [re.split(r"(?<!\\)&", row) for row in rows if not row.startswith(r"\multicolumn")]
        assert {len(row) for row in split} == {len(columns)}
        tables.append([[cell.strip() for cell in row] for row in split])
    return tables


def drop_escapes(text):
    return re.sub(r"\\(text[a-z]+\{\}|[_&%$#{}])", "", text)


def test_statistics_by_hand():
    shown = make_small().shown[0]
    assert cells.average_of(shown, "fedthe") == pytest.approx(65.67)
    # on original, clients differ by -3 and +3 around 0.08
    assert cells.find_leaders(shown) == {"original": None, "ooc": "fedthe", cells.AVERAGE: "fedthe"}
    assert cells.difference(shown, "fedthe", "ooc") == pytest.approx(-2.5)
    assert cells.difference(shown, "fedthe", "original") is None
    assert cells.difference(shown, "nobody", "ooc") is None
    assert cells.difference(replace(shown, paper=None), "fedthe", "ooc") is None


def test_what_rounds_to_nothing_has_no_minus():
    assert cells.say_change(-0.04) == "+0.0"
    assert cells.say_change(-0.06) == "-0.1"


def test_markdown_says_the_numbers():
    text = write_markdown(make_small())
    scores, leads, worst, tenth, weighted, ece, nll, papers = read_markdown(text)
    assert [cell.strip() for cell in scores[0][1:]] == ["original", "out-of-client", "average", "ms", "passes"]
    assert find_row(scores, "FedAvg") == ["71.3 ± 0.4", "50.0 ± 1.0", "60.6", "0.0123", "1"]
    assert find_row(scores, "FedTHE") == ["71.3 ± 0.4", "**60.0 ± 2.0**", "**65.7**", "1234", "33 + 1"]
    assert find_row(leads, "FedTHE")[1] == "+10.0 (+10.0 to +10.0)"
    assert find_row(leads, "FedAvg")[1] == "-10.0 (-10.0 to -10.0)"
    assert find_row(worst, "FedAvg") == ["40.0", "30.0"]  # no interval, so not bold
    assert find_row(tenth, "FedAvg") == ["-", "31.0"]
    assert find_row(weighted, "FedTHE") == ["-", "61.0"]
    assert find_row(ece, "FedTHE") == ["-", "10.0"]
    assert find_row(nll, "FedAvg") == ["-", "1.23"]
    assert "Bold: the best of a column, if the 95 % interval of its lead" in text
    assert find_row(papers, "FedTHE") == ["62.5 (-2.5)"]
    assert len(papers) == 3  # FedAvg is not in the paper's table


def test_latex_says_the_same_numbers():
    text = write_latex(make_small())
    rows, others = read_latex_rows(text)
    assert [row[1:] for row in others if row[0] == "FedTHE"] == [
        ["-", "21.0"],
        ["-", "61.0"],
        ["-", "10.0"],
        ["-", "0.50"],
    ]
    ours = [row for row in rows if row[0] == "FedTHE"]
    small = r" {\scriptsize $\pm$ "
    assert ours[0][1:] == [
        rf"71.3{small}0.4}}",
        rf"\textbf{{60.0}}{small}2.0}}",
        r"\textbf{65.7}",
        "1234",
        "33 + 1",
    ]
    assert ours[1][1:] == ["45.0", "20.0", "", "", ""]
    assert ours[2][1:] == ["", "62.5 ($-$2.5)", "", "", ""]
    for word in (r"\toprule", r"\midrule", r"\bottomrule", r"\caption{", r"\label{tab:made-up}", "mind the gap."):
        assert word in text
    assert text.startswith(r"% Needs \usepackage{booktabs}")


@pytest.mark.parametrize("name", ["md", "latex"])
def test_one_seed_has_no_deviation(name):
    assert "± " in write_markdown(make_small())
    page = make_page(seeds=(0,))
    assert "±" not in FORMATS[name](page)
    assert r"\pm" not in FORMATS[name](page)


@pytest.mark.parametrize("name", ["md", "latex"])
def test_without_the_paper_there_is_no_table_of_it(name):
    assert "The paper" in FORMATS[name](make_page())
    assert "The paper" not in FORMATS[name](make_page(paper=False))


def test_what_failed_is_a_dash_and_has_no_average():
    shown = make_small().shown[0]
    scores = {"fedavg": {"original": shown.scores["fedavg"]["original"]}}
    page = make_small(scores=scores, costs={}, failures={"fedthe, seed 0": "lost"})
    table = read_markdown(write_markdown(page))[0]
    assert find_row(table, "FedAvg") == ["71.3 ± 0.4", "-", "-", "-", "-"]
    assert find_row(table, "FedTHE") == ["-"] * 5
    assert "failed: fedthe, seed 0: lost" in write_markdown(page)
    assert "% failed: fedthe, seed 0: lost" in write_latex(page)


def make_nasty():
    methods = {"fedavg": NASTY, "fedthe": NASTY}  # two of the same name are two rows
    changes = {"name": NASTY, "sentence": NASTY, "notes": [NASTY], "failures": {NASTY: NASTY}}
    tests = {"original": NASTY, "ooc": NASTY}
    paper = Paper(NASTY, NASTY, {"fedthe": {"ooc": (62.5, 0.5)}}, [NASTY])
    shown = make_small(methods=methods, tests=tests, paper=paper, **changes).shown[0]
    return Page(NASTY, [shown, shown])


def test_markdown_keeps_texts_of_users_texts():
    text = write_markdown(make_nasty())
    tables = read_markdown(text)
    assert [{len(row) for row in table} for table in tables] == [{6}, *[{3}] * 6, {2}] * 2
    assert [len(table) for table in tables] == [*[4] * 7, 3] * 2
    assert "<" not in text
    assert "\x1b" not in text
    for mark in "`[$_":
        assert not re.search(rf"(?<!\\){re.escape(mark)}", text)


def test_latex_keeps_texts_of_users_texts():
    text = write_latex(make_nasty())
    tables = read_latex_rows(text)
    assert [len(rows) for rows in tables] == [6, 9] * 2
    plain = drop_escapes("\n".join(line for line in text.splitlines() if not line.startswith("%")))
    assert not set("#%~^<>|\x1b") & set(plain)
    assert plain.count("{") == plain.count("}")
    assert plain.count("$") % 2 == 0
    assert "_" not in plain
    labels = re.findall(r"\\label\{(.*?)\}", text)
    assert len(set(labels)) == 4
    assert all(re.fullmatch(r"tab:[a-z0-9-]+", label) for label in labels)


@pytest.mark.parametrize(
    ("mark", "escaped"),
    [
        ("_", r"\_"),
        ("&", r"\&"),
        ("%", r"\%"),
        ("$", r"\$"),
        ("#", r"\#"),
        ("{", r"\{"),
        ("}", r"\}"),
        ("~", r"\textasciitilde{}"),
        ("^", r"\textasciicircum{}"),
        ("\\", r"\textbackslash{}"),
        ("[", "{[}"),
    ],
)
def test_latex_escapes(mark, escaped):
    methods = {"fedavg": f"{mark}x", "fedthe": "FedTHE"}
    assert f"\n{escaped}x & 71.3" in write_latex(make_small(methods=methods)).replace(r"\textbf{71.3}", "71.3")


def test_comments_of_latex_end_where_they_should():
    text = write_latex(make_small(notes=["one\n\\input{x}\r\\input{y}\u2028\\input{z}"]))
    assert all(line.startswith("%") for line in text.splitlines() if "input" in line)


def test_csv_holds_every_client():
    page = make_page(clients=3, seeds=(0, 1), methods=("fedavg", "fedthe"))
    page.shown[0].clients["1"].scores["fedthe"]["ooc"][2] = 0.0  # a number as any other
    text = write_csv(page)
    assert text.endswith("\r\n")
    lines = list(csv.DictReader(io.StringIO(text, newline="")))
    assert list(lines[0]) == ["run", "seed", "client", "method", "test", "percent"]
    shown = page.shown[0]
    assert any(line["percent"] == "0.0" for line in lines)
    there = {
        (line["seed"], line["method"], line["test"], int(line["client"])): float(line["percent"]) for line in lines
    }
    expected = {
        (seed, method, test, client): percent
        for seed, clients in shown.clients.items()
        for method, tests in clients.scores.items()
        for test, percents in tests.items()
        for client, percent in enumerate(percents)
        if percent is not None
    }
    assert there == expected
    assert len(lines) == 2 * 2 * 6 * 3 - 2  # client 0 lacks a test in both seeds


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_csv_starts_no_formula(start):
    name = f'{start}cmd|"x", y\nz'
    page = Page("", [make_shown(name=name, methods=("fedavg",), clients=2, seeds=(0,))])
    rows = list(csv.reader(io.StringIO(write_csv(page), newline="")))
    assert {row[0] for row in rows[1:]} == {f"'{name}"}
    assert {len(row) for row in rows} == {6}


@pytest.mark.parametrize("name", FORMATS)
def test_every_run_is_there_and_none_is_fine(name):
    page = Page("two", [make_shown(name="first", seeds=(0,)), make_shown(name="second", seeds=(0,))])
    text = FORMATS[name](page)
    assert "first" in text
    assert "second" in text
    assert FORMATS[name](Page("none", []))


def test_short_streams_have_a_dagger_and_a_footnote():
    page = make_small(short={"ooc": "2 of 4 streams have fewer than 20 samples, the shortest 7"})
    text = write_markdown(page)
    assert [cell.strip() for cell in read_markdown(text)[0][0][1:3]] == ["original", "out-of-client†"]
    assert "- † out-of-client: 2 of 4 streams have fewer than 20 samples, the shortest 7." in text
    assert r"out-of-client\dag{}" in write_latex(page)


def test_equal_methods_have_no_bold_number():
    scores = {m: {"original": Score(70.0, 1.0, 40.0)} for m in ("fedavg", "fedthe")}
    text = write_markdown(make_small(scores=scores, clients=spread_clients(scores), tests={"original": "original"}))
    assert "**" not in text
    assert "Bold" not in text
