"""The page as text: what stands in it, before any script has run."""

import json
import re
import sys
from dataclasses import replace

import pytest

from fedthe.errors import InputError
from fedthe.report.data import Cost, Page, Paper, Score, SeedClients
from fedthe.report.headline import say_finding
from fedthe.report.page import render, write_page
from report_pages import FIGURE_CONFIG, make_page, make_shown, spread_clients

EVIL = "<img src=x onerror=alert(1)>"
SAFE = "&lt;img src=x onerror=alert(1)&gt;"


def make_small(**changes):
    """Two methods on two tests, with numbers that are known."""
    scores = {
        "fedavg": {"original": Score(50.0, 1.0, 30.0), "ooc": Score(60.0, 2.0, 41.0)},
        "fedthe": {"original": Score(80.0, 1.5, 20.0), "ooc": Score(40.0, 0.5, 10.0)},
    }
    small = replace(
        make_shown(methods=("fedavg", "fedthe"), clients=2, seeds=(0, 1), rounds=4, paper=False),
        tests={"original": "original", "ooc": "out-of-client"},
        scores=scores,
        clients=spread_clients(scores),
        short={},
        costs={"fedavg": Cost(0.5, 1.0, 0.0), "fedthe": Cost(2.0, 2.0, 3.0)},
        notes=[],
        failures={},
    )
    return replace(small, **changes)


def show(*shown, title="A page", figures=()):
    """The page without its scripts and styles, and the data that its script reads."""
    page = render(Page(title, list(shown), figures))
    data = json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1])
    return re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL), data


def read_table(page):
    """The rows of the table of results, cell by cell, as they are written."""
    body = re.search(r'<table id="results-table".*?</table>', page, re.DOTALL)[0]
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)]
    heads = [re.sub(r"<.*?>", "", cell) for cell in rows[0]]
    return {row[0]: dict(zip(heads[1:], row[1:], strict=True)) for row in rows[1:]}


def list_links(page):
    return re.findall(r'<li><a href="#(\w+)">', page)


def test_a_lead_whose_interval_excludes_zero_is_bold_and_nothing_else():
    page, _ = show(make_small())
    rows = read_table(page)
    assert rows["FedTHE"]["original"] == ('<span class="mean"><b>80.0</b> ± 1.5</span><span class="worst">20.0</span>')
    assert rows["FedAvg"]["original"] == ('<span class="mean">50.0 ± 1.0</span><span class="worst">30.0</span>')
    assert rows["FedAvg"]["average"] == '<span class="mean">55.0</span><span class="worst">35.5</span>'
    assert rows["FedTHE"]["average"] == '<span class="mean"><b>60.0</b></span><span class="worst">15.0</span>'
    assert [row["worst client"] for row in rows.values()] == ["35.5", "15.0"]
    assert [row["ms per sample"] for row in rows.values()] == ["0.5", "2"]
    assert [row["passes per sample"] for row in rows.values()] == ["1", "2 + 3"]
    assert "Bold: the best of a column, if the 95 % interval" in page


def test_the_best_is_not_bold_where_clients_disagree():
    small = make_small()
    page, _ = show(replace(small, clients=spread_clients(small.scores, apart=["original", "ooc"])))
    assert page.count("<b>") == 2  # 30 and 20 points are beyond 3 of disagreement
    close = {"fedavg": {"original": Score(80.0, 1.0, 30.0)}, "fedthe": {"original": Score(80.9, 1.0, 30.0)}}
    shown = make_small(scores=close, tests={"original": "original"}, clients=spread_clients(close, apart=["original"]))
    page, _ = show(shown)
    assert "<b>" not in page
    assert "Bold" not in page


def test_every_run_has_its_own_best():
    low = {"fedavg": {"ooc": Score(5.0, None, 1.0)}, "fedthe": {"ooc": Score(4.0, None, 2.0)}}
    second = make_small(name="second", tests={"ooc": "out-of-client"}, scores=low, clients=spread_clients(low))
    page, _ = show(make_small(), second)
    bold = re.findall(r'<td class="words">(.*?)</td>|<b>(.*?)</b>', page.split("results-table")[1].split("</table>")[0])
    assert [name or number for name, number in bold] == [
        "made-up",
        "60.0",
        "made-up",
        "80.0",
        "60.0",
        "second",
        "5.0",
        "second",
    ]


def test_short_streams_have_a_dagger_and_a_footnote():
    page, _ = show(make_small(short={"ooc": "2 of 4 streams have fewer than 20 samples, the shortest 7"}))
    assert "out-of-client†" in read_table(page)["FedTHE"]
    assert "<li>† out-of-client: 2 of 4 streams have fewer than 20 samples, the shortest 7.</li>" in page


