"""A case: a command in its own process, its output, and how that is judged."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GOOD = ("same", "refused", "redone")
BAD = ("silent", "traceback", "hang", "lost")
LIMIT = 90.0  # seconds for one command; those here take three on an idle core
IDLE = 6.0  # seconds asleep in a row: it waits for something that never comes, such as the writer of a pipe
AWAKE = 0.3  # seconds of CPU meanwhile: other threads work, and do more than draw progress bars
MEMORY = 3 << 30  # bytes that a command may use beyond those of the imported package
CRASHED = 70  # exit code of a command that ended with an exception
TABLES = ("results", "std_over_seeds", "worst_client", "curves", "manifests")
DAMAGE = re.compile(
    r"damaged|missing|unreadable|not (?:known|readable|there|whole)|left out|cannot be|another name|changed",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Said:
    """The exit code of a command, or minus the signal that ended it, and its output."""

    code: int
    out: str
    err: str
    hung: bool = False

    @property
    def sentences(self) -> list[str]:
        """Messages to the user besides the results: refusals, warnings, what was computed again."""
        return [line for line in self.err.splitlines() if line.startswith("fedthe:") or "Warning:" in line]


@dataclass(frozen=True)
class Verdict:
    outcome: str  # one of GOOD or BAD
    why: str = ""


@dataclass(frozen=True)
class Kind:
    name: str
    long: int  # cases in the long form
    short: int  # cases in the short form
    attempt: Callable[[Ground, random.Random, int, Path], tuple[str, Verdict]]  # what was done, and the verdict
    prepare: Callable[[Ground, Path], None] | None = None  # before all cases: what they compare with

    @property
    def step(self) -> int:
        """The short form takes every n-th case of the long one; n is odd, so that all ways occur."""
        return self.long // self.short | 1


@dataclass(frozen=True)
class Ground:
    """What all cases start from: an undamaged run, and what commands print on it."""

    folder: Path  # holds work/: tiny.npz, tiny.toml, run/ and home/
    expected: dict[Any, Any]

    def copy(self, place: Path, run: bool = True) -> Path:
        """A fresh copy of the folder, with or without the files of the run."""
        skip = None if run else shutil.ignore_patterns("run", "home")
        shutil.copytree(self.folder / "work", place, ignore=skip, symlinks=True)
        return place


@dataclass(frozen=True)
class Started:
    """A running command: its process, and the pipes of its output."""

    pid: int
    out: int
    err: int


def start(words: Sequence[str], cwd: Path, before: Callable[[], object] | None = None) -> Started:
    """Start `fedthe WORDS` in a fork of this process, which has the package imported already."""
    pipes = os.pipe(), os.pipe()  # no files: the disk may be full
    pid = os.fork()
    if pid:
        for read, write in pipes:
            os.close(write)
            os.set_blocking(read, False)
        return Started(pid, pipes[0][0], pipes[1][0])
    code = CRASHED
    try:
        os.chdir(cwd)
        for number, (_, write) in enumerate(pipes, 1):
            os.dup2(write, number)
        os.environ.update(FEDTHE_HOME="home", COLUMNS="200")
        sys.argv = ["fedthe", *words]
        _limit_memory()
        if before:
            before()
        from fedthe import cli

        cli.main()
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 0 if stopped.code is None else 1
    except BaseException:  # the traceback that a user would see
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def wait(started: Started, limit: float = LIMIT, idle: float = IDLE) -> Said:
    """Wait for a command. One that takes or sleeps too long is killed by its process id."""
    began = awake = time.monotonic()
    worked = 0.0  # seconds of CPU when it was last awake
    hung, ended, status = False, 0, 0
    words: dict[int, bytes] = {started.out: b"", started.err: b""}
    while not ended:
        ended, status = os.waitpid(started.pid, os.WNOHANG)
        for pipe in words:
            words[pipe] += _read_all(pipe)
        now = time.monotonic()
        state, seconds = _look_at(started.pid)
        if state != "S" or seconds - worked > AWAKE:
            awake, worked = now, seconds
        if not ended and not hung and (now - began > limit or now - awake > idle):
            hung = True
            os.kill(started.pid, signal.SIGKILL)
        time.sleep(0 if ended else 0.003)
    for pipe in words:
        os.close(pipe)
    out, err = (held.decode("utf-8", errors="backslashreplace") for held in words.values())
    return Said(os.waitstatus_to_exitcode(status), out, err, hung)


def _read_all(pipe: int) -> bytes:
    held = b""
    with suppress(BlockingIOError):
        while part := os.read(pipe, 1 << 16):
            held += part
    return held


def say(words: Sequence[str], cwd: Path, before: Callable[[], object] | None = None) -> Said:
    """Run `fedthe WORDS` and wait for it."""
    return wait(start(words, cwd, before))


def _look_at(pid: int) -> tuple[str, float]:
    """The state of a process's main thread, and the CPU seconds of all its threads."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return "?", 0.0  # unknown without /proc


