"""Stacked operations against a plain loop over the clients: on the CPU, in Triton's interpreter, and on a card."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fedthe import tree
from fedthe.engine import stacked_ops
from fedthe.engine.fit import crop
from fedthe.engine.stacked_ops import FAST, Geometry, Norm, Pool, StackedOps, convolve, use_kernels
from fedthe.nets import CCT4, Net, ResNet20GN
from fedthe.nets.layers import add_positions, attend, conv_beside, linear_add, norm_relu
from fedthe.types import scale

CUDA = torch.cuda.is_available()
TRITON = importlib.util.find_spec("triton") is not None
if TRITON and not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are first imported

CPU, CARD, INTERPRETER = "cpu", "cuda", "interpreter"
PLACES = [
    CPU,
    pytest.param(INTERPRETER, marks=pytest.mark.skipif(CUDA or not TRITON, reason="needs Triton and no card")),
    pytest.param(CARD, marks=pytest.mark.skipif(not (CUDA and TRITON), reason="needs a card and Triton")),
]
KERNEL_PLACES = PLACES[1:]
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
# n, c, h, w, kernel, stride, padding
POOLS = [
    (2, 4, 8, 8, (2, 2), (2, 2), (0, 0)),
    (2, 3, 7, 9, (3, 3), (2, 2), (1, 1)),
    (1, 2, 7, 6, (3, 2), (1, 3), (1, 0)),
]
# n, c, h, w, groups
NORMS = [
    (2, 16, 6, 6, 2),
    (3, 6, 5, 7, 3),  # blocks with idle groups, channels and pixels
    (2, 12, 4, 4, 1),
    (2, 4, 3, 3, 4),
]


@pytest.fixture
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(stacked_ops, "interpreting", request.param == INTERPRETER)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # what we compare with is exact
    return torch.device(CARD if request.param == CARD else CPU)


def on(places: list[Any]) -> Any:
    return pytest.mark.parametrize("place", places, indirect=True)


def draw(*shape: int, seed: int = 0, device: torch.device | str = CPU) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def layer(case: tuple[Any, ...], rows: int, device: torch.device | str = CPU) -> tuple[Tensor, Tensor]:
    n, c, h, w, o, kernel, *_ = case
    return draw(rows, n, c, h, w, device=device), draw(rows, o, c, *kernel, seed=1, device=device) * 0.3


def assert_close(got: Tensor, want: Tensor, error: float = 1e-5) -> None:
    """In the largest value's measure: sums of many terms cancel."""
    assert got.shape == want.shape
    got, want = got.detach(), want.detach()
    scale = float(want.abs().max()) + 1e-30
    assert float((got.float() - want.float()).abs().max()) <= error * scale


