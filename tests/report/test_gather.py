"""What a report shows is what a run measured: from its files, recomputed here from the samples."""

import base64
import io
import json
import shutil
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import fedthe
from fedthe import records, store
from fedthe.config import make_config
from fedthe.data import load_dataset
from fedthe.data.plan import build
from fedthe.errors import Failed, InputError
from fedthe.experiment.results import read_results
from fedthe.experiment.work import Work
from fedthe.progress.file import read_progress
from fedthe.report.data import BINS
from fedthe.report.formats import write_latex, write_markdown
from fedthe.report.gather import find_paper, gather, show_record, show_results, write_call
from fedthe.report.page import render
from fedthe.study.reproduce import PAPER_DIGESTS, make_record, run_cases
from fedthe.study.show import lay_out
from fedthe.study.show import write_markdown as write_table
from fedthe.study.tables import find_table, plan_cases
from helpers import RESULTS

SMALL = {
    "dataset": "glyphs",
    "size": 24,
    "clients": 4,
    "local_epochs": 1,
    "batch": 16,
    "samples": 7,
    "flip": False,
    "crop": 2,
    "lr": 0.1,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "small"
    return fedthe.run(
        **SMALL,
        name="small",
        out=folder,
        rounds=3,
        curve=[1, 2],
        seeds=[0, 1],
        methods=["fedavg", "fedavg_ft", "fedthe", "tsa"],
    )


@pytest.fixture(scope="module")
def shown(results):
    return gather([results.folder]).shown[0]


def load_samples(results, method, seed):
    [name] = [each for each in results.answers if each.startswith(f"{method}-{seed}-")]
    return records.read_samples(results.folder / "samples" / f"{name}.npz")


def test_a_folder_gives_back_what_run_returned(results):
    again = read_results(results.folder)
    assert again.rows == results.rows
    assert again.config == results.config
    assert json.dumps(again.summary()) == json.dumps(results.summary())
    assert asdict(show_results(again)) == asdict(show_results(results))


def test_scores_are_those_of_the_run(results, shown):
    for method, row in results.table().items():
        for test, mean in row.items():
            score = shown.scores[method][test]
            assert score.mean == pytest.approx(mean, abs=1e-3)
            assert score.std == pytest.approx(results.std()[method][test], abs=1e-3)
            assert score.worst == pytest.approx(results.worst()[method][test], abs=1e-3)


def test_every_sample_has_its_class_its_answer_and_those_of_both_heads(results, shown):
    for seed in (0, 1):
        samples = load_samples(results, "fedthe", seed)
        federation = build(load_dataset("glyphs", size=24), make_config(SMALL).settings(seed))
        for test in shown.tests:
            for k in range(4):
                part = {
                    name: samples[f"{test}/{k}/{name}"] for name in ("right", "label", "answer", "global", "personal")
                }
                labels = federation.labels(federation.tests[test][k].first(7))
                assert part["label"].tolist() == labels.tolist()
                assert part["right"].tolist() == (part["answer"] == labels).tolist()
                for head in ("global", "personal"):
                    heads = shown.clients[str(seed)].heads["fedthe"][test][head]
                    assert heads[k] == pytest.approx(100 * np.mean(part[head] == labels), abs=1e-3)
    # where both heads agree, so does any mixture of them
    agree = part["global"] == part["personal"]
    assert (part["answer"][agree] == part["global"][agree]).all()


def test_heads_are_those_of_the_deployed_models(results):
    """The personal head of FedTHE alone is the method whose weight of the global one is 0."""
    import torch

    from fedthe.experiment.training import deploy_all
    from fedthe.methods.two_heads import heads
    from fedthe.types import scale

    config = results.config
    for deployed in deploy_all(make_config(config.as_dict() | {"methods": ["fedthe"], "curve": ()})):
        samples = load_samples(results, "fedthe", deployed.seed)
        for test, k, images, _ in deployed.streams():
            mine = {name: _take(part, k) for name, part in deployed.states.items()}
            with torch.no_grad():
                _, of_global, of_personal = heads(deployed.method.net, mine, scale(torch.from_numpy(images[:7])))
            assert samples[f"{test}/{k}/global"].tolist() == of_global.argmax(-1).tolist()
            assert samples[f"{test}/{k}/personal"].tolist() == of_personal.argmax(-1).tolist()


def _take(part, k):
    return {name: _take(each, k) for name, each in part.items()} if isinstance(part, dict) else part[k]


def test_weights_are_of_the_personal_head_over_all_seeds(results, shown):
    assert set(shown.weights) == {"fedthe", "tsa"}
    for test, weights in shown.weights["fedthe"].items():
        parts = [load_samples(results, "fedthe", seed) for seed in (0, 1)]
        e = np.concatenate([samples[f"{test}/{k}/e"] for samples in parts for k in range(4)])
        assert weights.mean == pytest.approx(1 - e.mean(), abs=1e-6)
        assert len(weights.shares) == BINS
        assert sum(weights.shares) == pytest.approx(1, abs=1e-3)
        centre = sum((i + 0.5) / BINS * share for i, share in enumerate(weights.shares))
        assert centre == pytest.approx(weights.mean, abs=0.5 / BINS + 1e-3)


def test_a_curve_is_what_runs_of_fewer_rounds_measure(results, shown, tmp_path):
    shorter = fedthe.run(results.config, out=tmp_path / "shorter", rounds=2, curve=[], methods=["fedavg_ft", "fedthe"])
    for method, row in shorter.scores().items():
        for test, (mean, std) in row.items():
            curve = shown.curves[method][test]
            assert curve.rounds == [1, 2, 3]
            assert (curve.mean[1], curve.std[1]) == (mean, std)
            assert curve.mean[2] == results.table()[method][test]


def test_a_curve_changes_nothing_at_the_end(results, tmp_path):
    plain = fedthe.run(results.config, out=tmp_path, curve=[])
    assert plain.answers == results.answers  # of the same trainings, by their names
    for one, other in zip(plain.rows, results.rows, strict=True):
        assert replace(one, ms_per_sample=0.0) == replace(other, ms_per_sample=0.0)
    for seed in (0, 1):
        ours, theirs = load_samples(plain, "fedthe", seed), load_samples(results, "fedthe", seed)
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours | theirs)


