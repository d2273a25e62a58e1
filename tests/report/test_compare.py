"""Two runs side by side: by hand, paired and not, and what is said beside the numbers."""

from dataclasses import replace

import pytest

from fedthe.errors import InputError
from fedthe.report.compare import compare, compare_all, compare_methods, lay_out, list_remarks
from fedthe.report.data import Score, SeedClients
from report_pages import make_shown

A = {"0": [50.0, 60.0, 70.0], "1": [40.0, 50.0, None]}
B = {"0": [52.0, 60.0, 74.0], "1": [39.0, 55.0, 90.0]}


def make_run(name, percents, manifests=None, **changes):
    """One method on one test, with these numbers of every client, by seed."""
    means = [sum(known) / len(known) for known in ([x for x in row if x is not None] for row in percents.values())]
    shown = replace(
        make_shown(name=name, methods=("fedthe",), seeds=tuple(map(int, percents)), clients=3),
        tests={"original": "original"},
        scores={"fedthe": {"original": Score(sum(means) / len(means), None, 0.0)}},
        clients={seed: SeedClients([], {"fedthe": {"original": row}}, {}) for seed, row in percents.items()},
    )
    manifests = {seed: f"hash of {seed}" for seed in percents} if manifests is None else manifests
    return replace(shown, provenance={**shown.provenance, "manifests": manifests}, **changes)


def with_config(shown, **settings):
    config = {**shown.provenance["config"], **settings}
    return replace(shown, provenance={**shown.provenance, "config": config})


def test_paired_by_hand():
    comparison = compare(make_run("a", A), make_run("b", B))
    change = comparison.changes["fedthe"]["original"]
    assert change.more == pytest.approx(2.0)  # differences 2, 0, 4 and -1, 5
    assert change.low < 0 < change.more < change.high
    assert change.p_holm == change.p > 0.05  # a single comparison
    assert (change.pairs, change.gained, change.lost) == (5, 3, 1)
    # of clients, then of seeds, as in all tables: 60 and 45; 62 and 47
    assert change.a == pytest.approx(52.5)
    assert change.b == pytest.approx(54.5)
    assert comparison.seeds == ["0", "1"]
    assert list_remarks(comparison)[0].startswith("Paired: both runs have the same clients in seeds 0, 1.")


def test_unpaired_by_hand():
    comparison = compare(make_run("a", A), make_run("b", B, {"0": "others", "1": "others"}))
    change = comparison.changes["fedthe"]["original"]
    assert change.a == pytest.approx((60 + 45) / 2)
    assert change.b == pytest.approx((62 + 184 / 3) / 2)
    assert change.more == pytest.approx(change.b - change.a)
    assert (change.pairs, change.low, change.p_holm) == (0, None, None)
    assert list_remarks(comparison)[0].startswith("Not paired")
    assert lay_out(comparison)[1][0][-1] == "-"


def test_only_seeds_with_the_same_clients_are_compared():
    comparison = compare(make_run("a", A), make_run("b", {**B, "2": [1.0] * 3}, {"0": "hash of 0", "1": "others"}))
    change = comparison.changes["fedthe"]["original"]
    assert change.more == pytest.approx(2.0)
    assert (change.pairs, change.gained, change.lost) == (3, 2, 0)
    assert (comparison.seeds, comparison.apart) == (["0"], ["1", "2"])
    assert "Left out, because in one run only or with different clients: seeds 1, 2." in list_remarks(comparison)[0]


def test_manifests_that_nobody_knows_are_not_the_same():
    comparison = compare(make_run("a", A, {}), make_run("b", B, {}))
    assert comparison.seeds == []
    assert comparison.changes["fedthe"]["original"].pairs == 0


def test_one_client_has_no_interval():
    comparison = compare(make_run("a", {"0": [50.0]}), make_run("b", {"0": [60.0]}))
    assert comparison.changes["fedthe"]["original"].low is None
    assert lay_out(comparison)[1] == [["FedTHE, original", "50.0", "60.0", "+10.0", "-", "-", "1 / 0"]]


def test_a_client_with_nothing_right_counts():
    change = compare(make_run("a", {"0": [0.0, 60.0]}), make_run("b", {"0": [10.0, 0.0]})).changes["fedthe"]["original"]
    assert (change.pairs, change.more, change.gained, change.lost) == (2, -25.0, 1, 1)


def test_the_grid_for_a_terminal():
    head, rows = lay_out(compare(make_run("a", A), make_run("b", B)))
    assert head == ["", "a", "b", "difference", "95 % interval", "p (Holm)", "up / down"]
    change = compare(make_run("a", A), make_run("b", B)).changes["fedthe"]["original"]
    interval = f"{change.low:+.1f} to {change.high:+.1f}"
    assert rows == [["FedTHE, original", "52.5", "54.5", "+2.0", interval, f"{change.p:.3f}", "3 / 1"]]


