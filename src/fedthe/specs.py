"""How a run names a method: `fedthe`, `fedthe(alpha=0.2)`, `mine.py:FedPer` or `mine.py:FedPer(mu=0.1)`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from .errors import InputError
from .text import guess_value, quote, split_list

Value: TypeAlias = bool | int | float | str

LONGEST = 150  # characters of an id, which is part of file names
HOW = "write NAME, FILE.py:NAME or NAME(KEY=VALUE, ...)"
_FORM = re.compile(r"(?:(?P<file>.+\.py):)?(?P<name>[^():=,]+?)\s*(?:\((?P<hyper>[^()]*)\))?", re.DOTALL)
_KEY = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)
_WORD = re.compile(r"[\w.+-]+")  # as part of a file's name, on Windows too


@dataclass(frozen=True)
class Spec:
    """A method by its name, the hyperparameters that differ from the run's, and the file that defines it."""

    name: str
    hyper: tuple[tuple[str, Value], ...] = ()  # sorted by key
    file: str | None = None

    @property
    def id(self) -> str:
        """What results, reports and file names call the method."""
        changed = ",".join(f"{key}={say_plain(value)}" for key, value in self.hyper)
        return f"{self.name}({changed})" if changed else self.name

    def __str__(self) -> str:
        return f"{self.file}:{self.id}" if self.file else self.id

    def vary(self, hyper: Mapping[str, object]) -> Spec:
        """The same method with these hyperparameters."""
        values = dict(self.hyper)
        for key, value in hyper.items():
            if not _KEY.fullmatch(key):
                raise InputError(f"{quote(key)} is not the name of a hyperparameter of {self.name}.")
            values[key] = _check_value(self.name, key, value)
        changed = replace(self, hyper=tuple(sorted(values.items())))
        if len(changed.id) > LONGEST:
            raise InputError(f"{quote(changed.id)} is too long for a file's name; set hyper.{self.name}.KEY instead.")
        return changed


def parse_spec(text: str) -> Spec:
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise InputError(f"there is no method {quote(text)}; {HOW}.")
    spec = Spec(found["name"].strip(), file=found["file"])
    hyper: dict[str, object] = {}
    for part in split_list(found["hyper"]) if found["hyper"] else ():
        key, equals, value = (each.strip() for each in part.partition("="))
        if not (equals and value) or key in hyper:
            raise InputError(f"{quote(text)}: {quote(part)} is not KEY=VALUE, or sets a key twice; {HOW}.")
        hyper[key] = guess_value(value)
    return spec.vary(hyper)


def say_plain(value: object) -> str:
    """A value as `guess_value` reads it: 1.0 is 1, so that equal values have one name."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**31:
        return str(int(value))
    return str(value)


def _check_value(name: str, key: str, value: object) -> Value:
    if not isinstance(value, Value):
        raise InputError(f"{name}: {key} must be a number, a word, true or false, not {quote(value)}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{name}: {key} must be finite, not {value}.")
    if isinstance(value, str) and not _WORD.fullmatch(value):
        raise InputError(
            f"{name}: {key}={quote(value)} cannot be part of a file's name; set hyper.{name}.{key} instead."
        )
    return value
