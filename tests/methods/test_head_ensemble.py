"""FedTHE's test-time ensemble, judged by Algorithm 2 taken literally."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import oracles
from fedthe.errors import InputError
from fedthe.methods.head_ensemble import Search, find_weight, head_ensemble, measure_gap, mix, smooth

PLACES = ("features", "global_logits", "local_logits", "global_descriptor", "local_descriptor")


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


# scale


def make_scaled(seed, largest, n=3, d=4, classes=3):
    """float32, with features, logits and descriptors each on a scale of its own from 1e-6 to `largest`."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    powers = torch.rand(3, generator=g, dtype=torch.float64)
    of_h, of_logits, of_descriptor = ((largest / 1e-6) ** float(power) * 1e-6 for power in powers)
    tensors = (
        of_h * (draw(n, d) + draw(d)),
        of_logits * draw(n, classes),
        of_logits * draw(n, classes),
        of_descriptor * draw(d),
        of_descriptor * draw(d),
    )
    return tuple(tensor.float() for tensor in tensors)


def test_float32_of_any_scale_equals_the_literal_version_in_float64():
    for seed in range(100):
        stream = make_scaled(seed, 1e6)
        logits, weight, history = oracles.head_ensemble_stream(*stream)
        fast = head_ensemble(*stream)
        assert (fast.weight - weight).abs().max() < 1e-3, seed
        assert (fast.logits - logits).abs().max() < 1e-3 * logits.abs().max(), seed
        assert (fast.history - history).abs().max() <= 1e-14 * stream[0].abs().max(), seed


@pytest.mark.parametrize("largest", [1e6, 1e37])
def test_any_scale_equals_sixty_digits(largest):
    moved = 0
    for seed in range(40):
        stream = make_scaled(seed, largest)
        weight = oracles.head_ensemble_exact(*stream)
        assert (head_ensemble(*stream).weight - weight).abs().max() < 1e-6, seed
        moved += int(((weight - 0.5).abs() > 0.01).any())
    assert moved > 20  # else nothing was searched


@pytest.mark.parametrize("offset", [0, 1e3, 1e6])
def test_features_and_descriptors_far_from_zero_equal_sixty_digits(offset):
    h, of_global, of_local, d_g, d_l = (tensor.float() for tensor in make_stream(10))
    stream = (h + offset, of_global, of_local, d_g + offset, d_l + offset)
    weight = oracles.head_ensemble_exact(*stream)
    assert (head_ensemble(*stream).weight - weight).abs().max() < 1e-6
    history, weights = None, []  # one by one: a history rounded to float32 after every sample would not do
    for row in zip(*(tensor.split(1) for tensor in stream[:3]), strict=True):
        one = head_ensemble(*row, *stream[3:], history=history)
        history = one.history
        weights.append(one.weight)
    assert (torch.cat(weights) - weight).abs().max() < 1e-6


def test_the_slow_oracles_agree():
    stream = make_stream(5)
    _, weight, _ = oracles.head_ensemble_stream(*stream)
    assert (oracles.head_ensemble_exact(*stream) - weight).abs().max() < 1e-9


def test_features_far_from_both_descriptors_still_tell_which_is_nearer():
    *_, d_g, d_l = make_stream(1, dtype=torch.float32)
    far = 1e16 * (d_g - d_l)  # where d_g is nearer by the distance between the two
    assert measure_gap(far[None], d_g, d_l).item() == pytest.approx(-float((d_g.double() - d_l).norm()), rel=1e-6)


@pytest.mark.parametrize("offset", [1e4, 1e6])
def test_an_offset_of_the_logits_changes_no_weight(offset):
    h, of_global, of_local, d_g, d_l = make_stream(20, dtype=torch.float32)
    of_global, of_local = (8 * of_global).round() / 8, (8 * of_local).round() / 8  # so that float32 holds the sums
    weight = head_ensemble(h, of_global, of_local, d_g, d_l).weight
    assert (head_ensemble(h, of_global + offset, of_local - offset, d_g, d_l).weight == weight).all()


@pytest.mark.parametrize("size", [1.0, 1e10, 1e30])
def test_heads_that_say_the_same_stay_even(size):
    """Then lam is 1 and the entropy is flat. A lam of 1 - 1e-16, times a gap of 1e30, would decide."""
    h, of_global, _, d_g, d_l = make_stream(50, dtype=torch.float32)
    assert (head_ensemble(size * h, of_global, of_global, size * d_g, size * d_l).weight == 0.5).all()


