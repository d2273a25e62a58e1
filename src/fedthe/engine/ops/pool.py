"""Max-pooling, on a GPU only: on the CPU, torch's own does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels import use_kernels
from ...kernels.shapes import Windows, pair
from .stacked import TYPES, Stacked, run


class MaxPool(Stacked):
    """x [n, c, h, w] -> the maximum of each window, and its place in the window, uint8; both [n, c, oh, ow]"""

    @staticmethod
    def forward(x: Tensor, windows: Windows) -> tuple[Tensor, Tensor]:
        from ...kernels.pool import max_pool

        return max_pool(x, windows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Windows], output: tuple[Tensor, Tensor]) -> None:
        ctx.how = inputs[1]
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # no zeros for the places

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: Any) -> tuple[Tensor | None, None]:
        if g is None:
            return None, None
        return run(PoolScatter, g, *ctx.saved_tensors, ctx.how), None


class PoolScatter(Stacked):
    """g [n, c, oh, ow] and the places taken -> [n, c, h, w]: the gradient of `MaxPool` and of `PoolPick`"""

    saved = (1,)

    @staticmethod
    def forward(g: Tensor, index: Tensor, windows: Windows) -> Tensor:
        from ...kernels.pool import max_pool_scatter

        return max_pool_scatter(g, index, windows)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, None, None]:
        return run(PoolPick, v, *ctx.saved_tensors, ctx.how), None, None


class PoolPick(Stacked):
    """x [n, c, h, w] at the places taken -> [n, c, oh, ow]"""

    saved = (1,)

    @staticmethod
    def forward(x: Tensor, index: Tensor, windows: Windows) -> Tensor:
        from ...kernels.pool import max_pool_pick

        return max_pool_pick(x, index, windows)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return run(PoolScatter, g, *ctx.saved_tensors, ctx.how), None, None


def max_pool2d(
    dtype: torch.dtype,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    covered = use_kernels(input) and input.ndim in (3, 4) and 0 not in input.shape and input.dtype in TYPES
    if not covered or pair(dilation) != (1, 1) or ceil_mode or return_indices:
        return NotImplemented
    kernel, padding = pair(kernel_size), pair(padding)
    stride = kernel if stride is None or stride == [] or stride == () else pair(stride)
    windows = Windows(kernel, stride, padding, pair(input.shape[-2:]))
    wide = any(2 * padding[i] > kernel[i] for i in (0, 1))
    if wide or min(windows.out) < 1 or kernel[0] * kernel[1] > 255:  # torch refuses; more places than a uint8 holds
        return NotImplemented
    y, _ = run(MaxPool, input[None] if input.ndim == 3 else input, windows)
    return y.squeeze(0) if input.ndim == 3 else y
