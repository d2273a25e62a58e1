"""A class that no client holds, for open-set tests: its rows leave the pool before anything is dealt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..errors import InputError
from ..text import clean, find_nearest, quote
from .own import check_holdings
from .partition import Split
from .pool import Dataset, Holding, Pool


def set_aside(dataset: Dataset, unknown: str | None) -> Dataset:
    """The dataset without a class, by its name or number, whose rows are its pool `unknown`; as it is for None.

    That pool has the class's name, which settings keep in place of a number.
    """
    if dataset.unknown is not None and unknown not in dataset.unknown.classes:
        aside = clean(dataset.unknown.name)
        raise InputError(f"{aside} is set aside already; set unknown={aside!r}, or leave it out with a federation.")
    if unknown is None or dataset.unknown is not None:
        return dataset
    pool, c = dataset.pool, find_class(dataset.pool, unknown)
    if len(np.unique(pool.labels[pool.labels != c])) < 2:
        raise InputError(f"unknown={clean(unknown)} leaves fewer than two classes of {clean(pool.name)}; leave it out.")
    if not (pool.labels == c).any():
        raise InputError(f"{clean(pool.name)} has no rows of the class {quote(unknown)}; choose another for unknown.")
    name, x = pool.classes[c], pool.x[pool.labels == c]
    gone = Pool(name, x, np.zeros(len(x), np.int64), (name,))
    left = {name: shift for name, shift in dataset.natural.items() if (shift.labels != c).any()}
    kept = {name: _drop(shift, c) for name, shift in left.items()}
    places = {name: np.cumsum(shift.labels != c) - 1 for name, shift in left.items()}
    inside, place = pool.labels != c, np.cumsum(pool.labels != c) - 1

    def move(rows: np.ndarray) -> np.ndarray:
        return np.asarray(place[rows[inside[rows]]])

    def move_holding(each: Holding) -> Holding:
        split = each.rows
        rows = Split(move(split.train), move(split.val), move(split.test)) if isinstance(split, Split) else move(split)
        tests = {name: test[left[name].labels[test] != c] for name, test in each.tests.items() if name in left}
        return Holding(each.name, rows, {name: places[name][test] for name, test in tests.items() if len(test)})

    clients = tuple(map(move_holding, dataset.clients))
    without = replace(dataset, pool=_drop(pool, c), natural=kept, clients=clients, unknown=gone)
    return check_holdings(without) if clients else without


def find_class(pool: Pool, named: str) -> int:
    """The number of a class, by its name, or else by its number."""
    if named in pool.classes:
        return pool.classes.index(named)
    number = named.lstrip("0") or "0"  # and not one of so many digits that Python refuses it
    if named.isascii() and named.isdigit() and len(number) < 10 and int(number) < len(pool.classes):
        return int(number)
    raise InputError(f"unknown={clean(named)} is no class of {clean(pool.name)}; {find_nearest(named, pool.classes)}")


def _drop(pool: Pool, c: int) -> Pool:
    """The pool without a class, whose number is that of the next from now on."""
    kept = pool.labels != c
    labels = pool.labels[kept]
    classes = (*pool.classes[:c], *pool.classes[c + 1 :])
    return replace(pool, x=pool.x[kept], labels=labels - (labels > c), classes=classes)
