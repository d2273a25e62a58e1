"""After the last round, clients may send something once more, from which the server makes what all of them deploy."""

from __future__ import annotations

import torch

from .. import tree
from ..errors import Failed, code_of_a_method
from ..methods.base import Method
from ..methods.checks import WrongMethod, check_tree, code_of
from ..tree import Tree
from .client import summarize
from .visit import Progress, Run


def conclude(method: Method, run: Run, progress: Progress) -> Tree:
    """What every client deploys beside its own; mostly nothing."""
    shared, rows = progress.server.shared | progress.averages, sum(run.sizes[k] for k in run.trained)
    with code_of_a_method():
        mean: Tree = {}
        for k in run.trained:  # one by one: what many clients send may not fit in memory
            sent = _scale(summarize(method, shared, run.shards[k]), run.sizes[k] / rows)
            if not sent:
                return {}
            mean = tree.map_leaves(torch.add, mean, sent) if mean else sent
    return conclude_mean(method, mean)


def conclude_mean(method: Method, mean: Tree) -> Tree:
    """The same from the mean of what clients sent, weighted by their rows."""
    part = method.predictor
    who = type(part).__name__
    with code_of_a_method():
        with code_of(part, "conclude", mean=mean), torch.no_grad():
            concluded = part.conclude(method, mean)
        check_tree(f"what {who}.conclude returns", concluded)
    if not all(leaf.isfinite().all() for leaf in tree.flatten(concluded).values()):
        raise Failed(f"{who}.conclude: what it makes of the clients' mean is not finite")
    return concluded


def deploy_beside(method: Method, states: Tree, concluded: Tree) -> Tree:
    """The states of clients [clients, ...] with what all of them deploy."""
    if clash := states.keys() & concluded.keys():
        who = type(method.predictor).__name__
        raise WrongMethod(f"{who}.conclude returns {min(clash)!r}, which another part of the method uses; rename it.")
    clients = len(next(iter(tree.flatten(states).values()))) if concluded else 0
    return states | tree.map_leaves(lambda leaf: leaf.expand(clients, *leaf.shape), concluded)


def _scale(sent: Tree, share: float) -> Tree:
    return tree.map_leaves(lambda leaf: share * leaf, sent)
