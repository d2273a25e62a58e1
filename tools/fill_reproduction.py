"""Put the tables of results/ into docs/reproduction.md, between the marks that name their files.

<!-- results: main-dir0.1 -->
<!-- end -->
"""

from __future__ import annotations

import re
from pathlib import Path

from fedthe.study.reproduce import read_record
from fedthe.study.show import write_markdown
from fedthe.study.tables import find_table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reproduction.md"
MARKED = re.compile(r"<!-- results: (\S+) -->\n.*?<!-- end -->", re.DOTALL)


def fill(page: str) -> str:
    def write(found: re.Match[str]) -> str:
        file = ROOT / "results" / found[1]  # tables with other settings have their own folder
        table = find_table(file.name)
        written = write_markdown(table, read_record(table, file.parent))
        return f"<!-- results: {found[1]} -->\n\n{written}\n\n<!-- end -->"

    return MARKED.sub(write, page)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
