"""Stacked group and layer norms against a plain loop over the clients."""

import pytest
import torch
from torch.func import grad, vmap
from torch.nn import functional as F

from fedthe.engine.ops.mode import StackedOps
from fedthe.kernels import use_kernels
from fedthe.nets.layers import norm_relu
from stacked_layers import (
    BF16,
    F32,
    GPU,
    assert_close,
    assert_first_rows_equal,
    by_kernels,
    check,
    derivatives,
    draw,
    everywhere,
    loop,
    norm_layer,
    stacked,
    value_and_grads,
)

# n, c, h, w, groups
NORMS = [
    (2, 16, 6, 6, 2),
    (3, 6, 5, 7, 3),  # blocks with idle groups, channels and pixels
    (2, 12, 4, 4, 1),
    (2, 4, 3, 3, 4),
]


def norm_of(case):
    return lambda x, weight=None, bias=None: F.group_norm(x, case[4], weight, bias, 1e-3)


@pytest.mark.parametrize("case", NORMS)
@everywhere
def test_group_norm_is_that_of_each_row(case, place):
    got = check(norm_of(case), *norm_layer(case, 2, place))
    assert all(t.dtype == F32 for t in got)


@pytest.mark.parametrize("case", NORMS)
@by_kernels
def test_group_norm_in_bfloat16(case, place):
    x, weight, bias = norm_layer(case, 2, place)
    got = check(norm_of(case), x.bfloat16(), weight, bias, dtype=BF16, error=1e-2)
    assert [t.dtype for t in got] == [BF16, BF16, F32, F32]


@pytest.mark.parametrize("dtype", [F32, BF16])
@everywhere
def test_a_rows_bits_after_group_norm_do_not_depend_on_the_number_of_rows(dtype, place):
    case = (4, 16, 32, 32, 2) if place.type == GPU else NORMS[1]
    rows = (1, 3, 40) if place.type == GPU else (1, 2)
    x, weight, bias = norm_layer(case, rows[-1], place)
    x = x.to(dtype)
    answers = [value_and_grads(stacked(norm_of(case), dtype), x[:s], weight[:s], bias[:s]) for s in rows]
    for more in answers[1:]:
        assert_first_rows_equal(answers[0], more)


@everywhere
def test_group_norm_with_what_all_rows_share(place):
    case = NORMS[1]
    x, weight, bias = norm_layer(case, 2, place)

    for inputs, in_dims in (
        ((x, weight[0], bias[0]), (0, None, None)),
        ((x[0], weight, bias), (None, 0, 0)),
        ((x, weight[0], bias), (0, None, 0)),
        ((x,), (0,)),
        ((x, weight), (0, 0)),
    ):
        check(norm_of(case), *inputs, in_dims=in_dims)
    with StackedOps(F32):
        assert_close(torch.group_norm(x[0], 3, bias=bias[0]), F.group_norm(x[0], 3, bias=bias[0]))


@everywhere
def test_group_norm_under_grad_and_vmap_within_vmap(place):
    case = (1, 6, 3, 3, 2)
    x, (_, weight, bias) = draw(2, 3, 1, 6, 3, 3, device=place), norm_layer(case, 2, place)

    def gradients(x, weight, bias):
        return grad(lambda *inputs: (norm_of(case)(*inputs) ** 3).sum(), (0, 1, 2))(x, weight, bias)

    with StackedOps(F32):
        got = vmap(vmap(gradients, (0, None, None)))(x, weight, bias)
    want = [[gradients(x[s, i], weight[s], bias[s]) for i in range(3)] for s in range(2)]
    for k, a in enumerate(got):
        assert_close(a, torch.stack([torch.stack([each[k] for each in row]) for row in want]))


@everywhere
def test_second_derivatives_of_group_norm(place):
    function, inputs = norm_of(NORMS[1]), norm_layer(NORMS[1], 2, place)
    assert_close(derivatives(stacked(function), *inputs), derivatives(loop(function), *inputs), 1e-4)


