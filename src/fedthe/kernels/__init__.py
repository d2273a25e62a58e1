"""Triton kernels by topic, and when to use them.

S counts clients. In memory, images are [S, n, h, w, c] and weights [S, o, kh, kw, c]. Launchers take and return
[S, n, c, h, w] and [S, o, c, kh, kw], as permuted views of such memory; they copy other layouts first. A client's
result has the same bits for every S: tile sizes and splits follow from the shape of one client's work, sums have a
fixed order, and there are no atomics. All shapes are compile-time constants, except S and n.

Kernels need Triton: import their modules only after `use_kernels` returned True.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

HAS_TRITON = find_spec("triton") is not None
interpreting = False  # tests set this to run the kernels on the CPU, in Triton's interpreter


def use_kernels(x: Tensor) -> bool:
    """Whether kernels take x: on a GPU, if Triton is installed."""
    return (x.is_cuda and HAS_TRITON) or interpreting
