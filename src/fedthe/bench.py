"""How fast the engine is on the machine at hand, and how fast that machine would let it be.

Every row is measured: the first call apart, since it compiles and captures, then the median of a few. Beside it stands
the floor: the arithmetic that the work must do at the best rate seen of the same machine, or the bytes that it must
move at the speed of a large copy, whichever takes longer. Where the full size would take minutes, less is measured and
scaled by the count of images, and the row says so.

It needs torch and NumPy alone, so that it runs where nothing else is installed; corruptions also need scipy and Pillow,
and their row says so where they are missing.
"""

from __future__ import annotations

import gc
import json
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from . import rng, store, tree
from .config import OPTIMIZERS
from .data.partition import Split
from .data.plan import Federation, Settings
from .data.pool import Dataset, Pool
from .engine.fit import Optimizer
from .engine.memory import wait
from .engine.pick import Kind, Precision, pick_engine
from .engine.shards import Shards
from .engine.train import deploy_some, start_from, train_round
from .engine.visit import Engine, Progress, Question, Run, Training
from .errors import Failed, InputError
from .methods.base import Method
from .methods.fedthe import FedTHE, FedTHEPlus, TwoHeads, mean_feature
from .methods.finetune import FineTune
from .methods.memo import Memo
from .methods.ttt import TTT
from .nets import CCT4, CNN, ResNet20GN
from .nets.net import Net, Start
from .progress.events import WorkEvent, tell, unheard
from .text import find_nearest
from .tree import Tree
from .types import Batch, Shard

FORMAT = 1  # of the file; raised when a row no longer means what it did
SLOWER = 1.2  # times the baseline: what is marked. Clocks of busy machines differ by less than that, mostly.
CLASSES, SIDE = 10, 32  # CIFAR-10
PIXELS = SIDE * SIDE * 3  # bytes of an image
DIRICHLET = 0.1
SEVERITY = 5
CEILINGS = "what the machine can do"


@dataclass(frozen=True)
class Sizes:
    """How much is measured. The defaults are what every number stands for."""

    runs: int = 6
    clients: int = 20
    train: int = 1500  # images that a client trains on
    large_train: int = 1500  # with the larger networks
    streams: int = 6  # that each client answers by FedTHE
    samples: int = 500  # in each of them
    tuned: int = 500  # in the one stream that each client answers by methods that tune
    corrupted: int = 10_000
    repeats: int = 3
    matmul: int = 8192  # the side of the matrices, and 64 times the images, that show the rate of arithmetic
    copied: int = 2**30  # the bytes whose copy shows the bandwidth


FULL = Sizes()
FULL_QUICK = replace(FULL, repeats=1)
# For a CPU, or one client after another: some two minutes on two cores, and some fifteen seconds.
SMALL = Sizes(clients=2, train=320, large_train=64, tuned=40, corrupted=1500, matmul=2048, copied=2**28)
SMALL_QUICK = Sizes(
    clients=2,
    train=96,
    large_train=32,
    samples=100,
    tuned=8,
    corrupted=300,
    repeats=1,
    matmul=1024,
    copied=2**26,
)

# A round is FedTHE's; seconds are those of one run.
ROUND_STACKED = "round, 6 runs together"
ROUND = "round, 1 run"
ROUND_BY = "round by engine={}"
ROUND_RESNET = "round, ResNet20-GN"
ROUND_CCT = "round, CCT4"
ANSWER = "FedTHE, per sample"
ANSWER_PLUS = "FedTHE+, per sample"
ANSWER_MEMO = "MEMO (P), per sample"
ANSWER_TTT = "TTT, per sample"
CORRUPTION = "corrupting 10,000"

# The code of FedTHE's authors on an NVIDIA H200, timed by this project, in each row's unit. A round is 20 clients
# x 6 epochs x 0.385 s, the time of a local epoch of one client's 1,500 images; the personal epoch counts as one.
AUTHORS = {
    ROUND_STACKED: 20 * 6 * 0.385,
    ROUND: 20 * 6 * 0.385,
    ANSWER: 2.26,
    ANSWER_PLUS: 99.0,
}


