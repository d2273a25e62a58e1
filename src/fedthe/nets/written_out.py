"""Functions of torch that vmap cannot lift, or lifts wrongly, written out in functions that it can.

With them, a module runs for one client and for many with the same numbers.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, Tensor, State], State]  # what comes from the input and from the state before -> the state


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
    if attn_mask is None:
        return scores.softmax(-1) @ value
    empty = (scores == -torch.inf).all(-1, keepdim=True)  # attends to nothing: zeros, as torch has it
    return scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0) @ value


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


def recur(cell: Cell, x: Tensor, hx: Any, weights: Sequence[Tensor], *how: Any) -> Any:
    """torch.lstm, gru, rnn_tanh or rnn_relu of a padded batch, without dropout: the fused ones have no vmap rule."""
    biased, layers, dropout, training, both_ways, batch_first = how
    if dropout and training:
        raise NotImplementedError("a recurrent network with dropout draws random numbers")
    starts = [each.unbind(0) for each in (hx if isinstance(hx, list | tuple) else (hx,))]
    ends: list[tuple[Tensor, ...]] = []
    y = x.transpose(0, 1) if batch_first else x  # [steps, n, width]
    size = len(weights) // (layers * (1 + both_ways))
    if size != (4 if biased else 2):
        raise NotImplementedError("an LSTM with projections")
    for _ in range(layers):
        found = []
        for way in range(1 + both_ways):
            at = len(ends)
            into, inside, *biases = weights[at * size : (at + 1) * size]
            given = F.linear(y, into, *biases[:1]).unbind(0)
            state, outs = tuple(each[at] for each in starts), []
            for one in reversed(given) if way else given:
                state = cell(one, F.linear(state[0], inside, *biases[1:]), state)
                outs.append(state[0])
            found.append(torch.stack(outs[::-1] if way else outs))
            ends.append(state)
        y = torch.cat(found, -1)
    return y.transpose(0, 1) if batch_first else y, *(torch.stack(each) for each in zip(*ends, strict=True))


def _lstm(given: Tensor, kept: Tensor, state: State) -> State:
    i, f, g, o = (given + kept).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(given: Tensor, kept: Tensor, state: State) -> State:
    (r, z, n), (r_kept, z_kept, n_kept) = given.chunk(3, -1), kept.chunk(3, -1)
    z = (z + z_kept).sigmoid()
    return ((1 - z) * (n + (r + r_kept).sigmoid() * n_kept).tanh() + z * state[0],)


_CELLS: dict[Any, Cell] = {
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: lambda given, kept, state: ((given + kept).tanh(),),
    torch.rnn_relu: lambda given, kept, state: ((given + kept).relu(),),
}


def _without_check(function: Any) -> Callable[..., Any]:
    """The function without its question whether a mode wants to take it over: what it calls is still asked."""
    names = function.__globals__ | {"has_torch_function": lambda _: False}
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_attend_in_heads = _without_check(F.multi_head_attention_forward)


# x += y as x = x + y: what an engine's kernel gives may not be changed in place
_OUT_OF_PLACE: dict[str, Callable[..., Tensor]] = {
    "__iadd__": torch.add,
    "__isub__": torch.sub,
    "__imul__": torch.mul,
    "__itruediv__": torch.div,
}


class WrittenOut(TorchFunctionMode):
    """Also keeps nn.TransformerEncoderLayer from its fused kernel, which it uses only where no mode is active."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("inplace"):
            kwargs = kwargs | {"inplace": False}
        if getattr(func, "__name__", "") in _OUT_OF_PLACE:
            return _OUT_OF_PLACE[func.__name__](*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return attend(*args, **kwargs)
        if func is F.group_norm and args:
            # torch 2.13 on a CPU crashes in its backward pass if x is channels-last and needs no gradient
            return func(args[0].contiguous(), *args[1:], **kwargs)
        if func is F.embedding:
            return embed(*args, **kwargs)
        if func in _CELLS and isinstance(args[3], bool):  # else the batch is packed
            return recur(_CELLS[func], *args)
        if func is F.multi_head_attention_forward:
            with self:  # torch switched it off, but it handles the parts, too
                return _attend_in_heads(*args, **kwargs)
        return func(*args, **kwargs)
