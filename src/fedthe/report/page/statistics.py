"""Statistics beside the table of results: leads with intervals, calibration, the worst clients, means by samples."""

from __future__ import annotations

from collections.abc import Sequence

from ..data import Shown
from ..formats import LEADS, MAIN, NOTHING, Block, TextCell, lay_out, lay_out_groups
from .markup import escape, fold, frame

MORE = (
    '<p class="what">In Python, results.group("joined") and results.group("unlabeled") give these clients all tables '
    "and a report of their own.</p>"
)


def show_statistics(runs: Sequence[Shown]) -> str:
    """All tables of a run that the results do not show; "" if there are none. Several runs are folded."""
    parts = []
    for shown in runs:
        blocks = [block for block in lay_out(shown) if block.title not in MAIN]
        tables = "".join(
            f"<h3>{LEADS}</h3>{write_block(block)}" if block.title == LEADS else fold(block.title, write_block(block))
            for block in blocks
        )
        if tables:
            parts.append(fold(escape(shown.name), tables) if len(runs) > 1 else tables)
    return frame("statistics", "Statistics", "\n".join(parts)) if parts else ""


def show_groups(runs: Sequence[Shown]) -> str:
    """A table for each group of clients that join after training; "" if none do."""
    several = len(runs) > 1
    titles = ((f"<h3>{escape(shown.name)}</h3>" if several else "", lay_out_groups(shown)) for shown in runs)
    parts = [title + "".join(map(write_block, blocks)) for title, blocks in titles if blocks]
    return frame("groups", "Clients that join after training", "\n".join([MORE, *parts])) if parts else ""


def _write_cell(cell: TextCell) -> str:
    """What is in brackets goes below the number."""
    number, _, more = cell.text.partition(" (")
    small = f"<small>{more.removesuffix(')')}</small>" if more else ""
    return f"<td>{number}{small}</td>" if cell == NOTHING else f"<td>{number}{small}</td>".replace("-", "−")


def write_block(block: Block) -> str:
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in block.head.values())
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(map(_write_cell, row))}</tr>' for name, row in block.rows
    )
    about = f"<caption><span>{escape(block.about)}</span></caption>" if block.about else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(block.title)}"><table>{about}'
        f'<thead><tr><th scope="col">method</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )
