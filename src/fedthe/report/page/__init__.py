"""The report as one HTML file: Python writes text and tables, the scripts in js/ draw charts with plotly."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from ...errors import InputError
from ...store import whole_file
from ..data import Page
from .embed import embed
from .markup import escape
from .sections import choose_run, list_sections, show_head

# Joined in this order inside one function. Each file has its own scope; its first line names what it exports.
SCRIPTS = (
    *("dom", "format", "colours", "charts", "parts", "theme", "lines", "heat"),  # shared
    *(
        "results",
        "streams",
        "comparison",
        "trade",
        "severity",
        "clients",
        "curves",
        "weights",
        "examples",
        "figures",
    ),  # one for each section
    "main",
)


def write_page(page: Page, path: Path) -> None:
    """Write one file that opens in a browser and needs no other file and no network."""
    text = render(page)
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")


def render(page: Page) -> str:
    """The page as HTML: text before scripts, so that it shows at once."""
    sections = list_sections(page)
    parts = {
        "title": escape(page.title),
        "css": _read("page.css"),
        "head": show_head(page),
        "nav": "\n".join(f'<li><a href="#{each.id}">{each.name}</a></li>' for each in sections),
        "runs": choose_run(page.shown),
        "sections": "\n".join(each.html for each in sections),
        "data": embed(page),
        "js": "\n".join(_read(f"js/{name}.js") for name in SCRIPTS),
        "plotly": _load_plotly(),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _read("page.html"))


def _load_plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise InputError("a page needs plotly to draw its charts; install it with: pip install 'plotly>=6'.") from None
    return str(get_plotlyjs())


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
