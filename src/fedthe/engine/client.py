"""One client's work in a round: it personalizes what it received, keeps what is its own, trains and uploads.

Every engine calls these functions: plainly, lifted by vmap, or on another machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..methods.base import Kept, Method
from ..methods.fit import Fit
from ..tree import Tree
from ..types import Shard


class Fits(NamedTuple):
    """Training for each phase of a round."""

    personal: Fit
    local: Fit


class Received(NamedTuple):
    """What a client has of one method when its work begins."""

    averages: Tree  # of the server, beside the shared model
    mine: Tree  # what the client keeps


class Worked(NamedTuple):
    """What a client's round gives."""

    upload: Tree
    kept: tuple[Tree, ...]  # by method: what the client keeps from now on
    averages: tuple[Tree, ...]  # by method: what it sends beside the upload
    loss: Tensor  # the last local one, or the first that is not finite


def work(
    methods: Sequence[Method],
    names: Sequence[Kept],
    fits: Fits,
    shared: Tree,
    received: Sequence[Received],
    shard: Shard,
) -> Worked:
    """A round of one client. Methods that train the same shared model share its training; mostly there is one.

    names: of what clients keep, by method.
    """
    made = [
        method.personal.personalize(fits.personal, shared | own.averages, own.mine, shard)
        for method, own in zip(methods, received, strict=True)
    ]
    kept = [own.mine | _pick(each.params, name.personal) for name, own, each in zip(names, received, made, strict=True)]
    # rounds see only what is kept for them, which is the same for all methods
    local = methods[0].rounds.local(fits.local, shared, _pick(kept[0], names[0].rounds), shard)
    _check_kept(local.mine, names[0].rounds)
    kept = [own | local.mine for own in kept]
    averages = [
        {name: own[source] for name, source in method.personal.averages.items()}
        for method, own in zip(methods, kept, strict=True)
    ]
    before = [losses for each in made for losses in each.losses.unbind()]
    return Worked(local.params, tuple(kept), tuple(averages), pick_loss(before, local.losses))


def deploy(method: Method, fit: Fit, shared: Tree, received: Received, shard: Shard) -> tuple[Tree, Tensor]:
    """What a client deploys beyond the shared model, and the loss of personalizing it."""
    made = method.personal.personalize(fit, shared | received.averages, received.mine, shard)
    return received.averages | received.mine | made.params, pick_loss([], made.losses)


def pick_loss(before: Sequence[Tensor], losses: Tensor) -> Tensor:
    """The last of the losses [epochs], or the first one that is not finite, of those before it or of them."""
    last = losses[-1] if len(losses) else torch.zeros((), device=losses.device)
    for loss in reversed([*before, *losses.unbind()]):
        last = torch.where(loss.isfinite(), last, loss)
    return last


def _pick(leaves: Tree, names: frozenset[str]) -> Tree:
    return {name: leaf for name, leaf in leaves.items() if name in names}


def _check_kept(changed: Tree, names: frozenset[str]) -> None:
    for name in changed:
        if name not in names:
            raise InputError(f"`local` returned {name!r} for a client to keep, but `keep` does not name it.")