def test_statistics_stand_below_the_results():
    page, data = show(make_shown(methods=("fedavg", "fedthe"), clients=4))
    assert list_links(page)[:3] == ["results", "statistics", "comparison"]
    for title in (
        "Against the best other method",
        "Worst tenth",
        "Weighted by samples",
        "Expected cal",
        "Negative log",
    ):
        assert f"<h3>{title}" in page or f"<summary>{title}" in page
    rows = data["runs"][0]["pairs"]["fedavg"]["fedthe"]
    assert list(rows) == list(data["runs"][0]["tests"])
    bare = {m: {t: Score(s.mean, s.std, s.worst) for t, s in tests.items()} for m, tests in make_small().scores.items()}
    page, _ = show(make_small(scores=bare))  # of an earlier version: what is not known is not shown
    assert "Against the best other method" in page
    assert "calibration error" not in page


def test_a_run_in_which_everything_failed_says_so():
    failed = make_small(name="bad", methods={}, scores={}, costs={}, failures={"fedavg": "why"})
    page, _ = show(failed)
    assert "No method has finished" in page
    assert "results-table" not in page
    assert "Bold" not in page
    page, _ = show(failed, make_small(name="good"))
    assert len(read_table(page)) == 2
    assert "<li>bad: no method has finished.</li>" in page
    assert "good: no method" not in page


def test_one_seed_has_no_deviation():
    page, _ = show(make_shown(methods=("fedavg", "fedthe"), seeds=(0,), clients=3))
    assert "±" not in page


def test_the_average_is_over_tests_that_are_named_and_missing_where_one_is():
    scores = {**make_small().scores, "fedavg": {"original": Score(50.0, 1.0, 30.0)}}
    page, _ = show(make_small(scores=scores))
    rows = read_table(page)
    assert rows["FedAvg"]["average"] == rows["FedAvg"]["out-of-client"] == "-"
    assert "Average: mean over original, out-of-client." in page


def test_the_paper_stands_below_ours_with_the_difference():
    paper = Paper("main", "A table <1>", {"fedthe": {"original": (82.5, 0.3), "ooc": (38.0, 0.1)}}, ["Not <i>so</i>."])
    page, _ = show(make_small(paper=paper))
    rows = read_table(page)
    assert "<small>paper 82.5, −2.5</small>" in rows["FedTHE"]["original"]
    assert "<small>paper 38.0, +2.0</small>" in rows["FedTHE"]["out-of-client"]
    assert "<small>" not in "".join(rows["FedAvg"].values())
    assert "(A table &lt;1&gt;)" in page
    assert "<li>Not &lt;i&gt;so&lt;/i&gt;.</li>" in page


def test_what_a_user_named_is_text_wherever_it_stands():
    shown = replace(
        make_shown(name=EVIL, classes=[EVIL, "</script>"], clients=2, methods=("fedavg", "fedthe")),
        sentence=EVIL,
        methods={"fedavg": EVIL, "fedthe": "FedTHE"},
        notes=[EVIL],
        failures={EVIL: EVIL},
        provenance={
            "command": EVIL,
            "environment": {EVIL: EVIL},
            "config": {EVIL: EVIL, "list": [EVIL], "dict": {EVIL: EVIL}},
            "manifests": {EVIL: EVIL},
            "trainings": [{"methods": [EVIL]}],
        },
    )
    shown = replace(shown, tests=dict.fromkeys(shown.tests, EVIL))
    whole = render(Page(EVIL, [shown, shown]))
    before = whole.split("<script", 1)[0]
    assert EVIL not in whole
    assert before.count(SAFE) > 30
    _, data = show(shown, shown, title=EVIL)
    assert data["runs"][0]["classes"] == [EVIL, "</script>"]  # as they are, for the script writes text


def test_text_that_no_file_can_hold_is_replaced(tmp_path):
    write_page(Page("a\ud800b\x00c", [make_small(name="\udfff")]), tmp_path / "page.html")
    assert "<h1>a�b�c</h1>" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_numbers_that_are_none_are_shown_as_missing():
    nan = float("nan")
    scores = {**make_small().scores, "fedthe": {"original": Score(nan, None, nan), "ooc": Score(40.0, 0.5, 10.0)}}
    page, data = show(make_small(scores=scores))
    assert read_table(page)["FedTHE"]["original"] == "-"
    assert data["runs"][0]["scores"]["fedthe"]["original"]["mean"] is None


