"""The paper's figures: measured values agree with slower computations, and all of them can be drawn."""

import json
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image

from fedthe import records, tree
from fedthe.config import make_config
from fedthe.data import load_dataset
from fedthe.engine.loop import Loop
from fedthe.errors import Failed, InputError
from fedthe.experiment.training import deploy_all
from fedthe.methods.two_heads import heads
from fedthe.study.figures import FIGURES, draw_figure, features, find_figure, measure_figure, probing
from fedthe.study.figures.base import restate_figure
from fedthe.study.figures.curves import compare_speed, pick_rounds
from fedthe.study.figures.interpolation import WEIGHTS
from fedthe.study.run import run
from fedthe.types import scale
from helpers import count_loads

CLIENTS, SEEDS, SAMPLES = 3, [0, 1], 12
TESTS = ["original", "corrupted", "natural", "ooc", "mixture", "corrupted_ooc"]
STREAMS = ["switch10", "late"]
# tuning on every sample is slow, and not what a figure is about
QUICK = {
    "samples": 3,
    "hyper": {"memo_p": {"steps": 1, "views": 2}, "fedthe_plus": {"then.steps": 1, "then.views": 2}},
}


class Small:
    """Four classes that differ in brightness, a shift of theirs, and every figure of them, measured once."""

    def __init__(self, folder):
        for name, rows, step in (("tiny", 240, 40), ("darker", 60, 30)):
            labels = np.arange(rows) % 4
            noise = np.random.default_rng(rows).integers(0, 130, (rows, 16, 16, 3))
            np.savez(folder / name, images=(noise + step * labels[:, None, None, None]).astype(np.uint8), labels=labels)
        self.settings = {
            "dataset": f"npz:{folder / 'tiny.npz'}",
            "natural": f"npz:{folder / 'darker.npz'}",
            "out": str(folder / "run"),
            "clients": CLIENTS,
            "dirichlet": 0.3,
            "seeds": SEEDS,
            "rounds": 3,
            "local_epochs": 1,
            "personal_epochs": 1,
            "batch": 16,
            "crop": 0,
            "lr": 0.1,
            "samples": SAMPLES,
        }
        self.measure = cache(self._measure)

    def _measure(self, name):
        quick = QUICK if name in ("gains", "curves-dir0.1") else {}
        fewer = {"methods": ["fedavg", "fedthe"]} if name in ("curves-dir1", "curves-500", "curves-1000") else {}
        if name == "attacks":
            fewer = {"methods": ["fedavg"], "clients": 5}
        streams = {"methods": ["fedavg", "fedthe"], "tests": STREAMS} if name == "streams" else {}
        return measure_figure(name, **self.settings | quick | fewer | streams)

    def run(self, **settings):
        return run(**self.settings | settings)

    def deploy(self, *methods):
        return deploy_all(make_config(self.settings | {"methods": methods}))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDTHE_HOME", str(folder / "home"))
        patch.setattr(probing, "PRETRAIN_EPOCHS", 1)
        yield Small(folder)


def average(values):
    """By test, the mean over clients and then over seeds; values by (test, seed) are lists over clients."""
    return {test: np.mean([np.mean(values[test, seed], 0) for seed in SEEDS], 0) for test in TESTS}


def accuracy_by(deployed, samples, logits):
    """By test and seed: the accuracy in percent of every client's `logits`."""
    found = {}
    for test, k, images, labels in deployed.streams():
        x = scale(torch.from_numpy(images[:samples]))
        classes = logits(tree.take(deployed.states, k), x, k).argmax(-1).numpy()
        found.setdefault((test, deployed.seed), []).append(100 * np.mean(classes == labels[:samples]))
    return found


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_plain_data_and_can_be_drawn_from_it(name, small, tmp_path):
    measured = small.measure(name)
    assert measured["id"] == name
    assert measured["environment"]["device"] == "cpu"
    assert measured["config"]["rounds"] == 3
    # 500 and 1000 rounds are on the mixture, whatever else a caller changes
    others = {"curves-500": ["mixture"], "curves-1000": ["mixture"], "streams": STREAMS}
    assert list(measured["tests"]) == others.get(name, TESTS)
    draw_figure(json.loads(json.dumps(measured)), tmp_path / "figure.png")
    check_picture(tmp_path / "figure.png")


