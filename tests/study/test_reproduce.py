"""`fedthe table`: what a table of the paper needs is run, lands in its record, and stands beside the paper's."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

import fedthe as package
from fedthe.bench.lab import ANSWER_MEMO, ROUND_STACKED
from fedthe.bench.machine import Ceilings, Machine
from fedthe.bench.result import Bench, Line
from fedthe.data import load_dataset
from fedthe.data.imagenet32 import SHARED
from fedthe.errors import InputError
from fedthe.experiment.results import read_results
from fedthe.report.read import check_record
from fedthe.study.bill import Bill, bill_tables
from fedthe.study.reproduce import PAPER_DIGESTS, find_comparable, list_changes, make_record, run_cases, time_samples
from fedthe.study.show import lay_out, lay_out_bills, list_remarks, say_duration
from fedthe.study.tables import OWN_TABLES, find_table, load_tables, pick_tables, plan_cases
from helpers import count_loads

SMALL = {"clients": 3, "rounds": 1, "local_epochs": 1, "samples": 5, "seeds": [0, 1], "train_fraction": 0.5}


def make_record_of(table, cases):
    return make_record(table, run_cases(cases))


@pytest.fixture
def data(tmp_path):
    """Three classes that differ in brightness, and a shift that has two of them."""
    generator = np.random.default_rng(0)
    for name, labels in (("tiny", np.arange(150) % 3), ("Dim", np.arange(40) % 2)):
        noise = generator.integers(0, 90, (len(labels), 16, 16, 3))
        images = (noise + 70 * labels[:, None, None, None]).astype(np.uint8)
        np.savez(tmp_path / f"{name}.npz", images=images, labels=labels)
    return {"dataset": f"npz:{tmp_path / 'tiny.npz'}", "natural": f"npz:{tmp_path / 'Dim.npz'}"}


def test_a_record_holds_what_runs_gave_and_all_they_came_from(data, tmp_path):
    table, out = find_table("main-dir0.1"), str(tmp_path / "runs")
    record = make_record_of(table, plan_cases(table, ["fedthe", "fedavg"], out=out, **data, **SMALL))
    apart = package.run(methods=["fedavg", "fedthe"], out=str(tmp_path / "apart"), dirichlet=0.1, **data, **SMALL)
    assert list(record["rows"]) == ["fedavg", "fedthe"]  # the order of the paper
    for method, cells in record["rows"].items():
        assert list(cells) == ["original", "corrupted", "ooc", "natural", "mixture"]
        for test, (mean, std) in cells.items():
            found = [row for row in apart.rows if (row.method, row.test) == (method, test)]
            by_seed = [np.mean([row.accuracy for row in found if row.seed == seed]) for seed in (0, 1)]
            assert (mean, std) == (pytest.approx(np.mean(by_seed)), pytest.approx(np.std(by_seed, ddof=1)))
    (case,) = record["cases"]
    assert case["config"]["dirichlet"] == 0.1
    assert case["manifests"] == {str(seed): digest for seed, digest in apart.manifests.items()}
    assert len(set(case["manifests"].values())) == 2
    clients = case["clients"]["fedthe"]["ooc"]["1"]
    assert clients == [round(r.accuracy, 3) for r in apart.rows if (r.method, r.test, r.seed) == ("fedthe", "ooc", 1)]
    assert case["ms_per_sample"]["fedavg"] > 0
    assert record["environment"]["device"] == "cpu"
    assert record["names"] == {"natural": "natural (Dim, 2 classes)"}
    assert record["compared"] == []  # it is not CIFAR-10
    for seed, effective in record["effective_classes"].items():
        mixes = [
            each["classes"] for each in json.loads((tmp_path / f"apart/manifest-{seed}.json").read_text())["clients"]
        ]
        shares = [[n / sum(mix) for n in mix if n] for mix in mixes]
        assert effective == pytest.approx(np.mean([np.prod([p**-p for p in each]) for each in shares]))
    assert list(record["effective_classes"]) == ["0", "1"]
    assert case["passes"] == {"fedavg": [1, 0], "fedthe": [1, 0]}
    json.dumps(record)


def test_a_method_of_yours_is_a_row_of_its_own(data, tmp_path, fedthe, monkeypatch):
    """Under the settings of a table, in its record, and read again."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("from fedthe.methods.fedprox import FedProx\n\n\nclass Mine(FedProx): ...\n")
    words = [f"{key}={value}" for key, value in (data | SMALL).items() if key not in ("seeds", "rounds")]
    asked = ("table", "main-dir0.1", *words, "--rounds", "1", "--seeds", "0", "--save", "results")
    said = fedthe(*asked, "--methods", "fedavg,mine.py:Mine").out
    record = check_record(json.loads((tmp_path / "results/main-dir0.1.json").read_text()), tmp_path / "record")
    assert list(record["rows"]) == ["fedavg", "Mine"]
    assert record["cases"][0]["clients"].keys() == {"fedavg", "Mine"}
    assert said.startswith(fedthe("table", "main-dir0.1", "--show", "results").out)
    assert "Effective classes per client: " in said


