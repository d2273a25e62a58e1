"""What methods share that adapt the norm layers of a deployed model: their scales and shifts, and steps of Adam.

Their gradients come from torch.func.grad. Plain autograd ends the process with a segmentation fault where a GroupNorm's
input is in channels-last order on the CPU and needs no gradient (torch 2.13), as before the first norm here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import tree
from ..errors import InputError
from ..nets.norms import list_norms
from .base import Method, Tree

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8  # torch's


def check_norms(name: str, method: Method) -> None:
    """Refuse a network without norm layers."""
    if not list_norms(method.net):
        raise InputError(
            f"{name} adapts the weights and biases of norm layers, but {method.net.name} has none; "
            f"leave {name} out, or use a network that has some, such as resnet20_gn or cct4."
        )


def check_step(name: str, batch: int, lr: float) -> None:
    if batch < 1 or not 0 <= lr < math.inf:
        raise InputError(f"{name}: batch must be at least 1 and lr not negative, but they are {batch} and {lr}.")


def pick_norms(method: Method, mine: Tree, frozen: float = 0.0) -> Tree:
    """The norms' weights and biases, as a tree. `frozen`: this share of the layers, the last ones, is left out."""
    layers = list_norms(method.net)
    flat = tree.flatten(mine)
    kept = layers[: len(layers) - int(frozen * len(layers))]
    return tree.unflatten({name: flat[name] for layer in kept for name in layer})


def put(mine: Tree, leaves: Tree) -> Tree:
    """`mine` with other leaves in the place of some."""
    return tree.unflatten(tree.flatten(mine) | tree.flatten(leaves))


def start_adam(params: Tree) -> Tree:
    zeros = tree.map_leaves(torch.zeros_like, params)
    return {"mean": zeros, "square": zeros, "steps": next(iter(tree.flatten(params).values())).new_zeros(())}


def step_adam(params: Tree, gradients: Tree, state: Tree, lr: float) -> tuple[Tree, Tree]:
    steps = state["steps"] + 1
    mean = tree.map_leaves(lambda m, g: BETA1 * m + (1 - BETA1) * g, state["mean"], gradients)
    square = tree.map_leaves(lambda s, g: BETA2 * s + (1 - BETA2) * g * g, state["square"], gradients)
    # 1 - beta ** steps, exact in float32 too
    first, second = (-torch.expm1(steps * math.log(beta)) for beta in (BETA1, BETA2))

    def move(leaf: Tensor, m: Tensor, s: Tensor) -> Tensor:
        return leaf - lr * (m / first) / ((s / second).sqrt() + EPS)

    return tree.map_leaves(move, params, mean, square), {"mean": mean, "square": square, "steps": steps}