@pytest.mark.parametrize("name", ["curves-500", "weights", "probing"])
def test_a_figure_loads_its_dataset_once(name, small, monkeypatch):
    small.measure(name)  # trained before
    loads = count_loads(monkeypatch, "npz")
    fewer = {"methods": ["fedavg", "fedthe"]} if name == "curves-500" else {}
    measure_figure(name, **small.settings | fewer)
    assert len(loads) == 1


@pytest.mark.parametrize("name", ["curves-dir0.1", "gains", "interpolation-heads", "weights", "probing"])
def test_a_figure_of_one_test_is_smaller_and_whole(name, small, tmp_path):
    draw_figure(small.measure(name) | {"tests": {"mixture": "mixture"}}, tmp_path / "figure.png")
    assert check_picture(tmp_path / "figure.png").shape[1] < 1100


def check_picture(path):
    picture = np.asarray(Image.open(path).convert("RGB"))
    assert min(picture.shape[:2]) > 300
    inked = (picture != 255).any(-1)
    assert 0.01 < inked.mean() < 0.9
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 50
    for edge in (inked[:2], inked[-2:], inked[:, :2], inked[:, -2:]):
        assert not edge.any()  # nothing is cut
    return picture


def test_measuring_needs_nothing_that_draws():
    code = "import sys, fedthe.study.figures; print({'matplotlib', 'sklearn'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_curves_are_the_runs_of_so_many_rounds(small, tmp_path):
    data = small.measure("curves-dir0.1")["data"]
    assert data["rounds"] == [1, 2, 3]
    for i, rounds in enumerate(data["rounds"]):
        alone = small.run(**QUICK, methods=["fedavg", "fedthe"], rounds=rounds, out=str(tmp_path / str(rounds)))
        for method in ("fedavg", "fedthe"):
            for test in TESTS:
                curve = data["curves"][method][test]
                assert curve["mean"][i] == alone.table()[method][test]
                assert curve["std"][i] == alone.std()[method][test]
    assert set(data["speed"]) == {"fedthe", "fedthe_plus"}
    assert set(data["speed"]["fedthe"]) == {"fedavg", "fedavg_ft", "memo_p", "t3a", "fedrod"}


def test_when_to_look():
    assert pick_rounds(100) == list(range(10, 101, 10))
    assert pick_rounds(500) == list(range(50, 501, 50))
    assert pick_rounds(25)[-1] == 25
    assert pick_rounds(3) == [1, 2, 3]
    with pytest.raises(InputError, match="at least 1"):
        pick_rounds(0)


def test_rounds_to_reach_by_hand():
    curves = {
        "fedavg": [20.0, 30.0, 40.0],  # 40 at round 30
        "fedavg_ft": [40.0, 66.0, 60.0],  # 60 already 20/26 of the way from 10 to 20
        "t3a": [10.0, 20.0, 90.0],
        "fedthe": [40.0, 56.0, 64.0],
    }
    speed = compare_speed([10, 20, 30], curves)
    assert list(speed) == ["fedthe"]
    assert speed["fedthe"]["fedavg"] == {
        "accuracy": 40.0,
        "rounds": 10.0,
        "baseline_rounds": 30.0,
        "ratio": 3.0,
        "first": True,
    }
    fast = speed["fedthe"]["fedavg_ft"]
    assert fast["rounds"] == 25.0  # half way from 56 to 64
    assert fast["baseline_rounds"] == pytest.approx(10 + 10 * 20 / 26)
    assert fast["ratio"] == pytest.approx((10 + 10 * 20 / 26) / 25)
    assert not fast["first"]
    assert speed["fedthe"]["t3a"]["rounds"] is speed["fedthe"]["t3a"]["ratio"] is None


