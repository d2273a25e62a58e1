"""What a report shows, as plain values: all formats read only this. `gather.py` fills it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..experiment.timelines import StreamCurves, StreamScore

BINS = 40  # of the histogram of the personal head's weight, from 0 to 1

Percents = Sequence[float | None]  # accuracy of client 0, 1, ...; None if the client lacks the test


@dataclass(frozen=True)
class Score:
    """The accuracy (%) of one method on one test."""

    mean: float  # over clients, then over seeds
    std: float | None  # over seeds (n - 1), of the mean over clients; None for one seed
    worst: float  # the worst client's, mean over seeds
    # None where unknown, as some are for records of tables and files of earlier versions
    worst_tenth: float | None = None  # mean over the worst tenth of the clients, then over seeds
    weighted: float | None = None  # by samples, mean over seeds
    nll: float | None = None  # negative log-likelihood in nats, mean over clients, then over seeds
    ece: float | None = None  # expected calibration error (%), mean over seeds


@dataclass(frozen=True)
class Cost:
    """The cost of an answer, per sample; None if unknown."""

    ms: float | None = None
    forward: float | None = None  # passes through the network
    backward: float | None = None


@dataclass(frozen=True)
class Paper:
    """The paper's numbers for a run with the settings of one of its tables."""

    table: str
    title: str
    cells: Mapping[str, Mapping[str, tuple[float, float]]]  # mean and std by method and test, on the same data
    remarks: Sequence[str]  # what to know before comparing


@dataclass(frozen=True)
class SeedClients:
    """The clients of one seed. Seeds share no clients: client 3 of another seed holds other rows."""

    mix: Sequence[Sequence[int]]  # [clients][classes] rows; [] if unknown
    scores: Mapping[str, Mapping[str, Percents]]  # by method and test
    heads: Mapping[str, Mapping[str, Mapping[str, Percents]]]  # by method, test and "global" or "personal"


@dataclass(frozen=True)
class Weights:
    """The weight of the personal head (1 - e) over all samples of a test."""

    shares: Sequence[float]  # [BINS] of the samples; their sum is 1
    mean: float


@dataclass(frozen=True)
class Losses:
    """The mean local loss of a federated training after each round."""

    methods: Sequence[str]
    seed: int
    losses: Sequence[float]


@dataclass(frozen=True)
class Curve:
    rounds: Sequence[int]
    mean: Sequence[float]
    std: Sequence[float | None]  # over seeds; None for one seed


@dataclass(frozen=True)
class Timeline:
    """A test whose streams change in time."""

    scores: Mapping[str, StreamScore]  # by method
    curves: StreamCurves | None = None  # a record of a table has none


@dataclass(frozen=True)
class Example:
    """A sample and its predictions. Classes are indices."""

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
    methods: Mapping[str, str]  # display names by id, in order
    tests: Mapping[str, str]  # likewise
    seeds: Sequence[int]
    scores: Mapping[str, Mapping[str, Score]]  # by method and test; without those that failed
    costs: Mapping[str, Cost]
    paper: Paper | None
    clients: Mapping[str, SeedClients]  # by seed
    notes: Sequence[str]
    failures: Mapping[str, str]
    provenance: Mapping[str, Any]  # command, seconds, environment, config, manifests, trainings
    short: Mapping[str, str] = field(default_factory=dict)  # by test: a sentence on streams of few samples
    streams: Mapping[str, Timeline] = field(default_factory=dict)  # by test; only those that change in time
    # a record of a table has none of these
    groups: Mapping[str, Mapping[str, Mapping[str, Score]]] = field(default_factory=dict)  # of clients that join late
    classes: Sequence[str] = ()  # names
    weights: Mapping[str, Mapping[str, Weights]] = field(default_factory=dict)  # by method and test
    losses: Sequence[Losses] = ()
    curves: Mapping[str, Mapping[str, Curve]] = field(default_factory=dict)  # accuracy by round, by method and test
    examples: Sequence[Example] = ()


@dataclass(frozen=True)
class Page:
    title: str
    shown: Sequence[Shown]
    figures: Sequence[Mapping[str, Any]] = ()  # records of `fedthe figure`
    notes: Sequence[str] = ()  # what is left out
