"""Results as data: columns of samples and scores, tables, comparisons, and what files of earlier versions lack."""

import json
import shutil
import sys
import types

import numpy as np
import pytest

import fedthe
from fedthe import records, store, tree
from fedthe.engine.evaluate import score
from fedthe.engine.visit import Answered
from fedthe.errors import Failed
from fedthe.experiment import samples as samples_of
from fedthe.experiment.tables import find_short_streams, say_messages
from fedthe.nets import CNN
from helpers import fails

METHODS = ["fedavg", "fedavg_ft", "fedthe"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Two seeds of three clients, on which streams are short."""
    folder = tmp_path_factory.mktemp("results")
    labels = np.arange(150) % 3
    noise = np.random.default_rng(0).integers(0, 90, (150, 16, 16, 3))
    images = (noise + 70 * labels[:, None, None, None]).astype(np.uint8)
    np.savez(folder / "tiny.npz", images=images, labels=labels)
    settings = {"clients": 3, "rounds": 2, "curve": [1], "local_epochs": 1, "natural": "none", "lr": 0.05, "samples": 8}
    data = f"npz:{folder / 'tiny.npz'}"
    return fedthe.run(dataset=data, methods=METHODS, seeds=[0, 1], out=folder / "run", engine="loop", **settings)


@pytest.fixture
def older(results, tmp_path):
    """The same as an earlier version left it: no probabilities, no likelihood, deviations with n."""
    folder = tmp_path / "older"
    shutil.copytree(results.folder, folder)
    for path in folder.glob("samples/*.npz"):
        kept = {
            name: values
            for name, values in records.read_samples(path).items()
            if "prob" not in name and "truth" not in name
        }
        store.write_arrays(path, kept, compress=True)
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [{name: value for name, value in line.items() if name != "nll"} for line in lines]
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    summary = store.read_sealed(folder / "summary.json")
    for name in ("ddof", "nll", "worst_tenth", "sample_weighted"):
        del summary[name]
    summary["files"]["results.jsonl"] = store.file_hash(folder / "results.jsonl")
    store.write_sealed(folder / "summary.json", summary)
    return fedthe.read_results(str(folder))


def test_results_say_what_a_client_receives_and_sends_in_a_round(results):
    model = sum(leaf.numel() * 4 for leaf in tree.flatten(CNN(3, 3, 16).init(0)).values())
    sizes = {name: about["message_bytes"] for about in results.trainings.values() for name in about["methods"]}
    assert sizes == {"fedavg": model, "fedavg_ft": model, "fedthe": model + 4 * 64}  # and the mean feature
    said = say_messages([{"message_bytes": 2_000_000}, {"message_bytes": 627_000}, {"failed": "it diverged"}])
    assert said == "0.627 to 2 MB per round and client, each way"
    assert say_messages([{"message_bytes": 5}, {"message_bytes": 5}]) == "5e-06 MB per round and client, each way"
    assert say_messages([{}]) is None  # runs of before


def test_scores_are_those_of_a_literal_softmax():
    logits = np.random.default_rng(0).normal(0, 5, (6, 4))
    labels = np.array([0, 1, 2, 3, 0, 1])
    scores = score(Answered(logits, {}, 0.1), labels, (0, "ooc", 1))
    for i, row in enumerate(logits):
        p = [np.exp(each) / sum(np.exp(row)) for each in row]
        assert scores.classes[i] == p.index(max(p))
        assert np.exp(scores.log_probability[i]) == pytest.approx(max(p))
        assert np.exp(scores.log_truth[i]) == pytest.approx(p[labels[i]])
    assert scores.nll == pytest.approx(-scores.log_truth.mean())
    far = score(Answered(np.array([[1e5, -1e5]]), {}, 0.1), np.array([1]), (0,))
    assert far.nll == pytest.approx(2e5)  # no underflow


@pytest.mark.parametrize(
    ("logits", "words"),
    [
        (np.zeros(3), "one row of logits per sample"),
        (np.zeros((2, 4)), "one row of logits per sample"),
        (np.zeros((3, 2)), "has class 2, but the logits are of 2 classes"),
        (np.array([[0.0, 1, np.nan]] * 3), "is not finite"),
    ],
)
def test_logits_that_cannot_be_scored_are_refused(logits, words):
    with pytest.raises(Failed, match=words):
        score(Answered(logits, {}, 0.1), np.array([0, 1, 2]), (0, "ooc", 1))


def test_samples_agree_with_scores_and_themselves(results):
    columns = results.samples()
    assert set(columns["method"]) == set(METHODS)
    for row in results.rows:
        mine = (columns["method"] == row.method) & (columns["seed"] == row.seed)
        mine &= (columns["test"] == row.test) & (columns["client"] == row.client)
        assert columns["sample"][mine].tolist() == list(range(row.samples))
        assert columns["right"][mine].sum() == row.right
        assert -np.log(columns["truth"][mine]).mean() == pytest.approx(row.nll, abs=1e-4)
    right = columns["answer"] == columns["label"]
    assert np.array_equal(columns["right"], right)
    assert columns["truth"][right] == pytest.approx(columns["probability"][right])
    assert (columns["truth"] <= columns["probability"] + 1e-6).all()
    assert np.isnan(columns["e"][columns["method"] == "fedavg"]).all()


def test_heads_give_the_answer_a_probability(results):
    one = results.samples("fedthe", test="ooc", seed=1)
    assert len(one["label"]) == sum(
        row.samples for row in results.rows if (row.method, row.test, row.seed) == ("fedthe", "ooc", 1)
    )
    for head in ("global", "personal"):
        given = one[f"{head}_probability"]
        assert ((given > 0) & (given <= 1)).all()
        alone = one[head] == one["answer"]
        assert (given[alone] >= 1 / 3 - 1e-6).all()  # the largest of three
        assert (given[~alone] <= 1 / 2 + 1e-6).all()  # another is larger
    # logits are mixed, so the ensemble's odds lie between those of the heads
    assert (one["e"] >= 0).all()


def test_frames_are_pandas_where_it_is(results, monkeypatch):
    frame = results.frame()
    assert len(frame["accuracy"]) == len(results.rows) == 3 * 2 * 5 * 3
    assert list(frame)[:4] == ["method", "seed", "test", "client"]
    made = types.ModuleType("pandas")
    made.DataFrame = lambda columns: ("a frame", list(columns))
    monkeypatch.setitem(sys.modules, "pandas", made)
    assert (
        results.frame()[0]
        == results.samples("fedavg")[0]
        == results.compare("fedthe", "fedavg").frame()[0]
        == "a frame"
    )


def test_tables_beside_the_mean(results):
    for method in METHODS:
        for test in results.tests:
            seeds = [[r for r in results.rows if (r.method, r.test, r.seed) == (method, test, s)] for s in (0, 1)]
            means = [np.mean([r.accuracy for r in rows]) for rows in seeds]
            assert results.std()[method][test] == pytest.approx(np.std(means, ddof=1))
            assert results.worst_tenth()[method][test] == pytest.approx(
                results.worst()[method][test]
            )  # of 3 clients, 1
            whole = [100 * sum(r.right for r in rows) / sum(r.samples for r in rows) for rows in seeds]
            assert results.weighted()[method][test] == pytest.approx(np.mean(whole))
            assert results.nll()[method][test] == pytest.approx(
                np.mean([np.mean([r.nll for r in rows]) for rows in seeds])
            )
    columns = results.samples("fedthe", "ooc")
    by_hand = []
    for seed in (0, 1):
        p, right = columns["probability"][columns["seed"] == seed], columns["right"][columns["seed"] == seed]
        bins = np.ceil(p.astype(float) * 15)
        by_hand.append(sum(abs((right[bins == b] - p[bins == b]).sum()) for b in set(bins)) / len(p))
    assert results.calibration()["fedthe"]["ooc"] == pytest.approx(100 * np.mean(by_hand))


def test_a_comparison_is_by_client_and_seed(results):
    found = results.compare("fedthe", "fedavg")
    accuracy = {(r.method, r.seed, r.test, r.client): r.accuracy for r in results.rows}
    for test, row in found.rows.items():
        more = [[accuracy["fedthe", s, test, k] - accuracy["fedavg", s, test, k] for k in range(3)] for s in (0, 1)]
        assert row.difference == pytest.approx(np.mean(more), abs=1e-3)
        assert (row.clients, row.seeds) == (6, 2)
        assert row.low <= row.difference <= row.high
        assert row.p <= row.p_holm <= 1
    assert list(found.frame()) == ["test", *vars(row)]
    assert repr(found).startswith("fedthe compared with fedavg")
    assert found._repr_html_().count("<tr>") == 1 + len(results.tests)
    fails(lambda: results.compare("fedthe", "fedav"), "there is no method 'fedav'", "did you mean fedavg?")
    fails(lambda: results.compare("fedthe", "fedthe"), "cannot be compared with itself")
    fails(lambda: results.samples(test="oc"), "there is no test 'oc'")
    fails(lambda: results.samples(seed=7), "there is no seed 7", "0,1")


def test_results_show_themselves(results):
    text, markup = repr(results), results._repr_html_()
    for method in METHODS:
        mean, std = results.scores()[method]["ooc"]
        assert f"{mean:.1f} ± {std:.1f}" in text
        assert f"{mean:.1f} ± {std:.1f}" in markup
    assert "3 methods" in text
    assert "2 seeds" in text
    assert "ooc†" in text
    assert "† out-of-client: 6 of 6 streams have fewer than 20 samples, the shortest 8." in text
    assert max(map(len, text.splitlines()[:8])) < 120
    assert find_short_streams([]) == {}


def test_a_report_is_written(results, tmp_path):
    path = results.report(tmp_path / "page.html")
    assert "Two methods compared" in path.read_text(encoding="utf-8")


def test_results_are_read_as_they_were(results):
    assert fedthe.read_results(str(results.folder)).rows == results.rows
    fails(lambda: fedthe.read_results("nowhere"), "nowhere holds no run")


def test_what_earlier_versions_did_not_measure_is_absent(older, results, tmp_path):
    assert older.table() == results.table()
    assert older.std() == results.std()  # from the rows
    assert older.nll() == older.calibration() == {}
    assert {std for method in older.curves[1].values() for _, std in method.values()} == {None}
    columns = older.samples()
    assert "probability" not in columns
    assert "label" in columns
    assert older.worst_tenth() == results.worst_tenth()
    text = older.report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Weighted by samples" in text
    assert "calibration error (%)" not in text


def find_answer(results):
    """Of FedAvg on seed 0, after the last round."""
    return next(name for name in results.answers if name.startswith("fedavg-0-"))


def test_missing_samples_are_said(older):
    (older.folder / "samples" / f"{find_answer(older)}.npz").unlink()
    with pytest.warns(UserWarning, match="There are no samples of fedavg, seed 0"):
        columns = older.samples("fedavg")
    assert set(columns["seed"]) == {1}
    for path in older.folder.glob("samples/*.npz"):
        path.unlink()
    fails(older.samples, "has no samples of these methods", "trains nothing")


def test_columns_of_a_predictor_of_ones_own_are_kept(results, tmp_path):
    shutil.copytree(results.folder, tmp_path / "run")
    path = tmp_path / "run" / "samples" / f"{find_answer(results)}.npz"
    kept = records.read_samples(path)
    label = kept["ooc/0/label"]
    store.write_arrays(path, kept | {"ooc/0/mine": np.linspace(-5, 5, len(label))})
    columns = fedthe.read_results(tmp_path / "run").samples("fedavg", "ooc", 0)
    assert np.nanmin(columns["mine"]) == -5
    store.write_arrays(path, kept | {"ooc/0/probability": np.full(len(label), 1.5)})
    assert samples_of.read_samples(fedthe.read_results(tmp_path / "run"))["fedavg", 0] == {}


def test_samples_are_read_as_they_were_written(tmp_path):
    draw = np.random.default_rng(0)
    samples = {
        "ooc/0/answer": draw.integers(9, size=5),
        "ooc/0/mine": draw.random(5),
        "ooc/1/answer": draw.integers(9, size=3),
        "ooc/1/mine": draw.integers(9, size=3),  # whole numbers here, and others there
        "ooc/1/shift": np.array(["", "long name", "b"]),
        "a/b/0/shift": np.array(["c"]),
        "a/b/0/answer": np.zeros(0, dtype=np.int64),
    }
    records.write_samples(tmp_path / "x.npz", samples)
    found = records.read_samples(tmp_path / "x.npz")
    assert found.keys() == samples.keys()
    for name, values in samples.items():
        np.testing.assert_array_equal(found[name], values)
        assert found[name].dtype.kind == values.dtype.kind
    assert len(store.read_arrays(tmp_path / "x.npz")) == 5  # answer, shift, mine of two kinds, and the index


@pytest.mark.parametrize(
    "index",
    [b"", b"[[1]]", b'[[["ooc/0/answer", "5"]]]', b"{}", b'[[["a", 1]], [["b", 1]]]', b"[" * 200_000, b"[[[[], 5]]]"],
    ids=range(7),
)
def test_an_index_that_does_not_fit_gives_no_samples(tmp_path, index):
    text = np.frombuffer(index, dtype=np.uint8)
    store.write_arrays(tmp_path / "x.npz", {"0": np.arange(5), "index": text})
    assert records.read_samples(tmp_path / "x.npz") == {}
