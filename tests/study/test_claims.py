"""Verdicts on the paper's claims: by hand, on records made up for it, and against the committed ones."""

import json
import re
from statistics import fmean

import pytest

from fedthe.statistics import Interval, bootstrap, pair
from fedthe.store import write_sealed
from fedthe.study.claims import (
    Book,
    Claim,
    Part,
    compare,
    exceeds,
    give_verdict,
    is_ahead,
    is_level,
    is_no_worse,
    name_row,
    write_claims,
)
from fedthe.study.paper_claims import CLAIMS
from fedthe.study.paper_notes import (
    list_ablations,
    list_older,
    say_above,
    say_mixture,
    say_ranks,
    say_small_training,
    say_their_code,
)
from fedthe.study.paper_verdict import say_label_shift, write_summary, write_verdict
from fedthe.study.tables import AVERAGE, find_table
from helpers import ROOT

RESULTS = ROOT / "results"
TESTS = ("original", "corrupted", "ooc", "natural", "mixture")


def file_record(tmp_path, clients):
    """A record of main-dir0.1 with these accuracies by method, test, seed and client."""
    case = {"columns": {test: test for test in TESTS}, "clients": clients, "config": {"seeds": [0, 1]}}
    rows = {method: {test: [0.0, 0.0] for test in TESTS} for method in clients}
    write_sealed(tmp_path / "main-dir0.1.json", {"format": 1, "id": "main-dir0.1", "rows": rows, "cases": [case]})
    return Book(tmp_path)


def make_book(tmp_path, ooc):
    """A record of main-dir0.1: accuracy out of client by method, of four clients with two seeds; 50 on other tests."""
    clients = {
        method: {
            test: {"0": numbers, "1": numbers} if test == "ooc" else {"0": [50.0] * 4, "1": [50.0] * 4}
            for test in TESTS
        }
        for method, numbers in ooc.items()
    }
    return file_record(tmp_path, clients)


@pytest.mark.parametrize(
    ("holds", "verdict"),
    [
        ([True, True], "**yes**"),
        ([False, False], "**no**"),
        ([None, None], "**not shown**: 0 of 2 hold"),
        ([False, None], "**not shown**: 0 of 2 hold; 1 contradicted"),
        ([True, None], "**partly**: 1 of 2 hold"),
        ([True, None, False], "**partly**: 1 of 3 hold; 1 contradicted"),
    ],
)
def test_verdicts_follow_from_parts(holds, verdict):
    assert give_verdict([Part("", "", each) for each in holds]) == verdict


@pytest.mark.parametrize(
    ("low", "high", "ahead", "no_worse", "level", "by_ten"),
    [
        (0.1, 0.9, True, True, True, False),
        (-0.9, -0.1, False, True, True, False),
        (-0.5, 0.5, None, True, True, False),
        (-1.5, 0.5, None, None, None, False),
        (-3.0, -1.5, False, False, False, False),
        (1.5, 3.0, True, True, False, False),
        (9.0, 11.0, True, True, False, None),
        (10.5, 11.0, True, True, False, True),
        (None, None, None, None, None, None),
    ],
)
def test_an_interval_bears_out_contradicts_or_leaves_open(low, high, ahead, no_worse, level, by_ten):
    gap = Interval(0.0, low, high, None)
    assert [rule(gap) for rule in (is_ahead, is_no_worse, is_level, exceeds(10))] == [ahead, no_worse, level, by_ten]


def test_a_part_names_the_best_other_method_ours_and_the_papers(tmp_path):
    book = make_book(tmp_path, {"fedthe": [50.0, 52, 48, 50], "t3a": [30.0, 33, 27, 30], "ditto": [40.0, 41, 39, 40]})
    (part,) = compare(book, "here", "main-dir0.1", "fedthe", ("t3a", "ditto", "fedrod"), "ooc")
    paper = find_table("main-dir0.1").rows
    lead = paper["fedthe"]["ooc"][0] - paper["t3a"]["ooc"][0]  # T3A is the paper's best of these three
    gap = bootstrap(
        [
            each[:, 0] - each[:, 1]
            for each in pair(*(book["main-dir0.1"].clients[m]["ooc"] for m in ("fedthe", "ditto")))
        ]
    )
    assert (part.where, part.ours, part.other) == ("here", "FedTHE 50.0", "Ditto 40.0")
    assert (part.gap, part.paper) == (f"+10.0 [{gap.low:.1f}, {gap.high:.1f}]", f"{lead:+.1f} over T3A")
    assert part.holds is True
    (part,) = compare(book, "here", "main-dir0.1", "t3a", "fedthe", "ooc")
    assert part.holds is False
    assert part.paper == f"{-lead:+.1f}"
    (part,) = compare(book, "here", "main-dir0.1", "fedthe", "ditto", AVERAGE)
    assert (part.ours, part.other) == ("FedTHE 50.0", "Ditto 48.0")  # 10 on one of five tests
    assert part.gap.startswith("+2.0 [")


