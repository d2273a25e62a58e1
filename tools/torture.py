"""A stress test: disturb fedthe in many ways, and count the outcomes.

usage: python tools/torture.py [--short] [--json FILE] [--only KIND:NUMBER] [--jobs N]

A case damages a copy of a tiny run, or gives a command bad input, a full disk or a kill, and judges what the command
says. Good outcomes: `same` (the numbers of an undisturbed run), `refused` (a message and exit code 2, or 1 for a failed
experiment), `redone` (computed again with the same numbers, and a message). Bad ones: `silent` (other numbers without a
message), `traceback` (or a crash, or an exit without a message), `hang`, `lost` (an existing file is gone). The seed
determines every case. The exit code is 1 if there was a bad outcome.

With --json benchmarks/torture.json the table in docs/trust.md is written as well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from hostile import disks, images, kills, reports, runs, settings, trial

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "torture.json"
PAGE = ROOT / "docs" / "trust.md"
MARKED = re.compile(r"<!-- torture -->\n.*?<!-- end -->", re.DOTALL)
ROOM = 1 << 30  # bytes
KINDS = {each.KIND.name: each.KIND for each in (runs, reports, settings, images, disks, kills)}


@dataclass(frozen=True)
class Tried:
    kind: str
    number: int
    outcome: str
    what: str
    why: str


def attempt(ground: trial.Ground, kind: str, number: int, seed: int, folder: Path) -> Tried:
    """One case, in its own folder. The seed, the kind and the number determine it."""
    place = folder / f"{kind}-{number}"
    place.mkdir()
    rng = random.Random(f"{seed}:{kind}:{number}")
    what, verdict = KINDS[kind].attempt(ground, rng, number, place)
    shutil.rmtree(place, ignore_errors=True)
    what, why = (
        re.sub("|".join(map(re.escape, map(str, (place, folder, ROOT)))), "", text) for text in (what, verdict.why)
    )
    return Tried(kind, number, verdict.outcome, what, why)


def attempt_all(ground: trial.Ground, tries: list[tuple[str, int]], seed: int, folder: Path, jobs: int) -> list[Tried]:
    """All cases, `jobs` at a time, each in its own process."""
    left, done = list(reversed(tries)), []
    running: dict[int, tuple[str, int, Path]] = {}
    while left or running:
        while left and len(running) < jobs:
            kind, number = left.pop()
            file = folder / f"{kind}-{number}.json"
            pid = os.fork()
            if pid == 0:
                _attempt_and_leave(ground, kind, number, seed, folder, file)
            running[pid] = kind, number, file
        pid, status = os.wait()
        kind, number, file = running.pop(pid)
        if status:
            raise SystemExit(f"the stress test itself failed in {kind}:{number}")
        tried = Tried(**trial.read_json(file))
        file.unlink()
        done.append(tried)
        if tried.outcome in trial.BAD:
            print(f"{kind}:{number} {tried.outcome}: {tried.what}\n    {tried.why}", flush=True)
    return sorted(done, key=lambda each: (list(KINDS).index(each.kind), each.number))


def _attempt_and_leave(ground: trial.Ground, kind: str, number: int, seed: int, folder: Path, file: Path) -> NoReturn:
    """What a forked process does. It exits without the clean-up of its parent."""
    code = 1
    try:
        file.write_text(json.dumps(asdict(attempt(ground, kind, number, seed, folder))), encoding="utf-8")
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def summarize(done: list[Tried], seed: int) -> dict[str, Any]:
    counts = {
        kind: dict(Counter(each.outcome for each in done if each.kind == kind))
        for kind in KINDS
        if any(each.kind == kind for each in done)
    }
    bad = [asdict(each) for each in done if each.outcome in trial.BAD]
    return {"what": "hostile tries by kind and outcome", "seed": seed, "counts": counts, "bad": bad}


def lay_out(summary: dict[str, Any]) -> str:
    """The counts as a Markdown table."""
    outcomes = (*trial.GOOD, *trial.BAD)
    lines = [
        f"| kind | cases | {' | '.join(outcomes)} |",
        f"| --- | ---: | {' | '.join('---:' for _ in outcomes)} |",
    ]
    total: Counter[str] = Counter()
    for kind, counts in summary["counts"].items():
        total.update(counts)
        lines.append(_write_row(kind, counts))
    return "\n".join([*lines, _write_row("all", total)])


def _write_row(name: str, counts: dict[str, int]) -> str:
    cells = [sum(counts.values()), *(counts.get(outcome, 0) for outcome in (*trial.GOOD, *trial.BAD))]
    return f"| {name} | {' | '.join(map(str, cells))} |"


def fill(page: str, summary: dict[str, Any]) -> str:
    return MARKED.sub(f"<!-- torture -->\n\n{lay_out(summary)}\n\n<!-- end -->", page)


def pick_tries(arguments: argparse.Namespace) -> list[tuple[str, int]]:
    if arguments.only:
        found = [re.fullmatch(r"(\w+):(\d+)", each) for each in arguments.only]
        if not all(match and match[1] in KINDS for match in found):
            raise SystemExit(f"--only takes KIND:NUMBER, such as runs:17; kinds are {', '.join(KINDS)}")
        return [(match[1], int(match[2])) for match in found if match]
    kinds = arguments.kinds or list(KINDS)
    return [
        (kind, number)
        for kind in kinds
        for number in range(0, KINDS[kind].long, KINDS[kind].step if arguments.short else 1)
    ]


def load() -> None:
    """Import the package before anything is forked; `runs.prepare` imports the rest."""
    import matplotlib
    import torch

    matplotlib.use("Agg")
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    import fedthe.cli
    import fedthe.experiment.run
    import fedthe.pictures
    import fedthe.progress.watch
    import fedthe.report.compare
    import fedthe.study.bill  # noqa: F401


def pick_place() -> Path | None:
    """A file system in memory, if it is large enough: every file written is flushed to disk, which is slow."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > ROOM else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="some cases of each kind: what `make test` runs")
    parser.add_argument("--json", type=Path, help="write counts and failures to this file")
    parser.add_argument("--only", action="append", metavar="KIND:NUMBER", help="only this case, such as runs:17")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), help="only these kinds")
    parser.add_argument("--seed", type=int, default=0, help="determines every case")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="cases at a time")
    arguments = parser.parse_args()
    tries = pick_tries(arguments)
    began = time.monotonic()
    load()
    with tempfile.TemporaryDirectory(prefix="torture-", dir=pick_place()) as name:
        folder = Path(name)
        ground = runs.prepare(folder)
        for kind in dict.fromkeys(kind for kind, _ in tries):
            if prepare := KINDS[kind].prepare:
                prepare(ground, folder / f"prepare-{kind}")
        done = attempt_all(ground, tries, arguments.seed, folder, arguments.jobs)
    summary = summarize(done, arguments.seed)
    if arguments.only:
        for each in done:
            print(f"{each.kind}:{each.number} {each.outcome}: {each.what}\n    {each.why}")
    print(lay_out(summary))
    print(f"{len(done)} cases in {time.monotonic() - began:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        if arguments.json.resolve() == RECORD:
            PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), summary), encoding="utf-8")
    return 1 if summary["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())
