"""Text for people: safe to print, without secrets, with hints for misspelled words."""

from __future__ import annotations

import difflib
import os
import re
import reprlib
import unicodedata
from collections.abc import Iterable, Sequence


def clean(name: str, limit: int = 60) -> str:
    """The name, safe to print: without control characters and lone surrogates, at most `limit` long."""
    plain = "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in ("Cc", "Cf", "Cs") else c for c in name)
    return plain if len(plain) <= limit else plain[: limit - 1] + "…"


def is_plain(text: str) -> bool:
    """Whether text is free of control characters and lone surrogates, as names and paths should be."""
    return not any(unicodedata.category(c) in ("Cc", "Cs") for c in text)


def quote(value: object, limit: int = 80) -> str:
    """The repr of any value, short enough for an error message."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = limit
    try:
        return clean(short.repr(value), limit)
    except (ValueError, RecursionError):  # Python prints no integer of more than 4,300 digits
        return f"something too large to show ({type(value).__name__})"


def flatten(text: object, limit: int) -> str:
    """Text of any number of lines as one line that is safe to print."""
    return clean(" ".join(str(text).split()), limit)


def say_value(value: object) -> str:
    """A setting as users type it."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def say_points(value: float, sign: str = "") -> str:
    """Percent, or a difference of them, to one decimal; `sign="+"` shows the sign of a gain.

    Records hold three decimals of a client's accuracy, so the third of a mean is the last that is the same however it
    was computed: 59.55 is not 59.5 on one page and 59.6 on another. `number` in format.js does the same.
    """
    return f"{round(value, 3):{sign}.1f}"


def say_seeds(seeds: Sequence[int]) -> str:
    """seed 0, seeds 0,1 or seeds 0 to 7."""
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {say_value(list(seeds))}"


def count(number: int, what: str) -> str:
    """1 round, 2 rounds."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def guess_value(text: str) -> bool | int | float | str:
    """A word of the command line as a number, true or false, or text."""
    for kind in (int, float) if text.isascii() else ():  # Python would also accept digits of other scripts
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)


def split_list(text: str) -> list[str]:
    """The parts between commas, except for commas within parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth = max(0, depth + {"(": 1, ")": -1}.get(letter, 0))
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def find_nearest(word: str, known: Iterable[str]) -> str:
    """A hint to append to "... is unknown": the nearest known word, or all of them."""
    known, word = list(known), word[:100]  # comparing long words is slow
    near = difflib.get_close_matches(word.lower(), [name.lower() for name in known], n=1, cutoff=0.5)
    if near:
        return f"did you mean {next(name for name in known if name.lower() == near[0])}?"
    return f"choose from {', '.join(known[:40])}{', ...' if len(known) > 40 else ''}."


LOGIN = re.compile(r"(:/{1,2})(?!/)(?:[^\s/@:'\"]*:[^\s'\"]*|[^\s/@'\"]+)@")  # user:password@ or token@ after a scheme
QUERY = re.compile(r"([?&;][\w.-]*(?:token|passw|pwd|secret|key|signature|credential)[\w.-]*=)[^&;\s'\"#]+", re.I)
HIDDEN = "***"
SECRET_VARIABLES = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
SHORTEST = 4  # characters of a secret: shorter ones occur in ordinary words


def hide_secrets(text: str, known: Iterable[str] = ()) -> str:
    """`text` without logins and secret query values of URLs, secrets from the environment, and `known` ones."""
    for secret in sorted({*known, *(os.environ.get(name, "") for name in SECRET_VARIABLES)}, key=len, reverse=True):
        if len(secret) >= SHORTEST:
            text = text.replace(secret, HIDDEN)
    return QUERY.sub(rf"\1{HIDDEN}", LOGIN.sub(rf"\1{HIDDEN}@", text))
