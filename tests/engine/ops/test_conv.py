"""Stacked convolutions against a plain loop over the clients."""

import pytest
import torch
from torch.func import grad, vmap
from torch.nn import functional as F

from fedthe import kernels
from fedthe.engine.ops.conv import InputGrad
from fedthe.engine.ops.mode import StackedOps
from fedthe.nets.layers import conv_residual
from stacked_layers import (
    BF16,
    CONVOLUTIONS,
    F32,
    assert_close,
    assert_first_rows_equal,
    by_kernels,
    check,
    conv_layer,
    conv_of,
    derivatives,
    draw,
    everywhere,
    loop,
    stacked,
    value_and_grads,
)


@pytest.mark.parametrize("case", CONVOLUTIONS)
@everywhere
def test_a_stacked_convolution_is_that_of_each_row(case, place):
    got = check(conv_of(case), *conv_layer(case, 2, place))
    assert all(t.dtype == F32 for t in got)


@pytest.mark.parametrize("case", CONVOLUTIONS)
@everywhere
def test_a_stacked_convolution_in_bfloat16(case, place):
    x, w = (t.bfloat16().float() for t in conv_layer(case, 2, place))
    got = check(conv_of(case), x, w, dtype=BF16, error=1e-2)
    assert [t.dtype for t in got] == [BF16, F32, F32]


def test_the_gradient_by_the_weight_is_not_rounded_to_bfloat16():
    x, w = conv_layer(CONVOLUTIONS[0], 2)
    _, _, by_w = value_and_grads(stacked(conv_of(CONVOLUTIONS[0]), BF16), x, w)
    assert not torch.equal(by_w, by_w.bfloat16().float())


@pytest.mark.parametrize("case", CONVOLUTIONS)
@everywhere
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(case, place):
    rows = (1, 3, 7) if not kernels.interpreting else (1, 2)
    x, w = conv_layer(case, rows[-1], place)
    answers = [value_and_grads(stacked(conv_of(case)), x[:s], w[:s]) for s in rows]
    for more in answers[1:]:
        assert_first_rows_equal(answers[0], more)


def test_on_the_cpu_a_row_has_the_bits_of_a_plain_channels_last_convolution():
    case = CONVOLUTIONS[2]
    x, w = conv_layer(case, 3)
    last = torch.channels_last
    plain = loop(lambda x, w: conv_of(case)(x.contiguous(memory_format=last), w.contiguous(memory_format=last)))
    assert torch.equal(stacked(conv_of(case))(x, w), plain(x, w))


@everywhere
def test_grad_within_vmap(place):
    x, w = conv_layer(CONVOLUTIONS[3], 2, place)

    def gradient(x, w):
        return grad(lambda w: F.conv2d(x, w, stride=2, padding=1).square().sum())(w)

    assert_close(stacked(gradient)(x, w), loop(gradient)(x, w))


@pytest.mark.parametrize("case", [(1, 4, 5, 5, 6, (3, 3), (2, 2), (1, 1)), CONVOLUTIONS[5]])
@everywhere
def test_second_derivatives(case, place):
    """They pass through all three functions and their gradients."""
    inputs = conv_layer(case, 2, place)
    assert_close(derivatives(stacked(conv_of(case)), *inputs), derivatives(loop(conv_of(case)), *inputs), 2e-5)


@everywhere
def test_what_all_rows_share(place):
    function, (x, w) = conv_of(CONVOLUTIONS[5]), conv_layer(CONVOLUTIONS[5], 3, place)
    for inputs, in_dims in (((x, w[0]), (0, None)), ((x[0], w), (None, 0))):
        check(function, *inputs, in_dims=in_dims)


@everywhere
def test_vmap_within_vmap(place):
    """Gradients sample by sample, client by client; and a weight per client and sample."""
    x, w = draw(2, 3, 1, 4, 6, 6, device=place), draw(2, 5, 4, 3, 3, seed=1, device=place)

    def gradient(w, x):
        return grad(lambda w: F.conv2d(x, w, padding=1).square().sum())(w)

    with StackedOps(F32):
        got = vmap(vmap(gradient, (None, 0)))(w, x)
        both = vmap(vmap(F.conv2d))(x, got)
    want = torch.stack([torch.stack([gradient(w[s], x[s, i]) for i in range(3)]) for s in range(2)])
    assert_close(got, want)
    assert_close(both, torch.stack([torch.stack([F.conv2d(x[s, i], want[s, i]) for i in range(3)]) for s in range(2)]))


