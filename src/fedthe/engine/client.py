"""One client's work in a round: it personalizes what it received, keeps what is its own, trains and uploads.

Every engine calls these functions: plainly, lifted by vmap, or on another machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..methods.base import Method, Rounds
from ..methods.checks import WrongMethod, check_fitted, check_tree, code_of
from ..methods.fit import Fit, Fitted
from ..tree import Tree
from ..types import Shard


class Fits(NamedTuple):
    """Training for each phase of a round."""

    personal: Fit
    local: Fit


class Received(NamedTuple):
    """What a client has of one method when its work begins."""

    averages: Tree  # of the server, beside the shared model
    mine: Tree  # what the client keeps: for the rounds, and for the personal part


class Worked(NamedTuple):
    """What a client's round gives."""

    upload: Tree
    kept: tuple[Tree, ...]  # by method: what the client keeps from now on
    averages: tuple[Tree, ...]  # by method: what it sends beside the upload
    loss: Tensor  # the last local one, or the first that is not finite


def work(methods: Sequence[Method], fits: Fits, shared: Tree, received: Sequence[Received], shard: Shard) -> Worked:
    """A round of one client. Methods that train the same shared model share its training; mostly there is one."""
    made = [
        _personalize(method, fits.personal, shared, own, shard) for method, own in zip(methods, received, strict=True)
    ]
    kept = [_keep(own.mine, each.params) for own, each in zip(received, made, strict=True)]
    # What is kept for the rounds is the same for all methods; a method of one part, which is alone, has one branch.
    branch = "personal" if methods[0].is_one_part else "rounds"
    mine = kept[0].get(branch, {})
    local = _train(methods[0].rounds, fits.local, shared, mine, shard)
    kept = [own | {branch: own.get(branch, {}) | local.mine} for own in kept]
    averages = [
        {name: own["personal"][source] for name, source in method.personal.averages.items()}
        for method, own in zip(methods, kept, strict=True)
    ]
    before = [losses for each in made for losses in each.losses.unbind()]
    return Worked(local.params, tuple(kept), tuple(averages), pick_loss(before, local.losses))


def deploy(method: Method, fit: Fit, shared: Tree, received: Received, shard: Shard) -> tuple[Tree, Tensor]:
    """What a client deploys beyond the shared model, and the loss of personalizing it."""
    averages, mine = received
    made = _personalize(method, fit, shared, received, shard)
    deployed = averages | mine.get("rounds", {}) | mine.get("personal", {}) | made.params
    return deployed, pick_loss([], made.losses)


def summarize(method: Method, shared: Tree, shard: Shard) -> Tree:
    """What a client sends once, after the last round, for the predictor."""
    part = method.predictor
    with code_of(part, "summarize", shared=shared), torch.no_grad():
        sent = part.summarize(method, _fresh(shared), shard)
    check_tree(f"what {type(part).__name__}.summarize returns", sent)
    return sent


def join_unlabeled(method: Method, shared: Tree, received: Received, shard: Shard) -> Tree | None:
    """All that a client without labels deploys; None if its personal part needs them."""
    part, (averages, mine) = method.personal, received
    with code_of(part, "personalize_unlabeled", shared=shared), torch.no_grad():
        made = part.personalize_unlabeled(method.net, _fresh(shared | averages), shard)
    if made is None:
        return None
    check_tree(f"what {type(part).__name__}.personalize_unlabeled returns", made)
    deployed: Tree = shared | averages | mine.get("rounds", {}) | mine.get("personal", {}) | made
    return deployed


def _personalize(method: Method, fit: Fit, shared: Tree, received: Received, shard: Shard) -> Fitted:
    part, shared, mine = method.personal, shared | received.averages, received.mine.get("personal", {})
    with code_of(part, "personalize", shared=shared, mine=mine):
        made = part.personalize(fit, _fresh(shared), _fresh(mine), shard)
    return check_fitted(part, "personalize", made)


def _train(part: Rounds, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
    with code_of(part, "local", shared=shared, mine=mine):
        local = part.local(fit, _fresh(shared), _fresh(mine), shard)
    for name in check_fitted(part, "local", local).mine:
        if name not in mine:
            who = type(part).__name__
            raise WrongMethod(f"{who}.local returned {name!r} for a client to keep, but `keep` does not name it.")
    return local


def pick_loss(before: Sequence[Tensor], losses: Tensor) -> Tensor:
    """The last of the losses [epochs], or the first one that is not finite, of those before it or of them."""
    last = losses[-1] if len(losses) else torch.zeros((), device=losses.device)
    for loss in reversed([*before, *losses.unbind()]):
        last = torch.where(loss.isfinite(), last, loss)
    return last


def _fresh(part: Tree) -> Tree:
    """The same tensors in dicts of their own, so that a method that assigns to one changes nobody else's."""
    return tree.map_leaves(lambda leaf: leaf, part)


def _keep(mine: Tree, made: Tree) -> Tree:
    """What is kept after personalizing: what the personal part made of it."""
    own = mine.get("personal", {})
    return mine | {"personal": {name: made.get(name, leaf) for name, leaf in own.items()}}
