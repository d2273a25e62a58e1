"""The bench: floors as counted by hand, comparison and files. No test looks at the clock."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedthe import store, tree
from fedthe.bench.lab import AUTHORS, Lab, Measured, Task, Timed, make_questions
from fedthe.bench.machine import Ceilings, Machine, join_ceilings
from fedthe.bench.measure import make_line, measure
from fedthe.bench.need import Need, find_floor, need_of_answer, need_of_copy, need_of_round
from fedthe.bench.result import Bench, Line, compare, from_dict, list_differences, read_bench
from fedthe.bench.text import as_text, format_time
from fedthe.bench.workload import FULL, SMALL, SMALL_QUICK, Sizes, draw_params, make_federation, pick_sizes
from fedthe.engine.visit import Training
from fedthe.errors import InputError
from fedthe.methods import METHODS, compose
from fedthe.nets import CNN, NETS
from fedthe.progress.events import listening

# multiplications and additions of one image, forward, in one layer of the CNN
CONV1, CONV2, FC, HEAD = 28 * 28 * 75 * 32, 10 * 10 * 800 * 64, 102_400, 640
BODY = CONV1 + CONV2 + FC
PARAMS = 75 * 32 + 800 * 64 + FC + HEAD

TINY = Sizes(
    runs=2,
    clients=2,
    train=12,
    large_train=6,
    streams=2,
    samples=4,
    tuned=2,
    corrupted=15,
    repeats=1,
    matmul=64,
    copied=2**10,
)
ROWS = (
    "round, 6 runs together",
    "round, 1 run",
    "round by engine=stack",
    "round, ResNet20-GN",
    "round, CCT4",
    "FedTHE, per sample",
    "FedTHE, regime filter, per sample",
    "FedTHE+, per sample",
    "MEMO (P), per sample",
    "TTT, per sample",
    "corrupting 10,000",
)


@pytest.fixture(scope="module")
def measured():
    return measure(device="cpu", sizes=TINY)


def make_bench(*values, names=("a", "b", "c"), **more):
    rows = tuple(Line(name, "s", value) for name, value in zip(names, values, strict=False))
    machine = Machine("CPU", "cpu", "2.6", 2)
    return replace(Bench(machine, "loop", "float32", False, Ceilings(1e9, "matrix products", 1e9), rows, 1.0), **more)


# floors


def test_a_round_needs_what_is_counted_by_hand():
    settings = Training(local_epochs=5, personal_epochs=1, batch=4)
    need = need_of_round(compose(CNN(10), METHODS["fedthe"]).training, settings, clients=3, train=10)
    forward = BODY + HEAD
    # backward: each layer's weights and its input, but for the first layer's input, which are pixels
    local = 2 * (forward + 2 * forward - CONV1)
    personal = 2 * (forward + HEAD)  # the body is given, so only the head's weights have a gradient
    assert need.flops == 3 * 10 * (5 * local + personal + 2 * BODY)
    steps, images = 3, 7 * 10 * 32 * 32 * 3  # 10 images make 3 batches of 4; seven passes over them
    weights = 4 * (5 * steps * 2 * PARAMS + steps * (PARAMS + HEAD) + PARAMS - HEAD)
    assert need.bytes == 3 * (weights + images)


def test_an_answer_needs_what_is_counted_by_hand():
    plain = need_of_answer(compose(CNN(10), METHODS["fedthe"]), samples_of_client=100)
    assert plain.flops == 2 * (BODY + 2 * HEAD)
    deployed = PARAMS + HEAD + 2 * 64  # a second head, and two descriptors
    assert plain.bytes == 32 * 32 * 3 + 4 * deployed / 100
    tuned = need_of_answer(compose(CNN(10), METHODS["fedthe_plus"]), samples_of_client=100)
    forward = BODY + 2 * HEAD
    assert tuned.flops == plain.flops + 2 * (3 * 16 * (3 * forward - CONV1) + forward)


def test_the_floor_is_the_slower_of_arithmetic_and_bytes():
    ceilings = Ceilings(100.0, "matrix products", 10.0)
    assert find_floor(Need(200, 10), ceilings) == (2.0, "arithmetic")
    assert find_floor(Need(200, 50), ceilings) == (5.0, "bytes")
    task = Task("row", "ms", lambda: None)
    timed = Timed(9.0, (6.0, 5.0, 7.0), {})
    line = make_line(task, Measured(timed.median, timed, Need(200, 50), "less"), ceilings, authors=60_000.0)
    assert (line.value, line.floor, line.floor_kind, line.floor_ratio) == (6000, 5000, "bytes", 1.2)
    assert (line.cold, line.scaled_from, line.authors) == (9.0, "less", 60_000.0)
    assert line.details["seconds"] == [6.0, 5.0, 7.0]
    assert need_of_copy(10) == Need(0, 2 * 10 * 3072)


def test_ceilings_are_the_best_that_was_seen():
    slow, fast = Ceilings(1.0, "one", 5.0), Ceilings(2.0, "other", 4.0)
    assert join_ceilings(slow, fast) == join_ceilings(fast, slow) == Ceilings(2.0, "other", 5.0)


# measuring


def test_every_row_is_measured_and_scaled_to_the_full_size(measured):
    assert tuple(line.name for line in measured.rows) == ROWS
    for line in measured.rows:
        assert line.failed is None, line
        assert line.value > 0
        assert line.floor_ratio == pytest.approx(line.value / line.floor)
        assert line.cold > 0
        assert line.authors is None  # no H200 here
    rows = {line.name: line for line in measured.rows}
    alone, together = rows["round, 1 run"], rows["round, 6 runs together"]
    assert alone.scaled_from == "2 clients x 12 images, 6 epochs"
    assert alone.value == pytest.approx(alone.details["seconds"][0] * 20 * 1500 / (2 * 12))
    assert together.value == alone.value  # the loop trains one run after another
    assert all(np.isfinite(alone.details["losses"]))
    assert rows["FedTHE, per sample"].scaled_from == "16 samples"
    assert rows["FedTHE, per sample"].details["engine_ms"] > 0
    assert rows["FedTHE+, per sample"].scaled_from == "4 samples"
    assert rows["corrupting 10,000"].scaled_from == "15 images"
    assert (measured.engine, measured.precision, measured.machine.slug) == ("loop", "float32", "cpu")


def test_a_stack_trains_runs_together_and_only_some_rows_may_be_asked():
    names = ["round, 6 runs together", "round by engine=loop"]
    heard = []
    with listening(heard.append):
        found = measure("stack", "cpu", quick=True, only=names, sizes=TINY)
    assert [line.name for line in found.rows] == names
    assert [line.details["runs"] for line in found.rows] == [2, 1]
    assert [event.remark for event in heard if event.remark] == [
        "what the machine can do",
        *names,
        "what the machine can do",
    ]
    assert all(event.what == "measuring" for event in heard)


def test_a_row_that_fails_says_why_and_the_others_go_on(monkeypatch):
    def fail(self):
        raise torch.OutOfMemoryError("CUDA out of memory.\nSome advice.")

    monkeypatch.setattr(Lab, "time_corruption", fail)
    names = ["FedTHE, per sample", "corrupting 10,000"]
    found = measure(device="cpu", only=names, sizes=TINY)
    answered, corrupted = found.rows
    assert answered.value > 0
    assert (corrupted.value, corrupted.failed) == (None, "OutOfMemoryError: CUDA out of memory.")
    said = as_text(found, compare(found, found))
    assert "failed: corrupting 10,000: OutOfMemoryError: CUDA out of memory." in said
    assert from_dict(json.loads(json.dumps(found.as_dict()))) == found


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"kind": "stak"}, "did you mean stack"),
        ({"precision": "half"}, "choose from auto, float32, bfloat16"),
        ({"device": "tpu"}, "device must be"),
        ({"only": ["round, 2 runs"]}, "did you mean round, 1 run"),
    ],
)
def test_bad_input_is_refused(given, says):
    with pytest.raises(InputError, match=says):
        measure(**{"device": "cpu", "sizes": TINY} | given)


def test_sizes_are_full_where_that_takes_seconds():
    assert pick_sizes(on_gpu=True, stacked=True, quick=False) == FULL
    assert pick_sizes(on_gpu=True, stacked=True, quick=True) == replace(FULL, repeats=1)
    assert pick_sizes(on_gpu=False, stacked=True, quick=False) == SMALL
    assert pick_sizes(on_gpu=True, stacked=False, quick=True).clients == SMALL_QUICK.clients
    assert pick_sizes(on_gpu=True, stacked=False, quick=True).matmul == FULL.matmul


def test_the_made_federation_is_that_of_the_paper_in_shape():
    federation = make_federation(clients=3, train=30)
    pool = federation.pool
    assert pool.x.shape == (3 * 50, 32, 32, 3)
    assert [(len(s.train), len(s.val), len(s.test)) for s in federation.clients] == [(30, 10, 10)] * 3
    assert len(np.unique(np.concatenate([split.rows for split in federation.clients]))) == len(pool)
    flat = pool.x.reshape(len(pool), -1).astype(float)
    means = {c: flat[pool.labels == c].mean(0) for c in np.unique(pool.labels)}
    near = [min(means, key=lambda c: np.abs(image - means[c]).sum()) for image in flat]
    assert (near == pool.labels).mean() > 0.95  # classes can be told apart
    asked = make_questions(federation, streams=2, samples=12)
    assert [each.row for each in asked] == [0, 1, 2, 0, 1, 2]
    assert (asked[3].x[:10] == pool.x[federation.clients[1].test]).all()
    assert len({each.path for each in asked}) == 6


@pytest.mark.parametrize("net", NETS.values(), ids=NETS)
def test_parameters_are_drawn_as_the_network_draws_them(net):
    ours, theirs = draw_params(net(10)), net(10).init(0)
    for name, leaf in tree.flatten(theirs).items():
        drawn = tree.flatten(ours)[name]
        assert drawn.shape == leaf.shape
        if leaf.numel() > 1000:
            assert float(drawn.std()) == pytest.approx(float(leaf.std()), rel=0.1)


def test_torch_and_numpy_are_enough_for_all_but_corruptions():
    code = """