@pytest.mark.parametrize(
    ("dataset", "natural", "compared"),
    [
        ("cifar10", {"natural": "cifar10.1-v6"}, ["original", "corrupted", "ooc", "natural", "mixture"]),
        ("cifar10:folder", {"natural": "Tiny-ImageNet"}, ["original", "corrupted", "ooc"]),
        ("cifar10", {}, ["original", "corrupted", "ooc"]),
        ("npz:cifar10.npz", {"natural": "cifar10.1-v6"}, []),
    ],
)
def test_only_what_was_measured_on_the_papers_data_is_compared(dataset, natural, compared):
    class Results:
        pools = natural
        digests: ClassVar = {"pool": PAPER_DIGESTS["cifar10"]}

    class Other(Results):
        digests: ClassVar = {"pool": "of noise under its name"}

    class Older(Results):
        digests: ClassVar = {}

    for name in ("main-dir0.1", "ablation"):
        table = find_table(name)
        (case,) = plan_cases(table, dataset=dataset)
        columns = [column for column in table.columns if column != "natural" or natural]
        found = find_comparable(table, [(case, Results())], columns)
        assert [column for column in found if column != "average_over_tests"] == compared
        assert ("average_over_tests" in found) == (name == "ablation" and len(compared) == 5)
        for other in (Other(), Older()):
            assert find_comparable(table, [(case, other)], columns) == []


@pytest.mark.data
def test_the_digest_is_that_of_the_published_images(cifar10_home):
    assert load_dataset("cifar10", natural="none", home=cifar10_home).pool.digest == PAPER_DIGESTS["cifar10"]


def test_noise_called_cifar10_is_not_compared_with_the_paper(fedthe, home, tmp_path, monkeypatch):
    from written_data import write_cifar, write_cifar_101

    write_cifar(home / "data" / "cifar10", rows=80)
    write_cifar_101(home / "data" / "cifar10", "v6", 60)
    monkeypatch.chdir(tmp_path)
    words = ["clients=3", "samples=2", "local_epochs=1", "rounds=1", "seeds=0", "methods=fedavg"]
    record = json.loads(fedthe("table", "main-dir1", *words, "--json").out)
    assert record["compared"] == []
    assert "Not the paper's data, so nothing is compared." in list_remarks(record)
    assert read_results(tmp_path / "runs" / "paper").digests["pool"] != PAPER_DIGESTS["cifar10"]


