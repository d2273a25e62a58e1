"""Put the numbers of results/ into pages of docs/ and README.md, between marks: tables, verdicts, sentences.

<!-- results: main-dir0.1 -->
<!-- end -->
<!-- claims -->
<!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from fedthe.study.claims import Book, write_claims
from fedthe.study.judgement import (
    write_deviations,
    write_discriminant,
    write_goals,
    write_judgement,
    write_passes,
    write_recommendation,
    write_rivals,
    write_streams,
)
from fedthe.study.paper_claims import CLAIMS
from fedthe.study.paper_notes import (
    DIFFERENCES,
    FINDINGS,
    list_ablations,
    list_older,
    say_tiny,
    write_inputs,
    write_notes,
)
from fedthe.study.paper_verdict import write_summary, write_verdict
from fedthe.study.reproduce import read_record
from fedthe.study.show import write_markdown
from fedthe.study.tables import find_table

ROOT = Path(__file__).parents[1]
PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("reproduction", "research", "streams", "methods")),
)
MARKED = re.compile(r"<!-- (\w+)(?:: (\S+))? -->\n.*?<!-- end -->", re.DOTALL)
WRITTEN: dict[str, Callable[[Book], str]] = {
    "verdict": write_verdict,
    "ablations": list_ablations,
    "older": list_older,
    "claims": lambda book: write_claims(CLAIMS, book),
    "findings": lambda book: write_notes(FINDINGS, book),
    "differences": lambda book: write_notes(DIFFERENCES, book),
    "inputs": write_inputs,
    "summary": write_summary,
    "tiny": say_tiny,
    "judged": write_judgement,
    "goals": write_goals,
    "passes": write_passes,
    "rivals": write_rivals,
    "discriminant": write_discriminant,
    "recommended": write_recommendation,
    "streams": write_streams,
    "deviations": write_deviations,
}


def fill(page: str) -> str:
    book = Book(ROOT / "results")

    def write(found: re.Match[str]) -> str:
        what, id = found[1], found[2]
        written = WRITTEN[what](book) if id is None else write_table(id)
        return f"<!-- {what}{f': {id}' if id else ''} -->\n\n{written}\n\n<!-- end -->"

    return MARKED.sub(write, page)


def write_table(id: str) -> str:
    file = ROOT / "results" / id  # tables with other settings have their own folder
    table = find_table(file.name)
    if not file.with_name(f"{file.name}.json").exists():
        return f"Not measured yet (`fedthe table {table.id}`)."
    return write_markdown(table, read_record(table, file.parent))


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
