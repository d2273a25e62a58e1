"""The disk becomes full during a run; then there is space again, and the same command resumes."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import runs
from .trial import Ground, Kind, Verdict, find_loss, judge_run, say, take_stock

SIZES = (8, 40, 120, 500, 1000, 1600, 2400, 2900, 3200, 3800, 6000, 9000)  # KB; all that a run leaves is 8,500
FILE_SIZES = (0, 1, 3, 9, 18, 23, 40, 100, 400, 464, 467, 1000)  # KB of one file; its largest checkpoint has 468
PLENTY = 64_000  # KB


def attempt(ground: Ground, rng: random.Random, number: int, place: Path) -> tuple[str, Verdict]:
    size = SIZES[number % len(SIZES)]
    finished = number % 3 == 2  # a finished run gets one more round
    way = "with a round more" if finished else "fresh"
    words = [*runs.COMMAND, *(runs.WAYS[way][0] if finished else ())]
    disk = place / "disk"
    disk.mkdir()
    with _small_disk(disk, PLENTY) as is_real:
        work = ground.copy(disk / "work", run=finished)
        if is_real and number % 2 == 0:
            used = sum(path.stat().st_size for path in work.rglob("*") if path.is_file()) // 1000
            what = f"a tmpfs with {size} KB of room"
            _resize(disk, used + size)
            before, said = take_stock(work), say(words, work)
            _resize(disk, PLENTY)
        else:
            size = FILE_SIZES[number % len(FILE_SIZES)]
            what = f"files of at most {size} KB (RLIMIT_FSIZE)"
            before, said = take_stock(work), say(words, work, lambda: _limit_files(size))
        what += f"; {'a round more for a finished run' if finished else 'a fresh run'}"
        first = judge_run(said, work / "run", ground.expected[way])
        if first.outcome not in ("same", "refused", "redone"):
            return what, first
        lost = find_loss(before, take_stock(work), set(), refused=False)
        if lost:
            return what, Verdict("lost", f"{lost}; it said: {first.why}")
        second = judge_run(say(words, work), work / "run", ground.expected[way])
        if second.outcome == "refused":
            return what, Verdict("lost", f"with space again the same command does not resume: {second.why}")
        return what, second if second.outcome not in ("same", "redone") else first


@contextmanager
def _small_disk(folder: Path, size: int) -> Iterator[bool]:
    """Mount a tmpfs at `folder`; False where that is not allowed."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "none", str(folder)]
    try:
        mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _resize(folder: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}k", str(folder)], check=True)


def _limit_files(size: int) -> None:
    """Limit files to `size` KB: a larger write fails with EFBIG, as it fails with ENOSPC on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000 * size, 1000 * size))


KIND = Kind("disks", 12, 2, attempt)