def test_settings_that_are_not_the_papers_are_named(monkeypatch):
    table = find_table("main-dir0.1")
    whole = {"seeds": [0, 1, 2], "out": "elsewhere", "device": "cpu", "keep": [3], "natural": "none"}
    assert list_changes(table, [(case, None) for case in plan_cases(table, ["fedthe"], **whole)]) == {}
    for more in (range(8), [5, 6, 7]):  # as many as the paper has, or more
        assert list_changes(table, [(case, None) for case in plan_cases(table, seeds=list(more))]) == {}
    changed = list_changes(table, [(case, None) for case in plan_cases(table, rounds=3, seeds=[0], net="cct4")])
    assert changed == {"seeds": [(0,), (0, 1, 2)], "net": ["cct4", "cnn"], "rounds": [3, 100]}
    changed = list_changes(table, [(case, None) for case in plan_cases(table, hyper={"fedthe": {"alpha": 0.2}})])
    assert changed == {"hyper.fedthe.alpha": [0.2, None]}
    own = {"streams": {"mine": "own 10, ooc 5"}, "hyper": {"em": {"steps": 3}}}
    changed = list_changes(table, [(case, None) for case in plan_cases(table, ["em"], **own)])
    assert changed == {"hyper.em.steps": [3, None], "streams.mine": ["own 10, ooc 5", None]}
    for dataset, named in (("glyphs", {"dataset": ["glyphs", "cifar10"]}), ("cifar10:elsewhere", {})):
        assert list_changes(table, [(case, None) for case in plan_cases(table, dataset=dataset)]) == named
    # what a table plans and a run leaves out
    usual = [(case, None) for case in plan_cases(table)]
    monkeypatch.setattr("fedthe.study.reproduce.plan_cases", lambda _: plan_cases(table, ["em"], **own))
    assert list_changes(table, usual) == {"hyper.em.steps": [None, 3], "streams.mine": [None, "own 10, ooc 5"]}


def test_ours_stands_over_the_papers_and_the_difference():
    table = find_table("main-dir0.1")
    record = {
        "columns": ["original", "natural"],
        "rows": {"fedthe": {"original": [86.04, 3.1], "natural": [70.0, 1.0]}},
        "compared": ["original"],
        "changed": {"rounds": [3, 100], "seeds": [[0, 1], [0, 1, 2]]},
        "names": {"natural": "natural (Tiny-ImageNet, 7 classes)"},
        "cases": [{"config": {"seeds": [0, 1]}, "failures": {"ditto, seed 1": "it diverged"}}],
    }
    assert table.rows["fedthe"]["original"] == (89.58, 0.45)
    head, rows = lay_out(table, record)
    assert head == ["", "original", "natural"]
    assert rows == [["fedthe", "86.0 ±3.1\n89.6 -3.5", "70.0 ±1.0"]]
    assert list_remarks(record) == [
        "natural is Tiny-ImageNet, 7 classes.",
        "Not the paper's data, so not compared: natural.",
        "Not the paper's settings: rounds 3 (100), seeds 0,1 (0,1,2).",
        "failed: ditto, seed 1: it diverged",
    ]


def test_the_bill_counts_shared_trainings_once():
    tables = load_tables()
    bills = bill_tables(pick_tables([]), None)
    main = bills["main-dir0.1"]
    assert (main.trainings, main.rounds) == (8 * 8, 8 * 8 * 100)  # 14 methods, 8 trainings, 8 seeds
    # apfl and ttt_ft send as fedavg does, fedrod as fedthe: five times five local epochs, eight times a personal one
    assert main.images == 8 * 100 * 50_000 * 0.6 * (5 * 5 + 8 * 1)
    assert main.samples == 8 * 14 * 6 * 10_000
    assert bills["corrupted-ooc-cnn-dir0.1"] == Bill(seconds=None)  # the same runs
    assert bills["ablation"].trainings == 3 * 2  # without balanced softmax, and FedAvg with it
    assert bills["severity-mixture-dir1"].samples == 0  # severity-corrupted-dir1 asked for both
    assert bills["participation0.1-dir0.1"].images == pytest.approx(3 * 100 * 50_000 * 0.6 * (2 * 5 + 3 * 1) * 0.1)
    later = bill_tables([(tables["main-dir0.1"], ["fedthe"]), (tables["main-dir0.1"], ["fedrod", "fedthe"])], None)
    assert (
        later["main-dir0.1"].images == 8 * 100 * 50_000 * 0.6 * 6
    )  # what fedthe sent is not there for fedrod any more
    alone = bill_tables([(tables["ablation"], ["ablation_9"])], None, seeds=[0], rounds=10, samples=3)["ablation"]
    assert (alone.trainings, alone.rounds, alone.samples) == (1, 10, 6 * 20 * 3)


