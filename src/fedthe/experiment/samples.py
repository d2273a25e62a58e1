"""Per-sample data of a run: what every method answered to every sample, from the files beside the answers."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .. import records, store
from ..errors import InputError
from ..text import find_nearest, say_value
from .tables import Samples

if TYPE_CHECKING:
    from .results import ClientScore, Results

# integer columns, and their smallest value
INTEGERS = {"label": -1, "answer": 0, "global": 0, "personal": 0, "segment": 0, "origin": 0, "kind": -1, "severity": 0}
SHARES = ("probability", "truth", "e", "global_probability", "personal_probability")  # from 0 to 1
# in this order
COLUMNS = (
    *("label", "answer", "right", "probability", "truth", "e", "global", "personal", *SHARES[3:]),
    *("log_probability", "segment", "origin", "shift", "kind", "severity"),
)


def read_samples(results: Results) -> dict[tuple[str, int], Samples]:
    """Per-sample data of the group that results are of, by method and seed; {} if the file is missing, damaged, or
    contradicts the results."""
    rows: dict[tuple[str, int], dict[str, ClientScore]] = {}
    for row in (*results.rows, *results.others):
        rows.setdefault((row.method, row.seed), {})[row.place] = row
    shown = {((row.method, row.seed), row.place): f"{row.test}/{row.client}" for row in results.rows}
    found: dict[tuple[str, int], Samples] = {(row.method, row.seed): {} for row in results.rows}
    for name in results.answers:
        try:
            answer = store.read_sealed(results.store / "answers" / f"{name}.json") or {}
        except InputError:
            continue
        pair = answer.get("method"), answer.get("seed")
        if isinstance(pair[0], str) and isinstance(pair[1], int) and (pair[0], pair[1]) in found:
            samples = records.read_samples(results.store / "samples" / f"{name}.npz")
            if all(_fits_row(name, samples, rows[pair[0], pair[1]], results.names) for name in samples):
                places = {name: shown.get(((pair[0], pair[1]), name.rpartition("/")[0])) for name in samples}
                found[pair[0], pair[1]] = {
                    f"{place}/{name.rpartition('/')[2]}": samples[name] for name, place in places.items() if place
                }
    return found


def _fits_row(name: str, samples: Samples, rows: Mapping[str, ClientScore], shifts: Iterable[str]) -> bool:
    place, _, column = name.rpartition("/")
    array, row = samples[name], rows.get(place)
    if row is None or array.shape != (row.samples + row.unknown,):
        return False
    if column == "right":
        answers, labels = (samples.get(f"{place}/{each}") for each in ("answer", "label"))
        agree = answers is None or labels is None or _is_right(array, answers, labels)
        return array.dtype == np.bool_ and int(array.sum()) == row.right and agree
    if column in INTEGERS:
        return array.dtype.kind in "iu" and bool(((array >= INTEGERS[column]) & (array < 2**31)).all())
    if column in SHARES:
        known = ~np.isnan(array) if column == "truth" and row.unknown else np.ones(len(array), dtype=bool)
        return array.dtype.kind == "f" and bool(((array >= 0) & (array <= 1))[known].all())
    if column == "log_probability":
        return array.dtype.kind == "f" and bool((array <= 0).all())
    if column == "shift":
        return array.dtype.kind == "U" and {*array.tolist()} <= {"", *shifts}
    return array.dtype.kind in "biuf"  # of a predictor of one's own


def _is_right(right: np.ndarray, answers: np.ndarray, labels: np.ndarray) -> bool:
    return right.shape == answers.shape == labels.shape and np.array_equal(right, answers == labels)


def select_samples(results: Results, method: str | None, test: str | None, seed: int | None) -> dict[str, np.ndarray]:
    """Columns with a row for every sample of this method, test and seed; None: of all."""
    if method is not None:
        check_known("method", method, results.methods)
    if test is not None:
        check_known("test", test, results.tests)
    if seed is not None and seed not in results.config.seeds:
        raise InputError(f"there is no seed {seed} in these results, only {say_value(results.config.seeds)}.")
    found = {
        (name, of): kept
        for (name, of), kept in read_samples(results).items()
        if method in (None, name) and seed in (None, of)
    }
    missing = [f"{name}, seed {of}" for (name, of), kept in found.items() if not kept]
    if len(missing) == len(found):
        raise InputError(f"{results.folder} has no samples of these methods; run it again, which trains nothing.")
    if missing:
        warnings.warn(f"There are no samples of {'; '.join(missing)}.", stacklevel=3)
    return _stack({who: kept for who, kept in found.items() if kept}, results.tests if test is None else [test])


def check_known(kind: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise InputError(f"there is no {kind} {name!r} in these results; {find_nearest(str(name), known)}")


def _stack(samples: Mapping[tuple[str, int], Samples], tests: list[str]) -> dict[str, np.ndarray]:
    """A column that a method or a test lacks is NaN there, or empty text."""
    parts: list[tuple[dict[str, object], int, dict[str, np.ndarray]]] = []
    for (method, seed), kept in samples.items():
        places: dict[tuple[str, int], dict[str, np.ndarray]] = {}
        for name, values in kept.items():
            test, client, column = name.rsplit("/", 2)
            if test in tests:
                places.setdefault((test, int(client)), {})[column] = values
        for place in sorted(places, key=lambda place: (tests.index(place[0]), place[1])):
            columns = places[place]
            size = len(next(iter(columns.values())))
            where: dict[str, object] = {"method": method, "seed": seed, "test": place[0], "client": place[1]}
            parts.append((where, size, columns))
    stacked = {
        name: np.concatenate([np.full(size, where[name]) for where, size, _ in parts])
        for name in ("method", "seed", "test", "client")
    }
    stacked["sample"] = np.concatenate([np.arange(size) for _, size, _ in parts])
    seen = dict.fromkeys(name for _, _, columns in parts for name in columns)
    for name in [*(each for each in COLUMNS if each in seen), *(each for each in seen if each not in COLUMNS)]:
        empty = "" if name == "shift" else np.nan
        stacked[name] = np.concatenate(
            [columns[name] if name in columns else np.full(size, empty) for _, size, columns in parts]
        )
    return stacked
