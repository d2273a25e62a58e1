"""`fedthe watch`: a running experiment in the terminal: what it does, how long it will take, and scores so far."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from .. import store
from ..errors import InputError
from ..report.shapes import COUNT, PERCENT, Text, check
from ..report.wrong import RUN, explain
from ..text import clean
from .events import AnswerEvent, TrainEvent
from .file import FILE, SILENCE, Live, LiveStep, read_progress

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table

COLOURS = {"running": "cyan", "done": "green", "stopped": "yellow", "failed": "red", "silent": "red"}
RECENT = 4  # steps that are listed after they are done
WIDTH = 80  # of bars and lists, which are harder to read where they are wider
MOMENT = 0.5  # seconds
LINGER = 10.0  # seconds that a run is watched after it is done, while its process is there
NAME = 18  # letters of a method or a test, so that several columns fit
ANSWER = {"rows": [{"method": Text(), "test": Text(), "seed": COUNT, "accuracy": PERCENT}]}
Accuracies = dict[str, dict[str, float]]  # accuracy in percent, by method and test


def watch(folder: Path, console: Console, every: float = 1.0, once: bool = False) -> None:
    """Show the run in `folder` until it ends or shows no sign of life. Ctrl-C ends the watch, not the run.

    With `once`, or without a terminal, show it once.
    """
    from rich.live import Live as Screen

    if folder.exists() and not (folder / FILE).exists() and not (folder / "config.json").exists():
        raise InputError(explain(folder, RUN))
    if once or not console.is_terminal:
        console.print(show(read_progress(folder), folder, time.time()))
        return
    with suppress(KeyboardInterrupt), Screen(console=console, auto_refresh=False) as screen:
        while True:
            live, now = _read(folder)
            screen.update(show(live, folder, now), refresh=True)
            if is_over(live, now):
                return
            time.sleep(every)


def _read(folder: Path) -> tuple[Live, float]:
    """The run and the time. A run that ended between reading its file and looking for its process is read again."""
    live = _read_again(folder)
    if is_silent(live, time.time()):
        live = _read_again(folder)
    return live, time.time()


def _read_again(folder: Path) -> Live:
    """Twice if need be: a run that begins removes the file of the one before it for a moment."""
    try:
        return read_progress(folder)
    except InputError:
        time.sleep(MOMENT)
        return read_progress(folder)


def is_over(live: Live, now: float) -> bool:
    """Whether there is nothing more to see. A process may begin another run after this one, as tables do."""
    if live.state == "running":
        return is_silent(live, now)
    return live.state != "done" or now - live.updated > LINGER or _is_gone(live)


def is_silent(live: Live, now: float) -> bool:
    """Whether the run claims to go on, but its process is gone or has written nothing for long."""
    return live.state == "running" and (now - live.updated > SILENCE or _is_gone(live))


def _is_gone(live: Live) -> bool:
    if live.host != platform.node() or os.name != "posix":
        return False  # cannot be known from here
    try:
        os.kill(live.pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass  # it exists, and is another user's
    return False


def estimate_left(live: Live, now: float) -> float | None:
    """Seconds until the run is done; None where too little was seen to estimate it.

    The current step goes by its own pace, later trainings and answers by the mean of earlier ones.
    """
    if live.state != "running":
        return 0.0 if live.state == "done" else None
    trainings = sum(step.event.trainings for step in live.steps)
    testing = sum(isinstance(step.event, AnswerEvent) and not step.event.is_over for step in live.steps[-1:])
    answers = len(live.answered) + len(live.failures) + testing
    parts = [estimate_step(live, now)] if live.steps else []
    if trainings < live.trainings:
        parts.append(_multiply(live.trainings - trainings, _time_training(live.steps)))
    if answers < live.answers:
        tests = [seconds for _, seconds in _time_tests(live.steps)]
        parts.append(_multiply(live.answers - answers, fmean(tests) if tests else None))
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def estimate_step(live: Live, now: float) -> float | None:
    """Seconds until the step that is going on is done."""
    *before, step = live.steps
    event, pace = step.event, find_pace(step)
    if event.is_over:
        return 0.0
    if pace is not None:
        return max(0.0, pace * (event.total - event.done) - (now - step.updated))
    if isinstance(event, TrainEvent):
        whole = _multiply(event.trainings, _time_training(before))
        left = None if whole is None else whole * (event.total - event.done) / event.total
        return None if left is None else max(0.0, left - (now - step.updated))
    if not isinstance(event, AnswerEvent):
        return None
    tests = _time_tests(before)
    alike = [seconds for name, seconds in tests if name == event.method]  # on another seed
    return max(0.0, fmean(alike or [seconds for _, seconds in tests]) - (now - step.began)) if tests else None


def find_pace(step: LiveStep) -> float | None:
    """Seconds per round, client or whatever is counted; None before the first whole one."""
    seen = step.event.done - step.first
    return (step.updated - step.began) / seen if seen > 0 else None


def _time_training(steps: Iterable[LiveStep]) -> float | None:
    """Seconds of one training with all its rounds: the mean over those whose pace was seen."""
    seen = [(each.event, pace) for each in steps if each.event.trainings and (pace := find_pace(each)) is not None]
    number = sum(event.trainings for event, _ in seen)
    return sum(pace * event.total for event, pace in seen) / number if number else None


def _time_tests(steps: Iterable[LiveStep]) -> list[tuple[str, float]]:
    """Methods, and the seconds of their tests, of those seen from the first client to the last."""
    return [
        (each.event.method, each.updated - each.began)
        for each in steps
        if isinstance(each.event, AnswerEvent) and each.event.is_over and find_pace(each) is not None
    ]


def _multiply(number: int, seconds: float | None) -> float | None:
    return None if seconds is None else number * seconds


def collect_scores(folder: Path, stems: Iterable[str]) -> tuple[Accuracies, int]:
    """Accuracy by method and test, the mean over clients, then over seeds; and how many files cannot be read."""
    cells: dict[tuple[str, str], dict[int, float]] = {}
    unreadable = 0
    for stem in stems:
        try:
            path = folder / "answers" / f"{stem}.json"
            for method, test, seed, percent in _read_answer(path, path.stat().st_mtime_ns):
                cells.setdefault((method, test), {})[seed] = percent  # after more rounds, in place of that after fewer
        except (OSError, ValueError, RecursionError):
            unreadable += 1
    scores: Accuracies = {}
    for (method, test), seeds in cells.items():
        scores.setdefault(method, {})[test] = fmean(seeds.values())
    return scores, unreadable


@lru_cache(maxsize=4096)
def _read_answer(path: Path, changed: int) -> tuple[tuple[str, str, int, float], ...]:
    """Method, test, seed, and the mean over clients. `changed`: a file that did is read again."""
    clients: dict[tuple[str, str, int], list[float]] = {}
    for row in check(store.read_sealed(path), ANSWER, "the answer")["rows"]:
        clients.setdefault((row["method"], row["test"], row["seed"]), []).append(row["accuracy"])
    return tuple((*place, fmean(percents)) for place, percents in clients.items())


def show(live: Live, folder: Path, now: float) -> RenderableType:
    """One picture of a run."""
    from rich.console import Group
    from rich.constrain import Constrain
    from rich.rule import Rule
    from rich.text import Text

    silent = is_silent(live, now)
    state = "silent" if silent else live.state
    colour, why = COLOURS[state], f"no sign of life since {_say_when(live.updated, now)}" if silent else live.why
    scores, unreadable = collect_scores(folder, live.answered)
    title = Text.assemble((clean(folder.resolve().name, 40), "bold"), ", ", (state, f"bold {colour}"))
    parts: list[RenderableType] = [Rule(title, align="left", style=colour)]
    if why:
        parts.append(Text(clean(why, 300), style=colour))
    parts += [Constrain(Group(*_show_progress(live, now, silent)), WIDTH), *map(Text, _say_counts(live, now, silent))]
    parts.append(Text())
    parts.append(_ScoreTable(scores) if scores else Text("no answers yet", style="dim"))
    if unreadable:
        parts.append(Text(f"{unreadable} of the answers cannot be read", style="yellow"))
    parts += [Text(f"failed: {clean(why, 300)}", style="red") for why in live.failures[-RECENT:]]
    parts.append(Constrain(Group(*_show_steps(live)), WIDTH))
    return Group(*parts)


def _show_progress(live: Live, now: float, silent: bool) -> Iterator[RenderableType]:
    """The step that is going on: a bar, and how fast it goes."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    if live.state != "running":
        return
    if not live.steps:
        yield Text("nothing is told yet", style="dim")
        return
    step = live.steps[-1]
    event = step.event
    line = Table.grid(padding=(0, 2), expand=True)
    line.add_column(ratio=1, overflow="fold")
    line.add_column(no_wrap=True, justify="right")
    line.add_row(Text(clean(event.describe(), 200), style="bold"), Text(clean(event.remark, 30)))
    yield line
    bar = Table.grid(expand=True)  # a bar alone does not end its line
    bar.add_row(ProgressBar(max(event.total, 1), min(event.done, event.total), complete_style=COLOURS["running"]))
    yield bar
    pace, left = find_pace(step), None if silent else estimate_step(live, now)
    speed = "" if pace is None else f"{say_pace(pace)} per {event.unit or 'step'}"
    wait = "" if left is None or event.is_over else f"done in about {say_seconds(left)}"
    place = f"{event.unit} {event.done} of {event.total}".strip()
    yield Text(", ".join(part for part in (place, speed, wait) if part), style="dim")


