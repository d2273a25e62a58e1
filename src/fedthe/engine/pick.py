"""Which engine runs where."""

from __future__ import annotations

from typing import Literal

import torch

from ..errors import InputError
from .loop import Loop
from .stack import Stack
from .visit import Engine

Kind = Literal["auto", "loop", "stack"]
Precision = Literal["auto", "float32", "bfloat16"]


def pick_engine(
    kind: Kind = "auto", device: str = "auto", precision: Precision = "auto", threads: int | None = None
) -> Engine:
    """The GPU if there is one, with a stack; else the CPU, with a loop, which is faster there."""
    place = _find_device(device)
    if kind == "auto":
        kind = "stack" if place.type == "cuda" else "loop"
    has_bfloat16 = place.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "bfloat16" and kind != "stack":
        raise InputError("bfloat16 is for engine=stack; use it, or precision=float32.")
    if precision == "bfloat16" and not has_bfloat16:
        raise InputError(f"{place} does not compute in bfloat16; use precision=float32.")
    if threads is not None and (kind != "loop" or place.type != "cpu"):
        raise InputError("threads is for engine=loop on the CPU; leave it out.")
    if kind == "loop":
        return Loop(place, threads=threads)
    rounded = precision == "bfloat16" or (precision == "auto" and has_bfloat16)
    return Stack(place, torch.bfloat16 if rounded else torch.float32)


def _find_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(name)
    except RuntimeError:
        raise InputError(f"device must be auto, cpu, cuda or one such as cuda:1, not {name!r}.") from None
    if place.type not in ("cpu", "cuda"):
        raise InputError(f"device must be auto, cpu, cuda or one such as cuda:1, not {name!r}.")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise InputError(f"there is no {name} here; use the CPU, or auto.")
    return place
