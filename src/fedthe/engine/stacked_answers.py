"""Answering in a stack: independent samples are tuned side by side, and streams are scanned side by side.

Both run outside vmap, as a program on fixed buffers: replayed for chunk after chunk of samples, or for window after
window of all streams.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from .. import rng, tree
from ..data.augment import augmix_rows
from ..errors import InputError
from ..methods.base import Answers, Method, Samples
from ..methods.checks import unchanged_state
from ..methods.samples import OneSample, Step, join
from ..tree import Tree
from .fit import order_axes
from .ops.stacked import empty_rows
from .outside import run_outside
from .program import Programs, Replay, name_function
from .stacked_fit import lift_convolutions

# a kind of work, items, the work on some of them -> results, each with the number of its items that count
InChunks = Callable[[Hashable, Sequence[int], Callable[[Sequence[int]], Tensor]], list[tuple[Tensor, int]]]
KEPT = 8  # programs of a kind: more than the methods of one training need, so that the next seed finds them all
SPREAD = 4  # the longest stream of a group is less than this many times as long as the shortest


class Workshop:
    """Tunes samples and scans streams. `dtype` is that of convolutions in tuning."""

    def __init__(self, device: torch.device, dtype: torch.dtype, in_chunks: InChunks) -> None:
        self._device, self._dtype, self._in_chunks = device, dtype, in_chunks
        most = KEPT if device.type == "cuda" else 1  # without graphs, caching saves nothing
        self._tuners: Programs[Tuner] = Programs(device, most)
        self._scanners: Programs[Scanner] = Programs(device, most)

    @contextmanager
    def try_out(self) -> Iterator[None]:
        with self._tuners.try_out(), self._scanners.try_out():
            yield

    @property
    def keeps_programs(self) -> bool:
        return self._tuners.are_kept or self._scanners.are_kept

    def clear(self) -> None:
        self._tuners.clear()
        self._scanners.clear()

    def tune_samples(
        self, fn: OneSample, method: Method, mine: Tree, views: StackedViews, row: Tensor, columns: Sequence[Tensor]
    ) -> Tensor:
        """`fn` of every sample of every stream; mine [streams, ...], columns [streams, n, ...] -> [streams, n, ...]

        Padding is not tuned: its answers are zeros.
        """
        streams, n = columns[0].shape[:2]
        name = (name_function(fn), method)
        sizes = [min(n, views.sizes[i]) for i in row.tolist()]
        samples = [n * stream + position for stream, size in enumerate(sizes) for position in range(size)]

        def work(part: Sequence[int]) -> Tensor:
            which = torch.tensor(list(part), device=self._device)
            client, position = which // n, which % n
            parts = [column[client, position][:, None] for column in columns]
            seen = (len(part), *views.shape)
            key = (name, seen, _shapes_of_rows(mine), *(each.shape for each in parts))  # for any number of streams
            lifted = partial(fn, method)
            tuner = self._tuners.get(key, lambda: Tuner(lifted, mine, seen, parts, self._dtype, self._tuners))
            views.draw(row[client], position, tuner.seen)
            return tuner(mine, client, parts)

        done = self._in_chunks(("tune", name, views.shape), samples, work)
        tuned = torch.cat([part[:kept, 0] for part, kept in done])
        answers = tuned.new_zeros((streams * n, *tuned.shape[1:]))
        answers[torch.tensor(samples, device=self._device)] = tuned
        return answers.view(streams, n, *tuned.shape[1:])

    def scan_streams(
        self,
        step: Step,
        method: Method,
        mine: Tree,
        state: Tree,
        views: StackedViews,
        row: Tensor,
        columns: Sequence[Tensor],
        window: int,
    ) -> tuple[Answers, Tree]:
        """All streams side by side, window after window; columns [streams, n, ...] -> answers [streams, n, ...]

        The scan ends with the longest stream; the padding beyond it gets the last answer again.
        """
        n, answers = columns[0].shape[1], []
        end = min(n, max(views.sizes[i] for i in row.tolist()))
        for first in range(0, end, window):
            parts = [column[:, first : min(first + window, end)] for column in columns]
            count = parts[0].shape[1]
            if first == 0 or count < window:  # a shorter last window needs another program
                scanner = self._get_scanner(step, method, mine, state, parts, (len(row), count, *views.shape))
                scanner.load(mine, state)
            if scanner.seen.numel():
                positions = first + torch.arange(count, device=row.device).expand(len(row), count)
                views.draw(row[:, None].expand_as(positions), positions, scanner.seen)
            answers.append(scanner(parts))
            state = scanner.state
        answers += [_take_last(answers[-1])] * (n - end)
        return join(answers, 1), tree.map_leaves(torch.clone, state)

    def _get_scanner(
        self, step: Step, method: Method, mine: Tree, state: Tree, columns: Sequence[Tensor], seen: tuple[int, ...]
    ) -> Scanner:
        shapes = (*(column.shape for column in columns), *(_shapes(part) for part in (mine, state)))
        key = (name_function(step), method, seen, shapes)
        return self._scanners.get(
            key, lambda: Scanner(partial(step, method), mine, state, columns, seen, self._scanners)
        )


def round_up(n: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, ...: few different lengths, with less than half as much padding."""
    power = 1 << max(0, n - 1).bit_length()
    return 3 * power // 4 if power >= 4 and n <= 3 * power // 4 else power


