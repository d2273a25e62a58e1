"""The regime filter, judged by a literal version in plain Python."""

import re
from dataclasses import fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedthe
from fedthe import tree
from fedthe.data import load_dataset
from fedthe.data.plan import Settings, build
from fedthe.data.pool import Dataset, Pool
from fedthe.engine.evaluate import make_samples
from fedthe.engine.fit import Optimizer
from fedthe.engine.loop import Loop
from fedthe.engine.shards import Shards
from fedthe.engine.train import deploy_some, train
from fedthe.engine.visit import Run, Training
from fedthe.errors import InputError
from fedthe.methods import METHODS, compose, regime
from fedthe.methods.memo import Memo
from fedthe.methods.regime import Mixes, Regimes, regime_ensemble
from fedthe.methods.regime_filter import RegimeFilter
from fedthe.methods.scans import filter_forward
from fedthe.methods.two_heads import heads
from fedthe.methods.views import Views
from fedthe.nets import CNN
from fedthe.types import scale
from oracles_regime import best_temperature, regime_stream

COUNTS = [300.0, 5.0, 80.0, 0.0, 0.0]
OTHERS = {
    "own": (0.0, 0.5, 0.8, 1.0),
    "start": (0.2, 0.1, 0.3, 0.4),
    "leave": 0.1,
    "trust": 1.0,
    "personal": 0.9,
    "smooth": 0.05,
    "recent": 0.3,
    "forget": 0.5,
    "regress": 0.3,
    "penalty": 0.7,
}


def make_stream(n=60, classes=5, seed=0, dtype=torch.float64, size=3.0):
    """Logits of two heads that agree more often than not."""
    g = torch.Generator().manual_seed(seed)
    both = size * torch.randn(n, classes, generator=g, dtype=torch.float64)
    own = both + size / 2 * torch.randn(n, classes, generator=g, dtype=torch.float64)
    return both.to(dtype), own.to(dtype)


def ask_literally(of_global, of_local, counts=COUNTS, **settings):
    answers, state = regime_stream(of_global.tolist(), of_local.tolist(), list(counts), **settings)
    p, q = (torch.tensor(each, dtype=torch.float64) for each in zip(*answers, strict=True))
    return p, q, state


@pytest.mark.parametrize("n", [1, 2, 3, 64, 65, 200])
@pytest.mark.parametrize(
    "settings", [{}, {"recent": 0.0}, {"leave": 1e-6}, OTHERS], ids=["defaults", "r0", "l0", "others"]
)
def test_it_equals_the_literal_filter(n, settings):
    stream = make_stream(n)
    for counts in (COUNTS, [0.0] * 5, [0.0, 0.0, 9.0, 0.0, 0.0]):
        fast = regime_ensemble(*stream, torch.tensor(counts), temperatures=(0.8, 1.3), settings=Regimes(**settings))
        probabilities, own, state = ask_literally(*stream, counts, temperatures=(0.8, 1.3), **settings)
        assert (fast.probabilities - probabilities).abs().max() < 1e-12
        assert (fast.own - own).abs().max() < 1e-12
        for name, value in zip(regime.STATE, state, strict=True):
            assert (fast.state[name] - torch.tensor(value, dtype=torch.float64)).abs().max() < 1e-12
        assert (fast.probabilities.sum(-1) - 1).abs().max() < 1e-12


@pytest.mark.parametrize("federation", [[500.0, 20.0, 90.0, 300.0, 0.0], [0.0] * 5])
@pytest.mark.parametrize("counts", [COUNTS, [0.0] * 5])
def test_it_equals_the_literal_filter_of_a_federation_with_unequal_classes(counts, federation):
    stream, equal = make_stream(80), sum(federation) == 0
    given = torch.tensor(federation)
    fast = regime_ensemble(*stream, torch.tensor(counts), federation_counts=given, settings=Regimes(**OTHERS))
    probabilities, own, state = ask_literally(*stream, counts, federation=federation, **OTHERS)
    assert (fast.probabilities - probabilities).abs().max() < 1e-12
    assert (fast.own - own).abs().max() < 1e-12
    for name, value in zip(regime.STATE, state, strict=True):
        assert (fast.state[name] - torch.tensor(value, dtype=torch.float64)).abs().max() < 1e-12
    plain = regime_ensemble(*stream, torch.tensor(counts), settings=Regimes(**OTHERS))
    assert torch.allclose(fast.probabilities, plain.probabilities, rtol=1e-9, atol=1e-12) == equal
    whole = regime_ensemble(*stream, np.array(counts), federation_counts=np.array(federation, dtype=np.int32))
    parts = [regime_ensemble(*(z[:30] for z in stream), np.array(counts), federation_counts=given)]
    parts += [
        regime_ensemble(*(z[30:] for z in stream), np.array(counts), federation_counts=given, state=parts[0].state)
    ]
    assert (torch.cat([part.probabilities for part in parts]) - whole.probabilities).abs().max() < 1e-12