def test_losses_are_of_every_round_and_training(results, shown):
    assert [(each.methods, each.seed, len(each.losses)) for each in shown.losses] == [
        (about["methods"], about["seed"], 3) for about in results.trainings.values()
    ]


def test_clients_hold_what_the_federation_gave_them(shown):
    for seed in (0, 1):
        federation = build(load_dataset("glyphs", size=24), make_config(SMALL).settings(seed))
        assert shown.clients[str(seed)].mix == federation.class_counts.tolist()
        assert shown.classes == list(federation.pool.classes)


def test_examples_are_the_images_that_were_answered(results, shown):
    federation = build(load_dataset("glyphs", size=24), make_config(SMALL).settings(0))
    samples = {method: load_samples(results, method, 0) for method in results.methods}
    seen = set()
    for each in shown.examples:
        file = io.BytesIO(base64.b64decode(each.image.partition(",")[2]))
        pixels = np.asarray(Image.open(file))
        stream = federation.tests[each.test][each.client].first(4)
        images, labels = federation.inputs(stream), federation.labels(stream)
        [i] = [
            i for i in range(4) if (images[i].squeeze() == pixels).all() and (each.test, each.client, i) not in seen
        ][:1]
        seen.add((each.test, each.client, i))
        assert each.label == labels[i]
        for method, kept in samples.items():
            assert each.answers[method] == kept[f"{each.test}/{each.client}/answer"][i]
        assert set(each.heads) == set(each.weights) == {"fedthe", "tsa"}
    assert {each.test for each in shown.examples} == set(shown.tests)
    right = [each.answers["tsa"] == each.label for each in shown.examples]
    assert any(right)
    assert not all(right)


