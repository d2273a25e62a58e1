"""Put the table of settings into docs/experiments.md, between its marks. Its source is the comments of `Config`."""

from __future__ import annotations

import re
from pathlib import Path

from fedthe.settings import write_markdown

PAGE = Path(__file__).parents[1] / "docs" / "experiments.md"
MARKED = re.compile(r"<!-- settings -->\n.*?<!-- end -->", re.DOTALL)


def fill(page: str) -> str:
    return MARKED.sub(lambda found: f"<!-- settings -->\n\n{write_markdown()}\n\n<!-- end -->", page)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