def test_gains_are_over_fine_tuning_on_the_same_seed(small):
    data = small.measure("gains")["data"]
    assert list(data["gains"]) == ["memo_p", "t3a", "fedrod", "fedrep", "fedthe", "fedthe_plus"]
    results = small.run(**QUICK, methods=list(data["accuracy"]))
    table, rows = results.table(), results.rows
    for test in TESTS:
        assert data["accuracy"]["t3a"][test]["mean"] == pytest.approx(table["t3a"][test])
        means = {
            (method, seed): np.mean([r.accuracy for r in rows if (r.method, r.seed, r.test) == (method, seed, test)])
            for method in ("fedavg_ft", "fedthe")
            for seed in SEEDS
        }
        more = [means["fedthe", seed] - means["fedavg_ft", seed] for seed in SEEDS]
        assert data["gains"]["fedthe"][test]["mean"] == pytest.approx(np.mean(more))
        assert data["gains"]["fedthe"][test]["std"] == pytest.approx(np.std(more, ddof=1))


@pytest.mark.parametrize("engine", ["loop", "stack"])
def test_alpha_and_beta_are_what_a_run_with_them_gives(engine, small):
    data = small.measure("alpha-beta")["data"]
    if engine == "stack":
        data = measure_figure("alpha-beta", **small.settings, engine="stack")["data"]
    assert any(np.ptp(cells["mean"]) > 0 for cells in data["accuracy"].values())  # they matter
    for alpha, beta in ((0.01, 1.0), (0.3, 0.05), (0.1, 0.1), (1.0, 0.01)):
        results = small.run(methods=["fedthe"], hyper={"fedthe": {"alpha": alpha, "beta": beta}}, engine=engine)
        i, j = data["alpha"].index(alpha), data["beta"].index(beta)
        for test in TESTS:
            cells = data["accuracy"][test]
            assert cells["mean"][i][j] == pytest.approx(results.table()["fedthe"][test])
            assert cells["std"][i][j] == pytest.approx(results.std()["fedthe"][test])


def test_heads_mixed_by_hand(small):
    data = small.measure("interpolation-heads")["data"]
    assert data["e"] == list(WEIGHTS) == pytest.approx(np.arange(0, 1.01, 0.05))
    by_weight = [{} for _ in WEIGHTS]
    for deployed in small.deploy("fedthe"):
        for e, found in zip(WEIGHTS, by_weight, strict=True):

            def logits(mine, x, k, e=e, net=deployed.method.net):
                h = net.features(mine["body"], x)
                if e in (0, 1):  # one of the two alone
                    return net.head(mine["head" if e else "personal"], h)
                return e * net.head(mine["head"], h) + (1 - e) * net.head(mine["personal"], h)

            found |= accuracy_by(deployed, SAMPLES, logits)
    check_interpolation(data, by_weight)
    ours = small.run(methods=["fedthe"]).table()["fedthe"]
    assert {test: data["fedthe"][test]["mean"] for test in TESTS} == pytest.approx(ours)


def test_models_mixed_by_hand(small):
    data = small.measure("interpolation-models")["data"]
    results = small.run(methods=["fedavg", "fedavg_ft", "fedthe"]).table()
    for test in TESTS:
        assert data["shared"][test]["mean"][0] == pytest.approx(results["fedavg_ft"][test])
        assert data["shared"][test]["mean"][-1] == pytest.approx(results["fedavg"][test])
        assert data["fedthe"][test]["mean"] == pytest.approx(results["fedthe"][test])
    by_weight = [{} for _ in WEIGHTS]
    for a, b in zip(small.deploy("fedavg"), small.deploy("fedavg_ft"), strict=True):
        for e, found in zip(WEIGHTS, by_weight, strict=True):

            def logits(own, x, k, e=e, net=a.method.net, shared=a.states):
                flat, received = tree.flatten(own), tree.flatten(tree.take(shared, k))
                return net.logits(tree.unflatten({n: e * received[n] + (1 - e) * flat[n] for n in flat}), x)

            found |= accuracy_by(b, SAMPLES, logits)
    check_interpolation(data, by_weight)


def check_interpolation(data, by_weight):
    shared = [average(found) for found in by_weight]
    keys = by_weight[0].keys()
    best = average({key: np.max([found[key] for found in by_weight], 0) for key in keys})
    for test in TESTS:
        assert data["shared"][test]["mean"] == pytest.approx([each[test] for each in shared])
        assert data["best"][test]["mean"] == pytest.approx(best[test])
        assert data["best"][test]["mean"] >= max(data["shared"][test]["mean"]) - 1e-9
    assert any(np.ptp(data["shared"][test]["mean"]) > 5 for test in TESTS)  # e matters


