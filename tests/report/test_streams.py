"""Streams in time in the report: tables in every format, charts in a browser, and records that are checked."""

import json
import re
from contextlib import contextmanager
from dataclasses import asdict, replace

import numpy as np
import pytest

from fedthe.experiment.timelines import Estimate, PhaseScore, StreamScore
from fedthe.names import name_test
from fedthe.report.data import Page, Timeline
from fedthe.report.formats import lay_out_streams, write_latex, write_markdown
from fedthe.report.gather import gather
from fedthe.report.page import render, write_page
from fedthe.report.read import STREAM
from fedthe.report.shapes import Malformed, check
from fedthe.report.streams import gather_streams, read_streams
from fedthe.store import write_sealed
from fedthe.study.draw_streams import break_line, draw_streams, pick_streams
from helpers import fails
from report_pages import FIGURE_CONFIG, make_shown
from stream_samples import SLOW, make_samples

EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def streams():
    return gather_streams(make_samples(clients=6), ["original", "switch50", "gradual"], {})


def show(streams, name="made-up", methods=tuple(SLOW)):
    shown = make_shown(name, methods=methods, clients=3, seeds=(0, 1), rounds=4)
    return replace(shown, streams=streams, tests=dict(shown.tests) | {test: name_test(test) for test in streams})


def test_tables_say_what_was_measured(streams):
    switch, ramp = lay_out_streams(show(streams))
    assert (switch.title, ramp.title) == ("Stream in time: switching every 50", "Stream in time: gradual severity")
    assert "Worst window" in switch.about
    assert ramp.about == ""  # said once
    rows = {name: dict(zip(switch.head, (cell.text for cell in row), strict=True)) for name, row in switch.rows}
    score = streams["switch50"].scores["fedthe"]
    accuracy = score.accuracy
    assert rows["FedTHE"]["accuracy"] == f"{accuracy.mean:.1f} ({accuracy.low:.1f} to {accuracy.high:.1f})"
    assert rows["FedTHE"]["out-of-client"] == f"{score.phases['ooc'].accuracy:.1f}"
    assert rows["FedTHE"]["recovery, out-of-client"].startswith(f"{score.phases['ooc'].recovery:.0f} (")
    assert rows["FedTHE"]["forgetting"][0] in "+-"
    assert "AUROC" not in switch.head
    assert list(ramp.head)[-1] == "slowest recovery"
    assert "corrupted, severity 5" in ramp.head


def test_zero_has_no_sign_and_a_single_segment_no_chart(streams):
    none = Estimate(-1.3e-15, -2.0, 0.04)
    score = StreamScore(Estimate(50.0, None, None), None, None, none, {"own": PhaseScore(40.0)})
    (block,) = lay_out_streams(show({"switch50": Timeline({"fedavg": score})}, methods=("fedavg",)))
    assert block.rows[0][1][list(block.head).index("forgetting")].text == "0.0 (-2.0 to 0.0)"
    made = {
        who: {name.replace("switch50", "open_set"): values for name, values in kept.items() if name[0] == "s"}
        for who, kept in make_samples(clients=2, size=60).items()
    }
    for kept in made.values():
        kept |= {name: 0 * values for name, values in kept.items() if name.endswith("/segment")}
    (stream,) = gather_streams(made, ["open_set"], {}).values()
    assert stream.scores
    assert stream.curves is None
    assert all(stream.curves for stream in streams.values())


def test_lines_break_where_segments_do():
    at, mean = break_line([0, 2, 4, 5, 6], [1.0, 2, 3, 4, 5], [(0, 4, "own"), (4, 6, "ooc"), (6, 7, "own")])
    assert np.array_equal(at, [0, 2, np.nan, 4, 5, 6], equal_nan=True)
    assert np.array_equal(mean, [1, 2, np.nan, 3, 4, 5], equal_nan=True)


def test_what_is_not_known_and_what_does_not_recover():
    never = PhaseScore(50.0, 60.0, None, 3.0, None, 4.0)
    known = StreamScore(
        Estimate(50.0, None, None), None, None, None, {"own": PhaseScore(40.0), "ooc": never}, 71.0, 62.5
    )
    (block,) = lay_out_streams(show({"open_set": Timeline({"fedavg": known})}, methods=("fedavg",)))
    ((_, row),) = block.rows
    assert dict(zip(block.head, (cell.text for cell in row), strict=True)) == {
        "accuracy": "50.0",
        "AUROC": "71.0",
        "FPR at 95 % TPR": "62.5",
        "own": "40.0",
        "out-of-client": "50.0",
        "recovery, out-of-client": "not (3 to not)",
    }


