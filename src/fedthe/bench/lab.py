"""The rows as tasks to time. Only this file and need.py use engines and methods."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..config import OPTIMIZERS
from ..data.plan import Federation
from ..engine.fit import Optimizer
from ..engine.memory import wait
from ..engine.pick import Kind, Precision, pick_engine
from ..engine.shards import Shards
from ..engine.train import deploy_some, start_from, train_round
from ..engine.visit import Engine, Progress, Question, Run, Training, Visit
from ..errors import Failed
from ..methods import METHODS, compose
from ..methods.base import Method
from ..names import METHOD_NAMES, NET_NAMES
from ..nets import CCT4, CNN, ResNet20GN
from ..nets.net import Net
from .need import Need, need_of_answer, need_of_copy, need_of_round
from .workload import CLASSES, FULL, SEVERITY, Sizes, draw_params, make_federation, make_images

# A round is FedTHE's; seconds are per run.
ROUND_STACKED = "round, 6 runs together"
ROUND = "round, 1 run"
ROUND_BY = "round by engine={}"
ROUND_RESNET = f"round, {NET_NAMES['resnet20_gn']}"
ROUND_CCT = f"round, {NET_NAMES['cct4']}"
ANSWER = f"{METHOD_NAMES['fedthe']}, per sample"
ANSWER_REGIME = f"{METHOD_NAMES['fedthe_regime']}, per sample"
ANSWER_PLUS = f"{METHOD_NAMES['fedthe_plus']}, per sample"
ANSWER_MEMO = f"{METHOD_NAMES['memo_p']}, per sample"
ANSWER_TTT = f"{METHOD_NAMES['ttt']}, per sample"
CORRUPTION = "corrupting 10,000"

# The FedTHE authors' code on an NVIDIA H200, timed by this project, in the unit of each row. A round is 20 clients
# x 6 epochs x 0.385 s, the time of one local epoch over a client's 1,500 images; the personal epoch counts as one.
AUTHORS = {
    ROUND_STACKED: 20 * 6 * 0.385,
    ROUND: 20 * 6 * 0.385,
    ANSWER: 2.26,
    ANSWER_PLUS: 99.0,
}


@dataclass(frozen=True)
class Timed:
    """The first call separately, since it compiles and captures; then the others."""

    cold: float  # seconds of the first call
    seconds: tuple[float, ...]  # of the calls after it
    peak: dict[str, float]  # GiB on the GPU during those

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Measured:
    """A row without its floor."""

    seconds: float  # of the row's unit of work at full size
    timed: Timed
    need: Need
    scaled_from: str | None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    name: str
    unit: str
    work: Callable[[], Measured]


@dataclass(frozen=True)
class Lab:
    """The rows. Each builds its own engine, so that none profits from what another compiled or cached."""

    kind: Kind
    device: str
    precision: Precision
    sizes: Sizes
    _rounds: dict[tuple[Any, ...], Measured] = field(default_factory=dict)

    @cached_property
    def rows(self) -> dict[str, Task]:
        net, engine = CNN(CLASSES), self.make_engine()
        tasks = [
            Task(ROUND_STACKED, "s", lambda: self.time_round(net, self.sizes.runs if engine.together > 1 else 1)),
            Task(ROUND, "s", lambda: self.time_round(net)),
            *self._other_engine(engine),
            Task(ROUND_RESNET, "s", lambda: self.time_round(ResNet20GN(CLASSES), optimizer=OPTIMIZERS["resnet20_gn"])),
            Task(ROUND_CCT, "s", lambda: self.time_round(CCT4(CLASSES), optimizer=OPTIMIZERS["cct4"])),
            Task(ANSWER, "ms", lambda: self.time_answers(compose(net, METHODS["fedthe"]))),
            Task(ANSWER_REGIME, "ms", lambda: self.time_answers(compose(net, METHODS["fedthe_regime"]))),
            Task(ANSWER_PLUS, "ms", lambda: self.time_answers(compose(net, METHODS["fedthe_plus"]), tuned=True)),
            Task(ANSWER_MEMO, "ms", lambda: self.time_answers(compose(net, METHODS["memo_p"]), tuned=True)),
            Task(ANSWER_TTT, "ms", lambda: self.time_answers(compose(net, METHODS["ttt"]), tuned=True)),
            Task(CORRUPTION, "s", self.time_corruption),
        ]
        return {task.name: task for task in tasks}

    def _other_engine(self, engine: Engine) -> list[Task]:
        """On a CPU, a round with the other engine; on a GPU the loop takes too long."""
        if engine.device.type != "cpu":
            return []
        other: Kind = "loop" if engine.together > 1 else "stack"
        return [Task(ROUND_BY.format(other), "s", lambda: self.time_round(CNN(CLASSES), kind=other))]

    def make_engine(self, kind: Kind | None = None) -> Engine:
        return pick_engine(kind or self.kind, self.device, self.precision)

    def time_round(
        self, net: Net, runs: int = 1, optimizer: Optimizer = OPTIMIZERS["cnn"], kind: Kind | None = None
    ) -> Measured:
        """A round of FedTHE, per run. Rows that ask for the same round share one measurement."""
        key = (net, runs, optimizer, kind)
        if key not in self._rounds:
            self._rounds[key] = self._time_round(net, runs, optimizer, self.make_engine(kind))
        return self._rounds[key]

    def _time_round(self, net: Net, count: int, optimizer: Optimizer, engine: Engine) -> Measured:
        method, settings = compose(net, METHODS["fedthe"]).training, Training(optimizer=optimizer)
        clients, train = self.sizes.clients, self.sizes.train if isinstance(net, CNN) else self.sizes.large_train
        federation = make_federation(clients, train)
        runs = [Run(seed, Shards(federation, engine.device)) for seed in range(count)]
        reached = [begin(method, clients, engine.device) for _ in runs]

        def work() -> None:
            visit = Visit((method,), settings, runs, [[progress] for progress in reached])
            for r, result in enumerate(train_round(visit, engine)):
                if isinstance(result, Failed):
                    raise result
                (reached[r],) = result

        timed = time_calls(work, self.sizes.repeats, engine.device)
        part = FULL.clients * FULL.train / (clients * train)  # the epochs are the same, so time scales with images
        scaled = None if part == 1 else f"{clients} clients x {train} images, 6 epochs"
        details = {"runs": count, "losses": list(reached[0].server.losses)}
        need = need_of_round(method, settings, FULL.clients, FULL.train)
        return Measured(part * timed.median / count, timed, need, scaled, details)

    def time_answers(self, method: Method, tuned: bool = False) -> Measured:
        """Test time per sample, of the engine's whole call; the engine itself times only a part of it."""
        s, engine = self.sizes, self.make_engine()
        federation, clients = make_federation(s.clients, s.train), range(s.clients)
        run, streams, samples = Run(0, Shards(federation, engine.device)), s.streams, s.samples
        if tuned:
            streams, samples = 1, s.tuned
        progress = begin(method.training, s.clients, engine.device)
        deployed = deploy_some(method, run, Training(), progress, engine, clients)
        shards, questions = [run.shards[k] for k in clients], make_questions(federation, streams, samples)
        own: list[float] = []

        def work() -> None:
            answers = engine.answer(method, deployed, shards, questions)
            if not all(answered.finite for answered in answers):
                raise Failed("an answer is not finite")
            own.append(sum(answered.seconds for answered in answers))

        timed, count = time_calls(work, s.repeats, engine.device), len(questions) * samples
        in_full = (1, FULL.tuned) if tuned else (FULL.streams, FULL.samples)
        scaled = f"{count:,} samples" if count < FULL.clients * in_full[0] * in_full[1] else None
        details = {"samples": count, "streams": len(questions), "engine_ms": 1000 * statistics.median(own[1:]) / count}
        need = need_of_answer(method, samples_of_client=in_full[0] * in_full[1])
        return Measured(timed.median / count, timed, need, scaled, details)

    def time_corruption(self) -> Measured:
        from ..corruptions import CORRUPTIONS, corrupt_mixed

        device, n = self.make_engine().device, self.sizes.corrupted
        images = torch.from_numpy(make_images(np.arange(n) % CLASSES)).to(device)
        items = torch.arange(n, device=device)
        kinds = items % len(CORRUPTIONS)
        timed = time_calls(lambda: corrupt_mixed(images, kinds, SEVERITY, items, 0), self.sizes.repeats, device)
        scaled = f"{n:,} images" if n < FULL.corrupted else None
        return Measured(FULL.corrupted / n * timed.median, timed, need_of_copy(FULL.corrupted), scaled)


def begin(method: Method, clients: int, device: torch.device) -> Progress:
    """Like `train.start`, but torch draws the parameters."""
    return start_from(method, draw_params(method.net), clients, device)


def make_questions(federation: Federation, streams: int, samples: int) -> list[Question]:
    """Each client's own test rows, then those of the next clients; rows repeat where there are too few."""
    clients, images = federation.clients, federation.pool.x
    return [
        Question(k, images[np.resize(clients[(k + i) % len(clients)].test, samples)], (0, f"stream {i}", k))
        for i in range(streams)
        for k in range(len(clients))
    ]


def time_calls(work: Callable[[], object], repeats: int, device: torch.device) -> Timed:
    seconds = []
    for call in range(1 + repeats):
        if call == 1 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        wait(device)
        began = time.perf_counter()
        work()
        wait(device)
        seconds.append(time.perf_counter() - began)
    return Timed(seconds[0], tuple(seconds[1:]), _read_peak(device))


def _read_peak(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {}
    # CUDA graphs keep a memory pool of their own: it counts as reserved, but not as allocated during replay
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return {"peak_allocated_gib": allocated / 2**30, "peak_reserved_gib": reserved / 2**30}
