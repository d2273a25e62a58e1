"""Which client holds which rows: dealt by their labels in one of several ways, and each client's frozen 60/20/20 split.

The input is labels and a seed. Every decision is integer arithmetic on draws from `rng`, or a comparison of their
quantiles, so the same seed gives the same rows on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from .. import rng
from ..errors import InputError

Partition = Literal["balanced", "unbalanced", "quantity", "shards", "iid", "given"]
PARTITIONS = get_args(Partition)
USE_DIRICHLET = ("balanced", "unbalanced", "quantity")

GROUP = 10  # the paper's code deals rows to ten clients at a time
REDRAWS = 10_000
DRAWS = 3_000_000  # numbers drawn over all redraws, so that an error comes soon even with many clients
CELLS = 10_000_000  # clients times classes: each pair needs a share and a count
MIN_ROWS = 5  # fewer cannot be split 60/20/20 with a row in each part


@dataclass(frozen=True)
class Split:
    """One client's rows of the pool, each array in its own random order."""

    train: np.ndarray
    val: np.ndarray
    test: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        return np.concatenate([self.train, self.val, self.test])


def partition(
    labels: np.ndarray, clients: int, dirichlet: float, seed: int, kind: Partition, shards: int = 2
) -> list[Split]:
    """Deal all rows to clients, and split each client's rows."""
    if clients < 2:
        raise InputError(f"a federation needs at least 2 clients, not {clients}.")
    check_dirichlet(dirichlet)
    if len(labels) < MIN_ROWS * clients:
        raise InputError(
            f"{len(labels)} rows are too few for {clients} clients of at least {MIN_ROWS}; "
            f"use at most {len(labels) // MIN_ROWS} clients."
        )
    classes = int(labels.max()) + 1
    if clients * classes > CELLS:
        raise InputError(
            f"{classes:,} classes over {clients:,} clients are too many shares to draw; "
            f"use at most {CELLS // classes:,} clients."
        )
    deal: dict[str, Callable[[], list[np.ndarray]]] = {
        "balanced": lambda: _deal_balanced(labels, clients, dirichlet, seed),
        "unbalanced": lambda: _deal_unbalanced(labels, clients, dirichlet, seed),
        "quantity": lambda: _deal_quantities(len(labels), clients, dirichlet, seed),
        "shards": lambda: _deal_shards(labels, clients, shards, seed),
        "iid": lambda: _deal_evenly(len(labels), clients, seed),
    }
    return [split_rows(rows, seed, k) for k, rows in enumerate(deal[kind]())]


def split_rows(rows: np.ndarray, seed: int, client: int) -> Split:
    """A client's rows, split 60/20/20 at random."""
    return _split(rows, rng.key(seed, "split", client))


def say_partition(kind: Partition | None, dirichlet: float | None, shards: int | None) -> str:
    """How rows come to clients, in a few words."""
    match kind:
        case "quantity":
            return f"quantity skew Dirichlet({dirichlet:g})"
        case "shards":
            return f"{shards} shards each"
        case "iid":
            return "no skew"
        case "given":
            return "as the data is held"
        case _:
            return f"{kind or 'balanced'} Dirichlet({0.1 if dirichlet is None else dirichlet:g})"


def check_dirichlet(dirichlet: float) -> None:
    """Refuse values whose Gamma quantiles underflow or overflow; clients are alike, or hold one class, long before."""
    if not 1e-6 <= dirichlet <= 1e9:
        raise InputError(f"dirichlet must be a positive number from 1e-6 to 1e9, not {dirichlet}.")