def test_examples_say_their_seed_and_older_summaries_name_only_the_file(results, shown, tmp_path):
    folder = tmp_path / "moved"
    shutil.copytree(results.folder, folder)
    summary = store.read_sealed(folder / "summary.json")
    assert summary["examples"] == results.examples
    assert summary["examples"]["seed"] == 0
    assert (folder / "examples" / f"{summary['examples']['file']}.npz").exists()
    store.write_sealed(folder / "summary.json", summary | {"examples": summary["examples"]["file"]})
    assert read_results(folder).examples == results.examples
    assert gather([folder]).shown[0].examples == shown.examples
    other = {"seed": 1, "file": summary["examples"]["file"]}
    store.write_sealed(folder / "summary.json", summary | {"examples": other})
    assert {each.seed for each in gather([folder]).shown[0].examples} == {1}  # as it says, not by the name of the file


def test_a_run_without_samples_or_examples_is_shown_without_them(results, tmp_path):
    folder = tmp_path / "moved"
    shutil.copytree(results.folder, folder)
    for name in ("samples", "examples", "trainings"):
        shutil.rmtree(folder / name)
    (folder / "manifest-0.json").write_text("{}")  # of some other run
    shown = gather([folder]).shown[0]
    assert shown.scores.keys() == set(results.methods)
    assert (shown.weights, shown.examples, shown.losses) == ({}, [], [])
    assert shown.clients["0"].mix == []
    assert shown.clients["1"].mix != []
    assert shown.clients["0"].heads == {}


def test_a_client_without_a_test_keeps_its_place(results, tmp_path):
    """Numbers of heads stand at the client's place, as its scores do."""
    folder = tmp_path / "moved"
    shutil.copytree(results.folder, folder)
    [name] = [each for each in results.answers if each.startswith("fedthe-0-")]
    samples = load_samples(results, "fedthe", 0)
    whole = gather([folder]).shown[0].clients["0"].heads["fedthe"]["ooc"]["global"]
    kept = {key: each for key, each in samples.items() if "/1/" not in key}
    store.write_arrays(folder / "samples" / f"{name}.npz", kept)
    assert gather([folder]).shown[0].clients["0"].heads["fedthe"]["ooc"]["global"] == [whole[0], None, *whole[2:]]


def test_damaged_and_older_samples_are_as_good_as_none(results, tmp_path):
    folder = tmp_path / "moved"
    shutil.copytree(results.folder, folder)
    for name in results.answers:
        path = folder / "samples" / f"{name}.npz"
        if name.startswith("tsa"):
            path.write_bytes(b"")
        if name.startswith("fedthe"):  # as earlier versions wrote them
            kept = load_samples(results, "fedthe", int(name.split("-")[1]))
            few = {key: each for key, each in kept.items() if key.rpartition("/")[2] in ("right", "e")}
            store.write_arrays(path, few)
    shown = gather([folder]).shown[0]
    assert set(shown.weights) == {"fedthe"}
    assert "fedthe, seed 0; fedthe, seed 1; tsa, seed 0; tsa, seed 1" in shown.notes[-1]
    assert shown.clients["0"].heads == {}
    assert shown.examples
    assert {*shown.examples[0].answers} == {"fedavg", "fedavg_ft"}


def test_method_and_seed_of_samples_come_from_the_answer(results, tmp_path):
    """Not from the name of its file: without the answer, nobody knows whose samples these are."""
    folder = tmp_path / "moved"
    shutil.copytree(results.folder, folder)
    [name] = [each for each in results.answers if each.startswith("fedthe-1-")]
    (folder / "answers" / f"{name}.json").unlink()
    shown = gather([folder]).shown[0]
    assert shown.notes[-1].startswith("No per-sample data of fedthe, seed 1: files in answers or samples are missing")
    assert "fedthe" in shown.clients["0"].heads
    assert "fedthe" not in shown.clients["1"].heads


def test_examples_are_of_all_tests_that_a_run_asked_for(tmp_path):
    for tests in (["original"], ["original", "ooc"]):
        results = fedthe.run(**SMALL, out=tmp_path, rounds=1, methods=["fedavg"], tests=tests)
        assert {each.test for each in show_results(results).examples} == {*tests}


