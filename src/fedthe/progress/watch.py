"""`fedthe watch`: the progress of a run in the terminal, the time left, and scores so far."""

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
RECENT = 4  # finished steps to list
MOST_WORKERS = 16  # to show at once
WIDTH = 80  # of bars and lists, which are hard to read if wider
MOMENT = 0.5  # seconds
LINGER = 10.0  # seconds to watch a finished run while its process lives
NAME = 18  # characters of a method or a test, so that several columns fit
ANSWER = {"rows": [{"method": Text(), "test": Text(), "seed": COUNT, "accuracy": PERCENT}]}
Accuracies = dict[str, dict[str, float]]  # accuracy in percent, by method and test


def watch(folder: Path, console: Console, every: float = 1.0, once: bool = False) -> None:
    """Show the run in `folder` until it ends or goes silent; once if `once` or without a terminal.

    Ctrl-C stops watching, not the run.
    """
    from rich.live import Live as Screen

    if folder.exists() and not (folder / FILE).exists() and not (folder / "config.json").exists():
        raise InputError(explain(folder, RUN))
    if once or not console.is_terminal:
        console.print(show(read_progress(folder), folder, time.time()))
        return
    with suppress(KeyboardInterrupt), Screen(console=console, auto_refresh=False) as screen:
        while True:
            live, now = _read(folder), time.time()
            screen.update(show(live, folder, now), refresh=True)
            if is_over(live, now):
                return
            time.sleep(every)


def _read(folder: Path) -> Live:
    """Read the file, and again if its process is gone: the run may have ended since."""
    live = _try_twice(folder)
    return _try_twice(folder) if is_silent(live, time.time()) else live


def _try_twice(folder: Path) -> Live:
    """A new run removes the file of the one before it for a moment."""
    try:
        return read_progress(folder)
    except InputError:
        time.sleep(MOMENT)
        return read_progress(folder)


def is_over(live: Live, now: float) -> bool:
    """Whether to stop watching. A process may start another run after this one, as tables do."""
    if live.state == "running":
        return is_silent(live, now)
    return live.state != "done" or now - live.updated > LINGER or _is_gone(live)


def is_silent(live: Live, now: float) -> bool:
    """Whether the run is "running", but its process is gone or has not written for long."""
    return live.state == "running" and (now - live.updated > SILENCE or _is_gone(live))


