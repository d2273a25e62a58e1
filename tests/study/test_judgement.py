"""What is said of the judged regime filter, recomputed from the records by plain means."""

import json
import re
from statistics import fmean

import pytest

from fedthe.methods import METHODS as PACKAGE
from fedthe.methods import STUDIES
from fedthe.methods.compose import arrange
from fedthe.statistics import Interval
from fedthe.store import write_sealed
from fedthe.study import deviations, judgement
from fedthe.study.claims import Book
from fedthe.study.judged import METHODS, SEEDS, SETTINGS
from fedthe.study.judgement import write_goals, write_judgement, write_passes, write_recommendation, write_streams
from helpers import ROOT

BOOK = Book(ROOT / "results")
FIVE = ("original", "corrupted", "natural", "ooc", "mixture")


def columns_of(id):
    (case,) = json.loads((ROOT / "results" / f"{id}.json").read_text(encoding="utf-8"))["cases"]
    return [*case["clients"]["fedthe"]]


def mean(id, method, test):
    """Over clients, then over seeds."""
    (case,) = json.loads((ROOT / "results" / f"{id}.json").read_text(encoding="utf-8"))["cases"]
    return fmean(fmean(p for p in clients if p is not None) for clients in case["clients"][method][test].values())


def average(id, method):
    return fmean(mean(id, method, test) for test in columns_of(id) if test in FIVE)


def test_the_records_are_of_new_seeds():
    assert not {*SEEDS} & {0, 1, 2}
    for id in SETTINGS:
        (case,) = json.loads((ROOT / "results" / f"{id}.json").read_text(encoding="utf-8"))["cases"]
        assert tuple(case["config"]["seeds"]) == SEEDS
        assert {*METHODS} <= case["clients"].keys()


def test_averages_and_differences_are_those_of_the_records():
    lines = [line.strip("| ").split(" | ") for line in write_judgement(BOOK).splitlines()[2:]]
    assert len(lines) == len(SETTINGS)
    for id, (_, *cells) in zip(SETTINGS, lines, strict=True):
        fedthe, plus, regime, memo = (average(id, m) for m in ("fedthe", "fedthe_plus", "fedthe_regime", "regime_memo"))
        assert [float(cell) for cell in cells[:4]] == pytest.approx([fedthe, plus, regime, memo], abs=0.06)
        for cell, difference in zip(cells[4:], (regime - fedthe, regime - plus, memo - plus), strict=True):
            mean, low, high = map(float, re.findall(r"[+-][\d.]+", cell))
            assert low <= mean <= high
            assert mean == pytest.approx(difference, abs=0.2)  # a client without a natural test counts otherwise
            if abs(low) > 0.05 and abs(high) > 0.05:
                assert cell.startswith("**") == (low * high > 0)


def test_what_was_missed_is_named():
    goals = write_goals(BOOK).splitlines()
    leads = {id: average(id, "fedthe_regime") - average(id, "fedthe_plus") for id in SETTINGS}
    missed = [id for id, lead in leads.items() if lead < (1 if id == "regime-dir0.1" else 0.3)]
    assert f"reached in {len(SETTINGS) - len(missed)} of {len(SETTINGS)} settings" in goals[0]
    assert len(re.findall(r"\[", goals[0])) == len(missed)
    gaps = [mean(id, "fedthe_regime", test) - mean(id, "fedthe", test) for id in SETTINGS for test in columns_of(id)]
    behind = [gap for gap in gaps if gap < -0.5]
    assert f"reached on {len(gaps) - len(behind)} of {len(gaps)} tests" in goals[1]
    assert [float(each) for each in re.findall(r"\(\*{0,2}([+-][\d.]+) \[", goals[1])] == pytest.approx(behind, abs=0.2)


def test_what_more_passes_add():
    *lines, _, said = write_passes(BOOK).splitlines()[2:]
    assert len(lines) == len(SETTINGS)
    for id, line in zip(SETTINGS, lines, strict=True):
        _, *gains, per_pass, lead = line.strip("| ").split(" | ")
        plain, mirror, memo, plus = (
            average(id, m) for m in ("fedthe_regime", "regime_mirror", "regime_memo", "fedthe_plus")
        )
        means = [float(re.search(r"[+-][\d.]+", cell)[0]) for cell in (*gains, lead)]
        assert means == pytest.approx([mirror - plain, memo - plain, mirror - plus], abs=0.2)
        of_mirror, of_memo = map(float, per_pass.split(" / "))
        assert (of_mirror, 97 * of_memo) == pytest.approx(means[:2], abs=0.1)
        passes = json.loads((ROOT / "results" / f"{id}.json").read_text(encoding="utf-8"))["cases"][0]["passes"]
        assert [sum(passes[m]) for m in ("fedthe_regime", "regime_mirror", "regime_memo")] == [1, 2, 98]
    accuracy = json.loads((ROOT / "results" / "figures" / "regime.json").read_text(encoding="utf-8"))["data"][
        "accuracy"
    ]
    plain, two, ten = (
        fmean(accuracy[row][test]["mean"] for test in FIVE)
        for row in ("the filter", "2 views: mirror image", "10 views: and shifts")
    )
    assert [float(each) for each in re.findall(r"\d+\.\d", said)[1:]] == pytest.approx(
        [two - plain, plain, ten - plain], abs=0.06
    )


