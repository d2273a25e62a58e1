"""What pages say of results is what results say."""

import importlib
import importlib.util
import json
import re

import pytest

import fedthe
from fedthe.study.tables import find_table
from helpers import ROOT

RECORDS = sorted((ROOT / "results").glob("*.json"))


def test_the_pages_of_results_show_what_results_hold():
    spec = importlib.util.spec_from_file_location("fill", ROOT / "tools" / "fill_reproduction.py")
    fill = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fill)
    pages = [path.read_text(encoding="utf-8") for path in fill.PAGES]
    assert [min(10, len(fill.MARKED.findall(page))) for page in pages] == [2, 10, 5, 1, 1]
    for page in pages:
        assert page == fill.fill(page), "run python tools/fill_reproduction.py"


def test_the_code_of_the_results_page_runs(data, tmp_path, monkeypatch):
    """Every block, in order, in a folder that has a run."""
    monkeypatch.chdir(tmp_path)
    settings = {"clients": 2, "rounds": 1, "local_epochs": 1, "natural": "none", "samples": 4, "engine": "loop"}
    fedthe.run(dataset=data, methods=["fedavg_ft", "fedthe"], out="runs/quick", **settings)
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 4
    known = {}
    for block in blocks:
        exec(block, known)
    assert (tmp_path / "report.html").exists()
    columns = set(known["samples"])
    named = {
        name for line in re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", line)
    }
    assert named == columns  # the table of columns


def test_the_architecture_page_names_files_that_exist():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(src/[\w./]+)`", page))
    assert len(named) > 25
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
    shown = re.findall(r"\]\((img/[\w.]+)\)", page)
    assert shown
    assert all((ROOT / "docs" / path).is_file() for path in shown)
    assert len(page.splitlines()) < 80  # one page


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_agrees_with_its_clients_and_says_where_it_comes_from(path):
    """The means and deviations again, from the clients' numbers; and no natural shift under the paper's name."""
    record = json.loads(path.read_text(encoding="utf-8"))
    table = find_table(record["id"])
    assert path.stem == record["id"]
    # the first records have TTT in the place of the paper's variant of it
    rows = {"ttt_ft" if row == "ttt" and row not in table.rows else row for row in record["rows"]}
    assert rows == set(table.rows)
    for case in record["cases"]:
        assert case["failures"] == {}
        assert sorted(case["manifests"]) == [str(seed) for seed in case["config"]["seeds"]]
        assert case["config"]["rounds"] == table.setting["rounds"]
        for column, test in case["columns"].items():
            for method, row in zip(case["config"]["methods"], record["rows"], strict=True):
                if test not in case["clients"][method]:
                    continue
                seeds = [
                    sum(known) / len(known)
                    for clients in case["clients"][method][test].values()
                    for known in [[each for each in clients if each is not None]]
                ]
                mean = sum(seeds) / len(seeds)
                degrees = len(seeds) - record.get("ddof", 0)  # the first records divide by n
                std = (sum((each - mean) ** 2 for each in seeds) / degrees) ** 0.5
                assert record["rows"][row][column] == pytest.approx([mean, std], abs=1e-2)
    if "natural" in record["columns"] and "natural" not in record["compared"]:
        assert record["names"]["natural"] == "natural (Tiny-ImageNet, 7 classes)"
        assert "mixture" not in record["compared"]


def test_the_api_reference_names_what_exists_and_all_that_is_public():
    page = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
    named = re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)
    found = []
    for path in named:
        module, _, name = path.rpartition(".")
        found.append(getattr(importlib.import_module(module), name))
    tables = {"DATASETS", "METHODS", "NETS"}  # named on pages of their own
    missing = [name for name in fedthe.__all__ if name not in tables and getattr(fedthe, name) not in found]
    assert missing == []


def run_page(name, **instead):
    """The code of a page, in order, in one namespace, with some of its text replaced."""
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    space: dict = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        for old, new in instead.items():
            block = block.replace(old, new)
        exec(compile(block, name, "exec"), space)
    return space


def test_the_page_on_deployment_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = run_page("deploy.md", **{"rounds=3": "rounds=1"})
    assert made["answer"].status == "calm"
    assert made["p"].position == 10
    assert len(made["answers"]) == 9
    assert made["other"].position == 0
    assert (tmp_path / "bundle" / "card.md").exists()


def test_the_page_on_your_own_things_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = {"rounds=10": "rounds=1", "rounds=5": "rounds=1", "seeds=[0, 1, 2]": "seeds=[0, 1]", "epochs=2": "epochs=1"}
    made = run_page("own.md", **small)
    results = made["results"]
    assert not results.failures
    assert results.methods == ["fedavg", "fedavg_ft", "SlowPer", "fedthe", "fedthe(alpha=0.3)", "fedthe_prior"]
    assert results.tests == ["original", "noisy", "ooc", "mixture"]
    assert len({each["seed"] for each in results.trainings.values()}) == 2
    assert len(results.trainings) == 2 * 3  # FedAvg's serves fine-tuning, FedTHE's its variant and the new predictor
    assert (tmp_path / "own.html").exists()
    assert (tmp_path / "alpha.png").exists()
    made["fed"].save("sensors.npz")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/own.md").read_text(encoding="utf-8"), re.DOTALL)
    code = [block for block in blocks if "class SensorNet" in block or "class SlowPer" in block]
    made_net = "def make_net(classes, shape):\n    return fedthe.wrap_module(SensorNet, head='fc')\n"
    (tmp_path / "mine.py").write_text("import fedthe\n" + "".join(code) + made_net, encoding="utf-8")
    settings = {"net": "mine.py:make_net", "methods": ["mine.py:SlowPer", "fedthe"], "rounds": 1, "local_epochs": 1}
    again = fedthe.run(dataset="npz:sensors.npz", lr=0.1, out="again", seeds=[0, 1], **settings)
    rows = {(row.method, row.seed, row.test, row.client): row.right for row in results.rows}
    assert all(rows[row.method, row.seed, row.test, row.client] == row.right for row in again.rows)


def test_the_code_of_the_page_on_streams_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = run_page("streams.md", **{"rounds=10": "rounds=1, engine='loop'"})
    assert not made["results"].failures
    assert (tmp_path / "commute.html").exists()
    page = (ROOT / "docs/streams.md").read_text(encoding="utf-8")
    named = {
        name for line in re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE) for name in re.findall(r"`(.+?)`", line)
    }
    phases = ("own", "ooc")
    known = {name.replace(" P", f" {phase}") for name in named for phase in phases}
    ends = {f"{name}_{end}" for name in ("accuracy", "worst_window", "forgetting") for end in ("low", "high")}
    assert set(made["table"]) == (known | ends | {"method"}) - {"auroc", "fpr95"}  # there is no open set
    assert set(made["curve"]) == {"method", "position", "accuracy", "std", "phase"}


def test_the_code_of_the_page_on_data_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = run_page("data.md")
    assert made["fed"].class_counts.shape == (3, 3)
    assert (tmp_path / "steps.npz").exists()


def test_the_results_page_has_the_measured_rates_of_false_claims():
    rows = json.loads((ROOT / "benchmarks/false_claims.json").read_text(encoding="utf-8"))["rows"]
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    for seeds in (3, 5, 8):
        rates = [round(100 * row["any p (Holm) < 0.05"]) for row in rows if row["seeds"] == seeds]
        assert f"| {seeds} | {' | '.join(map(str, rates))} |" in page
