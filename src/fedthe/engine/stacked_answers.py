"""Answering in a stack: samples that are tuned side by side, and streams that are walked side by side.

Both leave vmap: what is to be done is one program on buffers that stay, replayed for chunk after chunk of samples, or
for one sample of all streams after another.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .. import rng, tree
from ..data.augment import augmix_rows
from ..errors import InputError
from ..methods.base import Answers, Method, OneSample, SideBySide, Step
from ..tree import Tree
from .ops.layout import empty_rows
from .outside import run_outside
from .program import Programs, Replay
from .stacked_fit import lift_convolutions

# a kind of work, items, the work on some of them -> results and how much of each counts
InChunks = Callable[[Hashable, Sequence[int], Callable[[Sequence[int]], Tensor]], list[tuple[Tensor, int]]]
KEPT = 8  # programs of a kind: more than the methods of one training have, so that the next seed finds all of its own
SPREAD = 4  # streams of a group are less than so many times as long as each other


class Workshop:
    """Where samples are tuned and streams are walked. `dtype` is that of convolutions in tuning."""

    def __init__(self, device: torch.device, dtype: torch.dtype, in_chunks: InChunks) -> None:
        self._device, self._dtype, self._in_chunks = device, dtype, in_chunks
        most = KEPT if device.type == "cuda" else 1  # without a graph there is nothing to save but memory
        self._tuners: Programs[Tuner] = Programs(device, most)
        self._walkers: Programs[Walker] = Programs(device, most)

    @contextmanager
    def try_out(self) -> Iterator[None]:
        with self._tuners.try_out(), self._walkers.try_out():
            yield

    @property
    def keeps_programs(self) -> bool:
        return self._tuners.are_kept or self._walkers.are_kept

    def clear(self) -> None:
        self._tuners.clear()
        self._walkers.clear()

    def tune_samples(
        self, fn: OneSample, mine: Tree, views: StackedViews, row: Tensor, columns: Sequence[Tensor]
    ) -> Tensor:
        """`fn` of every sample of every stream; mine [streams, ...], columns [streams, n, ...] -> [streams, n, ...]

        What a stream was filled up with is not asked for: its answers are zeros.
        """
        streams, n = columns[0].shape[:2]
        sizes = [min(n, views.sizes[i]) for i in row.tolist()]
        samples = [n * stream + position for stream, size in enumerate(sizes) for position in range(size)]

        def work(part: Sequence[int]) -> Tensor:
            which = torch.tensor(list(part), device=self._device)
            client, position = which // n, which % n
            parts = [column[client, position][:, None] for column in columns]
            seen = (len(part), *views.shape)
            key = (fn, seen, _shapes_of_rows(mine), *(each.shape for each in parts))  # for any number of streams
            tuner = self._tuners.get(key, lambda: Tuner(fn, mine, seen, parts, self._dtype, self._tuners))
            views.draw(row[client], position, tuner.seen)
            return tuner(mine, client, parts)

        done = self._in_chunks(("tune", fn, views.shape), samples, work)
        tuned = torch.cat([part[:kept, 0] for part, kept in done])
        answers = tuned.new_zeros((streams * n, *tuned.shape[1:]))
        answers[torch.tensor(samples, device=self._device)] = tuned
        return answers.view(streams, n, *tuned.shape[1:])

    def walk_streams(
        self, step: Step, mine: Tree, state: Tree, x: Tensor, views: StackedViews, row: Tensor
    ) -> tuple[Answers, Tree]:
        """All streams side by side, sample after sample; x [streams, n, c, h, w] -> answers [streams, n, ...]

        The walk ends with the longest stream; beyond it, where all are filled up, the last answer is repeated.
        """
        n = x.shape[1]
        seen = (len(row), *views.shape) if step.predictor.augments[0] else None
        key = (step, seen, x.shape[:1] + x.shape[2:], *(_shapes(part) for part in (mine, state)))
        walker = self._walkers.get(key, lambda: Walker(step, mine, state, x, seen, self._walkers))
        walker.load(mine, state)
        answers = []
        for i in range(min(n, max(views.sizes[i] for i in row.tolist()))):
            if walker.seen is not None:
                views.draw(row, torch.full_like(row, i), walker.seen)
            answers.append(walker(x[:, i : i + 1]))
        answers += answers[-1:] * (n - len(answers))
        return _join_answers(answers), tree.map_leaves(torch.clone, walker.state)


def round_up(n: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, ...: few different lengths, and none a half longer than it must be."""
    power = 1 << max(0, n - 1).bit_length()
    return 3 * power // 4 if power >= 4 and n <= 3 * power // 4 else power