def _deal_balanced(labels: np.ndarray, clients: int, dirichlet: float, seed: int) -> list[np.ndarray]:
    """As in the paper: deal to groups of ten clients, concatenate their rows, cut the result into equal parts.

    The cut moves each client's boundaries a little, so a part may end with the classes of the next client. Up to
    `clients - 1` rows are left over.
    """
    order = rng.shuffled(rng.key(seed, "partition"), len(labels))
    groups = -(-clients // GROUP)
    hands: list[np.ndarray] = []
    for g in range(groups):
        # of nearly equal size: the paper's code makes groups of 10, 10 and 1 of 21 clients; the 1 gets every class
        first, end = clients * g // groups, clients * (g + 1) // groups
        members = end - first
        rows = order[len(order) * first // clients : len(order) * end // clients]
        counts = _draw_counts(
            np.bincount(labels[rows], minlength=int(labels.max()) + 1),
            members,
            dirichlet,
            rng.key(seed, "partition", "balanced", first),
            least=len(rows) // (2 * members),
            capped=True,
        )
        hands += _deal(rows, labels, counts)
    joined, size = np.concatenate(hands), len(labels) // clients
    return [joined[k * size : (k + 1) * size] for k in range(clients)]


def _deal_unbalanced(labels: np.ndarray, clients: int, dirichlet: float, seed: int) -> list[np.ndarray]:
    """Raw Dirichlet sizes: each class is dealt to all clients in its own proportions."""
    order = rng.shuffled(rng.key(seed, "partition"), len(labels))
    key = rng.key(seed, "partition", "unbalanced")
    counts = _draw_counts(np.bincount(labels), clients, dirichlet, key, least=MIN_ROWS, capped=False)
    return _deal(order, labels, counts)


def _deal_quantities(rows: int, clients: int, dirichlet: float, seed: int) -> list[np.ndarray]:
    """Clients differ in how many rows they hold, by Dirichlet shares, not in their class mixes."""
    order, key = rng.shuffled(rng.key(seed, "partition"), rows), rng.key(seed, "partition", "quantity")
    counts = _draw_counts(np.array([rows]), clients, dirichlet, key, least=MIN_ROWS, capped=False)
    return np.split(order, np.cumsum(counts[0])[:-1])


def _deal_shards(labels: np.ndarray, clients: int, shards: int, seed: int) -> list[np.ndarray]:
    """The pathological split of FedAvg's paper: rows sorted by class, cut into shards, some to each client.

    A client holds rows of about `shards` classes.
    """
    if shards < 1 or clients * shards > len(labels) // MIN_ROWS:
        raise InputError(
            f"shards must be from 1 to {max(1, len(labels) // MIN_ROWS // clients)} for {clients} clients and "
            f"{len(labels):,} rows, but is {shards}."
        )
    order = rng.shuffled(rng.key(seed, "partition"), len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    count = clients * shards
    cuts = [len(order) * i // count for i in range(1, count)]
    parts, dealt = np.split(order, cuts), rng.shuffled(rng.key(seed, "partition", "shards"), count)
    return [np.concatenate([parts[i] for i in dealt[k * shards : (k + 1) * shards]]) for k in range(clients)]


def _deal_evenly(rows: int, clients: int, seed: int) -> list[np.ndarray]:
    """No skew: every client gets as many rows, drawn from all; up to `clients - 1` are left over."""
    order, size = rng.shuffled(rng.key(seed, "partition"), rows), rows // clients
    return [order[k * size : (k + 1) * size] for k in range(clients)]


def _draw_counts(
    totals: np.ndarray, members: int, dirichlet: float, key: rng.Key, *, least: int, capped: bool
) -> np.ndarray:
    """How many rows of each class each member gets [classes, members], redrawn until all have at least `least`."""
    rows, present = int(totals.sum()), np.flatnonzero(totals)
    attempts = max(1, min(REDRAWS, DRAWS // (len(present) * members)))
    for attempt in range(attempts):
        shares = draw_shares(len(present), members, dirichlet, key, attempt)
        counts = np.zeros((len(totals), members), dtype=np.int64)
        held = np.zeros(members, dtype=np.int64)
        for c, drawn in zip(present, shares, strict=True):
            # capped: a member that has reached the mean size gets no more, which keeps the sizes similar
            share, total = drawn * (held * members < rows) if capped else drawn, totals[c]
            if share.sum() == 0:
                break
            # to the nearest row: rounding 0.9999... down would give a row to a last member with no share
            cuts = np.floor(np.cumsum(share / share.sum())[:-1] * total + 0.5).astype(np.int64)
            counts[c] = np.diff(cuts, prepend=0, append=total)
            held += counts[c]
        else:
            if held.min() >= least:
                return counts
    raise InputError(
        f"no Dirichlet({dirichlet}) draw in {attempts:,} gave each of {members} clients at least {least} of "
        f"{rows:,} rows; raise dirichlet or lower the number of clients"
        f"{'' if capped else ', or use the balanced partition'}."
    )


def draw_shares(classes: int, members: int, dirichlet: float, key: rng.Key, attempt: int) -> np.ndarray:
    """Dirichlet proportions of each class over members [classes, members]: normalized Gamma quantiles."""
    from scipy.special import gammaincinv

    u = rng.uniform(key, np.array([attempt]), classes * members).reshape(classes, members)
    gamma: np.ndarray = np.asarray(gammaincinv(dirichlet, u))
    return np.asarray(gamma / np.maximum(gamma.sum(1, keepdims=True), np.finfo(float).tiny))


def _deal(rows: np.ndarray, labels: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Give each member its count of each class, in the order of `rows`."""
    hands: list[list[np.ndarray]] = [[] for _ in range(counts.shape[1])]
    by_class = rows[np.argsort(labels[rows], kind="stable")]  # one sort, instead of a search per class
    ends = np.cumsum(counts.sum(1))
    for c in np.flatnonzero(counts.any(1)):
        of_class = by_class[ends[c] - counts[c].sum() : ends[c]]
        for hand, part in zip(hands, np.split(of_class, np.cumsum(counts[c])[:-1]), strict=True):
            hand.append(part)
    return [np.concatenate(hand) for hand in hands]


def _split(rows: np.ndarray, key: rng.Key) -> Split:
    fifth = len(rows) // 5
    mixed = rows[rng.shuffled(key, len(rows))]
    return Split(train=mixed[2 * fifth :], val=mixed[fifth : 2 * fifth], test=mixed[:fifth])
