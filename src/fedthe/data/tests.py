"""Every test distribution, by its id: a recipe for the stream of samples that a client meets after deployment.

A recipe is written for one client. It draws from the client's pools: `own` (its test rows), `corrupted` (the same rows,
each with one corruption), `ooc` (rows of other clients' tests), `corrupted_ooc`, `natural` (its rows of a natural
shift) and `unknown` (rows of a class that no client holds).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .. import rng
from ..corruptions import CORRUPTIONS
from ..errors import InputError
from ..text import clean, find_nearest
from .partition import draw_shares
from .pieces import Pieces, Pools
from .pool import Dataset
from .settings import Settings
from .shifts import Stream, halve, join, mix

RAMP = (1, 2, 3, 4, 5, 4, 3, 2, 1)  # severities


class Recipe(Protocol):
    @property
    def pools(self) -> tuple[str, ...]:
        """Those it is drawn from."""

    def draw(self, pools: Pools) -> Stream | None:
        """The stream of one client; None if it has too few rows."""


@dataclass(frozen=True)
class All:
    """All samples of a pool, in the order in which the client holds them."""

    pool: str

    @property
    def pools(self) -> tuple[str, ...]:
        return (self.pool,)

    def draw(self, pools: Pools) -> Stream | None:
        return pools.streams[self.pool] if len(pools.streams[self.pool]) else None


@dataclass(frozen=True)
class Mixture:
    """Equal parts of own, corrupted, every natural shift and ooc, in random order; no row both clean and corrupted."""

    pools = ("own", "ooc")  # and others, where the data has them

    def draw(self, pools: Pools) -> Stream | None:
        parts = [pools.streams["own"]]
        if "corrupted" in pools.streams:
            positions = np.arange(len(parts[0]))
            halves = halve(positions, (*pools.key, "halves"))
            parts = [pools.streams[name].take(half) for name, half in zip(("own", "corrupted"), halves, strict=True)]
        parts += [pools.streams[name] for name in pools.shifts if len(pools.streams[name])]
        return mix([*parts, pools.streams["ooc"]], pools.key)


@dataclass(frozen=True)
class Mixed:
    """Equal parts of two pools, in random order."""

    one: str
    other: str

    @property
    def pools(self) -> tuple[str, ...]:
        return self.one, self.other

    def draw(self, pools: Pools) -> Stream | None:
        return mix([pools.streams[name] for name in self.pools], pools.key)


@dataclass(frozen=True)
class Correlated:
    """All samples of a pool, correlated in time: each class is spread over time slots in Dirichlet proportions, and the
    classes of a slot come one after another in random order, as in RoTTA (Yuan et al., CVPR 2023,
    https://arxiv.org/abs/2303.13899). Each slot is a segment."""

    pool: str
    dirichlet: float = 0.1
    slots: int = 10

    @property
    def pools(self) -> tuple[str, ...]:
        return (self.pool,)

    def draw(self, pools: Pools) -> Stream | None:
        stream = pools.shuffle(self.pool)
        labels = pools.labels[stream.rows]
        classes = np.unique(labels)
        shares = draw_shares(len(classes), self.slots, self.dirichlet, rng.key(*pools.key, "slots"), 0)
        slots: list[list[np.ndarray]] = [[] for _ in range(self.slots)]
        for c, share in zip(classes, shares, strict=True):
            index = np.flatnonzero(labels == c)
            cuts = np.floor(np.cumsum(share)[:-1] * len(index) + 0.5).astype(np.int64)
            for slot, part in zip(slots, np.split(index, cuts), strict=True):
                slot.append(part)
        parts: list[Stream] = []
        for number, slot in enumerate(slots):
            order = rng.shuffled(rng.key(*pools.key, "order", number), len(classes))
            if any(map(len, slot)):
                parts.append(stream.take(np.concatenate([slot[c] for c in order])).number(len(parts)))
        return join(parts) if parts else None


@dataclass(frozen=True)
class Gradual:
    """Own rows, corrupted with severity 1 to 5 and back to 1, then the same with another corruption, as in the gradual
    setting of CoTTA (Wang et al., CVPR 2022, https://arxiv.org/abs/2203.13591). Each severity is a segment of about ten
    samples, so a client meets as many corruptions as it has rows for."""

    block: int = 10
    pools = ("corrupted",)

    def draw(self, pools: Pools) -> Stream | None:
        stream = pools.shuffle("corrupted")
        if len(stream) < len(RAMP):
            return None
        ramps = min(len(CORRUPTIONS), max(1, len(stream) // (self.block * len(RAMP))))
        kinds = rng.shuffled(rng.key(*pools.key, "kinds"), len(CORRUPTIONS))[:ramps]
        segment = np.arange(len(stream)) * (ramps * len(RAMP)) // len(stream)
        severity = np.array(RAMP)[segment % len(RAMP)]
        return stream.corrupt(kinds[segment // len(RAMP)], severity).number(segment)


@dataclass(frozen=True)
class Late:
    """Own rows, of half of the client's classes at first. Then the others appear, among what is left of the first."""

    pools = ("own",)

    def draw(self, pools: Pools) -> Stream | None:
        stream = pools.shuffle("own")
        labels = pools.labels[stream.rows]
        classes = np.unique(labels)
        classes = classes[rng.shuffled(rng.key(*pools.key, "classes"), len(classes))]
        early = np.flatnonzero(np.isin(labels, classes[: len(classes) // 2]))
        first = early[: (len(early) + 1) // 2]
        rest = np.setdiff1d(np.arange(len(stream)), first)  # in the order of the shuffle
        return join([stream.take(first), stream.take(rest).number(1)]) if len(first) else None


TESTS: dict[str, Recipe] = {
    # the benchmark's own, which every run has unless it names others
    "original": All("own"),
    "corrupted": All("corrupted"),
    "natural": All("natural"),  # for each natural shift, under its name
    "ooc": All("ooc"),
    "mixture": Mixture(),
    "corrupted_ooc": All("corrupted_ooc"),
    # streams in time, for runs that ask for them
    "correlated": Correlated("own"),
    "ooc_correlated": Correlated("ooc"),
    "switch10": Pieces("own 10, ooc 10, ..."),
    "switch50": Pieces("own 50, ooc 50, ..."),
    "switch100": Pieces("own 100, ooc 100, ..."),
    "gradual": Gradual(),
    "recurring": Pieces(", ".join(["own 16%, corrupted 16%, ooc 16%"] * 3)),
    "late": Late(),
    "open_set": Mixed("own", "unknown"),
}
STANDARD = ("original", "corrupted", "natural", "ooc", "mixture", "corrupted_ooc")


def choose_tests(dataset: Dataset, settings: Settings) -> dict[str, Recipe]:
    """By name, in their order: the benchmark's own that the data allows, and those that are asked for."""
    has = list_pools(dataset)
    chosen: dict[str, Recipe] = {}
    for name in STANDARD:
        if name == "natural":
            chosen |= {shift: All(shift) for shift in dataset.natural}
        elif all(pool in has for pool in TESTS[name].pools):
            chosen[name] = TESTS[name]
    own = {name: Pieces(text) for name, text in settings.streams.items()}
    for name in own:
        if name in dataset.natural:
            raise InputError(f"{clean(dataset.pool.name)} has a test {name!r} already; rename the stream.")
    more = {name: recipe for name, recipe in TESTS.items() if name not in STANDARD} | own
    asked = [*own] if settings.tests is None else settings.tests
    for name in asked:
        if name not in chosen and name not in more:
            raise InputError(f"there is no test {name!r} here; {find_nearest(name, [*chosen, *more])}")
        for pool in more[name].pools if name in more else ():
            if pool not in has:
                raise InputError(f"the test {name} {_say_missing(pool, has, dataset)}")
    return chosen | {name: recipe for name, recipe in more.items() if name in asked}


def list_pools(dataset: Dataset) -> list[str]:
    """The pools that streams can be drawn from."""
    corrupted = ["corrupted", "corrupted_ooc"] if dataset.pool.is_pictures else []
    natural = ["natural", *(name for name in dataset.natural if name != "natural")] if dataset.natural else []
    return ["own", "ooc", *corrupted, *natural, *([] if dataset.unknown is None else ["unknown"])]


def _say_missing(pool: str, has: Iterable[str], dataset: Dataset) -> str:
    name, example = clean(dataset.pool.name), clean(dataset.pool.classes[-1], 30)
    match pool:
        case "unknown":
            return f"needs samples of a class that no client holds; set one aside, such as unknown={example!r}."
        case "corrupted" | "corrupted_ooc":
            return f"corrupts pictures, and {name} has none; leave it out."
        case "natural":
            return f"needs a natural shift, and {name} has none; set natural, or leave it out."
    return f"asks for {clean(pool)!r}, which is no pool; {find_nearest(pool, has)}"


def check_drawn(name: str, recipe: Recipe, streams: Iterable[Stream | None]) -> None:
    """Refuse a stream that is asked for and that no client has."""
    if any(streams):
        return
    if name in TESTS:
        raise InputError(f"no client has the test {name}, for {say_lack(name, 'every client')}; leave it out.")
    said = f" ({recipe.text!r}; a row is met only once)" if isinstance(recipe, Pieces) else ""
    raise InputError(f"no client has enough test rows for the test {name}{said}; make it shorter, or leave it out.")


def say_lack(name: str, who: str) -> str:
    """Why `who`, which is singular, does not have a test."""
    few = isinstance(TESTS.get(name), Late)
    return f"{who} has test rows of one class only" if few else f"{who} has too few test rows"
