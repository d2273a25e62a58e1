"""How clients did: a row of results for every stream, and columns with a value for every sample of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..data.shifts import NATURAL, ORIGINS, Stream
from ..engine.evaluate import Scores

GROUPS = {  # of clients: what they did
    "trained": "took part in training",
    "joined": "joined after training, with their labels",
    "unlabeled": "joined after training, without labels",
}
MOST_NAMED = 20  # clients of a group that are listed


@dataclass(frozen=True)
class ClientScore:
    """How one client did on one test distribution: a row of results.jsonl."""

    method: str
    seed: int
    test: str
    client: int
    samples: int  # of classes that clients hold
    right: int
    accuracy: float  # percent
    ms_per_sample: float
    nll: float | None = None  # negative log-likelihood in nats, mean over samples; None in files of earlier versions
    unknown: int = 0  # further samples, of a class that no client holds
    auroc: float | None = None  # percent: how well the probability of the answer tells those apart; None: no such
    group: str = "trained"  # one of GROUPS

    @property
    def place(self) -> str:
        """Where the columns of its samples are filed."""
        return f"{'unlabeled:' if self.group == 'unlabeled' else ''}{self.test}/{self.client}"


@dataclass(frozen=True)
class Failure:
    """A method without an answer on a seed, and why."""

    method: str
    seed: int
    why: str
    rounds: int | None = None  # after which it failed, where that is not at the end

    @property
    def who(self) -> str:
        after = "" if self.rounds is None else f", after {self.rounds} rounds"
        return f"{self.method}, seed {self.seed}{after}"


def make_row(method: str, seed: int, test: str, client: int, scores: Scores, group: str) -> ClientScore:
    return ClientScore(
        method,
        seed,
        test,
        client,
        samples=int(scores.known.sum()),
        right=int(scores.right.sum()),
        accuracy=100 * scores.accuracy,
        ms_per_sample=1000 * scores.seconds / len(scores.known),
        nll=scores.nll,
        unknown=int((~scores.known).sum()),
        auroc=None if scores.auroc is None else 100 * scores.auroc,
        group=group,
    )


def make_columns(scores: Scores, labels: np.ndarray, stream: Stream, shifts: Sequence[str]) -> dict[str, np.ndarray]:
    """What is filed of every sample, beside what the predictor gives; `shifts` are the natural ones of the data.

    Probabilities of 32 bits are enough, except to rank the samples of an open set: most of them may be 1 there.
    """
    return {
        "right": scores.right,
        "label": labels.astype(np.int32),
        "answer": scores.classes.astype(np.int32),
        "probability": np.exp(scores.log_probability).astype(np.float32),
        "truth": np.exp(scores.log_truth).astype(np.float32),
        **({} if scores.known.all() else {"log_probability": scores.log_probability}),
        **{column: getattr(stream, column) for column in ("segment", "origin", "kind", "severity")},
        **_name_shifts(stream, shifts),
    }


def find_group(rows: Sequence[ClientScore]) -> str:
    """The group of clients that rows are of."""
    return rows[0].group if rows else "trained"


def say_clients(rows: Sequence[ClientScore], count: int) -> str:
    """The group of clients that rows are of, and who they are, of so many: for runs in which some join late."""
    listed = {seed: ", ".join(map(str, sorted(of))) for seed, of in _list_by_seed(rows).items()}
    alike = len(set(listed.values())) == 1
    named = listed[rows[0].seed] if alike else "; ".join(f"seed {seed}: {each}" for seed, each in listed.items())
    most = count_clients(rows)
    return f"{most} of {count} clients{f' ({named})' if most <= MOST_NAMED else ''}, which {GROUPS[find_group(rows)]}"


def count_clients(rows: Sequence[ClientScore]) -> int:
    """Of a seed; of that with most clients, should some lack all tests."""
    return max(map(len, _list_by_seed(rows).values()))


def _list_by_seed(rows: Sequence[ClientScore]) -> dict[int, set[int]]:
    seeds: dict[int, set[int]] = {}
    for row in rows:
        seeds.setdefault(row.seed, set()).add(row.client)
    return seeds


def _name_shifts(stream: Stream, shifts: Sequence[str]) -> dict[str, np.ndarray]:
    """The column `shift`, where the origin alone does not tell natural shifts apart."""
    natural = stream.origin == ORIGINS.index("natural")
    if len(shifts) < 2 or not natural.any():
        return {}
    numbers = np.where(natural, stream.source.astype(np.int64) - NATURAL + 1, 0)
    return {"shift": np.array(["", *shifts])[numbers]}
