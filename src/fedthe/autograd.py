"""Gradients with respect to trees, inside vmap or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from . import tree
from .tree import Tree


def differentiate(loss: Callable[..., Tensor], params: Tree, *given: Any) -> Tree:
    """The gradient of loss(params, *given) with respect to params."""
    flat = tree.flatten(params)
    tensors = [value for value in (*given, *flat.values()) if isinstance(value, Tensor)]
    if any(map(is_functorch_wrapped_tensor, tensors)):
        lifted: Tree = torch.func.grad(loss)(params, *given)
        return lifted
    # Plain autograd, which vmap does not allow, is a fifth faster on the CPU than torch.func.grad.
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in flat.items()}
    with torch.enable_grad():
        found = loss(tree.unflatten(leaves), *given)
        gradients = torch.autograd.grad(found, list(leaves.values()), materialize_grads=True, allow_unused=True)
    return tree.unflatten(dict(zip(flat, gradients, strict=True)))
