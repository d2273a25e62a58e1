"""The kernels of pooling, on their own."""

import torch

from fedthe.kernels.shapes import Windows
from stacked_layers import by_kernels, draw


@by_kernels
def test_results_lie_with_channels_last(place):
    from fedthe.kernels.pool import max_pool

    pooled, index = max_pool(draw(2, 8, 4, 4, device=place), Windows((2, 2), (2, 2), (0, 0), (4, 4)))
    assert pooled.permute(0, 2, 3, 1).is_contiguous()
    assert index.dtype == torch.uint8