def value_and_grads(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """With an uneven sum as the loss, so that all gradients differ."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    value = function(*leaves)
    slope = torch.cos(torch.arange(value.numel(), device=value.device, dtype=F32)).reshape(value.shape)
    return (value.detach(), *torch.autograd.grad((value * slope).sum(), leaves))


def loop(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *inputs: torch.stack([function(*row) for row in zip(*inputs, strict=True)])


def stacked(function: Callable[..., Tensor], dtype: torch.dtype = F32, **options: Any) -> Callable[..., Tensor]:
    def run(*inputs: Tensor) -> Tensor:
        with StackedOps(dtype, **options):
            return vmap(function)(*inputs)

    return run


def conv_of(case: tuple[Any, ...]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, w: F.conv2d(x, w, stride=case[6], padding=case[7])


# ---------------------------------------------------------------------------------------------------------------------
# Convolution
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CONVOLUTIONS)
@on(PLACES)
def test_a_stacked_convolution_is_that_of_each_row(case: tuple[Any, ...], place: torch.device) -> None:
    x, w = layer(case, 2, place)
    got = value_and_grads(stacked(conv_of(case)), x, w)
    want = value_and_grads(loop(conv_of(case)), x.double(), w.double())
    for a, b in zip(got, want, strict=True):
        assert a.dtype == F32
        assert_close(a, b)


@pytest.mark.parametrize("case", CONVOLUTIONS)
@on(PLACES)
def test_a_stacked_convolution_in_bfloat16(case: tuple[Any, ...], place: torch.device) -> None:
    x, w = (t.bfloat16().float() for t in layer(case, 2, place))
    got = value_and_grads(stacked(conv_of(case), BF16), x, w)
    want = value_and_grads(loop(conv_of(case)), x, w)
    assert [t.dtype for t in got] == [BF16, F32, F32]
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-2)


def test_the_gradient_by_the_weight_is_not_rounded_to_bfloat16() -> None:
    x, w = layer(CONVOLUTIONS[0], 2)
    _, _, by_w = value_and_grads(stacked(conv_of(CONVOLUTIONS[0]), BF16), x, w)
    assert not torch.equal(by_w, by_w.bfloat16().float())


@pytest.mark.parametrize("case", CONVOLUTIONS)
@on(PLACES)
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(case: tuple[Any, ...], place: torch.device) -> None:
    rows = (1, 3, 7) if not stacked_ops.interpreting else (1, 2)
    x, w = layer(case, rows[-1], place)
    # the slopes of the first row are the same for any number of rows
    answers = [value_and_grads(stacked(conv_of(case)), x[:s], w[:s]) for s in rows]
    for more in answers[1:]:
        for a, b in zip(answers[0], more, strict=True):
            assert torch.equal(a[0], b[0])


def test_on_the_cpu_a_row_has_the_bits_of_a_plain_channels_last_convolution() -> None:
    case = CONVOLUTIONS[2]
    x, w = layer(case, 3)
    last = torch.channels_last
    plain = loop(lambda x, w: conv_of(case)(x.contiguous(memory_format=last), w.contiguous(memory_format=last)))
    assert torch.equal(stacked(conv_of(case))(x, w), plain(x, w))


@on(PLACES)
def test_grad_within_vmap(place: torch.device) -> None:
    x, w = layer(CONVOLUTIONS[3], 2, place)

    def slope(x: Tensor, w: Tensor) -> Tensor:
        return grad(lambda w: F.conv2d(x, w, stride=2, padding=1).square().sum())(w)

    got = stacked(slope)(x, w)
    assert_close(got, loop(slope)(x, w))


@pytest.mark.parametrize("case", [(1, 4, 5, 5, 6, (3, 3), (2, 2), (1, 1)), CONVOLUTIONS[5]])
@on(PLACES)
def test_second_derivatives(case: tuple[Any, ...], place: torch.device) -> None:
    """The gradient of the size of a gradient, by every input: it runs through all three functions and their own."""

    def penalty(lift: Callable[..., Any]) -> list[Tensor]:
        leaves = [t.requires_grad_() for t in layer(case, 2, place)]
        loss = (lift(conv_of(case))(*leaves) ** 3).sum()
        slopes = torch.autograd.grad(loss, leaves, create_graph=True)
        third = torch.autograd.grad(sum(s.pow(2).sum() for s in slopes), leaves, create_graph=True)
        return [*slopes, *third, *torch.autograd.grad(sum(s.sum() for s in third), leaves)]

    for got, want in zip(penalty(stacked), penalty(loop), strict=True):
        assert_close(got, want, 2e-5)


@on(PLACES)
def test_what_all_rows_share(place: torch.device) -> None:
    case = CONVOLUTIONS[5]
    x, w = layer(case, 3, place)

    def lift(in_dims: tuple[int | None, int | None]) -> Callable[..., Tensor]:
        def run(*inputs: Tensor) -> Tensor:
            with StackedOps(F32):
                return vmap(conv_of(case), in_dims)(*inputs)

        return run

    shared_weight = value_and_grads(lift((0, None)), x, w[0])
    want = value_and_grads(lambda x, w: torch.stack([conv_of(case)(row, w) for row in x]), x, w[0])
    for a, b in zip(shared_weight, want, strict=True):
        assert_close(a, b)
    shared_images = value_and_grads(lift((None, 0)), x[0], w)
    want = value_and_grads(lambda x, w: torch.stack([conv_of(case)(x, row) for row in w]), x[0], w)
    for a, b in zip(shared_images, want, strict=True):
        assert_close(a, b)


@on(PLACES)
def test_vmap_within_vmap(place: torch.device) -> None:
    """Gradients sample by sample, client by client; and a weight per client and sample."""
    x, w = draw(2, 3, 1, 4, 6, 6, device=place), draw(2, 5, 4, 3, 3, seed=1, device=place)

    def slope(w: Tensor, x: Tensor) -> Tensor:
        return grad(lambda w: F.conv2d(x, w, padding=1).square().sum())(w)

    with StackedOps(F32):
        got = vmap(vmap(slope, (None, 0)))(w, x)
        both = vmap(vmap(F.conv2d))(x, got)
    want = torch.stack([torch.stack([slope(w[s], x[s, i]) for i in range(3)]) for s in range(2)])
    assert_close(got, want)
    assert_close(both, torch.stack([torch.stack([F.conv2d(x[s, i], want[s, i]) for i in range(3)]) for s in range(2)]))


def conv_and_past(stride: int) -> Callable[..., Tensor]:
    """Like a block of a residual network: x goes through a convolution, and past it."""

    def both(x: Tensor, w: Tensor) -> Tensor:
        y, past = conv_beside(x, w, stride=stride, padding=w.shape[-1] // 2)
        return torch.cat([y.flatten(), (past * past).flatten()])

    return both


@on(PLACES)
@pytest.mark.parametrize(("stride", "side"), [(1, 3), (2, 3), (2, 1)])
def test_a_convolution_and_what_goes_past_it(stride: int, side: int, place: torch.device) -> None:
    x, w = draw(2, 2, 4, 6, 6, device=place), draw(2, 5, 4, side, side, seed=1, device=place)
    function = conv_and_past(stride)
    got, want = value_and_grads(stacked(function), x, w), value_and_grads(loop(function), x, w)
    one = value_and_grads(stacked(function), x[:1], w[:1])
    for a, b, c in zip(got, want, one, strict=True):
        assert_close(a, b)
        assert torch.equal(a[:1], c)

    def steepness(x: Tensor, w: Tensor) -> Tensor:
        slopes = grad(lambda *inputs: (function(*inputs) ** 3).sum(), (0, 1))(x, w)
        return torch.stack([slope.square().sum() for slope in slopes]).sum()

    def bend(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return grad(steepness, (0, 1))(x, w)

    with StackedOps(F32):
        second = vmap(bend)(x, w)
        shared = vmap(grad(lambda x: (function(x, w[0]) ** 2).sum()))(x)
    for k, a in enumerate(second):
        assert_close(a, torch.stack([bend(x[s], w[s])[k] for s in range(2)]), 3e-5)
    assert_close(shared, torch.stack([grad(lambda x: (function(x, w[0]) ** 2).sum())(x[s]) for s in range(2)]))


@on(KERNEL_PLACES)
def test_a_convolution_and_what_goes_past_it_in_bfloat16(place: torch.device) -> None:
    x, w = draw(2, 2, 4, 6, 6, device=place).bfloat16(), draw(2, 5, 4, 3, 3, seed=1, device=place)
    with StackedOps(BF16):
        y, past = vmap(lambda x, w: conv_beside(x, w, padding=1))(x, w)
        assert y.dtype == past.dtype == BF16
        assert torch.equal(past, x)
    got = value_and_grads(stacked(conv_and_past(1), BF16), x, w)
    want = value_and_grads(loop(conv_and_past(1)), x.float(), w.bfloat16().float())
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 2e-2)


@on(PLACES)
def test_a_convolution_or_what_goes_past_it(place: torch.device) -> None:
    x, w = draw(2, 2, 4, 6, 6, device=place), draw(2, 5, 4, 3, 3, seed=1, device=place)
    for which in (0, 1):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        with StackedOps(F32):
            made = vmap(lambda x, w: conv_beside(x, w, padding=1))(*leaves)[which]
        by_x, by_w = torch.autograd.grad(made.sum(), leaves, allow_unused=True)
        want = value_and_grads(loop(lambda x, w: F.conv2d(x, w, padding=1)), x, w)
        assert by_x.shape == x.shape
        assert (by_w is None) == (which == 1)
        if which == 1:
            assert torch.equal(by_x, torch.ones_like(x))
        else:
            assert_close(made, want[0])


@on(PLACES)
def test_bias_and_a_single_image(place: torch.device) -> None:
    x, w, b = draw(2, 3, 6, 6, device=place), draw(2, 4, 3, 3, 3, device=place), draw(2, 4, device=place)
    got = value_and_grads(stacked(lambda x, w, b: F.conv2d(x, w, b, padding=1)), x, w, b)
    want = value_and_grads(loop(lambda x, w, b: F.conv2d(x, w, b, padding=1)), x, w, b)
    for one, other in zip(got, want, strict=True):
        assert_close(one, other)


def test_what_is_not_covered_is_left_to_torch() -> None:
    x, w = draw(2, 4, 6, 6), draw(4, 2, 3, 3)
    for options in ({"groups": 2}, {"groups": 2, "dilation": 2}, {"groups": 2, "padding": "same"}):
        with StackedOps(F32):
            got = F.conv2d(x, w, **options)
        assert torch.equal(got, F.conv2d(x, w, **options))
    with StackedOps(F32):
        assert F.conv2d(x.double(), draw(5, 4, 3, 3).double()).dtype == torch.float64
        with pytest.raises(RuntimeError, match="channels"):
            F.conv2d(x, draw(5, 3, 3, 3))
    with pytest.raises(ValueError, match="bfloat16 or"):
        StackedOps(torch.float16)


def test_no_gradient_that_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("computed in vain")

    x, w = layer(CONVOLUTIONS[0], 2)
    with monkeypatch.context() as patch:
        patch.setattr(stacked_ops.InputGrad, "forward", staticmethod(never))
        w.requires_grad_()
        torch.autograd.grad(stacked(conv_of(CONVOLUTIONS[0]))(x, w).sum(), w)


# ---------------------------------------------------------------------------------------------------------------------
# Max-pooling
# ---------------------------------------------------------------------------------------------------------------------


def pool_of(case: tuple[Any, ...]) -> Callable[[Tensor], Tensor]:
    return lambda x: F.max_pool2d(x, case[4], stride=case[5], padding=case[6])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("case", POOLS)
@on(PLACES)
def test_pooling_is_torchs(case: tuple[Any, ...], dtype: torch.dtype, place: torch.device) -> None:
    """Of few different values: with many ties, and NaN and infinities among them."""
    x = draw(2, *case[:4], device=place).mul(2).round().to(dtype)
    x.view(-1)[::17] = float("nan")
    x.view(-1)[5::19] = float("-inf")
    x[0, 0, 0, :4, :4] = float("-inf")
    got = value_and_grads(stacked(pool_of(case), dtype), x)
    want = value_and_grads(loop(pool_of(case)), x)
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=0, equal_nan=True)
    error = 2e-2 if dtype == BF16 else 1e-6  # torch rounds between the windows that share a pixel
    torch.testing.assert_close(got[1], want[1], rtol=error, atol=error)


@on(PLACES)
def test_second_derivatives_of_pooling(place: torch.device) -> None:
    def penalty(lift: Callable[..., Any]) -> Tensor:
        x = draw(2, *POOLS[1][:4], device=place).requires_grad_()
        (slope,) = torch.autograd.grad((lift(pool_of(POOLS[1]))(x) ** 3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(slope.pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(second.sum(), x)[0]

    assert_close(penalty(stacked), penalty(loop))


@on(PLACES)
def test_pooling_of_a_single_image_by_any_name(place: torch.device) -> None:
    x = draw(2, 3, 8, 8, device=place)
    assert torch.equal(stacked(lambda x: F.max_pool2d(x, 2))(x), F.max_pool2d(x, 2))
    assert torch.equal(stacked(lambda x: torch.max_pool2d(x, [3, 2], padding=1))(x), F.max_pool2d(x, (3, 2), padding=1))
    with StackedOps(F32):
        values, places = F.max_pool2d(x, 2, return_indices=True)
        assert torch.equal(F.max_pool2d(x, 3, ceil_mode=True), torch.nn.MaxPool2d(3, ceil_mode=True)(x))
    assert places.dtype == torch.int64
    assert torch.equal(values, F.max_pool2d(x, 2))


# ---------------------------------------------------------------------------------------------------------------------
# Group and layer norm
# ---------------------------------------------------------------------------------------------------------------------


def norm_layer(case: tuple[int, ...], rows: int, device: torch.device | str = CPU) -> tuple[Tensor, Tensor, Tensor]:
    n, c, h, w, _ = case
    x = draw(rows, n, c, h, w, device=device) * 2 + 1
    return x, draw(rows, c, seed=1, device=device), draw(rows, c, seed=2, device=device)


def norm_of(case: tuple[int, ...]) -> Callable[..., Tensor]:
    return lambda x, weight=None, bias=None: F.group_norm(x, case[4], weight, bias, 1e-3)


@pytest.mark.parametrize("case", NORMS)
@on(PLACES)
def test_group_norm_is_that_of_each_row(case: tuple[int, ...], place: torch.device) -> None:
    inputs = norm_layer(case, 2, place)
    got = value_and_grads(stacked(norm_of(case)), *inputs)
    want = value_and_grads(loop(norm_of(case)), *(t.double() for t in inputs))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == F32
        assert_close(a, b)


@pytest.mark.parametrize("case", NORMS)
@on(KERNEL_PLACES)
def test_group_norm_in_bfloat16(case: tuple[int, ...], place: torch.device) -> None:
    x, weight, bias = norm_layer(case, 2, place)
    x = x.bfloat16()
    got = value_and_grads(stacked(norm_of(case), BF16), x, weight, bias)
    assert [t.dtype for t in got] == [BF16, BF16, F32, F32]
    # rounded in the end, as the slope then is on its way back: the gradients by weight and bias cancel much of it
    want = value_and_grads(loop(lambda *inputs: norm_of(case)(*inputs).bfloat16()), x.float(), weight, bias)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-2)


@pytest.mark.parametrize("dtype", [F32, BF16])
@on(PLACES)
def test_a_rows_bits_after_group_norm_do_not_depend_on_the_number_of_rows(
    dtype: torch.dtype, place: torch.device
) -> None:
    case = (4, 16, 32, 32, 2) if place.type == CARD else NORMS[1]
    rows = (1, 3, 40) if place.type == CARD else (1, 2)
    x, weight, bias = norm_layer(case, rows[-1], place)
    x = x.to(dtype)
    answers = [value_and_grads(stacked(norm_of(case), dtype), x[:s], weight[:s], bias[:s]) for s in rows]
    for more in answers[1:]:
        for a, b in zip(answers[0], more, strict=True):
            assert torch.equal(a[0], b[0])


@on(PLACES)
def test_group_norm_with_what_all_rows_share(place: torch.device) -> None:
    case = NORMS[1]
    x, weight, bias = norm_layer(case, 2, place)

    def lift(*in_dims: int | None) -> Callable[..., Tensor]:
        def run(*inputs: Tensor) -> Tensor:
            with StackedOps(F32):
                return vmap(norm_of(case), in_dims)(*inputs)

        return run

    def plainly(*in_dims: int | None) -> Callable[..., Tensor]:
        return lambda *inputs: torch.stack(
            [norm_of(case)(*(t if d is None else t[s] for t, d in zip(inputs, in_dims, strict=True))) for s in (0, 1)]
        )

    for inputs, in_dims in (
        ((x, weight[0], bias[0]), (0, None, None)),
        ((x[0], weight, bias), (None, 0, 0)),
        ((x, weight[0], bias), (0, None, 0)),
        ((x,), (0,)),
        ((x, weight), (0, 0)),
    ):
        got, want = value_and_grads(lift(*in_dims), *inputs), value_and_grads(plainly(*in_dims), *inputs)
        for a, b in zip(got, want, strict=True):
            assert_close(a, b)
    with StackedOps(F32):
        assert_close(torch.group_norm(x[0], 3, bias=bias[0]), F.group_norm(x[0], 3, bias=bias[0]))


@on(PLACES)
def test_group_norm_under_grad_and_vmap_within_vmap(place: torch.device) -> None:
    case = (1, 6, 3, 3, 2)
    x, (_, weight, bias) = draw(2, 3, 1, 6, 3, 3, device=place), norm_layer(case, 2, place)

    def slopes(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return grad(lambda *inputs: (norm_of(case)(*inputs) ** 3).sum(), (0, 1, 2))(x, weight, bias)

    with StackedOps(F32):
        got = vmap(vmap(slopes, (0, None, None)))(x, weight, bias)
    want = [[slopes(x[s, i], weight[s], bias[s]) for i in range(3)] for s in range(2)]
    for k, a in enumerate(got):
        assert_close(a, torch.stack([torch.stack([each[k] for each in row]) for row in want]))


@on(PLACES)
def test_second_derivatives_of_group_norm(place: torch.device) -> None:
    case = NORMS[1]

    def penalty(lift: Callable[..., Any]) -> list[Tensor]:
        leaves = [t.requires_grad_() for t in norm_layer(case, 2, place)]
        loss = (lift(norm_of(case))(*leaves) ** 3).sum()
        slopes = torch.autograd.grad(loss, leaves, create_graph=True)
        third = torch.autograd.grad(sum(s.pow(2).sum() for s in slopes), leaves, create_graph=True)
        return [*slopes, *third, *torch.autograd.grad(sum(s.sum() for s in third), leaves)]

    for got, want in zip(penalty(stacked), penalty(loop), strict=True):
        assert_close(got, want, 1e-4)


@pytest.mark.parametrize("dtype", [F32, BF16])
@on(PLACES)
def test_a_step_through_the_gradient_of_a_step(dtype: torch.dtype, place: torch.device) -> None:
    """As in Per-FedAvg: grad of grad within vmap, through a convolution, a norm and a relu."""
    x, w = draw(2, 2, 4, 5, 5, device=place), draw(2, 4, 4, 3, 3, seed=1, device=place) * 0.3
    scale, offset = draw(2, 4, seed=2, device=place), draw(2, 4, seed=3, device=place)

    def loss(params: tuple[Tensor, ...], x: Tensor) -> Tensor:
        w, scale, offset = params
        h = F.relu(F.group_norm(F.conv2d(x, w, stride=2, padding=1), 2, scale, offset))
        return (h.mean((2, 3)).float() ** 2).sum()

    def moved(x: Tensor, *params: Tensor) -> tuple[Tensor, ...]:
        def after(params: tuple[Tensor, ...]) -> Tensor:
            slopes = grad(loss)(params, x)
            return loss(tuple(p - 0.1 * s for p, s in zip(params, slopes, strict=True)), x)

        return grad(after)(params)

    with StackedOps(dtype):
        got = vmap(moved)(x, w, scale, offset)
    for k, a in enumerate(got):
        assert a.dtype == F32
        want = torch.stack([moved(x[s], w[s], scale[s], offset[s])[k] for s in range(2)])
        assert_close(a, want, 2e-5 if dtype == F32 else 6e-2)


@on(KERNEL_PLACES)
def test_group_norm_in_blocks_of_pixels_and_of_images(place: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedthe.engine import kernels

    x, weight, bias = norm_layer((3, 6, 5, 7, 3), 2, place)
    g, beside = (draw(2, 3, 6, 5, 7, seed=seed, device=place) for seed in (3, 4))
    for how, more in ((Norm(3, 1e-5), None), (Norm(3, 1e-5, beside=True, relu=True), beside)):
        made = kernels.group_norm(x, weight, bias, more, how)

        def both(tiles: Any, made: Any = made, more: Any = more, how: Norm = how) -> list[Tensor]:
            seen = (*made[1:], made[0] if how.relu else None)
            there = kernels.group_norm(x, weight, bias, more, how, tiles)
            return [*there, *kernels.group_norm_grad(g, x, weight, bias, *seen, how, tiles)]

        want = both(None)
        assert len(want) == 6 + how.beside
        assert all(t.permute(0, 1, 3, 4, 2).is_contiguous() for t in (want[0], want[3], *want[6:]))
        assert want[1].shape == want[2].shape == (2, 3, 3)
        assert want[4].is_contiguous()  # as weight and bias are: an update of all leaves at once wants that
        assert want[5].is_contiguous()
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "IMAGES_BLOCK", 2)
            for tiles in (kernels.NormTiles(8, 1), kernels.NormTiles(32, 4)):
                for a, b in zip(both(tiles), want, strict=True):
                    assert_close(a, b)


def norm_relu_layer(case: tuple[int, ...], adds: bool, device: torch.device, dtype: torch.dtype = F32) -> list[Tensor]:
    x, weight, bias = norm_layer(case, 2, device)
    return [x.to(dtype), weight, bias, *([draw(*x.shape, seed=5, device=device).to(dtype)] if adds else [])]


def norm_relu_of(case: tuple[int, ...]) -> Callable[..., Tensor]:
    return lambda x, weight, bias, beside=None: norm_relu(x, case[4], weight, bias, beside, eps=1e-3)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("case", NORMS)
@on(PLACES)
def test_norm_and_relu_at_once(case: tuple[int, ...], adds: bool, place: torch.device) -> None:
    inputs = norm_relu_layer(case, adds, place)
    got = value_and_grads(stacked(norm_relu_of(case)), *inputs)
    want = value_and_grads(loop(norm_relu_of(case)), *(t.double() for t in inputs))
    assert 0 < int((got[0] == 0).sum()) < got[0].numel()
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)
    one = value_and_grads(stacked(norm_relu_of(case)), *(t[:1] for t in inputs))
    for a, b in zip(one, got, strict=True):
        assert torch.equal(a[0], b[0])


@pytest.mark.parametrize("adds", [False, True])
@on(KERNEL_PLACES)
def test_norm_and_relu_at_once_in_bfloat16(adds: bool, place: torch.device) -> None:
    inputs = norm_relu_layer(NORMS[1], adds, place, BF16)
    got = value_and_grads(stacked(norm_relu_of(NORMS[1]), BF16), *inputs)
    assert [t.dtype for t in got] == [BF16, BF16, F32, F32, *([BF16] if adds else [])]
    rounded = loop(lambda *inputs: norm_relu_of(NORMS[1])(*inputs).bfloat16())
    for a, b in zip(got, value_and_grads(rounded, *(t.float() for t in inputs)), strict=True):
        assert_close(a, b, 1e-2)


@pytest.mark.parametrize("adds", [False, True])
@on(PLACES)
def test_second_derivatives_of_norm_and_relu(adds: bool, place: torch.device) -> None:
    def penalty(lift: Callable[..., Any]) -> list[Tensor]:
        leaves = [t.requires_grad_() for t in norm_relu_layer(NORMS[1], adds, place)]
        loss = (lift(norm_relu_of(NORMS[1]))(*leaves) ** 3).sum()
        slopes = torch.autograd.grad(loss, leaves, create_graph=True)
        third = torch.autograd.grad(sum(s.pow(2).sum() for s in slopes), leaves, create_graph=True)
        return [*slopes, *third, *torch.autograd.grad(sum(s.sum() for s in third), leaves)]

    for got, want in zip(penalty(stacked), penalty(loop), strict=True):
        assert_close(got, want, 1e-4)


@on(PLACES)
def test_norm_and_relu_that_is_not_covered(place: torch.device) -> None:
    """Left to its parts, within the mode: types that differ meet in float32."""
    x, weight, bias, beside = norm_relu_layer(NORMS[0], True, place)
    with StackedOps(BF16):
        mixed = vmap(lambda *row: norm_relu(row[0], 2, *row[1:]))(x.bfloat16(), weight, bias, beside)
        wide = norm_relu(x[0], 2, weight[0], bias[0], beside[0, :1])
        single = norm_relu(x[0, :, :, 0, 0], 2, weight[0], bias[0])
    assert mixed.dtype == F32
    assert_close(mixed, torch.stack([norm_relu(x[s], 2, weight[s], bias[s], beside[s]) for s in range(2)]), 2e-2)
    assert_close(wide, norm_relu(x[0], 2, weight[0], bias[0], beside[0, :1]))
    assert_close(single, norm_relu(x[0, :, :, 0, 0], 2, weight[0], bias[0]))


@on(KERNEL_PLACES)
def test_nan_passes_norm_and_relu(place: torch.device) -> None:
    x, weight, bias = norm_relu_layer(NORMS[0], False, place)
    x[0, 0, 0, 0, 0] = float("nan")
    y = stacked(norm_relu_of(NORMS[0]))(x, weight, bias)
    assert torch.equal(y.isnan(), loop(norm_relu_of(NORMS[0]))(x, weight, bias).isnan())


@on(PLACES)
def test_group_norm_of_no_images_is_left_to_torch(place: torch.device) -> None:
    for shape in ((3, 4), (3, 4, 5), (2, 4, 2, 2, 2), (0, 4, 3, 3)):
        x = draw(*shape, device=place)
        with StackedOps(F32):
            got = F.group_norm(x, 2)
        assert torch.equal(got, F.group_norm(x, 2))
    with StackedOps(F32):
        assert F.group_norm(draw(2, 4, 3, 3, device=place).double(), 2).dtype == torch.float64
        for groups, width in ((3, 4), (2, 3)):
            with pytest.raises(RuntimeError, match="Expected"):
                F.group_norm(draw(2, 4, 3, 3, device=place), groups, draw(width, device=place))
        with pytest.raises(ValueError, match="more than 1 value"):
            F.group_norm(draw(1, 4, 1, 1, device=place), 4)


@pytest.mark.parametrize("shape", [(2, 6, 16), (3, 5), (2, 1, 3, 10)])
@on(PLACES)
def test_layer_norm(shape: tuple[int, ...], place: torch.device) -> None:
    width = shape[-1]
    x, weight, bias = draw(2, *shape, device=place), draw(2, width, seed=1, device=place), draw(2, width, device=place)

    def layer(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.layer_norm(x, (width,), weight, bias, 1e-3)

    for inputs in ((x, weight, bias), (x, weight)):
        got = value_and_grads(stacked(layer), *inputs)
        for a, b in zip(got, value_and_grads(loop(layer), *inputs), strict=True):
            assert_close(a, b)
    one = value_and_grads(stacked(layer), *(t[:1] for t in (x, weight, bias)))
    for a, b in zip(one, value_and_grads(stacked(layer), x, weight, bias), strict=True):
        assert torch.equal(a[0], b[0])
    low = stacked(layer, BF16)(x.bfloat16(), weight, bias)
    assert low.dtype == (BF16 if use_kernels(x) and len(shape) > 2 else F32)
    assert_close(low, loop(layer)(x.bfloat16().float(), weight, bias), 1e-5 if low.dtype == F32 else 1e-2)


@pytest.mark.parametrize("shape", [(2, 6, 16), (2, 1, 3, 10), (3, 64, 128)])
@on(KERNEL_PLACES)
def test_layer_norm_of_tokens_in_bfloat16(shape: tuple[int, ...], place: torch.device) -> None:
    x = (draw(2, *shape, device=place) * 2 + 1).bfloat16()
    weight, bias = (draw(2, shape[-1], seed=seed, device=place) for seed in (1, 2))

    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, shape[-1:], weight, bias)

    got = value_and_grads(stacked(layer, BF16), x, weight, bias)
    assert [t.dtype for t in got] == [BF16, BF16, F32, F32]
    want = value_and_grads(loop(lambda *inputs: layer(*inputs).bfloat16()), x.float(), weight, bias)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-2)


@on(PLACES)
def test_second_derivatives_of_layer_norm(place: torch.device) -> None:
    def penalty(lift: Callable[..., Any]) -> tuple[Tensor, ...]:
        leaves = [draw(2, *shape, seed=i, device=place).requires_grad_() for i, shape in enumerate(((3, 2, 5), (5,)))]
        loss = (lift(lambda x, weight: F.layer_norm(x, [5], weight))(*leaves) ** 3).sum()
        slopes = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(sum(s.pow(2).sum() for s in slopes), leaves)

    for got, want in zip(penalty(stacked), penalty(loop), strict=True):
        assert_close(got, want, 1e-4)


@on(PLACES)
def test_layer_norm_that_is_not_covered(place: torch.device) -> None:
    x = draw(2, 3, 4, device=place)
    with StackedOps(F32):
        got = F.layer_norm(x, (3, 4)), F.layer_norm(x[0, 0], (4,))
        with pytest.raises(RuntimeError, match="xpected"):
            F.layer_norm(x, (4,), x[0, 0, :3])
    assert torch.equal(got[0], F.layer_norm(x, (3, 4)))
    assert torch.equal(got[1], F.layer_norm(x[0, 0], (4,)))


# ---------------------------------------------------------------------------------------------------------------------
# Attention
# ---------------------------------------------------------------------------------------------------------------------


# n, tokens, heads, width
ATTENTIONS = [(2, 16, 2, 16), (1, 5, 3, 7), (2, 1, 1, 20)]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("case", ATTENTIONS)
@on(PLACES)
def test_attention(case: tuple[int, ...], dtype: torch.dtype, place: torch.device) -> None:
    n, tokens, heads, width = case
    qkv = draw(2, n, tokens, 3 * heads * width, device=place).to(dtype)

    def layer(qkv: Tensor) -> Tensor:
        return attend(qkv, heads)

    got = value_and_grads(stacked(layer, dtype), qkv)
    for a, b in zip(got, value_and_grads(loop(layer), qkv.double()), strict=True):
        assert a.dtype == dtype
        assert_close(a, b, 1e-5 if dtype == F32 else 2e-2)
    one = value_and_grads(stacked(layer, dtype), qkv[:1])
    if use_kernels(qkv):
        for a, b in zip(one, got, strict=True):
            assert torch.equal(a[0], b[0])


@pytest.mark.parametrize("dtype", [F32, BF16])
@on(PLACES)
def test_second_derivatives_of_attention_within_vmap(dtype: torch.dtype, place: torch.device) -> None:
    def slope(qkv: Tensor) -> Tensor:
        def size(qkv: Tensor) -> Tensor:
            return grad(lambda qkv: (attend(qkv, 2).float() ** 3).sum())(qkv).float().square().sum()

        return grad(size)(qkv)

    qkv = draw(2, 3, 1, 4, 12, device=place).to(dtype)
    with StackedOps(dtype):
        got = vmap(vmap(slope))(qkv)
    assert got.dtype == dtype
    want = torch.stack([torch.stack([slope(row) for row in rows]) for rows in qkv.float()])
    assert_close(got, want, 1e-4 if dtype == F32 else 5e-2)


@on(PLACES)
def test_attention_that_is_not_covered(place: torch.device) -> None:
    for qkv in (draw(4, 12, device=place), draw(1, 65, 12, device=place), draw(1, 4, 12, device=place).double()):
        with StackedOps(F32):
            got = attend(qkv, 2)
        assert torch.equal(got, attend(qkv, 2))


@pytest.mark.parametrize("dtype", [F32, BF16])
@on(PLACES)
def test_positions(dtype: torch.dtype, place: torch.device) -> None:
    """In the tokens' type; the gradient by positions is float32. Twice derived, and within two levels of vmap."""
    x, positions = draw(2, 3, 2, 5, 4, device=place).to(dtype), draw(2, 5, 4, seed=1, device=place)

    def both(function: Callable[..., Tensor], dtype: torch.dtype) -> Callable[..., Tensor]:
        def run(*inputs: Tensor) -> Tensor:
            with StackedOps(dtype):
                return vmap(vmap(function, (0, None)))(*inputs)

        return run

    got = value_and_grads(both(add_positions, dtype), x, positions)
    assert [t.dtype for t in got] == [dtype if use_kernels(x) else F32, dtype, F32]
    rounded = got[0].dtype
    want = value_and_grads(lambda x, positions: (x + positions[:, None, None]).to(rounded), x.float(), positions)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-6 if dtype == F32 else 1e-2)
    assert not torch.equal(got[2], got[2].bfloat16().float())

    def bend(x: Tensor, positions: Tensor) -> Tensor:
        def size(positions: Tensor) -> Tensor:
            return grad(lambda p: (add_positions(x, p).float() ** 3).sum())(positions).square().sum()

        return grad(size)(positions)

    bent = both(bend, dtype)(x, positions)
    for row, samples, p in zip(bent, x.float(), positions, strict=True):
        assert_close(row, torch.stack([bend(sample, p) for sample in samples]), 1e-5 if dtype == F32 else 3e-2)