def test_the_bill_is_in_seconds_where_the_machine_was_measured():
    rows = tuple(Line(name, unit, value) for name, unit, value in ((ROUND_STACKED, "s", 2.0), (ANSWER_MEMO, "ms", 5.0)))
    rows += (Line("round, 1 run", "s", 3.0),)
    machine, ceilings = Machine("x", "cpu", "2.6", 1), Ceilings(1.0, "x", 1.0)
    bench = Bench(machine, "stack", "float32", False, ceilings, rows, 1.0)
    table = find_table("test-size1-dir0.1")  # FedTHE alone
    (bill,) = bill_tables([(table, [])], bench, seeds=[0], tests=["original"]).values()
    assert bill.seconds == pytest.approx(100 * 2.0 + 10_000 * 5.0 / 1000 / (3 * 32 * 3 + 1))
    assert lay_out_bills({"a": bill})[1] == [["a", "1", "100", "18 M", "10 k", "3.3 min"]]
    assert [say_duration(s) for s in (59, 95, 7200, 200000)] == ["59 s", "1.6 min", "2.0 h", "2.3 days"]


def test_the_command_runs_lists_plans_and_resumes(fedthe, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [f"{key}={value}" for key, value in (data | SMALL).items() if key not in ("seeds", "rounds")]
    asked = ("table", "main-dir0.1", *words, "--methods", "fedthe,fedavg_ft", "--rounds", "1", "--seeds", "0")
    said = fedthe(*asked, "--save", "results").out
    assert "Not the paper's data, so nothing is compared." in said
    assert "fedavg_ft" in said
    assert "memo_p" not in said
    assert "main-dir0.1 on tiny.npz" in said
    assert "CIFAR10" not in said
    assert re.search(r"Not the paper's settings: dataset npz:\S+tiny\.npz\s+\(cifar10\)", said)
    record = json.loads((tmp_path / "results" / "main-dir0.1.json").read_text())
    assert json.loads(fedthe(*asked, "--json").out)["rows"] == record["rows"]
    shown = fedthe("table", "main-dir0.1", "--show", "results").out
    assert said == f"{shown}The report is results/main-dir0.1.html: open it in a browser.\n\n"
    assert "fedavg_ft" in (tmp_path / "results" / "main-dir0.1.html").read_text(encoding="utf-8")
    assert fedthe("table", "--all", "--show", "results").out == shown
    assert "results/main-dir1.json does not exist" in fedthe("table", "main-dir1", "--show", "results", exits=2).err
    (tmp_path / "results" / "main-dir1.json").write_text("{}")
    assert "results/main-dir1.json is not sealed" in fedthe("table", "main-dir1", "--show", "results", exits=2).err
    trained = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs/paper/trainings").iterdir()}
    other = fedthe("table", "corrupted-ooc-cnn-dir0.1", *asked[2:])
    assert "corr. ooc" in other.out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs/paper/trainings").iterdir()} == trained
    listed = json.loads(fedthe("table", "--json").out)
    assert len(listed) == 37 + len(OWN_TABLES)
    assert "main-dir0.1" in fedthe("table").out
    plan = json.loads(fedthe("table", "--all", "--plan", "--json").out)
    assert list(plan) == list(listed)[:37]
    assert "fedthe bench --remember" in fedthe("table", "main-dir1", "--plan").out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["main-dir0.2"], "did you mean main-dir0.1?"),
        (["main-dir0.1", "--all"], "not both"),
        (["rounds=3"], "name a table"),
        (["--seeds", "0"], "name a table"),
        (["main-dir0.1", "methods=fedte"], "did you mean fedthe?"),
        (["severity-mixture-dir1", "severity=2"], "leave severity and tests out"),
        (["--all", "dataset=npz:nofile.npz"], "nofile.npz"),
        (["main-dir0.1", "--methods", "fedte"], "did you mean fedthe?"),
        (["main-dir0.1", "--seeds", "a"], "seeds must be a whole number"),
        (["main-dir0.1", "round=3"], "did you mean rounds?"),
    ],
)
def test_bad_words_are_refused(words, says, fedthe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = fedthe("table", *words, exits=2).err
    assert says in said
    assert said.count("\n") == 1
    assert not list(tmp_path.glob("runs"))


def test_a_table_of_which_nothing_could_be_measured_is_refused(data, tmp_path):
    table = find_table("main-dir0.1")
    cases = plan_cases(table, ["fedavg"], out=str(tmp_path / "r"), lr=1e30, **data, **SMALL)
    with pytest.raises(InputError, match=r"nothing of main-dir0\.1 could be measured: .* can be computed with"):
        make_record_of(table, cases)


def test_trainings_are_those_that_the_bill_counts(data, tmp_path, monkeypatch):
    """A part of the test rows and another severity train nothing anew; a part of the training rows does."""
    out, loads = tmp_path / "runs", count_loads(monkeypatch, "npz")
    trained = []
    for name, more in (("test-size1-dir1", {}), ("test-size0.5-dir1", {}), ("severity-mixture-dir1", {"samples": 3})):
        table = find_table(name)
        make_record_of(table, plan_cases(table, ["fedthe"], out=str(out), **data, **SMALL | more))
        trained.append(len(list(out.glob("trainings/*.safetensors"))))
    assert trained == [2, 2, 2]  # of two seeds
    assert len(loads) == 3  # one per table, also for the five severities of the last
    names = ["test-size1-dir1", "test-size0.5-dir1", "severity-mixture-dir1", "train-size0.5-dir1"]
    bills = bill_tables([(find_table(name), ["fedthe"]) for name in names], None, seeds=[0, 1])
    assert [bill.trainings for bill in bills.values()] == [2, 0, 0, 2]


def test_an_imagenet_table_runs_on_files_in_its_format(fedthe, home, tmp_path, monkeypatch):
    """Noise in the layout of ImageNet-32 and its shifts: all columns are there, and compared with the paper's."""
    from written_data import write_imagenet32, write_picture

    path = home / "data" / "imagenet32"
    kept = write_imagenet32(path)
    for wnid in kept:
        for shift in ("imagenet-a", "imagenet-r"):
            write_picture(path / shift / wnid / "a.jpg", (200, 30, 30))
    for position in SHARED:
        write_picture(path / "imagenetv2-matched-frequency-format-val" / str(position) / "a.jpg", (30, 200, 30))
    monkeypatch.chdir(tmp_path)
    words = ["clients=3", "samples=2", "local_epochs=1", "train_fraction=0.01", "width=1"]
    asked = ["table", "imagenet-dir1", *words, "--rounds", "1", "--seeds", "0", "--methods", "fedthe,fedavg_ft"]
    record = json.loads(fedthe(*asked, "--json").out)
    columns = ["original", "imagenet_a", "imagenet_v2", "imagenet_r", "mixture", "average_over_tests"]
    assert record["columns"] == record["compared"] == columns
    assert list(record["rows"]["fedthe"]) == columns
    assert record["unchecked"] == ["imagenet32", "imagenet-a", "imagenet-r", "imagenet-v2"]
    assert any("content was not checked" in remark for remark in list_remarks(record))
    assert record["cases"][0]["config"]["net"] == "resnet20_gn"


def test_all_tables_that_have_a_method_and_whose_data_is_there(fedthe, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [table.id for table, _ in pick_tables(["ablation_11"])] == ["ablation"]
    assert len(pick_tables(["fedthe", "ditto"])) == 36  # all but the ablation, whose rows have other names
    with pytest.raises(InputError, match="no table has a row 'fedte'; did you mean fedthe"):
        pick_tables(["fedte"])
    said = fedthe("table", "--all", "--methods", "ablation_11")
    assert said.err == "fedthe: skipping ablation: cifar10 is not available.\n"
    words = [f"{key}={value}" for key, value in (data | SMALL).items() if key not in ("seeds", "rounds")]
    said = fedthe("table", "--all", *words, "--rounds", "1", "--seeds", "0", "--methods", "gma", "--save", "r")
    tables = ("main-dir0.1", "main-dir1", "main-dir10")
    assert {path.name for path in (tmp_path / "r").iterdir()} == {
        f"{id}.{kind}" for id in tables for kind in ("json", "html")
    }


def test_the_command_draws_figures(fedthe, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [f"{key}={value}" for key, value in (data | SMALL).items() if key != "seeds"]
    said = fedthe("figure", "weights", *words, "--seeds", "0")
    assert said.out == "written to figures/weights.png, with its numbers in weights.json\n"
    first = (tmp_path / "figures/weights.png").read_bytes()
    (tmp_path / "figures/weights.png").unlink()
    fedthe("figure", "weights", "--redraw")
    assert (tmp_path / "figures/weights.png").read_bytes() == first
    assert json.loads((tmp_path / "figures/weights.json").read_text())["config"]["seeds"] == [0]
    assert "leave out either" in fedthe("figure", "weights", "--redraw", "--seeds", "0", exits=2).err
    assert "does not hold alpha-beta" in fedthe("figure", "alpha-beta", "--redraw", exits=2).err
    assert "did you mean weights?" in fedthe("figure", "weight", exits=2).err
    assert "name a figure" in fedthe("figure", "--redraw", exits=2).err
    (tmp_path / "figures/leak.json").write_text('{"id": "leak"}')
    assert "figures/leak.json is not sealed" in fedthe("figure", "leak", "--redraw", exits=2).err
    assert "at least one other" in fedthe("figure", "gains", *words, "methods=fedavg_ft", exits=2).err
    said = fedthe("figure", "leak", *words, "seeds=0", "methods=fedavg", "lr=1e30", exits=1).err
    assert "more than can be computed with" in said.splitlines()[-1]
    assert "Traceback" not in said
    assert "interpolation-heads" in fedthe("figure").out


def test_a_table_of_ours_runs_in_the_papers_way_and_is_compared_with_nothing(data, tmp_path):
    table = find_table("tiny-imagenet-20")
    (case,) = plan_cases(table)
    config = case.config
    assert (config.net, config.width, config.batch, config.size) == ("resnet20_gn", 4, 128, 32)
    assert (config.dirichlet, config.clients, config.rounds) == (1.0, 20, 100)
    small = SMALL | {"out": str(tmp_path / "runs"), "width": 1, "size": 16, "train_fraction": 0.1, "natural": "none"}
    cases = plan_cases(table, ["fedthe"], dataset=data["dataset"], **small)
    record = make_record_of(table, cases)
    assert record["columns"] == ["original", "corrupted", "ooc", "mixture"]
    assert record["compared"] == []
    assert lay_out(table, record)[1][0][0] == "fedthe"


@pytest.mark.parametrize("asked", [("table", "main-dir0.1"), ("figure", "curves-dir0.1"), ("table", "--all")])
def test_days_of_work_are_announced_and_not_started(asked, fedthe, home, tmp_path, monkeypatch):
    from written_data import write_cifar

    write_cifar(home / "data" / "cifar10")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    said = fedthe(*asked, "device=cpu", exits=2).err
    assert re.search(r"takes about [0-9.]+ (h|days) on this machine", said)
    assert "add --yes" in said
    assert said.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
    # what it proposes instead is short enough to start, and is refused for another reason: there is too little data
    words = said.strip().removesuffix(".").partition("smaller: ")[2].split()
    if "--all" not in asked:
        assert "too few for 20 clients" in fedthe(*asked, "device=cpu", *words, exits=2).err
    assert "too few for" in fedthe(*asked, "device=cpu", "--yes", exits=2).err


def test_a_remembered_bench_decides_what_takes_long(home, monkeypatch):
    from fedthe.bench.result import find_baseline
    from fedthe.store import write_json
    from fedthe.study import ask

    machine = ask.describe_machine(torch.device("cpu"))
    guessed = ask.find_bench("cpu")
    fast = replace(guessed, machine=machine, rows=tuple(replace(row, value=1e-6) for row in guessed.rows))
    write_json(find_baseline(machine), fast.as_dict())
    assert [row.value for row in ask.find_bench("cpu").rows] == [1e-6] * len(guessed.rows)
    find_baseline(machine).write_text("{}")
    assert ask.find_bench("cpu") == guessed


def test_milliseconds_per_sample_are_weighted_by_all_samples():
    def row(ms, samples, unknown=0):
        return SimpleNamespace(method="a", ms_per_sample=ms, samples=samples, unknown=unknown)

    assert time_samples(SimpleNamespace(rows=[row(1.0, 30), row(5.0, 10)])) == {"a": pytest.approx(2.0)}
    assert time_samples(SimpleNamespace(rows=[row(1.0, 10), row(3.0, 10, unknown=30)])) == {"a": pytest.approx(2.6)}
