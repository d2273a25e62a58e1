"""What a report shows, as plain values, so that every format shows the same. `gather.py` fills it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BINS = 40  # of the weights of the personal head, from 0 to 1

Percents = Sequence[float | None]  # of client 0, 1, ...; None where a client has no such test


@dataclass(frozen=True)
class Score:
    """One method on one test: percent right."""

    mean: float  # over clients, then over seeds
    std: float | None  # of the mean over clients, over seeds; None for one seed
    worst: float  # the worst client's, the mean over seeds


@dataclass(frozen=True)
class Cost:
    """What an answer takes, per sample. None is not known."""

    ms: float | None
    forward: float | None
    backward: float | None
    peak_mib: float | None


@dataclass(frozen=True)
class Paper:
    """The paper's numbers, where the settings are those of one of its tables."""

    table: str
    title: str
    cells: Mapping[str, Mapping[str, tuple[float, float]]]  # by method and test, where both measured the same
    remarks: Sequence[str]  # what a reader must know before comparing


@dataclass(frozen=True)
class Clients:
    """The clients of one seed. Those of another seed hold other rows: client 3 of two seeds has nothing in common."""

    mix: Sequence[Sequence[int]]  # [clients][classes] rows; [] where nobody knows
    scores: Mapping[str, Mapping[str, Percents]]  # by method and test
    heads: Mapping[str, Mapping[str, Mapping[str, Percents]]]  # by method, test and "global" or "personal"


@dataclass(frozen=True)
class Weights:
    """How much the personal head counts (1 - e), over all samples of a test."""

    shares: Sequence[float]  # [BINS] of samples, their sum is 1
    mean: float


@dataclass(frozen=True)
class Losses:
    """A federated training, and its mean local loss after every round."""

    methods: Sequence[str]
    seed: int
    losses: Sequence[float]


@dataclass(frozen=True)
class Curve:
    rounds: Sequence[int]
    mean: Sequence[float]
    std: Sequence[float | None]  # over seeds; None for one seed


@dataclass(frozen=True)
class Example:
    """A sample, and who said what. Classes are indices."""

    test: str
    client: int
    seed: int
    image: str  # a PNG as a data: URI
    label: int
    answers: Mapping[str, int]  # by method
    heads: Mapping[str, Mapping[str, int]]  # by method: "global" and "personal"
    weights: Mapping[str, float]  # by method: of the personal head


@dataclass(frozen=True)
class Shown:
    """One run, or one table of the paper."""

    name: str
    sentence: str  # what ran
    methods: Mapping[str, str]  # by id, in order: what they are called in front of people
    tests: Mapping[str, str]
    seeds: Sequence[int]
    scores: Mapping[str, Mapping[str, Score]]  # by method and test; what failed is not there
    costs: Mapping[str, Cost]
    paper: Paper | None
    classes: Sequence[str]  # names, of users; [] where nobody knows
    clients: Mapping[str, Clients]  # by seed
    weights: Mapping[str, Mapping[str, Weights]]  # by method and test
    losses: Sequence[Losses]
    curves: Mapping[str, Mapping[str, Curve]]  # by method and test: percent right after so many rounds
    examples: Sequence[Example]
    notes: Sequence[str]
    failures: Mapping[str, str]
    provenance: Mapping[str, Any]  # command, seconds, environment, config, manifests, trainings


@dataclass(frozen=True)
class Page:
    title: str
    shown: Sequence[Shown]
    figures: Sequence[Mapping[str, Any]] = field(default=())  # records of `fedthe figure`
    notes: Sequence[str] = field(default=())  # what is left out
