"""Runs on streams that some clients, or all, do not have, and on several natural shifts."""

import numpy as np
import pytest
import torch

import fedthe
import oracles_timeline as oracle
from fedthe.config import make_config
from fedthe.data.plan import Settings, build
from fedthe.experiment.streams import note_lacking
from fedthe.timeline import RECOVERED
from helpers import fails


class Small(torch.nn.Module):
    classes = 3

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(4, 8)
        self.fc = torch.nn.Linear(8, self.classes)

    def forward(self, x):
        return self.fc(self.body(x).relu())


class OfTwo(Small):
    classes = 2


def make_rows(count, seed=0, pictures=False):
    draws = np.random.default_rng(seed)
    y = np.arange(count) % 3
    if pictures:
        return draws.integers(0, 256, (count, 16, 16, 3), np.uint8), y
    return (draws.normal(size=(count, 4)) + y[:, None]).astype(np.float32), y


def make_clients(tests, pictures=False):
    """Clients with as many test rows each."""
    return [
        {part: make_rows(count, k, pictures) for part, count in (("train", 12), ("val", 6), ("test", size))}
        for k, size in enumerate(tests)
    ]


def run(tmp_path, clients, shifts=None, net=None, **settings):
    federation = fedthe.Federation.from_clients(clients, tests=shifts)
    fixed = {"rounds": 1, "local_epochs": 1, "methods": ["fedavg"], "engine": "loop", "device": "cpu", "threads": 1}
    net = net or fedthe.wrap_module(Small, head="fc")
    return fedthe.run(federation=federation, net=net, out=tmp_path / "run", **(fixed | settings))


def test_a_test_that_nobody_has_is_refused_before_training(tmp_path):
    def refused(clients, *words, **settings):
        fails(lambda: run(tmp_path, clients, **settings), *words)
        assert not (tmp_path / "run").exists()

    some, unknown = make_clients([12, 12, 12]), {"unknown": "2", "net": fedthe.wrap_module(OfTwo, head="fc")}
    only = {"streams": {"mine": "unknown 3"}, "tests": ["mine"]}
    refused(some, "the test mine has only samples of the unknown class; add a piece of own", **only, **unknown)
    first = {"streams": {"mine": "unknown 3, own 3"}, "samples": 2}
    refused(some, "of the unknown class among the first 2; set samples higher", **first, **unknown)
    tiny = make_clients([1, 1, 1], pictures=True)
    refused(
        tiny, "no client has the test mixture, for every client has too few test rows", tests=["mixture"], net="cnn"
    )
    (unseen,) = build_given(some, unseen=0.3).unseen
    uneven = make_clients([40 if k == unseen else 6 for k in range(3)])
    joins = {"unseen": 0.3, "streams": {"mine": "own 20"}, "tests": ["original", "mine"]}
    refused(uneven, "of seed 0, only clients that join after training have the test mine", **joins)


def build_given(clients, **settings):
    dataset = fedthe.Federation.from_clients(clients).dataset
    return build(dataset, Settings(len(clients), partition="given", **settings))


def test_clients_that_are_not_asked_are_named():
    federation = build_given(make_clients([12] * 6), unknown="2", tests=("open_set",))
    gone = [
        str(k) for k, stream in enumerate(federation.tests["open_set"]) if federation.labels(stream.first(1))[0] == -1
    ]
    assert 0 < len(gone) < 6
    said = f"client {', '.join(gone)}, which has only samples of the unknown class among the first 1"
    (note,) = note_lacking(make_config({"samples": 1}), federation, federation.tests)
    assert note == f"open_set: no such test for {said}"
    assert note_lacking(make_config({}), federation, federation.tests) == []
    few = build_given(make_clients([12, 1, 12], pictures=True))
    notes = note_lacking(make_config({}), few, few.tests)
    assert notes == ["mixture: no such test for client 1, for it has too few test rows"]


@pytest.mark.parametrize("names", [("night", "fog"), ("night",)])
def test_natural_shifts_are_phases_of_their_own(tmp_path, names):
    shifts = {name: [make_rows(30, 10 + i) for _ in range(2)] for i, name in enumerate(names)}
    text = ", ".join(f"{name} 10, own 4" for name in (*names, names[0]))
    results = run(tmp_path, make_clients([20, 20]), shifts, streams={"mine": text}, tests=["mine"])
    table = {name: np.asarray(values) for name, values in results.timeline("mine").items()}
    phases = {name.removeprefix("accuracy ") for name in table if name.startswith("accuracy ")}
    assert phases == {"own", *(names if len(names) > 1 else ["natural"])}
    given = {name: np.asarray(values) for name, values in results.samples(test="mine").items()}
    assert ("shift" in given) == (len(names) > 1)
    lost = []
    for client in (0, 1):
        here = given["client"] == client
        right = [given["right"][here & (given["segment"] == number)] for number in range(2 * len(names) + 2)]
        lost.append(right[0].mean() - right[2 * len(names)].mean())  # without the other shift
    assert table["forgetting"] == pytest.approx(100 * np.mean(lost))
    for name in names if len(names) > 1 else ():
        assert table[f"accuracy {name}"] == pytest.approx(100 * given["right"][given["shift"] == name].mean())


def test_segments_of_several_natural_shifts_are_mixed(tmp_path):
    shifts = {name: [make_rows(40, 10 + i) for _ in range(2)] for i, name in enumerate(("night", "fog"))}
    streams = {"mine": "natural 20, own 5, natural 20, own 5, natural 20"}
    results = run(tmp_path, make_clients([20, 20]), shifts, streams=streams, tests=["mine"])
    table = {name: np.asarray(values) for name, values in results.timeline("mine").items()}
    given = {name: np.asarray(values) for name, values in results.samples(test="mine").items()}
    phase = np.where(given["shift"] == "", "own", given["shift"])
    clients = [
        tuple(each[given["client"] == k].tolist() for each in (given["right"], given["segment"], phase)) for k in (0, 1)
    ]
    recovery, steady, lost = oracle.recovery(clients, "mixed", RECOVERED, 0.05)
    assert table["accuracy mixed"] == pytest.approx(100 * np.mean([oracle.accuracy_of(*c, "mixed") for c in clients]))
    assert table["steady mixed"] == pytest.approx(100 * steady)
    assert table["lost mixed"] == pytest.approx(lost)
    assert recovery is not None
    assert table["recovery mixed"] == pytest.approx([recovery])
    assert table["forgetting"] == pytest.approx(100 * np.mean([oracle.forgetting(*c) for c in clients]))
