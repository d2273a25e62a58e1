"""The stacked engine: clients, runs and samples are rows of one program. The way of the GPU.

A method is written for one client; vmap lifts it over rows. Training steps leave vmap (see stacked_fit.py), and so does
the tuning of single samples, which are rows of a stack of their own. How many rows go at a time is measured: one row is
tried, and what fits is taken; if memory runs out all the same, half as many are tried. A row's numbers do not depend on
the rows beside it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from .. import rng, tree
from ..data.augment import augmix_rows
from ..methods.base import Answers, Method, OneSample, SideBySide, Step
from ..tree import Tree
from ..types import Shard, scale
from .clients import split
from .memory import OUT_OF_MEMORY, free_bytes, is_out_of_memory, measure_bytes
from .outside import run_outside
from .program import Programs, Replay
from .shards import stack_shards
from .stacked_fit import Program, StackedFit, lift_convolutions
from .stacked_ops import empty_rows
from .visit import Answered, Question, Row, Visit, Visited

MOST = 1024  # rows at a time: more fill no GPU better
MARGIN = 0.8  # of the free memory is planned with
T = TypeVar("T")


class Stack:
    """`rows` limits how many rows go at a time; `dtype` is that of convolutions in training and tuning."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        rows: int = MOST,
    ) -> None:
        self.device, self.dtype, self._most = torch.device(device), dtype, rows
        self.together = 1024  # runs and clients: memory decides
        self._programs: Programs[Program] = Programs(self.device)
        self._tuners: Programs[Tuner] = Programs(self.device, most=4)
        self._walkers: Programs[Walker] = Programs(self.device, most=4)
        self._shards: dict[tuple[tuple[int, int], ...], tuple[Any, Shard]] = {}
        self._fitting: dict[Hashable, int] = {}  # how many rows of a kind of work fit

    # training

    def visit(self, visit: Visit, rows: Sequence[Row]) -> Visited:
        def work(part: Sequence[Row], steps: int | None = None) -> Visited:
            return self._visit(visit, part, steps)

        longest = max(visit.runs[row.run].sizes[row.client] for row in rows)
        kind = ("visit", visit.method, visit.settings, visit.trains, longest)
        return _join(self._in_chunks(kind, rows, work, lambda part: work(part, 1)))

    def _visit(self, visit: Visit, rows: Sequence[Row], steps: int | None) -> Visited:
        method, notes = visit.method, _Notes()
        fits = {phase: self._make_fit(visit, rows, phase, steps) for phase in ("personal", "local")}

        def one(shared: Tree, mine: Tree, shard: Shard) -> tuple[dict[str, Tensor], Tree]:
            mine = method.personalize(fits["personal"], shared, mine, shard)
            own, notes.links = split(mine, shared)
            notes.names = tuple(tree.flatten(mine))
            return own, method.local(fits["local"], shared, mine, shard) if visit.trains else {}

        with lift_convolutions(self.dtype):
            own, uploads = torch.vmap(one)(
                _rows_of_runs([progress.shared for progress in visit.reached], rows),
                self._take_states(visit, rows),
                self._stack_shards(visit, rows),
            )
        health = _check_rows(
            [*fits["personal"].log, *fits["local"].log], [*own.values(), *tree.flatten(uploads).values()], len(rows)
        )
        return Visited(notes.names, own, notes.links, uploads, health)

    def _make_fit(self, visit: Visit, rows: Sequence[Row], phase: str, steps: int | None) -> StackedFit:
        s, seeds = visit.settings, [run.seed for run in visit.runs]
        epochs = s.epochs(phase)
        keys = [
            [rng.key(seed, phase, visit.round, epoch) for epoch in range(epochs)] for seed in seeds
        ]  # what Fit draws with
        return StackedFit(
            s.optimizer,
            epochs,
            s.batch,
            s.flip,
            s.crop,
            torch.tensor([keys[row.run] for row in rows], device=self.device).view(len(rows), epochs, 2),
            torch.tensor([row.client for row in rows], device=self.device),
            tuple(visit.runs[row.run].sizes[row.client] for row in rows),
            self._programs,
            self.dtype,
            steps,
        )

    def _take_states(self, visit: Visit, rows: Sequence[Row]) -> Tree:
        states = []
        for r, progress in enumerate(visit.reached):
            ids = [row.client for row in rows if row.run == r]
            if ids:
                states.append(tree.map_leaves(lambda leaf: leaf.to(self.device), progress.mine.take(ids)))
        return states[0] if len(states) == 1 else tree.map_leaves(lambda *leaves: torch.cat(leaves), *states)

    def _stack_shards(self, visit: Visit, rows: Sequence[Row]) -> Shard:
        """The rows' data; with full participation the same in every round, so the last few are kept."""
        shards = [visit.runs[row.run].shards for row in rows]
        key = tuple((id(of), row.client) for of, row in zip(shards, rows, strict=True))
        if key not in self._shards:
            while len(self._shards) >= 2:
                del self._shards[next(iter(self._shards))]
            stacked = stack_shards([of[row.client] for of, row in zip(shards, rows, strict=True)])
            self._shards[key] = (shards, Shard(*(part.to(self.device) for part in stacked)))  # an id lives as its owner
        return self._shards[key][1]

    # answering

    def answer(
        self, method: Method, deployed: Tree, shards: Sequence[Shard], questions: Sequence[Question]
    ) -> list[Answered]:
        """Streams of about the same length go side by side, the shorter ones filled up where that changes no answer."""
        lengths: dict[int, list[int]] = {}
        for i, asked in enumerate(questions):
            n = len(asked.images)
            lengths.setdefault(round_up(n) if method.predictor.looks_back else n, []).append(i)
        answers: dict[int, Answered] = {}
        stacked = Shard(*(part.to(self.device) for part in stack_shards(shards)))
        for length, some in lengths.items():

            def work(part: Sequence[int], length: int = length) -> list[Answered]:
                return self._answer(method, deployed, stacked, [questions[i] for i in part], length)

            kind = ("answer", method, length, stacked.images.shape[1:])
            done = self._in_chunks(kind, some, work, work)
            answers |= dict(zip(some, (each for part, kept in done for each in part[:kept]), strict=True))
        return [answers[i] for i in range(len(questions))]

    def _answer(
        self, method: Method, deployed: Tree, shards: Shard, questions: Sequence[Question], length: int
    ) -> list[Answered]:
        of = torch.tensor([asked.row for asked in questions], device=self.device)
        pixels = torch.stack([_fill_up(asked.images, length) for asked in questions]).to(self.device)
        views = _StackedViews(self, method, pixels, [asked.path for asked in questions])

        def start(mine: Tree, shard: Shard) -> Tree:
            return method.predictor.start(method, mine, shard)

        def one(mine: Tree, state: Tree, x: Tensor, row: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            answers, _ = method.predictor.stream(method, mine, state, x, _RowViews(views, row))
            return answers.logits, answers.info

        mine = tree.take(deployed, of)
        shard = Shard(*(part[of] for part in shards))
        with torch.no_grad(), lift_convolutions(torch.float32):  # answers are not rounded to bf16
            state = torch.vmap(start)(mine, shard)
            _wait(self.device)
            began = time.perf_counter()
            rows = torch.arange(len(questions), device=self.device)
            logits, info = torch.vmap(one)(mine, state, scale(pixels), rows)
            classes = logits.argmax(-1).cpu().numpy()  # waits for the device
        seconds = (time.perf_counter() - began) / sum(len(asked.images) for asked in questions)
        sizes = torch.tensor([len(asked.images) for asked in questions], device=self.device)
        beyond = torch.arange(length, device=self.device) >= sizes[:, None]
        finite = (logits.isfinite().all(-1) | beyond).all(1).tolist()
        columns = {name: value.cpu().numpy() for name, value in info.items()}
        return [
            Answered(classes[i, :n], finite[i], {name: column[i, :n] for name, column in columns.items()}, n * seconds)
            for i, n in enumerate(sizes.tolist())
        ]

    def tune_samples(
        self, fn: OneSample, mine: Tree, views: _StackedViews, row: Tensor, columns: Sequence[Tensor]
    ) -> Tensor:
        """`fn` of every sample of every stream; mine [streams, ...], columns [streams, n, ...] -> [streams, n, ...]"""
        streams, n = columns[0].shape[:2]
        samples = range(streams * n)

        def work(part: Sequence[int]) -> Tensor:
            which = torch.tensor(list(part), device=self.device)
            client, position = which // n, which % n
            parts = [column[client, position][:, None] for column in columns]
            seen = (len(part), *views.shape)
            key = (fn, seen, *(each.shape for each in parts))
            tuner = self._tuners.get(key, lambda: Tuner(fn, mine, seen, parts, self.dtype, self._tuners))
            views.draw(row[client], position, tuner.seen)
            return tuner(mine, client, parts)

        done = self._in_chunks(("tune", fn, views.shape), samples, work, work, round_up(len(samples)))
        answers: Tensor = torch.cat([part[:kept] for part, kept in done]).unflatten(0, (streams, n))[:, :, 0]
        return answers

    def walk_streams(
        self, step: Step, mine: Tree, state: Tree, x: Tensor, views: _StackedViews, row: Tensor
    ) -> tuple[Answers, Tree]:
        """All streams side by side, sample after sample; x [streams, n, c, h, w] -> answers [streams, n, ...]"""
        seen = (len(row), *views.shape) if step.predictor.augments[0] else None
        key = (step, seen, x.shape[:1] + x.shape[2:], *(_shapes(part) for part in (mine, state)))
        walker = self._walkers.get(key, lambda: Walker(step, mine, state, x, seen, self._walkers))
        walker.load(mine, state)
        answers = []
        for i in range(x.shape[1]):
            if walker.seen is not None:
                views.draw(row, torch.full_like(row, i), walker.seen)
            answers.append(walker(x[:, i : i + 1]))
        return _join_answers(answers), tree.map_leaves(torch.clone, walker.state)

    # memory

    def _in_chunks(
        self,
        kind: Hashable,
        items: Sequence[Any],
        work: Callable[[Any], T],
        probe: Callable[[Any], object],
        count: int | None = None,
    ) -> list[tuple[T, int]]:
        """`work` on as many items at a time as fit, and of how many its result is to be kept.

        Chunks are equally long, the last one filled up with its last item: another length would be another program.
        With a `count`, chunks are those of so many items, so that not every number of items makes a program.
        """
        if kind not in self._fitting:
            self._fitting[kind] = self._measure(items, probe)
        done: list[tuple[T, int]] = []
        at = 0
        while at < len(items):
            all_ = count or len(items)
            size = min(self._fitting[kind], self._most, all_)
            size = -(-all_ // -(-all_ // size))
            part = list(items[at : at + size])
            kept = len(part)
            try:
                done.append((work(part + part[-1:] * (size - kept)), kept))
                at += kept
                continue
            except OUT_OF_MEMORY as error:
                if not is_out_of_memory(error) or size == 1:
                    raise
            self._fitting[kind] = size // 2
            self.release()
        return done

    def _measure(self, items: Sequence[Any], probe: Callable[[Any], object]) -> int:
        """How many items fit into memory, by what one of them takes."""
        one = measure_bytes(lambda: probe(items[:1]), self.device)
        self.release()
        return max(1, int(MARGIN * free_bytes(self.device) / max(one, 1)))

    def release(self) -> None:
        """Give back all memory that is only kept for speed."""
        self._programs.clear()
        self._tuners.clear()
        self._walkers.clear()
        self._shards.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def round_up(n: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, ...: few different lengths, and none a half longer than it must be."""
    power = 1 << max(0, n - 1).bit_length()
    return 3 * power // 4 if power >= 4 and n <= 3 * power // 4 else power


def _fill_up(images: np.ndarray, length: int) -> Tensor:
    """images [n, h, w, c], and the last one again up to a length."""
    pixels = torch.from_numpy(images)
    return torch.cat([pixels, pixels[-1:].expand(length - len(pixels), *pixels.shape[1:])])


class _Notes:
    """What a lifted function says about the structure of its result, which is the same for every row."""

    links: dict[str, str]
    names: tuple[str, ...]


class _StackedViews:
    """Augmented views of the samples of several streams, each drawn by its own key."""

    def __init__(self, engine: Stack, method: Method, pixels: Tensor, paths: Sequence[tuple[int | str, ...]]) -> None:
        self.engine, self._pixels = engine, pixels
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
        self.draw(row[:, None].expand_as(positions).flatten(), positions.flatten(), out)
        return (out.unflatten(0, positions.shape).movedim(-1, -3),)


class _RowViews(SideBySide):
    """The views of one stream, seen from inside vmap."""

    def __init__(self, views: _StackedViews, row: Tensor) -> None:
        self._views, self._row = views, row

    def __call__(self, positions: Tensor) -> Tensor:
        return run_outside(self._views.draw_rows, self._row, positions.to(self._row.device))[0]

    def each(self, fn: OneSample, mine: Tree, columns: tuple[Tensor, ...]) -> Tensor:
        flat, views = tree.flatten(mine), self._views

        def work(row: Tensor, *rest: Tensor) -> tuple[Tensor]:
            held = tree.unflatten(dict(zip(flat, rest, strict=False)))
            return (views.engine.tune_samples(fn, held, views, row, rest[len(flat) :]),)

        return run_outside(work, self._row, *flat.values(), *columns)[0]

    def walk(self, step: Step, mine: Tree, state: Tree, x: Tensor) -> tuple[Answers, Tree]:
        flat, begun, views = tree.flatten(mine), tree.flatten(state), self._views
        info: list[str] = []

        def work(row: Tensor, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            held = tree.unflatten(dict(zip(flat, rest, strict=False)))
            first = tree.unflatten(dict(zip(begun, rest[len(flat) :], strict=True)))
            answers, last = views.engine.walk_streams(step, held, first, x, views, row)
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
        # the answers first, and a copy: both may be views of the state before
        tree.map_leaves(lambda buffer, leaf: buffer.copy_(leaf), self.state, tree.map_leaves(torch.clone, after))


def _join_answers(answers: Sequence[Answers]) -> Answers:
    """Of one sample each [streams, 1, ...] -> of all of them [streams, n, ...]."""
    info = {name: torch.cat([each.info[name] for each in answers], 1) for name in answers[0].info}
    return Answers(torch.cat([each.logits for each in answers], 1), info)


def _shapes(part: Tree) -> Hashable:
    return tuple((name, leaf.shape) for name, leaf in tree.flatten(part).items())


def _copy_rows(buffer: Tensor, leaf: Tensor, rows: Tensor) -> None:
    if leaf.ndim == 5:  # in the order of memory of `empty_rows`
        buffer, leaf = buffer.permute(0, 1, 3, 4, 2), leaf.permute(0, 1, 3, 4, 2).contiguous()
    torch.index_select(leaf, 0, rows, out=buffer)


def _rows_of_runs(trees: Sequence[Tree], rows: Sequence[Row]) -> Tree:
    """trees, one per run -> [rows, ...]"""

    def pick(*leaves: Tensor) -> Tensor:
        return torch.stack(leaves)[torch.tensor([row.run for row in rows], device=leaves[0].device)]

    return tree.map_leaves(pick, *trees)


def _check_rows(log: Sequence[Tensor], trained: Sequence[Tensor], rows: int) -> Tensor:
    """The last loss [rows], or one that is not finite where any loss or parameter of a row is not."""
    health = log[-1].float() if log else torch.zeros(rows, device=trained[0].device if trained else None)
    for leaf in trained:
        health = torch.where(leaf.isfinite().reshape(rows, -1).all(1), health, math.nan)
    for losses in reversed(log):
        health = torch.where(losses.isfinite(), health, losses.float())
    return health


def _join(parts: Sequence[tuple[Visited, int]]) -> Visited:
    if len(parts) == 1 and len(parts[0][0].health) == parts[0][1]:
        return parts[0][0]
    first = parts[0][0]

    def cat(*leaves: Tensor) -> Tensor:
        return torch.cat([leaf[:kept] for leaf, (_, kept) in zip(leaves, parts, strict=True)])

    own = {name: cat(*(part.own[name] for part, _ in parts)) for name in first.own}
    uploads = tree.map_leaves(cat, *(part.uploads for part, _ in parts))
    return Visited(first.names, own, first.links, uploads, cat(*(part.health for part, _ in parts)))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
