"""The head of the page and its sections in order. Scripts draw the charts of the selected run into them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..data import Page, Shown
from ..headline import say_finding
from .embed import is_drawn, list_severities
from .markup import escape, frame, list_items, list_or_fold, prefix
from .provenance import show_provenance
from .results import show_results
from .statistics import show_groups, show_statistics
from .streams import show_streams


@dataclass(frozen=True)
class Section:
    id: str
    name: str  # in the navigation
    html: str


def list_sections(page: Page) -> list[Section]:
    """Those with something to show for at least one run; scripts hide those that the selected run lacks."""
    runs = page.shown
    sections = [Section("results", "Results", show_results(runs))] if runs else []
    if statistics := show_statistics(runs):
        sections.append(Section("statistics", "Statistics", statistics))
    if groups := show_groups(runs):
        sections.append(Section("groups", "Joined clients", groups))
    if streams := show_streams(runs):
        sections.append(Section("streams", "Streams", streams))
    sections += _list_charts(page)
    if any(shown.provenance for shown in runs):
        sections.append(Section("provenance", "Provenance", show_provenance(runs)))
    return sections


def _list_charts(page: Page) -> Iterator[Section]:
    runs = page.shown
    of_run = '<p class="of-run"></p>' if len(runs) > 1 else ""

    def make(id: str, name: str, title: str, what: str) -> Section:
        body = f'{of_run}<p class="what">{what}</p>\n<div class="drawn"></div>'
        return Section(id, name, frame(id, title, body, "needs-script"))

    if any(len(shown.scores) > 1 and shown.clients for shown in runs):
        yield make(
            "comparison",
            "Comparison",
            "Two methods compared",
            "The difference between two methods on each test, paired by client and seed, with its 95 % interval: a "
            "bootstrap over seeds, then over the clients of each. p comes from the same bootstrap and is corrected by "
            "Holm's method for the tests of the table. Up / down: clients with a higher and with a lower accuracy.",
        )
    if any(map(_has_trade_off, runs)):
        yield make(
            "trade",
            "ID and OOD",
            "ID against OOD",
            "Each point is a method: accuracy on the original test (ID) against mean accuracy on the other tests "
            "(OOD). Further right is better personalized, further up is more robust.",
        )
    if any(map(list_severities, runs)):
        yield make("severity", "Severity", "Severity of the corruption", "Accuracy by severity of the corruption.")
    if any(shown.clients for shown in runs):
        yield make(
            "clients",
            "Clients",
            "Per client",
            "Accuracy of each client on each test, and the classes it holds. Click a client, or choose one, to see its "
            "numbers. Clients of different seeds hold different data.",
        )
    if any(shown.curves or shown.losses for shown in runs):
        yield make("curves", "Curves", "Learning curves", "Progress by round. Click a name to hide its line.")
    if any(shown.weights for shown in runs):
        yield make(
            "weights",
            "Weights",
            "Weight of the personal head",
            "Distribution of the weight 1 - e over the samples of each test: at 0 the global head decides, at 1 the "
            "personal head. The vertical scale is a square root, because most samples are at the ends.",
        )
    if any(shown.examples for shown in runs):
        yield make("examples", "Examples", "Examples", "Samples of each test, with predictions.")
    if any(figure.get("id") for figure in page.figures):
        more = " in addition to the runs above" if runs else ""
        yield make("figures", "Figures", "Ablations and sweeps", f"Measured{more}.{_name_undrawn(page.figures)}")


def _has_trade_off(shown: Shown) -> bool:
    return any("original" in scores and len(scores) > 1 for scores in shown.scores.values())


def _name_undrawn(records: Sequence[Mapping[str, Any]]) -> str:
    names = [escape(record["id"]) for record in records if record.get("id") and not is_drawn(record)]
    return f" Not drawn here: {', '.join(names)}; see their PNG files." if names else ""


def show_head(page: Page) -> str:
    """Findings, failures and notes."""
    runs, several = page.shown, len(page.shown) > 1
    found = [(shown, escape(say_finding(shown)), escape(shown.sentence)) for shown in runs]
    if several:
        told = [f"<b>{escape(shown.name)}</b>: {finding} <i>{sentence}</i>" for shown, finding, sentence in found]
        lines = [list_or_fold("Findings", told)]
    else:
        lines = [f'<p class="headline">{finding}</p>' for _, finding, _ in found if finding]
        lines += [f'<p class="sentence">{sentence}</p>' for _, _, sentence in found]
    failures = [
        f"{prefix(shown, several)}{escape(what)}: {escape(why)}"
        for shown in runs
        for what, why in shown.failures.items()
    ]
    notes = [f"{prefix(shown, several)}{escape(note)}" for shown in runs for note in shown.notes]
    notes += map(escape, page.notes)
    if failures:
        lines.append(f'<div class="note failed"><h2>Failures</h2>{list_items(failures)}</div>')
    if notes:
        lines.append(f'<div class="note">{list_or_fold("Notes", notes)}</div>')
    return "\n".join(lines)


def choose_run(runs: Sequence[Shown]) -> str:
    if len(runs) < 2:
        return ""
    options = "".join(f'<option value="{i}">{escape(shown.name)}</option>' for i, shown in enumerate(runs))
    return f'<label class="control needs-script">Run in the charts <select id="run">{options}</select></label>'
