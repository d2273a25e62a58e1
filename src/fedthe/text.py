"""Words for people: names made fit to be shown, and the nearest right word for a wrong one."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable


def clean(name: str, limit: int = 60) -> str:
    """A name without control characters and lone surrogates, and not too long: what a terminal or picture can show."""
    plain = "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in ("Cc", "Cf", "Cs") else c for c in name)
    return plain if len(plain) <= limit else plain[: limit - 1] + "…"


def flatten(text: object, limit: int) -> str:
    """A text of several lines as one, and fit to be shown."""
    return clean(" ".join(str(text).split()), limit)


def say_value(value: object) -> str:
    """A setting as a person would type it."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def find_nearest(word: str, known: Iterable[str]) -> str:
    """A hint to append to "... is unknown": the nearest known word, or all of them."""
    known = list(known)
    near = difflib.get_close_matches(word.lower(), [name.lower() for name in known], n=1, cutoff=0.5)
    if near:
        return f"did you mean {next(name for name in known if name.lower() == near[0])}?"
    return f"known are {', '.join(known[:40])}{', ...' if len(known) > 40 else ''}."