@pytest.mark.parametrize("name", OTHERS)
def test_every_setting_changes_the_answer(name):
    stream = make_stream(50)
    settings = {name: OTHERS[name]} | ({"start": OTHERS["start"]} if name == "own" else {})
    settings |= {"own": OTHERS["own"]} if name == "start" else {}
    base = regime_ensemble(*stream, torch.tensor(COUNTS)).probabilities
    assert (
        regime_ensemble(*stream, torch.tensor(COUNTS), settings=Regimes(**settings)).probabilities - base
    ).abs().max() > 1e-5


def test_the_settings_are_those_of_the_literal_filter():
    assert [each.name for each in fields(Regimes)] == list(OTHERS)


@given(cuts=st.lists(st.integers(1, 149), max_size=6, unique=True), seed=st.integers(0, 50))
def test_chunks_of_a_stream_give_the_same_as_the_whole(cuts, seed):
    stream, counts = make_stream(150, seed=seed), torch.tensor(COUNTS)
    whole, state, parts = regime_ensemble(*stream, counts), None, []
    for start, end in pairwise([0, *sorted(cuts), 150]):
        part = regime_ensemble(*(each[start:end] for each in stream), counts, state=state)
        state = part.state
        parts.append(part)
    assert (torch.cat([part.probabilities for part in parts]) - whole.probabilities).abs().max() < 1e-12
    assert (torch.cat([part.own for part in parts]) - whole.own).abs().max() < 1e-12
    for name in regime.STATE:
        assert (state[name] - whole.state[name]).abs().max() < 1e-12


def test_one_by_one_in_float32_gives_the_same_as_the_whole():
    stream, counts = make_stream(80, dtype=torch.float32), torch.tensor(COUNTS)
    whole, state, found = regime_ensemble(*stream, counts), None, []
    for row in range(80):
        one = regime_ensemble(stream[0][row : row + 1], stream[1][row : row + 1], counts, state=state)
        state = one.state
        found.append(one.probabilities)
    assert whole.probabilities.dtype == torch.float32
    assert whole.state["mix"].dtype == torch.float64
    assert (torch.cat(found) - whole.probabilities).abs().max() < 1e-6


def draw_samples(rng, mix, n, certain=4.0):
    """Labels of a class mix, and the logits of a calibrated head under equal classes."""
    labels = rng.choice(len(mix), n, p=mix)
    z = rng.normal(size=(n, len(mix)))
    z[np.arange(n), labels] += np.sqrt(certain)
    return labels, np.sqrt(certain) * z  # the likelihood ratio of unit normals that are so far apart


def test_it_tells_the_clients_own_samples_from_everybodys_and_answers_better():
    rng = np.random.default_rng(0)
    mix, equal = np.array([0.6, 0.3, 0.1, 0, 0]), np.full(5, 0.2)
    counts = 300 * mix
    own, of_own = draw_samples(rng, mix, 200)
    other, of_other = draw_samples(rng, equal, 200)
    labels, logits = np.r_[own, other], np.r_[of_own, of_other]
    local = logits + np.log(mix + 0.01)
    found = regime_ensemble(logits, local, counts)
    assert found.own[50:200].mean() > 0.9
    assert found.own[250:].mean() < 0.25
    right = found.probabilities.argmax(-1).numpy() == labels
    assert right.mean() > (logits.argmax(-1) == labels).mean() + 0.02
    assert right.mean() > (local.argmax(-1) == labels).mean() + 0.02


def test_a_stream_sorted_by_class_is_followed():
    rng = np.random.default_rng(1)
    labels, logits = draw_samples(rng, np.full(5, 0.2), 300)
    order = np.argsort(labels, kind="stable")
    labels, logits = labels[order], logits[order]
    counts = np.full(5, 60.0)

    def score(**settings):
        found = regime_ensemble(logits, logits, counts, settings=Regimes(**settings))
        return (found.probabilities.argmax(-1).numpy() == labels).mean()

    assert score() > score(recent=0) + 0.05


