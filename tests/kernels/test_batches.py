"""The kernel that cuts batches, on its own."""

import pytest
import torch

from fedthe import kernels
from fedthe.engine.fit import crop
from fedthe.types import scale
from stacked_layers import BF16, F32, assert_close, by_kernels


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("pad", [0, 3])
@by_kernels
def test_batches_are_cut_as_for_one_client(pad, dtype, place):
    from fedthe.kernels.batches import cut_batches

    made = torch.Generator().manual_seed(0)

    def whole(high, *shape):
        return torch.randint(high, shape, generator=made).to(place)

    images = whole(256, 2, 5, 7, 6, 3).to(torch.uint8)
    rows, down, right = whole(5, 2, 4), whole(2 * pad + 1, 2, 4), whole(2 * pad + 1, 2, 4)
    mirrored = whole(2, 2, 4).bool()
    want = []
    for s in range(2):
        chosen = images[s, rows[s]]
        chosen = torch.where(mirrored[s, :, None, None, None], chosen.flip(2), chosen)
        want.append(scale(crop(chosen, pad, down[s], right[s])).movedim(-3, -1).to(dtype))
    got = torch.empty(2, 4, 7, 6, 3, dtype=dtype, device=place)
    cut_batches(images, rows, down.int(), right, mirrored, pad, got)
    if kernels.interpreting and dtype == BF16:  # the interpreter truncates where a GPU rounds
        assert_close(got, torch.stack(want), 1e-2)
    else:
        assert torch.equal(got, torch.stack(want))
    again = torch.zeros_like(got)
    cut_batches(images, rows, down, right, mirrored, pad, again)
    assert torch.equal(again, got)
    with pytest.raises(ValueError, match="contiguous"):
        cut_batches(images, rows, down, right, mirrored, pad, got[:1])