def test_weights_are_those_of_the_samples(small, tmp_path):
    data = small.measure("weights")["data"]
    small.run(methods=["fedthe", "ablation_11"], out=str(tmp_path / "run"))
    wide = np.diff(data["edges"])
    assert len(wide) == 40
    for method in ("fedthe", "ablation_11"):
        weights = {test: [] for test in TESTS}
        for path in (tmp_path / "run" / "samples").glob(f"{method}-*.npz"):
            for name, values in records.read_samples(path).items():
                if name.endswith("/e"):
                    weights[name.split("/")[0]].append(1 - values.astype(float))
        for test, parts in weights.items():
            each, values = data["weights"][method][test], np.concatenate(parts)
            assert (each["density"] * wide).sum() == pytest.approx(1)
            assert each["samples"] == len(values) <= CLIENTS * len(SEEDS) * SAMPLES
            assert each["mean"] == pytest.approx(values.mean(), abs=1e-6)
            assert (each["density"] * wide)[:20].sum() == pytest.approx((values < 0.5).mean(), abs=1e-9)
    assert data["weights"]["fedthe"] != data["weights"]["ablation_11"]


def test_the_variants_of_the_regime_filter_are_what_they_say(small, tmp_path):
    data = small.measure("regime")["data"]
    alone = small.run(methods=["fedthe_regime", "regime_mirror"], out=str(tmp_path / "run")).table()
    for test in TESTS:
        assert data["accuracy"]["the filter"][test]["mean"] == pytest.approx(alone["fedthe_regime"][test])
        assert data["accuracy"]["2 views: mirror image"][test]["mean"] == pytest.approx(alone["regime_mirror"][test])
    deployed = list(small.deploy("fedthe"))
    of_global = {}
    for each in deployed:  # told that no sample is its own, a client answers by its global head
        method = each.method
        for test, k, images, labels in each.streams():
            mine = tree.take(each.states, k)
            x = scale(torch.from_numpy(images[:SAMPLES]))
            right = heads(method.net, mine, x)[1].argmax(-1).numpy() == labels[:SAMPLES]
            of_global.setdefault(test, {}).setdefault(each.seed, []).append(100 * right.mean())
    for test, seeds in of_global.items():
        wanted = np.mean([np.mean(clients) for clients in seeds.values()])
        assert data["accuracy"]["told: none is own"][test]["mean"] == pytest.approx(wanted)
    assert data["passes"]["10 views: and shifts"] == [10, 0]


def test_features_follow_the_recurrence(small):
    data = small.measure("features")["data"]
    (deployed, *_) = small.deploy("fedthe")
    at = 0
    for test, k, images, _ in deployed.streams():
        mine = tree.take(deployed.states, k)
        h = deployed.method.net.features(mine["body"], scale(torch.from_numpy(images[:SAMPLES]))).numpy()
        history = h[0]
        for feature in h:  # a stream is shorter than what is shown of one, so it is shown whole
            assert (data["test"][at], data["client"][at]) == (test, k)
            assert data["without"][at] == pytest.approx(feature.tolist(), abs=6e-3)
            assert data["with"][at] == pytest.approx((0.1 * feature + 0.9 * history).tolist(), abs=6e-3)
            history = 0.1 * feature + 0.9 * history
            at += 1
    assert at == len(data["with"]) == len(data["without"])
    assert data["seed"] == 0


def test_few_features_are_spread_over_the_stream(small, monkeypatch):
    all_ = small.measure("features")["data"]  # kept for other tests: not with fewer
    monkeypatch.setattr(features, "FEW_SAMPLES", 3)
    monkeypatch.setattr(features, "FEW_CLIENTS", 2)
    few = measure_figure("features", **small.settings)["data"]
    assert len(set(few["client"])) == 2
    assert few["with"][:3] == [all_["with"][0], all_["with"][6], all_["with"][11]]