@pytest.mark.parametrize("dtype", [F32, BF16])
@everywhere
def test_a_step_through_the_gradient_of_a_step(dtype, place):
    """As in Per-FedAvg: grad of grad within vmap, through a convolution, a norm and a ReLU."""
    x, w = draw(2, 2, 4, 5, 5, device=place), draw(2, 4, 4, 3, 3, seed=1, device=place) * 0.3
    scale, offset = draw(2, 4, seed=2, device=place), draw(2, 4, seed=3, device=place)

    def loss(params, x):
        w, scale, offset = params
        h = F.relu(F.group_norm(F.conv2d(x, w, stride=2, padding=1), 2, scale, offset))
        return (h.mean((2, 3)).float() ** 2).sum()

    def moved(x, *params):
        def after(params):
            gradients = grad(loss)(params, x)
            return loss(tuple(p - 0.1 * s for p, s in zip(params, gradients, strict=True)), x)

        return grad(after)(params)

    with StackedOps(dtype):
        got = vmap(moved)(x, w, scale, offset)
    for k, a in enumerate(got):
        assert a.dtype == F32
        want = torch.stack([moved(x[s], w[s], scale[s], offset[s])[k] for s in range(2)])
        assert_close(a, want, 2e-5 if dtype == F32 else 6e-2)


@pytest.mark.parametrize("dtype", [F32, BF16])
@everywhere
def test_group_norm_after_a_convolution(dtype, place):
    x, w = draw(2, 2, 4, 6, 6, device=place), draw(2, 8, 4, 3, 3, device=place)
    scale, offset = draw(2, 8, device=place), draw(2, 8, seed=1, device=place)

    def layer(x, w, scale, offset):
        return F.group_norm(F.conv2d(x, w), 2, scale, offset)

    got = check(layer, x, w, scale, offset, dtype=dtype, error=1e-5 if dtype == F32 else 3e-2)
    assert got[0].dtype == (dtype if use_kernels(x) else F32)
    assert all(t.dtype == F32 for t in got[1:])


@everywhere
def test_group_norm_of_no_images_is_left_to_torch(place):
    for shape in ((3, 4), (3, 4, 5), (2, 4, 2, 2, 2), (0, 4, 3, 3)):
        x = draw(*shape, device=place)
        with StackedOps(F32):
            got = F.group_norm(x, 2)
        assert torch.equal(got, F.group_norm(x, 2))
    with StackedOps(F32):
        assert F.group_norm(draw(2, 4, 3, 3, device=place).double(), 2).dtype == torch.float64
        for groups, width in ((3, 4), (2, 3)):
            with pytest.raises(RuntimeError, match="Expected"):
                F.group_norm(draw(2, 4, 3, 3, device=place), groups, draw(width, device=place))
        with pytest.raises(ValueError, match="more than 1 value"):
            F.group_norm(draw(1, 4, 1, 1, device=place), 4)


def norm_relu_layer(case, adds, device, dtype=F32):
    x, weight, bias = norm_layer(case, 2, device)
    return [x.to(dtype), weight, bias, *([draw(*x.shape, seed=5, device=device).to(dtype)] if adds else [])]


def norm_relu_of(case):
    return lambda x, weight, bias, residual=None: norm_relu(x, case[4], weight, bias, residual, eps=1e-3)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("case", NORMS)
@everywhere
def test_norm_and_relu_at_once(case, adds, place):
    value, *_ = check(norm_relu_of(case), *norm_relu_layer(case, adds, place), alone=True)
    assert 0 < int((value == 0).sum()) < value.numel()


@pytest.mark.parametrize("adds", [False, True])
@by_kernels
def test_norm_and_relu_at_once_in_bfloat16(adds, place):
    got = check(norm_relu_of(NORMS[1]), *norm_relu_layer(NORMS[1], adds, place, BF16), dtype=BF16, error=1e-2)
    assert [t.dtype for t in got] == [BF16, BF16, F32, F32, *([BF16] if adds else [])]


@pytest.mark.parametrize("adds", [False, True])
@everywhere
def test_second_derivatives_of_norm_and_relu(adds, place):
    function, inputs = norm_relu_of(NORMS[1]), norm_relu_layer(NORMS[1], adds, place)
    assert_close(derivatives(stacked(function), *inputs), derivatives(loop(function), *inputs), 1e-4)


