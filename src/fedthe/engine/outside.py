"""A way out of vmap: work that runs on all rows at once, called from code that is written for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Work = Callable[..., tuple[Tensor, ...]]  # tensors with a first axis over rows -> tensors with such an axis


class _Outside(torch.autograd.Function):
    @staticmethod
    def forward(work: Work, *tensors: Tensor) -> tuple[Tensor, ...]:
        """One row that nobody lifted."""
        return tuple(out[0] for out in work(*(tensor[None] for tensor in tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing to keep: there is no way back through this work."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, work: Work, *tensors: Tensor) -> tuple[tuple[Tensor, ...], Any]:
        rows = [
            tensor.expand(info.batch_size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
            for tensor, axis in zip(tensors, in_dims[1:], strict=True)
        ]
        done = work(*rows)
        return done, tuple(0 for _ in done)


def run_outside(work: Work, *tensors: Tensor) -> tuple[Tensor, ...]:
    """`work` on the tensors of all rows, though the caller is lifted by vmap and sees those of one."""
    done: tuple[Tensor, ...] = _Outside.apply(work, *(tensor.detach() for tensor in tensors))  # type: ignore[no-untyped-call]
    return done