@on(PLACES)
def test_positions_that_are_not_covered(place: torch.device) -> None:
    x, positions = draw(2, 5, 4, device=place), draw(5, 4, seed=1, device=place)
    with StackedOps(BF16):
        for tokens, places in ((x, positions), (x.bfloat16(), positions[:1]), (x[0].bfloat16(), positions)):
            made = add_positions(tokens, places)
            assert made.dtype == F32
            assert torch.equal(made, tokens.float() + places)


# ---------------------------------------------------------------------------------------------------------------------
# Linear layers and the mixing of types
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("shape", [(5, 48), (3, 2, 20), (7,)])
@on(PLACES)
def test_linear(shape: tuple[int, ...], own: bool, place: torch.device) -> None:
    x, w, b = draw(2, *shape, device=place), draw(2, 10, shape[-1], device=place), draw(2, 10, device=place)
    tokens = own and len(shape) > 2 and use_kernels(x)
    for dtype, error in ((F32, 1e-5), (BF16, 1e-2 if tokens else 2e-3 if own else 1e-5)):
        got = value_and_grads(stacked(F.linear, dtype, own_linear=own), x, w, b)
        want = value_and_grads(loop(F.linear), x.double(), w.double(), b.double())
        assert [t.dtype for t in got] == [dtype if tokens else F32, F32, F32, F32]
        for one, other in zip(got, want, strict=True):
            assert_close(one, other, error)