def test_an_unknown_mix_is_learned_from_the_stream():
    rng = np.random.default_rng(2)
    labels, logits = draw_samples(rng, np.array([0.9, 0.1, 0, 0, 0]), 300)
    found = regime_ensemble(logits, logits, np.zeros(5))
    assert (found.probabilities.argmax(-1).numpy() == labels).mean() > (logits.argmax(-1) == labels).mean() + 0.05
    assert found.state["mix"][0] > 0.6


def test_hand_worked_numbers():
    """Two classes, ten rows of the first: with smooth 0.2 the mix is (0.9, 0.1); p_g = (0.5, 0.5) is no evidence."""
    settings = Regimes(own=(1.0,), start=(1.0,), smooth=0.2, recent=0.0, personal=0.0)
    found = regime_ensemble(np.zeros((1, 2)), np.zeros((1, 2)), np.array([10.0, 0.0]), settings=settings)
    assert found.probabilities.numpy() == pytest.approx(np.array([[0.9, 0.1]]))
    # half of the samples are own: q = 1/2 without evidence, and the answer is half way to equal classes
    settings = Regimes(own=(0.5,), start=(1.0,), smooth=0.2, recent=0.0, personal=0.0)
    found = regime_ensemble(np.zeros((1, 2)), np.zeros((1, 2)), np.array([10.0, 0.0]), settings=settings)
    assert float(found.own[0]) == pytest.approx(0.5)
    assert found.probabilities.numpy() == pytest.approx(np.array([[0.7, 0.3]]))


def test_the_forward_filter_is_bayes_rule_over_thousands_of_samples():
    g = torch.Generator().manual_seed(0)
    likely = torch.rand(5000, 3, generator=g, dtype=torch.float64) ** 4
    start, leave = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64), 0.003
    before, last = filter_forward(likely, start, start, leave)
    w = start
    for row in range(5000):
        assert (before[row] - w).abs().max() < 1e-11
        w = w * likely[row] / (w * likely[row]).sum()
        w = (1 - leave) * w + leave * start
    assert (last - w).abs().max() < 1e-11


@pytest.mark.parametrize(
    "settings",
    [
        {"leave": 1e-6},
        {"recent": 0.0},
        {"recent": 1e-6, "leave": 1e-6, "trust": 1.0},
        {"start": (1e-6, 1e-6, 1 - 2e-6), "leave": 1e-6, "trust": 1.0, "smooth": 1e-6},
        {"regress": 1e-6, "forget": 1.0, "penalty": 1.0},
        {"own": (1.0,), "start": (1.0,), "smooth": 1e-6, "trust": 1.0},
        {"own": (0.0, 1.0), "start": (0.5, 0.5), "leave": 1e-6},
    ],
)
def test_long_streams_of_certain_samples_underflow_nowhere(settings):
    """Two thousand samples of held classes, then as many of others: whole and in chunks."""
    labels = torch.cat([torch.arange(2000) % 2, 2 + torch.arange(2000) % 3])
    counts = torch.tensor([100, 100, 0, 0, 0])
    for size in (20.0, 1e4):
        logits = size * torch.nn.functional.one_hot(labels, 5).double()
        whole = regime_ensemble(logits, logits, counts, settings=Regimes(**settings))
        assert whole.probabilities.isfinite().all()
        state, parts = None, []
        for part in logits.split(333):
            found = regime_ensemble(part, part, counts, state=state, settings=Regimes(**settings))
            state = found.state
            parts.append(found.probabilities)
        assert (torch.cat(parts) - whole.probabilities).abs().max() < 1e-9


@pytest.mark.parametrize("classes", [3, 10, 100, 1000])
def test_it_leaves_the_clients_own_mix_with_any_number_of_classes(classes):
    """A hundred samples of the client's two classes, then thirty of others."""
    labels = torch.cat([torch.arange(100) % 2, torch.full((30,), 2)])
    logits = 10.0 * torch.nn.functional.one_hot(labels, classes).double()
    logits[:, 2] += classes**0.5 / 10  # any difference between logits
    counts = torch.zeros(classes)
    counts[:2] = 100
    own = regime_ensemble(logits, logits, counts).own
    assert own[50:100].mean() > 0.9
    assert own[110:].max() < 0.2