def test_sections_without_data_are_left_out_and_not_linked():
    bare = make_small(clients={}, weights={}, losses=[], curves={}, examples=[], provenance={})
    page, _ = show(bare)
    assert list_links(page) == ["results", "trade"]
    assert re.findall(r'<section id="(\w+)"', page) == ["results", "trade"]
    everything = [
        "results",
        "statistics",
        "comparison",
        "trade",
        "clients",
        "curves",
        "weights",
        "examples",
        "provenance",
    ]
    assert list_links(show(make_small())[0]) == everything
    assert "ms per sample" not in show(make_small(costs={}))[0]


def test_severities_are_lines_and_not_a_trade_off():
    tests = {f"severity{level}": f"severity {level}" for level in range(1, 6)}
    scores = {"fedthe": {test: Score(50.0, 1.0, 30.0) for test in tests}}
    page, data = show(make_small(tests=tests, scores=scores, methods={"fedthe": "FedTHE"}, clients={}))
    assert list_links(page)[:2] == ["results", "severity"]
    assert data["runs"][0]["severities"] == [1, 2, 3, 4, 5]
    assert show(make_small())[1]["runs"][0]["severities"] == []


def test_several_runs_share_a_table_and_have_a_selector():
    other = replace(make_small(name="second"), tests={"original": "original", "natural": "natural"})
    page, data = show(make_small(name="first"), other)
    assert re.findall(r'<option value="\d">(.*?)</option>', page) == ["first", "second"]
    rows = re.findall(r'<th scope="row">(.*?)</th><td class="words">(.*?)</td>', page)
    assert rows == [("FedAvg", "first"), ("FedTHE", "first"), ("FedAvg", "second"), ("FedTHE", "second")]
    assert "Average of second: mean over original, natural." in page
    assert [run["name"] for run in data["runs"]] == ["first", "second"]
    assert 'id="run"' not in show(make_small())[0]


def test_a_test_that_runs_call_differently_goes_by_its_id():
    one, two = (make_small(tests={"original": "original", "ooc": title}) for title in ("ooc (a)", "ooc (b)"))
    assert "ooc" in next(iter(read_table(show(one, two)[0]).values()))


def test_losses_are_averaged_over_seeds_and_thinned():
    shown = make_shown(methods=("fedavg",), seeds=(0, 1), rounds=1000, clients=2)
    first, second = shown.losses
    shown = replace(shown, losses=[replace(first, losses=[1.0] * 1000), replace(second, losses=[3.0] * 900)])
    (line,) = show(shown)[1]["runs"][0]["losses"]
    assert line["losses"][0] == 2.0  # of both
    assert line["losses"][-1] == 1.0  # of the one that came so far
    assert line["rounds"][0] == 1
    assert line["rounds"][-1] == 1000
    assert len(line["rounds"]) < 500


def test_figures_that_cannot_be_drawn_are_named():
    record = {"id": "alpha-beta", "title": "By alpha", "tests": {"ooc": "ooc"}, "config": FIGURE_CONFIG, "data": {}}
    page, data = show(make_small(), figures=[record, {"id": "features"}, {}])
    assert "figures" in list_links(page)
    assert [figure["id"] for figure in data["figures"]] == ["alpha-beta"]
    assert data["figures"][0]["settings"] == "glyphs, cnn, 2 clients, Dirichlet 0.1, 3 rounds, seed 0"
    assert "Not drawn here: features; see their PNG files." in page
    page, data = show(figures=[{"id": "features"}, {"id": EVIL}])
    assert list_links(page) == ["figures"]
    assert f"Measured. Not drawn here: features, {SAFE}; see their PNG files." in page
    assert data["figures"] == []
    assert "Not drawn" not in show(make_small(), figures=[record])[0]
    assert "figures" not in list_links(show(make_small(), figures=[{}])[0])


def test_provenance_says_how_to_do_it_again():
    page, _ = show(make_small())
    assert "<pre>fedthe run configs/quick.toml</pre>" in page
    assert "<dt>manifest, seed 0</dt>" in page
    assert "<dt>torch</dt><dd>2.11.0</dd>" in page
    assert "<dt>duration</dt><dd>2.1 min</dd>" in page
    assert '<td class="words">dataset</td><td class="words">glyphs</td>' in page


def test_clients_without_a_known_mix_are_shown_all_the_same():
    bare = {seed: SeedClients([], each.scores, {}) for seed, each in make_small().clients.items()}
    page, data = show(make_small(clients=bare, classes=[]))
    assert "clients" in list_links(page)
    assert data["runs"][0]["clients"]["0"]["mix"] == []