@dataclass(frozen=True)
class Machine:
    device: str  # its name
    type: str  # cpu or cuda
    torch: str
    threads: int  # of torch, on the host

    @property
    def slug(self) -> str:
        """For file names: cpu, or the GPU's name in lowercase words, such as nvidia-h200."""
        return "cpu" if self.type == "cpu" else "-".join(re.findall("[a-z0-9]+", self.device.lower()))


@dataclass(frozen=True)
class Ceilings:
    """The most that was seen of the machine."""

    flops: float  # per second
    flops_of: str  # what showed it, and in which precision
    bytes: float  # per second, read and written together


@dataclass(frozen=True)
class Need:
    """The least that a piece of work takes: arithmetic, and bytes to move."""

    flops: float
    bytes: float

    def __mul__(self, times: float) -> Need:
        return Need(times * self.flops, times * self.bytes)

    def __add__(self, other: Need) -> Need:
        return Need(self.flops + other.flops, self.bytes + other.bytes)


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    name: str
    unit: str  # s or ms, of value and floor
    value: float | None = None  # None: it failed
    floor: float | None = None
    floor_kind: str | None = None  # arithmetic or bytes
    floor_ratio: float | None = None  # value / floor
    scaled_from: str | None = None  # what was measured instead of the full size
    cold: float | None = None  # seconds of the first call, as they were: not scaled
    authors: float | None = None  # the authors' code, where the device is the one it was timed on
    failed: str | None = None  # why there is no value
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    machine: Machine
    engine: str  # loop or stack
    precision: str  # of convolutions in training and tuning
    quick: bool
    ceilings: Ceilings
    rows: tuple[Line, ...]
    seconds: float  # that all of it took

    def as_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self), "rows": [asdict(line) for line in self.rows]}


# Measuring


def measure(
    kind: Kind = "auto",
    device: str = "auto",
    precision: Precision = "auto",
    quick: bool = False,
    only: Sequence[str] = (),
    sizes: Sizes | None = None,
) -> Bench:
    """Measure all rows, or `only` some by name. A row that fails says why, and the others go on."""
    for name, value, known in (("engine", kind, get_args(Kind)), ("precision", precision, get_args(Precision))):
        if value not in known:
            raise InputError(f"{name} cannot be {value!r}; {find_nearest(value, known)}")
    began, engine = time.perf_counter(), pick_engine(kind, device, precision)
    place = engine.device
    sizes = sizes or pick_sizes(engine, quick)
    lab = Lab(kind, str(place), precision, sizes)
    rows = lab.rows
    for name in only:
        if name not in rows:
            raise InputError(f"there is no row {name!r}; {find_nearest(name, rows)}")
    chosen = [name for name in rows if not only or name in only]
    found: dict[str, Measured | str] = {}
    tell(WorkEvent("measuring", CEILINGS, done=0, total=len(chosen)))
    machine, ceilings = describe_machine(place), measure_ceilings(place, sizes)
    _tidy(place)
    for done, name in enumerate(chosen):
        tell(WorkEvent("measuring", name, done=done, total=len(chosen)))
        found[name] = _try(rows[name])
        _tidy(place)
    tell(WorkEvent("measuring", CEILINGS, done=len(chosen), total=len(chosen)))
    with suppress(RuntimeError):  # a row may have left the GPU unusable
        ceilings = join_ceilings(ceilings, measure_ceilings(place, sizes))  # again: others may have been busy before
    tell(WorkEvent("measuring", done=len(chosen), total=len(chosen)))
    authors = AUTHORS if "H200" in machine.device else {}
    lines = tuple(make_line(rows[name], found[name], ceilings, authors.get(name)) for name in chosen)
    by, dtype = type(engine).__name__.lower(), _say_dtype(engine.dtype)
    return Bench(machine, by, dtype, quick, ceilings, lines, time.perf_counter() - began)


