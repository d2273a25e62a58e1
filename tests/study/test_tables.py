"""The paper's tables: every one can be planned, and what comes back lands in the right cell."""

from dataclasses import replace

import numpy as np
import pytest

from fedthe.data.plan import Settings, build
from fedthe.errors import InputError
from fedthe.methods import METHODS
from fedthe.methods.make import make_methods, methods_for
from fedthe.nets.cnn import CNN
from fedthe.nets.make import make_net
from fedthe.study.reproduce import restate_deviations
from fedthe.study.show import lay_out
from fedthe.study.tables import (
    AVERAGE,
    NEED_NORMS,
    OWN_TABLES,
    PAPERS_MAIN,
    fill_table,
    find_table,
    load_tables,
    method_of,
    plan_cases,
    title_table,
)


def test_all_37_tables_are_there_and_can_be_planned():
    assert len(load_tables()) == 37
    for table in load_tables().values():
        for case in plan_cases(table):
            make_methods(case.config, make_net(case.config, 10, (3, 32, 32)))  # every row is a method
            many = table.id.startswith("main-") or table.id in (
                "corrupted-ooc-cnn-dir0.1",
                "corrupted-ooc-cnn-dir1",
            )
            assert case.config.seeds == tuple(range(8 if many else 3))
            assert case.config.dirichlet == table.setting["dirichlet"]
            assert case.config.clients == table.setting["clients"]
            assert case.config.rounds == table.setting["rounds"]
            assert case.config.participation == table.setting["participation"]
            assert case.config.personal_epochs == table.setting.get("personal_epochs", 1)
        assert {column for case in plan_cases(table) for column in case.columns} == set(table.tests)


def test_main_tables_and_others_have_every_method_once_between_them():
    assert set(PAPERS_MAIN) == find_table("main-dir0.1").rows.keys() == find_table("main-dir1").rows.keys()
    main, others = find_table("main-dir0.1"), find_table("others-dir0.1")
    assert {*main.rows, *others.rows} | {*NEED_NORMS} == METHODS.keys()
    assert set(methods_for(CNN(10))) == METHODS.keys() - set(NEED_NORMS)
    assert not main.rows.keys() & others.rows.keys()
    (one,), (other,) = plan_cases(main), plan_cases(others)
    assert other.config == replace(one.config, methods=other.config.methods)  # so they make one leaderboard
    assert other.columns == one.columns
    make_methods(other.config, make_net(other.config, 10, (3, 32, 32)))
    assert {"term", "per_fedavg", "tsa", "ttt"} <= OWN_TABLES["others-dir0.1"].rows.keys()


def test_methods_that_adapt_norm_layers_are_measured_beside_resnet():
    net, others = find_table("arch-resnet20gn"), find_table("others-resnet20gn")
    assert {*NEED_NORMS} <= others.rows.keys()
    assert not net.rows.keys() & others.rows.keys()
    (one,), (other,) = plan_cases(net), plan_cases(others)
    assert other.config == replace(one.config, methods=other.config.methods)  # so they make one leaderboard
    made = make_methods(other.config, make_net(other.config, 10, (3, 32, 32)))
    trained = make_methods(one.config, make_net(one.config, 10, (3, 32, 32)))
    assert {method.training for method in made.values()} <= {method.training for method in trained.values()}


def test_settings_of_the_paper_reach_the_config():
    (case,) = plan_cases(find_table("imagenet-dir1"))
    config = case.config
    assert (config.net, config.width, config.batch, config.rounds) == ("resnet20_gn", 4, 128, 300)
    (case,) = plan_cases(find_table("train-size0.5-dir1"))
    assert (case.config.train_fraction, case.config.test_fraction) == (0.5, 1.0)
    cases = plan_cases(find_table("severity-mixture-dir0.1"), ["fedthe"], rounds=3)
    assert [case.config.severity for case in cases] == [1, 2, 3, 4, 5]
    assert {case.config.methods for case in cases} == {("fedthe",)}
    assert {case.config.rounds for case in cases} == {3}
    assert [case.columns for case in cases] == [{f"severity{i}": "mixture"} for i in range(1, 6)]


def test_the_paper_is_kept_as_printed():
    rows = find_table("main-dir0.1").rows
    assert rows["fedthe"]["ooc"][0] > rows["fedavg_ft"]["ooc"][0] + 20
    assert rows["fedavg"]["original"] == (64.25, 1.42)
    assert method_of("(9) (8) with SLW = fedthe") == "ablation_9"
    assert method_of("fedthe") == "fedthe"


def test_one_seed_has_no_deviation_but_an_average_over_tests_has():
    table = find_table("ablation")
    row = next(iter(table.rows))
    record = {
        "columns": ["ooc", AVERAGE],
        "compared": ["ooc"],
        "names": {},
        "rows": {row: {"ooc": [30.0, 0.0], AVERAGE: [60.0, 9.0]}},  # as of earlier versions, with n
    }
    for clients, shown in [({"0": [30.0]}, "30.0"), ({"0": [29.0, None], "1": [30.0, 32.0]}, "30.0 ±1.4")]:
        case = {
            "config": {"seeds": list(range(len(clients)))},
            "columns": {"ooc": "ooc"},
            "clients": {method_of(row): {"ooc": clients}},
        }
        _, [[_, ooc, average]] = lay_out(table, restate_deviations(record | {"cases": [case]}))
        assert (ooc.splitlines()[0], average) == (shown, "60.0 ±9.0")


