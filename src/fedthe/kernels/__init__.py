"""Triton kernels by topic, and when to use them.

S counts clients. Images lie in memory as [S, n, h, w, c] and weights as [S, o, kh, kw, c]. Launchers take and return
the logical order, [S, n, c, h, w] and [S, o, c, kh, kw], as permuted views of such memory; other layouts are copied
first. A client's result has the same bits whatever S is: tile sizes and splits follow from the shape of one client's
work, sums have a fixed order, and nothing is added by atomics. Everything a kernel needs to know about shapes is a
constant to it, except S and n.

Kernels need Triton: import a module that holds some only after `use_kernels` said yes.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

interpreting = False  # tests set this to run the kernels on the CPU, in Triton's interpreter


def use_kernels(x: Tensor) -> bool:
    """Whether kernels work on x: on a GPU, where Triton is installed."""
    return (x.is_cuda and _has_triton()) or interpreting


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None