@pytest.mark.parametrize("shape", [(5, 48), (70, 20), (7,)])
@on(KERNEL_PLACES)
def test_a_linear_layer_on_plain_vectors_is_not_rounded_to_bfloat16(
    shape: tuple[int, ...], place: torch.device
) -> None:
    x, w, b = draw(2, *shape, device=place), draw(2, 10, shape[-1], device=place), draw(2, 10, device=place)

    def as_convolution(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        images, weight = x.reshape(-1, shape[-1])[:, :, None, None], w[:, :, None, None]
        return convolve(images, weight, (1, 1), (0, 0), F32, FAST, b).reshape(*shape[:-1], 10)

    got = value_and_grads(stacked(F.linear, BF16), x, w, b)
    for one, other in zip(got, value_and_grads(vmap(as_convolution), x, w, b), strict=True):
        assert one.dtype == F32
        assert torch.equal(one, other)


# n, tokens, c, o
TOKENS = [(2, 64, 128, 128), (3, 50, 20, 10), (1, 40, 128, 1)]


@pytest.mark.parametrize("case", TOKENS)
@on(KERNEL_PLACES)
def test_a_linear_layer_on_tokens_in_bfloat16(
    case: tuple[int, ...], place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(stacked_ops, "linear_add_plainly")  # with what is beside, it is one kernel
    n, tokens, c, o = case
    x, beside = (draw(2, n, tokens, d, seed=d, device=place).bfloat16() for d in (c, o))
    w, b = draw(2, o, c, seed=1, device=place) * c**-0.5, draw(2, o, seed=2, device=place)
    for layer, inputs in ((F.linear, (x, w)), (F.linear, (x, w, b)), (linear_add, (beside, x, w, b))):
        got = value_and_grads(stacked(layer, BF16), *inputs)
        assert [t.dtype for t in got] == [BF16, *(t.dtype for t in inputs)]
        rounded = loop(lambda *inputs, layer=layer: layer(*inputs).bfloat16())  # as the slope then is, too
        for one, other in zip(got, value_and_grads(rounded, *(t.float() for t in inputs)), strict=True):
            assert_close(one, other, 1e-2)
        alone = value_and_grads(stacked(layer, BF16), *(t[:1] for t in inputs))
        for one, two in zip(alone, got, strict=True):
            assert torch.equal(one[0], two[0])
    for slope in got[-2:]:  # of weight and bias
        assert not torch.equal(slope, slope.bfloat16().float())


@on(PLACES)
def test_gelu_stays_in_bfloat16(place: torch.device) -> None:
    x = draw(2, 3, 5, 4, device=place).bfloat16()
    got = value_and_grads(stacked(F.gelu, BF16), x)
    for one, other in zip(got, value_and_grads(loop(F.gelu), x.float()), strict=True):
        assert one.dtype == BF16
        assert_close(one, other, 1e-2)


@pytest.mark.parametrize("rows", [3, 70])
@on(PLACES)
def test_a_rows_bits_after_linear_do_not_depend_on_the_number_of_rows(rows: int, place: torch.device) -> None:
    x, w, b = draw(2, rows, 20, device=place), draw(2, 10, 20, seed=1, device=place), draw(2, 10, device=place)
    both = value_and_grads(stacked(F.linear), x, w, b)
    for one, two in zip(value_and_grads(stacked(F.linear), x[:1], w[:1], b[:1]), both, strict=True):
        assert torch.equal(one[0], two[0]) or not use_kernels(x)


@on(PLACES)
def test_linear_with_what_all_rows_share(place: torch.device) -> None:
    x, w, b = draw(2, 5, 20, device=place), draw(2, 10, 20, seed=1, device=place), draw(2, 10, device=place)
    for in_dims in ((0, None, None), (0, 0, None), (0, None, 0), (None, None, 0), (None, 0, 0)):
        inputs = [t if dim == 0 else t[0] for t, dim in zip((x, w, b), in_dims, strict=True)]

        def stack(*inputs: Tensor, in_dims: Any = in_dims) -> Tensor:
            with StackedOps(F32):
                return vmap(F.linear, in_dims)(*inputs)

        def plainly(*inputs: Tensor, in_dims: Any = in_dims) -> Tensor:
            rows = ([t[s] if dim == 0 else t for t, dim in zip(inputs, in_dims, strict=True)] for s in (0, 1))
            return torch.stack([F.linear(*row) for row in rows])

        for got, want in zip(value_and_grads(stack, *inputs), value_and_grads(plainly, *inputs), strict=True):
            assert_close(got, want)


@pytest.mark.parametrize("shape", [(5, 48), (70, 2, 20), (7,)])
@on(PLACES)
def test_a_linear_layer_and_a_sum_at_once(shape: tuple[int, ...], place: torch.device) -> None:
    x, w, b = draw(2, *shape, device=place), draw(2, 10, shape[-1], device=place), draw(2, 10, device=place)
    beside = draw(2, *shape[:-1], 10, seed=3, device=place)
    tokens = len(shape) > 2 and use_kernels(x)
    for inputs in ((beside, x, w, b), (beside, x, w)):
        for dtype, error in ((F32, 1e-5), (BF16, 1e-2 if tokens else 2e-3)):
            value, *slopes = value_and_grads(stacked(linear_add, dtype), *inputs)
            assert value.dtype == (dtype if tokens else F32)
            rounded = loop(lambda *inputs, value=value: linear_add(*inputs).to(value.dtype))
            want = value_and_grads(rounded, *(t.double() for t in inputs))
            assert all(slope.dtype == F32 for slope in slopes)
            for one, other in zip((value, *slopes), want, strict=True):
                assert_close(one, other, error)


@on(PLACES)
def test_a_linear_layer_and_a_sum_with_what_all_rows_share(place: torch.device) -> None:
    x, w, beside = draw(2, 5, 6, device=place), draw(4, 6, seed=1, device=place), draw(5, 4, seed=2, device=place)
    with StackedOps(F32):
        shared = vmap(linear_add, (None, 0, None))(beside, x, w)
        apart = vmap(linear_add, (0, 0, None))(torch.stack([beside, 2 * beside]), x, w)
        sums = vmap(linear_add, (0, None, None))(torch.stack([beside, 2 * beside]), x[0], w)
        fewer = linear_add(beside[:1], x[0], w)  # not covered
        low = linear_add(beside.bfloat16(), x[0], w)
    assert_close(shared, beside + x @ w.T)
    assert_close(apart, torch.stack([beside, 2 * beside]) + x @ w.T)
    assert_close(sums, torch.stack([beside, 2 * beside]) + x[0] @ w.T)
    assert_close(fewer, beside[:1] + x[0] @ w.T)
    assert_close(low, beside.bfloat16() + x[0] @ w.T)


@on(PLACES)
def test_second_derivatives_of_linear_within_vmap(place: torch.device) -> None:
    def slopes(*inputs: Tensor) -> tuple[Tensor, ...]:
        every = tuple(range(4))

        def size(*inputs: Tensor) -> Tensor:
            return sum(s.square().sum() for s in grad(lambda *t: (linear_add(*t) ** 3).sum(), every)(*inputs))

        return grad(size, every)(*inputs)

    shapes = ((3, 4), (3, 6), (4, 6), (4,))
    inputs = [draw(2, *shape, seed=i, device=place) for i, shape in enumerate(shapes)]
    with StackedOps(F32):
        got = vmap(slopes)(*inputs)
    want = [slopes(*(t[s] for t in inputs)) for s in range(2)]
    for k, a in enumerate(got):
        assert_close(a, torch.stack([row[k] for row in want]), 2e-5)


@on(PLACES)
def test_bfloat16_ends_where_it_meets_float32(place: torch.device) -> None:
    x, w = draw(2, 4, 6, 6, device=place), draw(8, 4, 3, 3, device=place)
    scale, offset, head = draw(8, device=place), draw(8, device=place), draw(3, 8 * 16, device=place)
    with StackedOps(BF16):
        h = F.conv2d(x, w)
        assert h.dtype == F.relu(h).dtype == (h + h).dtype == BF16
        normed = F.group_norm(h.float(), 2, scale, offset)
        assert normed.dtype == F32
        assert F.linear(h.flatten(1), head).dtype == F32
        assert (h.flatten(1) @ head.T).dtype == F32
        assert torch.cat([h, normed]).dtype == F32
        assert torch.einsum("nchw,c->n", h, scale).dtype == F32
        assert h.mean((2, 3)).dtype == torch.sum(h, 1).dtype == h.sum().dtype == F32
        assert h.sum(dtype=BF16).dtype == BF16
        total = torch.zeros(8, device=place)
        total += h.sum((0, 2, 3))
        low = h.clone()
        low += normed  # written into as it is
        low.copy_(normed)
        low[0] = normed[0]
    assert low.dtype == BF16


@pytest.mark.parametrize("dtype", [F32, BF16])
@on(PLACES)
def test_group_norm_after_a_convolution(dtype: torch.dtype, place: torch.device) -> None:
    x, w = draw(2, 2, 4, 6, 6, device=place), draw(2, 8, 4, 3, 3, device=place)
    scale, offset = draw(2, 8, device=place), draw(2, 8, seed=1, device=place)

    def layer(x: Tensor, w: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        return F.group_norm(F.conv2d(x, w), 2, scale, offset)

    got = value_and_grads(stacked(layer, dtype), x, w, scale, offset)
    assert got[0].dtype == (dtype if stacked_ops.use_kernels(x) else F32)
    assert all(t.dtype == F32 for t in got[1:])
    for a, b in zip(got, value_and_grads(loop(layer), x, w, scale, offset), strict=True):
        assert_close(a, b, 1e-5 if dtype == F32 else 3e-2)


def test_gradients_by_both_types_at_once_are_not_cast() -> None:
    x, w = draw(2, 4, 6, 6).bfloat16().requires_grad_(), draw(8, 4, 3, 3).requires_grad_()
    with StackedOps(BF16):
        by_x, by_w = torch.autograd.grad(F.conv2d(x, w).float().square().sum(), [x, w])
    assert (by_x.dtype, by_w.dtype) == (BF16, F32)


@on(PLACES)
def test_a_small_net_end_to_end(place: torch.device) -> None:
    params = {
        "conv": draw(2, 8, 3, 3, 3, device=place),
        "fc": draw(2, 4, 32, seed=1, device=place),
    }
    x, y = draw(2, 2, 3, 6, 6, seed=2, device=place), torch.tensor([[1, 3], [0, 2]], device=place)

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        h = F.relu(F.max_pool2d(F.conv2d(x, params["conv"]), 2))
        return F.cross_entropy(F.linear(h.flatten(1), params["fc"]) * 0.1, y)

    def slopes(dtype: torch.dtype | None) -> tuple[Tensor, ...]:
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
        if dtype is None:
            rows = [loss({name: leaf[s] for name, leaf in leaves.items()}, x[s], y[s]) for s in range(2)]
            return torch.autograd.grad(torch.stack(rows).sum(), list(leaves.values()))
        with StackedOps(dtype):
            return torch.autograd.grad(vmap(loss)(leaves, x, y).sum(), list(leaves.values()))

    for dtype, error in ((F32, 1e-5), (BF16, 5e-2)):
        for got, want in zip(slopes(dtype), slopes(None), strict=True):
            assert got.dtype == F32
            assert_close(got, want, error)


def two_starts(net: Net, device: torch.device) -> dict[str, Tensor]:
    """Of two clients, as a program holds them."""
    starts = [tree.flatten(net.init(seed)) for seed in (0, 1)]
    rows = {name: torch.stack([start[name] for start in starts]).to(device) for name in starts[0]}
    return {name: stacked_ops.empty_rows(leaf.shape, leaf).copy_(leaf).requires_grad_() for name, leaf in rows.items()}


@pytest.mark.parametrize("make", [ResNet20GN, CCT4])
@on(KERNEL_PLACES)
def test_a_net_end_to_end(make: Callable[..., Net], place: torch.device) -> None:
    """Through all kernels at once."""
    net = make(3, size=8)
    params = two_starts(net, place)
    x, y = draw(2, 2, 3, 8, 8, device=place), torch.tensor([[1, 0], [0, 2]], device=place)

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net.logits(tree.unflatten(params), x), y)

    with StackedOps(F32):
        got = torch.autograd.grad(vmap(loss)(params, x, y).sum(), list(params.values()))
    losses = [loss({name: leaf[s] for name, leaf in params.items()}, x[s], y[s]) for s in range(2)]
    for a, b in zip(got, torch.autograd.grad(sum(losses), list(params.values())), strict=True):
        assert_close(a, b, 1e-4)


class Casts(TorchDispatchMode):
    """Counts the casts of tensors of that many values from one type to another."""

    def __init__(self, values: int) -> None:
        super().__init__()
        self.values, self.count = values, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[0] if func == torch.ops.aten._to_copy.default else args[1]
            self.count += made.numel() == self.values and made.dtype != source.dtype
        return made


@on(KERNEL_PLACES)
def test_tokens_are_bfloat16_throughout(place: torch.device) -> None:
    """Against plain float32, which the test above finds to be the mode's, too."""
    net = CCT4(3, size=8)
    params = two_starts(net, place)
    x, y = draw(2, 3, 3, 8, 8, device=place), torch.tensor([[1, 0, 2], [0, 2, 2]], device=place)

    def features_and_loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        whole = tree.unflatten(params)
        features = net.features(whole["body"], x)
        return features, F.cross_entropy(net.head(whole["head"], features), y)

    def answers(lift: Callable[..., Any]) -> tuple[Tensor, ...]:
        features, losses = lift(features_and_loss)(params, x, y)
        return features, *torch.autograd.grad(losses.sum(), list(params.values()))

    def one_by_one(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(params: dict[str, Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
            rows = [function({name: leaf[s] for name, leaf in params.items()}, x[s], y[s]) for s in range(2)]
            return [torch.stack(each) for each in zip(*rows, strict=True)]

        return run

    with StackedOps(BF16), Casts(2 * 3 * 4 * 128) as casts:
        got = answers(vmap)
    assert casts.count == 1  # on the way back through the last sum
    for name, a, b in zip(("features", *params), got, answers(one_by_one), strict=True):
        assert a.dtype == F32
        assert_close(a, b, 4e-1 if "conv" in name else 5e-2)  # a max-pool may take another pixel: 0.21 seen on a card


# ---------------------------------------------------------------------------------------------------------------------
# The kernels alone
# ---------------------------------------------------------------------------------------------------------------------


@on(KERNEL_PLACES)
def test_any_tiles_give_the_same(place: torch.device) -> None:
    from fedthe.engine import kernels

    x, w = draw(2, 2, 16, 6, 6, device=place), draw(2, 24, 16, 3, 3, device=place)
    how = Geometry((3, 3), (2, 2), (1, 1), (6, 6))
    g = draw(2, 2, 24, 3, 3, device=place)
    want = [kernels.conv(x, w, how), kernels.conv_input_grad(g, w, how), kernels.conv_weight_grad(x, g, how)[0]]
    for tiles, splits in (((64, 16, 16, 4, 2), 2), ((64, 32, 32, 4, 2), 1), ((32, 32, 64, 8, 3), 3)):
        cut = kernels.Tiles(*tiles)
        got = [kernels.conv(x, w, how, cut), kernels.conv_input_grad(g, w, how, cut)]
        for a, b in zip([*got, *kernels.conv_weight_grad(x, g, how, cut, splits)], want, strict=True):
            assert_close(a, b)


@pytest.mark.parametrize("pixels", [2, 4])
@pytest.mark.parametrize("case", [case for case in CONVOLUTIONS if case[1] != 32])
@on(KERNEL_PLACES)
def test_pixels_side_by_side_in_one_row_give_the_same(case: tuple[Any, ...], pixels: int, place: torch.device) -> None:
    from fedthe.engine import kernels

    n, _, h, w, o, kernel, stride, padding = case
    how = Geometry(kernel, stride, padding, (h, w))
    x, weight = layer(case, 2, place)
    g = draw(2, n, o, *how.out, seed=3, device=place)
    how = dataclasses.replace(how, bias=True)

    def every(cut: Any, splits: int | None) -> tuple[Tensor, ...]:
        slopes = kernels.conv_weight_grad(x, g, how, cut, splits)
        return kernels.conv(x, weight, how, cut), kernels.conv_input_grad(g, weight, how, cut), *slopes

    want = every(None, None)
    for k, splits in ((16, 1), (64, 2)):
        for a, b in zip(every(kernels.Tiles(32, 16, k, 4, 1, pixels), splits), want, strict=True):
            assert_close(a, b)


@on(KERNEL_PLACES)
def test_results_lie_with_channels_last(place: torch.device) -> None:
    from fedthe.engine import kernels

    x, w = draw(2, 2, 4, 4, 4, device=place), draw(2, 8, 4, 1, 1, device=place)
    how = Geometry((1, 1), (1, 1), (0, 0), (4, 4))
    y = kernels.conv(x, w, how)
    assert y.permute(0, 1, 3, 4, 2).is_contiguous()
    assert kernels.conv_input_grad(y, w, how).permute(0, 1, 3, 4, 2).is_contiguous()
    pooled, index = kernels.max_pool(y[0], Pool((2, 2), (2, 2), (0, 0), (4, 4)))
    assert pooled.permute(0, 2, 3, 1).is_contiguous()
    assert index.dtype == torch.uint8


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("pad", [0, 3])
@on(KERNEL_PLACES)
def test_batches_are_cut_as_for_one_client(pad: int, dtype: torch.dtype, place: torch.device) -> None:
    from fedthe.engine import kernels

    made = torch.Generator().manual_seed(0)

    def whole(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=made).to(place)

    images = whole(256, 2, 5, 7, 6, 3).to(torch.uint8)
    rows, down, right = whole(5, 2, 4), whole(2 * pad + 1, 2, 4), whole(2 * pad + 1, 2, 4)
    mirrored = whole(2, 2, 4).bool()
    want = []
    for s in range(2):
        chosen = images[s, rows[s]]
        chosen = torch.where(mirrored[s, :, None, None, None], chosen.flip(2), chosen)
        want.append(scale(crop(chosen, pad, down[s], right[s])).movedim(-3, -1).to(dtype))
    got = kernels.cut_batches(images, rows, down.int(), right, mirrored, pad, dtype)
    if stacked_ops.interpreting and dtype == BF16:  # the interpreter cuts off bits where a card rounds
        assert_close(got, torch.stack(want), 1e-2)
    else:
        assert torch.equal(got, torch.stack(want))
    assert torch.equal(kernels.cut_batches(images, rows, down, right, mirrored, pad, out=got.clone().zero_()), got)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.cut_batches(images, rows, down, right, mirrored, pad, out=got[:1])


@on(KERNEL_PLACES)
def test_few_registers_only_where_sums_leave_room(place: torch.device) -> None:
    from fedthe.engine import kernels

    for c, o in itertools.product((4, 16, 32), (8, 16, 32, 48, 64, 128)):
        for tiles in (kernels.conv_tiles(2**14, c, o, 9, BF16, 2), kernels.weight_grad_tiles(2**14, c, o, 9, BF16, 2)):
            sums = tiles.m * tiles.n // (32 * tiles.warps)
            assert tiles.registers is None or tiles.registers >= 2 * sums
