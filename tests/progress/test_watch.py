"""Watching a run: how long it will take, what is shown, and when the watch ends."""

import io
import json
import os
import platform
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fedthe import store
from fedthe.errors import InputError
from fedthe.progress import watch as watching
from fedthe.progress.events import AnswerEvent, TrainEvent, WorkEvent
from fedthe.progress.file import FILE, SILENCE, Live, LiveStep, Recorder
from fedthe.progress.watch import collect_scores, estimate_left, find_pace, is_over, is_silent, say_seconds, show, watch

TESTS = ("original", "corrupted", "natural", "ooc", "mixture", "corrupted_ooc")


def make_event(what, done, total):
    """Of "training NAME", "testing NAME", or whatever else."""
    kind, _, name = what.partition(" ")
    name, _, more = name.partition(", ")
    if kind == "training":
        seeds = tuple(range(int(more.split()[0]) if more else 1))
        return TrainEvent((name,), seeds, 0.123, done=done, total=total)
    work = {"done": done, "total": total}
    return AnswerEvent(name, 0, **work) if kind == "testing" else WorkEvent(what, **work)


def make_live(*steps, trainings=1, answers=1, answered=0, state="running", **more):
    """A run of this very process. Steps: (what, first, done, total, began, updated)."""
    made = tuple(
        LiveStep(make_event(what, done, total), began, first, updated)
        for what, first, done, total, began, updated in steps
    )
    stems = tuple(f"m-{n}-x" for n in range(answered))
    live = Live(state, "", os.getpid(), platform.node(), 0.0, 1000.0, trainings, answers, stems, (), made)
    return replace(live, **more)


def write_answer(folder, method, seed, percents):
    """percents: by test, one for each client. Returns the file's stem."""
    rows = [
        {"method": method, "seed": seed, "test": test, "client": client, "accuracy": percent}
        for test, clients in percents.items()
        for client, percent in enumerate(clients)
    ]
    (folder / "answers").mkdir(exist_ok=True)
    store.write_sealed(folder / "answers" / f"{method}-{seed}-x.json", {"method": method, "rows": rows})
    return f"{method}-{seed}-x"


def draw(live, folder, now=1000.0, width=120):
    console = Console(file=io.StringIO(), width=width)
    console.print(show(live, folder, now))
    return console.file.getvalue()


seconds = st.floats(0.01, 1000)


@given(
    st.integers(2, 50), st.integers(0, 1), st.integers(1, 49), seconds, st.integers(0, 3), st.integers(1, 3), seconds
)
def test_at_an_even_pace_the_estimate_is_the_truth(rounds, skip, done, pace, more, seeds, test):
    """A training after another, `pace` seconds a round, each followed by tests of `test` seconds."""
    done = min(done, rounds)
    what = "training a" + (f", {seeds} seeds" if seeds > 1 else "")
    whole = rounds * pace
    history = [
        (what, 1, rounds, rounds, pace, whole),
        *(("testing a", 0, 20, 20, whole + s * test, whole + (s + 1) * test) for s in range(seeds)),
    ]
    begun = whole + seeds * test + pace
    last = (what, 1 + skip, max(done, 1 + skip), rounds, begun, begun + (max(done, 1 + skip) - 1 - skip) * pace)
    groups = 2 + more
    live = make_live(*history, last, trainings=groups * seeds, answers=groups * seeds, answered=seeds)
    truth = (rounds - last[2]) * pace + more * whole + (groups - 1) * seeds * test
    assert estimate_left(live, last[5]) == pytest.approx(truth)


@given(st.integers(2, 99), seconds, st.floats(0, 500), st.floats(0, 500))
def test_waiting_never_makes_it_longer_nor_negative(done, pace, wait, more):
    live = make_live(("training a", 1, done, 100, 0, (done - 1) * pace), answers=0)
    now = live.steps[-1].updated
    early, late = estimate_left(live, now + wait), estimate_left(live, now + wait + more)
    assert 0 <= late <= early <= estimate_left(live, now)


