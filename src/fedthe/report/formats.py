"""A report as text: Markdown and LaTeX for people, CSV for pandas and spreadsheets."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ..experiment.notebook import explain_differences, say_interval
from ..text import flatten
from . import cells
from .compare import find_leads
from .data import Cost, Page, Paper, Shown
from .headline import say_finding
from .streams import explain_streams, lay_out_stream

LONGEST = 2000  # characters of a user's text
MARKDOWN = str.maketrans(
    {mark: f"\\{mark}" for mark in "\\|`*_[]#~$"}
    | {"&": "&amp;", "<": "&lt;", ">": "&gt;"}  # entities, which every Markdown reader shows as text
)
LATEX = str.maketrans(
    {mark: f"\\{mark}" for mark in "_&%$#{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}  # LaTeX's own fonts show other characters
    | {mark: f"{{{mark}}}" for mark in "[]*"}  # after the \\ that ends a row, LaTeX reads these as its argument
    | {"±": r"$\pm$", "†": r"\dag{}", "\N{REPLACEMENT CHARACTER}": "?"}
)
SCORES, LEADS, WORST, PAPER = "Accuracy (%)", "Against the best other method", "Worst client", "The paper"
MAIN = (SCORES, WORST, PAPER)  # of a LaTeX table
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet reads these as the start of a formula


@dataclass(frozen=True)
class TextCell:
    text: str  # digits and signs: nothing to escape
    best: bool = False


NOTHING = TextCell(cells.NOTHING)


@dataclass(frozen=True)
class Block:
    """A table with a row for each method."""

    title: str
    about: str  # what its numbers are
    head: Mapping[str, str]  # column titles by test; keys with spaces are not tests
    rows: Sequence[tuple[str, Sequence[TextCell]]]  # the name of a method, and its cells


def write_markdown(page: Page) -> str:
    """Tables for a README or an issue: accuracy and costs, other statistics, and the paper's numbers."""
    parts = [f"# {escape_markdown(page.title)}", *map(escape_markdown, page.notes)]
    for shown in page.shown:
        parts += [f"## {escape_markdown(shown.name)}", *map(escape_markdown, (say_finding(shown), shown.sentence))]
        for block in (*lay_out(shown), *lay_out_groups(shown), *lay_out_streams(shown)):
            parts += [escape_markdown(f"{block.title}. {block.about}".rstrip()), _write_markdown_table(block)]
        parts.append("\n".join(f"- {escape_markdown(remark)}" for remark in list_remarks(shown)))
    return "\n\n".join(part for part in parts if part) + "\n"


def write_latex(page: Page) -> str:
    """For each run tables of accuracy, the worst client's and the paper's numbers, of other statistics, of streams."""
    parts = [
        r"% Needs \usepackage{booktabs}. Names beyond Latin letters need LuaLaTeX or XeLaTeX, and a font that has them."
    ]
    labels: list[str] = []
    for shown in page.shown:
        name = re.sub(r"[^a-z0-9]+", "-", shown.name.lower()).strip("-") or "run"
        blocks = lay_out(shown)
        main = [block for block in blocks if block.title in MAIN]
        others = [block for block in blocks if block.title not in (*MAIN, LEADS)]  # leads are too wide
        for some in (main, others, *([block] for block in (*lay_out_groups(shown), *lay_out_streams(shown)))):
            if some:
                labels.append(cells.find_free(f"tab:{name}", labels))
                parts.append(_write_latex_table(shown, some, labels[-1]))
    return "\n\n".join(parts) + "\n"


def write_csv(page: Page) -> str:
    """The accuracy of each client, one line each, as pandas and pivot tables want it.

    A client that lacks a test has no line for it. Lines end with CR LF, as in RFC 4180: write the file with newline="".
    """
    file = io.StringIO()
    lines = csv.writer(file)
    lines.writerow(["run", "seed", "client", "method", "test", "percent"])
    for shown in page.shown:
        for seed, clients in shown.clients.items():
            for method, tests in clients.scores.items():
                for test, percents in tests.items():
                    words = [_disarm(word) for word in (shown.name, method, test)]
                    for client, percent in enumerate(percents):
                        if percent is not None:
                            lines.writerow([words[0], seed, client, *words[1:], percent])
    return file.getvalue()


FORMATS: dict[str, Callable[[Page], str]] = {"md": write_markdown, "latex": write_latex, "csv": write_csv}