def _say_counts(live: Live, now: float, silent: bool) -> Iterator[str]:
    """Everything so far, and how long all of it will take."""
    begun = sum(step.event.trainings for step in live.steps)
    over = begun - sum(step.event.trainings for step in live.steps[-1:] if not step.event.is_over)
    trainings = f"trainings {min(over, live.trainings)} of {live.trainings}, " if live.trainings else ""
    failed = f", {len(live.failures)} failed" if live.failures else ""
    yield f"{trainings}answers {len(live.answered)} of {live.answers}{failed}"
    if live.state == "running" and not silent:
        left = estimate_left(live, now)
        wait = "?" if left is None else f"about {say_seconds(left)}"
        yield f"{say_seconds(now - live.began)} so far, all done in {wait}"
    else:
        yield f"{say_seconds(live.updated - live.began)} in all"


def _show_steps(live: Live) -> Iterator[RenderableType]:
    """The steps that are over, the latest last."""
    from rich.table import Table
    from rich.text import Text

    over = live.steps[:-1] if live.state == "running" else live.steps
    if not over:
        return
    yield Text(f"\nsteps so far: {len(over)}{', the latest:' if len(over) > RECENT else ''}", style="bold")
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(ratio=1, overflow="ellipsis", no_wrap=True)
    for _ in range(2):
        grid.add_column(no_wrap=True, justify="right")
    for step in over[-RECENT:]:
        event, seconds = step.event, say_seconds(step.updated - step.began)
        short = clean(event.remark, 30) if event.is_over else f"{event.done} of {event.total}"
        grid.add_row(Text(clean(event.describe(), 200)), Text(short), seconds)
    yield grid


