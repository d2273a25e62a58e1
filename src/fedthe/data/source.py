"""The source of a dataset: how to load it, which natural shifts lie beside it, and how to verify it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from ..errors import InputError
from ..foreign import explain, show_path
from ..store import content_hash, expand
from ..text import clean, find_nearest, flatten
from .pool import Dataset, Pool

Load = Callable[..., Dataset]  # (path of the dataset, image size or None for its own, **options of the source)
Shift = Callable[[Path, Pool], "Pool | None"]  # (path of the dataset, its pool) -> the shift; None: not on disk


@dataclass(frozen=True)
class Source:
    load: Load
    about: str  # one line for a list
    advice: str  # what to do if it is not on disk
    lies: Literal["home", "path", "nowhere"] = "home"  # in home/data, where the user says, or in the package
    shifts: Mapping[str, Shift] = field(default_factory=dict)  # the default one first
    together: bool = False  # each shift is a test of its own; otherwise they are versions of one test
    load_test: Callable[[Path], Pool] | None = None  # published with the pool but not part of it: only verified
    files: Callable[[Path], list[Path]] = lambda path: [path]  # those that `load` and `load_test` decode
    digest: str | None = None  # content_digest of the published data, if known
    options: tuple[str, ...] = ()  # of `load_dataset`, that `load` takes: square, by_client


@dataclass(frozen=True)
class Report:
    name: str
    files: tuple[str, ...]  # those that were decoded
    digest: str | None  # of the decoded content; None if it could not be decoded
    expected: str | None
    ok: bool
    sentence: str


def pick_source(name: str, sources: Mapping[str, Source]) -> Source:
    if name not in sources:
        raise InputError(f"dataset {name!r} is unknown; {find_nearest(name, sources)}")
    return sources[name]


def locate(spec: str, sources: Mapping[str, Source], home: Path) -> tuple[str, Source, Path]:
    """ "NAME" or "NAME:PATH" -> the name, its source, and the path of its data."""
    name, colon, given = spec.partition(":")
    source = pick_source(name, sources)
    if source.lies == "nowhere" and colon:
        raise InputError(f"{name} comes with the package and takes no path; write {name} instead of {spec}.")
    if (source.lies == "path" or colon) and not given:
        raise InputError(f"{name} needs a path; write {name}:PATH.")
    path = expand(Path(given)) if given else home / "data" / name
    with explain(f"{show_path(path)} cannot be read"):  # a name too long, a folder without permission
        if source.lies != "nowhere" and not path.exists():
            raise InputError(f"{name} is not at {show_path(path)}; {source.advice}.")
    return name, source, path


def pick_shifts(name: str, source: Source, path: Path, dataset: Dataset, natural: str | None) -> dict[str, Pool]:
    """The natural shifts by test: the one named `natural`, or with None those on disk.

    Versions of one shift make one test, `natural`, from the first on disk. Shifts that belong together make one test
    each, such as `imagenet_a`.
    """
    known = [*dataset.natural, *source.shifts]
    if natural is not None and natural not in known:
        raise InputError(f"{name} has no natural shift {natural!r}; {find_nearest(natural, [*known, 'none'])}")
    found: dict[str, Pool] = {}
    for shift in known if natural is None else [natural]:
        pool = dataset.natural[shift] if shift in dataset.natural else source.shifts[shift](path, dataset.pool)
        if pool is not None:
            found[shift] = pool
        elif natural is not None:
            raise InputError(
                f"{shift} is not at {show_path(path)}; run `fedthe data fetch {shift}` or put its files there."
            )
    if source.together and natural is None:
        return {shift.replace("-", "_"): pool for shift, pool in found.items()}
    return {"natural": next(iter(found.values()))} if found else {}


def content_digest(source: Source, path: Path) -> str:
    """SHA-256 of all that was published: the pool at its own size, and the test set if there is one."""
    options = {"square": "crop"} if "square" in source.options else {}  # whether it is readable is all that is asked
    digests = [source.load(path, None, **options).pool.digest]
    if source.load_test:
        digests.append(source.load_test(path).digest)
    return content_hash(digests)


def make_report(name: str, source: Source, path: Path) -> Report:
    try:
        files = () if source.lies == "nowhere" else tuple(map(str, source.files(path)))
        digest = content_digest(source, path)
    except InputError as error:
        return Report(name, (), None, source.digest, ok=False, sentence=str(error))
    ok = source.digest in (None, digest)
    if source.digest is None:
        sentence = "structure is right; no published digest is known to us."
    elif ok:
        sentence = "content matches the published one."
    else:
        sentence = f"content differs from the published one: expected {source.digest[:16]}, got {digest[:16]}."
    return Report(name, files, digest, source.digest, ok, sentence)


def check_labels(file: Path, labels: np.ndarray, rows: int, first: int, last: int) -> None:
    """Refuse all but one label per row, each from `first` to `last`; `file` is named in the error."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or len(labels) != rows or rows == 0:
        raise InputError(
            f"{show_path(file)} must hold one whole-number label for each of {rows} rows, but its labels are "
            f"{labels.dtype} {list(labels.shape)}; fetch or make it again."
        )
    if labels.min() < first or labels.max() > last:
        raise InputError(
            f"{show_path(file)} has labels from {labels.min()} to {labels.max()}, outside {first} to {last}; "
            "fetch or make it again."
        )


def find_classes(file: Path, names: Sequence[str], pool: Pool) -> np.ndarray:
    """The position of each name among the classes of `pool`: int64 [names]."""
    for name in names:
        if name not in pool.classes:
            raise InputError(
                f"{show_path(file)} has a class {clean(name)!r} that {clean(pool.name)} lacks; "
                + flatten(find_nearest(name, pool.classes), 1000)
            )
    return np.array([pool.classes.index(name) for name in names], dtype=np.int64)


def name_classes(ids: Sequence[str], names: Mapping[str, str]) -> tuple[str, ...]:
    """A readable name per class id; names that two ids share (ImageNet's two cranes) get their id added."""
    plain = [names.get(key, key) for key in ids]
    return tuple(f"{name} ({key})" if plain.count(name) > 1 else name for key, name in zip(ids, plain, strict=True))