def make_huge(seed, size, dtype, n=4, d=3, classes=4):
    """Every number is 0, `size`, -`size`, or an ordinary one."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        huge = size * torch.randint(-1, 2, shape, generator=g).double()
        ordinary = torch.randn(*shape, generator=g, dtype=torch.float64)
        return torch.where(torch.rand(*shape, generator=g) < 0.7, huge, ordinary).to(dtype)

    return draw(n, d), draw(n, classes), draw(n, classes), draw(d), draw(d)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(3.4e38, torch.float32), (1e-40, torch.float32), (1e100, torch.float64), (1e-300, torch.float64)],
)
def test_finite_numbers_give_finite_answers_and_gradients(size, dtype):
    for seed in range(25):
        stream = [tensor.requires_grad_() for tensor in make_huge(seed, size, dtype)]
        answer = head_ensemble(*stream)
        assert all(tensor.isfinite().all() for tensor in answer), seed
        assert ((answer.weight >= 0) & (answer.weight <= 1)).all(), seed
        again = head_ensemble(*stream, history=answer.history)
        assert all(tensor.isfinite().all() for tensor in again), seed
        for part in (answer.logits, answer.weight, again.weight):
            gradients = torch.autograd.grad(part.sum(), stream, retain_graph=True)
            assert all(gradient.isfinite().all() for gradient in gradients), seed


def test_a_mixture_of_the_largest_numbers_is_finite():
    largest = torch.full((1000, 1), torch.finfo(torch.float32).max)
    mixed = mix(torch.linspace(0, 1, 1000), largest, largest)
    assert mixed.dtype == torch.float32
    assert (mixed == largest).all()


# what is not finite stays where it is


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("row", [0, 1, 5, 127, 128, 129, 200])
def test_a_bad_row_does_not_reach_the_rows_before_it(row, value):
    clean = make_stream(300, dtype=torch.float32)[0]
    bad = clean.clone()
    bad[row, 3] = value
    whole, broken = smooth(clean, clean[0], 0.1, 0.1)[0], smooth(bad, clean[0], 0.1, 0.1)[0]
    others = torch.arange(clean.shape[1]) != 3
    assert torch.equal(broken[:row], whole[:row])
    assert torch.equal(broken[:, others], whole[:, others])  # nor the other coordinates
    assert not broken[row:, 3].isfinite().any()


def test_nor_does_it_under_vmap():
    clean = torch.stack([make_stream(40, seed=seed, dtype=torch.float32)[0] for seed in range(3)])
    bad = clean.clone()
    bad[1, 20:] = float("nan")  # one of three streams is filled up with NaN

    def lift(streams):
        return torch.vmap(lambda h: smooth(h, h[0], 0.1, 0.1)[0])(streams)

    assert torch.equal(lift(bad)[0], lift(clean)[0])
    assert torch.equal(lift(bad)[1, :20], lift(clean)[1, :20])
    assert torch.equal(lift(bad)[2], lift(clean)[2])
    assert (lift(clean)[1] - smooth(clean[1], None, 0.1, 0.1)[0]).abs().max() < 1e-12


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_smoothing_is_the_recurrence(alpha):
    h = make_stream(300)[0]
    smoothed, last = smooth(h, h[5], alpha, 0.2)
    history = h[5]
    for row, found in zip(h, smoothed, strict=True):
        assert (found - (0.2 * row + 0.8 * history)).abs().max() < 1e-12
        history = alpha * row + (1 - alpha) * history
    assert (last - history).abs().max() < 1e-12


# gradients


def test_gradients_are_those_of_the_whole_search():
    *stream, history = (tensor.requires_grad_() for tensor in (*make_stream(3, 4, 3), make_stream(1, 4)[3] + 1))

    def answer(*given):
        return head_ensemble(*given[:5], history=given[5])[:2]

    assert torch.autograd.gradcheck(answer, (*stream, history))


def make_ties():
    h, of_global, of_local, d_g, d_l = make_stream(4, dtype=torch.float32)
    on_it = d_g.expand(4, -1)
    return {
        "heads agree": (h, of_global, of_global, d_g, d_l),
        "heads agree but for an offset": (h, of_global, of_global + 1, d_g, d_l),
        "a feature is the global descriptor": (on_it, of_global, of_local, d_g, d_l),
        "a feature is the local descriptor": (on_it, of_global, of_local, d_l, d_g),
        "a feature is both descriptors": (on_it, of_global, of_local, d_g, d_g),
        "nothing decides": (on_it, of_global, of_global, d_g, d_g),
        "the heads mirror each other": (on_it, of_global, of_global.flip(-1), d_g, d_g),
        "all zeros": tuple(0 * tensor for tensor in (h, of_global, of_local, d_g, d_l)),
        "one class": (h, of_global[:, :1], of_local[:, :1], d_g, d_l),
    }


@pytest.mark.parametrize("part", ["logits", "weight"])
@pytest.mark.parametrize("tie", list(make_ties()))
def test_gradients_at_a_tie_are_finite(tie, part):
    stream = [tensor.clone().requires_grad_() for tensor in make_ties()[tie]]
    getattr(head_ensemble(*stream), part).sum().backward()
    for name, tensor in zip(PLACES, stream, strict=True):
        assert tensor.grad.isfinite().all(), name
        assert tensor.grad.dtype == torch.float32


def count_nodes(tensor):
    """Of the graph that a tensor keeps."""
    seen, ahead = set(), [tensor.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [before for before, _ in node.next_functions]
    return len(seen)


def test_a_history_keeps_no_graph():
    h, of_global, of_local, d_g, d_l = make_stream(1)
    h.requires_grad_()
    first = head_ensemble(h, of_global, of_local, d_g, d_l)
    assert first.history.grad_fn is None
    assert not first.history.requires_grad
    history, sizes = first.history, []
    for _ in range(5):
        answer = head_ensemble(h, of_global, of_local, d_g, d_l, history=history)
        history = answer.history
        sizes.append(count_nodes(answer.weight))
    assert answer.weight.requires_grad
    assert len(set(sizes)) == 1


# input


def test_numpy_arrays_give_what_tensors_give():
    stream = make_stream(5, dtype=torch.float32)
    history = head_ensemble(*stream).history
    tensors = head_ensemble(*stream, history=history)
    arrays = head_ensemble(*(tensor.numpy() for tensor in stream), history=history.numpy())
    mixed = head_ensemble(stream[0].numpy(), *stream[1:], history=history)
    for answer in (arrays, mixed):
        assert all(isinstance(part, torch.Tensor) for part in answer)
        assert all(torch.equal(a, b) for a, b in zip(answer, tensors, strict=True))


@pytest.mark.filterwarnings("error")
def test_every_order_of_an_array_is_taken():
    stream = make_stream(5, dtype=torch.float32)
    weight = head_ensemble(*stream).weight

    def ask(change):
        return head_ensemble(*(change(tensor.numpy()) for tensor in stream)).weight

    def lock(array):
        array = array.copy()
        array.flags.writeable = False
        return array

    assert torch.equal(ask(lambda array: array.astype(">f4")), weight)
    assert torch.equal(ask(lambda array: np.flip(np.flip(array).copy())), weight)  # negative strides
    assert torch.equal(ask(np.asfortranarray), weight)
    assert torch.equal(ask(lock), weight)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: torch.stack([t, t], -1)[..., 0],  # not contiguous
        lambda t: t.T.contiguous().T if t.ndim == 2 else t,
        lambda t: t.clone().requires_grad_(),
        lambda t: torch.nn.Parameter(t),
    ],
)
def test_every_kind_of_dense_tensor_is_taken(change):
    stream = make_stream(5)
    assert torch.equal(head_ensemble(*map(change, stream)).weight.detach(), head_ensemble(*stream).weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_history_is_float64_and_may_be_either(dtype):
    stream = make_stream(5, dtype=dtype)
    history = head_ensemble(*stream).history
    assert history.dtype == torch.float64
    for before in (history, history.float()):
        answer = head_ensemble(*stream, history=before)
        assert (answer.logits.dtype, answer.weight.dtype, answer.history.dtype) == (dtype, dtype, torch.float64)


def refuse(match, *given, **settings):
    with pytest.raises(InputError, match=match) as refused:
        head_ensemble(*given, **settings)
    assert "\n" not in str(refused.value)


def swap(place, change, dtype=torch.float32):
    stream = make_stream(3, dtype=dtype)
    named = dict(zip((*PLACES, "history"), (*stream, stream[3]), strict=True))
    return list((named | {place: change(named[place])}).values())


@pytest.mark.parametrize("place", [*PLACES, "history"])
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.tolist(), "but {} is a list; convert"),
        (lambda t: 1.0, "but {} is a float;"),
        (lambda t: np.float32(1), "but {} is a float32;"),
        (lambda t: "features", "but {} is a str;"),
        (lambda t: np.ma.masked_array(t.numpy()), "but {} is a MaskedArray;"),
        (lambda t: t.numpy().astype(object), "{} is object; use .float"),
        (lambda t: t.numpy().astype(np.longdouble), "{} is (float128|longdouble); use .float"),
        (lambda t: t.numpy().astype(np.float16), "{} is float16; use .float"),
        (lambda t: t.numpy().astype(str), "{} is .U"),
        (lambda t: t.numpy().astype(int), "{} is int64; use .float"),
        (lambda t: t.half(), "but {} is float16; use .float"),
        (lambda t: t.bfloat16(), "but {} is bfloat16; use .float"),
        (lambda t: t.int(), "but {} is int32; use .float"),
        (lambda t: t > 0, "but {} is bool; use .float"),
        (lambda t: t.to(torch.complex64), "but {} is complex64; use .float"),
        (lambda t: t.to_sparse(), "but {} is sparse or nested"),
        (lambda t: torch.nested.nested_tensor([t], layout=torch.jagged), "but {} is sparse or nested"),
        (lambda t: t.to("meta"), "but {} is on the meta device"),
        (lambda t: t[:0], "none of them empty, but got .*{} .0"),
        (lambda t: t[..., :0], "none of them empty, but got .*{} .*0"),
        (lambda t: t.sum(), "but got .*{} ..,?"),
        (lambda t: t[None], "but got .*{} .1, "),
    ],
)
def test_what_cannot_be_weighed_is_refused_in_a_sentence(place, change, match):
    *stream, history = swap(place, change)
    refuse(match.format(*[place] * match.count("{}")), *stream, history=history)


@pytest.mark.parametrize("place", [*PLACES[1:], "history"])
def test_two_devices_are_refused(place):
    def move(tensor):
        with FakeTensorMode():  # a machine without a GPU can name one
            return torch.empty(tensor.shape, device="cuda")

    *stream, history = swap(place, move)
    refuse(f"features is on cpu and {place} on cuda:0; move it", *stream, history=history)


@pytest.mark.parametrize("place", [*PLACES, "history"])
def test_numbers_whose_squares_overflow_are_refused(place):
    *stream, history = swap(place, lambda t: t * 1e200, torch.float64)
    refuse(f"at most 1e[+]100, but {place} holds one of", *stream, history=history)


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


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        *(({name: value}, "alpha and beta") for name in ("alpha", "beta") for value in (1.5, -0.1, float("nan"), "1")),
        ({"alpha": torch.tensor(0.1)}, "alpha and beta"),
        ({"beta": None}, "alpha and beta"),
        *(({"steps": value}, "steps must be a whole number") for value in (-1, 2.5, "20", None, float("inf"))),
        *(
            ({"lr": value}, "lr positive")
            for value in (0.0, -1, float("inf"), float("nan"), 1e308, 10**400, "0.1", None)
        ),
    ],
)
def test_settings_out_of_range_are_refused(setting, match):
    refuse(match, *make_stream(3), **setting)


def test_numbers_of_numpy_are_settings():
    stream = [tensor.requires_grad_() for tensor in make_stream(3)]
    settings = {"alpha": np.float64(0.25), "beta": np.float32(0.5), "steps": np.int64(3), "lr": np.float32(0.125)}
    plain = {"alpha": 0.25, "beta": 0.5, "steps": 3, "lr": 0.125}
    assert torch.equal(head_ensemble(*stream, **settings).weight, head_ensemble(*stream, **plain).weight)


@pytest.mark.parametrize("setting", [{"beta1": 1.0}, {"beta2": -0.1}, {"beta2": 1.0}, {"eps": 0.0}, {"eps": "1"}])
def test_a_search_that_would_divide_by_zero_is_refused(setting):
    with pytest.raises(InputError, match="beta1 and beta2 must be"):
        Search(**setting)
