"""Layers of a few clients, places to run them in, and a plain loop over the clients to compare with."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from fedthe.engine.ops.mode import StackedOps

CUDA, TRITON = torch.cuda.is_available(), importlib.util.find_spec("triton") is not None
if TRITON and not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel is defined

CPU, GPU, INTERPRETER = "cpu", "cuda", "interpreter"  # of the fixture `place`
_PLACES = [
    CPU,
    pytest.param(INTERPRETER, marks=pytest.mark.skipif(CUDA or not TRITON, reason="needs Triton and no GPU")),
    pytest.param(GPU, marks=pytest.mark.skipif(not (CUDA and TRITON), reason="needs a GPU and Triton")),
]
everywhere = pytest.mark.parametrize("place", _PLACES, indirect=True)
by_kernels = pytest.mark.parametrize("place", _PLACES[1:], indirect=True)
F32, BF16 = torch.float32, torch.bfloat16

# n, c, h, w, o, kernel, stride, padding: the nets' layers with fewer pixels and channels, and some odd ones
CONVOLUTIONS = [
    (2, 3, 8, 8, 5, (5, 5), (1, 1), (0, 0)),
    (2, 32, 6, 6, 8, (5, 5), (1, 1), (0, 0)),
    (2, 16, 6, 6, 16, (3, 3), (1, 1), (1, 1)),
    (3, 16, 7, 7, 32, (3, 3), (2, 2), (1, 1)),
    (2, 16, 6, 6, 32, (1, 1), (2, 2), (0, 0)),
    (2, 3, 6, 8, 4, (2, 3), (2, 1), (1, 2)),
    (1, 1, 5, 5, 3, (3, 3), (3, 3), (0, 0)),
    (1, 2, 6, 5, 3, (2, 2), (2, 3), (0, 0)),  # pixels that no window meets
    (2, 4, 3, 3, 5, (1, 1), (1, 1), (1, 1)),  # more padding than the kernel reaches
]


def draw(*shape: int, seed: int = 0, device: torch.device | str = CPU) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def conv_layer(case: tuple[Any, ...], rows: int, device: torch.device | str = CPU) -> tuple[Tensor, Tensor]:
    n, c, h, w, o, kernel, *_ = case
    return draw(rows, n, c, h, w, device=device), draw(rows, o, c, *kernel, seed=1, device=device) * 0.3


def conv_of(case: tuple[Any, ...]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, w: F.conv2d(x, w, stride=case[6], padding=case[7])


def norm_layer(case: tuple[int, ...], rows: int, device: torch.device | str = CPU) -> tuple[Tensor, Tensor, Tensor]:
    n, c, h, w, _ = case
    x = draw(rows, n, c, h, w, device=device) * 2 + 1
    return x, draw(rows, c, seed=1, device=device), draw(rows, c, seed=2, device=device)


def loop(function: Callable[..., Tensor], in_dims: tuple[int | None, ...] | None = None) -> Callable[..., Tensor]:
    def run(*inputs: Tensor) -> Tensor:
        own = [dim == 0 for dim in in_dims or (0,) * len(inputs)]
        rows = len(inputs[own.index(True)])
        picked = ([t[s] if mine else t for t, mine in zip(inputs, own, strict=True)] for s in range(rows))
        return torch.stack([function(*row) for row in picked])

    return run


def stacked(
    function: Callable[..., Tensor], dtype: torch.dtype = F32, in_dims: Any = 0, **options: Any
) -> Callable[..., Tensor]:
    def run(*inputs: Tensor) -> Tensor:
        with StackedOps(dtype, **options):
            return vmap(function, in_dims)(*inputs)

    return run


def value_and_grads(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """With an uneven sum as the loss, so that all gradients differ."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    value = function(*leaves)
    gradient = torch.cos(torch.arange(value.numel(), device=value.device, dtype=F32)).reshape(value.shape)
    return (value.detach(), *torch.autograd.grad((value * gradient).sum(), leaves))


def derivatives(function: Callable[..., Tensor], *inputs: Tensor, order: int = 3) -> list[Tensor]:
    """By all inputs: gradients, the gradients of their squares, and the gradients of those."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    made, size = [], (function(*leaves) ** 3).sum()
    for power in (2, 1, 1)[:order]:
        gradients = torch.autograd.grad(size, leaves, create_graph=True)
        made += gradients
        size = sum(t.pow(power).sum() for t in gradients)
    return made


def assert_close(got: Any, want: Any, error: float = 1e-5) -> None:
    """Tensors, or lists of them, in the measure of the largest value of each: sums of many terms cancel."""
    if not isinstance(got, Tensor):
        for one, other in zip(got, want, strict=True):
            assert_close(one, other, error)
        return
    assert got.shape == want.shape
    got, want = got.detach(), want.detach()
    scale = float(want.abs().max()) + 1e-30
    assert float((got.float() - want.float()).abs().max()) <= error * scale


def assert_first_rows_equal(got: Any, want: Any) -> None:
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one[0], other[0])


def check(
    function: Callable[..., Tensor],
    *inputs: Tensor,
    error: float = 1e-5,
    in_dims: tuple[int | None, ...] | None = None,
    alone: bool = False,
    **options: Any,
) -> tuple[Tensor, ...]:
    """The value and gradients of the stack, close to those of a loop in float64.

    alone: the first row has the same bits without the others. options: of `StackedOps`.
    """
    got = value_and_grads(stacked(function, in_dims=in_dims or 0, **options), *inputs)

    def rounded(*inputs: Tensor) -> Tensor:
        return loop(function, in_dims)(*inputs).to(got[0].dtype)  # then gradients are rounded on their way back, too

    assert_close(got, value_and_grads(rounded, *(t.double() for t in inputs)), error)
    if alone:
        assert_first_rows_equal(value_and_grads(stacked(function, **options), *(t[:1] for t in inputs)), got)
    return got