def test_cells_come_from_the_right_case_and_averages_are_over_tests():
    table = find_table("ablation")
    (case,) = plan_cases(table, ["ablation_9"])
    scores = {test: (float(i), 0.5) for i, test in enumerate(table.tests)}
    filled = fill_table(table, [(case, {"ablation_9": scores})])
    assert list(filled) == ["(9) (8) with SLW = fedthe"]
    assert filled["(9) (8) with SLW = fedthe"][AVERAGE] == (2.0, pytest.approx(np.std(range(5), ddof=1)))
    table = find_table("severity-corrupted-dir1")
    cases = plan_cases(table, ["fedthe"])
    found = [(case, {"fedthe": {"corrupted": (float(i), 0.0), "mixture": (-1.0, 0.0)}}) for i, case in enumerate(cases)]
    assert [cell[0] for cell in fill_table(table, found)["fedthe"].values()] == [0, 1, 2, 3, 4]


def test_unknown_tables_and_rows_are_refused():
    with pytest.raises(InputError, match=r"did you mean main-dir0\.1"):
        find_table("main-dir0.2")
    for wrong in ("diito", "fedte(alpha=0.2)"):
        with pytest.raises(
            InputError, match=r"has no row .*, and there is no such method; did you mean (ditto|fedthe)"
        ):
            plan_cases(find_table("participation0.1-dir0.1"), [wrong])


def test_any_method_of_the_package_can_be_a_further_row():
    for id, methods in (
        ("main-dir0.1", ["fedthe", "fedthe_regime"]),
        ("open-set", ["ditto", "fedthe(alpha=0.2)"]),
        ("ablation", ["(9) (8) with SLW = fedthe", "fedthe", "regime_memo", "mine.py:Mine"]),
    ):
        table = find_table(id)
        cases = plan_cases(table, methods)
        assert list(cases[0].config.methods) == [method_of(row) for row in methods]
        scores = {name: {"original": (50.0, 1.0)} for name in cases[0].config.specs}
        assert list(fill_table(table, [(cases[0], scores)])) == [row.removeprefix("mine.py:") for row in methods]


@pytest.mark.parametrize(
    ("id", "settings", "title"),
    [
        ("main-dir0.1", {}, "CNN on CIFAR10, Dir(0.1)"),
        ("main-dir0.1", {"dataset": "cifar10:elsewhere", "rounds": 3}, "CNN on CIFAR10, Dir(0.1)"),
        ("main-dir0.1", {"dataset": "glyphs"}, "main-dir0.1 on glyphs"),
        ("main-dir0.1", {"dataset": "npz:a/b/mine.npz"}, "main-dir0.1 on mine.npz"),
        ("open-set", {"dataset": "glyphs", "unknown": "4"}, "open-set on glyphs without class 4"),
        ("open-set", {"unknown": "cat"}, "open-set on cifar10 without class cat"),
    ],
)
def test_a_title_names_the_data_that_the_table_ran_on(id, settings, title):
    table = find_table(id)
    assert title_table(table, plan_cases(table, **settings)[0].config) == title


def test_fractions_cut_training_and_test_rows_and_nothing_else(dataset):
    whole, less = (
        build(dataset, Settings(clients=5)),
        build(dataset, Settings(5, train_fraction=0.5, test_fraction=0.75)),
    )
    for a, b in zip(whole.clients, less.clients, strict=True):
        assert np.array_equal(b.train, a.train[: round(len(a.train) / 2)])
        assert np.array_equal(b.test, a.test[: round(0.75 * len(a.test))])
        assert np.array_equal(a.val, b.val)
    assert [len(stream) for stream in less.tests["ooc"]] == [len(split.test) for split in less.clients]
    assert whole.training_hash != less.training_hash
    assert "train_fraction" not in whole.manifest["settings"]
    assert any("0.75" in note for note in less.notes)
    with pytest.raises(InputError, match="train_fraction must be above 0"):
        Settings(train_fraction=0)


def test_averages_deviate_as_the_papers_do():
    """Its ± of an average is the deviation of a sample of tests: all ImageNet rows agree, and all but two others."""
    for name, agree in (("imagenet-dir1", 7), ("imagenet-dir0.1", 7), ("ablation", 14)):
        table = find_table(name)
        found = 0
        for row in table.rows:
            means = [table.rows[row][test][0] for test in table.tests]
            found += abs(np.std(means, ddof=1) - table.rows[row][AVERAGE][1]) < 0.06
        assert found == agree


def test_severities_are_not_to_be_changed():
    with pytest.raises(InputError, match="leave severity and tests out"):
        plan_cases(find_table("severity-mixture-dir1"), severity=3)