def test_a_large_page_is_small_enough_to_send_and_asks_the_network_for_nothing(tmp_path):
    write_page(make_page(), tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 8_000_000
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page
    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=[\"']?(?!data:)\w", page.split("<script")[0])


def test_text_and_tables_come_before_the_large_script():
    page = render(Page("A page", [make_small()]))
    assert page.index("results-table") < page.index('id="provenance"') < page.index("plotly.js v")


def test_a_page_is_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text("old")
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(InputError, match="pip install 'plotly>=6'"):
        write_page(make_page(clients=2, seeds=(0,)), path)
    assert path.read_text() == "old"


def make_ranked(averages, spread, seeds=(0, 1, 2)):
    """A run of methods with these averages; a seed moves the first method by `spread`."""
    shown = make_shown(methods=tuple(averages), clients=2, seeds=seeds, rounds=4)
    first = next(iter(averages))
    clients, scores = {}, {}
    for i, seed in enumerate(seeds):
        percents = {m: mean + (spread * (i - 1) if m == first else 0.0) for m, mean in averages.items()}
        by_method = {m: {t: [percent, percent] for t in shown.tests} for m, percent in percents.items()}
        clients[str(seed)] = SeedClients([], by_method, {})
    for m in averages:
        mean = sum(clients[str(seed)].scores[m]["ooc"][0] for seed in seeds) / len(seeds)
        scores[m] = {t: Score(mean, None, mean) for t in shown.tests}
    return replace(shown, scores=scores, clients=clients)


def test_the_page_begins_with_what_was_found():
    said = say_finding(make_ranked({"fedrod": 60.0, "fedavg": 40.0, "ditto": 58.0}, spread=0.2))
    assert re.fullmatch(
        r"FedRoD has the highest average accuracy, 60\.0 %, 2\.0 above the best other method, Ditto \(58\.0 %\); "
        r"95 % interval of the difference \+1\.\d to \+2\.\d, 3 seeds\.",
        said,
    )
    page = render(Page("x", [make_ranked({"fedrod": 60.0, "ditto": 58.0}, spread=0.2)]))
    assert page.index("FedRoD has the highest") < page.index('<p class="sentence">')


def test_a_finding_claims_no_more_than_the_seeds_bear_out():
    """Clients agree, but seeds do not: the interval is about as wide as Student's t says, 2 +- 4.3 * 1 / sqrt(3)."""
    said = say_finding(make_ranked({"fedrod": 60.0, "ditto": 58.0}, spread=1.0))
    assert "60.0 %, not significantly above the best other method, Ditto (58.0 %)" in said
    low, high = map(float, re.search(r"difference ([+-][\d.]+) to ([+-][\d.]+), 3 seeds", said).groups())
    assert low == pytest.approx(-0.5, abs=0.5)
    assert high == pytest.approx(4.5, abs=0.5)
    one = say_finding(make_ranked({"fedrod": 60.0, "ditto": 58.0}, spread=0.0, seeds=(0,)))
    assert one.endswith("1 seed. This is a single seed: another may rank the methods differently.")


def test_a_finding_about_ours_names_the_best_of_the_others():
    said = say_finding(make_ranked({"fedthe_plus": 60.0, "fedavg": 30.0, "fedthe": 58.0, "ttt": 50.0}, spread=0.1))
    assert "the best other method, FedTHE (58.0 %)" in said
    assert said.endswith("The best method that is not a variant of FedTHE is TTT (50.0 %).")


def test_a_finding_where_there_is_little_to_find():
    shown = make_ranked({"fedavg": 60.0}, spread=0.0)
    assert say_finding(shown) == "FedAvg has an average accuracy of 60.0 %; it is the only method."
    assert say_finding(replace(shown, scores={})) == ""
    del shown.scores["fedavg"]["ooc"]  # its average would be of something else
    assert say_finding(shown) == ""


def test_the_headline_says_that_two_methods_are_level():
    shown = replace(make_ranked({"fedrod": 60.0, "ditto": 60.0}, spread=0.0, seeds=(0,)), clients={})
    assert say_finding(shown).startswith("FedRoD and Ditto share the highest average accuracy, 60.0 %.")


def test_the_headline_names_no_third_method_unless_two_variants_lead():
    assert "not a variant" not in say_finding(
        make_ranked({"fedthe_plus": 60.0, "ttt": 58.0, "fedthe": 50.0}, spread=0.1)
    )
