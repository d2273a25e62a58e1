"""Files of a finished run and of the cache are damaged; then the run is resumed."""

from __future__ import annotations

import importlib
import os
import random
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from . import damage
from .trial import Ground, Kind, Verdict, find_loss, judge_run, read_numbers, say, take_stock

COMMAND = ("run", "tiny.toml", "--json")
# how the run is resumed: arguments, and whether its answers are kept
WAYS: dict[str, tuple[tuple[str, ...], bool]] = {
    "again": ((), True),
    "again, without its answers": ((), False),
    "with a round more": (("rounds=3",), True),
    "with a method more": (("methods=fedavg,fedthe,fedrod,fedavg_ft",), True),
}
SETTINGS = """dataset = "npz:tiny.npz"
out = "run"
methods = ["fedavg", "fedthe", "fedrod"]
seeds = [0, 1]
clients = 3
dirichlet = 1.0
rounds = 2
local_epochs = 1
samples = 4
"""


def prepare(folder: Path) -> Ground:
    """An undamaged run, and the numbers of every way to resume it."""
    import numpy as np

    work = folder / "work"
    work.mkdir(parents=True)
    labels = np.arange(150) % 3
    noise = np.random.default_rng(0).integers(0, 90, (150, 16, 16, 3))
    np.savez(work / "tiny.npz", images=(noise + 70 * labels[:, None, None, None]).astype(np.uint8), labels=labels)
    (work / "tiny.toml").write_text(SETTINGS, encoding="utf-8")
    expected: dict[str, Any] = {"fresh": _measure(work, before=lambda: list_imports(folder / "imports"))}
    for name in (folder / "imports").read_text(encoding="utf-8").splitlines():
        with suppress(Exception):  # not all that is in sys.modules can be imported by its name
            importlib.import_module(name)
    ground = Ground(folder, expected)
    (work / "run" / "report.html").unlink()  # five megabytes that every try would copy
    for way, (words, _) in WAYS.items():
        place = ground.copy(folder / "way")
        expected[way] = expected["fresh"] if not words else _measure(place, *words)
        shutil.rmtree(place)
    return ground


def list_imports(path: Path) -> None:
    """Record what this process has imported when it exits: with that imported in advance, a fork starts at once."""
    leave = os._exit

    def note(code: int) -> NoReturn:
        path.write_text("\n".join(sorted(sys.modules)), encoding="utf-8")
        leave(code)

    os._exit = note  # type: ignore[assignment]


def _measure(work: Path, *words: str, before: Callable[[], object] | None = None) -> dict[str, Any]:
    said = say([*COMMAND, *words], work, before)
    if said.code != 0:
        raise SystemExit(f"the untouched run failed, so there is nothing to compare with:\n{said.err}")
    return read_numbers(work / "run", said.out)


def attempt(ground: Ground, rng: random.Random, number: int, place: Path) -> tuple[str, Verdict]:
    work = ground.copy(place / "work")
    way = rng.choice(list(WAYS)) if rng.random() < 0.6 else "again"
    words, answered = WAYS[way]
    if not answered:
        shutil.rmtree(work / "run" / "answers")
    done, spare = damage.damage(work, list_files(work), rng, number)
    before = take_stock(work)
    said = say([*COMMAND, *words], work)
    verdict = judge_run(said, work / "run", ground.expected[way])
    if verdict.outcome in ("same", "redone", "refused"):
        lost = find_loss(before, take_stock(work), spare, refused=said.code == 2)
        verdict = Verdict("lost", f"{lost}; it said: {verdict.why}") if lost else verdict
    return f"{done}; run {way}", verdict


def list_files(work: Path) -> list[Path]:
    """The files that a run writes: its folder and the cache."""
    found = [*(work / "run").rglob("*"), *(work / "home").rglob("*")]
    return sorted(path for path in found if path.is_file())


KIND = Kind("runs", 500, 16, attempt)