def group_streams(lengths: Sequence[int], may_pad: bool) -> list[list[int]]:
    """Indices of the streams that run side by side: of similar length (see SPREAD), or equally long without padding.

    Each group begins with the longest stream that is left, so that there are few groups.
    """
    groups: list[list[int]] = []
    longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and (lengths[i] == longest or (may_pad and longest < SPREAD * lengths[i])):
            groups[-1].append(i)
        else:
            groups.append([i])
            longest = lengths[i]
    return groups


class StackedViews:
    """Augmented views of the samples of several streams, each drawn by its own key.

    `sizes` are the streams' lengths without padding.
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
        self.shape = (*method.predictor.augments, *pixels.shape[2:])

    def draw(self, row: Tensor, position: Tensor, out: Tensor) -> None:
        """Into out [..., steps, views, h, w, c]; row and position: int64 [...]."""
        if not out.numel():  # the predictor uses none
            return
        steps, count = self.shape[:2]
        row, position = row.flatten(), position.flatten()
        seen = augmix_rows(self._pixels[row, position], self._keys[row], position, steps * count)
        out.view(len(row), *self.shape).copy_(seen.movedim(2, -1).unflatten(1, (steps, count)))

    def draw_rows(self, row: Tensor, positions: Tensor) -> Tensor:
        """row [rows], positions [rows, m] -> [rows, m, steps, views, c, h, w]"""
        out = torch.empty((*positions.shape, *self.shape), device=row.device)
        self.draw(row[:, None].expand_as(positions), positions, out)
        return order_axes(out, self._pixels.dtype)


class StackedSamples(Samples):
    """The samples of one stream, as vmap sees them; all streams are answered side by side."""

    def __init__(self, x: Tensor, views: StackedViews, row: Tensor) -> None:
        super().__init__(x, lambda positions: run_outside(views.draw_rows, row, positions.to(row.device)))
        self._views, self._row = views, row

    def each(self, fn: OneSample, method: Method, mine: Tree, *columns: Tensor) -> Tensor:
        def work(row: Tensor, mine: Tree, *columns: Tensor) -> Tensor:
            return self._views.workshop.tune_samples(fn, method, mine, self._views, row, columns)

        answers: Tensor = run_outside(work, self._row, mine, *columns)
        return answers

    def scan(
        self, step: Step, method: Method, mine: Tree, state: Tree, *columns: Tensor, window: int = 1
    ) -> tuple[Answers, Tree]:
        def work(row: Tensor, mine: Tree, state: Tree, *columns: Tensor) -> tuple[Tensor, dict[str, Tensor], Tree]:
            workshop = self._views.workshop
            answers, last = workshop.scan_streams(step, method, mine, state, self._views, row, columns, window)
            return answers.logits, answers.info, last

        logits, info, last = run_outside(work, self._row, mine, state, *columns)
        return Answers(logits, info), last


class Tuner:
    """`fn` of a fixed number of samples, each with a copy of its client's state: a program on buffers that stay."""

    def __init__(
        self,
        fn: Callable[..., Tensor],
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
        with unchanged_state("The predictor", self._mine), torch.no_grad(), lift_convolutions(self._dtype):
            answers = torch.vmap(self._fn)(self._mine, self.seen.movedim(-1, -3), *self._columns)
        if self._answers is None:
            self._answers = torch.empty_like(answers)
        self._answers.copy_(answers)


class Scanner:
    """A step of a scan on every stream: a program that changes the streams' state in place."""

    def __init__(
        self,
        step: Callable[..., tuple[Answers, Tree]],
        mine: Tree,
        state: Tree,
        columns: Sequence[Tensor],
        seen: tuple[int, ...],
        programs: Programs[Scanner],
    ) -> None:
        self._step = step
        self._mine = tree.map_leaves(lambda leaf: empty_rows(leaf.shape, leaf), mine)
        self.state = tree.map_leaves(lambda leaf: empty_rows(leaf.shape, leaf), state)
        self._columns = [torch.zeros_like(column) for column in columns]  # in their order of memory, as in the loop
        self.seen = torch.zeros(seen, device=columns[0].device)  # views [streams, window, steps, views, h, w, c]
        self._answers: dict[str, Tensor] = {}
        self.load(mine, state)
        self._replay = Replay(self._work, columns[0].device, programs.pool)
        if programs.captures:
            self._replay.prepare()

    def load(self, mine: Tree, state: Tree) -> None:
        for buffers, values in ((self._mine, mine), (self.state, state)):
            tree.map_leaves(lambda buffer, leaf: buffer.copy_(leaf), buffers, values)

    def __call__(self, columns: Sequence[Tensor]) -> Answers:
        for buffer, column in zip(self._columns, columns, strict=True):
            buffer.copy_(column)
        self._replay()
        logits, *rest = (answer.clone() for answer in self._answers.values())
        return Answers(logits, dict(zip(list(self._answers)[1:], rest, strict=True)))

    def _work(self) -> None:
        def one(mine: Tree, state: Tree, seen: Tensor, *columns: Tensor) -> tuple[dict[str, Tensor], Tree]:
            answers, after = self._step(mine, state, seen, *columns)
            return {"": answers.logits, **answers.info}, after

        with unchanged_state("The predictor", self._mine), torch.no_grad(), lift_convolutions(torch.float32):
            answers, after = torch.vmap(one)(self._mine, self.state, self.seen.movedim(-1, -3), *self._columns)
        for name, answer in answers.items():
            self._answers.setdefault(name, torch.empty_like(answer)).copy_(answer)
        if _shapes(after) != _shapes(self.state):
            raise InputError("a predictor must return a state with the leaves, shapes and dtypes it was given.")
        # the answers first, and a copy: both may be views of the state before
        tree.map_leaves(lambda buffer, leaf: buffer.copy_(leaf), self.state, tree.map_leaves(torch.clone, after))


def _take_last(answers: Answers) -> Answers:
    """Of [streams, n, ...]: [streams, 1, ...]."""
    return Answers(answers.logits[:, -1:], {name: column[:, -1:] for name, column in answers.info.items()})


def _shapes(part: Tree) -> Hashable:
    """Whatever the order of leaves."""
    return tuple((name, leaf.shape, leaf.dtype) for name, leaf in sorted(tree.flatten(part).items()))


def _shapes_of_rows(part: Tree) -> Hashable:
    """Whatever the number of rows."""
    return tuple((name, leaf.shape[1:], leaf.dtype) for name, leaf in tree.flatten(part).items())


def _copy_rows(buffer: Tensor, leaf: Tensor, rows: Tensor) -> None:
    if leaf.ndim == 5:  # in the order of memory of `empty_rows`
        buffer, leaf = buffer.permute(0, 1, 3, 4, 2), leaf.permute(0, 1, 3, 4, 2).contiguous()
    torch.index_select(leaf, 0, rows, out=buffer)
