"""Triton, as kernels import it. Their modules need `tl` and the names of annotations among their own globals."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

# Not `import triton`: mypy must give the same answer with and without Triton installed.
triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")
jit: Callable[[Callable[..., Any]], Any] = triton.jit
if TYPE_CHECKING:
    constexpr: TypeAlias = Any
    Block: TypeAlias = Any
else:  # Triton reads the annotations of kernels and accepts only its own names there
    constexpr, Block = tl.constexpr, tl.tensor  # a Block is a pointer, a number, or a block of them

WIDEN = constexpr(bool(triton.knobs.runtime.interpret))  # to float32: the interpreter's tl.dot misreads bfloat16
