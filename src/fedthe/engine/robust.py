"""Server rules for uploads that cannot all be trusted, and the attacks that they are tested with.

A rule comes before the method's own `aggregate`, and turns the uploads of a round into others: fewer, shorter, or all
the same. So every method can be trained with every rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from .. import rng, tree
from ..errors import InputError
from ..methods.base import Rounds
from ..text import count
from ..tree import Tree

RULES_VERSION = 3  # raised when a change of this file moves numbers
Rule = Literal["mean", "median", "trimmed_mean", "multi_krum"]


@dataclass(frozen=True)
class Defense:
    """How the server guards itself. The default trusts every upload."""

    rule: Rule = "mean"  # what goes to the method's `aggregate`, which mostly takes the weighted mean
    byzantine: float = 0.2  # the share of clients that trimmed_mean and multi_krum guard against
    clip: float | None = None  # how many times the median length an update may have; longer ones are shortened

    def __post_init__(self) -> None:
        if self.rule not in get_args(Rule):
            raise InputError(f"aggregation must be {', '.join(get_args(Rule))}, not {self.rule}.")
        if not 0 <= self.byzantine < 0.5:
            raise InputError(f"byzantine must be at least 0 and below 0.5, not {self.byzantine}.")
        if self.clip is not None and not (math.isfinite(self.clip) and self.clip > 0):
            raise InputError(f"clip must be a positive number, not {self.clip}.")

    def count_wrong(self, clients: int) -> int:
        """How many of so many uploads may be wrong: the share, but always fewer than half.

        Multi-Krum needs 2 f + 3 uploads for f wrong ones: with fewer, the wrong ones could be nearest to each other.
        """
        most = (clients - (3 if self.rule == "multi_krum" else 1)) // 2
        # rounded before it is rounded up, for 0.1 * 30 is a little more than 3
        return max(0, min(math.ceil(round(self.byzantine * clients, 6)), most))


@dataclass(frozen=True)
class Attack:
    """Clients that send the update of their honest work times a factor."""

    share: float = 0.0  # of clients
    factor: float = -1.0

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise InputError(f"attackers must be at least 0 and below 1, not {self.share}.")
        if not math.isfinite(self.factor):
            raise InputError(f"attack must be a finite number, not {self.factor}.")

    def choose(self, clients: Sequence[int], seed: int) -> set[int]:
        """Those of the clients that attack, in every round."""
        chosen = rng.choose(rng.key(seed, "attackers"), len(clients), self.count(len(clients)))
        return {clients[i] for i in chosen}

    def count(self, clients: int) -> int:
        return round(self.share * clients)


def check_effect(defense: Defense, attack: Attack, clients: int, sampled: int) -> None:
    """Refuse what would change nothing with so many clients, of which a round has some."""
    fewest = {"multi_krum": 5, "trimmed_mean": 3}.get(defense.rule)
    if fewest is not None and not defense.count_wrong(sampled):
        raise InputError(
            f"aggregation={defense.rule} leaves out nobody in rounds of {count(sampled, 'client')}; it needs at least "
            f"{fewest}, and byzantine above 0."
        )
    if attack.share and not attack.count(clients):
        raise InputError(
            f"attackers={attack.share:g} of {count(clients, 'client')} is none; set at least {1 / clients:.2g}."
        )


def choose_trusted(defense: Defense, start: Tree, uploads: Tree) -> Tensor | None:
    """Which of the stacked uploads [clients, ...] go on, int64 in order; None: all of them.

    Multi-Krum (Blanchard et al. 2017, https://arxiv.org/abs/1703.02757) takes those whose nearest neighbours are close.
    """
    updates = _list_updates(start, uploads) if defense.rule == "multi_krum" else []
    if not updates or not (wrong := defense.count_wrong(n := len(updates[0]))):
        return None
    squares = sum((_square_distances(update) for update in updates), start=updates[0].new_zeros(()))
    near = squares.sort(1).values[:, 1 : n - wrong - 1]  # the first one is the distance to itself
    return near.sum(1).argsort(stable=True)[: n - wrong].sort().values


def limit_weights(defense: Defense, weights: Tensor) -> Tensor:
    """No client counts more than twice the median one, whatever it claims; without a defense, claims are believed."""
    return weights if defense == Defense() else weights.clamp(max=2 * weights.quantile(0.5))


def guard(defense: Defense, start: Tree, uploads: Tree) -> Tree:
    """Clipped uploads; and for a rule that goes by coordinates, its value in place of every client's."""
    if defense.clip is not None:
        uploads = _shorten(defense.clip, start, uploads)
    if defense.rule in ("median", "trimmed_mean"):
        # as many as before, for SCAFFOLD adds up what its clients send
        return _map_numbers(lambda leaf: _find_middle(defense, leaf).expand_as(leaf), uploads)
    return uploads


def pick_rows(stacked: Tree, rows: Tensor | None) -> Tree:
    """These rows of a stack; None: all of them."""
    return stacked if rows is None else tree.take(stacked, rows)


def find_start(rounds: Rounds, shared: Tree) -> Tree:
    """What an upload is an update of: the shared model, and 0 for leaves that are changes already."""
    return shared | {name: tree.map_leaves(torch.zeros_like, shared[name]) for name in rounds.changes}


def scale_update(factor: float, start: Tree, upload: Tree) -> Tree:
    """One client's upload with its update times a factor."""
    return _map_numbers(lambda sent, old: old + factor * (sent - old), upload, start)


def _find_middle(defense: Defense, leaf: Tensor) -> Tensor:
    """By coordinate, the median [...] of a leaf [clients, ...], or the mean without the least and the greatest values
    (Yin et al. 2018, https://arxiv.org/abs/1803.01498)."""
    n = len(leaf)
    cut = (n - 1) // 2 if defense.rule == "median" else defense.count_wrong(n)
    middle: Tensor = leaf.sort(0).values[cut : n - cut].mean(0)
    return middle


def _shorten(clip: float, start: Tree, uploads: Tree) -> Tree:
    """Updates of at most `clip` times their median length."""
    updates = _list_updates(start, uploads)
    if not updates:
        return uploads
    lengths = sum((update.square().sum(1) for update in updates), start=updates[0].new_zeros(())).sqrt()
    most = clip * lengths.quantile(0.5)
    factors = (most / lengths).float()

    def shorten(sent: Tensor, old: Tensor) -> Tensor:
        shape = (-1, *[1] * old.ndim)
        return torch.where((lengths > most).view(shape), old + factors.view(shape) * (sent - old), sent)

    return _map_numbers(shorten, uploads, start)


def _list_updates(start: Tree, uploads: Tree) -> list[Tensor]:
    """Every leaf's updates, float64 [clients, numbers]."""
    first = tree.flatten(start)
    return [
        (sent.double() - first[name].double()).reshape(len(sent), -1)
        for name, sent in tree.flatten(uploads).items()
        if sent.is_floating_point()
    ]


def _square_distances(rows: Tensor) -> Tensor:
    """Between rows [clients, numbers]: [clients, clients]. From differences: products would cancel."""
    return torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()


def _map_numbers(change: Callable[..., Tensor], *trees: Tree) -> Tree:
    """`change` of floating-point leaves; others, which no mean can be taken of, stay as they are in the first tree."""
    return tree.map_leaves(lambda leaf, *more: change(leaf, *more) if leaf.is_floating_point() else leaf, *trees)