def test_what_is_not_measured_is_left_out(tmp_path):
    book = make_book(tmp_path, {"fedthe": [50.0] * 4})
    assert compare(book, "", "main-dir1", "fedthe", "memo_p") == []  # no record
    assert compare(book, "", "main-dir0.1", "fedthe", "memo_p") == []  # no such row yet
    claims = [Claim("this", lambda book: compare(book, "", "main-dir0.1", "fedthe", "memo_p"))]
    assert "this" not in write_claims(claims, book)
    shown = [Claim("that", lambda book: [Part("here", "1", None, gap="+1 [-1, 3]")], "Why")]
    written = write_claims([*claims, *shown], book)
    assert "| 1 | that | **not shown**: 0 of 1 hold. Why |" in written
    assert "| 1 | here | 1 |  | +1 [-1, 3] |  | open |" in written


def write_main(tmp_path, **shifts):
    """A record of main-dir0.1 in which methods differ from FedTHE by so many points on every test, give or take 1."""
    accuracy = {"fedthe": 0.0, "fedthe_plus": 0.0, "fedavg": -20.0, "fedavg_ft": -20.0} | shifts
    clients = {
        method: {
            test: {seed: [50 + shift + spread * (shift != 0) for spread in (-1, 1, 0, 0)] for seed in "01"}
            for test in (*TESTS, "corrupted_ooc")
        }
        for method, shift in accuracy.items()
    }
    return file_record(tmp_path, clients)


@pytest.mark.parametrize(
    ("global_model", "t3a", "said", "verdict"),
    [
        (5.0, -9.0, ["MEMO (G), is better there (+5.0 ["], "in 0 of 1 settings, and worse in 1"),
        (
            -5.0,
            -9.0,
            ["MEMO (G), is worse there (-5.0 [", "better on corrupted images"],
            "in 1 of 1 settings, and worse in 0",
        ),
        (
            0.1,
            -9.0,
            ["MEMO (G), may be better there, which is open (", "not shown to be better on corrupted images"],
            "in 0 of 1 settings, and worse in 0",
        ),
        (
            -9.0,
            5.0,
            [
                "MEMO (G), is worse there",
                "worse on corrupted images",
                "is not shown to help under label shift; under covariate shift it does not.",
            ],
            "in 0 of 1 settings, and worse in 1",
        ),
    ],
)
def test_sentences_say_no_more_than_the_claims(global_model, t3a, said, verdict, tmp_path):
    book = write_main(tmp_path, memo_g=global_model, t3a=t3a)
    summary = " ".join(write_summary(book).split())
    for each in said:
        assert each in summary
    assert summary.count("not shown to be better") == (2 if global_model == 0.1 else 0)
    written = " ".join(write_verdict(book).split())
    assert written.count(f"on corrupted images {verdict}") == 2  # FedTHE and FedTHE+ are the same here
    best = max(global_model, t3a)
    for each in (summary, written):
        assert ("in some settings it does." in each) == (best == -5.0)
        assert ("under covariate shift it does not." in each) == (best == 5.0)
        assert ("FedTHE helps under label shift;" in each) == (t3a < 0)
    many = int(global_model > 1)
    assert f"The best global model is better there in {many} of 1 settings" in written
    assert ("on the average of the five tests at CNN, Dir(0.1) (+5.0 [" in written) == (global_model == 5.0)


def test_label_shift_baselines_are_counted_by_their_means():
    """Settings where the best of them is apart from FedTHE by far more than the interval."""
    said = say_label_shift(Book(RESULTS))
    gaps = []
    for path in sorted(RESULTS.glob("regime-*.json")):
        (case,) = json.loads(path.read_text(encoding="utf-8"))["cases"]
        means = {
            method: fmean(fmean(clients) for clients in case["clients"][method]["ooc"].values())
            for method in ("fedthe", "logit_adjust", "em", "bbse", "fmapls")
        }
        gaps.append(means.pop("fedthe") - max(means.values()))
    behind, of, most, ahead, least = re.search(
        r"in (\d) of (\d) settings, by up to ([\d.]+) points, and worse in (\d), by up to ([\d.]+)", said
    ).groups()
    assert int(of) == len(gaps) == 8
    assert sum(gap < -1 for gap in gaps) <= int(behind) <= sum(gap < 0 for gap in gaps)
    assert sum(gap > 1.5 for gap in gaps) <= int(ahead) <= sum(gap > 0 for gap in gaps)
    # few participants have the widest interval, and one that leaves it open
    known = [round(gap, 1) for gap in gaps]
    assert -float(most) in known
    assert float(least) == max(known)
    assert say_label_shift(Book(RESULTS / "figures")) == ""