import sys
absent = ("scipy", "PIL", "typer", "rich", "sklearn", "matplotlib", "pyarrow", "safetensors")
sys.modules.update(dict.fromkeys(absent))
from fedthe.bench.measure import measure
from fedthe.bench.workload import Sizes
found = measure(device="cpu", sizes=Sizes(2, 2, 6, 6, 1, 2, 1, 15, 1, 64, 1024))
print([line.name for line in found.rows if line.failed])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['corrupting 10,000']"


# comparison and files


def test_rows_are_compared_by_name_and_marked_if_over_a_fifth_slower():
    before = make_bench(1.0, 2.0, 4.0)
    now = make_bench(1.19, 2.5, None, 7.0, names=("a", "b", "c", "d"))
    changes = compare(now, from_dict(before.as_dict()))
    assert [(change.name, change.ratio, change.slower) for change in changes] == [
        ("a", 1.19, False),
        ("b", 1.25, True),
    ]
    said = as_text(now, changes)
    assert "1 of 2 rows are over 20 % slower than the baseline (!); timings vary" in said
    row = next(line for line in said.splitlines() if line.startswith("b "))
    assert row.split() == ["b", "2.50", "s", "2.00", "s", "+25", "%", "!"]
    assert compare(now, make_bench(names=())) == []


