"""The machine: what it is, and the best rates of arithmetic and copying that it reaches."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..engine.memory import wait
from .workload import Sizes


@dataclass(frozen=True)
class Machine:
    device: str  # its name
    type: str  # cpu or cuda
    torch: str
    threads: int  # of torch, on the host

    @property
    def slug(self) -> str:
        """For file names: cpu, or the name of the GPU in lowercase words, such as nvidia-h200."""
        return "cpu" if self.type == "cpu" else "-".join(re.findall("[a-z0-9]+", self.device.lower()))


@dataclass(frozen=True)
class Ceilings:
    """The best rates measured on the machine."""

    flops: float  # per second
    flops_of: str  # the operation and precision that reached them
    bytes: float  # per second, read and written together


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
    """The best rate of large operations, and the bandwidth of one large copy."""
    rates = [_rate_matmul(device, sizes.matmul)]
    if device.type == "cpu":  # where different libraries compute the two, at rates up to four times apart
        rates.append(_rate_convolution(max(1, sizes.matmul // 64)))
    source = torch.zeros(sizes.copied, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    moved = 2 * sizes.copied / _best(lambda: target.copy_(source), device)
    return Ceilings(*max(rates), moved)


def join_ceilings(one: Ceilings, other: Ceilings) -> Ceilings:
    """The better of both."""
    faster = max(one, other, key=lambda ceilings: ceilings.flops)
    return replace(faster, bytes=max(one.bytes, other.bytes))


def _rate_matmul(device: torch.device, side: int) -> tuple[float, str]:
    """FLOP/s, in bfloat16 where the GPU supports it, whatever precision the engine uses: nothing is faster."""
    rounded = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = torch.bfloat16 if rounded else torch.float32
    a, b = (torch.rand(side, side, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    return 2 * side**3 / _best(lambda: torch.mm(a, b, out=product), device), f"{name_dtype(dtype)} matrix products"


def _rate_convolution(images: int) -> tuple[float, str]:
    """FLOP/s on the CPU, with 5 x 5 kernels: libraries have no algorithm for them that saves multiplications."""
    x, weight = (
        torch.rand(shape).contiguous(memory_format=torch.channels_last)
        for shape in ((images, 64, 32, 32), (64, 64, 5, 5))
    )
    flops = 2 * images * 28 * 28 * weight.numel()
    with torch.no_grad():
        seconds = _best(lambda: torch.conv2d(x, weight), torch.device("cpu"))
    return flops / seconds, "float32 convolutions"


def _best(work: Callable[[], object], device: torch.device, tries: int = 10) -> float:
    """Seconds of the fastest call: a ceiling is what an idle machine reaches."""
    work()
    calls = 8 if device.type == "cuda" else 1  # keep the queue of the GPU full
    seconds = []
    for _ in range(tries):
        wait(device)
        began = time.perf_counter()
        for _ in range(calls):
            work()
        wait(device)
        seconds.append((time.perf_counter() - began) / calls)
    return min(seconds)


def name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