@dataclass(frozen=True)
class _ScoreTable:
    """Methods x tests. Columns that do not fit beside each other go below."""

    scores: Accuracies

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        tests = list(dict.fromkeys(test for row in self.scores.values() for test in row))
        yield Text("accuracy (%), mean over clients and seeds", style="bold")
        while tests:
            ways = [(number, gap) for number in range(len(tests), 0, -1) for gap in (2, 1)]
            tables = (self._make(tests[:number], gap) for number, gap in ways)
            table = next((each for each in tables if self._fits(each, console, options)), self._make(tests[:1], 1))
            yield table
            tests = tests[len(table.columns) - 1 :]

    def _fits(self, table: Table, console: Console, options: ConsoleOptions) -> bool:
        from rich.measure import Measurement

        return Measurement.get(console, options.update(max_width=1000), table).maximum <= options.max_width

    def _make(self, tests: Sequence[str], gap: int) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, gap, 0, 0), pad_edge=False)
        table.add_column(no_wrap=True)
        for _ in tests:
            table.add_column(no_wrap=True, justify="right", vertical="bottom")
        table.add_row("", *(Text(clean(test, NAME).replace("corrupted_", "corr.\n"), style="cyan") for test in tests))
        best = {test: max(row[test] for row in self.scores.values() if test in row) for test in tests}
        for method, row in self.scores.items():
            cells = (self._make_cell(row.get(test), best[test]) for test in tests)
            table.add_row(Text(clean(method, NAME)), *cells)
        return table

    def _make_cell(self, percent: float | None, best: float) -> Any:
        from rich.text import Text

        if percent is None:
            return Text("-", style="dim")
        return Text(f"{percent:.1f}", style="bold" if percent == best and len(self.scores) > 1 else "")


def say_seconds(seconds: float) -> str:
    """As people say it: 42 s, 5 min, 2 h 10 min, 3 d 4 h."""
    whole = max(0, round(seconds))
    if whole < 100:
        return f"{whole} s"
    minutes = round(whole / 60)
    if minutes < 100:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def say_pace(seconds: float) -> str:
    return (
        f"{1000 * seconds:.0f} ms" if seconds < 0.1 else f"{seconds:.1f} s" if seconds < 100 else say_seconds(seconds)
    )


def _say_when(then: float, now: float) -> str:
    shape = "%H:%M:%S" if now - then < 12 * 3600 else "%Y-%m-%d %H:%M"
    return time.strftime(shape, time.localtime(then))
