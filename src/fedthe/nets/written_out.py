"""Functions of torch that vmap cannot lift, or lifts wrongly, written out in functions that it can.

With them, a module runs for one client and for many with the same numbers.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention without dropout: the fused one has no vmap rule on the CPU."""
    if dropout_p:
        raise NotImplementedError("attention with dropout draws random numbers")
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    scores = (query @ key.transpose(-2, -1)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        hidden = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if hidden else scores + attn_mask
    return scores.softmax(-1) @ value


def embed(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """F.embedding. Under vmap, torch's own spares the padding row of the first client only from gradients."""
    if max_norm is not None or scale_grad_by_freq:
        raise NotImplementedError("an embedding with max_norm or scale_grad_by_freq")
    found = F.embedding(input, weight)
    if padding_idx is None:
        return found
    return torch.where((input == padding_idx % len(weight))[..., None], found.detach(), found)


def _without_check(function: Any) -> Callable[..., Any]:
    """The function without its question whether a mode wants to take it over: what it calls is still asked."""
    names = function.__globals__ | {"has_torch_function": lambda _: False}
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_attend_in_heads = _without_check(F.multi_head_attention_forward)


class WrittenOut(TorchFunctionMode):
    """Also keeps nn.TransformerEncoderLayer from its fused kernel, which it uses only where no mode is active."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return attend(*args, **kwargs)
        if func is F.embedding:
            return embed(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:  # torch switched it off, but it handles the parts, too
                return _attend_in_heads(*args, **kwargs)
        return func(*args, **kwargs)
