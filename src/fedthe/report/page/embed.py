"""The data for the page's scripts, with the names and colours of methods and tests."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from ...names import OURS, name_method
from ...study.draw import METHOD_COLOURS, OTHER_COLOURS, colour_of, describe_settings, look_up
from ...study.draw_streams import look_up_phases, pick_best, pick_streams
from ...study.tables import SEVERITY
from ..compare import compare_all
from ..data import Losses, Page, Shown
from .markup import tidy

POINTS = 400  # of a loss curve
TURNS = {"fedthe_plus": 2}  # dash and symbol: FedTHE+ differs from FedTHE in more than the shade of red


def embed(page: Page) -> str:
    """JSON that is safe inside a script element: no "<", no NaN, no infinity."""
    data = {
        "ours": OURS[::-1],  # sections that show one method start with the first of these
        "runs": [_pick_run(shown) for shown in page.shown],
        "figures": [_pick_figure(record) for record in page.figures if is_drawn(record)],
    }
    return json.dumps(_drop_nonfinite(data), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _drop_nonfinite(value: Any) -> Any:
    """NaN and infinity become None. Other numbers keep all digits: scripts round them, and rounding twice errs."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _drop_nonfinite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_drop_nonfinite(each) for each in value]
    return value


def list_severities(shown: Shown) -> list[int]:
    """The severity of each test; [] unless every test has one."""
    found = [re.fullmatch(rf"{SEVERITY}(\d+)", test) for test in shown.tests]
    return [int(each[1]) for each in found if each] if all(found) else []


def _pick_run(shown: Shown) -> dict[str, Any]:
    return {
        "name": tidy(shown.name),
        "methods": _look_up_methods(shown.methods),
        "tests": _look_up_tests(shown.tests),
        "severities": list_severities(shown),
        "scores": {m: {t: asdict(score) for t, score in scores.items()} for m, scores in shown.scores.items()},
        "pairs": _pick_pairs(shown),
        "seeds": len(shown.seeds),
        "classes": [tidy(name) for name in shown.classes],
        "clients": {seed: asdict(clients) for seed, clients in shown.clients.items()},
        "weights": {m: {t: asdict(each) for t, each in tests.items()} for m, tests in shown.weights.items()},
        "losses": _join_losses(shown.losses, shown.methods),
        "curves": {m: {t: asdict(curve) for t, curve in tests.items()} for m, tests in shown.curves.items()},
        "examples": [asdict(example) for example in shown.examples],
        "streams": {
            test: _dress_stream(pick_streams(stream.curves)) for test, stream in shown.streams.items() if stream.curves
        },
    }


def _pick_pairs(shown: Shown) -> dict[str, dict[str, dict[str, list[float | None]]]]:
    """By two methods, in the order of the run, and test: what comparison.js shows."""
    return {
        a: {
            b: {test: [r.a, r.b, r.difference, r.low, r.high, r.p_holm, r.higher, r.lower] for test, r in rows.items()}
            for b, rows in others.items()
        }
        for a, others in compare_all(shown).items()
    }


def _look_up_methods(names: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Name, colour and turn of each method. Methods that share a colour have different turns: dashes and symbols."""
    others = [method for method in names if method not in METHOD_COLOURS]
    turns = TURNS | {method: 1 + i // len(OTHER_COLOURS) for i, method in enumerate(others)}
    return {
        method: {"name": tidy(names[method]), "colour": colour, "turn": turns.get(method, 0)}
        for method, (_, colour) in look_up(names).items()
    }


def _look_up_tests(tests: Mapping[str, str]) -> dict[str, dict[str, str]]:
    return {test: {"name": tidy(title), "colour": colour_of(test, tests)} for test, title in tests.items()}


def _join_losses(all_losses: Sequence[Losses], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """A line for each training: the mean over its seeds, thinned if it is long."""
    groups: dict[tuple[str, ...], list[Sequence[float]]] = {}
    for each in all_losses:
        if each.losses:
            groups.setdefault(tuple(each.methods), []).append(each.losses)
    lines = []
    for methods, group in groups.items():
        length = max(map(len, group))
        step = max(1, math.ceil(length / POINTS))
        rounds = sorted({*range(0, length, step), length - 1})
        means = [fmean(losses[i] for losses in group if i < len(losses)) for i in rounds]
        name = ", ".join(tidy(names.get(method, method)) for method in methods)
        lines.append({"method": methods[0], "name": name, "rounds": [i + 1 for i in rounds], "losses": means})
    return lines


def is_drawn(record: Mapping[str, Any]) -> bool:
    """Whether figures.js can draw a figure: `read.check_record` drops the data of all others."""
    return record.get("data") is not None


def _pick_figure(record: Mapping[str, Any]) -> dict[str, Any]:
    data = record["data"]
    methods: Iterable[str] = data.get("curves", ("fedthe",))  # the other figures are about FedTHE
    if "streams" in data:
        methods = dict.fromkeys(method for stream in data["streams"].values() for method in stream["curves"])
        data = {"streams": {test: _dress_stream(stream) for test, stream in data["streams"].items()}}
    return {
        "id": record["id"],
        "title": tidy(record["title"]),
        "settings": tidy(describe_settings(record["config"])),
        "tests": _look_up_tests(record["tests"]),
        "methods": _look_up_methods({method: name_method(method) for method in methods}),
        "data": data,
    }


def _dress_stream(stream: Mapping[str, Any]) -> dict[str, Any]:
    """With the looks of its phases, and the methods that are shown first."""
    phases = {
        phase: look | {"name": tidy(look["name"])}
        for phase, look in look_up_phases([phase for *_, phase in stream["bands"]]).items()
    }
    return {**stream, "phases": phases, "first": pick_best(stream["curves"])}