@given(st.lists(st.tuples(st.integers(0, 3), seconds), max_size=5))
def test_trainings_that_were_there_or_went_on_do_not_throw_the_mean_off(resumed):
    """What told of its last round only has no pace; what went on from a checkpoint has that of its rounds."""
    steps = [("training x", 10 - n, 10, 10, 50 - 2 * n, 50) for n, _ in resumed]
    live = make_live(*steps, ("training y", 1, 5, 10, 100, 108), trainings=len(steps) + 3, answers=0)
    assert estimate_left(live, 108) == pytest.approx(5 * 2 + 2 * 20)


def test_an_estimate_needs_something_to_go_by():
    training, test = ("training a", 1, 5, 10, 0, 8), ("testing a", 0, 20, 20, 20, 50)
    assert estimate_left(make_live(), 0) is None
    assert estimate_left(make_live(training, answers=0), 8) == 10
    assert estimate_left(make_live(training, answers=0), 11) == 7  # three seconds later
    assert estimate_left(make_live(training, trainings=3, answers=0), 8) == 10 + 2 * 20  # the projected length
    assert estimate_left(make_live(training), 8) is None  # nobody knows how long a test takes
    assert estimate_left(make_live(("training a", 1, 1, 10, 0, 0), answers=0), 5) is None
    assert estimate_left(make_live(("corrupting", 0, 0, 10, 0, 0), trainings=0, answers=0), 5) is None
    assert estimate_left(make_live(training, test, answers=3, answered=1), 50) == 2 * 30
    assert estimate_left(make_live(state="done"), 50) == 0
    assert estimate_left(make_live(training, answers=0, state="stopped"), 50) is None


def test_a_test_that_tells_nothing_in_between_takes_as_long_as_those_before():
    """An engine that takes all clients at once tells of the beginning and the end only."""
    quick, slow = ("testing a", 0, 20, 20, 0, 10), ("testing b", 0, 20, 20, 10, 40)
    live = make_live(quick, slow, ("testing b", 0, 0, 20, 40, 40), trainings=0, answers=4, answered=2)
    assert estimate_left(live, 50) == (30 - 10) + 20  # its own method's time; then one more of the mean
    live = make_live(quick, slow, ("testing c", 0, 0, 20, 40, 40), trainings=0, answers=3, answered=2)
    assert estimate_left(live, 50) == 20 - 10
    assert estimate_left(live, 500) == 0


def test_a_training_of_two_rounds_has_a_pace_and_one_of_none_has_not():
    assert find_pace(LiveStep(make_event("training a", 2, 9), 10.0, 1, 13.0)) == 3
    assert find_pace(LiveStep(make_event("training a", 9, 9), 10.0, 9, 13.0)) is None


def test_workers_are_shown_side_by_side_and_share_what_is_left(tmp_path):
    def step(event, worker, began, updated):
        return LiveStep(replace(event, worker=worker), began, 1, updated)

    steps = (
        step(make_event("training a", 10, 10), "worker 1", 0.0, 90.0),
        step(make_event("training b", 4, 10), "worker 10", 0.0, 90.0),
        step(make_event("training c", 6, 10), "worker 2", 0.0, 90.0),
        step(make_event("testing a", 1, 6), "worker 1", 90.0, 100.0),
    )
    live = make_live(trainings=3, answers=3, steps=steps)
    picture = draw(live, tmp_path, now=100.0)
    at = [picture.index(f"{who}: ") for who in ("worker 1", "worker 2", "worker 10")]
    assert at == sorted(at)
    assert "worker 1: testing a, seed 0" in picture
    assert "worker 2: training c" in picture
    assert "trainings 1 of 3" in picture
    alone = replace(live, steps=tuple(replace(each, event=replace(each.event, worker="")) for each in steps[-1:]))
    assert estimate_left(alone, 100.0) is None  # nothing of a training to go by
    # b has 6 rounds of 30 s less 10 s to go, c 4 of 18 s less 10 s; no test is finished yet
    assert estimate_left(replace(live, answers=0), 100.0) is None


def test_scores_are_means_over_clients_then_over_seeds(tmp_path):
    stems = [
        write_answer(tmp_path, "fedavg", 0, {"original": [10, 20, 60], "ooc": [50]}),
        write_answer(tmp_path, "fedavg", 1, {"original": [70]}),
        write_answer(tmp_path, "fedthe", 0, {"original": [80]}),
    ]
    (tmp_path / "answers" / "bad.json").write_text("{")
    scores, unreadable = collect_scores(tmp_path, [*stems, "bad", "gone"])
    assert scores == {"fedavg": {"original": 50, "ooc": 50}, "fedthe": {"original": 80}}
    assert unreadable == 2
    assert collect_scores(tmp_path, stems[2:])[0] == {"fedthe": {"original": 80}}


