"""Clients that join after training, in a report: who they are, and their scores."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..experiment.results import Results
from ..experiment.scores import find_group, say_clients
from ..experiment.tables import list_clients
from ..statistics import deviation, mean_of_worst
from .data import Percents, Score


def say_group(results: Results) -> str:
    """A sentence on the clients that numbers are of; "" for a run in which none joins late."""
    if not results.config.unseen or not results.rows:
        return ""
    return f" The numbers are of {say_clients(results.rows, results.config.client_count)}."


def call_group(results: Results) -> str:
    """What follows the call that repeats the run."""
    group = find_group(results.rows)
    return "" if group == "trained" else f".group({group!r})"


def gather_groups(results: Results) -> dict[str, dict[str, dict[str, Score]]]:
    """The scores of the other groups by method and test, under who they are; none in the report of such a group."""
    if find_group(results.rows) != "trained":
        return {}
    others = map(results.group, results.groups[1:])
    return {
        say_clients(each.rows, results.config.client_count): {
            method: {test: sum_up(seeds) for test, seeds in tests.items()}
            for method, tests in list_clients(each.rows).items()
        }
        for each in others
    }


def sum_up(seeds: Mapping[str, Percents]) -> Score:
    """The scores of clients by seed as one."""
    known = [[each for each in percents if each is not None] for percents in seeds.values()]
    means = [float(np.mean(percents)) for percents in known]
    worst, tenth = (float(np.mean([reduce(each) for each in known])) for reduce in (min, mean_of_worst))
    return Score(float(np.mean(means)), deviation(means), worst, tenth)