def group_streams(lengths: Sequence[int], fillable: bool) -> list[list[int]]:
    """The places of the streams that go side by side, longest first: less than SPREAD times as long as each other, or
    equally long where none may be filled up. Each group begins with the longest that is left, so that groups are few.
    """
    groups: list[list[int]] = []
    longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and (lengths[i] == longest or (fillable and longest < SPREAD * lengths[i])):
            groups[-1].append(i)
        else:
            groups.append([i])
            longest = lengths[i]
    return groups


class StackedViews:
    """Augmented views of the samples of several streams, each drawn by its own key.

    `sizes` are the streams' own lengths; behind them, `pixels` are filled up.
    """

    def __init__(
        self,
        workshop: Workshop,
        method: Method,
        pixels: Tensor,
        sizes: Sequence[int],
        paths: Sequence[tuple[int | str, ...]],
    ) -> None:
        self.workshop, self._pixels, self.sizes = workshop, pixels, sizes
        keys = [rng.key(*path, "views", "augmix") for path in paths]
        self._keys = torch.tensor(keys, device=pixels.device)
        h, w, c = pixels.shape[2:]
        self.shape = (*method.predictor.augments, h, w, c)

    def draw(self, row: Tensor, position: Tensor, out: Tensor) -> None:
        """Into out [m, steps, views, h, w, c]; row and position: int64 [m]."""
        steps, count = self.shape[:2]
        seen = augmix_rows(self._pixels[row, position], self._keys[row], position, steps * count)
        out.copy_(seen.movedim(2, -1).unflatten(1, (steps, count)))

    def draw_rows(self, row: Tensor, positions: Tensor) -> tuple[Tensor]:
        """row [rows], positions [rows, m] -> [rows, m, steps, views, c, h, w]"""
        out = torch.empty((positions.numel(), *self.shape), device=row.device)
        if out.numel():  # none, where a predictor wants none
            self.draw(row[:, None].expand_as(positions).flatten(), positions.flatten(), out)
        return (out.unflatten(0, positions.shape).movedim(-1, -3),)


