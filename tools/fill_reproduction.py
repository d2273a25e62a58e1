"""Put the tables of results/ into docs/reproduction.md, between the marks that name them.

<!-- results: main-dir0.1 -->
<!-- end -->
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from fedthe.study.show import write_markdown
from fedthe.study.tables import find_table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reproduction.md"
MARKED = re.compile(r"<!-- results: (\S+) -->\n.*?<!-- end -->", re.DOTALL)


def fill(page: str) -> str:
    def write(found: re.Match[str]) -> str:
        record = json.loads((ROOT / "results" / f"{found[1]}.json").read_text(encoding="utf-8"))
        table = write_markdown(find_table(found[1]), record)
        return f"<!-- results: {found[1]} -->\n\n{table}\n\n<!-- end -->"

    return MARKED.sub(write, page)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