def pick_sizes(engine: Engine, quick: bool) -> Sizes:
    """The full sizes where they take seconds: all clients side by side on a GPU."""
    on_gpu = engine.device.type == "cuda"
    if on_gpu and engine.together > 1:
        return FULL_QUICK if quick else FULL
    small = SMALL_QUICK if quick else SMALL
    return replace(small, matmul=FULL.matmul, copied=FULL.copied) if on_gpu else small


def describe_machine(device: torch.device) -> Machine:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _name_processor()
    return Machine(name, device.type, torch.__version__, torch.get_num_threads())


def _name_processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            what, _, name = line.partition(":")
            if what.strip() == "model name":
                return name.strip()
    except (OSError, UnicodeDecodeError):
        pass  # not Linux
    return "CPU"


def measure_ceilings(device: torch.device, sizes: Sizes) -> Ceilings:
    """The best rate of large pieces of arithmetic, and the bandwidth of one large copy."""
    rates = [_rate_matmul(device, sizes.matmul)]
    if device.type == "cpu":  # matrix products and convolutions are of two libraries there, up to four times apart
        rates.append(_rate_convolution(max(1, sizes.matmul // 64)))
    source = torch.zeros(sizes.copied, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    moved = 2 * sizes.copied / _best(lambda: target.copy_(source), device)
    return Ceilings(*max(rates), moved)


def _rate_matmul(device: torch.device, side: int) -> tuple[float, str]:
    """FLOP/s; in bfloat16 where a GPU has it, whatever the engine computes in: it could not be faster."""
    rounded = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = torch.bfloat16 if rounded else torch.float32
    a, b = (torch.rand(side, side, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    return 2 * side**3 / _best(lambda: torch.mm(a, b, out=product), device), f"{_say_dtype(dtype)} matrix products"


def _rate_convolution(images: int) -> tuple[float, str]:
    """FLOP/s on the CPU; windows of 5 x 5, for which no library has a way around some of the multiplications."""
    x, weight = (
        torch.rand(shape).contiguous(memory_format=torch.channels_last)
        for shape in ((images, 64, 32, 32), (64, 64, 5, 5))
    )
    flops = 2 * images * 28 * 28 * weight.numel()
    with torch.no_grad():
        seconds = _best(lambda: torch.conv2d(x, weight), torch.device("cpu"))
    return flops / seconds, "float32 convolutions"


def _best(work: Callable[[], object], device: torch.device, tries: int = 10) -> float:
    """Seconds of a call at best: a ceiling is what the machine can do undisturbed."""
    work()
    calls = 8 if device.type == "cuda" else 1  # a GPU is given the next piece of work while it does one
    seconds = []
    for _ in range(tries):
        wait(device)
        began = time.perf_counter()
        for _ in range(calls):
            work()
        wait(device)
        seconds.append((time.perf_counter() - began) / calls)
    return min(seconds)


def join_ceilings(one: Ceilings, other: Ceilings) -> Ceilings:
    """The best of both."""
    faster = max(one, other, key=lambda ceilings: ceilings.flops)
    return replace(faster, bytes=max(one.bytes, other.bytes))


@dataclass(frozen=True)
class Timed:
    """What calls took: the first, and those after it."""

    cold: float
    seconds: tuple[float, ...]
    peak: dict[str, float]  # GiB on the GPU in those after the first

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def details(self) -> dict[str, Any]:
        return {"seconds": list(self.seconds), **self.peak}


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
    # graphs keep their memory to themselves: it is reserved, but not allocated while they are replayed
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return {"peak_allocated_gib": allocated / 2**30, "peak_reserved_gib": reserved / 2**30}


@dataclass(frozen=True)
class Measured:
    """A row before the floor stands beside it."""

    seconds: float  # of the piece of work that the row is about, at full size
    timed: Timed
    need: Need
    scaled_from: str | None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    name: str
    unit: str
    work: Callable[[], Measured]


def _try(task: Task) -> Measured | str:
    """What was found, or why nothing was."""
    try:
        with unheard():  # what goes on inside is no news here
            return task.work()
    except Exception as error:  # any: out of memory, a library that is missing, a kernel that does not compile
        return _say_error(error)


def make_line(task: Task, found: Measured | str, ceilings: Ceilings, authors: float | None = None) -> Line:
    """A task's numbers in its unit and the floor beside them, or why there are none."""
    if isinstance(found, str):
        return Line(task.name, task.unit, authors=authors, failed=found)
    per_second = {"s": 1, "ms": 1000}[task.unit]
    floor, floor_kind = find_floor(found.need, ceilings)
    details = found.timed.details | found.details | {"flops": found.need.flops, "bytes": found.need.bytes}
    return Line(
        task.name,
        task.unit,
        per_second * found.seconds,
        per_second * floor,
        floor_kind,
        found.seconds / floor,
        found.scaled_from,
        found.timed.cold,
        authors,
        None,
        details,
    )


def find_floor(need: Need, ceilings: Ceilings) -> tuple[float, str]:
    """Seconds, and whether it is arithmetic or bytes that takes them."""
    return max((need.flops / ceilings.flops, "arithmetic"), (need.bytes / ceilings.bytes, "bytes"))


def _say_error(error: Exception) -> str:
    words = (str(error).splitlines() or [""])[0][:200]
    return words if isinstance(error, InputError | Failed) else f"{type(error).__name__}: {words}"


def _say_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tidy(device: torch.device) -> None:
    """The next row starts with the memory of the machine to itself."""
    gc.collect()
    if device.type == "cuda":
        with suppress(RuntimeError):  # a row may have left the GPU unusable: then the next ones say so
            torch.cuda.empty_cache()


# The rows


@dataclass(frozen=True)
class Lab:
    """What is measured, each with an engine of its own: what another row compiled or filled does not count."""

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
            Task(ANSWER, "ms", lambda: self.time_answers(FedTHE(net))),
            Task(ANSWER_PLUS, "ms", lambda: self.time_answers(FedTHEPlus(net), tuned=True)),
            Task(ANSWER_MEMO, "ms", lambda: self.time_answers(FineTune(net, Memo()), tuned=True)),
            Task(ANSWER_TTT, "ms", lambda: self.time_answers(TTT(net), tuned=True)),
            Task(CORRUPTION, "s", self.time_corruption),
        ]
        return {task.name: task for task in tasks}

    def _other_engine(self, engine: Engine) -> list[Task]:
        """On a CPU, what the engine that was not taken would need; on a GPU the loop takes too long."""
        if engine.device.type != "cpu":
            return []
        other: Kind = "loop" if engine.together > 1 else "stack"
        return [Task(ROUND_BY.format(other), "s", lambda: self.time_round(CNN(CLASSES), kind=other))]

    def make_engine(self, kind: Kind | None = None) -> Engine:
        return pick_engine(kind or self.kind, self.device, self.precision)

    def time_round(
        self, net: Net, runs: int = 1, optimizer: Optimizer = OPTIMIZERS["cnn"], kind: Kind | None = None
    ) -> Measured:
        """A round of FedTHE, the share of one run. The same question has the same answer, and is asked once."""
        key = (net, runs, optimizer, kind)
        if key not in self._rounds:
            self._rounds[key] = self._time_round(net, runs, optimizer, self.make_engine(kind))
        return self._rounds[key]

    def _time_round(self, net: Net, count: int, optimizer: Optimizer, engine: Engine) -> Measured:
        method, settings = TwoHeads(net), Training(optimizer=optimizer)  # what FedTHE trains
        clients, train = self.sizes.clients, self.sizes.train if isinstance(net, CNN) else self.sizes.large_train
        federation = make_federation(clients, train)
        runs = [Run(seed, Shards(federation, engine.device)) for seed in range(count)]
        reached = [begin(method, clients, engine.device) for _ in runs]

        def work() -> None:
            for r, result in enumerate(train_round(method, runs, settings, reached, engine)):
                if isinstance(result, Failed):
                    raise result
                reached[r] = result

        timed = time_calls(work, self.sizes.repeats, engine.device)
        part = FULL.clients * FULL.train / (clients * train)  # epochs are the same, so passes over images are as many
        scaled = None if part == 1 else f"{clients} clients x {train} images, 6 epochs"
        details = {"runs": count, "losses": list(reached[0].losses)}
        need = need_of_round(method, settings, FULL.clients, FULL.train)
        return Measured(part * timed.median / count, timed, need, scaled, details)

    def time_answers(self, method: Method, tuned: bool = False) -> Measured:
        """Test time of a sample: the whole call of the engine, of which its own clock sees a part."""
        s, engine = self.sizes, self.make_engine()
        federation, clients = make_federation(s.clients, s.train), range(s.clients)
        run, streams, samples = Run(0, Shards(federation, engine.device)), s.streams, s.samples
        if tuned:
            streams, samples = 1, s.tuned
        progress = begin(method.trains_as(), s.clients, engine.device)
        deployed = deploy_some(method, run, Training(), progress, engine, clients)
        shards, asked = [run.shards[k] for k in clients], ask(federation, streams, samples)
        own: list[float] = []

        def work() -> None:
            answers = engine.answer(method, deployed, shards, asked)
            if not all(answered.finite for answered in answers):
                raise Failed("an answer is not finite")
            own.append(sum(answered.seconds for answered in answers))

        timed, count = time_calls(work, s.repeats, engine.device), len(asked) * samples
        in_full = (1, FULL.tuned) if tuned else (FULL.streams, FULL.samples)
        scaled = f"{count:,} samples" if count < FULL.clients * in_full[0] * in_full[1] else None
        details = {"samples": count, "streams": len(asked), "engine_ms": 1000 * statistics.median(own[1:]) / count}
        need = need_of_answer(method, samples_of_client=in_full[0] * in_full[1])
        return Measured(timed.median / count, timed, need, scaled, details)

    def time_corruption(self) -> Measured:
        from .corruptions import CORRUPTIONS, corrupt_mixed

        device, n = self.make_engine().device, self.sizes.corrupted
        images = torch.from_numpy(make_images(np.arange(n) % CLASSES)).to(device)
        items = torch.arange(n, device=device)
        kinds = items % len(CORRUPTIONS)
        timed = time_calls(lambda: corrupt_mixed(images, kinds, SEVERITY, items, 0), self.sizes.repeats, device)
        scaled = f"{n:,} images" if n < FULL.corrupted else None
        return Measured(FULL.corrupted / n * timed.median, timed, need_of_copy(FULL.corrupted), scaled)


# What they are measured on


def make_federation(clients: int, train: int) -> Federation:
    """Clients with images that can be learned, Dirichlet class mixes and as many rows each, a fifth of them to test.

    Not by `partition`, which needs scipy; no number depends on which client holds what.
    """
    draw, fifth = _generator("labels"), max(1, train // 3)
    rows = train + 2 * fifth
    mixes = draw.dirichlet([DIRICHLET] * CLASSES, clients)
    labels = np.concatenate([draw.choice(CLASSES, rows, p=mix) for mix in mixes])
    pool = Pool("made", make_images(labels), labels, tuple(map(str, range(CLASSES))))
    mine = np.arange(clients * rows).reshape(clients, rows)
    splits = [Split(k[:train], k[train : train + fifth], k[train + fifth :]) for k in mine]
    return Federation(Dataset(pool), Settings(clients, DIRICHLET), tuple(splits), {}, ())


def make_images(labels: np.ndarray, noises: int = 509) -> np.ndarray:
    """A coarse pattern for each class under noise, uint8 [n, SIDE, SIDE, 3]. The noise repeats after some hundreds."""
    draw = _generator("images")
    coarse = draw.normal(128, 40, (CLASSES, 8, 8, 3)).repeat(SIDE // 8, 1).repeat(SIDE // 8, 2).astype(np.int16)
    noise = draw.normal(0, 30, (noises, SIDE, SIDE, 3)).astype(np.int16)
    images = np.empty((len(labels), SIDE, SIDE, 3), np.uint8)
    for first in range(0, len(labels), noises):  # few at a time: the sums have two bytes
        some = labels[first : first + noises]
        images[first : first + noises] = (coarse[some] + noise[: len(some)]).clip(0, 255)
    return images


def _generator(what: str) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array(rng.key("bench", what), np.uint64)))


def begin(method: Method, clients: int, device: torch.device) -> Progress:
    """As `train.start`, with parameters drawn by torch: NumPy's normal numbers need scipy."""
    return start_from(method, draw_params(method.net), clients, device)


def draw_params(net: Net) -> Tree:
    return tree.unflatten({name: _draw_start(start, rng.key("bench", name)) for name, start in net.starts().items()})


def _draw_start(start: Start, key: rng.Key) -> Tensor:
    if start.kind == "constant":
        return torch.full(start.shape, start.scale)
    one, count = torch.zeros(1, dtype=torch.int64), int(np.prod(start.shape))
    drawn = rng.normal(key, one, count) if start.kind == "normal" else 2 * rng.uniform(key, one, count) - 1
    return (drawn * start.scale).view(start.shape)


def ask(federation: Federation, streams: int, samples: int) -> list[Question]:
    """Every client is asked its own test rows, then those of the clients after it, repeated where they are too few."""
    clients, images = federation.clients, federation.pool.images
    return [
        Question(k, images[np.resize(clients[(k + i) % len(clients)].test, samples)], (0, f"stream {i}", k))
        for i in range(streams)
        for k in range(len(clients))
    ]


# The least that the work takes


def need_of_round(method: TwoHeads, settings: Training, clients: int, train: int) -> Need:
    """One run's round. Of each step: its arithmetic, parameters read and written once, images read once as bytes."""
    params = draw_params(method.net)
    weights, head = (4 * tree.count(part) for part in (params, params["head"]))
    b = settings.batch
    batch = Batch(torch.zeros(b, 3, SIDE, SIDE), torch.arange(b) % CLASSES, torch.ones(b), torch.ones(CLASSES))
    shard = _make_shard(b)
    local = count_flops(lambda: _differentiate(method.loss, params, {}, batch)) / b
    personal = count_flops(lambda: _differentiate(method.personal_loss, params["head"], params, batch)) / b
    descriptor = count_flops(lambda: mean_feature(method, params["body"], shard)) / b
    steps = -(-train // b)
    an_epoch, a_personal_epoch = (
        Need(train * flops, steps * moved + train * PIXELS)
        for flops, moved in ((local, 2 * weights), (personal, weights + head))  # the body is read, not written
    )
    of_descriptor = Need(train * descriptor, weights - head + train * PIXELS)
    a_client = an_epoch * settings.local_epochs + a_personal_epoch * settings.personal_epochs + of_descriptor
    return a_client * clients


def need_of_answer(method: Method, samples_of_client: int) -> Need:
    """One sample's: what a step of the predictor computes; its image, and its share of what the client deploys."""
    mine, predictor = method.init(draw_params(method.net))[1], method.predictor
    state, (steps, views) = predictor.start(method, mine, _make_shard(1)), predictor.augments
    x, seen = torch.zeros(1, 3, SIDE, SIDE), torch.zeros(steps, views, 3, SIDE, SIDE) if steps else None
    with torch.no_grad():
        flops = count_flops(lambda: predictor.step(method, mine, state, x, seen))
    return Need(flops, PIXELS + 4 * tree.count(mine) / samples_of_client)


def need_of_copy(images: int) -> Need:
    """Images read and written once."""
    return Need(0, 2 * images * PIXELS)


def count_flops(work: Callable[[], object]) -> int:
    """Of convolutions and matrix products, as torch counts them: a multiplication and an addition are two."""
    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


def _differentiate(loss: Callable[[Tree, Tree, Batch], Tensor], params: Tree, given: Tree, batch: Batch) -> None:
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in tree.flatten(params).items()}
    torch.autograd.grad(loss(tree.unflatten(leaves), given, batch).mean(), list(leaves.values()))


def _make_shard(rows: int) -> Shard:
    images, real = torch.zeros(rows, SIDE, SIDE, 3, dtype=torch.uint8), torch.ones(rows, dtype=torch.bool)
    labels = torch.arange(rows) % CLASSES
    return Shard(images, labels, real, torch.ones(CLASSES), images, labels, real)


# Files and comparison


def read_bench(path: Path) -> Bench:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; write one by `fedthe bench --save {path}`.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}).") from None
    except ValueError as error:  # of UTF-8 as well
        raise InputError(f"{path} is not JSON ({error}); measure it again.") from None
    try:
        return from_dict(value)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def from_dict(value: Any) -> Bench:
    """What `as_dict` gave."""
    if not isinstance(value, Mapping) or "format" not in value:
        raise InputError("this is no result of `fedthe bench`.")
    if value["format"] != FORMAT:
        raise InputError(f"the baseline has format {value['format']!r}, but this is {FORMAT}; measure it again.")
    try:
        known = {each.name: value[each.name] for each in fields(Bench)}
        known |= {"machine": Machine(**value["machine"]), "ceilings": Ceilings(**value["ceilings"])}
        read = Bench(**known | {"rows": tuple(Line(**line) for line in value["rows"])})
    except (KeyError, TypeError):
        raise InputError("the baseline is not whole; measure it again.") from None
    for line in read.rows:
        if line.value is not None and not (isinstance(line.value, int | float) and 0 < line.value < float("inf")):
            raise InputError(f"the baseline says {line.value!r} of {line.name!r}; measure it again.")
    return read


def remembered(machine: Machine) -> Path:
    """Where this machine's baseline is kept."""
    return store.home() / f"bench-{machine.slug}.json"


@dataclass(frozen=True)
class Change:
    """One row now and in the baseline."""

    name: str
    unit: str
    before: float
    now: float

    @property
    def ratio(self) -> float:
        return self.now / self.before

    @property
    def slower(self) -> bool:
        """By more than clocks differ: to be marked."""
        return self.ratio > SLOWER

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio, "slower": self.slower}


def compare(now: Bench, baseline: Bench | Mapping[str, Any]) -> list[Change]:
    """The rows that both have, by name."""
    before = baseline if isinstance(baseline, Bench) else from_dict(baseline)
    values = {line.name: line.value for line in before.rows}
    return [
        Change(line.name, line.unit, old, line.value)
        for line in now.rows
        if line.value is not None and (old := values.get(line.name)) is not None
    ]


def list_differences(now: Bench, baseline: Bench | Mapping[str, Any]) -> list[str]:
    """What else than the code may have changed the numbers, in sentences."""
    before = baseline if isinstance(baseline, Bench) else from_dict(baseline)
    facts = [
        *((name, getattr(before.machine, name), getattr(now.machine, name)) for name in ("device", "torch", "threads")),
        *((name, getattr(before, name), getattr(now, name)) for name in ("engine", "precision")),
    ]
    notes = [f"the baseline has another {name}: {old}, now {new}" for name, old, new in facts if old != new]
    sizes = {line.name: line.scaled_from for line in before.rows if line.value is not None}
    if any(line.name in sizes and line.scaled_from != sizes[line.name] for line in now.rows if line.value is not None):
        notes.append("the baseline was measured on other sizes")
    return notes


# Words


def title(bench: Bench) -> str:
    m, c = bench.machine, bench.ceilings
    return (
        f"{m.device}, torch {m.torch}, {m.threads} threads, engine {bench.engine}, {bench.precision}\n"
        f"at best {_say_rate(c.flops)}FLOP/s in {c.flops_of} and {_say_rate(c.bytes)}B/s of copying"
    )


def tabulate(bench: Bench, changes: Sequence[Change] = ()) -> list[list[str]]:
    """The table as text, its head first: narrow enough for 80 columns, and for 100 with the authors' code beside it."""
    before = {change.name: change for change in changes}
    with_authors = any(line.authors is not None for line in bench.rows)
    head = ["", "measured", "floor", "by", "x floor"]
    head += ["authors'\ncode (H200)", "faster\nby"] if with_authors else []
    head += ["before", "change"] if before else []
    return [head, *(_tabulate_line(line, before, with_authors) for line in bench.rows)]


def _tabulate_line(line: Line, before: Mapping[str, Change], with_authors: bool) -> list[str]:
    value = "failed" if line.value is None else say_time(line.value, line.unit)
    row = [line.name, value + (" *" if line.scaled_from is not None else "")]
    kind = {"arithmetic": "arith.", "bytes": "bytes", None: ""}[line.floor_kind]
    row += [say_time(line.floor, line.unit), kind, _say_number(line.floor_ratio)]
    if with_authors:
        ratio = line.authors / line.value if line.authors and line.value else None
        row += [say_time(line.authors, line.unit), _say_number(ratio)]
    if before:
        change = before.get(line.name)
        row += [say_time(change.before, line.unit), _say_change(change)] if change else ["", ""]
    return row


def list_notes(bench: Bench, changes: Sequence[Change] = ()) -> list[str]:
    """What stands below the table."""
    notes = [f"failed: {line.name}: {line.failed}" for line in bench.rows if line.failed is not None]
    sources: dict[str, list[str]] = {}
    for line in bench.rows:
        if line.scaled_from is not None:
            sources.setdefault(line.scaled_from, []).append(line.name)
    notes += [f"* scaled from {source}: {'; '.join(names)}" for source, names in sources.items()]
    notes += [
        f"round: FedTHE, {FULL.clients} clients x {FULL.train:,} images, 5 local + 1 personal epochs; seconds per run",
        "per sample: the whole call of the engine",
        "floor: arithmetic, or bytes to move, at the machine's best",
    ]
    if changes:
        slower, much = sum(change.slower for change in changes), f"{100 * (SLOWER - 1):.0f} %"
        said = f"{slower} of {len(changes)} rows are over {much} slower than the baseline" + (" (!)" if slower else "")
        notes.append(f"{said}; a clock is no verdict, so the exit code stays 0")
    return notes


def as_text(bench: Bench, changes: Sequence[Change] = ()) -> str:
    """All of it for a terminal that has nothing but letters."""
    head, *rows = tabulate(bench, changes)
    heads = zip_longest(*(reversed(name.split("\n")) for name in head), fillvalue="")
    table = [*reversed([list(line) for line in heads]), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    sides = ["<" if side == "left" else ">" for side in align(head)]
    lines = [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in table
    ]
    return "\n".join([title(bench), "", *lines, "", *list_notes(bench, changes)])


def align(head: Sequence[str]) -> list[Literal["left", "right"]]:
    """Words to the left, numbers to the right."""
    return ["left" if name in ("", "by") else "right" for name in head]


def say_time(value: float | None, unit: str) -> str:
    """Three digits, in the unit that suits: 1.23 s, 45.6 ms, 7.89 us."""
    if value is None:
        return ""
    seconds = value / {"s": 1, "ms": 1000}[unit]
    for factor, suited in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{_say_number(seconds * factor)} {suited}"
    return f"{_say_number(seconds * 1e9)} ns"


def _say_number(value: float | None) -> str:
    """Three digits, and no exponent."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _say_change(change: Change) -> str:
    return f"{100 * (change.ratio - 1):+.0f} %" + (" !" if change.slower else "")


def _say_rate(value: float) -> str:
    for factor, prefix in ((1e12, "T"), (1e9, "G")):
        if value >= factor:
            return f"{_say_number(value / factor)} {prefix}"
    return f"{_say_number(value / 1e6)} M"
