"""Stacked attention and positions of tokens against a plain loop over the clients."""

import pytest
import torch
from torch.func import grad, vmap

from fedthe.engine.ops.mode import StackedOps
from fedthe.kernels import use_kernels
from fedthe.nets.layers import add_positions, attend
from stacked_layers import BF16, F32, assert_close, check, draw, everywhere, stacked, value_and_grads


# n, tokens, heads, width
@pytest.mark.parametrize("case", [(2, 16, 2, 16), (1, 5, 3, 7), (2, 1, 1, 20)])
@pytest.mark.parametrize("dtype", [F32, BF16])
@everywhere
def test_attention(case, dtype, place):
    n, tokens, heads, width = case
    qkv = draw(2, n, tokens, 3 * heads * width, device=place).to(dtype)

    def layer(qkv):
        return attend(qkv, heads)

    got = check(layer, qkv, dtype=dtype, error=1e-5 if dtype == F32 else 2e-2, alone=use_kernels(qkv))
    assert all(t.dtype == dtype for t in got)


@pytest.mark.parametrize("dtype", [F32, BF16])
@everywhere
def test_second_derivatives_of_attention_within_vmap(dtype, place):
    def gradient(qkv):
        def size(qkv):
            return grad(lambda qkv: (attend(qkv, 2).float() ** 3).sum())(qkv).float().square().sum()

        return grad(size)(qkv)

    qkv = draw(2, 3, 1, 4, 12, device=place).to(dtype)
    with StackedOps(dtype):
        got = vmap(vmap(gradient))(qkv)
    assert got.dtype == dtype
    want = torch.stack([torch.stack([gradient(row) for row in rows]) for rows in qkv.float()])
    assert_close(got, want, 1e-4 if dtype == F32 else 5e-2)


@everywhere
def test_attention_that_is_not_covered(place):
    for qkv in (draw(4, 12, device=place), draw(1, 65, 12, device=place), draw(1, 4, 12, device=place).double()):
        with StackedOps(F32):
            got = attend(qkv, 2)
        assert torch.equal(got, attend(qkv, 2))


@pytest.mark.parametrize("dtype", [F32, BF16])
@everywhere
def test_positions(dtype, place):
    """In the tokens' type, with float32 gradients of positions; also second derivatives in two levels of vmap."""
    x, positions = draw(2, 3, 2, 5, 4, device=place).to(dtype), draw(2, 5, 4, seed=1, device=place)

    got = value_and_grads(stacked(vmap(add_positions, (0, None)), dtype), x, positions)
    assert [t.dtype for t in got] == [dtype if use_kernels(x) else F32, dtype, F32]
    rounded = got[0].dtype
    want = value_and_grads(lambda x, positions: (x + positions[:, None, None]).to(rounded), x.float(), positions)
    assert_close(got, want, 1e-6 if dtype == F32 else 1e-2)
    assert not torch.equal(got[2], got[2].bfloat16().float())

    def second_gradient(x, positions):
        def size(positions):
            return grad(lambda p: (add_positions(x, p).float() ** 3).sum())(positions).square().sum()

        return grad(size)(positions)

    second = stacked(vmap(second_gradient, (0, None)), dtype)(x, positions)
    error = 1e-5 if dtype == F32 else 3e-2
    for row, samples, p in zip(second, x.float(), positions, strict=True):
        assert_close(row, torch.stack([second_gradient(sample, p) for sample in samples]), error)


@everywhere
def test_positions_that_are_not_covered(place):
    x, positions = draw(2, 5, 4, device=place), draw(5, 4, seed=1, device=place)
    with StackedOps(BF16):
        for tokens, places in ((x, positions), (x.bfloat16(), positions[:1]), (x[0].bfloat16(), positions)):
            made = add_positions(tokens, places)
            assert made.dtype == F32
            assert torch.equal(made, tokens.float() + places)