def test_what_fails_on_the_way_is_told(tmp_path, monkeypatch):
    """A method that cannot answer after the first round, but can at the end."""
    answer = Work.answer

    def fail(self, name, *rest):
        if self.config.rounds == 1:
            raise Failed("it is too early")
        return answer(self, name, *rest)

    monkeypatch.setattr(Work, "answer", fail)
    results = fedthe.run(**SMALL, out=tmp_path, rounds=2, curve=[1], methods=["fedavg"])
    assert results.failures == {"fedavg, seed 0, after 1 rounds": "it is too early"}
    assert read_progress(tmp_path).failures == ("fedavg, seed 0: it is too early",)
    assert show_results(results).curves["fedavg"]["ooc"].rounds == [2]


def test_records_of_tables_are_shown_with_the_papers_numbers():
    shown = {each.name: each for each in gather([RESULTS]).shown}
    main = shown["main-dir0.1"]
    record = json.loads((RESULTS / "main-dir0.1.json").read_text(encoding="utf-8"))
    for method, row in record["rows"].items():
        for test, (mean, std) in row.items():
            assert (main.scores[method][test].mean, main.scores[method][test].std) == pytest.approx(
                (mean, std), abs=1e-2
            )
    assert main.paper.cells["fedthe"] == {"original": (89.58, 0.45), "corrupted": (81.62, 0.93), "ooc": (57.12, 3.66)}
    assert "corrupted_ooc" in main.scores["fedthe"]  # measured, though in another table
    assert shown["ablation"].methods["ablation_9"] == "(9) (8) with SLW = fedthe"
    severity = shown["severity-corrupted-dir0.1"]
    assert list(severity.tests) == [f"severity{i}" for i in range(1, 6)]
    assert severity.scores["fedthe"]["severity1"].mean > severity.scores["fedthe"]["severity5"].mean
    assert [each["id"] for each in gather([RESULTS]).figures] == sorted(
        path.stem for path in (RESULTS / "figures").glob("*.json")
    )


def test_a_table_that_just_ran_shows_what_its_run_knows(tmp_path):
    table = find_table("main-dir0.1")
    settings = SMALL | {"natural": "none", "rounds": 1, "seeds": [0], "out": str(tmp_path)}
    done = run_cases(plan_cases(table, ["fedavg", "fedthe"], **settings))
    shown = show_record(make_record(table, done), done[0][1])
    assert shown.name == "main-dir0.1"
    assert shown.paper.cells == {}  # letters are not the paper's data
    assert shown.weights.keys() == {"fedthe"}
    assert shown.clients["0"].heads.keys() == {"fedthe"}
    assert shown.examples
    assert shown.scores["fedthe"]["ooc"].std is None


def test_experiments_of_one_name_are_told_apart():
    page = gather(
        [RESULTS / "main-dir0.1.json", RESULTS / "standardized" / "main-dir0.1.json", RESULTS / "main-dir1.json"]
    )
    assert [each.name for each in page.shown] == ["main-dir0.1 (1)", "main-dir0.1 (2)", "main-dir1"]
    assert page.title == "3 experiments"


def test_a_record_says_only_what_it_knows(tmp_path):
    main, severity = (
        gather([RESULTS / f"{name}.json"]).shown[0] for name in ("main-dir0.1", "severity-corrupted-dir1")
    )
    older = store.read_sealed(RESULTS / "main-dir0.1.json")
    for case in older["cases"]:
        del case["seconds"]
    store.write_sealed(tmp_path / "main-dir0.1.json", older)
    assert gather([tmp_path / "main-dir0.1.json"]).shown[0].provenance["seconds"] is None
    assert main.provenance["seconds"] > 0
    assert main.provenance["command"] == "fedthe table main-dir0.1 natural=npz:Tiny-ImageNet.npz"
    assert len(severity.provenance["trainings"]) == 2 * 3  # five severities, one training of each method and seed


