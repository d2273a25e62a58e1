"""Modules that cannot be a network: refused by their layers when they are wrapped, and by their behaviour on samples
before they are trained."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin

from .. import tree
from ..errors import InputError
from ..foreign import explain
from ..text import find_nearest, quote
from ..tree import Tree
from .body import list_constants
from .net import Net

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
CLOSE = 1e-4  # a larger relative difference between numbers that should be equal has another reason than rounding


def name_class(module: object) -> str:
    return type(module).__name__


def check_layers(module: nn.Module, head: str) -> nn.Linear:
    """Refuse a module by the types of its layers; returns its head."""
    what = name_class(module)
    if isinstance(module, torch.jit.ScriptModule | nn.DataParallel) or hasattr(module, "_orig_mod"):
        raise InputError(f"{what} is compiled or parallel; wrap the plain module inside.")
    for name, layer in module.named_modules():
        why = _refuse_layer(layer)
        if why:
            raise InputError(f"{what}: {name or 'it'} is {name_class(layer)}, which {why}.")
    for name, p in (*module.named_parameters(), *module.named_buffers()):
        if p.layout != torch.strided or not p.numel():
            raise InputError(f"{what}: {name} is sparse or empty; give it a dense tensor with numbers.")
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise InputError(f"{what}: {name} has a hook of its own, which would not run; remove it.")
    found = _find_head(module, head)
    if not any(p.requires_grad for p in module.parameters() if not _is_in(p, found.parameters())):
        raise InputError(f"{what} trains no parameters but those of its head {head}; give it a layer before that.")
    for name, p in module.named_parameters(remove_duplicate=False):
        if name.rpartition(".")[0] != head and _is_in(p, found.parameters()):
            raise InputError(f"{what}: the head {head} shares its weight with {name}; give it a weight of its own.")
    return found


def _refuse_layer(layer: nn.Module) -> str | None:
    """Why, to follow "which"."""
    if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
        return "has no weights yet; give it one batch before you wrap it"
    if isinstance(layer, _BatchNorm):
        if type(layer) not in BATCH_NORMS:
            return "is a BatchNorm and more, and mixes the samples of a batch; put a GroupNorm in its place"
        return 'mixes the samples of a batch; use normalise="group", which puts GroupNorm in its place'
    if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
        return "keeps running statistics; make it with track_running_stats=False"
    if rate_of_dropout(layer) > 0:
        return 'draws random numbers; use dropout="off", which trains without it'
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and (layer.max_norm is not None or layer.scale_grad_by_freq):
        return "has max_norm or scale_grad_by_freq; make it without"
    return None


def rate_of_dropout(layer: nn.Module) -> float:
    if isinstance(layer, _DropoutNd):
        return layer.p
    return layer.dropout if isinstance(layer, nn.MultiheadAttention | nn.RNNBase) else 0.0


def _find_head(module: nn.Module, head: str) -> nn.Linear:
    what, layers = name_class(module), dict(module.named_modules(remove_duplicate=False))
    linear = [name for name, layer in layers.items() if name and isinstance(layer, nn.Linear)]
    if not head or head not in layers:
        if not linear:
            raise InputError(f"{what} has no layer {head!r} and no other nn.Linear; its last layer must be one.")
        raise InputError(f"{what} has no layer {head!r}; name its last linear layer: {find_nearest(head, linear)}")
    found = layers[head]
    if not isinstance(found, nn.Linear) or "weight" not in dict(found.named_parameters()):
        raise InputError(
            f"{what}: the head {head} must be a plain nn.Linear, but is {name_class(found)}; "
            f"{find_nearest(head, linear) if linear else 'end with an nn.Linear.'}"
        )
    if not all(p.requires_grad for p in found.parameters()):
        raise InputError(f"{what}: the head {head} is frozen; a head must be trained.")
    twice = [name for name, layer in layers.items() if layer is found and name != head]
    if twice:
        raise InputError(f"{what}: the head {head} is also its layer {twice[0]}; give it a layer of its own.")
    return found


def _is_in(tensor: Tensor, some: Iterator[nn.Parameter]) -> bool:
    return any(tensor is each for each in some)


def check_behaviour(net: Net, module: nn.Module, head: str, x: Tensor, may_differ_in_training: bool) -> None:
    """Refuse what the wrapped module would compute otherwise than the module itself, on samples x [n, ...]."""
    what, fresh, module = name_class(module), module, copy.deepcopy(module)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        logits = _run(module.eval(), x)
        _check_output(what, logits, (len(x), net.classes), "logits")
        if not _agree(logits, _run(module, x)):
            raise InputError(f"{what} draws random numbers in every forward pass; a network must not.")
        for rows in (slice(0, 1), slice(len(x) - 1, None)):
            if not _agree(logits[rows], _run(module, x[rows])):
                raise InputError(
                    f"{what} gives a sample other logits in another batch; a network must treat samples one by one."
                )
        before = {name: constant.clone() for name, constant in list_constants(module)}
        trained = _run(module.train(), x)
        for name, constant in list_constants(module):
            if not torch.equal(before[name], constant):
                raise InputError(f"{what} changes its buffer {name} in the forward pass; a network must not.")
        if not may_differ_in_training and not _agree(logits, trained):
            raise InputError(
                f"{what} gives other logits in training mode, as with dropout; "
                f'use dropout="off" to train it in evaluation mode.'
            )
    _check_split(net, fresh, head, x)


def _check_split(net: Net, module: nn.Module, head: str, x: Tensor) -> None:
    """Compare with the module at its own parameters, then at others: it may not have kept any to itself."""
    what, params = name_class(module), net.init(0)
    others = tree.map_leaves(lambda leaf: leaf * 1.25 + 0.01, params)
    for each, why in (
        (params, f"its head {head} is not its last layer: end with it, and return its logits as they are"),
        (others, "it keeps copies of its parameters: use them as attributes in every forward pass"),
    ):
        with torch.no_grad():
            with explain(f"{what} cannot be split at {head}", "end with it, and return its logits as they are"):
                h = net.features(each["body"], x)
            _check_output(what, h, (len(x), net.feature_dim), "features")
            if not _agree(_run(_load(module, each, head), x), net.head(each["head"], h)):
                raise InputError(f"{what} gives other logits when it is split at {head}; {why}.")


def _load(module: nn.Module, params: Tree, head: str) -> nn.Module:
    """A copy of the module, as it is before its first forward pass, with these parameters."""
    module = copy.deepcopy(module)
    named, layer = dict(module.named_parameters()), module.get_submodule(head)
    for name, leaf in tree.flatten(params["body"]).items():
        named[name].copy_(leaf)
    for name, leaf in params["head"].items():
        getattr(layer, "weight" if name == "out" else name).copy_(leaf)
    return module


def check_stacked(net: Net, what: str, x: Tensor) -> None:
    """Refuse what runs for one client, but not for two at once, or with other gradients."""
    params = net.init(0)
    clients = [params, tree.map_leaves(lambda leaf: leaf * 1.25 + 0.01, params)]
    stacked = {name: leaf.requires_grad_() for name, leaf in tree.flatten(tree.stack(clients)).items()}

    def square(flat: dict[str, Tensor]) -> Tensor:
        return net.logits(tree.unflatten(flat), x).square().sum()

    with explain(f"{what} cannot run for several clients at once", "use engine=loop"):
        found = _differentiate(torch.vmap(square)(stacked).sum(), stacked)
    for i in range(2):
        flat = {name: leaf[i].detach().requires_grad_() for name, leaf in stacked.items()}
        alone = _differentiate(square(flat), flat)
        largest = max(float(gradient.abs().max()) for gradient in alone.values())  # a small one may be mere rounding
        for name, gradient in alone.items():
            if not _agree(gradient, found[name][i], largest):
                raise InputError(f"{what} has another gradient of {name} for several clients at once; use engine=loop.")


def _differentiate(value: Tensor, flat: dict[str, Tensor]) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(value, list(flat.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(flat, gradients, strict=True))


def _run(module: nn.Module, x: Tensor) -> Any:
    kind = f"shape {list(x.shape)} in {str(x.dtype).removeprefix('torch.')}"
    with explain(f"{name_class(module)} cannot take a batch of {kind}"):
        return module(x)


def _check_output(what: str, made: Any, shape: tuple[int, int], kind: str) -> None:
    if not isinstance(made, Tensor):
        raise InputError(f"{what} returns {quote(type(made).__name__)}; its forward must return a tensor of {kind}.")
    if tuple(made.shape) != shape:
        raise InputError(f"{what} gives {kind} of shape {list(made.shape)} for {shape[0]} samples, not {list(shape)}.")
    if not made.isfinite().all():
        raise InputError(f"{what} gives {kind} that are not finite; check its weights and the samples.")


def _agree(one: Tensor, other: Tensor, largest: float | None = None) -> bool:
    """Up to rounding, relative to the largest of all numbers that belong together."""
    largest = float(one.abs().max()) if largest is None else largest
    return bool((one - other).detach().abs().max() <= CLOSE * max(largest, 1e-6))
