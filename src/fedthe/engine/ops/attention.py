"""Positions of tokens, and attention, on a GPU only. Attention has no weights: clients just add images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ...kernels import use_kernels
from ...kernels.shapes import Attention
from ...nets import layers
from .stacked import TYPES, Stacked, run

ATTEND_MOST = 64  # tokens, and values of a head, that a kernel holds at once


class AddPositions(Function):
    """Tokens x [n, tokens, d] plus float32 positions [tokens, d], in x's type

    Torch's own sum would be float32, or would round the gradient of the positions.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, positions: Tensor) -> Tensor:
        return x + positions.to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor | None]:
        return g, g.sum(0, dtype=torch.float32) if ctx.needs_input_grad[1] else None


class Attend(Stacked):
    """qkv [n, tokens, 3 heads width] -> [n, tokens, heads width]"""

    saved = (0,)

    @staticmethod
    def forward(qkv: Tensor, how: Attention) -> Tensor:
        from ...kernels.attention import attend

        return attend(qkv, how)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return run(AttendGrad, g, *ctx.saved_tensors, ctx.how), None


class AttendGrad(Stacked):
    """The gradient of `Attend`: g [n, tokens, heads width], qkv -> shape of qkv"""

    saved = (0, 1)

    @staticmethod
    def forward(g: Tensor, qkv: Tensor, how: Attention) -> Tensor:
        from ...kernels.attention import attend_grad

        return attend_grad(g, qkv, how)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        """In plain torch: few methods need it."""
        plainly = layers.PLAIN[layers.attend]

        def grads(g: Tensor, qkv: Tensor) -> Tensor:
            back: Any = torch.func.vjp(lambda qkv: plainly(qkv.float(), ctx.how.heads), qkv)[1]
            return back(g.float())[0]  # type: ignore[no-any-return]

        back: Any = torch.func.vjp(grads, *ctx.saved_tensors)[1]
        return *back(v), None


def add_positions(dtype: torch.dtype, x: Tensor, positions: Tensor) -> Any:
    covered = use_kernels(x) and x.ndim == 3 and x.shape[1:] == positions.shape
    if covered and x.dtype == dtype == torch.bfloat16 and positions.dtype == torch.float32:
        return run(AddPositions, x, positions)
    return NotImplemented


def attend(dtype: torch.dtype, qkv: Tensor, heads: int) -> Any:
    width = qkv.shape[-1] // (3 * heads)
    covered = use_kernels(qkv) and qkv.ndim == 3 and 0 not in qkv.shape and qkv.dtype in TYPES
    if not covered or qkv.shape[-1] != 3 * heads * width or max(qkv.shape[1], width) > ATTEND_MOST:
        return NotImplemented
    return run(Attend, qkv.to(dtype), Attention(heads, width))