@everywhere
def test_norm_and_relu_that_is_not_covered(place):
    """Runs as its parts, within the mode: mixed types become float32."""
    x, weight, bias, residual = norm_relu_layer(NORMS[0], True, place)
    with StackedOps(BF16):
        mixed = vmap(lambda *row: norm_relu(row[0], 2, *row[1:]))(x.bfloat16(), weight, bias, residual)
        wide = norm_relu(x[0], 2, weight[0], bias[0], residual[0, :1])
        single = norm_relu(x[0, :, :, 0, 0], 2, weight[0], bias[0])
    assert mixed.dtype == F32
    assert_close(mixed, torch.stack([norm_relu(x[s], 2, weight[s], bias[s], residual[s]) for s in range(2)]), 2e-2)
    assert_close(wide, norm_relu(x[0], 2, weight[0], bias[0], residual[0, :1]))
    assert_close(single, norm_relu(x[0, :, :, 0, 0], 2, weight[0], bias[0]))


@by_kernels
def test_nan_passes_norm_and_relu(place):
    x, weight, bias = norm_relu_layer(NORMS[0], False, place)
    x[0, 0, 0, 0, 0] = float("nan")
    y = stacked(norm_relu_of(NORMS[0]))(x, weight, bias)
    assert torch.equal(y.isnan(), loop(norm_relu_of(NORMS[0]))(x, weight, bias).isnan())


@pytest.mark.parametrize("shape", [(2, 6, 16), (3, 5), (2, 1, 3, 10)])
@everywhere
def test_layer_norm(shape, place):
    width = shape[-1]
    x, weight, bias = draw(2, *shape, device=place), draw(2, width, seed=1, device=place), draw(2, width, device=place)

    def layer(x, weight, bias=None):
        return F.layer_norm(x, (width,), weight, bias, 1e-3)

    for inputs in ((x, weight, bias), (x, weight)):
        check(layer, *inputs, alone=True)
    low = stacked(layer, BF16)(x.bfloat16(), weight, bias)
    assert low.dtype == (BF16 if use_kernels(x) and len(shape) > 2 else F32)
    assert_close(low, loop(layer)(x.bfloat16().float(), weight, bias), 1e-5 if low.dtype == F32 else 1e-2)


@pytest.mark.parametrize("shape", [(2, 6, 16), (2, 1, 3, 10), (3, 64, 128)])
@by_kernels
def test_layer_norm_of_tokens_in_bfloat16(shape, place):
    x = (draw(2, *shape, device=place) * 2 + 1).bfloat16()
    weight, bias = (draw(2, shape[-1], seed=seed, device=place) for seed in (1, 2))

    def layer(x, weight, bias):
        return F.layer_norm(x, shape[-1:], weight, bias)

    got = check(layer, x, weight, bias, dtype=BF16, error=1e-2)
    assert [t.dtype for t in got] == [BF16, BF16, F32, F32]


@everywhere
def test_second_derivatives_of_layer_norm(place):
    def layer(x, weight):
        return F.layer_norm(x, [5], weight)

    inputs = [draw(2, *shape, seed=i, device=place) for i, shape in enumerate(((3, 2, 5), (5,)))]
    # no third ones: torch's own are wrong
    got, want = derivatives(stacked(layer), *inputs, order=2), derivatives(loop(layer), *inputs, order=2)
    assert_close(got, want, 1e-4)


@everywhere
def test_layer_norm_that_is_not_covered(place):
    x = draw(2, 3, 4, device=place)
    with StackedOps(F32):
        got = F.layer_norm(x, (3, 4)), F.layer_norm(x[0, 0], (4,))
        with pytest.raises(RuntimeError, match="xpected"):
            F.layer_norm(x, (4,), x[0, 0, :3])
    assert torch.equal(got[0], F.layer_norm(x, (3, 4)))
    assert torch.equal(got[1], F.layer_norm(x[0, 0], (4,)))