@pytest.mark.parametrize("width", [40, 60, 120])
def test_a_picture_has_everything_and_fits(tmp_path, width):
    folder = tmp_path / "quick"
    folder.mkdir()
    stems = [
        write_answer(folder, method, 0, {test: [10 * n + k] for k, test in enumerate(TESTS)})
        for n, method in enumerate(("fedavg", "fedavg_ft", "fedthe_plus"), 5)
    ]
    steps = [("testing fedavg", 0, 20, 20, 0, 100), ("training fedthe, 3 seeds", 1, 37, 101, 928, 1000)]
    live = make_live(*steps, trainings=9, answers=15, answered=0)
    text = draw(replace(live, answered=tuple(stems)), folder, width=width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    flat = " ".join(text.split())
    for words in ("quick, running", "training fedthe, 3 seeds", "round 37 of 101", "2.0 s per round", "loss 0.123"):
        assert words in flat
    for words in (", done in about 2 min", "all done in about 29 min", "testing fedavg 2 min", "answers 3 of 15"):
        assert words in flat
    for number in ("50.0", "61.0", "72.0", "75.0"):
        assert number in flat
    rows = [line for line in lines if line.startswith("fedavg_ft ")]
    assert len(rows) == (1 if width >= 60 else 2)  # what does not fit goes below
    assert "mixture" in text


def test_names_of_users_are_shown_as_they_are(tmp_path):
    folder = tmp_path / "[red]run[bold]"
    folder.mkdir()
    stem = write_answer(folder, "[bold]mine[red] \x1b[31m", 0, {"[i]t": [33.3]})
    text = draw(make_live(("training [u]x\x07", 1, 2, 3, 0, 9), answered=0, answers=1), folder)
    assert "[red]run[bold], running" in text
    assert "training [u]x\N{REPLACEMENT CHARACTER}" in text
    text = draw(replace(make_live(), answered=(stem,), state="failed", why="[/nope] \x1b[2J"), folder)
    assert "[bold]mine[red]" in text
    assert "[i]t" in text
    assert "[/nope]" in text
    assert "\x1b" not in text


def test_the_beginning_and_the_end_have_pictures_too(tmp_path):
    text = draw(make_live(), tmp_path)
    assert "all done in ?" in text
    assert "no answers yet" in text
    text = draw(make_live(("training a", 1, 3, 9, 0, 5), state="stopped"), tmp_path)
    assert ", stopped" in text
    assert "3 of 9" in text
    assert "all done in" not in text
    assert ", done" in draw(make_live(state="done"), tmp_path)
    assert "testing a" in draw(make_live(("testing a", 0, 0, 0, 0, 0)), tmp_path)  # nothing of nothing


def test_a_run_whose_process_is_gone_or_that_is_silent_is_dead():
    live = make_live(updated=1000.0)
    assert not is_silent(live, 1000 + SILENCE)
    assert is_silent(live, 1001 + SILENCE)
    assert not is_silent(replace(live, state="done"), 1001 + SILENCE)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert is_silent(replace(live, pid=gone.pid), 1000)
    assert not is_silent(replace(live, pid=gone.pid, host="another machine"), 1000)  # no telling from here
    assert is_silent(replace(live, pid=2**70), 1000)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_dead_run_ends_the_watch_which_says_so(tmp_path, terminal):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    Recorder(tmp_path, 1, 1)
    value = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps(value | {"pid": gone.pid}))
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    watch(tmp_path, console, every=0.01)
    assert "no sign of life since" in console.file.getvalue()


@pytest.mark.parametrize(("terminal", "once"), [(False, False), (True, True)])
def test_one_picture_is_enough_without_a_terminal_or_where_one_is_asked_for(tmp_path, terminal, once):
    Recorder(tmp_path, 1, 1)  # running, and never done
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80, no_color=True)
    watch(tmp_path, console, once=once)
    assert console.file.getvalue().count("answers 0 of 1") == 1


