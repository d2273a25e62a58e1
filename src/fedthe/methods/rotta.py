"""RoTTA (Yuan et al., CVPR 2023, https://arxiv.org/abs/2303.13899): a student learns a slow teacher's predictions on a
memory that is balanced over classes and holds recent, certain samples. The teacher answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import tree
from ..errors import InputError
from .adapting import check_norms, check_step, pick_norms, put, start_adam, step_adam
from .base import Answers, Method, Predictor, Samples, Shard, Tree
from .losses import entropy
from .rotta_memory import Memory


@dataclass(frozen=True)
class RoTTA(Predictor):
    """A sample is answered before the step of its batch. Without BatchNorm there are no statistics to make robust. A
    sample's strong augmentation is one AugMix view, drawn when it arrives; the paper draws a new one for every step."""

    batch: int = 16  # samples between two steps; the paper's 64 would be a handful of steps per stream
    lr: float = 0.001  # of Adam
    nu: float = 0.001  # how fast the teacher follows the student
    memory: Memory = Memory()

    def __post_init__(self) -> None:
        check_step("rotta", self.batch, self.lr)
        if not 0 <= self.nu <= 1:
            raise InputError(f"rotta: nu must be from 0 to 1, not {self.nu}.")

    def check(self, method: Method) -> None:
        check_norms("rotta", method)

    def start(self, method: Method, mine: Tree, shard: Shard) -> Tree:
        norms = pick_norms(method, mine)
        memory = self.memory.start(shard, mine["head"]["out"])
        return {"student": norms, "teacher": norms, "adam": start_adam(norms), "memory": memory}

    def answer(self, method: Method, mine: Tree, state: Tree, samples: Samples) -> tuple[Answers, Tree]:
        teacher = put(mine, state["teacher"])
        with torch.no_grad():
            logits = method.logits(teacher, samples.x)
            memory = self._remember(state["memory"], samples, logits)
            wanted = method.logits(teacher, memory["x"]).softmax(-1)

        def loss(student: Tree) -> Tensor:
            log_p = method.logits(put(mine, student), memory["view"]).log_softmax(-1)
            return -((wanted * log_p).sum(-1) * self.memory.weigh(memory)).sum()

        gradients = torch.func.grad(loss)(state["student"])
        student, adam = step_adam(state["student"], gradients, state["adam"], self.lr)
        follow = tree.map_leaves(lambda old, new: (1 - self.nu) * old + self.nu * new, state["teacher"], student)
        return Answers(logits), {"student": student, "teacher": follow, "adam": adam, "memory": memory}

    def _remember(self, memory: Tree, samples: Samples, logits: Tensor) -> Tree:
        views = samples.views(torch.arange(len(samples.x)))[:, 0, 0]
        columns = (samples.x, views, logits.argmax(-1), entropy(logits))
        for x, view, label, doubt in zip(*(column.unbind(0) for column in columns), strict=True):
            memory = self.memory.offer(memory, {"x": x, "view": view, "label": label, "doubt": doubt}, logits.shape[-1])
        return memory

    @property
    def window(self) -> int:
        return self.batch

    @property
    def augments(self) -> tuple[int, int]:
        return 1, 1

    @property
    def passes(self) -> tuple[int, int]:
        steps = -(-self.memory.size // self.batch)  # of the memory's samples for one of the stream's
        return 1 + 2 * steps, steps
