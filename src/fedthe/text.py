"""Names that come from files and people, made fit to be shown."""

from __future__ import annotations

import unicodedata


def clean(name: str, limit: int = 60) -> str:
    """A name without control characters and lone surrogates, and not too long: what a terminal or picture can show."""
    plain = "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in ("Cc", "Cf", "Cs") else c for c in name)
    return plain if len(plain) <= limit else plain[: limit - 1] + "…"