def test_what_else_differs_is_said():
    now = make_bench(1.0)
    assert list_differences(now, make_bench(2.0)) == []
    other = make_bench(
        1.0, machine=Machine("NVIDIA H200", "cuda", "2.11", 16), engine="stack", rows=(Line("a", "s", 1.0),)
    )
    other = replace(other, rows=(replace(other.rows[0], scaled_from="less"),))
    assert list_differences(now, other) == [
        "device differs: NVIDIA H200 in the baseline, CPU now",
        "torch differs: 2.11 in the baseline, 2.6 now",
        "threads differs: 16 in the baseline, 2 now",
        "engine differs: stack in the baseline, loop now",
        "the baseline was measured at other sizes",
    ]


def test_the_authors_code_is_shown_on_the_machine_it_was_timed_on():
    machine = Machine("NVIDIA H200", "cuda", "2.11", 16)
    line = Line("round, 1 run", "s", 0.462, 0.01, "bytes", 46.2, authors=AUTHORS["round, 1 run"])
    found = make_bench(machine=machine, rows=(line, Line("x", "ms", 1.0, 0.5, "arithmetic", 2.0)))
    said = as_text(found)
    assert "code (H200)" in said
    assert ["462", "ms", "10.0", "ms", "bytes", "46.2", "46.2", "s", "100"] in [
        row.split()[-9:] for row in said.splitlines()
    ]
    assert machine.slug == "nvidia-h200"
    assert "H200" not in as_text(make_bench(1.0))


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [
        (12.345, "s", "12.3 s"),
        (0.5, "ms", "500 us"),
        (1234.0, "s", "1,234 s"),
        (2e-5, "ms", "20.0 ns"),
        (1, "ms", "1.00 ms"),
    ],
)
def test_times_have_three_digits_in_the_unit_that_suits(value, unit, said):
    assert format_time(value, unit) == said


def test_a_file_comes_back_as_it_was(measured, tmp_path):
    path = tmp_path / "bench.json"
    store.write_json(path, measured.as_dict())
    assert read_bench(path) == measured
    assert list_differences(measured, read_bench(path)) == []
    assert all(change.ratio == 1 for change in compare(measured, read_bench(path)))
