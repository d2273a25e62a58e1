"""HTML from text. Users name classes, runs, tests and methods: names enter a page only through `escape` and `embed`."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from ...text import flatten
from ..data import Shown

LONGEST = 4000  # characters of a user's text


def tidy(text: object) -> str:
    return flatten(text, LONGEST)


def escape(text: object) -> str:
    return html.escape(tidy(text))


def prefix(shown: Shown, several: bool) -> str:
    return f"{escape(shown.name)}: " if several else ""


def list_items(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>"


def list_or_fold(title: str, items: Sequence[str]) -> str:
    """A list with a title, folded if it is long, so that the results stay in sight."""
    if len(items) > 5:
        return fold(f"{title} ({len(items)})", list_items(items))
    return f"<h2>{title}</h2>{list_items(items)}"


def fold(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>{body}</details>"


def write_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A plain table; cells are markup."""
    head = "".join(f'<th scope="col" class="words">{escape(each)}</th>' for each in heads)
    body = "".join("<tr>" + "".join(f'<td class="words">{cell}</td>' for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def frame(id: str, title: str, body: str, kind: str = "") -> str:
    """A section of the page."""
    kind = f' class="{kind}"' if kind else ""
    return (
        f'<section id="{id}" aria-labelledby="{id}-title"{kind}>\n<h2 id="{id}-title">{title}</h2>\n{body}\n</section>'
    )