def lay_out(shown: Shown) -> list[Block]:
    """The tables of a run; with the paper's if the run has the settings of one of its tables."""
    over = "; mean over seeds" if len(shown.seeds) > 1 else ""
    blocks = [
        _lay_out_scores(shown),
        _lay_out_leads(shown),
        _lay_out_field(shown, "worst", WORST, f"The lowest accuracy of a client{over}."),
        _lay_out_field(shown, "worst_tenth", "Worst tenth of the clients", f"Their mean accuracy{over}."),
        _lay_out_field(
            shown, "weighted", "Weighted by samples", f"Every sample counts the same, not every client{over}."
        ),
        _lay_out_field(shown, "ece", "Expected calibration error (%)", f"15 bins over all samples of a test{over}."),
        _lay_out_field(shown, "nll", "Negative log-likelihood (nats)", f"Mean over clients{over}.", digits=2),
    ]
    if shown.paper and shown.paper.cells:
        blocks.append(_lay_out_paper(shown, shown.paper))
    return [block for block in blocks if any(cell != NOTHING for _, row in block.rows for cell in row)] or blocks[:1]


def _lay_out_scores(shown: Shown) -> Block:
    averages, leaders = cells.average_all(shown), cells.find_leaders(shown)

    def say(method: str, test: str) -> TextCell:
        score = shown.scores.get(method, {}).get(test)
        return NOTHING if score is None else TextCell(cells.say(score), leaders[test] == method)

    rows = []
    for method, name in shown.methods.items():
        cost = shown.costs.get(method, Cost())
        mean = TextCell(cells.say_number(averages.get(method)), leaders[cells.AVERAGE] == method)
        costs = TextCell(cells.say_ms(cost)), TextCell(cells.say_passes(cost))
        rows.append((name, [*(say(method, test) for test in shown.tests), mean, *costs]))
    over = " ± standard deviation over seeds" if len(shown.seeds) > 1 else ""
    bold = cells.explain_bold([shown])
    about = f"Mean over clients{over}; ms and passes (forward + backward) per sample.{f' {bold}' if bold else ''}"
    head = {**_mark_tests(shown), cells.AVERAGE: "average", "ms per sample": "ms", "passes per sample": "passes"}
    return Block(SCORES, about, head, rows)


def _lay_out_leads(shown: Shown) -> Block:
    """Every method against the best other one of each test."""
    leads = find_leads(shown)

    def say(method: str, test: str) -> TextCell:
        lead = leads.get(method, {}).get(test)
        if lead is None:
            return NOTHING
        interval = f" ({say_interval(lead.low, lead.high)})" if lead.low is not None else ""
        return TextCell(f"{cells.say_change(lead.difference)}{interval}")

    rows = [(name, [say(method, test) for test in shown.tests]) for method, name in shown.methods.items()]
    how = explain_differences(0, len(shown.seeds)).partition(" p: ")[0]
    return Block(LEADS, f"The difference, and its 95 % interval. {how}", _mark_tests(shown), rows)


def _lay_out_field(shown: Shown, field: str, title: str, about: str, digits: int = 1) -> Block:
    """A table of one field of the scores."""

    def say(method: str, test: str) -> TextCell:
        score = shown.scores.get(method, {}).get(test)
        return NOTHING if score is None else TextCell(cells.say_number(getattr(score, field), digits))

    rows = [(name, [say(method, test) for test in shown.tests]) for method, name in shown.methods.items()]
    return Block(title, about, _mark_tests(shown), rows)


def _mark_tests(shown: Shown) -> dict[str, str]:
    return {test: cells.mark(shown, test) for test in shown.tests}


def _lay_out_paper(shown: Shown, paper: Paper) -> Block:
    def say(method: str, test: str) -> TextCell:
        if test not in paper.cells[method]:
            return NOTHING
        change = cells.difference(shown, method, test)
        said = "" if change is None else f" ({cells.say_change(change)})"
        return TextCell(cells.say_number(paper.cells[method][test][0]) + said)

    head = {test: name for test, name in shown.tests.items() if any(test in row for row in paper.cells.values())}
    named = [(method, name) for method, name in shown.methods.items() if method in paper.cells]
    rows = [(name, [say(method, test) for test in head]) for method, name in named]
    return Block(PAPER, f"In brackets, our number minus the paper's. Table: {paper.title}.", head, rows)


def lay_out_groups(shown: Shown) -> list[Block]:
    """A table for each group of clients that join after training."""
    over = " ± standard deviation over seeds" if len(shown.seeds) > 1 else ""
    blocks = []
    for who, scores in shown.groups.items():
        rows = []
        for method, of in scores.items():
            means = [of[test].mean for test in shown.tests if test in of]
            average = TextCell(cells.say_number(fmean(means)) if len(means) == len(shown.tests) else cells.NOTHING)
            said = [TextCell(cells.say(of[test])) if test in of else NOTHING for test in shown.tests]
            rows.append((shown.methods.get(method, method), [*said, average]))
        about = f"Accuracy (%) of {who}. Mean over clients{over}."
        blocks.append(Block("Clients that join after training", about, {**shown.tests, cells.AVERAGE: "average"}, rows))
    return blocks


