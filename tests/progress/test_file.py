"""What a run tells those who watch: who hears, what the file says, when it is written, and what stops nothing."""

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedthe
from fedthe import store
from fedthe.errors import Failed, InputError
from fedthe.progress import file as files
from fedthe.progress.events import AnswerEvent, TrainEvent, WaitEvent, WorkEvent, listening, tell, track, unheard
from fedthe.progress.file import FILE, Recorder, read_progress, recording


def train(done, total=2, *, methods=("fedavg",), seeds=(0,), loss=None):
    return TrainEvent(tuple(methods), tuple(seeds), loss, done=done, total=total)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def writes(monkeypatch):
    """How often the file was written, as a list that grows."""
    made = []
    whole = store.write_json
    monkeypatch.setattr(store, "write_json", lambda path, value: made.append(value) or whole(path, value))
    return made


def test_an_inner_listener_hears_beside_the_outer_ones():
    outer, inner = [], []
    a, b, c, d, e = (WorkEvent(what, done=1, total=2) for what in "abcde")
    with listening(outer.append):
        tell(a)
        with listening(inner.append):
            tell(b)
            with unheard():
                tell(c)
        tell(d)
    tell(e)
    assert outer == [a, b, d]
    assert inner == [b]


def test_what_a_listener_raises_is_not_swallowed():
    def complain(event):
        raise RuntimeError("no bars here")

    with pytest.raises(RuntimeError, match="no bars here"), listening(complain):
        list(track("drawing", [1, 2]))


def test_the_file_says_what_goes_on_and_that_it_is_done(tmp_path):
    event = train(1, 100, seeds=(0, 1, 2), loss=0.123)
    with recording(tmp_path / "run", trainings=3, answers=6) as recorder:
        begun = read_progress(tmp_path / "run")
        tell(event)
        told = read_progress(tmp_path / "run")
        recorder.add_answer("fedavg-0-abc")
        recorder.add_answer("fedavg-0-abc")  # twice is once
    after = read_progress(tmp_path / "run")
    assert (begun.state, begun.trainings, begun.answers, begun.steps) == ("running", 3, 6, ())
    (step,) = told.steps
    assert step.event == event
    assert (after.state, after.answered, after.why) == ("done", ("fedavg-0-abc",), "")
    assert after.steps == told.steps
    assert not list((tmp_path / "run").glob("*.part"))


@pytest.mark.parametrize(
    ("error", "state", "why"),
    [
        (KeyboardInterrupt(), "stopped", ""),
        (SystemExit(130), "stopped", ""),
        (Failed("seed 1 diverged in round 3."), "failed", "seed 1 diverged in round 3."),
        (RuntimeError("two\nlines\x1b[31m"), "failed", "RuntimeError: two lines\N{REPLACEMENT CHARACTER}[31m"),
        (MemoryError(), "failed", "MemoryError"),
    ],
)
def test_what_ends_a_run_is_in_the_file_and_goes_on_its_way(tmp_path, error, state, why):
    with pytest.raises(type(error)), recording(tmp_path, trainings=1, answers=1):
        raise error
    live = read_progress(tmp_path)
    assert (live.state, live.why) == (state, why)
    with recording(tmp_path, trainings=2, answers=2):
        pass
    live = read_progress(tmp_path)  # the newest run replaces the one before
    assert (live.state, live.why, live.trainings) == ("done", "", 2)


def test_the_file_is_written_once_a_second_and_at_every_new_step(tmp_path, clock, writes):
    recorder = Recorder(tmp_path, 1, 1, clock)
    recorder.hear(train(1, 1000))
    assert len(writes) == 2
    for done in range(2, 102):
        clock.now += 0.1
        recorder.hear(train(done, 1000))
    assert len(writes) == pytest.approx(12, abs=1)  # ten seconds
    before = len(writes)
    for seed, done in ((0, 0), (0, 20), (1, 0)):
        recorder.hear(AnswerEvent("fedavg", seed, done=done, total=20))
    assert len(writes) == before + 2
    recorder.end("done")
    assert [step["done"] for step in writes[-1]["steps"]] == [101, 20, 0]
    assert writes[-1]["state"] == "done"


