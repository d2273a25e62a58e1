"""Our table and figure of streams in time, from the plan to the record, on small data."""

import json

import numpy as np
import pytest
from PIL import Image

from fedthe.data.tests import TESTS
from fedthe.names import METHOD_NAMES, STREAM_NAMES
from fedthe.report.gather import show_record
from fedthe.report.read import check_record
from fedthe.store import write_sealed
from fedthe.study import streams
from fedthe.study.draw_streams import DRAWN, draw_streams
from fedthe.study.figures import draw_figure, measure_figure
from fedthe.study.reproduce import make_record, run_cases
from fedthe.study.show import lay_out, list_remarks
from fedthe.study.tables import find_table, plan_cases

CHOSEN = ["switch10", "recurring", "late"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streams")
    labels = np.arange(360) % 4
    noise = np.random.default_rng(0).integers(0, 90, (360, 16, 16, 3))
    images = (noise + 50 * labels[:, None, None, None]).astype(np.uint8)
    np.savez(folder / "tiny.npz", images=images, labels=labels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDTHE_HOME", str(folder / "home"))
        yield {
            "dataset": f"npz:{folder / 'tiny.npz'}",
            "natural": "none",
            "clients": 3,
            "rounds": 1,
            "local_epochs": 1,
            "seeds": [0, 1],
            "dirichlet": 1.0,
            "tests": CHOSEN,
            "out": str(folder / "run"),
            "engine": "loop",
        }


@pytest.fixture(scope="module")
def record(small):
    table = find_table("streams")
    return make_record(table, run_cases(plan_cases(table, ["fedavg", "fedthe"], **small)))


def test_the_table_runs_every_stream_that_needs_no_class_set_aside():
    (case,) = plan_cases(find_table("streams"))
    assert set(case.config.tests) == set(STREAM_NAMES) - {"open_set"}
    assert all(test in TESTS for test in case.config.tests)
    assert set(case.config.methods) <= set(METHOD_NAMES)
    assert (case.config.dataset, case.config.net, case.config.dirichlet) == ("cifar10", "cnn", 0.1)
    assert (case.config.rounds, case.config.seeds) == (100, (0, 1, 2))
    (case,) = plan_cases(find_table("open-set"))
    assert (case.config.tests, case.config.unknown) == (("original", "open_set"), "truck")
    (case,) = plan_cases(find_table("main-dir0.1"))
    assert case.config.tests is None  # other tables are as they were


def test_a_record_has_the_numbers_of_streams_and_can_be_shown(record, tmp_path):
    table = find_table("streams")
    assert record["columns"] == [test for test in streams.STREAMS if test in CHOSEN]
    assert record["compared"] == []
    remarks = list_remarks(record)
    assert "Not in the paper." in remarks
    assert any(remark.startswith("Not this table's settings: dataset npz:") for remark in remarks)
    assert not any("Not the paper's" in remark for remark in remarks)
    scores = record["cases"][0]["streams"]
    assert set(scores) == set(CHOSEN)
    for test, of in scores.items():
        for method, score in of.items():
            assert score["accuracy"]["mean"] == pytest.approx(record["rows"][method][test][0])
    head, rows = lay_out(table, record)
    assert len(head) == 1 + len(CHOSEN) == len(rows[0])
    write_sealed(tmp_path / "streams.json", record)
    again = check_record(json.loads((tmp_path / "streams.json").read_text()), tmp_path / "streams.json")
    assert again["cases"][0]["streams"] == json.loads(json.dumps(scores))
    assert set(show_record(again).streams) == set(CHOSEN)


def test_the_terminal_shows_worst_windows_forgetting_and_recovery(record):
    grids = streams.lay_out_streams(record)
    scores = record["cases"][0]["streams"]
    for title, (head, rows) in grids.items():
        assert [row[0] for row in rows] == ["fedavg", "fedthe"]
        assert all(len(row) == len(head) for row in rows), title
    (forgetting,) = (grid for title, grid in grids.items() if title.startswith("forgetting"))
    assert forgetting[0] == ["", "switch\n10", "recur."]  # late does not come back
    assert forgetting[1][1][1] == f"{scores['switch10']['fedthe']['forgetting']['mean']:+.1f}"
    (recovery,) = (grid for title, grid in grids.items() if title.startswith("recovery"))
    phases = scores["switch10"]["fedthe"]["phases"].values()
    slowest = [each["recovery"] for each in phases if each["steady"] is not None]
    assert recovery[1][1][1] == ("not" if None in slowest else f"{max(slowest):.0f}")


def test_the_table_of_an_open_set_has_its_rejection(small):
    table = find_table("open-set")
    settings = {key: value for key, value in small.items() if key != "tests"} | {"unknown": "3"}
    record = make_record(table, run_cases(plan_cases(table, ["fedavg"], **settings)))
    assert record["columns"] == ["original", "open_set"]
    score = record["cases"][0]["streams"]["open_set"]["fedavg"]
    grids = streams.lay_out_streams(record)
    shown = [grid for title, grid in grids.items() if title.startswith(("AUROC", "FPR"))]
    assert [rows for _, rows in shown] == [[["fedavg", f"{score[name]:.1f}"]] for name in ("auroc", "fpr95")]


def test_the_figure_is_measured_and_drawn(small, record, tmp_path):
    measured = measure_figure("streams", **small | {"methods": ["fedavg", "fedthe"]})
    assert set(measured["data"]["streams"]) == set(CHOSEN)
    assert measured["tests"]["switch10"] == "switching every 10"
    switch = measured["data"]["streams"]["switch10"]
    assert switch["bands"][:2] == [[0, 10, "own"], [10, 20, "ooc"]]
    assert len(switch["curves"]["fedthe"]["segments"]) == len(switch["bands"])
    draw_figure(measured, tmp_path / "streams.png")
    with Image.open(tmp_path / "streams.png") as picture:
        assert min(picture.size) > 300
    many = {f"method{i}": switch["curves"]["fedavg"] for i in range(DRAWN)} | switch["curves"]
    data = {"streams": {"switch10": {**switch, "curves": many}}}
    draw_streams({**measured, "data": data}, tmp_path / "many.png")
    assert (tmp_path / "many.png").exists()


def test_a_method_without_a_stream_leaves_its_cell_empty():
    def worst(mean):
        estimate = {"mean": mean, "low": None, "high": None}
        rest = {"accuracy": estimate, "worst_client": None, "forgetting": None, "phases": {}}
        return rest | {"worst_window": estimate}

    record = {"cases": [{"streams": {"switch10": {"a": worst(1.0), "b": worst(2.0)}, "late": {"b": worst(3.0)}}}]}
    ((_, rows),) = streams.lay_out_streams(record).values()
    assert rows == [["a", "1.0", "-"], ["b", "2.0", "3.0"]]
