"""Every setting with its type, its default and what it does: the fields of `Config`, and the comments beside them."""

from __future__ import annotations

import typing
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Literal

from .comments import read_comments
from .config import Config
from .specs import say_plain

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
LISTS = {int: "whole numbers", str: "names"}
TABLE, TEXTS = "a table for each method", "a table of texts"
UNSET, EMPTY = "unset", "empty"  # None, which the command line writes as none; and a list of nothing
FIRST = "the run"  # the section of the fields above the first one that has a name


@dataclass(frozen=True)
class Setting:
    key: str
    section: str
    kind: str
    default: Any
    about: str

    @property
    def said_default(self) -> str:
        """As it is typed."""
        if isinstance(self.default, tuple):
            return ",".join(map(str, self.default)) or EMPTY
        return EMPTY if self.default == {} else UNSET if self.default is None else say_plain(self.default)

    @property
    def has_choices(self) -> bool:
        return self.kind not in {*KINDS.values(), *LISTS.values(), TABLE, TEXTS}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def list_settings() -> list[Setting]:
    hints, comments = typing.get_type_hints(Config), read_comments(Config)
    return [
        Setting(
            each.name,
            comments[each.name].section.partition(":")[0] or FIRST,
            _say_kind(hints[each.name]),
            each.default if each.default_factory is MISSING else each.default_factory(),
            comments[each.name].text.replace("None:", f"{UNSET}:"),
        )
        for each in fields(Config)
    ]


def _say_kind(hint: Any) -> str:
    inside = [each for each in typing.get_args(hint) if each is not type(None)]
    origin = typing.get_origin(hint)
    if origin is Literal:
        return ", ".join(map(str, inside[:-1])) + f" or {inside[-1]}"
    if origin is tuple:
        return LISTS[inside[0]]
    if origin is dict:
        return TEXTS if inside == [str, str] else TABLE
    if type(None) in typing.get_args(hint):
        return _say_kind(inside[0])
    return KINDS[hint]


def write_markdown() -> str:
    """The table of the documentation."""
    lines = ["| setting | default | values | what it does |", "|---|---|---|---|"]
    section = ""
    for each in list_settings():
        if each.section != section:
            section = each.section
            lines.append(f"| **{section}** | | | |")
        default = each.said_default if each.said_default in (UNSET, EMPTY) else f"`{each.said_default}`"
        cells = (f"`{each.key}`", default, each.kind, each.about)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)
