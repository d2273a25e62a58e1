"""Scores and curves of streams in time: from samples by literal versions, and from a run by its samples."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import fedthe
import oracles_timeline as oracle
from fedthe.data.shifts import CLEAN, ORIGINS, stream
from fedthe.engine.evaluate import Scores, score
from fedthe.engine.visit import Answered
from fedthe.experiment import timelines
from fedthe.experiment.samples import read_samples
from fedthe.experiment.scores import count_clients, make_columns, make_row
from fedthe.study.streams import say_slowest
from fedthe.timeline import CURVE, RECOVERED, WORST
from helpers import fails
from stream_samples import make_samples

SEEDS, CLIENTS = (0, 1), 5


@pytest.fixture(scope="module")
def samples():
    return make_samples(("fedavg_ft", "fedthe"), SEEDS, CLIENTS, size=220)


def take(samples, method, seed, client, test):
    """Right, segment and phase of a stream, as plain lists; a severity is part of the phase in the ramp."""
    kept = {name: samples[method, seed][f"{test}/{client}/{name}"].tolist() for name in ("right", "segment", "origin")}
    severity = samples[method, seed][f"{test}/{client}/severity"].tolist()
    phase = [
        f"{ORIGINS[o]} {s}" if test == "gradual" else ORIGINS[o] for o, s in zip(kept["origin"], severity, strict=True)
    ]
    return kept["right"], kept["segment"], phase


def average(of_client):
    """Over clients, then over seeds."""
    return np.mean([np.mean([of_client(seed, k) for k in range(CLIENTS)]) for seed in SEEDS])


@pytest.mark.parametrize("test", ["switch50", "gradual"])
@pytest.mark.parametrize("method", ["fedavg_ft", "fedthe"])
def test_scores_are_those_of_literal_versions(samples, test, method):
    score = timelines.score_streams(samples, [test])[test][method]

    def stream(seed, k):
        return take(samples, method, seed, k, test)

    assert score.accuracy.mean == pytest.approx(100 * average(lambda s, k: np.mean(stream(s, k)[0])))
    windows = {(s, k): oracle.worst_window(stream(s, k)[0], WORST) for s in SEEDS for k in range(CLIENTS)}
    assert score.worst_window.mean == pytest.approx(100 * average(lambda s, k: windows[s, k]))
    worst = [min(windows[s, k] for k in range(CLIENTS)) for s in SEEDS]
    assert score.worst_client == pytest.approx(100 * np.mean(worst))
    assert score.forgetting.mean == pytest.approx(100 * average(lambda s, k: oracle.forgetting(*stream(s, k))))
    for each in (score.accuracy, score.worst_window, score.forgetting):
        assert each.low < each.mean < each.high
    clients = [stream(s, k) for s in SEEDS for k in range(CLIENTS)]
    names = dict.fromkeys(phase for _, _, phases in clients for phase in phases)
    assert list(score.phases) == list(names)
    for phase, found in score.phases.items():
        accuracy = average(
            lambda s, k, phase=phase: np.mean([r for r, _, p in zip(*stream(s, k), strict=True) if p == phase])
        )
        assert found.accuracy == pytest.approx(100 * accuracy)
        recovery, steady, lost = oracle.recovery(clients, phase, RECOVERED, 0.05)
        assert (found.recovery, found.steady, found.lost) == (
            recovery,
            pytest.approx(100 * steady),
            pytest.approx(lost),
        )
        ends = [np.inf if end is None else end for end in (found.recovery_low, found.recovery_high)]
        assert ends[0] <= (np.inf if recovery is None else recovery) <= ends[1]


def test_curves_are_those_of_literal_versions(samples):
    found = timelines.draw_streams(samples, ["switch50"])["switch50"]
    assert list(found.bands) == [
        (0, 50, "own"), (50, 100, "ooc"), (100, 150, "own"), (150, 200, "ooc"), (200, 220, "own")
    ]  # fmt: skip
    for method, curve in found.methods.items():
        seeds = [
            oracle.over_time([take(samples, method, s, k, "switch50") for k in range(CLIENTS)], CURVE) for s in SEEDS
        ]
        assert curve.mean == pytest.approx(100 * np.mean(seeds, axis=0))
        assert curve.std == pytest.approx(100 * np.std(seeds, axis=0, ddof=1))
        for (low, high, _), percent in zip(found.bands, curve.segments, strict=True):
            mean = average(lambda s, k, m=method, a=low, b=high: np.mean(take(samples, m, s, k, "switch50")[0][a:b]))
            assert percent == pytest.approx(100 * mean)


def test_what_is_no_stream_in_time_and_what_a_method_lacks(samples):
    assert timelines.list_streams(samples, ["original", "switch50", "gradual"]) == ["switch50", "gradual"]
    (track, *_) = timelines.read_tracks(samples["fedthe", 0], "original").values()
    assert len(track.segments) == 1  # files of earlier versions have no segments
    later = samples["fedthe", 0] | {"switch50/0/origin": np.full(220, 9, np.uint8)}
    assert set(timelines.read_tracks(later, "switch50")[0].phase) == {"origin9"}  # of a later version
    less = samples | {("fedthe", 1): {}}
    assert list(timelines.score_streams(less, ["switch50"])["switch50"]) == ["fedavg_ft"]
    assert timelines.score_streams(less, ["nothing"]) == {}


def test_scores_survive_a_file(samples):
    score = timelines.score_streams(samples, ["switch50"])["switch50"]["fedthe"]
    assert timelines.read_score(json.loads(json.dumps(timelines.asdict(score)))) == score


def test_few_clients_have_no_interval_and_short_streams_no_window():
    made = make_samples(("fedthe",), (0,), 1, size=40)
    score = timelines.score_streams(made, ["switch50"])["switch50"]["fedthe"]
    assert (score.worst_window, score.worst_client, score.forgetting) == (None, None, None)
    assert (score.accuracy.low, score.accuracy.high) == (None, None)
    assert score.phases["own"].steady is None  # nothing was switched
    curve = timelines.draw_streams(made, ["switch50"])["switch50"].methods["fedthe"]
    assert curve.std is None


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A small run over two streams and an open set."""
    folder = tmp_path_factory.mktemp("timelines")
    labels = np.arange(400) % 4
    noise = np.random.default_rng(0).integers(0, 90, (400, 16, 16, 3))
    images = (noise + 50 * labels[:, None, None, None]).astype(np.uint8)
    np.savez(folder / "tiny.npz", images=images, labels=labels)
    settings = {"clients": 3, "rounds": 1, "local_epochs": 1, "natural": "none", "lr": 0.05, "unknown": "3"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDTHE_HOME", str(folder / "home"))
        return fedthe.run(
            dataset=f"npz:{folder / 'tiny.npz'}",
            methods=["fedavg", "fedthe"],
            tests=["original", "switch10", "open_set", "gap"],
            streams={"gap": "own 6, unknown 4, own 7"},
            seeds=[0, 1],
            out=folder / "run",
            engine="loop",
            **settings,
        )


def as_columns(frame):
    return {name: np.asarray(frame[name]) for name in frame}


def test_a_run_has_its_timeline(results):
    for test in results.tests:
        table = as_columns(results.timeline(test))
        assert table["method"].tolist() == ["fedavg", "fedthe"]
        for method, percent in zip(table["method"], table["accuracy"], strict=True):
            assert percent == pytest.approx(results.table()[method][test])
    table = as_columns(results.timeline("switch10"))
    assert {"accuracy own", "accuracy ooc", "steady ooc", "recovery ooc", "lost ooc", "forgetting"} <= set(table)
    given = as_columns(results.samples("fedthe", "switch10", 0))
    mine = given["client"] == 1
    assert given["segment"][mine].tolist() == (np.arange(mine.sum()) // 10).tolist()


def test_an_open_set_is_scored_by_rejection(results):
    from sklearn.metrics import roc_auc_score

    table, given = as_columns(results.timeline("open_set")), as_columns(results.samples(test="open_set"))
    for i, method in enumerate(table["method"]):
        rates, areas = [], []
        for seed in (0, 1):
            here = [(given["method"] == method) & (given["seed"] == seed) & (given["client"] == k) for k in range(3)]
            known = [given["label"][rows] >= 0 for rows in here]
            sure = [given["log_probability"][rows] for rows in here]
            areas.append(np.mean([roc_auc_score(k, p) for k, p in zip(known, sure, strict=True)]))
            pairs = [(p[k].tolist(), p[~k].tolist()) for k, p in zip(known, sure, strict=True)]
            rates.append(np.mean([oracle.false_positives(*pair) for pair in pairs]))
        assert table["auroc"][i] == pytest.approx(100 * np.mean(areas))
        assert table["fpr95"][i] == pytest.approx(100 * np.mean(rates))
    assert "auroc" not in results.timeline("switch10")
    frame = as_columns(results.frame())
    assert frame["auroc"].dtype == np.float64
    assert np.isnan(frame["auroc"][np.isin(frame["test"], ["original", "switch10"])]).all()
    for method, of in results.rejection().items():
        rows = (frame["test"] == "open_set") & (frame["method"] == method)
        assert frame["auroc"][rows].mean() == pytest.approx(of["open_set"])


def test_an_open_set_is_ranked_where_probabilities_round_to_one():
    draws = np.random.default_rng(0)
    labels = np.repeat([0, -1], 200)
    logits = np.zeros((400, 3))
    logits[:, 0] = np.concatenate([draws.normal(28, 2, 200), draws.normal(20, 1, 200)])
    scores = score(Answered(logits, {}, 0.0), labels, (0, "open_set", 0))
    columns = make_columns(scores, labels, stream("own", CLEAN, np.arange(400)), ())
    assert (columns["probability"] == 1).mean() > 0.9
    kept = {f"open_set/0/{name}": values for name, values in columns.items()}
    found = timelines.score_streams({("fedavg", 0): kept}, ["open_set"])["open_set"]["fedavg"]
    p = -np.log1p(2 * np.exp(-logits[:, 0]))
    assert found.fpr95 == pytest.approx(100 * oracle.false_positives(p[:200].tolist(), p[200:].tolist()))
    assert found.fpr95 < 5


def test_an_interval_of_a_recovery_leaves_out_draws_that_have_none():
    """Every answer is right, so every draw with a long segment in it has recovered at once."""
    for short in (1, 2):
        made = {}
        for k in range(4):
            blocks = [10, 12 if k < short else 40]
            columns = {"right": np.ones(sum(blocks), bool), "segment": np.repeat([0, 1], blocks)}
            columns["origin"] = np.repeat([ORIGINS.index("own"), ORIGINS.index("ooc")], blocks)
            made |= {f"mine/{k}/{name}": values for name, values in columns.items()}
        found = timelines.score_streams({("fedavg", 0): made}, ["mine"])["mine"]["fedavg"].phases["ooc"]
        assert (found.recovery, found.recovery_low, found.recovery_high) == (0, 0, 0)


def test_curves_of_methods_that_failed_on_a_seed():
    """Streams of the second seed are shorter; whichever method lacks one of the seeds, curves end together."""
    long, short = (make_samples(("fedavg_ft", "fedthe"), (0,), 3, size=size) for size in (220, 120))
    both = long | {(method, 1): kept for (method, _), kept in short.items()}
    for lost in both:
        left = {who: kept for who, kept in both.items() if who != lost}
        found = timelines.draw_streams(left, ["switch50"])["switch50"]
        assert list(found.bands) == [(0, 50, "own"), (50, 100, "ooc"), (100, 120, "own")]
        for curve in found.methods.values():
            assert len(curve.mean) == 120
            assert np.isfinite(curve.mean).all()
            assert len(curve.segments) == 3


def test_a_run_has_its_curves(results):
    curve = as_columns(results.over_time("switch10", window=1))
    given = as_columns(results.samples(test="switch10"))
    some = (curve["method"] == "fedthe") & (curve["position"] == 13)
    right = given["right"][(given["method"] == "fedthe") & (given["sample"] == 13)]
    assert curve["accuracy"][some] == pytest.approx(100 * right.mean())
    assert curve["phase"][some] == ["ooc"]


def test_positions_are_those_of_samples(results):
    """Samples of the unknown class keep their place, and have no accuracy."""
    curve, given = as_columns(results.over_time("gap", window=1)), as_columns(results.samples(test="gap"))
    assert len(given["label"][given["method"] == "fedthe"]) == 2 * 3 * 17
    for method in ("fedavg", "fedthe"):
        mine = curve["method"] == method
        assert curve["position"][mine].tolist() == [*range(6), *range(10, 17)]
        for position, percent in zip(curve["position"][mine], curve["accuracy"][mine], strict=True):
            some = (given["method"] == method) & (given["sample"] == position)
            assert (given["label"][some] >= 0).all()
            assert percent == pytest.approx(100 * given["right"][some].mean())
    assert set(curve["phase"]) == {"own"}
    samples = read_samples(results)
    found = timelines.draw_streams(samples, ["gap"])["gap"]
    assert list(found.bands) == [(0, 6, "own"), (6, 10, "unknown"), (10, 17, "own")]
    assert [[each is None for each in curve.segments] for curve in found.methods.values()] == [[False, True, False]] * 2
    lengths = {len(track) for track in timelines.read_tracks(samples["fedthe", 0], "open_set").values()}
    assert max(as_columns(results.over_time("open_set"))["position"]) + 1 >= min(lengths)
    assert "forgetting" in as_columns(results.timeline("gap"))  # unknown samples are another phase


def test_a_phase_that_a_seed_lacks_is_scored_on_the_others():
    """Streams of the second seed end before the first switch."""
    long, short = (make_samples(("fedthe",), (seed,), 3, size=size) for seed, size in ((0, 220), (1, 50)))
    alone, both = (timelines.score_streams(of, ["switch50"])["switch50"]["fedthe"] for of in (long, long | short))
    assert list(both.phases) == ["own", "ooc"]
    assert both.phases["ooc"] == alone.phases["ooc"]
    assert both.phases["ooc"].recovery is not None
    assert both.forgetting == alone.forgetting
    assert both.phases["own"].accuracy != alone.phases["own"].accuracy


def test_a_timeline_is_refused_in_a_sentence(results, tmp_path):
    fails(lambda: results.timeline("switch11"), "there is no test 'switch11'", "switch10")
    for bad in (0, 2, -1):
        fails(
            lambda bad=bad: results.over_time("switch10", bad),
            f"odd number from 1 on, as it is centred, but it is {bad}",
        )
    for bad in (1.5, "a", None):
        fails(lambda bad=bad: results.over_time("switch10", bad), "window must be a whole number")
    away = results.folder / "samples"
    lacks = [row.test == "switch10" and row.seed == 1 for row in results.rows]
    rows, others = (tuple(row for row, lack in zip(results.rows, lacks, strict=True) if lack == of) for of in (0, 1))
    some = replace(results, rows=rows, others=others)
    fails(lambda: some.timeline("switch10"), "no client of the group trained has the test switch10 on seed 1")
    away.rename(tmp_path / "samples")
    try:
        fails(lambda: results.timeline("switch10"), "no samples of switch10", "trains nothing")
    finally:
        (tmp_path / "samples").rename(away)


def test_recovery_is_a_mean_over_seeds_whatever_their_numbers_of_clients():
    right, wrong = np.ones(20), np.zeros(20)
    found = timelines._score_phase([[0.0], [1.0] * 3], [[wrong], [right] * 3])
    assert found.steady == pytest.approx(50)


def test_the_interval_of_recovery_draws_seeds():
    late = np.repeat([0.0, 1.0], [10, 30])
    found = timelines._score_phase([[1.0] * 4] * 2, [[np.ones(40)] * 4, [late] * 4])
    assert (found.recovery_low, found.recovery_high) == (0, 10)


def test_a_phase_that_never_recovers_is_the_slowest():
    never, soon = (timelines.PhaseScore(50.0, 60.0, each, 3.0, each, 4.0) for each in (None, 7.0))
    for phases in ({"own": never, "ooc": soon}, {"own": soon, "ooc": never}):
        score = timelines.StreamScore(timelines.Estimate(50.0, None, None), None, None, None, phases)
        assert timelines.find_slowest(score) is never
        assert say_slowest(score) == "not"


def test_a_single_severity_is_not_part_of_the_phase():
    kept = {"right": np.ones(4, bool), "origin": np.array([0, 0, 1, 1]), "severity": np.array([0, 0, 5, 5])}
    tracks = timelines.read_tracks({f"mine/0/{name}": each for name, each in kept.items()}, "mine")
    assert set(tracks[0].phase) == {"own", "corrupted"}


def test_milliseconds_are_over_all_samples_known_or_not():
    known, p = np.array([True, False, False, True]), np.full(4, -0.5)
    scores = Scores(np.zeros(4, int), known, p, p, known, {}, 0.004)
    assert make_row("m", 0, "open_set", 0, scores, "trained").ms_per_sample == pytest.approx(1.0)


def test_clients_are_counted_in_the_seed_that_has_most():
    rows = [SimpleNamespace(seed=seed, client=client) for seed, client in ((0, 0), (0, 1), (0, 2), (1, 0))]
    assert count_clients(rows) == 3
