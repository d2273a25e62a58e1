"""Refuse long work unless --yes is given: say how long it would take, and propose something smaller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..bench.lab import ANSWER_MEMO, ROUND, ROUND_CCT, ROUND_RESNET, ROUND_STACKED
from ..bench.machine import Ceilings, describe_machine
from ..bench.result import Bench, Line, read_baseline
from ..config import Config
from ..data import find
from ..engine.pick import pick_engine
from ..errors import InputError
from ..text import say_value
from .bill import bill_case, bill_pretraining, bill_tables
from .figures import plan_figure
from .figures.curves import POINTS
from .show import say_duration
from .tables import Table, plan_cases

LONG = 30 * 60  # seconds; longer work needs --yes
SMALLER: list[dict[str, Any]] = [  # the first that is short enough is proposed
    {"rounds": 5, "seeds": [0], "samples": 50},
    {"rounds": 5, "seeds": [0], "samples": 20, "train_fraction": 0.2},
    {"rounds": 2, "seeds": [0], "samples": 10, "train_fraction": 0.05},
]
# Typical rows of `fedthe bench`, for machines without a baseline: two server cores, and an NVIDIA H200.
TYPICAL = {
    "cpu": {ROUND: 46.0, ROUND_RESNET: 280.0, ROUND_CCT: 370.0, ANSWER_MEMO: 32.0},
    "cuda": {ROUND_STACKED: 0.08, ROUND: 0.13, ROUND_RESNET: 0.65, ROUND_CCT: 0.68, ANSWER_MEMO: 0.045},
}


def ask_for_tables(tables: Iterable[tuple[Table, Sequence[str]]], **settings: Any) -> None:
    """Refuse tables that would take long. Those without data do not count: they cannot run anyway."""
    here = [(table, rows) for table, rows in tables if find(plan_cases(table, rows, **settings)[0].config.dataset)]
    bench = find_bench(settings.get("device", "auto"))

    def time(**smaller: Any) -> float:
        return sum(bill.seconds or 0 for bill in bill_tables(here, bench, **settings | smaller).values())

    _ask(here[0][0].id if len(here) == 1 else "all of it", time)


def ask_for_figure(name: str, **settings: Any) -> None:
    """Refuse a figure that would take long."""
    config = plan_figure(name, **settings)
    if find(config.dataset):
        bench = find_bench(config.device)
        _ask(name, lambda **smaller: time_figure(name, plan_figure(name, **settings | smaller), bench))


def time_figure(name: str, config: Config, bench: Bench) -> float:
    if name == "probing":
        return bill_pretraining(config, bench).seconds or 0
    bills = list(bill_case(config, bench, set()))
    seconds = sum(bill.seconds or 0 for bill in bills)
    if name.startswith("curves"):  # tests the methods at every point
        seconds += (POINTS - 1) * sum(bill.seconds or 0 for bill in bills if not bill.trainings)
    return 2 * seconds if name == "leak" else seconds  # trains everything twice, on different splits


def find_bench(device: str) -> Bench:
    """The baseline that `fedthe bench --remember` kept, or a guess for this kind of machine."""
    machine = describe_machine(pick_engine(device=device).device)
    with suppress(InputError):  # a file of another version: a guess is good enough here
        if kept := read_baseline(machine):
            return kept
    typical = TYPICAL[machine.type].items()
    rows = tuple(Line(name, "ms" if name == ANSWER_MEMO else "s", value) for name, value in typical)
    return Bench(replace(machine, device="a guess"), "", "", True, Ceilings(0, "", 0), rows, 0)


def _ask(what: str, time: Callable[..., float]) -> None:
    """`time` estimates the seconds, with other settings if given."""
    seconds = time()
    if seconds > LONG:
        fits = next((each for each in SMALLER if time(**each) <= LONG), SMALLER[-1])
        words = " ".join(f"{key}={say_value(value)}" for key, value in fits.items())
        raise InputError(
            f"{what} takes about {say_duration(seconds)} on this machine, minus the work already done; "
            f"add --yes to start it, or try something smaller: {words}."
        )
