"""The stacked engine: clients, runs and samples are rows of one program. The way of the GPU.

A method is written for one client; vmap lifts it over rows. Training steps leave vmap (see stacked_fit.py), and so does
the tuning of single samples, which are rows of a stack of their own. How many rows go at a time is measured: one row is
tried, and what fits is taken; if memory runs out all the same, half as many are tried. A row's numbers do not depend on
the rows beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from .. import rng, tree
from ..errors import is_out_of_memory
from ..methods.base import Method
from ..tree import Tree
from ..types import Shard, scale
from .clients import split
from .memory import OUT_OF_MEMORY, free_bytes, measure_bytes, wait
from .program import Programs
from .server import find_fault
from .shards import stack_shards
from .stacked_answers import RowViews, StackedViews, Workshop, group_streams, round_up
from .stacked_fit import Program, StackedFit, lift_convolutions
from .visit import Answered, Question, Row, Visit, Visited

MOST = 1024  # rows at a time: more fill no GPU better
MARGIN = 0.8  # of the free memory is planned with
T = TypeVar("T")


def plan_even_chunks(most: int, items: int) -> int:
    """The length of as few chunks as can be, with as little filled up as can be."""
    return -(-items // -(-items // most))


def plan_chunks_of_few_sizes(most: int, items: int) -> int:
    """The largest of 1, 4, 16, 64, ... that `most` allows, but none where a smaller one holds all items.

    Capturing a program takes longer than working on a chunk that is filled up, so that few programs serve all numbers.
    """
    size = 1
    while size < items and 4 * size <= most:
        size *= 4
    return size


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
        self._workshop = Workshop(self.device, dtype, self._tune_in_chunks)
        self._shards: dict[tuple[tuple[int, int], ...], tuple[Any, Shard]] = {}
        self._fitting: dict[Hashable, int] = {}  # how many rows of a kind of work fit
        self._trying = False  # one row, to see what it takes

    # training

    def visit(self, visit: Visit, rows: Sequence[Row]) -> Visited:
        def work(part: Sequence[Row], steps: int | None = None) -> Visited:
            return self._visit(visit, part, steps)

        kind = ("visit", visit.method, visit.settings, visit.trains, visit.longest)
        return _join(self._in_chunks(kind, rows, work, lambda part: work(part, 1)))

    def _visit(self, visit: Visit, rows: Sequence[Row], steps: int | None) -> Visited:
        method, notes, shards = visit.method, _Notes(), self._stack_shards(visit, rows)
        fits = {phase: self._make_fit(visit, rows, phase, shards.real, steps) for phase in ("personal", "local")}

        def one(shared: Tree, mine: Tree, shard: Shard) -> tuple[dict[str, Tensor], Tree]:
            mine = method.personalize(fits["personal"], shared, mine, shard)
            own, notes.links = split(mine, shared)
            notes.names = tuple(tree.flatten(mine))
            return own, method.local(fits["local"], shared, mine, shard) if visit.trains else {}

        with lift_convolutions(self.dtype):
            own, uploads = torch.vmap(one)(
                _rows_of_runs([progress.shared for progress in visit.reached], rows),
                self._take_states(visit, rows),
                shards,
            )
        losses = _last_losses(fits["personal"].log, fits["local"].log if visit.trains else None, shards.real)
        # what vmap lifts is alike for all rows: so is its structure, and what is wrong with it
        expected = tree.flatten(visit.reached[0].shared)
        fault = find_fault(expected, tree.flatten(uploads), batched=True) if visit.trains else None
        faults = dict.fromkeys(range(len(rows)), f"the upload's {fault}") if fault else {}
        return Visited(notes.names, own, notes.links, {} if fault else uploads, losses, faults)

    def _make_fit(self, visit: Visit, rows: Sequence[Row], phase: str, real: Tensor, steps: int | None) -> StackedFit:
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
            real,
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
            stacked = stack_shards([of[row.client] for of, row in zip(shards, rows, strict=True)], visit.longest)
            self._shards[key] = (shards, Shard(*(part.to(self.device) for part in stacked)))  # an id lives as its owner
        return self._shards[key][1]

    # answering

    def answer(
        self, method: Method, deployed: Tree, shards: Sequence[Shard], questions: Sequence[Question]
    ) -> list[Answered]:
        """Streams of about the same length go side by side, the shorter ones filled up where that changes no answer."""
        fillable, lengths = method.predictor.looks_back, [len(asked.images) for asked in questions]
        answers: dict[int, Answered] = {}
        stacked = Shard(*(part.to(self.device) for part in stack_shards(shards)))
        for some in group_streams(lengths, fillable):
            length = round_up(lengths[some[0]]) if fillable else lengths[some[0]]
            done = self._answer_together(method, deployed, stacked, [questions[i] for i in some], length)
            answers |= dict(zip(some, done, strict=True))
        return [answers[i] for i in range(len(questions))]

    def _answer_together(
        self, method: Method, deployed: Tree, shards: Shard, questions: Sequence[Question], length: int
    ) -> list[Answered]:
        def work(part: Sequence[Question]) -> list[Answered]:
            return self._answer(method, deployed, shards, part, length)

        def probe(part: Sequence[Question]) -> list[Answered]:
            """A stream that is filled up but for one sample: as large, but one is tuned only, or one step walked."""
            return work([asked._replace(images=asked.images[:1]) for asked in part])

        kind = ("answer", method, length, shards.images.shape[1:])
        return [each for part, kept in self._in_chunks(kind, questions, work, probe) for each in part[:kept]]

    def _answer(
        self, method: Method, deployed: Tree, shards: Shard, questions: Sequence[Question], length: int
    ) -> list[Answered]:
        of = torch.tensor([asked.row for asked in questions], device=self.device)
        pixels = torch.stack([_fill_up(asked.images, length) for asked in questions]).to(self.device)
        sizes = [len(asked.images) for asked in questions]
        views = StackedViews(self._workshop, method, pixels, sizes, [asked.path for asked in questions])

        def start(mine: Tree, shard: Shard) -> Tree:
            return method.predictor.start(method, mine, shard)

        def one(mine: Tree, state: Tree, x: Tensor, row: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            answers, _ = method.predictor.stream(method, mine, state, x, RowViews(views, row))
            return answers.logits, answers.info

        mine = tree.take(deployed, of)
        shard = Shard(*(part[of] for part in shards))
        with torch.no_grad(), lift_convolutions(torch.float32):  # answers are not rounded to bf16
            state = torch.vmap(start)(mine, shard)
            wait(self.device)
            began = time.perf_counter()
            rows = torch.arange(len(questions), device=self.device)
            logits, info = torch.vmap(one)(mine, state, scale(pixels), rows)
            classes = logits.argmax(-1).cpu().numpy()  # waits for the device
        seconds = (time.perf_counter() - began) / sum(sizes)
        beyond = torch.arange(length, device=self.device) >= torch.tensor(sizes, device=self.device)[:, None]
        finite = (logits.isfinite().all(-1) | beyond).all(1).tolist()
        columns = {name: value.cpu().numpy() for name, value in info.items()}
        return [
            Answered(classes[i, :n], finite[i], {name: column[i, :n] for name, column in columns.items()}, n * seconds)
            for i, n in enumerate(sizes)
        ]

    # memory

    def _in_chunks(
        self,
        kind: Hashable,
        items: Sequence[Any],
        work: Callable[[Any], T],
        probe: Callable[[Any], object],
        plan: Callable[[int, int], int] = plan_even_chunks,
    ) -> list[tuple[T, int]]:
        """`work` on as many items at a time as fit, and of how many its result is to be kept.

        Chunks are equally long, the last one filled up with its last item: another length would be another program.
        """
        done: list[tuple[T, int]] = []
        at = 0
        while at < len(items):
            crowded, size = self._keeps_programs, 1
            try:
                size = plan(min(self._count_fitting(kind, items, probe), self._most), len(items))
                part = list(items[at : at + size])
                kept = len(part)
                done.append((work(part + part[-1:] * (size - kept)), kept))
                at += kept
                continue
            except OUT_OF_MEMORY as error:
                if not is_out_of_memory(error) or (size == 1 and not crowded):
                    raise
            if not crowded:  # else it is tried again without what other work had left
                self._fitting[kind] = size // 2
            self.release()
        return done

    def _tune_in_chunks(
        self, kind: Hashable, items: Sequence[int], work: Callable[[Sequence[int]], Tensor]
    ) -> list[tuple[Tensor, int]]:
        return self._in_chunks(kind, items, work, work, plan_chunks_of_few_sizes)

    def _count_fitting(self, kind: Hashable, items: Sequence[Any], probe: Callable[[Any], object]) -> int:
        """How many items fit into memory: measured once for a kind of work."""
        if kind not in self._fitting:
            if self._trying:  # within another measurement, which would count its programs as its own
                return 1
            self._fitting[kind] = self._measure(items, probe)
        return self._fitting[kind]

    def _measure(self, items: Sequence[Any], probe: Callable[[Any], object]) -> int:
        """By what one item takes; what other work left is given up only where it leaves too little room."""
        with self._try_out():
            one = max(1, measure_bytes(lambda: probe(items[:1]), self.device))
        if MARGIN * free_bytes(self.device) < one * min(len(items), self._most):
            self.release()
        return max(1, int(MARGIN * free_bytes(self.device) / one))

    @contextmanager
    def _try_out(self) -> Iterator[None]:
        """Programs that are made meanwhile are not kept: they are for one row."""
        self._trying = True
        try:
            with self._programs.try_out(), self._workshop.try_out():
                yield
        finally:
            self._trying = False

    @property
    def _keeps_programs(self) -> bool:
        return self._programs.are_kept or self._workshop.keeps_programs

    def release(self) -> None:
        """Give back all memory that is only kept for speed."""
        self._programs.clear()
        self._workshop.clear()
        self._shards.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _fill_up(images: np.ndarray, length: int) -> Tensor:
    """images [n, h, w, c], and the last one again up to a length."""
    pixels = torch.from_numpy(images)
    return torch.cat([pixels, pixels[-1:].expand(length - len(pixels), *pixels.shape[1:])])


class _Notes:
    """What a lifted function says about the structure of its result, which is the same for every row."""

    links: dict[str, str]
    names: tuple[str, ...]


def _rows_of_runs(trees: Sequence[Tree], rows: Sequence[Row]) -> Tree:
    """trees, one per run -> [rows, ...]"""

    def pick(*leaves: Tensor) -> Tensor:
        return torch.stack(leaves)[torch.tensor([row.run for row in rows], device=leaves[0].device)]

    return tree.map_leaves(pick, *trees)


def _last_losses(personal: Sequence[Tensor], local: Sequence[Tensor] | None, real: Tensor) -> Tensor:
    """The last loss of the last phase [rows], or the first one of a row that is not finite."""
    last, log = personal if local is None else local, [*personal, *(local or ())]
    found = last[-1].float() if last else torch.zeros(len(real), device=real.device)
    for losses in reversed(log):
        found = torch.where(losses.isfinite(), found, losses.float())
    return found


def _join(parts: Sequence[tuple[Visited, int]]) -> Visited:
    if len(parts) == 1 and len(parts[0][0].losses) == parts[0][1]:
        return parts[0][0]
    first = parts[0][0]

    def cat(*leaves: Tensor) -> Tensor:
        return torch.cat([leaf[:kept] for leaf, (_, kept) in zip(leaves, parts, strict=True)])

    own = {name: cat(*(part.own[name] for part, _ in parts)) for name in first.own}
    uploads = tree.map_leaves(cat, *(part.uploads for part, _ in parts))
    losses = cat(*(part.losses for part, _ in parts))
    faults = dict.fromkeys(range(len(losses)), first.faults[0]) if first.faults else {}
    return Visited(first.names, own, first.links, uploads, losses, faults)