def test_the_recommendation_counts_settings():
    said = write_recommendation(BOOK).replace("\n", " ")
    ahead = sum(average(id, "fedthe_regime") > average(id, "fedthe") for id in SETTINGS)
    assert (f"ahead of FedTHE in {'all' if ahead == len(SETTINGS) else ahead} of them") in said


def test_streams_are_compared_with_the_best_other_method():
    (case,) = json.loads((ROOT / "results" / "streams.json").read_text(encoding="utf-8"))["cases"]
    lines = [line.strip("| ").split(" | ") for line in write_streams(BOOK).splitlines()[2:]]
    assert len(lines) == len(case["columns"])
    for test, (_, ours, _, other, gap, *_) in zip(case["columns"], lines, strict=True):
        means = {m: fmean(fmean(clients) for clients in of[test].values()) for m, of in case["clients"].items()}
        filtered = means.pop("fedthe_regime")
        assert float(ours) == pytest.approx(filtered, abs=0.06)
        assert float(other.split()[-1]) == pytest.approx(max(means.values()), abs=0.06)
        assert float(re.search(r"[+-][\d.]+", gap)[0]) == pytest.approx(filtered - max(means.values()), abs=0.06)


def test_only_what_an_interval_bears_out_counts_as_a_win():
    sure, unclear, lost = Interval(1.0, 0.5, 1.5, 0.01), Interval(3.0, -0.5, 6.0, 0.2), Interval(-2.0, -3.0, -1.0, 0.01)
    said = judgement._say_wins([sure, unclear, lost])
    assert said == "in 1 of them, by 1.0 to 1.0 points, and behind in 1, by up to 2.0"
    assert judgement._say_wins([lost]) == "in none of them, and behind in 1, by up to 2.0"


def test_deviations_are_theirs_minus_ours(tmp_path):
    clients = {
        method: {test: {"0": [level] * 4, "1": [level + 1.0] * 4} for test in FIVE}
        for pair in deviations.PAIRS.items()
        for method, level in zip(pair, (50.0, 53.0), strict=True)
    }
    case = {"columns": {test: test for test in FIVE}, "clients": clients, "config": {"seeds": [0, 1]}}
    rows = {method: {test: [0.0, 0.0] for test in FIVE} for method in clients}
    write_sealed(tmp_path / "deviations.json", {"format": 1, "id": "deviations", "rows": rows, "cases": [case]})
    lines = judgement.write_deviations(Book(tmp_path)).splitlines()[2:]
    assert len(lines) == len(deviations.PAIRS)
    assert all(line.count("**+3.0") == len(FIVE) + 1 for line in lines)


def write_levels(folder, levels, passes):
    """A record of main-dir10, every client of seed 3 at its method's level, and of seed 2 far from it."""
    clients = {
        method: {test: {"2": [99.0] * 4, "3": [level, level + 2.0, level - 2.0, level]} for test in FIVE}
        for method, level in levels.items()
    }
    case = {"columns": {test: test for test in FIVE}, "clients": clients, "passes": passes, "config": {"seeds": [2, 3]}}
    rows = {method: {test: [0.0, 0.0] for test in FIVE} for method in levels}
    folder.mkdir(exist_ok=True)
    write_sealed(folder / "main-dir10.json", {"format": 1, "id": "main-dir10", "rows": rows, "cases": [case]})


def test_the_filter_is_set_beside_the_best_method_of_its_cost(tmp_path):
    levels = {"fedavg": 60.0, "fedthe": 61.0, "fedthe_plus": 62.0, "memo_g": 63.0}
    passes = {"fedavg": [1, 0], "fedthe": [1, 0], "fedthe_plus": [50, 48], "memo_g": [97, 96]}
    write_levels(tmp_path, levels, passes)
    assert judgement.write_rivals(Book(tmp_path)).startswith("Not measured yet")
    ours = {"fedthe_regime": 61.5, "regime_memo": 62.5, "fedthe_regime_lda": 61.75}
    write_levels(tmp_path / judgement.PAST, ours, {method: [1, 0] for method in ours})
    (line,) = judgement.write_rivals(Book(tmp_path)).splitlines()[2:]
    name, one, plain, gap, best, memo, lead = line.strip("| ").split(" | ")
    assert (name, one, plain, best, memo) == ("Dir(10)", "FedTHE 61.0", "61.5", "MEMO (G) 63.0", "62.5")
    assert gap.startswith("**+0.5")
    assert lead.startswith("**-0.5")
    (line,) = judgement.write_discriminant(Book(tmp_path)).splitlines()[2:]
    assert line.count("+0.2 [") + line.count("+0.3 [") == len(FIVE) + 1


def test_our_methods_answered_the_samples_of_the_main_tables():
    for path in (ROOT / "results" / judgement.PAST).glob("*.json"):
        main = json.loads((ROOT / "results" / path.name).read_text(encoding="utf-8"))
        past = json.loads(path.read_text(encoding="utf-8"))
        assert [case["manifests"] for case in past["cases"]] == [case["manifests"] for case in main["cases"]]
        assert past["rows"].keys() == {*judgement.PAST_METHODS}


def test_every_deviation_is_measured_beside_ours():
    known = STUDIES | PACKAGE
    assert {*deviations.METHODS} == {*deviations.PAIRS, *deviations.PAIRS.values()} <= known.keys()
    assert arrange(known[deviations.PAIRS["tsa"]]).predictor == arrange(known["tsa"]).predictor