def test_a_clock_that_is_set_back_does_not_silence_a_run(tmp_path, clock, writes):
    recorder = Recorder(tmp_path, 1, 1, clock)
    recorder.hear(train(1, 1000))
    clock.now -= 3600
    recorder.hear(train(2, 1000))
    assert writes[-1]["steps"][0]["done"] == 2


def test_what_waits_is_written_soon_and_a_long_round_gives_signs_of_life(tmp_path, clock, writes):
    recorder = Recorder(tmp_path, 1, 1, clock)
    recorder.hear(train(1, 9))
    recorder.hear(train(2, 9))
    recorder.beat()
    assert writes[-1]["steps"][0]["done"] == 1
    clock.now += files.EVERY
    recorder.beat()
    assert writes[-1]["steps"][0]["done"] == 2
    before = len(writes)
    for _ in range(300):  # a round of five minutes
        clock.now += 1
        recorder.beat()
        assert clock.now - read_progress(tmp_path).updated < files.SILENCE / 2
    assert len(writes) - before == 300 / files.BEAT


def test_what_comes_in_between_does_not_cut_a_step_in_two(tmp_path, clock, writes):
    recorder = Recorder(tmp_path, 1, 2, clock)
    told = [("a", 0), ("corrupting", 0), ("corrupting", 20), ("a", 20), ("b", 0), ("b", 20), ("a", 0)]
    for what, done in told:
        clock.now += 10
        work = {"done": done, "total": 20}
        recorder.hear(WorkEvent(what, **work) if what == "corrupting" else AnswerEvent(what, 0, **work))
    steps = [
        (step.event.describe(), step.first, step.event.done, step.updated - step.began) for step in recorder.live.steps
    ]
    assert steps == [
        ("corrupting", 0, 20, 10),
        ("testing a", 0, 20, 30),
        ("testing b", 0, 20, 10),
        ("testing a", 0, 0, 0),  # of the next stage of a curve
    ]


def test_seeds_that_train_together_are_one_step_and_one_after_another_are_two(tmp_path, clock):
    recorder = Recorder(tmp_path, 1, 2, clock)
    for done in (1, 1, 2, 2):
        recorder.hear(train(done, methods="a", seeds=(0, 1)))
    for seed in (0, 1):
        for done in (1, 2):
            recorder.hear(train(done, methods="b", seeds=[seed]))
    assert [step.event for step in recorder.live.steps] == [
        train(2, methods="a", seeds=(0, 1)),
        train(2, methods="b", seeds=[0]),
        train(2, methods="b", seeds=[1]),
    ]


def test_a_training_that_goes_on_says_where_it_began(tmp_path, clock):
    recorder = Recorder(tmp_path, 1, 1, clock)
    recorder.hear(train(51, 100))
    clock.now += 5
    recorder.hear(train(52, 100))
    (step,) = recorder.live.steps
    assert (step.first, step.event.done, step.began, step.updated) == (51, 52, 1000, 1005)


def test_a_vanished_folder_stops_nothing_and_stays_away(tmp_path):
    folder = tmp_path / "run"
    with recording(folder, trainings=1, answers=1) as recorder:
        shutil.rmtree(folder)
        tell(train(1))
        recorder.add_answer("fedavg-0-abc")
    assert not folder.exists()


def test_a_full_disk_stops_nothing(tmp_path, monkeypatch):
    def fill(path, value):
        raise OSError(28, "No space left on device")

    with recording(tmp_path, trainings=1, answers=1):
        monkeypatch.setattr(store, "write_json", fill)
        tell(train(1))
    assert read_progress(tmp_path).state == "running"  # as it was written last


def test_a_place_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    heard = []
    with recording(tmp_path / "file" / "run", trainings=1, answers=1), listening(heard.append):
        tell(train(1))
    assert len(heard) == 1


