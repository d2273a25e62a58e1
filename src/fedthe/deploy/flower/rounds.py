"""The server's side of a round: judge what clients sent, aggregate what can be used, and say who was left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ... import tree
from ...engine.client import summarize
from ...engine.clients import Clients
from ...engine.conclude import conclude_mean
from ...engine.robust import Defense
from ...engine.server import LARGEST, Sent, Server, aggregate, find_infinite
from ...engine.visit import Progress
from ...errors import Failed, InputError, code_of_a_method
from ...methods.base import Rounds
from ...methods.predictor import Predictor
from ...text import clean, flatten
from ...tree import Tree
from ...types import Shard
from .member import Model
from .terms import Terms

MOST_SKIPPED = 1000  # faults that a checkpoint lists
SHARED, AVERAGES = "shared", "averages"  # what names of leaves begin with


class Reply(NamedTuple):
    """What a client sent for a round, or why nothing of it can be used."""

    client: int
    leaves: Mapping[str, Tensor]
    rows: float
    loss: float
    fault: str | None = None


class Judged(NamedTuple):
    good: list[Reply]  # by client
    faults: dict[int, str]  # by client
    mean: Mapping[str, Tensor] | None = None  # to aggregate in place of what each client sent


def start(terms: Terms) -> Progress:
    """The server before the first round. What clients keep is not here, only since which round they keep it."""
    training = terms.method.training
    with code_of_a_method():
        shared, averages, _ = training.start(training.net.init(terms.seed))
    return Progress(Server(0, shared), averages, Clients.start({}, terms.clients))


def name_leaves(shared: Tree, averages: Tree) -> dict[str, Tensor]:
    """What travels, by name: the same names in both directions."""
    return tree.flatten({SHARED: shared, AVERAGES: averages})


def take_leaves(leaves: Mapping[str, Tensor], round: int, state: int = 0, origin: str = "0") -> Model:
    both = tree.unflatten(leaves)
    return Model(round, both.get(SHARED, {}), both.get(AVERAGES, {}), state, origin)


def find_state(progress: Progress, client: int) -> int:
    """The last round that a client was part of; 0 if there is none."""
    return int(progress.clients.rounds[client]) + 1


def check_mean(terms: Terms, what: str) -> None:
    """Refuse methods and rules that look at single uploads, where there is only their mean."""
    rounds, who = terms.method.rounds, clean(terms.name)
    if terms.settings.defense != Defense():
        raise InputError(f"{what} works with the plain mean only; leave aggregation and clip out.")
    if type(rounds).aggregate is not Rounds.aggregate and not rounds.mean_is_enough:
        raise InputError(f"{what} works with methods whose server takes the mean; {who} needs each upload.")
    if expect_summary(terms):
        raise InputError(f"{what} does not cover the summary that clients of {who} send after the last round.")


def expect_summary(terms: Terms) -> dict[str, Tensor]:
    """What clients send after the last round, by name: what one with blank rows would send."""
    if type(terms.method.predictor).summarize is Predictor.summarize:
        return {}
    first, classes = start(terms), len(terms.classes)
    x = torch.zeros((classes, *terms.takes.shape), dtype=getattr(torch, terms.takes.dtype))
    labels, real = torch.arange(classes), torch.ones(classes, dtype=torch.bool)
    blank = Shard(x, labels, real, torch.ones(classes), x, labels, real)
    with code_of_a_method():
        return name_leaves(summarize(terms.method, first.server.shared | first.averages, blank), {})


def judge(progress: Progress, replies: Sequence[Reply], most_rows: float) -> Judged:
    """Which replies can be used; there is one of each client."""
    expected = name_leaves(progress.server.shared, progress.averages)
    good, faults = [], {}
    for reply in sorted(replies, key=lambda each: each.client):
        fault = reply.fault or find_fault(expected, reply, most_rows)
        if fault is None:
            good.append(reply)
        else:
            faults[reply.client] = flatten(fault, 300)  # a client chooses the names of what it sends
    return Judged(good, faults)


def say_rows(rows: float, most: float) -> str:
    return f"it claims {rows:,g} training rows; 1 to {most:,g} are accepted"


def find_fault(expected: Mapping[str, Tensor], reply: Reply, most_rows: float) -> str | None:
    """Why a reply cannot be used; None if it can."""
    if not (1 <= reply.rows <= most_rows and reply.rows == int(reply.rows)):
        return say_rows(reply.rows, most_rows)
    fault = tree.find_fault(expected, reply.leaves)
    if fault is not None:
        return f"the upload's {fault}"
    (fault,) = find_infinite([(f"the upload's {name}", leaf[None]) for name, leaf in reply.leaves.items()], 1)
    return fault or (None if abs(reply.loss) < LARGEST else f"the loss is {reply.loss:g}")


def finish_round(terms: Terms, progress: Progress, judged: Judged) -> Progress:
    """The server after a round of the clients that can be used, of which there is at least one."""
    good, server = judged.good, progress.server
    if judged.mean is None:
        stacked = tree.stack([tree.unflatten(reply.leaves) for reply in good])
        weights = torch.tensor([float(reply.rows) for reply in good])
    else:
        stacked, weights = tree.stack([tree.unflatten(judged.mean)]), torch.ones(1)
    mean = sum(reply.loss for reply in good) / len(good)
    skipped = [f"client {k} in round {server.round + 1}: {fault}; left out" for k, fault in judged.faults.items()]
    news = replace(server, losses=(*server.losses, mean), skipped=(*server.skipped, *skipped)[-MOST_SKIPPED:])
    sent = Sent(stacked.get(SHARED, {}), [stacked.get(AVERAGES, {})])
    rounds, defense = terms.method.rounds, terms.settings.defense
    shared, (averages,) = aggregate(rounds, defense, news, [progress.averages], sent, weights)
    clients = progress.clients.put([reply.client for reply in good], {}, server.round)
    return Progress(replace(news, round=server.round + 1, shared=shared), averages, clients)


def find_summary_fault(terms: Terms, expected: Mapping[str, Tensor], reply: Reply, most_rows: float) -> str | None:
    """Why a summary cannot be used; None if it can. Alone, it must be good for what is made of all."""
    if (fault := find_fault(expected, reply, most_rows)) is not None:
        return fault
    try:
        finish(terms, [(take_leaves(reply.leaves, 0).shared, 1)])
    except (Failed, InputError) as error:
        return str(error)
    return None


def finish(terms: Terms, summaries: Sequence[tuple[Tree, int]]) -> Tree:
    """What all clients deploy beside their own, from what each sent after the last round, and its rows."""
    sent = [(summary, rows) for summary, rows in summaries if summary]
    if not sent:
        return {}
    return conclude_mean(terms.method, tree.weighted_mean([summary for summary, _ in sent], [n for _, n in sent]))
