"""The stacked engine: clients, runs and samples are rows of one program. The engine of the GPU.

A method is written for one client; vmap applies it to all rows. Training steps run outside vmap (see stacked_fit.py),
and so does the tuning of single samples. The number of rows at a time follows from memory: the engine measures one row
and runs as many as fit; if memory still runs out, half as many. The numbers of a row do not depend on other rows.
"""

from __future__ import annotations

import itertools
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
from ..methods.checks import unchanged_state
from ..tree import Tree
from ..types import Shard, scale
from . import client
from .client import Fits, Received, Worked
from .clients import Clients
from .evaluate import to_host
from .memory import OUT_OF_MEMORY, free_bytes, measure_bytes, wait
from .program import Programs
from .shards import stack_shards
from .stacked_answers import StackedSamples, StackedViews, Workshop, group_streams, round_up
from .stacked_fit import Program, StackedFit, lift_convolutions
from .visit import Answered, Question, Row, Visit, Visited, find_structural_fault, unchanged

MOST = 1024  # rows at a time: more make no GPU faster
MARGIN = 0.8  # the share of free memory to plan with
T = TypeVar("T")


def plan_even_chunks(most: int, items: int) -> int:
    """The length of the fewest chunks, with the least padding."""
    return -(-items // -(-items // most))


def plan_chunks_of_few_sizes(most: int, items: int) -> int:
    """The largest of 1, 4, 16, 64, ... up to `most`, or the smallest that holds all items.

    Capturing a program takes longer than running a padded chunk, so a few sizes serve all numbers of items.
    """
    size = 1
    while size < items and 4 * size <= most:
        size *= 4
    return size


class Stack:
    """`rows` limits the rows at a time; `dtype` is that of convolutions in training and tuning."""

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
        self._shards: dict[Hashable, Shard] = {}
        self._fitting: dict[Hashable, int] = {}  # how many rows of a kind of work fit
        self._trying = False  # while the memory of one row is measured

    # training

    def visit(self, visit: Visit, rows: Sequence[Row]) -> Visited:
        def work(part: Sequence[Row], steps: int | None = None) -> Visited:
            return self._visit(visit, part, steps)

        kind = ("visit", visit.methods, visit.settings, visit.longest)
        return _join(self._in_chunks(kind, rows, work, lambda part: work(part, 1)))

    def _visit(self, visit: Visit, rows: Sequence[Row], steps: int | None) -> Visited:
        def one(row: Tensor, shared: Tree, received: list[Received], shard: Shard) -> Worked:
            phases = Fits(*(fit.at(row) for fit in fits))
            return client.work(visit.methods, phases, shared, received, shard)

        shards, fits, received = self._prepare(visit, rows, steps)
        shared = _rows_of_runs([server.shared for server in visit.servers], rows)
        with lift_convolutions(self.dtype), unchanged(visit, [shared, *(each.averages for each in received)], shards):
            worked = torch.vmap(one)(torch.arange(len(rows), device=self.device), shared, received, shards)
        kept = tuple(tree.flatten(each) for each in worked.kept)
        # under vmap all rows have the same structure, and the same fault in it
        fault = find_structural_fault(visit, 0, worked.upload, kept, batched=True)
        losses = worked.loss.to(self.device)
        if fault:
            return Visited({}, (), (), losses, dict.fromkeys(range(len(rows)), fault))
        return Visited(worked.upload, kept, worked.averages, losses)

    def deploy(self, visit: Visit, clients: Sequence[int]) -> tuple[Tree, Tensor]:
        def work(part: Sequence[Row], steps: int | None = None) -> tuple[Tree, Tensor]:
            return self._deploy(visit, part, steps)

        kind = ("deploy", visit.methods, visit.settings, visit.longest)
        done = self._in_chunks(kind, [Row(0, k) for k in clients], work, lambda part: work(part, 1))
        made, losses = zip(*(tree_and_losses for tree_and_losses, _ in done), strict=True)
        counts = [kept for _, kept in done]
        return _cat_trees(made, counts), _cat(losses, counts)

    def _deploy(self, visit: Visit, rows: Sequence[Row], steps: int | None) -> tuple[Tree, Tensor]:
        (method,), (server,) = visit.methods, visit.servers
        shared = tree.map_leaves(torch.clone, server.shared)  # a method may write to it

        def one(row: Tensor, received: list[Received], shard: Shard) -> tuple[Tree, Tensor]:
            return client.deploy(method, fits[0].at(row), shared, received[0], shard)

        shards, fits, received = self._prepare(visit, rows, steps)
        with lift_convolutions(self.dtype), unchanged(visit, [shared, received[0].averages], shards):
            made, losses = torch.vmap(one)(torch.arange(len(rows), device=self.device), received, shards)
        return made, losses.to(self.device)

    def _prepare(
        self, visit: Visit, rows: Sequence[Row], steps: int | None
    ) -> tuple[Shard, list[StackedFit], list[Received]]:
        """The rows' data, training, and what they received of each method, all stacked."""
        shards = self._stack_shards(visit, rows)
        fits = [self._make_fit(visit, rows, phase, shards, steps) for phase in ("personal", "local")]
        received = []
        for m in range(len(visit.methods)):
            reached = [of_run[m] for of_run in visit.reached]
            averages = _rows_of_runs([progress.averages for progress in reached], rows)
            received.append(Received(averages, self._take_states([progress.clients for progress in reached], rows)))
        return shards, fits, received

    def _make_fit(self, visit: Visit, rows: Sequence[Row], phase: str, shards: Shard, steps: int | None) -> StackedFit:
        s, epochs = visit.settings, visit.settings.epochs(phase)
        keys = [[rng.key(run.seed, phase, visit.round, epoch) for epoch in range(epochs)] for run in visit.runs]
        return StackedFit(
            visit.methods[0].net,
            shards,
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
            tuple(len(visit.runs[row.run].shards) for row in rows),
            steps,
        )

    def _take_states(self, clients: Sequence[Clients], rows: Sequence[Row]) -> Tree:
        """What the rows' clients keep, of one method; the rows of a run are next to each other."""
        ids = [[row.client for row in rows if row.run == r] for r in range(len(clients))]
        states = [of_run.take(some) for of_run, some in zip(clients, ids, strict=True) if some]
        return tree.map_leaves(lambda *leaves: torch.cat([leaf.to(self.device) for leaf in leaves]), *states)

    def _stack_shards(self, visit: Visit, rows: Sequence[Row]) -> Shard:
        """The rows' data. With full participation it is the same in every round, so the last two are cached."""
        key = (visit.longest, *((visit.runs[row.run].name, row.client) for row in rows))
        if key not in self._shards:
            while len(self._shards) >= 2:
                del self._shards[next(iter(self._shards))]
            shards = [visit.runs[row.run].shards[row.client] for row in rows]
            self._shards[key] = Shard(*(part.to(self.device) for part in stack_shards(shards, visit.longest)))
        return self._shards[key]

    # answering

    def answer(
        self, method: Method, deployed: Tree, shards: Sequence[Shard], questions: Sequence[Question]
    ) -> list[Answered]:
        """Streams of similar length run side by side. Shorter ones are padded, unless padding would change answers."""
        may_pad, lengths = method.predictor.window in (None, 1), [len(asked.x) for asked in questions]
        answers: dict[int, Answered] = {}
        stacked = Shard(*(part.to(self.device) for part in stack_shards(shards)))
        for some in group_streams(lengths, may_pad):
            length = round_up(lengths[some[0]]) if may_pad else lengths[some[0]]
            done = self._answer_together(method, deployed, stacked, [questions[i] for i in some], length)
            answers |= dict(zip(some, done, strict=True))
        return [answers[i] for i in range(len(questions))]

    def _answer_together(
        self, method: Method, deployed: Tree, shards: Shard, questions: Sequence[Question], length: int
    ) -> list[Answered]:
        def work(part: Sequence[Question]) -> list[Answered]:
            return self._answer(method, deployed, shards, part, length)

        def probe(part: Sequence[Question]) -> list[Answered]:
            """The whole stream, but only one window of it is real: one sample is tuned, or one step taken."""
            few = method.predictor.window or 1
            return work([asked._replace(x=asked.x[:few]) for asked in part])

        kind = ("answer", method, length, shards.x.shape[1:])
        return [each for part, kept in self._in_chunks(kind, questions, work, probe) for each in part[:kept]]

    def _answer(
        self, method: Method, deployed: Tree, shards: Shard, questions: Sequence[Question], length: int
    ) -> list[Answered]:
        of = torch.tensor([asked.row for asked in questions], device=self.device)
        pixels = _load([asked.x for asked in questions], length, self.device)
        sizes = [len(asked.x) for asked in questions]
        views = StackedViews(self._workshop, method, pixels, sizes, [asked.path for asked in questions])

        def start(mine: Tree, shard: Shard) -> Tree:
            return method.predictor.begin(method, mine, shard)

        def one(mine: Tree, state: Tree, x: Tensor, row: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            answers, _ = method.answer(mine, state, StackedSamples(x, views, row))
            return answers.logits, answers.info

        mine = tree.take(deployed, of)
        clients, place = of.unique(return_inverse=True)  # every stream of a client begins alike
        shard = Shard(*(part[clients] for part in shards))
        # answers are not rounded to bf16
        with unchanged_state(method.predictor, mine), torch.no_grad(), lift_convolutions(torch.float32):
            state = torch.vmap(start)(tree.take(deployed, clients), shard)
            state = tree.map_leaves(lambda leaf: leaf.to(self.device)[place], state)
            wait(self.device)
            began = time.perf_counter()
            rows = torch.arange(len(questions), device=self.device)
            logits, info = torch.vmap(one)(mine, state, scale(pixels), rows)
            on_host = to_host(logits)  # waits for the device
        seconds = (time.perf_counter() - began) / sum(sizes)
        columns = {name: value.cpu().numpy() for name, value in info.items()}
        return [
            Answered(on_host[i, :n], {name: column[i, :n] for name, column in columns.items()}, n * seconds)
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
        """Run `work` on as many items at a time as fit. Each result comes with the number of its items that count.

        The last chunk is padded with its last item, because another length would need another program.
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
            if not crowded:  # else try again after freeing what other work left
                self._fitting[kind] = size // 2
            self.release()
        return done

    def _tune_in_chunks(
        self, kind: Hashable, items: Sequence[int], work: Callable[[Sequence[int]], Tensor]
    ) -> list[tuple[Tensor, int]]:
        return self._in_chunks(kind, items, work, work, plan_chunks_of_few_sizes)

    def _count_fitting(self, kind: Hashable, items: Sequence[Any], probe: Callable[[Any], object]) -> int:
        """How many items fit into memory; measured once for each kind of work."""
        if kind not in self._fitting:
            if self._trying:  # a nested measurement would add its programs to the outer one
                return 1
            self._fitting[kind] = self._measure(items, probe)
        return self._fitting[kind]

    def _measure(self, items: Sequence[Any], probe: Callable[[Any], object]) -> int:
        """From the memory of one item. Caches of other work are freed only if they leave too little room."""
        with self._try_out():
            one = max(1, measure_bytes(lambda: probe(items[:1]), self.device))
        if MARGIN * free_bytes(self.device) < one * min(len(items), self._most):
            self.release()
        return max(1, int(MARGIN * free_bytes(self.device) / one))

    @contextmanager
    def _try_out(self) -> Iterator[None]:
        """Within the block, programs are not kept: they are for one row."""
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
        """Free all caches."""
        self._programs.clear()
        self._workshop.clear()
        self._shards.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _load(streams: Sequence[np.ndarray], length: int, device: torch.device) -> Tensor:
    """Streams [n, ...] on the device as [streams, length, ...], each padded with its last sample.

    Each is copied by itself: to stack them on the host first would take as long as the copy to the GPU.
    """
    first = torch.from_numpy(streams[0])
    loaded = torch.empty(len(streams), length, *first.shape[1:], dtype=first.dtype, device=device)
    for place, stream in zip(loaded, streams, strict=True):
        place[: len(stream)] = torch.from_numpy(stream)
        place[len(stream) :] = place[len(stream) - 1]
    return loaded


def _rows_of_runs(trees: Sequence[Tree], rows: Sequence[Row]) -> Tree:
    """trees, one per run -> [rows, ...]"""

    def pick(*leaves: Tensor) -> Tensor:
        return torch.stack(leaves)[torch.tensor([row.run for row in rows], device=leaves[0].device)]

    return tree.map_leaves(pick, *trees)


def _join(parts: Sequence[tuple[Visited, int]]) -> Visited:
    """Join the results of chunks, each cut to the rows that count."""
    visited, counts = [part for part, _ in parts], [kept for _, kept in parts]
    faults: dict[int, str] = {}
    for first, part, kept in zip(itertools.accumulate(counts, initial=0), visited, counts, strict=False):
        faults |= {first + row: fault for row, fault in part.faults.items() if row < kept}
    losses = _cat([part.losses for part in visited], counts)
    if faults:  # of all rows: their structure is the same
        return Visited({}, (), (), losses, faults)
    kept_leaves = [_cat_trees(each, counts) for each in zip(*(part.kept for part in visited), strict=True)]
    averages = [_cat_trees(each, counts) for each in zip(*(part.averages for part in visited), strict=True)]
    uploads = _cat_trees([part.uploads for part in visited], counts)
    return Visited(uploads, tuple(kept_leaves), tuple(averages), losses)


def _cat_trees(trees: Sequence[Tree], counts: Sequence[int]) -> Tree:
    return tree.map_leaves(lambda *leaves: _cat(leaves, counts), *trees)


def _cat(leaves: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    if len(leaves) == 1 and len(leaves[0]) == counts[0]:
        return leaves[0]
    return torch.cat([leaf[:kept] for leaf, kept in zip(leaves, counts, strict=True)])
