"""Commands are killed at random moments, or two run at a time in one folder; then the same command resumes."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

from . import runs
from .trial import CRASHED, Ground, Kind, Said, Verdict, find_error, judge_printed, judge_run, say, start, wait

# of a whole run, roughly: audit events of the interpreter, and those of them that change files
EVENTS = {"fresh": 75_000, "with a round more": 31_000}
CHANGING = {"fresh": 370, "with a round more": 400}
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.chmod", "os.truncate")


def attempt(ground: Ground, rng: random.Random, number: int, place: Path) -> tuple[str, Verdict]:
    finished = number % 3 == 2
    way = "with a round more" if finished else "fresh"
    words = [*runs.COMMAND, *(runs.WAYS[way][0] if finished else ())]
    work = ground.copy(place / "work", run=finished)
    number_signal = rng.choice([signal.SIGKILL, signal.SIGTERM])
    writes = rng.random() < 0.5
    moment = rng.randrange(1, (CHANGING if writes else EVENTS)[way])
    together = number % 4 == 1
    victim = not together or rng.random() < 0.5  # of two, one is killed or none
    started = [
        start(words, work, (lambda: die_at(moment, writes, number_signal)) if victim and i == 0 else None)
        for i in range(2 if together else 1)
    ]
    expected = ground.expected[way]
    whom = "two at a time, and one of them" if together else "one command"
    what = f"{whom}: {signal.Signals(number_signal).name} at {'change' if writes else 'event'} {moment}"
    what = what if victim else "two at a time, none killed"
    what += f"; {'a round more for a finished run' if finished else 'a fresh run'}"
    ended = [wait(each, idle=30.0) for each in started]  # one may wait for the other
    verdicts = [
        judge_end(said) if victim and i == 0 and said.code != 0 else judge_printed(said, expected)
        for i, said in enumerate(ended)
    ]
    last = judge_run(say(words, work), work / "run", expected)
    if last.outcome == "refused":
        last = Verdict("lost", f"the same command does not resume: {last.why}")
    bad = [each for each in (*verdicts, last) if each.outcome not in ("same", "refused", "redone")]
    survived = victim and verdicts[0].outcome in ("same", "redone")
    return f"{what}{' (it was done before)' if survived else ''}", bad[0] if bad else last


def judge_end(said: Said) -> Verdict:
    """A killed command may print anything but a traceback."""
    if said.hung:
        return Verdict("hang", "it did not end")
    if "Traceback (most recent call last)" in said.err or said.code == CRASHED:
        return Verdict("traceback", find_error(said.err))
    return Verdict("refused", f"ended with {said.code}")


def die_at(moment: int, writes: bool, number: int) -> None:
    """The process sends itself a signal at this event of the interpreter, so that a case dies at the same place."""
    seen = 0

    def hear(event: str, given: tuple[Any, ...]) -> None:
        nonlocal seen
        if writes and not (event in CHANGES or (event == "open" and _is_write(given))):
            return
        seen += 1
        if seen == moment:
            os.kill(os.getpid(), number)

    sys.addaudithook(hear)


def _is_write(given: tuple[Any, ...]) -> bool:
    _, mode, flags = given
    return bool((isinstance(mode, str) and set(mode) & set("wxa+")) or (isinstance(flags, int) and flags & 3))


KIND = Kind("kills", 20, 4, attempt)
