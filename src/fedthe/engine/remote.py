"""The engine of workers on other machines, as this process knows it: it names files and reads them, and computes
nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..methods.base import Method
from ..tree import Tree
from ..types import Shard
from .visit import Answered, Question, Row, Visit, Visited


@dataclass(frozen=True)
class RemoteEngine:
    dtype: torch.dtype  # the workers': files are named by it
    together: int
    environment: Mapping[str, Any] = field(compare=False)  # the versions and the device of a worker
    device: torch.device = torch.device("cpu")  # of what is read here

    def release(self) -> None:
        """It keeps nothing."""

    def visit(self, visit: Visit, rows: Sequence[Row]) -> Visited:
        _refuse()

    def deploy(self, visit: Visit, clients: Sequence[int]) -> tuple[Tree, Tensor]:
        _refuse()

    def answer(
        self, method: Method, deployed: Tree, shards: Sequence[Shard], questions: Sequence[Question]
    ) -> list[Answered]:
        _refuse()


def _refuse() -> NoReturn:
    raise RuntimeError("only workers compute here")