def conv_and_residual(stride):
    """Like a block of a residual network: x goes through a convolution, and past it."""

    def both(x, w):
        y, residual = conv_residual(x, w, stride=stride, padding=w.shape[-1] // 2)
        return torch.cat([y.flatten(), (residual * residual).flatten()])

    return both


@everywhere
@pytest.mark.parametrize(("stride", "side"), [(1, 3), (2, 3), (2, 1)])
def test_a_convolution_and_its_residual(stride, side, place):
    x, w = draw(2, 2, 4, 6, 6, device=place), draw(2, 5, 4, side, side, seed=1, device=place)
    function = conv_and_residual(stride)
    check(function, x, w, alone=True)

    def size(x, w):
        gradients = grad(lambda *inputs: (function(*inputs) ** 3).sum(), (0, 1))(x, w)
        return torch.stack([gradient.square().sum() for gradient in gradients]).sum()

    def second_gradients(x, w):
        return grad(size, (0, 1))(x, w)

    with StackedOps(F32):
        second = vmap(second_gradients)(x, w)
        shared = vmap(grad(lambda x: (function(x, w[0]) ** 2).sum()))(x)
    for k, a in enumerate(second):
        assert_close(a, torch.stack([second_gradients(x[s], w[s])[k] for s in range(2)]), 3e-5)
    assert_close(shared, torch.stack([grad(lambda x: (function(x, w[0]) ** 2).sum())(x[s]) for s in range(2)]))


@by_kernels
def test_a_convolution_and_its_residual_in_bfloat16(place):
    x, w = draw(2, 2, 4, 6, 6, device=place).bfloat16(), draw(2, 5, 4, 3, 3, seed=1, device=place)
    with StackedOps(BF16):
        y, residual = vmap(lambda x, w: conv_residual(x, w, padding=1))(x, w)
        assert y.dtype == residual.dtype == BF16
        assert torch.equal(residual, x)
    check(conv_and_residual(1), x, w.bfloat16().float(), dtype=BF16, error=2e-2)


@everywhere
def test_a_convolution_or_its_residual(place):
    x, w = draw(2, 2, 4, 6, 6, device=place), draw(2, 5, 4, 3, 3, seed=1, device=place)
    for which in (0, 1):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        with StackedOps(F32):
            made = vmap(lambda x, w: conv_residual(x, w, padding=1))(*leaves)[which]
        by_x, by_w = torch.autograd.grad(made.sum(), leaves, allow_unused=True)
        want = value_and_grads(loop(lambda x, w: F.conv2d(x, w, padding=1)), x, w)
        assert by_x.shape == x.shape
        assert (by_w is None) == (which == 1)
        if which == 1:
            assert torch.equal(by_x, torch.ones_like(x))
        else:
            assert_close(made, want[0])


@everywhere
def test_bias_and_a_single_image(place):
    x, w, b = draw(2, 3, 6, 6, device=place), draw(2, 4, 3, 3, 3, device=place), draw(2, 4, device=place)
    check(lambda x, w, b: F.conv2d(x, w, b, padding=1), x, w, b)


def test_what_is_not_covered_is_left_to_torch():
    x, w = draw(2, 4, 6, 6), draw(4, 2, 3, 3)
    for options in ({"groups": 2}, {"groups": 2, "dilation": 2}, {"groups": 2, "padding": "same"}):
        with StackedOps(F32):
            got = F.conv2d(x, w, **options)
        assert torch.equal(got, F.conv2d(x, w, **options))
    with StackedOps(F32):
        assert F.conv2d(x.double(), draw(5, 4, 3, 3).double()).dtype == torch.float64
        with pytest.raises(RuntimeError, match="channels"):
            F.conv2d(x, draw(5, 3, 3, 3))
    with pytest.raises(ValueError, match="bfloat16 or"):
        StackedOps(torch.float16)


def test_no_gradient_that_is_not_asked_for(monkeypatch):
    def never(*_):
        raise AssertionError("computed in vain")

    x, w = conv_layer(CONVOLUTIONS[0], 2)
    monkeypatch.setattr(InputGrad, "forward", staticmethod(never))
    w.requires_grad_()
    torch.autograd.grad(stacked(conv_of(CONVOLUTIONS[0]))(x, w).sum(), w)
