"""FedTHE's test-time ensemble, judged by Algorithm 2 taken literally."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracles
from fedthe.errors import InputError
from fedthe.methods.head_ensemble import Search, find_weight, head_ensemble, measure_gap


def make_stream(n=40, d=12, classes=7, seed=0, dtype=torch.float64, confident=3.0):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    tensors = (
        draw(n, d) + draw(d),
        confident * draw(n, classes),
        confident * draw(n, classes),
        draw(d),
        draw(d) + 0.5,
    )
    return tuple(tensor.to(dtype) for tensor in tensors)


@pytest.mark.parametrize(
    "settings", [{}, {"alpha": 0.4, "beta": 0.7}, {"steps": 5, "lr": 0.01}, {"steps": 0}, {"alpha": 0.0, "beta": 1.0}]
)
@pytest.mark.parametrize("n", [1, 2, 64, 65, 150])
def test_it_equals_algorithm_2(n, settings):
    stream = make_stream(n)
    logits, weight, history = oracles.head_ensemble_stream(*stream, **settings)
    fast = head_ensemble(*stream, **settings)
    assert (fast.weight - weight).abs().max() < 1e-6
    assert (fast.logits - logits).abs().max() < 1e-6
    assert (fast.history - history).abs().max() < 1e-9


def test_float32_stays_near_algorithm_2():
    stream = make_stream(100)
    _, weight, _ = oracles.head_ensemble_stream(*stream)
    fast = head_ensemble(*(tensor.float() for tensor in stream))
    assert fast.logits.dtype == torch.float32
    assert (fast.weight - weight).abs().max() < 1e-3


@pytest.mark.parametrize("weighting", ["slw", "fa", "em", "half"])
def test_every_weighting_equals_its_literal_version(weighting):
    h, of_global, of_local, d_g, d_l = make_stream(20)
    _, weight, _ = oracles.head_ensemble_stream(h, of_global, of_local, d_g, d_l, alpha=0, beta=1, weighting=weighting)
    fast = find_weight(of_global, of_local, measure_gap(h, d_g, d_l), Search(), weighting)
    assert (fast - weight).abs().max() < 1e-6


@given(cuts=st.lists(st.integers(1, 199), max_size=6, unique=True), seed=st.integers(0, 50))
def test_chunks_of_a_stream_give_the_same_as_the_whole(cuts, seed):
    h, of_global, of_local, d_g, d_l = make_stream(200, seed=seed)
    whole = head_ensemble(h, of_global, of_local, d_g, d_l)
    edges, history, logits = [0, *sorted(cuts), 200], None, []
    for start, end in pairwise(edges):
        part = slice(start, end)
        answer = head_ensemble(h[part], of_global[part], of_local[part], d_g, d_l, history=history)
        history = answer.history
        logits.append(answer.logits)
    assert (torch.cat(logits) - whole.logits).abs().max() < 1e-9
    assert (history - whole.history).abs().max() < 1e-12


def test_one_by_one_gives_the_same_as_the_whole():
    h, of_global, of_local, d_g, d_l = make_stream(70, dtype=torch.float32)
    whole = head_ensemble(h, of_global, of_local, d_g, d_l)
    history, weights = None, []
    for i in range(70):
        one = head_ensemble(h[i : i + 1], of_global[i : i + 1], of_local[i : i + 1], d_g, d_l, history=history)
        history = one.history
        weights.append(one.weight)
    assert (torch.cat(weights) - whole.weight).abs().max() < 1e-5


def test_it_prefers_the_head_whose_side_the_features_are_on():
    h, of_global, of_local, _, _ = make_stream(30)
    here, far = h.mean(0), h.mean(0) + 50
    assert (head_ensemble(h, of_global, of_local, here, far).weight > 0.5).float().mean() > 0.9
    assert (head_ensemble(h, of_global, of_local, far, here).weight < 0.5).float().mean() > 0.9


def test_together_gives_one_weight_that_minimises_the_mean():
    h, of_global, of_local, d_g, d_l = make_stream(16)
    gap = measure_gap(h, d_g, d_l)
    weight = find_weight(of_global, of_local, gap, Search(), together=True)
    assert (weight == weight[0]).all()
    assert not torch.allclose(weight, find_weight(of_global, of_local, gap, Search()))


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(place, value):
    stream = [tensor.clone() for tensor in make_stream(3)]
    stream[place].view(-1)[0] = value
    with pytest.raises(InputError, match="holds inf or nan") as refused:
        head_ensemble(*stream)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: (s[0][:2], *s[1:]),
        lambda s: (s[0][:0], s[1][:0], s[2][:0], *s[3:]),
        lambda s: (s[0], s[1][:, :3], *s[2:]),
        lambda s: (*s[:3], s[3][:2], s[4]),
        lambda s: (s[0][0], *s[1:]),
        lambda s: (s[0], s[1].long(), *s[2:]),
        lambda s: (s[0].float(), *s[1:]),
    ],
)
def test_shapes_and_types_that_disagree_are_refused(change):
    with pytest.raises(InputError, match="head_ensemble needs") as refused:
        head_ensemble(*change(make_stream(3)))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("setting", [{"alpha": 1.5}, {"beta": -0.1}, {"steps": -1}, {"lr": 0.0}, {"lr": float("inf")}])
def test_settings_out_of_range_are_refused(setting):
    with pytest.raises(InputError, match="must be"):
        head_ensemble(*make_stream(3), **setting)