@pytest.mark.parametrize("row", [0, 7, 19])
def test_a_bad_row_does_not_reach_the_rows_before_it(row):
    of_global, of_local = make_stream(20)
    settings = Regimes()
    mixes = Mixes.of(torch.tensor(COUNTS), torch.full((5,), 0.2), settings)

    def answer(z):
        alone = regime.answer_alone(z, of_local, mixes, settings)
        return regime.combine(alone, regime.follow(alone, mixes, regime.begin(mixes, settings), settings)[0])

    good, bad = answer(of_global), of_global.clone()
    bad[row] = float("nan")
    assert torch.equal(answer(bad)[:row], good[:row])


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e3, 1e30, 1e99])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finite_numbers_give_finite_answers_and_gradients(size, dtype):
    if dtype == torch.float32 and size > 1e37:
        return
    stream = [each.clone().requires_grad_() for each in make_stream(20, dtype=dtype, size=size)]
    found = regime_ensemble(*stream, torch.tensor(COUNTS), temperatures=(0.3, 6.0))
    assert found.probabilities.isfinite().all()
    (found.probabilities[:, 0].sum() + found.own.sum()).backward()
    assert all(each.grad.isfinite().all() for each in stream)
    assert not any(value.requires_grad for value in found.state.values())


def test_gradients_are_those_of_the_formula():
    stream = [each.requires_grad_() for each in make_stream(6)]
    counts = torch.tensor(COUNTS, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *logits: tuple(regime_ensemble(*logits, counts)[:2]), stream)


def test_arrays_and_whole_counts_give_what_tensors_give():
    stream, counts = make_stream(30, dtype=torch.float32), torch.tensor(COUNTS)
    wanted = regime_ensemble(*stream, counts).probabilities
    for given_ in (
        counts.numpy(),
        counts.numpy().astype(np.int64),
        counts.to(torch.uint16),
        counts.to(torch.int32),
        counts.double(),
    ):
        found = regime_ensemble(*(each.numpy() for each in stream), given_).probabilities
        assert torch.equal(found, wanted)


def test_what_cannot_be_filtered_is_refused_in_a_sentence():
    (g, own), counts = make_stream(4, dtype=torch.float32), torch.tensor(COUNTS)
    state = regime_ensemble(g, own, counts).state
    nan = g.clone()
    nan[2, 1] = float("nan")
    for match, arguments, settings in (
        ("two logits", (g, own[:3], counts), {}),
        ("two logits", (g, own, counts[:4]), {}),
        ("two logits", (g[:0], own[:0], counts), {}),
        ("two logits", (g, own, counts), {"state": state | {"mix": torch.ones(3)}}),
        ("finite", (nan, own, counts), {}),
        ("the same throughout", (g, own.double(), counts), {}),
        ("the same throughout", (g.half(), own.half(), counts), {}),
        ("convert it", (g.tolist(), own, counts), {}),
        ("not negative", (g, own, -counts), {}),
        ("federation_counts that are not negative", (g, own, counts), {"federation_counts": -counts}),
        ("federation_counts \\[4\\]", (g, own, counts), {"federation_counts": counts[:4]}),
        ("at most", (g, own, counts.double() * 1e105), {}),
        ("call before", (g, own, counts), {"state": {"mix": counts}}),
        ("call before", (g, own, counts), {"state": counts}),
        ("probabilities", (g, own, counts), {"state": state | {"regimes": torch.tensor([1.0, 1.0, -1.0])}}),
        ("probabilities", (g, own, counts), {"state": state | {"regimes": torch.ones(3)}}),
        ("temperatures", (g, own, counts), {"temperatures": (1.0, 0.0)}),
        ("temperatures", (g, own, counts), {"temperatures": (1.0, float("nan"))}),
        ("temperatures", (g, own, counts), {"temperatures": 2.0}),
        ("temperatures", (g, own, counts), {"temperatures": (1.0, 1.0, 1.0)}),
        ("Regimes", (g, own, counts), {"settings": 3}),
    ):
        with pytest.raises(InputError, match=match) as caught:
            regime_ensemble(*arguments, **settings)
        assert "\n" not in str(caught.value)
        assert ("federation" in str(caught.value)) == ("federation_counts" in settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"own": (0.5,)},
        {"start": (0.5, 0.5, 0.5)},
        {"own": (0.5, 0.5, 2.0)},
        {"own": ()},
        {"own": 0.5},
        {"leave": -0.1},
        {"leave": 0.0},
        {"regress": 0.0},
        {"start": (0.0, 0.5, 0.5)},
        {"recent": 1.0},
        {"trust": float("nan")},
        {"smooth": 0},
        {"penalty": 0.0},
        {"recent": "often"},
    ],
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(InputError):
        Regimes(**settings)