def _is_gone(live: Live) -> bool:
    if live.host != platform.node() or os.name != "posix":
        return False  # unknown from here
    try:
        os.kill(live.pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass  # it exists, but belongs to another user
    return False


def list_current(live: Live) -> list[LiveStep]:
    """The latest step of every worker, in the order of their names; without workers, the latest of all."""
    latest = {step.event.worker: step for step in live.steps}
    return [latest[name] for name in sorted(latest, key=lambda name: (len(name), name))]


def estimate_left(live: Live, now: float) -> float | None:
    """Seconds until the run is done; None if there is too little to go by.

    Current steps are estimated by their own pace, later trainings and answers by the mean of earlier ones; workers
    share what is left.
    """
    if live.state != "running":
        return 0.0 if live.state == "done" else None
    trainings = sum(step.event.trainings for step in live.steps)
    current = list_current(live)
    at_work = [step for step in current if step.event.worker] or current
    testing = sum(isinstance(step.event, AnswerEvent) and not step.event.is_over for step in at_work)
    answers = len(live.answered) + len(live.failures) + testing
    parts = [estimate_step(live, step, now) for step in at_work]
    tests = [seconds for _, seconds in _time_tests(live.steps)]
    training, test = _time_training(live.steps), fmean(tests) if tests else None
    for count, seconds in ((live.trainings - trainings, training), (live.answers - answers, test)):
        if count > 0:
            parts.append(None if seconds is None else count * seconds)
    known = [part for part in parts if part is not None]
    return sum(known) / max(1, len(at_work)) if len(known) == len(parts) else None


def estimate_step(live: Live, step: LiveStep, now: float) -> float | None:
    """Seconds until a current step is done."""
    before = [each for each in live.steps if each is not step]
    event, pace = step.event, find_pace(step)
    if event.is_over:
        return 0.0
    if pace is not None:
        return max(0.0, pace * (event.total - event.done) - (now - step.updated))
    if isinstance(event, TrainEvent) and (training := _time_training(before)) is not None:
        left = event.trainings * training * (event.total - event.done) / event.total
        return max(0.0, left - (now - step.updated))
    if isinstance(event, AnswerEvent) and (tests := _time_tests(before)):
        alike = [seconds for name, seconds in tests if name == event.method]  # on another seed
        return max(0.0, fmean(alike or [seconds for _, seconds in tests]) - (now - step.began))
    return None


def find_pace(step: LiveStep) -> float | None:
    """Seconds per round, client or other unit; None before the first is done."""
    seen = step.event.done - step.first
    return (step.updated - step.began) / seen if seen > 0 else None


def _time_training(steps: Iterable[LiveStep]) -> float | None:
    """Seconds of one training with all its rounds: the mean over those with a pace."""
    seen = [(each.event, pace) for each in steps if each.event.trainings and (pace := find_pace(each)) is not None]
    number = sum(event.trainings for event, _ in seen)
    return sum(pace * event.total for event, pace in seen) / number if number else None


def _time_tests(steps: Iterable[LiveStep]) -> list[tuple[str, float]]:
    """Methods, and the seconds of their tests, of tests that were timed from the first client to the last."""
    return [
        (each.event.method, each.updated - each.began)
        for each in steps
        if isinstance(each.event, AnswerEvent) and each.event.is_over and find_pace(each) is not None
    ]


def collect_scores(folder: Path, stems: Iterable[str]) -> tuple[Accuracies, int]:
    """Accuracy by method and test, mean over clients, then over seeds; and how many files cannot be read."""
    cells: dict[tuple[str, str], dict[int, float]] = {}
    unreadable = 0
    for stem in stems:
        try:
            path = folder / "answers" / f"{stem}.json"
            for method, test, seed, percent in _read_answer(path, path.stat().st_mtime_ns):
                cells.setdefault((method, test), {})[seed] = percent  # later stages of a curve replace earlier ones
        except (OSError, ValueError, RecursionError):
            unreadable += 1
    scores: Accuracies = {}
    for (method, test), seeds in cells.items():
        scores.setdefault(method, {})[test] = fmean(seeds.values())
    return scores, unreadable


@lru_cache(maxsize=4096)
def _read_answer(path: Path, changed: int) -> tuple[tuple[str, str, int, float], ...]:
    """Method, test, seed, and the mean over clients. `changed` is for the cache: a file that changed is read again."""
    clients: dict[tuple[str, str, int], list[float]] = {}
    for row in check(store.read_sealed(path), ANSWER, "the answer")["rows"]:
        clients.setdefault((row["method"], row["test"], row["seed"]), []).append(row["accuracy"])
    return tuple((*place, fmean(percents)) for place, percents in clients.items())


def show(live: Live, folder: Path, now: float) -> RenderableType:
    """The state of a run as a screen."""
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
        parts.append(Text(f"{unreadable} answers cannot be read", style="yellow"))
    parts += [Text(f"failed: {clean(why, 300)}", style="red") for why in live.failures[-RECENT:]]
    parts.append(Constrain(Group(*_show_steps(live)), WIDTH))
    return Group(*parts)


def _show_progress(live: Live, now: float, silent: bool) -> Iterator[RenderableType]:
    """The current step, or that of every worker."""
    from rich.text import Text

    if live.state != "running":
        return
    if not live.steps:
        yield Text("no progress yet", style="dim")
        return
    current = list_current(live)
    at_work = [step for step in current if not (step.event.worker and step.event.is_over)]
    for step in at_work[:MOST_WORKERS]:
        yield from _show_step(live, step, now, silent)
    if len(at_work) > MOST_WORKERS:
        yield Text(f"and {len(at_work) - MOST_WORKERS} more", style="dim")


def _show_step(live: Live, step: LiveStep, now: float, silent: bool) -> Iterator[RenderableType]:
    """A bar, and the pace."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    event = step.event
    line = Table.grid(padding=(0, 2), expand=True)
    line.add_column(ratio=1, overflow="fold")
    line.add_column(no_wrap=True, justify="right")
    line.add_row(Text(clean(event.describe(), 200), style="bold"), Text(clean(event.remark, 30)))
    yield line
    bar = Table.grid(expand=True)  # a bar alone does not end its line
    bar.add_row(ProgressBar(max(event.total, 1), min(event.done, event.total), complete_style=COLOURS["running"]))
    yield bar
    pace, left = find_pace(step), None if silent else estimate_step(live, step, now)
    speed = "" if pace is None else f"{say_pace(pace)} per {event.unit or 'step'}"
    wait = "" if left is None or event.is_over else f"done in about {say_seconds(left)}"
    place = f"{event.unit} {event.done} of {event.total}".strip()
    yield Text(", ".join(part for part in (place, speed, wait) if part), style="dim")


def _say_counts(live: Live, now: float, silent: bool) -> Iterator[str]:
    """Trainings and answers so far, the time they took, and the time left."""
    begun = sum(step.event.trainings for step in live.steps)
    over = begun - sum(step.event.trainings for step in list_current(live) if not step.event.is_over)
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
    """The finished steps, the latest last."""
    from rich.table import Table
    from rich.text import Text

    at_work = [id(step) for step in list_current(live)] if live.state == "running" else []
    over = sorted((step for step in live.steps if id(step) not in at_work), key=lambda step: step.updated)
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
    """Methods x tests. Columns that do not fit the width go below."""

    scores: Accuracies

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.measure import Measurement
        from rich.text import Text

        tests = list(dict.fromkeys(test for row in self.scores.values() for test in row))
        unlimited = options.update(max_width=1000)
        yield Text("accuracy (%), mean over clients and seeds", style="bold")
        while tests:
            ways = [(number, gap) for number in range(len(tests), 0, -1) for gap in (2, 1)]
            tables = (self._make(tests[:number], gap) for number, gap in ways)
            fit = (each for each in tables if Measurement.get(console, unlimited, each).maximum <= options.max_width)
            table = next(fit, self._make(tests[:1], 1))
            yield table
            tests = tests[len(table.columns) - 1 :]

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
    """42 s, 5 min, 2 h 10 min or 3 d 4 h."""
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
    if seconds < 0.1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else say_seconds(seconds)


def _say_when(then: float, now: float) -> str:
    shape = "%H:%M:%S" if now - then < 12 * 3600 else "%Y-%m-%d %H:%M"
    return time.strftime(shape, time.localtime(then))