def lay_out_streams(shown: Shown) -> list[Block]:
    """A table for each test that changes in time."""
    blocks: list[Block] = []
    about = explain_streams(score for stream in shown.streams.values() for score in stream.scores.values())
    for test in shown.streams:
        heads, rows = lay_out_stream(shown, test)
        title = f"Stream in time: {shown.tests.get(test, test)}"
        filled = [(name, [*map(TextCell, row)]) for name, row in rows]
        blocks.append(Block(title, "" if blocks else about, {head: head for head in heads}, filled))
    return blocks


def list_remarks(shown: Shown) -> list[str]:
    """What readers must know about the numbers."""
    failed = [f"failed: {who}: {why}" for who, why in shown.failures.items()]
    papers = shown.paper.remarks if shown.paper else ()
    return list(dict.fromkeys([*cells.explain_short(shown), *papers, *shown.notes, *failed]))


def _write_markdown_table(block: Block) -> str:
    """Names on the left, then columns of numbers."""
    lines = [["", *map(escape_markdown, block.head.values())], ["---", *("---:" for _ in block.head)]]
    for name, row in block.rows:
        lines.append([escape_markdown(name), *(f"**{cell.text}**" if cell.best else cell.text for cell in row)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _write_latex_table(shown: Shown, blocks: Sequence[Block], label: str) -> str:
    columns = blocks[0].head
    lines = [_write_latex_row("", *map(_write_latex_head, columns.values()))]
    for block in blocks:
        title = rf"\multicolumn{{{len(columns) + 1}}}{{l}}{{\emph{{{_escape_latex(block.title)}}}}}"
        lines += [r"\midrule", _write_latex_row(title)]
        for name, row in block.rows:
            said = {column: _write_latex_cell(cell) for column, cell in zip(block.head, row, strict=True)}
            lines.append(_write_latex_row(_escape_latex(name), *(said.get(column, "") for column in columns)))
    named = [f"{short} is {rest}." for short, rest in map(_split, shown.tests.values()) if rest]
    told = list(dict.fromkeys([*named, *cells.explain_short(shown), *(shown.paper.remarks if shown.paper else ())]))
    about = [f"{block.title}: {block.about[0].lower()}{block.about[1:]}" for block in blocks if block.about]
    caption = " ".join([shown.sentence, *about, *told])
    aside = [flatten(remark, LONGEST) for remark in list_remarks(shown) if remark not in told]
    return "\n".join(
        [
            *(f"% {each}" for each in aside),
            r"\begin{table}",
            r"\centering",
            r"\footnotesize",
            r"\setlength{\tabcolsep}{3pt}",
            rf"\caption{{{_escape_latex(caption)}}}",
            rf"\label{{{label}}}",
            rf"\begin{{tabular}}{{l{'r' * len(columns)}}}",
            r"\toprule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


def _write_latex_row(*places: str) -> str:
    return " & ".join(places) + r" \\"


def _write_latex_cell(cell: TextCell) -> str:
    """The standard deviation is in small type, because papers are narrow; signs are in math mode."""
    number, _, std = cell.text.partition(" ± ")
    number = re.sub(r"[+-](?=\d)", r"$\g<0>$", number)
    number = rf"\textbf{{{number}}}" if cell.best else number
    return rf"{number} {{\scriptsize $\pm$ {std}}}" if std else number


def _write_latex_head(name: str) -> str:
    """A column's name without the part in brackets, on two lines if it has two words."""
    first, _, rest = _split(name)[0].partition(" ")
    return rf"\shortstack[r]{{{_escape_latex(first)}\\{_escape_latex(rest)}}}" if rest else _escape_latex(first)


def _split(name: str) -> tuple[str, str]:
    """Split "natural (letters)" into natural and letters."""
    short, _, rest = name.partition(" (")
    return short, rest.rstrip(")")


def escape_markdown(text: str) -> str:
    return flatten(text, LONGEST).translate(MARKDOWN)


def _escape_latex(text: str) -> str:
    return flatten(text, LONGEST).translate(LATEX)


def _disarm(text: str) -> str:
    """Text that a spreadsheet reads as text and UTF-8 can encode: no lone surrogates."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return f"'{text}" if text.startswith(FORMULA) else text