@pytest.mark.parametrize(
    ("event", "said", "number"),
    [
        (train(1), "training fedavg", 1),
        (train(1, seeds=(0, 1, 2)), "training fedavg, 3 seeds", 3),
        (train(1, methods=("fedrod", "fedthe")), "training fedrod and fedthe", 2),
        (train(1, methods=("fedrod", "fedthe"), seeds=(0, 1, 2)), "training fedrod and fedthe, 3 seeds", 6),
        (train(1, methods=("search and rescue",)), "training search and rescue", 1),
        (AnswerEvent("fedavg", 0, done=1, total=2), "testing fedavg", 0),
        (WorkEvent("training data", done=1, total=2), "training data", 0),
    ],
)
def test_what_an_event_says_and_how_many_trainings_it_is(event, said, number):
    assert (event.describe(), event.trainings) == (said, number)


@pytest.mark.parametrize("loss", [-0.5, 1e30, None])
def test_every_event_is_read_as_it_was_told(tmp_path, loss):
    told = [
        train(1, methods=("a and b", "c"), seeds=(3, 5), loss=loss),
        AnswerEvent("a", 3, done=1, total=2),
        WaitEvent(done=0, total=1),
        WorkEvent("reading", "soon", done=0, total=0),
    ]
    recorder = Recorder(tmp_path, 1, 1)
    for event in told:
        recorder.hear(event)
    assert [step.event for step in read_progress(tmp_path).steps] == told


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_left_out_of_the_file(tmp_path, loss):
    recorder = Recorder(tmp_path, 1, 1)
    recorder.hear(train(1, loss=loss))
    assert read_progress(tmp_path).steps[0].event == train(1)


@pytest.mark.parametrize("engine", ["loop", "stack"])
def test_an_experiment_tells_of_as_many_trainings_as_it_does(data, tmp_path, engine):
    settings = {"clients": 3, "dirichlet": 1.0, "rounds": 2, "local_epochs": 1, "samples": 6, "engine": engine}
    methods = ["fedavg", "fedavg_ft", "fedrep", "fedthe"]
    with recording(tmp_path / "seen", trainings=6, answers=8) as recorder:
        results = fedthe.run(dataset=data, methods=methods, seeds=[0, 1], out=str(tmp_path / "run"), **settings)
    steps = recorder.live.steps
    assert sum(step.event.trainings for step in steps) == len(results.trainings) == 6
    tests = [step.event for step in steps if isinstance(step.event, AnswerEvent) and step.event.is_over]
    assert sorted((event.method, event.seed) for event in tests) == [
        (name, seed) for name in methods for seed in (0, 1)
    ]


def test_what_cannot_be_read_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(InputError, match="there is no folder"):
        read_progress(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"holds no run to watch"):
        read_progress(tmp_path)
    for text in ("", "{", "[]", "3", "null", "[" * 100_000, '{"format": 3}', b"\xff\xfe"):
        (tmp_path / FILE).write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(InputError, match="is damaged"):
            read_progress(tmp_path)
    (tmp_path / FILE).write_text('{"format": 1, "state": "asleep"}')
    with pytest.raises(InputError, match="has format 1, but this version of fedthe knows format 3"):
        read_progress(tmp_path)


@given(
    st.sampled_from(
        ["state", "why", "pid", "began", "trainings", "answered", "steps", "kind", "total", "done", "first"]
    ),
    st.data(),
)
def test_a_value_that_is_wrong_is_damage(tmp_path_factory, name, draw):
    folder = tmp_path_factory.mktemp("run")
    recorder = Recorder(folder, 1, 1)
    recorder.hear(train(1))
    recorder.add_answer("fedavg-0-abc")
    recorder.end("done")
    value = json.loads((folder / FILE).read_text())
    place = value if name in value else value["steps"][0]
    wrong = st.none() | st.booleans() | st.just(-1) | st.just(float("nan")) | st.just([3]) | st.just(["../x"])
    place[name] = draw.draw(wrong)
    (folder / FILE).write_text(json.dumps(value))
    with pytest.raises(InputError, match="is damaged"):
        read_progress(folder)
