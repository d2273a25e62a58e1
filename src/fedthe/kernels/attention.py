"""Attention over few tokens, and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .compiler import WIDEN, Block, constexpr, jit, tl
from .shapes import FULL, Attention, power_of_two

ATTEND_WARPS = 4  # of 16 rows each: with eight, two would compute the same rows of a block of 64


@jit
def _attention_weights(
    q: Block, k: Block, t: Block, TOKENS: constexpr, SCALE: constexpr, PRECISION: constexpr
) -> Block:
    """The softmax of the scores."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * SCALE
    scores = tl.where((t < TOKENS)[None, :], scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    return weights / tl.sum(weights, 1)[:, None]


@jit
def _attend_kernel(
    qkv: Block,
    out: Block,
    TOKENS: constexpr,
    HEADS: constexpr,
    EACH: constexpr,
    SCALE: constexpr,
    PRECISION: constexpr,
    BT: constexpr,
    BE: constexpr,
) -> None:
    """One program: one head of one image. qkv [images, TOKENS, 3, HEADS, EACH] to out [images, TOKENS, HEADS, EACH]"""
    pid = tl.program_id(0).to(tl.int64)
    head = pid % HEADS
    t = tl.arange(0, BT)
    e = tl.arange(0, BE)
    ok = (t < TOKENS)[:, None] & (e < EACH)[None, :]
    at = (t * (3 * HEADS * EACH))[:, None] + e[None, :]
    source = qkv + pid // HEADS * (TOKENS * 3 * HEADS * EACH) + head * EACH
    q = tl.load(source + at, mask=ok, other=0.0)
    k = tl.load(source + HEADS * EACH + at, mask=ok, other=0.0)
    v = tl.load(source + 2 * HEADS * EACH + at, mask=ok, other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
        k = k.to(tl.float32)
        v = v.to(tl.float32)

    weights = _attention_weights(q, k, t, TOKENS, SCALE, PRECISION)
    mixed = tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    to = out + pid // HEADS * (TOKENS * HEADS * EACH) + head * EACH
    tl.store(to + (t * (HEADS * EACH))[:, None] + e[None, :], mixed.to(out.dtype.element_ty), mask=ok)


@jit
def _attend_grad_kernel(
    g: Block,
    qkv: Block,
    out: Block,
    TOKENS: constexpr,
    HEADS: constexpr,
    EACH: constexpr,
    SCALE: constexpr,
    PRECISION: constexpr,
    BT: constexpr,
    BE: constexpr,
) -> None:
    """One program: one head of one image. g: the result's gradient; out: qkv's. Recomputes the weights."""
    pid = tl.program_id(0).to(tl.int64)
    head = pid % HEADS
    t = tl.arange(0, BT)
    e = tl.arange(0, BE)
    ok = (t < TOKENS)[:, None] & (e < EACH)[None, :]
    first = pid // HEADS * (TOKENS * 3 * HEADS * EACH) + head * EACH
    at = first + (t * (3 * HEADS * EACH))[:, None] + e[None, :]
    q = tl.load(qkv + at, mask=ok, other=0.0)
    k = tl.load(qkv + HEADS * EACH + at, mask=ok, other=0.0)
    v = tl.load(qkv + 2 * HEADS * EACH + at, mask=ok, other=0.0)
    grads = g + pid // HEADS * (TOKENS * HEADS * EACH) + head * EACH
    grad = tl.load(grads + (t * (HEADS * EACH))[:, None] + e[None, :], mask=ok, other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
        k = k.to(tl.float32)
        v = v.to(tl.float32)
        grad = grad.to(tl.float32)

    weights = _attention_weights(q, k, t, TOKENS, SCALE, PRECISION)
    by_v = tl.dot(tl.trans(weights.to(grad.dtype)), grad, input_precision=PRECISION)
    tl.store(out + 2 * HEADS * EACH + at, by_v.to(out.dtype.element_ty), mask=ok)

    by_weights = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    by_score = (weights * (by_weights - tl.sum(weights * by_weights, 1)[:, None]) * SCALE).to(q.dtype)
    by_q = tl.dot(by_score, k, input_precision=PRECISION)
    tl.store(out + at, by_q.to(out.dtype.element_ty), mask=ok)
    by_k = tl.dot(tl.trans(by_score), q, input_precision=PRECISION)
    tl.store(out + HEADS * EACH + at, by_k.to(out.dtype.element_ty), mask=ok)


def attend(qkv: Tensor, how: Attention) -> Tensor:
    """[n, tokens, 3 heads width] -> [n, tokens, heads width] in the same type, with softmax and sums in float32."""
    n, tokens, _ = qkv.shape
    out = qkv.new_empty((n, tokens, how.heads * how.width))
    with torch.cuda.device_of(qkv):
        _attend_kernel[(n * how.heads,)](qkv.contiguous(), out, **_attend_launch(tokens, how))
    return out


def attend_grad(g: Tensor, qkv: Tensor, how: Attention) -> Tensor:
    """The gradient of `attend`: g [n, tokens, heads width] -> shape and type of qkv."""
    n, tokens, _ = qkv.shape
    out = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(qkv):
        shape = _attend_launch(tokens, how)
        _attend_grad_kernel[(n * how.heads,)](g.to(qkv.dtype).contiguous(), qkv.contiguous(), out, **shape)
    return out


def _attend_launch(tokens: int, how: Attention) -> dict[str, Any]:
    blocks = {"BT": power_of_two(tokens, 16), "BE": power_of_two(how.width, 16)}
    shape = {"TOKENS": tokens, "HEADS": how.heads, "EACH": how.width, "SCALE": how.width**-0.5}
    return {**shape, **blocks, "PRECISION": FULL, "num_warps": ATTEND_WARPS}