def test_markdown_and_latex_have_the_tables(streams):
    page = Page("A page", [show(streams)])
    markdown, latex = write_markdown(page), write_latex(page)
    assert markdown.count("Stream in time: ") == latex.count("Stream in time: ") - latex.count(
        "Stream in time: switching every 50: "
    )
    tables = re.findall(r"\\begin\{tabular\}\{l(r+)\}(.*?)\\end\{tabular\}", latex, re.DOTALL)
    for columns, body in tables:
        lines = [line for line in body.splitlines() if line.endswith(r"\\") and "multicolumn" not in line]
        assert {line.count(" & ") for line in lines} == {len(columns)}
    assert write_markdown(Page("A page", [show({})])).count("Stream in time") == 0


def test_a_record_is_read_as_it_was_written_and_a_damaged_one_refused(streams):
    plain = {test: {m: asdict(score) for m, score in each.scores.items()} for test, each in streams.items()}
    again = read_streams(check(json.loads(json.dumps(plain)), {str: {str: STREAM}}, "streams"))
    assert {test: each.scores for test, each in again.items()} == {test: each.scores for test, each in streams.items()}
    for path, value in [
        (("accuracy", "mean"), 101),
        (("worst_client",), "low"),
        (("phases", "ooc", "recovery"), -1),
        (("forgetting", "mean"), float("nan")),
    ]:
        damaged = json.loads(json.dumps(plain["switch50"]["fedthe"]))
        place = damaged
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
        with pytest.raises(Malformed):
            check(damaged, STREAM, "streams")


def make_figure(streams):
    data = {"streams": {test: pick_streams(each.curves) for test, each in streams.items()}}
    tests = {test: name_test(test) for test in streams}
    figure = {"id": "streams", "title": "Accuracy along streams in time", "config": FIGURE_CONFIG, "tests": tests}
    return json.loads(json.dumps({**figure, "data": data, "ddof": 1}))


def test_samples_of_an_unknown_class_are_a_gap_in_the_chart(tmp_path):
    """Positions 50 to 99 of the stream are of an unknown class; all that comes after stays in its place."""
    made = make_samples(clients=3)
    for kept in made.values():
        for name in [name for name in kept if name.startswith("switch50") and name.endswith("/label")]:
            unknown = kept[name.replace("label", "segment")] == 1
            kept[name] = np.where(unknown, -1, kept[name]).astype(np.int32)
            kept[name.replace("label", "right")] &= ~unknown
    streams = gather_streams(made, ["switch50"], {})
    data = pick_streams(streams["switch50"].curves)
    assert data["bands"][:3] == [[0, 50, "own"], [50, 100, "unknown"], [100, 150, "own"]]
    for curve in data["curves"].values():
        assert {49, 100, 149, 150, 399} <= set(curve["positions"])
        assert not {*range(50, 100)} & set(curve["positions"])
        assert [each is None for each in curve["segments"]] == [False, True, *[False] * 6]
    write_sealed(tmp_path / "gap.json", make_figure(streams))
    assert gather([tmp_path / "gap.json"]).figures
    draw_streams(make_figure(streams), tmp_path / "gap.png")
    assert (tmp_path / "gap.png").exists()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda stream: stream["bands"].append([400, 400, "own"]), "has a band that is none"),
        (lambda stream: stream["bands"].insert(0, [0, 1, 2]), "has a band that is none"),
        (lambda stream: stream["curves"]["fedthe"]["mean"].pop(), "lacks numbers"),
        (lambda stream: stream["bands"].pop(), "does not fit its bands"),
        (lambda stream: stream["curves"]["fedthe"]["segments"].append(3.0), "does not fit its bands"),
        (lambda stream: stream["curves"]["fedthe"].update(mean="low"), "not a list"),
    ],
)
def test_a_damaged_figure_is_refused(streams, damage, words, tmp_path):
    write_sealed(tmp_path / "whole.json", make_figure(streams))
    (figure,) = gather([tmp_path / "whole.json"]).figures
    assert set(figure["data"]["streams"]) == set(streams)
    broken = make_figure(streams)
    damage(broken["data"]["streams"]["switch50"])
    write_sealed(tmp_path / "broken.json", broken)
    assert words in fails(lambda: gather([tmp_path / "broken.json"]), "is not a valid record of a figure")