def test_tables_with_the_earlier_mixture_are_named():
    """They have another manifest than a table of the same federation that was measured later."""
    said = list_older(Book(RESULTS))
    manifests = {
        id: json.loads((RESULTS / f"{id}.json").read_text(encoding="utf-8"))["cases"][0]["manifests"]["0"]
        for id in ("ablation", "main-dir0.1", "participation0.4-dir0.1", "train-size1-dir0.1", "main-dir1")
        for id in (id, f"standardized/{id}")
        if (RESULTS / f"{id}.json").exists()
    }
    assert {"standardized/main-dir0.1", "standardized/main-dir1"} <= manifests.keys()
    for id, manifest in manifests.items():
        newer = manifests["main-dir1" if id.endswith("dir1") else "main-dir0.1"]
        assert (f"`{id}`" in said) == (manifest != newer)


def test_rules_and_rows_are_told_before_they_are_used():
    page = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    for row in find_table("ablation").rows:
        assert " ".join(row.split()) in " ".join(list_ablations(Book(RESULTS)).split())
    assert page.index("(1) to (16) are") < page.index("(5) |")
    for claim in CLAIMS:
        if "far " in claim.says or "on par" in claim.says or "at every severity" in claim.says:
            assert claim.remark, claim.says


def read(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["cases"][0]["clients"]


def score(record, method, test):
    return fmean(fmean(each for each in clients if each is not None) for clients in record[method][test].values())


def find_claim(start):
    return next(claim for claim in CLAIMS if claim.says.startswith(start))


def test_claims_say_what_results_and_the_paper_say():
    """Literally, from the files; the verdicts are for whoever measures again."""
    book = Book(RESULTS)
    main, many = read("main-dir0.1"), read("clients100-dir0.1")
    paper = find_table("main-dir0.1").rows
    gain = fmean(paper["fedthe_plus"][test][0] - paper["fedthe"][test][0] for test in TESTS)
    (first, *_) = find_claim("FedTHE+ is above").judge(book)
    ours = fmean(score(main, "fedthe_plus", test) - score(main, "fedthe", test) for test in TESTS)
    assert first.gap.startswith(f"{ours:+.1f} [")
    assert first.paper == f"{gain:+.1f}"
    parts = find_claim("With 100 clients").judge(book)
    for part, test in zip(parts, TESTS, strict=True):
        others = {method: score(many, method, test) for method in many if not method.startswith("fedthe")}
        best = max(others.values())
        assert (part.where, part.ours) == (test, f"FedTHE+ {score(many, 'fedthe_plus', test):.1f}")
        assert part.other.endswith(f" {best:.1f}")
        if part.holds is not None:
            assert part.holds == (score(many, "fedthe_plus", test) > best)
    assert len(CLAIMS) >= 30
    assert len({claim.says for claim in CLAIMS}) == len(CLAIMS)


def test_fewer_rounds_hold_from_what_the_claim_says(tmp_path):
    """1.47 is shown with the digits that decide, and is not 1.5; without an interval, it does not refute 1.5 either."""
    ratios = {"fedavg_ft": 1.47, "memo_p": 1.499, "fedrod": 1.5, "t3a": 2.0}
    speed = {
        method: {"rounds": 100 / ratio, "baseline_rounds": 100.0, "ratio": ratio} for method, ratio in ratios.items()
    }
    (tmp_path / "figures").mkdir()
    write_sealed(tmp_path / "figures" / "curves-dir0.1.json", {"data": {"speed": {"fedthe": speed}}})
    parts = find_claim("FedTHE needs 1.5").judge(Book(tmp_path))
    assert [part.holds for part in parts] == [None, None, True, True]
    assert [parts[0].gap, parts[2].gap] == ["1.47 times", "1.50 times"]


def test_every_table_of_the_page_names_its_seeds():
    page = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    shown = re.findall(r"<!-- results: (\S+) -->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert len(shown) > 20
    for id, text in shown:
        path = RESULTS / f"{id}.json"
        if path.exists():
            seeds = json.loads(path.read_text(encoding="utf-8"))["cases"][0]["config"]["seeds"]
            (said,) = re.findall(r"^Seeds? (\d+)(?: to (\d+))?\.", text, re.MULTILINE)
            assert [*range(int(said[0]), int(said[1] or said[0]) + 1)] == seeds, id


def test_findings_are_computed_from_the_paper_as_printed():
    book = Book(RESULTS)
    said = say_small_training(book)
    assert "26.0 out of client" in said
    assert "67.64 and 67.64" in said
    assert "for 2 of 34 rows of FedTHE" in said
    assert "implies 31.3" in said  # 4 x 68.53 - 86.06 - 79.13 - 77.61
    assert "42 of 45 baselines" in say_mixture(book)
    assert "rank correlation" in say_ranks(book)


def test_their_code_is_set_beside_the_paper():
    rows = json.loads((RESULTS / "deviations.json").read_text(encoding="utf-8"))["rows"]
    paper, tests = find_table("main-dir0.1").rows, ("original", "corrupted", "ooc")
    said = say_their_code(Book(RESULTS))
    theirs, ours, printed = (
        ", ".join(f"{of[test][0]:.1f}" for test in tests)
        for of in (rows["authors_ditto"], rows["ditto"], paper["ditto"])
    )
    assert f"it has {theirs} on original, corrupted and ooc, ours {ours}, the paper {printed}:" in said
    methods = ("fedthe", "memo_g", "memo_p", "fedrod", "fedrep", "apfl", "ditto", "knn_per")
    misses = {
        kind: [fmean(abs(rows[kind + id][test][0] - paper[id][test][0]) for test in tests) for id in methods]
        for kind in ("", "authors_")
    }
    assert f"is {fmean(misses['']):.1f} points for our versions and {fmean(misses['authors_']):.1f} for theirs" in said
    closer = [id for id, a, b in zip(methods, misses[""], misses["authors_"], strict=True) if a - b >= 0.3]
    assert said.endswith(f"Closer by at least 0.3: {', '.join(map(name_row, closer))}.")


def test_cells_far_above_the_paper_are_named():
    said = say_above(Book(RESULTS))
    found = 0
    for id in ("main-dir0.1", "main-dir1", "main-dir10"):
        rows, paper = read_rows(id), find_table(id).rows
        for method, test in ((m, t) for m in rows for t in ("original", "corrupted", "ooc")):
            gap = rows[method][test][0] - paper[method][test][0]
            found += gap > 3
            assert (f"{test} {gap:+.1f}" in said) == (gap > 3)
    assert len(re.findall(r" \+\d", said)) == found > 5


def read_rows(id):
    return json.loads((RESULTS / f"{id}.json").read_text(encoding="utf-8"))["rows"]


def test_corrupted_samples_of_others_are_judged_against_all_methods_of_the_setting():
    parts = {part.where: part for part in find_claim("On corrupted out-of-client").judge(Book(RESULTS))}
    for label, id in (("CNN, Dir(0.1)", "main-dir0.1"), ("Dir(1.0)", "main-dir1")):
        record = read(id)
        others = [m for m in record if not m.startswith("fedthe") and m not in ("fedavg", "gma", "memo_g")]
        best = max(others, key=lambda method: score(record, method, "corrupted_ooc"))
        assert parts[label].other == f"{name_row(best)} {score(record, best, 'corrupted_ooc'):.1f}"
        assert " over " in parts[label].paper  # the paper's table lacks that method


def test_half_of_a_stream_is_compared_by_client():
    parts = find_claim("Half of a test").judge(Book(RESULTS))
    assert len(parts) == 6
    half, whole = read("test-size0.5-dir1"), read("test-size1-dir1")
    (part,) = (part for part in parts if part.where == "Dir(1), mixture")
    assert part.ours == f"half {score(half, 'fedthe', 'mixture'):.1f}"
    assert part.other == f"whole {score(whole, 'fedthe', 'mixture'):.1f}"
    gap = bootstrap([e[:, 0] - e[:, 1] for e in pair(half["fedthe"]["mixture"], whole["fedthe"]["mixture"])])
    assert part.gap == f"{gap.mean:+.1f} [{gap.low:.1f}, {gap.high:.1f}]"
    assert part.holds is (True if gap.low > -1 and gap.high < 1 else None)


def test_a_method_is_not_its_own_rival(tmp_path):
    book = make_book(tmp_path, {"fedthe": [50.0, 52, 48, 50], "t3a": [30.0, 33, 27, 30]})
    (part,) = compare(book, "", "main-dir0.1", "fedthe", ("fedthe", "t3a"), "ooc")
    assert part.other == "T3A 30.0"


def test_the_papers_difference_is_to_its_own_best_rival_measured_by_us_or_not(tmp_path):
    book = make_book(tmp_path, {"fedthe": [50.0, 52, 48, 50], "fedrep": [30.0, 33, 27, 30]})
    (part,) = compare(book, "", "main-dir0.1", "fedthe", ("fedrep", "t3a"), "ooc")
    paper = find_table("main-dir0.1").rows
    assert paper["t3a"]["ooc"][0] > paper["fedrep"]["ooc"][0]
    assert part.paper == f"+{paper['fedthe']['ooc'][0] - paper['t3a']['ooc'][0]:.1f} over T3A"
