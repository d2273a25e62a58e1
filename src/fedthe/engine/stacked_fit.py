"""Training of many clients as rows of one program: what `fit.Fit` does for one, with the same draws.

A method calls `fit` inside vmap, seeing one client; the steps run outside it, on all rows. A step has static shapes and
buffers, so that a GPU replays it as one graph. A batch that is padding alone leaves a row as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..kernels import use_kernels
from ..methods.checks import refuse_captured
from ..methods.fit import Fitted, Loss
from ..nets.net import Net
from ..tree import Tree
from ..types import Batch, Shard
from .fit import Cuts, Optimizer, cut_batches_plainly, draw_cuts, order_axes, weigh_losses
from .ops.mode import StackedOps
from .ops.stacked import empty_rows
from .outside import run_outside
from .program import Programs, Replay, name_function


@dataclass(frozen=True)
class StackedFit:
    """The `Fit` of the rows of a stack."""

    net: Net
    shards: Shard  # of all rows
    optimizer: Optimizer
    epochs: int
    batch: int
    flip: bool
    crop: int
    keys: Tensor  # int64 [rows, epochs, 2]: of each row's draws in each epoch
    clients: Tensor  # int64 [rows]
    sizes: tuple[int, ...]  # the real rows of each shard
    programs: Programs[Program]
    dtype: torch.dtype  # of convolutions
    federations: tuple[int, ...]  # the clients of each row's federation
    trial: int | None = None  # only this number of steps, and no graph: to measure their memory
    row: Tensor = torch.tensor(0)  # which row calls, as vmap sees it

    def at(self, row: Tensor) -> StackedFit:
        return replace(self, row=row)

    @property
    def lr(self) -> float:
        return self.optimizer.lr

    @property
    def steps(self) -> Tensor:
        return self._of_row([self.epochs * -(-size // self.batch) for size in self.sizes])

    @property
    def total_clients(self) -> Tensor:
        return self._of_row(self.federations)

    def _of_row(self, numbers: Sequence[int]) -> Tensor:
        """The calling row's, as vmap sees it."""
        return torch.tensor(numbers, dtype=torch.float32, device=self.row.device).index_select(0, self.row[None])[0]

    def __call__(
        self,
        loss: Loss,
        params: Tree,
        given: Tree | None = None,
        *,
        shard: Shard | None = None,
        weight_decay: float | None = None,
    ) -> Fitted:
        refuse_captured(loss)
        decay = self.optimizer.weight_decay if weight_decay is None else weight_decay

        def work(row: Tensor, params: Tree, given: Tree, *other: Tensor) -> tuple[Tree, Tensor]:
            rows, sizes = _Rows(*self.shards[:4]), self.sizes
            if other:  # only then the device is waited for
                rows = _Rows(*other)
                sizes = tuple(rows.real.sum(1).tolist())
            trained, losses = self._train(loss, tree.flatten(params), tree.flatten(given), rows, sizes, decay)
            return tree.unflatten(trained), losses

        return Fitted(*run_outside(work, self.row, params, given or {}, *(shard[:4] if shard else ())))

    def _train(
        self,
        loss: Loss,
        params: dict[str, Tensor],
        given: dict[str, Tensor],
        rows: _Rows,
        sizes: tuple[int, ...],
        decay: float,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The parameters of all rows, and the mean loss of each epoch [rows, epochs]."""
        longest, shortest = (-(-size // self.batch) for size in (max(sizes), min(sizes)))
        shape = (len(sizes), self.batch, *rows.x.shape[2:])
        setting = Setting(self.net, loss, self.optimizer, decay, shortest < longest, self.dtype, rows.x.dtype)
        key = (setting, name_function(loss), shape, *(_shape(leaves) for leaves in (params, given)), rows.counts.shape)
        program = self.programs.get(
            key, lambda: Program(setting, params, given, rows.counts, shape, self.programs, self.trial is None)
        )
        program.load(params, given, rows.counts)
        steps = longest if self.trial is None else min(longest, self.trial)
        size, means = torch.tensor(sizes, device=rows.real.device), []
        for epoch in range(self.epochs if self.trial is None else min(1, self.epochs)):
            cuts = draw_cuts(self.keys[:, epoch], self.clients, rows.real, self.flip, self.crop)
            cuts = cuts.pad(longest * self.batch)
            labels = rows.labels.gather(1, cuts.order)
            real = (torch.arange(cuts.order.shape[1], device=size.device) < size[:, None]).float()
            for step in range(steps):
                part = slice(step * self.batch, (step + 1) * self.batch)
                program.cut(rows.x, cuts.take(part), self.crop)
                program.y.copy_(labels[:, part])
                program.weight.copy_(real[:, part])
                program.step()
            means.append(program.total / size.clamp(min=1))
            program.total.zero_()
        # in plain order: chunks are joined in it, and a sum over clients must not depend on whether there were any
        done = {name: leaf.detach().clone(memory_format=_PLAIN) for name, leaf in program.params.items()}
        return done, torch.stack(means, 1) if means else torch.zeros((len(sizes), 0), device=size.device)


_PLAIN = torch.contiguous_format


class _Rows(NamedTuple):
    """The training part of stacked shards."""

    x: Tensor  # [rows, n, ...], as in Shard
    labels: Tensor  # int64 [rows, n]
    real: Tensor  # bool [rows, n]
    counts: Tensor  # float [rows, classes]


@dataclass(frozen=True)
class Setting:
    """What a step does."""

    net: Net
    loss: Loss = field(compare=False)  # its name is compared instead
    optimizer: Optimizer
    decay: float
    ragged: bool  # some rows run out of batches before others do
    dtype: torch.dtype  # of convolutions
    data: torch.dtype  # of a shard's x: uint8 for pictures


class Program:
    """One step of training on every row: a batch in, parameters and the optimizer's state changed in place."""

    def __init__(
        self,
        setting: Setting,
        params: dict[str, Tensor],
        given: dict[str, Tensor],
        counts: Tensor,
        shape: tuple[int, ...],
        programs: Programs[Program],
        captured: bool,
    ) -> None:
        self.setting = setting
        device, rows, batch = counts.device, shape[0], shape[1]
        self.params = {name: empty_rows(leaf.shape, leaf) for name, leaf in params.items()}
        self.given = {name: empty_rows(leaf.shape, leaf) for name, leaf in given.items()}
        self.counts = empty_rows(counts.shape, counts)
        self.update = _UPDATES[setting.optimizer.name](setting, list(self.params.values()))
        pictures = setting.dtype if use_kernels(counts) else torch.float32
        self.x = torch.zeros(shape, device=device, dtype=pictures if setting.data == torch.uint8 else setting.data)
        self.y = torch.zeros((rows, batch), dtype=torch.int64, device=device)
        self.weight = torch.zeros((rows, batch), device=device)
        self.total = torch.zeros(rows, device=device)
        self._replay = Replay(self._step, device, programs.pool)
        if captured:
            self.load(params, given, counts)
            self._replay.prepare()
            self.total.zero_()

    def load(self, params: dict[str, Tensor], given: dict[str, Tensor], counts: Tensor) -> None:
        with torch.no_grad():
            for buffers, values in ((self.params, params), (self.given, given)):
                for name, leaf in values.items():
                    buffers[name].copy_(leaf)
            self.counts.copy_(counts)
            self.update.reset()

    def cut(self, x: Tensor, cuts: Cuts, pad: int) -> None:
        """Load the next batch."""
        if use_kernels(x) and self.setting.data == torch.uint8:
            from ..kernels.batches import cut_batches

            cut_batches(x, cuts.order, cuts.down, cuts.right, cuts.mirrored, pad, out=self.x)
        else:
            self.x.copy_(cut_batches_plainly(x, cuts, pad))

    def step(self) -> None:
        self._replay()

    def _step(self) -> None:
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in self.params.items()}
        with torch.enable_grad(), lift_convolutions(self.setting.dtype):
            x = order_axes(self.x, self.setting.data)
            mean, total = torch.vmap(self._lose)(leaves, self.given, Batch(x, self.y, self.weight, self.counts))
            gradients = torch.autograd.grad(
                mean.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
            )
        with torch.no_grad():
            self.total += total.detach()
            active = (self.weight.sum(1) > 0) if self.setting.ragged else None
            self.update(list(gradients), active)

    def _lose(self, params: dict[str, Tensor], given: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """One row's mean loss over the real rows of a batch, and their sum."""
        losses = self.setting.loss(self.setting.net, tree.unflatten(params), tree.unflatten(given), batch)
        total = weigh_losses(losses, batch).sum()
        return total / batch.weight.sum().clamp(min=1), total


@contextmanager
def lift_convolutions(dtype: torch.dtype) -> Iterator[None]:
    """vmap takes convolutions in our way, in `dtype`; with bfloat16, other matrix products of float32 go as tf32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == torch.bfloat16 else before)
    try:
        with StackedOps(dtype):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


# Updates take all leaves at once, so that a network of many small ones costs few launches. A row that is not `active`
# stays as it is.


class _SGD:
    """torch.optim.SGD, row by row."""

    def __init__(self, setting: Setting, params: list[Tensor]) -> None:
        self.setting, self.params = setting, params
        self.state = [torch.zeros_like(leaf) for leaf in params] if setting.optimizer.momentum else []

    def reset(self) -> None:
        for leaf in self.state:
            leaf.zero_()

    def __call__(self, gradients: list[Tensor], active: Tensor | None) -> None:
        if self.setting.decay:
            gradients = _list(torch._foreach_add(gradients, self.params, alpha=self.setting.decay))
        if self.state:
            before = _copy(self.state, active)
            torch._foreach_mul_(self.state, self.setting.optimizer.momentum)
            torch._foreach_add_(self.state, gradients)
            _restore(self.state, before, active)
            gradients = self.state
        if active is not None:
            gradients = [torch.where(_over(active, gradient), gradient, 0) for gradient in gradients]
        torch._foreach_add_(self.params, gradients, alpha=-self.setting.optimizer.lr)


class _Adam:
    """torch.optim.Adam, row by row: a row counts its own steps."""

    def __init__(self, setting: Setting, params: list[Tensor]) -> None:
        self.setting, self.params = setting, params
        self.first = [torch.zeros_like(leaf) for leaf in params]
        self.second = [torch.zeros_like(leaf) for leaf in params]
        self.steps = torch.zeros(len(params[0]), dtype=torch.float64, device=params[0].device)

    def reset(self) -> None:
        for leaf in (*self.first, *self.second, self.steps):
            leaf.zero_()

    def __call__(self, gradients: list[Tensor], active: Tensor | None) -> None:
        if self.setting.decay:
            gradients = _list(torch._foreach_add(gradients, self.params, alpha=self.setting.decay))
        before = _copy([*self.first, *self.second], active)
        torch._foreach_lerp_(self.first, gradients, 0.1)
        torch._foreach_mul_(self.second, 0.999)
        torch._foreach_addcmul_(self.second, gradients, gradients, value=1 - 0.999)
        _restore([*self.first, *self.second], before, active)
        self.steps += 1 if active is None else active
        one, two = ((1 - beta**self.steps).float() for beta in (0.9, 0.999))
        if active is None:  # all rows have taken as many steps
            moves, sizes = _list(torch._foreach_div(self.first, one[0])), _list(torch._foreach_div(self.second, two[0]))
        else:
            moves = [torch.where(_over(active, leaf), leaf / _over(one, leaf), 0) for leaf in self.first]
            sizes = [leaf / _over(two, leaf).clamp(min=1 - 0.999) for leaf in self.second]  # no step yet: 0, not 0 / 0
        torch._foreach_sqrt_(sizes)
        torch._foreach_add_(sizes, 1e-8)
        torch._foreach_div_(moves, sizes)
        torch._foreach_add_(self.params, moves, alpha=-self.setting.optimizer.lr)


_UPDATES: dict[str, Callable[[Setting, list[Tensor]], _SGD | _Adam]] = {"sgd": _SGD, "adam": _Adam}


def _list(leaves: Any) -> list[Tensor]:
    return list(leaves)


def _copy(leaves: list[Tensor], active: Tensor | None) -> list[Tensor]:
    return [] if active is None else [leaf.clone() for leaf in leaves]


def _restore(leaves: list[Tensor], before: list[Tensor], active: Tensor | None) -> None:
    """The rows that are not active, as they were."""
    if active is not None:
        for leaf, old in zip(leaves, before, strict=True):
            leaf.copy_(torch.where(_over(active, leaf), leaf, old))


def _over(rows: Tensor, leaf: Tensor) -> Tensor:
    """rows [n] so that it broadcasts over leaf [n, ...]"""
    return rows.view(-1, *[1] * (leaf.ndim - 1))


def _shape(leaves: dict[str, Tensor]) -> Hashable:
    return tuple((name, leaf.shape, leaf.dtype) for name, leaf in leaves.items())