def test_the_temperature_is_the_best_of_its_grid_and_padding_does_not_count():
    rng = np.random.default_rng(3)
    labels, logits = draw_samples(rng, np.full(4, 0.25), 60)
    z, y = torch.tensor(2.5 * logits), torch.tensor(labels)
    grid = np.geomspace(0.3, 6, 40)
    padded = torch.cat([z, 100 * torch.randn(7, 4)]), torch.cat([y, torch.zeros(7, dtype=torch.int64)])
    found = regime.fit_temperature(*padded, torch.arange(67) < 60)
    assert float(found) == pytest.approx(best_temperature(z.tolist(), y.tolist(), list(grid)), rel=1e-4)
    assert 1.5 < float(found) < 4  # the logits are 2.5 times too large
    assert float(regime.fit_temperature(*padded, torch.zeros(67, dtype=torch.bool))) == 1


def test_views_show_the_image_its_mirror_image_and_shifts():
    x = torch.arange(2 * 1 * 4 * 5, dtype=torch.float32).view(2, 1, 4, 5)
    views = list(Views(shift=1).make(x))
    assert len(views) == Views(shift=1).count == 10
    assert torch.equal(views[0], x)
    assert torch.equal(views[1], x.flip(-1))
    assert torch.equal(views[2][..., 1:], x[..., :-1])  # one to the right, and the edge again
    assert torch.equal(views[2][..., 0], x[..., 0])
    assert torch.equal(views[8][:, :, :-1], x[:, :, 1:])
    assert Views().count == 2
    mean = Views().average(lambda seen: (seen.sum((1, 2)), 2 * seen), x)
    assert torch.allclose(mean[0], (x + x.flip(-1)).sum((1, 2)) / 2)
    for wrong in ({"mirror": False}, {"shift": -1}):
        with pytest.raises(InputError, match="shift"):
            Views(**wrong)


def test_the_numpy_version_of_the_docs_gives_the_same():
    page = (Path(__file__).parents[2] / "docs/research.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def regime_filter" in block)
    names = {}
    exec(code, names)
    stream = make_stream(80)
    found = list(names["regime_filter"](*(each.numpy() for each in stream), np.array(COUNTS)))
    wanted = regime_ensemble(*stream, torch.tensor(COUNTS, dtype=torch.float64))
    assert np.array([p for p, _ in found]) == pytest.approx(wanted.probabilities.numpy(), abs=1e-12)
    assert np.array([q for _, q in found]) == pytest.approx(wanted.own.numpy(), abs=1e-12)


def test_it_is_public():
    assert fedthe.regime_ensemble is regime_ensemble


# the predictor, on a client that was trained


@cache
def deploy():
    """The first client of a small federation after FedTHE's training: its method, state and shard, and 40 samples."""
    pool = load_dataset("glyphs", size=16).pool
    few = Pool("few glyphs", pool.x[:600], pool.labels[:600], pool.classes)
    federation = build(Dataset(few), Settings(clients=2, dirichlet=0.1))
    method = compose(CNN(10, size=16), METHODS["fedthe_regime"])
    optimizer = Optimizer(lr=0.05, momentum=0.9)
    settings = Training(rounds=3, local_epochs=2, batch=32, crop=0, flip=False, optimizer=optimizer)
    shards = Shards(federation)
    reached = train(method.training, shards, settings, seed=0)
    mine = tree.take(deploy_some(method, Run(0, shards), settings, reached, Loop(), [0]), 0)
    x = np.concatenate([federation.inputs(federation.tests[test][0])[:20] for test in ("original", "ooc")])
    return method, mine, shards[0], x


def answer(predictor, chunk=40):
    method, mine, shard, x = deploy()
    method = replace(method, predictor=predictor)
    state, found = predictor.start(method, mine, shard), []
    for first in range(0, len(x), chunk):
        part = torch.from_numpy(x[first : first + chunk])
        samples = make_samples(method, part, (0, "test", first))
        said, state = method.answer(mine, state, samples)
        found.append(said)
    return torch.cat([each.logits for each in found]), {
        name: torch.cat([each.info[name] for each in found]) for name in found[0].info
    }


def look(params, x):
    return [each.double() for each in heads(CNN(10, size=16), params, x)[1:]]


