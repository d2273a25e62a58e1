"""runs/NAME/progress.json: the progress of a running experiment, for `fedthe watch`."""

from __future__ import annotations

import json
import math
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from .. import store
from ..errors import Failed, InputError
from ..text import clean, flatten
from .events import AnswerEvent, Event, TrainEvent, WaitEvent, WorkEvent, listening

T = TypeVar("T")
FILE = "progress.json"
FORMAT = 3
KINDS: dict[str, type[Event]] = {each.kind: each for each in (TrainEvent, AnswerEvent, WaitEvent, WorkEvent)}
STATES = ("running", "done", "stopped", "failed")
EVERY = 1.0  # seconds between writes during a step
BEAT = 10.0  # seconds between writes without news, so that a run in a long round does not look dead
SILENCE = 60.0  # seconds without a write after which a run counts as dead


@dataclass(frozen=True)
class LiveStep:
    """A piece of work: its latest event, and when it began."""

    event: Event
    began: float
    first: int  # done at that time: a training may continue from a checkpoint
    updated: float


@dataclass(frozen=True)
class Live:
    """A run as it was at `updated`. All times are in seconds since 1970."""

    state: str  # one of STATES
    why: str  # why it failed; "" otherwise
    pid: int
    host: str
    began: float
    updated: float
    trainings: int  # that this run has to do, without those finished before
    answers: int  # of the whole experiment
    answered: tuple[str, ...]  # stems of the files in answers/
    failures: tuple[str, ...]  # answers that will be missing, and why
    steps: tuple[LiveStep, ...]  # the last of each worker is in progress


class Recorder:
    """Listens to a run and writes its file. A failure to write does not stop the run."""

    def __init__(self, folder: Path, trainings: int, answers: int, clock: Callable[[], float] = time.time) -> None:
        now = clock()
        self.live = Live("running", "", os.getpid(), platform.node(), now, now, trainings, answers, (), (), ())
        self._path, self._clock = folder / FILE, clock
        self._lock = threading.Lock()
        with suppress(InputError):
            store.make_folder(folder)
        self._save()

    def hear(self, event: Event) -> None:
        with self._lock:
            now, steps = self._clock(), self.live.steps
            own = [step for step in steps if step.event.worker == event.worker]
            others = [step for step in steps if step.event.worker != event.worker]
            at = _find_open(own, event)
            step = LiveStep(event, now, event.done, now) if at is None else own.pop(at)
            own.append(replace(step, event=event, updated=now))
            self._change(at is None or at < len(own) - 1, steps=(*others, *own))

    def add_answer(self, stem: str) -> None:
        """answers/STEM.json is written."""
        with self._lock:
            if stem not in self.live.answered:
                self._change(False, answered=(*self.live.answered, stem))

    def add_failure(self, why: str) -> None:
        """An answer will be missing."""
        with self._lock:
            self._change(False, failures=(*self.live.failures, flatten(why, 300)))

    def beat(self) -> None:
        """Write pending changes, and without any a sign of life now and then."""
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
        return not 0 <= self._clock() - self.live.updated < seconds  # negative: the clock was set back

    def _save(self) -> None:
        self.live = replace(self.live, updated=self._clock())
        self._news = False
        if self._path.parent.is_dir():  # a folder that somebody removed stays removed
            steps = [_flatten_step(step) for step in self.live.steps]
            with suppress(OSError, InputError):
                store.write_json(self._path, {"format": FORMAT, **asdict(replace(self.live, steps=())), "steps": steps})


@contextmanager
def recording(
    folder: Path, *, trainings: int, answers: int, clock: Callable[[], float] = time.time
) -> Iterator[Recorder]:
    """Within the block, `fedthe watch FOLDER` shows the progress.

    trainings: how many are left to do (one method on three seeds is three); answers: how many there will be.
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


def _find_open(steps: Sequence[LiveStep], event: Event) -> int | None:
    """The index of the step that this event continues. Others may come in between: a test corrupts images first."""
    for at, step in reversed(list(enumerate(steps))):
        if event.continues(step.event):
            last = at == len(steps) - 1  # seeds that train together each report the last round
            again = event.done < step.event.done or (step.event.is_over and not last)
            return None if again else at
    return None


def _flatten_step(step: LiveStep) -> dict[str, Any]:
    """A step for JSON, where numbers that are not finite become null."""
    event = asdict(step.event)
    known = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in event.items()}
    return {"kind": step.event.kind, **known, "began": step.began, "first": step.first, "updated": step.updated}


def _say_error(error: BaseException) -> str:
    words = flatten(error, 300)
    if isinstance(error, InputError | Failed) and words:
        return words
    return f"{type(error).__name__}: {words}".rstrip(": ")


def read_progress(folder: Path) -> Live:
    """The progress of the run in `folder`."""
    path = folder / FILE
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}; name that of a run, such as runs/quick.")
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is not a regular file.")  # reading a pipe would block
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if type(value["format"]) is not int:
            raise TypeError("it has no format")
        if value["format"] == FORMAT:
            return _parse(value)
    except FileNotFoundError:
        raise InputError(f"{folder} holds no run to watch: there is no {FILE} in it.") from None
    except (OSError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged ({clean(str(error))}); a run in progress will rewrite it.") from None
    known = f"this version of fedthe knows format {FORMAT}"
    raise InputError(f"{path} has format {value['format']}, but {known}; use the version that writes it.")


def _parse(value: Mapping[str, Any]) -> Live:
    if not isinstance(value["steps"], list):
        raise TypeError("its steps are not a list")
    steps = [_fill(LiveStep, step, event=_fill(KINDS[step["kind"]], step)) for step in value["steps"]]
    live = _fill(Live, value, steps=tuple(steps))
    if live.state not in STATES:
        raise ValueError(f"state {live.state!r}")
    if not all(Path(stem).name == stem for stem in live.answered):
        raise ValueError("the name of an answer is a path")
    return live


def _fill(kind: type[T], value: Mapping[str, Any], **made: Any) -> T:
    """Build a dataclass from a dict, and check types; `made` are fields that the caller built."""
    hints = {each.name: str(each.type) for each in fields(kind) if each.name not in made}  # type: ignore[arg-type]
    return kind(**{name: _check(name, value[name], hint) for name, hint in hints.items()}, **made)


def _check(name: str, value: Any, hint: str) -> Any:
    """The value, if it has the type of an annotation such as tuple[str, ...]."""
    if hint.startswith("tuple[") and type(value) is list:
        return tuple(_check(name, each, hint[len("tuple[") : -len(", ...]")]) for each in value)
    if hint == "float | None" and (value is None or type(value) in (int, float)):
        return value
    known = {"str": (str,), "int": (int,), "float": (int, float)}.get(hint, ())
    if type(value) not in known or (type(value) in (int, float) and not 0 <= value < 1e12):
        raise TypeError(f"{name} is {repr(value)[:60]}")
    return value
