"""Triton, as kernels import it. Their modules need `tl` and the names of annotations among their own globals."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

# Not `import triton`: types are checked where there is no Triton, and the answer must not depend on that.
triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")
if TYPE_CHECKING:
    constexpr: TypeAlias = Any
    Block: TypeAlias = Any
else:  # Triton reads the annotations of kernels, and takes only names of its own there
    constexpr, Block = tl.constexpr, tl.tensor  # a Block is a pointer, a number, or a block of them

INTERPRETED = bool(triton.knobs.runtime.interpret)  # there tl.dot takes bfloat16 for whole numbers: it is cast first


def jit(kernel: Callable[..., Any]) -> Any:
    return triton.jit(kernel)