def test_settings_that_differ():
    a = with_config(make_run("a", A), out="here", hyper={"fedthe": {"alpha": 0.1, "beta": 0.1}}, lr=None)
    b = with_config(make_run("b", B), out="there", hyper={"fedthe": {"alpha": 0.2, "beta": 0.1}}, lr=0.5)
    comparison = compare(a, b)
    assert comparison.settings == {"hyper.fedthe.alpha": (0.1, 0.2), "lr": (None, 0.5)}
    assert "lr: unset in a, 0.5 in b." in list_remarks(comparison)
    assert "No setting differs." not in list_remarks(comparison)
    assert "No setting differs." in list_remarks(compare(a, replace(a, name="c")))
    assert "No setting differs." in list_remarks(compare(a, with_config(replace(a, name="c"), curve=[], keep=())))


def test_what_only_one_has():
    a = make_shown(name="a", methods=("fedavg", "fedthe"), seeds=(0,), clients=2)
    b = make_shown(name="b", methods=("fedthe", "t3a"), seeds=(0,), clients=2)
    b = replace(b, tests={test: name for test, name in b.tests.items() if test != "mixture"})
    comparison = compare(a, b)
    assert list(comparison.methods) == ["fedthe"]
    assert "mixture" not in comparison.tests
    assert comparison.only == (["FedAvg", "mixture"], ["T3A"])
    assert "Only in a: FedAvg, mixture." in list_remarks(comparison)


def test_tests_of_one_name_that_are_not_the_same():
    a, b = make_run("a", A), make_run("b", B, tests={"original": "original (letters)"})
    assert "original is original in a and original (letters) in b." in list_remarks(compare(a, b))


def test_a_run_beside_itself():
    run = make_shown(clients=4)
    comparison = compare(run, run)
    assert comparison.names == ("made-up (1)", "made-up (2)")
    every = [change for row in comparison.changes.values() for change in row.values()]
    assert len(every) == 14 * 6
    assert {(change.more, change.low, change.high, change.p_holm) for change in every} == {(0.0, 0.0, 0.0, 1.0)}
    assert {(change.gained, change.lost) for change in every} == {(0, 0)}


def test_what_failed_in_one_is_not_compared():
    a, b = (make_shown(name=name, methods=("fedavg", "fedthe"), seeds=(0,), clients=2) for name in "ab")
    b = replace(b, scores={**b.scores, "fedthe": {"original": b.scores["fedthe"]["original"]}})
    comparison = compare(a, b)
    assert list(comparison.changes["fedthe"]) == ["original"]
    assert [row[0] for row in lay_out(comparison)[1] if row[0].startswith("FedTHE")] == ["FedTHE, original"]


def test_a_method_that_failed_in_a_seed_is_paired_in_the_others():
    failed = make_run("b", B)
    clients = {**failed.clients, "1": SeedClients([], {}, {})}
    change = compare(make_run("a", A), replace(failed, clients=clients)).changes["fedthe"]["original"]
    assert change.pairs == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"methods": {"t3a": "T3A"}, "scores": {"t3a": {"original": Score(1, None, 1)}}}, "a and b share no method"),
        ({"tests": {"ooc": "ooc"}, "scores": {"fedthe": {"ooc": Score(1, None, 1)}}}, "a and b share no test"),
        ({"scores": {}}, "a and b share no method"),
        (
            {
                "methods": {"t3a": "T3A", "fedthe": "FedTHE"},
                "scores": {"t3a": {"original": Score(1, None, 1)}, "fedthe": {}},
            },
            "a and b share no method that answered",
        ),
    ],
)
def test_nothing_to_compare(changes, words):
    with pytest.raises(InputError, match=words) as raised:
        compare(make_run("a", A), make_run("b", B, **changes))
    assert str(raised.value).endswith(".")
    assert "\n" not in str(raised.value)


def test_two_methods_of_a_run_and_the_other_way_around():
    run = make_shown(methods=("fedavg", "fedthe", "t3a"), clients=5)
    one, other = compare_methods(run, "fedthe", "fedavg"), compare_methods(run, "fedavg", "fedthe")
    for test in run.tests:
        a, b = one.rows[test], other.rows[test]
        assert (a.a, a.b, a.difference) == pytest.approx((b.b, b.a, -b.difference))
        assert (a.low, a.high) == pytest.approx((-b.high, -b.low), abs=1e-4)
        assert (a.higher, a.lower, a.clients, a.seeds) == (b.lower, b.higher, b.clients, 3)
    assert one.rows["natural"].clients == 12  # one client of each seed lacks it
    every = compare_all(run)
    assert {(a, b) for a, others in every.items() for b in others} == {
        ("fedavg", "fedthe"),
        ("fedavg", "t3a"),
        ("fedthe", "t3a"),
    }
    assert every["fedavg"]["fedthe"] == other.rows


def test_a_method_that_is_not_there_is_refused():
    run = make_shown(methods=("fedavg", "fedthe"), clients=2)
    with pytest.raises(InputError, match="has no results of 'fedth'; did you mean"):
        compare_methods(run, "fedth", "fedavg")
    with pytest.raises(InputError, match="cannot be compared with itself"):
        compare_methods(run, "fedavg", "fedavg")
