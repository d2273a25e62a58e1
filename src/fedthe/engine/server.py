"""The server: it samples clients, checks what they upload, and aggregates.

A leaf that is missing, of another shape or dtype, or not finite would otherwise be averaged into everybody's model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import rng, tree
from ..errors import Broken, Failed, InputError, code_of_a_method
from ..methods.base import Rounds
from ..methods.checks import check_tree, code_of
from ..tree import Tree
from .robust import Defense, choose_trusted, find_start, guard, limit_weights, pick_rows

# The square of a larger number overflows float32: no loss or gradient of such a model would be finite.
LARGEST = 1e18


@dataclass(frozen=True)
class Server:
    """The server after some rounds."""

    round: int
    shared: Tree
    losses: tuple[float, ...] = ()  # the mean local loss of each round
    skipped: tuple[str, ...] = ()  # clients that were left out of a round, and why


class Diverged(Failed):
    """What a client, or the server's rule, came to cannot be used. Training cannot go on with it."""

    def __init__(self, round: int, client: int | None, fault: str) -> None:
        who = "the aggregate" if client is None else f"client {client}"
        super().__init__(f"{who} in round {round + 1}: {fault}")
        self.round, self.client, self.fault = round, client, fault


def sample_clients(clients: int, participation: float, seed: int, number: int) -> list[int]:
    """Who takes part in a round, in order."""
    count = count_sampled(clients, participation)
    return sorted(rng.choose(rng.key(seed, "participation", number), clients, count).tolist())


def count_sampled(clients: int, participation: float) -> int:
    return max(1, round(participation * clients))


class Sent(NamedTuple):
    """What the clients of a round sent, with a first axis over them."""

    uploads: Tree
    averages: Sequence[Tree]  # by method: what goes beside the upload


def aggregate(
    rounds: Rounds, defense: Defense, server: Server, before: Sequence[Tree], sent: Sent, weights: Tensor
) -> tuple[Tree, list[Tree]]:
    """The next shared model, with the same leaves, all finite; and the averages of each method, which were `before`."""
    start, claimed = find_start(rounds, server.shared), limit_weights(defense, weights)
    trusted = choose_trusted(defense, start, sent.uploads)
    uploads, weights = guard(defense, start, pick_rows(sent.uploads, trusted)), _pick(claimed, trusted)
    with code_of_a_method():
        with code_of(rounds, "aggregate", shared=server.shared, uploads=uploads):
            # a copy: a rule that works in place must not change the round before
            shared = rounds.aggregate(tree.map_leaves(torch.clone, server.shared), uploads, weights)
        check_aggregate(rounds, server.shared, shared, server.round)
    try:
        averages = zip(before, sent.averages, strict=True)
        return shared, [_average(defense, old, new, claimed) for old, new in averages]
    except InputError as error:  # a mean of whole numbers
        raise Broken(error) from error


def _average(defense: Defense, start: Tree, sent: Tree, weights: Tensor) -> Tree:
    """The mean of what goes beside uploads, guarded by the same rule, which judges it for itself."""
    trusted = choose_trusted(defense, start, sent)
    return tree.weighted_mean(guard(defense, start, pick_rows(sent, trusted)), _pick(weights, trusted))


def _pick(weights: Tensor, rows: Tensor | None) -> Tensor:
    return weights if rows is None else weights[rows]


def find_infinite(leaves: Sequence[tuple[str, Tensor]], rows: int) -> list[str | None]:
    """For each of the stacked rows [rows, ...], the first leaf that is not finite, or too large to compute with."""
    if not leaves or not rows:
        return [None] * rows
    # one answer for all leaves, so that the host waits for a GPU once
    peaks = torch.stack([_peak(leaf, rows) for _, leaf in leaves]).T.tolist()
    return [_say_first([name for name, _ in leaves], row) for row in peaks]


def _peak(leaf: Tensor, rows: int) -> Tensor:
    """The largest absolute value of each row, float64 [rows]; NaN where there is one."""
    if leaf.numel() == 0 or not (leaf.is_floating_point() or leaf.is_complex()):
        return torch.zeros(rows, dtype=torch.float64, device=leaf.device)
    peaks: Tensor = torch.linalg.vector_norm(leaf.detach().reshape(rows, -1), math.inf, dim=1)
    return peaks.double()


def _say_first(names: list[str], peaks: list[float]) -> str | None:
    for name, peak in zip(names, peaks, strict=True):
        if not math.isfinite(peak):
            return f"{name} is not finite"
        if peak > LARGEST:
            return f"{name} has values up to {peak:.0e}, more than can be computed with"
    return None


def check_aggregate(rounds: Rounds, shared: Tree, new: Tree, round: int) -> None:
    """A server's rule must give what it was given: the same leaves, all finite."""
    who = f"{type(rounds).__name__}.aggregate"
    check_tree(f"what {who} returns", new)
    flat = tree.flatten(new)
    fault = tree.find_fault(tree.flatten(shared), flat)
    if fault is not None:
        fault = f"{fault}; {who} must return the leaves of `shared`, without an axis over clients"
    else:
        (fault,) = find_infinite([(name, leaf[None]) for name, leaf in flat.items()], 1)
    if fault is not None:
        raise Diverged(round, None, fault)