def test_ctrl_c_leaves_quietly_and_the_run_goes_on(tmp_path, monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    Recorder(tmp_path, 1, 1)
    monkeypatch.setattr(watching.time, "sleep", interrupt)
    watch(tmp_path, Console(file=io.StringIO(), force_terminal=True, width=80))
    assert json.loads((tmp_path / FILE).read_text())["state"] == "running"


def test_no_run_is_refused(tmp_path):
    with pytest.raises(InputError, match="there is no folder"):
        watch(tmp_path / "nowhere", Console(file=io.StringIO(), force_terminal=True))


SCRIPT = """
import sys, time
from pathlib import Path
from fedthe import store
from fedthe.progress.events import AnswerEvent, TrainEvent, tell
from fedthe.progress.file import recording

folder = Path(sys.argv[1])
with recording(folder, trainings=1, answers=1) as recorder:
    for done in range(1, 16):
        tell(TrainEvent(("fedavg",), (0,), 1 / done, done=done, total=15))
        time.sleep(0.1)
    tell(AnswerEvent("fedavg", 0, done=0, total=2))
    rows = [{"method": "fedavg", "seed": 0, "test": "ooc", "client": k, "accuracy": 12.5 + 50 * k} for k in range(2)]
    store.write_sealed(folder / "answers" / "fedavg-0-x.json", {"rows": rows})
    recorder.add_answer("fedavg-0-x")
    tell(AnswerEvent("fedavg", 0, done=2, total=2))
    if sys.argv[2:]:
        time.sleep(600)
"""


def start_run(folder, *more, script=SCRIPT):
    folder.mkdir()
    run = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script), str(folder), *more])
    while not (folder / FILE).exists():
        assert run.poll() is None
        time.sleep(0.02)
    return run


TABLE = """
import sys, time
from pathlib import Path
from fedthe.progress.events import TrainEvent, tell
from fedthe.progress.file import FILE, recording

folder = Path(sys.argv[1])
for case in ("one", "two"):
    (folder / FILE).unlink(missing_ok=True)
    time.sleep(0.2)
    with recording(folder, trainings=1, answers=1):
        tell(TrainEvent((case,), (0,), done=1, total=2))
        time.sleep(0.3)
        tell(TrainEvent((case,), (0,), done=2, total=2))
    time.sleep(0.5)
"""


def test_the_next_run_of_a_process_is_watched_too(tmp_path, monkeypatch):
    """As those of a table, which has several cases."""
    monkeypatch.setattr(watching, "LINGER", 2.0)
    folder = tmp_path / "run"
    run = start_run(folder, script=TABLE)
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    try:
        watch(folder, console, every=0.05)
    finally:
        assert run.wait(60) == 0
    assert "training one" in console.file.getvalue()
    assert "training two" in console.file.getvalue()


def test_what_is_over():
    live = make_live(state="done")
    assert not is_over(live, 1001)
    assert is_over(live, 1000 + 2 * watching.LINGER)
    assert is_over(replace(live, pid=2**70), 1001)  # no such process
    assert is_over(replace(live, state="stopped"), 1001)
    assert not is_over(replace(live, state="running"), 1001)


def test_a_run_is_watched_until_it_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "LINGER", 0.0)  # a child that ended is there until it is waited for
    folder = tmp_path / "run"
    run = start_run(folder)
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    try:
        watch(folder, console, every=0.05)
    finally:
        assert run.wait(60) == 0
    text = console.file.getvalue()
    assert "run, running" in text
    assert "training fedavg" in text
    last = text[text.rindex("run, done") :]
    assert "answers 1 of 1" in last
    assert "37.5" in last


def test_a_run_that_is_killed_ends_the_watch(tmp_path):
    folder = tmp_path / "run"
    run = start_run(folder, "never ends")
    run.send_signal(signal.SIGKILL)
    run.wait(60)
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    watch(folder, console, every=0.05)
    assert "no sign of life since" in console.file.getvalue()


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(-3, "0 s"), (41.6, "42 s"), (119, "2 min"), (5999, "1 h 40 min"), (7800, "2 h 10 min"), (273600, "3 d 4 h")],
)
def test_durations_as_people_say_them(seconds, said):
    assert say_seconds(seconds) == said


def test_looking_at_a_run_needs_no_torch():
    code = "import sys, fedthe.progress.watch; sys.exit('torch' in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
