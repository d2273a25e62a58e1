"""A way out of vmap: work that runs on all rows at once, called from code that is written for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten


class _Outside(torch.autograd.Function):
    @staticmethod
    def forward(work: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        """One row, outside vmap."""
        return tree_map(lambda leaf: leaf[0], work(*(tensor[None] for tensor in tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing to save: the work is not differentiable."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, work: Callable[..., Any], *tensors: torch.Tensor) -> tuple[Any, int]:
        rows = [
            tensor.expand(info.batch_size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
            for tensor, axis in zip(tensors, in_dims[1:], strict=True)
        ]
        return work(*rows), 0


def run_outside(work: Callable[..., Any], *args: Any) -> Any:
    """`work` on the arguments of all rows, though the caller runs under vmap and sees those of one.

    Arguments and result are nested dicts, lists and tuples of tensors; `work` sees and gives them with a first axis
    over rows.
    """
    tensors, structure = tree_flatten(args)

    def flat_work(*rows: torch.Tensor) -> Any:
        return work(*tree_unflatten(list(rows), structure))

    return _Outside.apply(flat_work, *(tensor.detach() for tensor in tensors))  # type: ignore[no-untyped-call]
