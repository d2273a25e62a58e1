"""Data that clients hold already: `Federation.from_clients`, and npz files with a column of clients."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import store
from ..errors import InputError
from ..foreign import show_path
from ..text import clean, find_nearest, is_plain, quote
from .partition import MIN_ROWS, Split
from .pieces import SPLITS, check_test_name
from .pool import Dataset, Holding, Pool
from .rows import Rows, read_rows

if TYPE_CHECKING:
    from .plan import Federation

MOST_CLASSES = 100_000  # a larger label is a mistake, and would need that many class names
MOST_TESTS = 200  # a stream keeps its source in a byte


def hold(
    clients: Sequence[Any], classes: Sequence[str] | None, tests: Mapping[str, Sequence[Any]], name: str
) -> Dataset:
    """A dataset of what each client holds, and of its named tests; see `Federation.from_clients`."""
    if not isinstance(name, str) or not name.strip() or not is_plain(name):
        raise InputError(f"name must be plain text, not {quote(name)}.")
    if isinstance(clients, Mapping | str) or not isinstance(clients, Sequence):
        raise InputError("clients must be a list with one entry per client; see Federation.from_clients.")
    _check_tests(tests, len(clients))
    parts = [_read_client(k, each) for k, each in enumerate(clients)]
    further = {
        test: [None if each is None else read_rows(f"client {k}, {test}", each) for k, each in enumerate(given)]
        for test, given in tests.items()
    }
    everything = [rows for client in parts for rows in client.values()]
    everything += [rows for given in further.values() for rows in given if rows is not None]
    _check_alike(everything)
    names, labels = _name_classes(everything, classes)
    encoded = iter(labels)

    joined = _Joined()
    held = [{part: joined.add(rows, next(encoded)) for part, rows in client.items()} for client in parts]
    pool, pools, rows_of = joined.pool(name, names), {}, {}
    for test, given in further.items():
        joined = _Joined()
        rows_of[test] = [None if rows is None else joined.add(rows, next(encoded)) for rows in given]
        pools[test] = joined.pool(test, names)
    holdings = []
    for k, client in enumerate(held):
        split = client["all"] if "all" in client else Split(**client)
        own = {test: rows for test, given in rows_of.items() if (rows := given[k]) is not None}
        holdings.append(Holding(str(k), split, own))
    return check_holdings(Dataset(pool, pools, tuple(holdings)))


def hold_columns(where: str, pool: Pool, clients: np.ndarray, splits: np.ndarray | None) -> Dataset:
    """A dataset whose rows name their client and, optionally, their split: train, val, test, or a test's own name.

    Rows with an empty split are split by the seed.
    """
    if clients.shape != pool.labels.shape or clients.dtype.kind not in "iuU":
        raise InputError(
            f"{where}: clients must be a whole number or a name for each of {len(pool)} rows, "
            f"but is {clients.dtype} {list(clients.shape)}."
        )
    try:
        _ = clients.tolist(), None if splits is None else splits.tolist()
    except (ValueError, SystemError):
        raise InputError(f"{where}: clients and splits must be text, but hold code points that are none.") from None
    if splits is None:
        splits = np.full(len(pool), "")
    if splits.shape != pool.labels.shape or splits.dtype.kind != "U":
        raise InputError(
            f"{where}: splits must be train, val, test, a test's name or nothing for each of {len(pool)} rows, "
            f"but is {splits.dtype} {list(splits.shape)}."
        )
    named = [str(test) for test in dict.fromkeys(splits.tolist()) if test not in (*SPLITS, "")]
    _check_tests(dict.fromkeys(named, ()), 0)
    inside = np.isin(splits, (*SPLITS, ""))
    place = np.cumsum(inside) - 1  # of a row in the pool without the named tests
    pools = {test: _take(pool, test, np.flatnonzero(splits == test)) for test in named}
    holdings = []
    for who in dict.fromkeys(clients.tolist()):  # in the order of their first rows
        own = clients == who
        parts = {part: place[own & (splits == part)] for part in SPLITS}
        left = place[own & (splits == "")]
        if len(left) and any(map(len, parts.values())):
            raise InputError(f"{where}: client {clean(str(who))} has rows with and without a split.")
        tests = {
            test: np.flatnonzero(clients[splits == test] == who) for test in named if (own & (splits == test)).any()
        }
        holdings.append(Holding(str(who), left if len(left) else Split(**parts), tests))
    kept = pool if inside.all() else _take(pool, pool.name, np.flatnonzero(inside))
    return check_holdings(Dataset(kept, pools, tuple(holdings)))


def save(federation: Federation, path: Path | str) -> Path:
    path, dataset = Path(path), federation.source
    if path.suffix != ".npz":
        raise InputError(f"{show_path(path)} must end with .npz.")
    s = federation.settings
    if s.partition == "given" and s.train_fraction == s.test_fraction == 1:
        holdings = dataset.clients
    else:
        holdings = tuple(
            Holding(str(k), split, {test: _rows_of(federation, test, k) for test in dataset.natural})
            for k, split in enumerate(federation.clients)
        )
    x: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    clients: list[str] = []
    splits: list[str] = []

    def put(pool: Pool, rows: np.ndarray, client: str, split: str) -> None:
        x.append(pool.x[rows])
        labels.append(pool.labels[rows])
        clients.extend([client] * len(rows))
        splits.extend([split] * len(rows))

    for each in holdings:
        if isinstance(each.rows, Split):
            for part in SPLITS:
                put(dataset.pool, getattr(each.rows, part), each.name, part)
        else:
            put(dataset.pool, each.rows, each.name, "")
        for test, rows in each.tests.items():
            put(dataset.natural[test], rows, each.name, test)
    arrays = {
        "images" if dataset.pool.is_pictures else "x": np.concatenate(x),
        "labels": np.concatenate(labels),
        "classes": np.array(dataset.pool.classes),
        "clients": np.array(clients),
        "splits": np.array(splits),
    }
    store.write_arrays(path, arrays, compress=True)
    if dataset.unknown is not None:
        warnings.warn(
            f"{show_path(path)} has no samples of {clean(dataset.unknown.name)}, which is set aside, so open_set "
            "cannot be tested on it; to have that test, save a federation that is built without unknown.",
            stacklevel=3,
        )
    return path


def _rows_of(federation: Federation, test: str, k: int) -> np.ndarray:
    stream = federation.tests[test][k]
    return np.zeros(0, dtype=np.int64) if stream is None else stream.rows


def _check_tests(tests: Mapping[str, Sequence[Any]], clients: int) -> None:
    if not isinstance(tests, Mapping) or len(tests) > MOST_TESTS:
        raise InputError(f"tests must be a dict of at most {MOST_TESTS} test distributions by name.")
    for test, given in tests.items():
        check_test_name(test)
        if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != clients:
            raise InputError(f"the test {test} must have one entry for each of {clients} clients; None for no test.")
        if clients and all(each is None for each in given):
            raise InputError(f"the test {test} has no samples for any client; leave it out.")


def _read_client(k: int, given: Any) -> dict[str, Rows]:
    """By split; "all" for rows that are not split."""
    if not (isinstance(given, Mapping) and set(given) & set(SPLITS)):
        return {"all": read_rows(f"client {k}", given)}
    for part in SPLITS:
        if part not in given:
            raise InputError(f"client {k} has no {part!r}; give train, val and test, or (x, y) to be split.")
    for part in given:
        if part not in SPLITS:
            raise InputError(f"client {k} has {quote(part)}; {find_nearest(str(part), SPLITS)} Tests go to tests=.")
    return {part: read_rows(f"client {k}, {part}", given[part]) for part in SPLITS}


def _check_alike(everything: Sequence[Rows]) -> None:
    first = everything[0] if everything else None
    for rows in everything:
        if first and (rows.x.dtype, rows.x.shape[1:]) != (first.x.dtype, first.x.shape[1:]):
            raise InputError(
                f"{first.where} has samples of {first.x.dtype} {list(first.x.shape[1:])}, {rows.where} of "
                f"{rows.x.dtype} {list(rows.x.shape[1:])}; they must agree."
            )


def _name_classes(
    everything: Sequence[Rows], classes: Sequence[str] | None
) -> tuple[tuple[str, ...], list[np.ndarray]]:
    """The names of all classes, and the labels of all rows as positions among them."""
    kinds = {rows.y.dtype.kind for rows in everything}
    if len(kinds) > 1:
        raise InputError("labels must be whole numbers for all clients, or names for all.")
    if classes is not None:
        if isinstance(classes, str) or not isinstance(classes, Sequence | np.ndarray):
            raise InputError(f"classes must be a list of names, not {quote(classes)}.")
        classes = tuple(str(name) for name in classes)
        if not 0 < len(classes) <= MOST_CLASSES or len(set(classes)) != len(classes) or not all(map(is_plain, classes)):
            raise InputError(f"classes must be 1 to {MOST_CLASSES:,} different names without control characters.")
    if kinds == {"U"}:
        names = classes or tuple(np.unique(np.concatenate([rows.y for rows in everything])).tolist())
        where = {name: c for c, name in enumerate(names)}
        for rows in everything:
            for name in np.unique(rows.y).tolist():
                if name not in where:
                    raise InputError(f"{rows.where} has the label {quote(name)}; {find_nearest(name, names)}")
        return names, [np.array([where[name] for name in rows.y.tolist()], dtype=np.int64) for rows in everything]
    most = max((int(rows.y.max()) for rows in everything), default=0)
    if classes is None and most >= MOST_CLASSES:
        raise InputError(f"labels go up to {most}, which would be that many classes; {MOST_CLASSES:,} are the most.")
    names = classes or tuple(map(str, range(most + 1)))
    for rows in everything:
        if rows.y.min() < 0 or rows.y.max() >= len(names):
            raise InputError(
                f"{rows.where} has labels from {rows.y.min()} to {rows.y.max()}, but they must be from 0 to "
                f"{len(names) - 1}."
            )
    return names, [rows.y.astype(np.int64) for rows in everything]


class _Joined:
    """Rows of several clients, one after another."""

    def __init__(self) -> None:
        self.x: list[np.ndarray] = []
        self.labels: list[np.ndarray] = []
        self.count = 0

    def add(self, rows: Rows, labels: np.ndarray) -> np.ndarray:
        """The positions of the rows [n]."""
        self.x.append(rows.x)
        self.labels.append(labels)
        self.count += len(labels)
        return np.arange(self.count - len(labels), self.count)

    def pool(self, name: str, classes: tuple[str, ...]) -> Pool:
        if not self.x:
            raise InputError("a federation needs at least 2 clients, not 0.")
        return Pool(name, np.concatenate(self.x), np.concatenate(self.labels), classes, own=True)


def _take(pool: Pool, name: str, rows: np.ndarray) -> Pool:
    return Pool(name, pool.x[rows], pool.labels[rows], pool.classes, own=True)


def check_holdings(dataset: Dataset) -> Dataset:
    """The dataset, if its clients hold enough."""
    if len(dataset.clients) < 2:
        raise InputError(f"a federation needs at least 2 clients, not {len(dataset.clients)}.")
    for each in dataset.clients:
        if isinstance(each.rows, Split):
            for part in SPLITS:
                if not len(getattr(each.rows, part)):
                    raise InputError(f"client {clean(each.name)} has no rows in {part}; each split needs one.")
        elif len(each.rows) < MIN_ROWS:
            raise InputError(
                f"client {clean(each.name)} has {len(each.rows)} rows, too few to split 60/20/20; "
                f"{MIN_ROWS} are needed."
            )
    return dataset