def test_a_figure_is_drawn_in_the_page(browser, streams, tmp_path):
    write_sealed(tmp_path / "whole.json", make_figure(streams))
    with open_page(browser, gather([tmp_path / "whole.json"]), tmp_path / "page.html") as page:
        for chart in page.locator("#figures .chart").all():
            chart.scroll_into_view_if_needed()
        page.wait_for_function("document.querySelectorAll('#figures .chart svg.main-svg').length >= 2")
        assert page.locator("#figures h4").all_inner_texts() == ["switching every 50", "gradual severity"]


def test_a_page_without_streams_has_no_section_and_names_are_escaped(streams):
    assert 'id="streams"' not in render(Page("A page", [show({})]))
    shown = show({EVIL: streams["switch50"]})
    text = render(Page("A page", [replace(shown, tests=dict(shown.tests) | {EVIL: EVIL})]))
    assert EVIL not in text.partition('<script id="plotly"')[0]


@contextmanager
def open_page(browser, page, path):
    write_page(page, path)
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    opened, trouble = context.new_page(), []
    opened.on("console", lambda said: trouble.append(said.text))
    opened.on("pageerror", lambda error: trouble.append(str(error)))
    opened.goto(path.as_uri())
    yield opened
    context.close()
    assert trouble == []


def test_charts_show_the_streams_of_the_selected_run(browser, streams, tmp_path):
    runs = [
        show({"switch50": streams["switch50"]}, "first"),
        show({"gradual": streams["gradual"]}, "second"),
        show({}, "third"),
    ]
    with open_page(browser, Page("Runs", runs), tmp_path / "page.html") as page:
        section = page.locator("#streams")
        chart = section.locator(".chart")
        assert chart.count() == 1
        chart.scroll_into_view_if_needed()
        page.wait_for_selector("#streams .chart svg")
        assert section.locator(".stream:visible h3").all_inner_texts() == ["first: switching every 50"]
        lines = "document.querySelector('#streams .chart').data.filter((each) => each.hoverinfo === 'text').length"
        bands = "document.querySelector('#streams .chart').layout.shapes.length"
        assert (page.evaluate(lines), page.evaluate(bands)) == (len(SLOW), 8)
        # a line has a gap before every segment but the first, and begins at position 0
        line = "document.querySelector('#streams .chart').data.filter((each) => each.hoverinfo === 'text')[0]"
        gaps = page.evaluate(f"{line}.x.map((each, i) => [each, i]).filter(([each]) => each === null).length")
        assert (gaps, page.evaluate(f"{line}.x[0]")) == (7, 0)
        after = page.evaluate(f"{line}.x.filter((each, i) => i > 0 && {line}.x[i - 1] === null)")
        assert after == [50, 100, 150, 200, 250, 300, 350]
        section.get_by_role("button", name="FedAvg + FT").click()
        page.wait_for_function(f"{lines} === {len(SLOW) - 1}")
        assert section.locator(".stream:visible tbody th").all_inner_texts() == [
            "FedAvg",
            "FedAvg + FT",
            "FedTHE",
            "FedTHE+",
        ]
        page.locator("#run").select_option("1")
        assert section.locator(".stream:visible h3").all_inner_texts() == ["second: gradual severity"]
        page.locator("#run").select_option("2")
        assert not section.is_visible()


def test_three_phases_have_three_columns_of_recovery():
    phase = PhaseScore(50.0, 60.0, 7.0, 3.0, 9.0, 4.0)
    phases = dict.fromkeys(("own", "corrupted", "ooc"), phase)
    score = StreamScore(Estimate(50.0, None, None), None, None, None, phases)
    (block,) = lay_out_streams(show({"recurring": Timeline({"fedavg": score})}, methods=("fedavg",)))
    assert sum(head.startswith("recovery, ") for head in block.head) == 3
