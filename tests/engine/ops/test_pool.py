"""Stacked max-pooling against torch's own."""

import pytest
import torch
from torch.nn import functional as F

from fedthe.engine.ops.mode import StackedOps
from stacked_layers import BF16, F32, assert_close, derivatives, draw, everywhere, loop, stacked, value_and_grads

# n, c, h, w, kernel, stride, padding
POOLS = [
    (2, 4, 8, 8, (2, 2), (2, 2), (0, 0)),
    (2, 3, 7, 9, (3, 3), (2, 2), (1, 1)),
    (1, 2, 7, 6, (3, 2), (1, 3), (1, 0)),
]


def pool_of(case):
    return lambda x: F.max_pool2d(x, case[4], stride=case[5], padding=case[6])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("case", POOLS)
@everywhere
def test_pooling_is_torchs(case, dtype, place):
    """On few distinct values, so with many ties, and with NaN and infinities."""
    x = draw(2, *case[:4], device=place).mul(2).round().to(dtype)
    x.view(-1)[::17] = float("nan")
    x.view(-1)[5::19] = float("-inf")
    x[0, 0, 0, :4, :4] = float("-inf")
    got = value_and_grads(stacked(pool_of(case), dtype), x)
    want = value_and_grads(loop(pool_of(case)), x)
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=0, equal_nan=True)
    error = 2e-2 if dtype == BF16 else 1e-6  # torch rounds between the windows that share a pixel
    torch.testing.assert_close(got[1], want[1], rtol=error, atol=error)


@everywhere
def test_second_derivatives_of_pooling(place):
    x = draw(2, *POOLS[1][:4], device=place)
    assert_close(derivatives(stacked(pool_of(POOLS[1])), x), derivatives(loop(pool_of(POOLS[1])), x))


@everywhere
def test_pooling_of_a_single_image_by_any_name(place):
    x = draw(2, 3, 8, 8, device=place)
    assert torch.equal(stacked(lambda x: F.max_pool2d(x, 2))(x), F.max_pool2d(x, 2))
    assert torch.equal(stacked(lambda x: torch.max_pool2d(x, [3, 2], padding=1))(x), F.max_pool2d(x, (3, 2), padding=1))
    with StackedOps(F32):
        values, places = F.max_pool2d(x, 2, return_indices=True)
        assert torch.equal(F.max_pool2d(x, 3, ceil_mode=True), torch.nn.MaxPool2d(3, ceil_mode=True)(x))
    assert places.dtype == torch.int64
    assert torch.equal(values, F.max_pool2d(x, 2))