def _limit_memory() -> None:
    """A command that uses up the memory of the machine would kill other processes."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)


def judge_words(said: Said) -> Verdict | None:
    """The verdict from the output alone; None for a command that succeeded."""
    if said.hung:
        return Verdict("hang", "it was still waiting when the time was up")
    text = said.err + said.out
    if "Traceback (most recent call last)" in text or said.code == CRASHED:
        return Verdict("traceback", find_error(text))
    if said.code < 0:
        return Verdict("traceback", f"it was ended by signal {-said.code}")
    if "\x1b" in text or "\x07" in text:
        return Verdict("silent", "control characters reach the terminal")
    if said.code == 0:
        return None
    if said.code in (1, 2) and text.strip():
        lines = [line for line in said.err.splitlines() if line.startswith("fedthe:")]
        return Verdict("refused", lines[-1] if lines else " ".join(text.split())[-200:])
    return Verdict("traceback", f"exit code {said.code} without a message: {' '.join(text.split())[-200:]}")


def find_error(text: str) -> str:
    """The last line of a traceback, and the deepest line of the package that it names."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    places = re.findall(r'File "[^"]*/(fedthe/[^"]+)", line (\d+), in (\S+)', text)
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Warning|Interrupt|Exit)\b", line)]
    where = " ({}:{} in {})".format(*places[-1]) if places else ""
    return (errors[-1] if errors else lines[-1] if lines else "no words")[:200] + where


def judge_run(said: Said, folder: Path, expected: dict[str, Any]) -> Verdict:
    """Whether `fedthe run --json` gave the numbers of an undamaged run, or said why not."""
    verdict = judge_words(said)
    if verdict and verdict.outcome != "refused":
        return verdict
    if verdict and said.code == 2:
        return verdict
    try:
        numbers = read_numbers(folder, said.out)
        failures = read_json(folder / "summary.json")["failures"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        return verdict or Verdict("silent", f"exit 0, but its results cannot be read: {error}")
    if failures:  # failed methods are named, and the others must be correct
        wrong = [row for row in numbers["rows"] if row not in expected["rows"]]
        gone = {f"{row['method']}, seed {row['seed']}" for row in expected["rows"] if row not in numbers["rows"]}
        if not wrong and gone <= set(failures):
            return Verdict("refused", next(iter(failures.values())))
        return Verdict("silent", f"other numbers beside failures: {wrong[:1]}")
    if verdict:
        return verdict
    for name, value in expected.items():
        if numbers[name] != value:
            return Verdict("silent", f"other {name}: {find_difference(value, numbers[name])}")
    made = [line for line in said.sentences if "report is not complete" not in line]
    return Verdict("redone", made[0]) if made else Verdict("same")


def read_numbers(folder: Path, printed: str) -> dict[str, Any]:
    """All numbers of a run except times: the output, the files of results, and the values of every sample."""
    import pyarrow.parquet

    from fedthe import records

    lines = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    summary = read_json(folder / "summary.json")
    samples: dict[str, Any] = {}
    for name in summary["answers"]:
        try:
            kept = records.read_samples(folder / "samples" / f"{name}.npz")
        except Exception:  # an unreadable file gives no wrong number; the kind `reports` tests it
            kept = {}
        samples[name] = {column: kept[column].tolist() for column in sorted(kept)} or None
    return {
        "rows": [_drop_time(json.loads(line)) for line in lines],
        "parquet": [_drop_time(row) for row in pyarrow.parquet.read_table(folder / "results.parquet").to_pylist()],
        "summary": {name: summary[name] for name in TABLES},
        "printed": read_printed(printed),
        "passes": {name: [each["forward"], each["backward"]] for name, each in summary["costs"].items()},
        "samples": Samples(samples),
    }


def read_printed(text: str) -> dict[str, Any]:
    """The tables of `fedthe run --json`."""
    value = json.loads(text)
    return {name: value[name] for name in TABLES}


def judge_printed(said: Said, expected: dict[str, Any]) -> Verdict:
    """The same for the output alone: another command may be changing the files."""
    verdict = judge_words(said)
    if verdict:
        return verdict
    try:
        printed = read_printed(said.out)
    except (ValueError, LookupError, TypeError) as error:
        return Verdict("silent", f"exit 0, but what it printed cannot be read: {error}")
    same = printed == expected["printed"]
    return Verdict("same") if same else Verdict("silent", find_difference(expected["printed"], printed))


class Samples(dict):  # type: ignore[type-arg]
    """Values of every sample; equal if all that both sides could read is equal."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Samples) and all(
            self[name] is None or other.get(name) is None or self[name] == other[name] for name in self
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None


def _drop_time(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "ms_per_sample"}


def find_difference(a: Any, b: Any, where: str = "") -> str:
    """Where two values first differ."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return next(find_difference(a[key], b[key], f"{where}.{key}") for key in a if a[key] != b[key])
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return next(find_difference(x, y, f"{where}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    if isinstance(a, dict | list) and isinstance(b, dict | list):
        return f"{where.lstrip('.')} has {len(b)} entries, not {len(a)}"
    return f"{where.lstrip('.')} is {str(b)[:40]}, not {str(a)[:40]}"


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def take_stock(folder: Path) -> dict[str, str]:
    """Every file below a folder, by path: a hash of its content, or its kind."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path.relative_to(folder))] = f"link to {os.readlink(path)}"
        elif path.is_fifo():
            found[str(path.relative_to(folder))] = "FIFO"
        elif path.is_file():
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def find_loss(before: dict[str, str], after: dict[str, str], spare: set[str], refused: bool) -> str:
    """A file that is gone or, after a refusal, has changed. Those in `spare` may change, and files may move."""
    kept = set(after.values())
    for path, held in before.items():
        if path in spare or Path(path).name in ("progress.json", "report.html"):
            continue
        if path not in after and held not in kept:
            return f"{path} is gone"
        if refused and path in after and after[path] != held and held not in kept:
            return f"{path} has changed"
    return ""