class RowViews(SideBySide):
    """The views of one stream, seen from inside vmap."""

    def __init__(self, views: StackedViews, row: Tensor) -> None:
        self._views, self._row = views, row

    def __call__(self, positions: Tensor) -> Tensor:
        return run_outside(self._views.draw_rows, self._row, positions.to(self._row.device))[0]

    def each(self, fn: OneSample, mine: Tree, columns: tuple[Tensor, ...]) -> Tensor:
        flat, views = tree.flatten(mine), self._views

        def work(row: Tensor, *rest: Tensor) -> tuple[Tensor]:
            held = tree.unflatten(dict(zip(flat, rest, strict=False)))
            return (views.workshop.tune_samples(fn, held, views, row, rest[len(flat) :]),)

        return run_outside(work, self._row, *flat.values(), *columns)[0]

    def walk(self, step: Step, mine: Tree, state: Tree, x: Tensor) -> tuple[Answers, Tree]:
        flat, begun, views = tree.flatten(mine), tree.flatten(state), self._views
        info: list[str] = []

        def work(row: Tensor, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            held = tree.unflatten(dict(zip(flat, rest, strict=False)))
            first = tree.unflatten(dict(zip(begun, rest[len(flat) :], strict=True)))
            answers, last = views.workshop.walk_streams(step, held, first, x, views, row)
            info[:] = answers.info
            return answers.logits, *answers.info.values(), *tree.flatten(last).values()

        logits, *rest = run_outside(work, self._row, x, *flat.values(), *begun.values())
        columns, last = dict(zip(info, rest, strict=False)), dict(zip(begun, rest[len(info) :], strict=True))
        return Answers(logits, columns), tree.unflatten(last)


class Tuner:
    """`fn` of a fixed number of samples, each with a copy of its client's state: a program on buffers that stay."""

    def __init__(
        self,
        fn: OneSample,
        mine: Tree,
        seen: tuple[int, ...],
        columns: Sequence[Tensor],
        dtype: torch.dtype,
        programs: Programs[Tuner],
    ) -> None:
        self._fn, self._dtype = fn, dtype
        device, samples = columns[0].device, seen[0]
        self._mine = tree.map_leaves(lambda leaf: empty_rows((samples, *leaf.shape[1:]), leaf).zero_(), mine)
        self.seen = torch.zeros(seen, device=device)
        self._columns = [torch.zeros_like(column, memory_format=torch.contiguous_format) for column in columns]
        self._answers: Tensor | None = None
        self._replay = Replay(self._work, device, programs.pool)
        if programs.captures:
            self._replay.prepare()

    def __call__(self, mine: Tree, client: Tensor, columns: Sequence[Tensor]) -> Tensor:
        """mine [clients, ...], client int64 [samples]; `seen` holds the views."""
        tree.map_leaves(lambda buffer, leaf: _copy_rows(buffer, leaf, client), self._mine, mine)
        for buffer, column in zip(self._columns, columns, strict=True):
            buffer.copy_(column)
        self._replay()
        assert self._answers is not None
        return self._answers.clone()

    def _work(self) -> None:
        with torch.no_grad(), lift_convolutions(self._dtype):
            answers = torch.vmap(self._fn)(self._mine, self.seen.movedim(-1, -3), *self._columns)
        if self._answers is None:
            self._answers = torch.empty_like(answers)
        self._answers.copy_(answers)


class Walker:
    """One step of a predictor on every stream: a program that changes the streams' state in place."""

    def __init__(
        self,
        step: Step,
        mine: Tree,
        state: Tree,
        x: Tensor,
        seen: tuple[int, ...] | None,
        programs: Programs[Walker],
    ) -> None:
        self._step = step
        self._mine = tree.map_leaves(lambda leaf: empty_rows(leaf.shape, leaf), mine)
        self.state = tree.map_leaves(lambda leaf: empty_rows(leaf.shape, leaf), state)
        self._x = torch.zeros_like(x[:, :1])
        self.seen = None if seen is None else torch.zeros(seen, device=x.device)
        self._answers: dict[str, Tensor] = {}
        self.load(mine, state)
        self._replay = Replay(self._work, x.device, programs.pool)
        if programs.captures:
            self._replay.prepare()

    def load(self, mine: Tree, state: Tree) -> None:
        for buffers, values in ((self._mine, mine), (self.state, state)):
            tree.map_leaves(lambda buffer, leaf: buffer.copy_(leaf), buffers, values)

    def __call__(self, x: Tensor) -> Answers:
        self._x.copy_(x)
        self._replay()
        logits, *rest = (answer.clone() for answer in self._answers.values())
        return Answers(logits, dict(zip(list(self._answers)[1:], rest, strict=True)))

    def _work(self) -> None:
        def one(mine: Tree, state: Tree, x: Tensor, *seen: Tensor) -> tuple[dict[str, Tensor], Tree]:
            answers, after = self._step(mine, state, x, *seen)
            return {"": answers.logits, **answers.info}, after

        views = () if self.seen is None else (self.seen.movedim(-1, -3),)
        with torch.no_grad(), lift_convolutions(torch.float32):
            answers, after = torch.vmap(one)(self._mine, self.state, self._x, *views)
        for name, answer in answers.items():
            self._answers.setdefault(name, torch.empty_like(answer)).copy_(answer)
        if _shapes(after) != _shapes(self.state):
            raise InputError("a predictor's step must leave the leaves, shapes and types of its state as they are.")
        # the answers first, and a copy: both may be views of the state before
        tree.map_leaves(lambda buffer, leaf: buffer.copy_(leaf), self.state, tree.map_leaves(torch.clone, after))


def _join_answers(answers: Sequence[Answers]) -> Answers:
    """Of one sample each [streams, 1, ...] -> of all of them [streams, n, ...]."""
    info = {name: torch.cat([each.info[name] for each in answers], 1) for name in answers[0].info}
    return Answers(torch.cat([each.logits for each in answers], 1), info)


def _shapes(part: Tree) -> Hashable:
    return tuple((name, leaf.shape, leaf.dtype) for name, leaf in tree.flatten(part).items())


def _shapes_of_rows(part: Tree) -> Hashable:
    """Whatever the number of rows."""
    return tuple((name, leaf.shape[1:], leaf.dtype) for name, leaf in tree.flatten(part).items())


def _copy_rows(buffer: Tensor, leaf: Tensor, rows: Tensor) -> None:
    if leaf.ndim == 5:  # in the order of memory of `empty_rows`
        buffer, leaf = buffer.permute(0, 1, 3, 4, 2), leaf.permute(0, 1, 3, 4, 2).contiguous()
    torch.index_select(leaf, 0, rows, out=buffer)
