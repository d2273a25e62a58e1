"""What a method is: its paper, its parts and its hyperparameters, as `fedthe methods` prints them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..comments import read_comments
from ..names import name_method
from ..specs import Spec
from . import METHODS
from .base import Rounds
from .compose import PLACES, Parts, Recipe
from .make import arrange_spec, find_recipe, list_hyper, set_hyper

_LINK = re.compile(r"https?://[^\s)]+")


@dataclass(frozen=True)
class Hyper:
    """A hyperparameter as hyper.METHOD.KEY sets it."""

    key: str
    default: Any
    about: str  # the comment beside it
    part: str  # the class that has it


@dataclass(frozen=True)
class About:
    id: str
    name: str
    what: str  # in a sentence
    link: str | None  # to the paper
    parts: dict[str, str]  # class by place: rounds, personal, predictor
    hyper: list[Hyper]
    needs: list[str]  # leaves that the predictor needs in a client's state
    passes: tuple[int, int]  # forward and backward per sample
    views: int  # augmented ones, per sample


def explain_method(spec: Spec) -> About:
    """Of a method by name, or from a file, with the hyperparameters of its spec."""
    recipe = find_recipe(spec)
    parts = set_hyper(arrange_spec(spec), dict(spec.hyper), spec.name)
    doc = _find_doc(recipe)
    link = _LINK.search(doc)
    steps, views = parts.predictor.augments
    return About(
        id=spec.id,
        name=name_method(spec.id),
        what=_LINK.sub("", doc).replace(", )", ")").replace(" ()", "").replace("()", "").strip(),
        link=link[0].rstrip(".,:") if link else None,
        parts={place: _name_part(getattr(parts, place)) for place in PLACES},
        hyper=list(_list_hyper(parts)),
        needs=list(parts.predictor.needs),
        passes=parts.predictor.passes,
        views=steps * views,
    )


def _name_part(part: Any) -> str:
    then = getattr(part, "then", None)
    return f"{type(part).__name__}{f' then {type(then).__name__}' if then else ''}"


def _find_doc(recipe: Recipe) -> str:
    """The docstring of the part that fewest other methods have: of the class, or of its module."""
    every = [type(part) for each in METHODS.values() for part in (each if isinstance(each, tuple) else (each,))]
    parts = recipe if isinstance(recipe, tuple) else (recipe,)
    kinds = [part if isinstance(part, type) else type(part) for part in parts]
    kind = min(kinds, key=every.count)
    own = kind.__doc__ or ""
    if own.startswith(f"{kind.__name__}("):  # made by `dataclass`
        own = ""
    outer = sys.modules[kind.__module__].__doc__ or ""
    chosen = next((doc for doc in (own, outer) if _LINK.search(doc)), own or outer)
    return " ".join(chosen.split("\n\n")[0].split())


def _list_hyper(parts: Parts) -> Iterator[Hyper]:
    """Each under the shortest key that is unique."""
    one = isinstance(parts.personal, Rounds) and parts.personal == parts.rounds
    values = {path: value for path, value in list_hyper(parts).items() if not (one and path.startswith("personal."))}
    for path, value in values.items():
        words = path.split(".")
        ends = (".".join(words[-n:]) for n in range(1, len(words) + 1))
        key = next(end for end in ends if sum(f".{other}".endswith(f".{end}") for other in values) == 1)
        holder: Any = parts
        for word in words[:-1]:
            holder = getattr(holder, word)
        comment = read_comments(type(holder)).get(words[-1])
        yield Hyper(key, value, comment.text if comment else "", type(holder).__name__)
