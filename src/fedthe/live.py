"""What a running experiment tells those who watch it: runs/NAME/progress.json, written whole again and again."""

from __future__ import annotations

import json
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from . import store
from .errors import Failed, InputError
from .progress import listening
from .text import clean, flatten

T = TypeVar("T")
FILE = "progress.json"
FORMAT = 1
STATES = ("running", "done", "stopped", "failed")
EVERY = 1.0  # seconds: what is told more often waits
BEAT = 10.0  # seconds: a file this old is written again, so that a long round is not taken for a dead run
SILENCE = 60.0  # seconds after which a run that says nothing is taken for dead


@dataclass(frozen=True)
class Step:
    """Something that takes long: a training, the test of a method, or what comes before them."""

    what: str
    done: int
    total: int
    remark: str
    began: float  # when it was first heard of
    first: int  # how much was done then: what went on from a checkpoint does not begin with 0
    updated: float


@dataclass(frozen=True)
class Live:
    """A run as it was at `updated`. All times are in seconds since 1970."""

    state: str  # one of STATES
    why: str  # it failed, in a line; "" otherwise
    pid: int
    host: str
    began: float
    updated: float
    trainings: int  # to do in this run: those that were there at its beginning do not count
    answers: int  # of the whole experiment
    answered: tuple[str, ...]  # answers/STEM.json
    failures: tuple[str, ...]  # which answers there will not be, and why
    steps: tuple[Step, ...]  # in their order; the last is going on


class Recorder:
    """Hears what the work tells, and keeps the file. Whatever hinders the writing never stops the run."""

    def __init__(self, folder: Path, trainings: int, answers: int, clock: Callable[[], float] = time.time) -> None:
        now = clock()
        self.live = Live("running", "", os.getpid(), platform.node(), now, now, trainings, answers, (), (), ())
        self._path, self._clock = folder / FILE, clock
        self._lock = threading.Lock()
        with suppress(InputError):
            store.make_folder(folder)
        self._save()

    def hear(self, what: str, done: int, total: int, remark: str) -> None:
        with self._lock:
            now, steps = self._clock(), list(self.live.steps)
            at = _find_open(steps, what, done, total)
            step = Step(what, done, total, remark, now, done, now) if at is None else steps.pop(at)
            steps.append(replace(step, done=done, total=total, remark=remark, updated=now))
            self._change(at is None or at < len(steps) - 1, steps=tuple(steps))

    def add_answer(self, stem: str) -> None:
        """answers/STEM.json is there."""
        with self._lock:
            if stem not in self.live.answered:
                self._change(False, answered=(*self.live.answered, stem))

    def add_failure(self, why: str) -> None:
        """An answer that will not come."""
        with self._lock:
            self._change(False, failures=(*self.live.failures, flatten(why, 300)))

    def beat(self) -> None:
        """Write what waits; and now and then the same again, as a sign of life."""
        with self._lock:
            if self._is_older_than(EVERY if self._news else BEAT):
                self._save()

    def end(self, state: str, why: str = "") -> None:
        with self._lock:
            self._change(True, state=state, why=why)

    def _change(self, at_once: bool, **news: Any) -> None:
        self.live = replace(self.live, **news)
        self._news = True
        if at_once or self._is_older_than(EVERY):
            self._save()

    def _is_older_than(self, seconds: float) -> bool:
        return not 0 <= self._clock() - self.live.updated < seconds  # a clock that was set back has no say

    def _save(self) -> None:
        self.live = replace(self.live, updated=self._clock())
        self._news = False
        if self._path.parent.is_dir():  # who removed it does not want it back
            with suppress(OSError, InputError):
                store.write_json(self._path, {"format": FORMAT, **asdict(self.live)})


@contextmanager
def recording(
    folder: Path, *, trainings: int, answers: int, clock: Callable[[], float] = time.time
) -> Iterator[Recorder]:
    """Within the block, whoever watches `folder` sees how far the work is. What was there before is replaced.

    trainings: how many are still to be done (one method on three seeds is three); answers: how many there will be.
    """
    recorder, over = Recorder(folder, trainings, answers, clock), threading.Event()

    def beat() -> None:
        while not over.wait(EVERY):
            recorder.beat()

    heart = threading.Thread(target=beat, daemon=True)
    heart.start()
    try:
        with listening(recorder.hear):
            yield recorder
    except (KeyboardInterrupt, SystemExit):
        recorder.end("stopped")
        raise
    except BaseException as error:
        recorder.end("failed", _say_error(error))
        raise
    else:
        recorder.end("done")
    finally:
        over.set()
        heart.join()


def _find_open(steps: Sequence[Step], what: str, done: int, total: int) -> int | None:
    """Where the step is that this goes on with. Others may have come in between: a test corrupts its images first."""
    for at, step in reversed(list(enumerate(steps))):
        if step.what == what and step.total == total:
            last = at == len(steps) - 1  # seeds that train together all tell of the last round
            return at if done >= step.done and (last or step.done < step.total) else None  # or the next seed begins
    return None


def _say_error(error: BaseException) -> str:
    """Why, in a line."""
    words = flatten(error, 300)
    return (
        words if isinstance(error, InputError | Failed) and words else f"{type(error).__name__}: {words}".rstrip(": ")
    )


def count_trainings(what: str) -> int:
    """How many trainings a step is: "training fedrod and fedthe, 3 seeds" is six, and a test is none."""
    match = re.fullmatch(r"training (.+?)(?:, (\d+) seeds)?", what)
    return len(match[1].split(" and ")) * int(match[2] or 1) if match else 0


def read_progress(folder: Path) -> Live:
    """How far the run in `folder` is."""
    path = folder / FILE
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}; name that of a run, such as runs/quick.")
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is not a regular file.")  # reading a pipe would wait for ever
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{folder} holds no run that can be watched: there is no {FILE} in it.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, error) from None
    try:
        if type(value["format"]) is not int:
            raise TypeError("it has no format")
        if value["format"] != FORMAT:
            known = f"this version of fedthe knows format {FORMAT}"
            raise InputError(f"{path} has format {value['format']}, but {known}; use the one that runs it.")
        if not all(isinstance(value[name], list) for name in ("steps", "answered", "failures")):
            raise TypeError("its steps, answered or failures are no list")
        steps = tuple(_fill(Step, step) for step in value["steps"])
        lists = {name: tuple(value[name]) for name in ("answered", "failures")}
        live = _fill(Live, value | lists | {"steps": steps})
        if live.state not in STATES:
            raise ValueError(f"state {live.state!r}")
        if not all(isinstance(stem, str) and Path(stem).name == stem for stem in live.answered):
            raise ValueError("an answer has no name")
        if not all(isinstance(why, str) for why in live.failures):
            raise ValueError("a failure has no reason")
        return live
    except InputError:
        raise
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> InputError:
    return InputError(f"{path} is damaged ({clean(str(error))}); a run that goes on writes it again.")


def _fill(kind: type[T], value: Mapping[str, Any]) -> T:
    """The dataclass with these values, if every one of them is what it should be."""
    wanted = {"str": (str,), "int": (int,), "float": (int, float)}
    found = {each.name: value[each.name] for each in fields(kind)}  # type: ignore[arg-type]
    for each in fields(kind):  # type: ignore[arg-type]
        one = found[each.name]
        if type(one) not in wanted.get(str(each.type), (tuple,)) or (type(one) in (int, float) and not 0 <= one < 1e12):
            raise TypeError(f"{each.name} is {repr(one)[:60]}")
    return kind(**found)
