"""Recursions over a stream of samples, computed for all samples at once: each pass lets every row reach back twice as
far. A row is only combined with earlier ones, so a NaN never reaches the rows before it."""

from __future__ import annotations

import torch
from torch import Tensor


def remember(h: Tensor, last: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """The running mean before each sample of h [n, d], and after the last: it moves to each by a share alpha.

    A product with a triangular matrix would spread a NaN: 0 * NaN is NaN.
    """
    keep, reach = 1 - alpha, 1
    after = torch.cat([alpha * h[:1] + keep * last, alpha * h[1:]])
    while reach < len(h):
        after = torch.cat([after[:reach], torch.add(after[reach:], after[:-reach], alpha=keep**reach)])
        reach *= 2
    return torch.cat([last[None], after[:-1]]), after[-1]


def filter_forward(likelihoods: Tensor, before: Tensor, back: Tensor, leave: float) -> tuple[Tensor, Tensor]:
    """The probabilities of hypotheses before each sample [n, r], and after the last one [r], by Bayes' rule.

    likelihoods [n, r]: of each sample under each hypothesis; before [r]: the probabilities at the start. After each
    sample, a share `leave` of the probability is spread as `back` [r] says: any hypothesis may end.
    """
    spread = (1 - leave) * torch.eye(len(back), dtype=back.dtype, device=back.device) + leave * back[:, None]
    after = spread * likelihoods[:, None, :]  # [n, r, r]: what a sample does to the probabilities, up to their sum
    after, reach = _normalize(after), 1
    while reach < len(after):
        after = torch.cat([after[:reach], _normalize(_compose(after[reach:], after[:-reach]))])
        reach *= 2
    reached = after @ before
    reached = reached / reached.sum(-1, keepdim=True)
    return torch.cat([before[None], reached[:-1]]), reached[-1]


def _compose(later: Tensor, earlier: Tensor) -> Tensor:
    """Matrix products [n, r, r], of so few numbers each that a GPU multiplies them faster one by one."""
    return (later[..., :, :, None] * earlier[..., None, :, :]).sum(-2)


def _normalize(steps: Tensor) -> Tensor:
    return steps / steps.sum((-2, -1), keepdim=True)