@pytest.mark.parametrize("chunk", [40, 1, 7])
def test_the_predictor_is_the_filter_with_fitted_temperatures(chunk):
    _, mine, shard, x = deploy()
    grid = list(np.geomspace(0.3, 6, 40))
    on_val = look(mine, scale(shard.val_x))
    temperatures = [best_temperature(z.tolist(), shard.val_labels.tolist(), grid) for z in on_val]
    assert len(set(temperatures)) == 2
    of_global, of_local = look(mine, scale(torch.from_numpy(x)))
    p, q, _ = ask_literally(of_global, of_local, shard.counts.tolist(), temperatures=temperatures)
    logits, info = answer(RegimeFilter(), chunk)
    assert (logits.double().softmax(-1) - p).abs().max() < 1e-4  # the grid is in float64 here, the network in float32
    assert (1 - info["e"] - q).abs().max() < 1e-4
    assert torch.equal(info["global"].long(), of_global.argmax(-1))
    p, _, _ = ask_literally(of_global, of_local, shard.counts.tolist())
    assert (answer(RegimeFilter(calibrate=False), chunk)[0].double().softmax(-1) - p).abs().max() < 1e-5


def test_views_average_the_heads_before_the_filter():
    _, mine, shard, x = deploy()
    seen = scale(torch.from_numpy(x))
    of_heads = [(a + b) / 2 for a, b in zip(look(mine, seen), look(mine, seen.flip(-1)), strict=True)]
    p, _, _ = ask_literally(*of_heads, shard.counts.tolist())
    found, _ = answer(RegimeFilter(calibrate=False, then=Views()))
    assert (found.double().softmax(-1) - p).abs().max() < 1e-5
    assert RegimeFilter(then=Views(shift=2)).passes == (10, 0)


@pytest.mark.parametrize("federation", [False, True])
def test_memo_tunes_for_the_fixed_weights_of_the_filter(federation):
    """A literal version: plain SGD on the marginal entropy of a sample's views, with own, recent and ratio fixed."""
    method, mine, shard, x = deploy()
    everybody = (torch.arange(10.0) + 1).double() / 55 if federation else torch.full((10,), 0.1).double()
    mine = mine | ({"everybody": everybody} if federation else {})
    predictor = RegimeFilter(calibrate=False, then=Memo(views=3, steps=2, lr=0.05), federation=federation)
    tuned = replace(method, predictor=predictor)
    state = predictor.start(tuned, mine, shard)
    samples = make_samples(tuned, torch.from_numpy(x[:3]), (0, "memo"))
    said, _ = tuned.answer(mine, state, samples)
    mixes = Mixes.of(shard.counts, everybody, Regimes())
    alone = regime.answer_alone(*look(mine, scale(torch.from_numpy(x[:3]))), mixes, Regimes())
    weights, _ = regime.follow(alone, mixes, regime.begin(mixes, Regimes()), Regimes())
    for i in range(3):
        of_sample = regime.Weights(*(each[i : i + 1] for each in weights))
        params = tree.map_leaves(lambda leaf: leaf.clone().requires_grad_(), mine)
        leaves = [
            leaf for name, leaf in tree.flatten(params).items() if "descriptor" not in name and name != "everybody"
        ]

        def ask(x, params=params, of_sample=of_sample):
            return regime.combine(regime.answer_alone(*look(params, x), mixes, Regimes()), of_sample)

        for seen in samples.views(torch.tensor([i]))[0]:
            mean = ask(seen).mean(0)
            gradients = torch.autograd.grad(-(mean * mean.log()).sum(), leaves)
            with torch.no_grad():
                for leaf, gradient in zip(leaves, gradients, strict=True):
                    leaf -= 0.05 * gradient
        wanted = ask(scale(torch.from_numpy(x[i : i + 1]))).detach()
        assert (said.logits[i].double().softmax(-1) - wanted[0]).abs().max() < 1e-5
        assert (wanted[0] - regime.combine(alone, weights)[i]).abs().max() > 1e-4  # tuning matters
    assert predictor.passes == (8, 6)


def test_a_client_without_labels_follows_the_stream():
    method, mine, shard, _ = deploy()
    nobody = shard._replace(counts=torch.zeros(10), val_real=torch.zeros_like(shard.val_real))
    state = RegimeFilter().start(method, mine, nobody)
    assert state["temperatures"].tolist() == [1, 1]
    assert state["own"].numpy() == pytest.approx(np.full(10, 0.1))


def test_the_settings_of_the_filter_reach_the_predictor():
    _, mine, shard, x = deploy()
    p, _, _ = ask_literally(*look(mine, scale(torch.from_numpy(x))), shard.counts.tolist(), smooth=0.5)
    found, _ = answer(RegimeFilter(calibrate=False, regimes=Regimes(smooth=0.5)))
    assert (found.double().softmax(-1) - p).abs().max() < 1e-5
