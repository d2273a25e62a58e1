"""Stacked linear layers against a plain loop over the clients."""

import pytest
import torch
from torch.func import grad, vmap
from torch.nn import functional as F

from fedthe.engine.ops.conv import convolve
from fedthe.engine.ops.mode import StackedOps
from fedthe.kernels import use_kernels
from fedthe.kernels.shapes import FAST
from fedthe.nets.layers import PLAIN, linear_add
from stacked_layers import (
    BF16,
    F32,
    assert_close,
    by_kernels,
    check,
    draw,
    everywhere,
    stacked,
    value_and_grads,
)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("shape", [(5, 48), (3, 2, 20), (7,)])
@everywhere
def test_linear(shape, own, place):
    x, w, b = draw(2, *shape, device=place), draw(2, 10, shape[-1], device=place), draw(2, 10, device=place)
    tokens = own and len(shape) > 2 and use_kernels(x)
    for dtype, error in ((F32, 1e-5), (BF16, 1e-2 if tokens else 2e-3 if own else 1e-5)):
        got = check(F.linear, x, w, b, dtype=dtype, error=error, own_linear=own)
        assert [t.dtype for t in got] == [dtype if tokens else F32, F32, F32, F32]


@pytest.mark.parametrize("shape", [(5, 48), (70, 20), (7,)])
@by_kernels
def test_a_linear_layer_on_plain_vectors_is_not_rounded_to_bfloat16(shape, place):
    x, w, b = draw(2, *shape, device=place), draw(2, 10, shape[-1], device=place), draw(2, 10, device=place)

    def as_convolution(x, w, b):
        images, weight = x.reshape(-1, shape[-1])[:, :, None, None], w[:, :, None, None]
        return convolve(images, weight, (1, 1), (0, 0), F32, FAST, b).reshape(*shape[:-1], 10)

    got = value_and_grads(stacked(F.linear, BF16), x, w, b)
    assert all(t.dtype == F32 for t in got)
    for one, other in zip(got, value_and_grads(vmap(as_convolution), x, w, b), strict=True):
        assert torch.equal(one, other)


# n, tokens, c, o
@pytest.mark.parametrize("case", [(2, 64, 128, 128), (3, 50, 20, 10), (1, 40, 128, 1)])
@by_kernels
def test_a_linear_layer_on_tokens_in_bfloat16(case, place, monkeypatch):
    monkeypatch.setitem(PLAIN, linear_add, None)  # with a residual, it is one kernel
    n, tokens, c, o = case
    x, residual = (draw(2, n, tokens, d, seed=d, device=place).bfloat16() for d in (c, o))
    w, b = draw(2, o, c, seed=1, device=place) * c**-0.5, draw(2, o, seed=2, device=place)
    for layer, inputs in ((F.linear, (x, w)), (F.linear, (x, w, b)), (linear_add, (residual, x, w, b))):
        got = check(layer, *inputs, dtype=BF16, error=1e-2, alone=True)
        assert [t.dtype for t in got] == [BF16, *(t.dtype for t in inputs)]
    for gradient in got[-2:]:  # of weight and bias
        assert not torch.equal(gradient, gradient.bfloat16().float())


@pytest.mark.parametrize("rows", [3, 70])
@by_kernels
def test_a_rows_bits_after_linear_do_not_depend_on_the_number_of_rows(rows, place):
    x, w, b = draw(2, rows, 20, device=place), draw(2, 10, 20, seed=1, device=place), draw(2, 10, device=place)
    check(F.linear, x, w, b, alone=True)


@everywhere
def test_linear_with_what_all_rows_share(place):
    x, w, b = draw(2, 5, 20, device=place), draw(2, 10, 20, seed=1, device=place), draw(2, 10, device=place)
    for in_dims in ((0, None, None), (0, 0, None), (0, None, 0), (None, None, 0), (None, 0, 0)):
        inputs = [t if dim == 0 else t[0] for t, dim in zip((x, w, b), in_dims, strict=True)]
        check(F.linear, *inputs, in_dims=in_dims)


@pytest.mark.parametrize("shape", [(5, 48), (70, 2, 20), (7,)])
@everywhere
def test_a_linear_layer_plus_a_residual(shape, place):
    x, w, b = draw(2, *shape, device=place), draw(2, 10, shape[-1], device=place), draw(2, 10, device=place)
    residual = draw(2, *shape[:-1], 10, seed=3, device=place)
    tokens = len(shape) > 2 and use_kernels(x)
    for inputs in ((residual, x, w, b), (residual, x, w)):
        for dtype, error in ((F32, 1e-5), (BF16, 1e-2 if tokens else 2e-3)):
            value, *gradients = check(linear_add, *inputs, dtype=dtype, error=error)
            assert value.dtype == (dtype if tokens else F32)
            assert all(gradient.dtype == F32 for gradient in gradients)


@everywhere
def test_a_linear_layer_plus_a_residual_with_what_all_rows_share(place):
    x, w, residual = draw(2, 5, 6, device=place), draw(4, 6, seed=1, device=place), draw(5, 4, seed=2, device=place)
    with StackedOps(F32):
        shared = vmap(linear_add, (None, 0, None))(residual, x, w)
        apart = vmap(linear_add, (0, 0, None))(torch.stack([residual, 2 * residual]), x, w)
        sums = vmap(linear_add, (0, None, None))(torch.stack([residual, 2 * residual]), x[0], w)
        fewer = linear_add(residual[:1], x[0], w)  # not covered
        low = linear_add(residual.bfloat16(), x[0], w)
    assert_close(shared, residual + x @ w.T)
    assert_close(apart, torch.stack([residual, 2 * residual]) + x @ w.T)
    assert_close(sums, torch.stack([residual, 2 * residual]) + x[0] @ w.T)
    assert_close(fewer, residual[:1] + x[0] @ w.T)
    assert_close(low, residual.bfloat16() + x[0] @ w.T)


@everywhere
def test_second_derivatives_of_linear_within_vmap(place):
    def gradients(*inputs):
        every = tuple(range(4))

        def size(*inputs):
            return sum(s.square().sum() for s in grad(lambda *t: (linear_add(*t) ** 3).sum(), every)(*inputs))

        return grad(size, every)(*inputs)

    shapes = ((3, 4), (3, 6), (4, 6), (4,))
    inputs = [draw(2, *shape, seed=i, device=place) for i, shape in enumerate(shapes)]
    with StackedOps(F32):
        got = vmap(gradients)(*inputs)
    want = [gradients(*(t[s] for t in inputs)) for s in range(2)]
    for k, a in enumerate(got):
        assert_close(a, torch.stack([row[k] for row in want]), 2e-5)