def test_a_run_with_the_papers_settings_stands_beside_its_numbers(results):
    config = make_config({"dataset": "cifar10", "dirichlet": 0.1, "methods": ["fedthe"], "seeds": [0]})
    tests = ["original", "corrupted", "ooc", "mixture", "corrupted_ooc"]
    like = SimpleNamespace(config=config, pools={}, tests=tests, digests={"pool": PAPER_DIGESTS["cifar10"]})
    paper = find_paper(like)
    assert paper.table == "main-dir0.1"
    assert paper.cells["fedthe"]["ooc"] == (57.12, 3.66)
    assert (
        paper.cells["fedthe"]["corrupted_ooc"] == find_table("corrupted-ooc-cnn-dir0.1").rows["fedthe"]["corrupted_ooc"]
    )
    assert "mixture" not in paper.cells["fedthe"]  # without CIFAR-10.1 it is another one
    assert "mixture" in paper.remarks[0]
    like.digests = {"pool": "another"}
    assert find_paper(like).cells == {}  # whatever its name is
    like.config = make_config(config.as_dict() | {"rounds": 50})
    assert find_paper(like) is None
    assert find_paper(results) is None


def test_the_call_runs_the_same_again(results):
    config = make_config(results.config.as_dict() | {"hyper": {"fedthe": {"alpha": 0.2}}})
    assert eval(write_call(config), {"fedthe": Same}) == make_config(config.as_dict() | {"out": None})


class Same:
    @staticmethod
    def run(**settings):
        return make_config(settings)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: folder / "nothing", "does not exist"),
        (lambda folder: folder, "is an empty folder"),
        (lambda folder: _write(folder / "a.json", "[1, 2]"), "holds no run and no record"),
        (
            lambda folder: _write(folder / "a.json", '{"format": 1, "id": "x", "columns": [], "cases": []}'),
            "is not a valid record",
        ),
        (lambda folder: _write(folder / "a.json", "{"), "is damaged"),
        (lambda folder: _write(folder / "config.json", "{}").parent, "a run that is not finished"),
    ],
)
def test_what_is_no_run_is_refused_in_a_sentence(tmp_path, make, says):
    with pytest.raises(InputError, match=says):
        gather([make(tmp_path)])


def _write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_a_run_of_another_version_is_refused_in_a_sentence(results, tmp_path):
    folder = tmp_path / "old"
    shutil.copytree(results.folder, folder)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    del summary["answers"]
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    with pytest.raises(InputError, match="run it again"):
        gather([folder])


@pytest.mark.parametrize("curve", [[0], [2, 1], [1, 1], [3], [4]])
def test_a_curve_is_of_rounds_before_the_last_in_order(curve):
    with pytest.raises(InputError, match="curve must name rounds"):
        make_config({"rounds": 3, "curve": curve})


def test_a_single_seed_has_no_standard_deviation(data, tmp_path):
    settings = {"natural": "none", "clients": 2, "rounds": 2, "curve": [1], "local_epochs": 1, "samples": 3}
    one = fedthe.run(dataset=data, **settings, methods=["fedavg"], out=tmp_path / "one")
    assert set(one.std()["fedavg"].values()) == {None}
    summary = json.loads((tmp_path / "one" / "summary.json").read_text(encoding="utf-8"))
    assert set(summary["std_over_seeds"]["fedavg"].values()) == {None}
    assert {std for _, std in summary["curves"]["1"]["fedavg"].values()} == {None}
    page = gather([tmp_path / "one"])
    assert set(page.shown[0].curves["fedavg"]["ooc"].std) == {None}
    for text in (write_markdown(page), write_latex(page), render(page).partition('<script id="plotly"')[0]):
        assert "±" not in text
        assert r"\pm" not in text
    table = find_table("main-dir0.1")
    done = run_cases(
        plan_cases(table, ["fedavg"], **settings, dataset=data, seeds=[0], out=str(tmp_path / "t"), size=None)
    )
    record = make_record(table, done)
    assert record["rows"]["fedavg"]["ooc"][1] is None
    for each in (record, _with_zeros(record)):  # as earlier versions wrote it
        _, rows = lay_out(table, each)
        assert "±" not in "".join(cell for row in rows for cell in row)
        assert "±" not in write_table(table, each)
        assert show_record(each).scores["fedavg"]["ooc"].std is None
    two = fedthe.run(dataset=data, **settings, methods=["fedavg"], seeds=[0, 1], out=tmp_path / "two")
    assert all(std is not None for std in two.std()["fedavg"].values())


def _with_zeros(record):
    rows = {
        row: {test: [mean, 0.0 if std is None else std] for test, (mean, std) in cells.items()}
        for row, cells in record["rows"].items()
    }
    return record | {"rows": rows}
