"""Tables of scores, by method and test: one number per seed, from its clients' scores, then the mean over seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..statistics import calibration_error, deviation, mean_of_worst

if TYPE_CHECKING:
    from .results import ClientScore

Cells = dict[str, dict[str, tuple[float, float | None]]]  # by method and test: mean and standard deviation
Means = dict[str, dict[str, float]]  # by method and test
Samples = Mapping[str, np.ndarray]  # of one method and seed: by "test/client/column"

SHORT = 20  # samples: the accuracy of a client on fewer is coarse


def say_messages(trainings: Iterable[Mapping[str, Any]]) -> str | None:
    """What a client receives and sends in a round, over all trainings; None if unknown."""
    sizes = sorted(each["message_bytes"] / 1e6 for each in trainings if "message_bytes" in each)
    if not sizes:
        return None
    ends = list(dict.fromkeys(f"{size:.3g}" for size in (sizes[0], sizes[-1])))
    return f"{' to '.join(ends)} MB per round and client, each way"


def score_rows(rows: Iterable[ClientScore]) -> Cells:
    """The mean accuracy over clients and seeds, and the standard deviation over seeds."""
    means = _reduce(rows, lambda clients: float(np.mean([row.accuracy for row in clients])))
    return {
        method: {test: (float(np.mean(seeds)), deviation(seeds)) for test, seeds in row.items()}
        for method, row in means.items()
    }


def find_worst(rows: Iterable[ClientScore]) -> Means:
    """The accuracy of the worst client."""
    return _average(rows, lambda clients: min(row.accuracy for row in clients))


def find_worst_tenth(rows: Iterable[ClientScore]) -> Means:
    """The mean accuracy of the worst tenth of the clients, at least one."""
    return _average(rows, lambda clients: mean_of_worst([row.accuracy for row in clients]))


def weigh_by_samples(rows: Iterable[ClientScore]) -> Means:
    """The share of all samples that are answered correctly: every sample counts the same, not every client."""
    return _average(rows, lambda clients: 100 * sum(r.right for r in clients) / sum(r.samples for r in clients))


def average_nll(rows: Iterable[ClientScore]) -> Means:
    """The negative log-likelihood in nats, mean over clients; without methods whose files do not have it."""
    known = [row for row in rows if row.nll is not None]
    return _average(known, lambda clients: float(np.mean([row.nll for row in clients])))


def average_auroc(rows: Iterable[ClientScore]) -> Means:
    """The area under the ROC curve of known against unknown classes in percent, mean over clients."""
    known = [row for row in rows if row.auroc is not None]
    return _average(known, lambda clients: float(np.mean([row.auroc for row in clients])))


def find_calibration_errors(samples: Mapping[tuple[str, int], Samples]) -> Means:
    """The expected calibration error in percent, over all samples of a test; from samples by method and seed.

    Samples of a class that no client holds are left out: no answer to them is right.

    A method that lacks the samples of a seed is left out: a mean over the other seeds would be another number.
    """
    found: dict[str, dict[str, list[float]]] = {}
    missing = {who for (who, _), kept in samples.items() if not any(n.endswith("/probability") for n in kept)}
    for method, kept in ((method, kept) for (method, _), kept in samples.items() if method not in missing):
        tests: dict[str, list[str]] = {}
        for name in kept:
            test, client, column = name.rsplit("/", 2)
            if column == "probability" and f"{test}/{client}/right" in kept:
                tests.setdefault(test, []).append(f"{test}/{client}")
        for test, places in tests.items():
            probabilities, right = (
                np.concatenate([kept[f"{place}/{name}"][_is_known(kept, place)] for place in places])
                for name in ("probability", "right")
            )
            found.setdefault(method, {}).setdefault(test, []).append(calibration_error(probabilities, right))
    return {method: {test: float(np.mean(seeds)) for test, seeds in row.items()} for method, row in found.items()}


def _is_known(kept: Samples, place: str) -> np.ndarray:
    """Which samples of a stream are of classes that clients hold."""
    right = kept[f"{place}/right"]
    return np.asarray(kept.get(f"{place}/label", np.zeros(len(right))) >= 0)


def find_short_streams(rows: Iterable[ClientScore]) -> dict[str, str]:
    """By test, a sentence on its streams of fewer than 20 samples; nothing of a test that has none."""
    sizes: dict[str, dict[tuple[int, int], int]] = {}
    for row in rows:
        sizes.setdefault(row.test, {})[row.seed, row.client] = row.samples
    short = {test: [size for size in of.values() if size < SHORT] for test, of in sizes.items()}
    return {
        test: f"{len(few)} of {len(sizes[test])} streams have fewer than {SHORT} samples, the shortest {min(few)}"
        for test, few in short.items()
        if few
    }


def list_clients(rows: Iterable[ClientScore]) -> dict[str, dict[str, dict[str, list[float | None]]]]:
    """Accuracy of client 0, 1, ... by method, test and seed; None if a client lacks the test."""
    rows = list(rows)
    clients = 1 + max((row.client for row in rows), default=-1)
    listed: dict[str, dict[str, dict[str, list[float | None]]]] = {}
    for row in rows:
        seeds = listed.setdefault(row.method, {}).setdefault(row.test, {})
        seeds.setdefault(str(row.seed), [None] * clients)[row.client] = round(row.accuracy, 3)
    return listed


def _average(rows: Iterable[ClientScore], of_clients: Callable[[list[ClientScore]], float]) -> Means:
    reduced = _reduce(rows, of_clients)
    return {method: {test: float(np.mean(seeds)) for test, seeds in row.items()} for method, row in reduced.items()}


def _reduce(
    rows: Iterable[ClientScore], of_clients: Callable[[list[ClientScore]], float]
) -> dict[str, dict[str, list[float]]]:
    """By method and test: for each seed, the scores of its clients reduced to one number."""
    cells: dict[str, dict[str, dict[int, list[ClientScore]]]] = {}
    for row in rows:
        cells.setdefault(row.method, {}).setdefault(row.test, {}).setdefault(row.seed, []).append(row)
    return {
        method: {test: [of_clients(clients) for clients in seeds.values()] for test, seeds in of.items()}
        for method, of in cells.items()
    }