def test_probing_is_averaged_over_seeds(small):
    measured = small.measure("probing")
    assert measured["data"]["seen"] == ["0", "1"]
    config = make_config(measured["config"])
    dataset = load_dataset(config.dataset, natural=config.natural)
    means = {}
    for seed in SEEDS:
        for deployed in probing.deploy_probes(dataset, config, seed, Loop()):
            found = accuracy_by(deployed, SAMPLES, lambda mine, x, k, net=deployed.method.net: net.logits(mine, x))
            for (test, _), clients in found.items():
                means.setdefault((deployed.name, test), []).append(np.mean(clients))
    assert len(means) == 3 * len(TESTS)
    for (mode, test), values in means.items():
        assert measured["data"]["accuracy"][mode][test]["mean"] == pytest.approx(np.mean(values))
        assert measured["data"]["accuracy"][mode][test]["std"] == pytest.approx(np.std(values, ddof=1))


def test_attacks_cost_what_the_records_say_and_a_model_that_diverged_is_drawn_as_such(small, tmp_path):
    measured = small.measure("attacks")
    cases = measured["data"]["cases"]
    assert [len(rules) for rules in cases.values()] == [5] * 3
    cell = cases["updates times 10"]["Multi-Krum"]["fedavg"]
    settings = {"attackers": 0.2, "attack": 10.0, "aggregation": "multi_krum", "byzantine": 0.2}
    scores = small.run(methods=["fedavg"], clients=5, **settings).scores()["fedavg"]
    for test, (mean, std) in scores.items():
        assert (cell[test]["mean"], cell[test]["std"]) == (pytest.approx(mean), pytest.approx(std))
    assert cell["average"]["mean"] == pytest.approx(np.mean([mean for mean, _ in scores.values()]))
    assert cases["nobody attacks"]["mean"] != cases["updates times 10"]["mean"]
    cases["updates times 10"]["mean"]["fedavg"] = {"failed": "the aggregate in round 3: head.out is not finite"}
    draw_figure(measured, tmp_path / "figure.png")
    check_picture(tmp_path / "figure.png")


def test_default_settings_are_the_papers():
    for name, figure in FIGURES.items():
        config = make_config(figure.settings)
        assert (config.dataset, config.net, config.clients, config.seeds) == ("cifar10", "cnn", 20, (0, 1, 2))
        assert config.dirichlet == (1.0 if name in ("curves-dir1", "probing") else 0.1)
        assert config.rounds == {"curves-500": 500, "curves-1000": 1000}.get(name, 100)


def test_what_is_wrong_is_refused(small):
    with pytest.raises(InputError, match="did you mean alpha-beta"):
        find_figure("alpha_beta")
    for settings, says in (
        ({"name": "weights", "methods": ["fedthe"]}, "leave methods out"),
        ({"name": "alpha-beta", "tests": ["mixtures"]}, "did you mean mixture"),
        ({"name": "alpha-beta", "hyper": {"fedthe": {"history": False}}}, "with a history"),
        ({"name": "gains", "methods": ["fedavg", "fedthe"]}, "relative to fedavg_ft"),
        ({"name": "weights", "samples": 0}, "at least 1"),
    ):
        with pytest.raises(InputError, match=says):
            measure_figure(**small.settings | settings)
    diverging = {"methods": ["fedavg", "fedthe"], "lr": 1e6, "weight_decay": 0.0}
    with pytest.raises(Failed, match="fedavg, seed 0"):
        measure_figure("curves-500", **small.settings | diverging)


def test_deviations_of_earlier_figures_are_restated_once():
    values = [1.0, 4.0, 7.0]
    data = {"ooc": {"mean": 4.0, "std": [float(np.std(values)), None]}, "rounds": [1, 2]}
    older = {"config": {"seeds": [0, 1, 2]}, "data": data}
    restated = restate_figure(older)
    assert restated["data"]["ooc"]["std"] == [pytest.approx(3.0), None]  # 3, 0 and 3 apart, over 2
    assert restated["data"]["rounds"] == [1, 2]
    assert restate_figure(restated) == restated
    assert restate_figure({**older, "config": {"seeds": [0]}})["data"] == data
