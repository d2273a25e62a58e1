"""One page that shows everything, and needs nothing else: text and tables from here, charts drawn by page.js.

Names of classes, runs, tests and methods come from users: `_say` and `_embed` are the two ways in for them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeGuard

from ..errors import InputError
from ..store import whole_file
from ..study.draw import METHODS, OTHERS, colour_of, describe_settings, look_up, name_method
from ..text import flatten
from . import cells
from .data import Losses, Page, Shown
from .headline import say_finding

LONGEST = 4000  # letters of a user's text
LONG = 30  # rows of a table that scrolls by itself, so that its head stays in sight
POINTS = 400  # of a line of losses
DRAWN = ("alpha-beta", "interpolation-", "curves-")  # how the ids of figures begin that page.js can draw
TURNS = {"fedthe_plus": 2}  # dashes and symbols: it is told from FedTHE by more than a darker or lighter red
SEVERITY = re.compile(r"severity(\d+)")


def write_page(page: Page, path: Path) -> None:
    """The page as one file that opens in a browser, without any other file and without a network."""
    text = render(page)
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")


def render(page: Page) -> str:
    """The page as HTML. What one reads comes before the scripts, so that it is there at once."""
    sections = _list_sections(page)
    parts = {
        "title": _say(page.title),
        "css": _read("page.css"),
        "head": _show_head(page.shown, page.notes),
        "nav": "\n".join(f'<li><a href="#{each.id}">{each.name}</a></li>' for each in sections),
        "runs": _choose_run(page.shown),
        "sections": "\n".join(each.html for each in sections),
        "data": _embed(
            {"runs": [_pick_run(shown) for shown in page.shown], "figures": _pick_figures(page.figures)},
        ),
        "js": _read("page.js"),
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


# Words and numbers


def _tidy(text: object) -> str:
    return flatten(text, LONGEST)


def _say(text: object) -> str:
    return escape(_tidy(text))


def _number(value: float | None, digits: int = 1) -> str:
    return cells.NOTHING if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _average(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


# Sections


@dataclass(frozen=True)
class _Section:
    id: str
    name: str  # in the navigation
    html: str


def _list_sections(page: Page) -> list[_Section]:
    """Those that have something to show for a run at least; page.js hides what the chosen run does not have."""
    runs = page.shown
    drawn = [
        (
            "trade",
            "ID and OOD",
            "ID against OOD",
            "Every method is a point: percent right on the original test, and the mean of all other tests. "
            "Further right is better personalized, further up is more robust.",
            any(map(_has_trade_off, runs)),
        ),
        (
            "severity",
            "Severity",
            "Severity of the corruption",
            "Percent right as the corruption becomes more severe.",
            any(map(_is_severity, runs)),
        ),
        (
            "clients",
            "Clients",
            "Per client",
            "Percent right of every client on every test, and the classes it holds. Click on a client, or choose it, "
            "for its own numbers. Clients of different seeds have nothing in common.",
            any(shown.clients for shown in runs),
        ),
        (
            "curves",
            "Curves",
            "Learning curves",
            "How a training went on, round by round. A click on a name hides its line.",
            any(shown.curves or shown.losses for shown in runs),
        ),
        (
            "weights",
            "Weights",
            "Weight of the personal head",
            "How the weight 1 - e is spread over the samples of each test: at 0 the global head decides, at 1 the "
            "personal head. The scale is a root, for most samples are at the ends.",
            any(shown.weights for shown in runs),
        ),
        (
            "examples",
            "Examples",
            "Examples",
            "Samples of every test, and who says what.",
            any(shown.examples for shown in runs),
        ),
        (
            "figures",
            "Figures",
            "Ablations and sweeps",
            f"What was measured{' beyond the runs above' if runs else ''}.{_name_undrawn(page.figures)}",
            any(figure.get("id") for figure in page.figures),
        ),
    ]
    of_run = '<p class="of-run"></p>' if len(runs) > 1 else ""
    sections = [_Section("results", "Results", _show_results(runs))] if runs else []
    sections += [
        _Section(
            id,
            name,
            _frame(id, title, of_run + f'<p class="what">{what}</p>\n<div class="drawn"></div>', "needs-script"),
        )
        for id, name, title, what, there in drawn
        if there
    ]
    if any(shown.provenance for shown in runs):
        sections.append(_Section("provenance", "Provenance", _show_provenance(runs)))
    return sections


def _frame(id: str, title: str, body: str, kind: str = "") -> str:
    kind = f' class="{kind}"' if kind else ""
    return (
        f'<section id="{id}" aria-labelledby="{id}-title"{kind}>\n<h2 id="{id}-title">{title}</h2>\n{body}\n</section>'
    )


def _is_severity(shown: Shown) -> bool:
    return bool(shown.tests) and all(SEVERITY.fullmatch(test) for test in shown.tests)


def _has_trade_off(shown: Shown) -> bool:
    return any("original" in scores and len(scores) > 1 for scores in shown.scores.values())


def _show_head(runs: Sequence[Shown], left_out: Sequence[str]) -> str:
    several = len(runs) > 1
    found = [(shown, say_finding(shown)) for shown in runs]
    if several:
        told = [f"<b>{_say(shown.name)}</b>: {_say(finding)} <i>{_say(shown.sentence)}</i>" for shown, finding in found]
        lines = [_list_or_fold("What was found, and what ran", told)]
    else:
        lines = [f'<p class="headline">{_say(finding)}</p>' for _, finding in found if finding]
        lines += [f'<p class="sentence">{_say(shown.sentence)}</p>' for shown in runs]
    failures = [
        f"{_prefix(shown, several)}{_say(what)}: {_say(why)}" for shown in runs for what, why in shown.failures.items()
    ]
    notes = [f"{_prefix(shown, several)}{_say(note)}" for shown in runs for note in shown.notes]
    notes += map(_say, left_out)
    if failures:
        lines.append(f'<div class="note failed"><h2>What failed</h2>{_list_items(failures)}</div>')
    if notes:
        lines.append(f'<div class="note">{_list_or_fold("Notes", notes)}</div>')
    return "\n".join(lines)


def _list_or_fold(title: str, items: Sequence[str]) -> str:
    """A list with a title; a long one is folded, for results should be in sight."""
    if len(items) > 5:
        return _fold(f"{title} ({len(items)})", _list_items(items))
    return f"<h2>{title}</h2>{_list_items(items)}"


def _prefix(shown: Shown, several: bool) -> str:
    return f"{_say(shown.name)}: " if several else ""


def _of(shown: Shown, several: bool) -> str:
    return f" of {_say(shown.name)}" if several else ""


def _list_items(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>"


def _choose_run(runs: Sequence[Shown]) -> str:
    if len(runs) < 2:
        return ""
    options = "".join(f'<option value="{i}">{_say(shown.name)}</option>' for i, shown in enumerate(runs))
    return f'<label class="control needs-script">Run in the charts <select id="run">{options}</select></label>'


# The table of results


@dataclass(frozen=True)
class _Cell:
    """A number as it is shown and sorted; of a test also the worst client's, shown in its place."""

    mean: float | None
    said: str
    worst: float | None = None  # then there is one number, whatever is asked for
    small: str = ""

    def get(self, kind: str) -> float | None:
        return self.worst if kind == "worst" and self.worst is not None else self.mean

    def say(self, kind: str) -> str:
        """Without the deviation."""
        return _number(self.worst) if kind == "worst" and self.worst is not None else self.said.split(" ± ")[0]


NOTHING = _Cell(None, cells.NOTHING)


@dataclass(frozen=True)
class _Column:
    title: str
    cells: Sequence[_Cell]
    best: Callable[[Iterable[float]], float] | None = max


def _show_results(runs: Sequence[Shown]) -> str:
    if not any(map(_has_scores, runs)):
        return _frame("results", "Results", "<p>No method has finished, so there are no results to show.</p>")
    several = len(runs) > 1
    rows = [(shown, method) for shown in runs for method in shown.methods]
    columns = [_Column(title, [_fill_cell(*row, test) for row in rows]) for test, title in _join_tests(runs).items()]
    columns += [
        _Column("average", [_fill_average(*row) for row in rows]),
        _Column("worst client", [_fill_worst(*row) for row in rows]),
        _Column("ms per sample", [_fill_ms(*row) for row in rows], min),
        _Column("passes per sample", [_fill_passes(*row) for row in rows], None),
    ]
    columns = [column for column in columns if any(cell.said != cells.NOTHING for cell in column.cells)]
    heads = ["method", *(["run"] if several else [])]
    lines = []
    start = 0
    for shown in runs:  # which cannot be compared: each has its own best
        end = start + len(shown.methods)
        best = [{kind: _find_best(column, start, end, kind) for kind in ("mean", "worst")} for column in columns]
        for i, name in enumerate(shown.methods.values(), start):
            names = f'<th scope="row">{_say(name)}</th>'
            names += f'<td class="words">{_say(shown.name)}</td>' if several else ""
            written = (_write_cell(column.cells[i], tops) for column, tops in zip(columns, best, strict=True))
            lines.append(f"<tr>{names}{''.join(written)}</tr>")
        start = end
    head = "".join(_write_head(title, "words") for title in heads)
    head += "".join(_write_head(_say(column.title), "" if column.best is max else "least") for column in columns)
    toggle = (
        '<div class="controls needs-script"><label class="control">Show <select id="shown-number">'
        '<option value="mean">the mean over clients</option><option value="worst">the worst client</option>'
        "</select></label></div>"
    )
    table = (
        f'<div class="scroll{" long" if len(rows) > LONG else ""}" tabindex="0" role="region" '
        'aria-label="Results of all methods">'
        '<table id="results-table" data-show="mean">'
        f"<caption><span>{_write_caption(runs)}</span></caption>"
        f"<thead><tr>{head}</tr></thead><tbody>\n{chr(10).join(lines)}\n</tbody></table></div>"
    )
    return _frame("results", "Results", f"{toggle}{table}{_explain(runs)}")


def _has_scores(shown: Shown) -> bool:
    return any(shown.scores.values())


def _write_head(title: str, kind: str) -> str:
    """Of a column; "least" are sorted from the least at first, as words are from A."""
    kind = f' class="{kind}"' if kind else ""
    return f'<th scope="col"{kind}><button type="button">{title}</button></th>'


def _write_caption(runs: Sequence[Shown]) -> str:
    seeds = any(len(shown.seeds) > 1 for shown in runs)
    mean = "the mean over clients" + (" and seeds ± standard deviation over seeds" if seeds else "")
    worst = "the worst client of each test" + (", the mean over seeds" if seeds else "")
    best = "the best of a column" + (" within each run" if len(runs) > 1 else "")
    return f'Percent right, <span class="mean">{mean}</span><span class="worst">{worst}</span>. Bold: {best}.'


def _join_tests(runs: Sequence[Shown]) -> dict[str, str]:
    """The tests of all runs; where they call one differently, it goes by its id."""
    titles: dict[str, str] = {}
    for shown in runs:
        for test, title in shown.tests.items():
            titles[test] = title if titles.get(test, title) == title else test
    return titles


def _fill_cell(shown: Shown, method: str, test: str) -> _Cell:
    score = shown.scores.get(method, {}).get(test)
    if score is None or not _is_known(score.mean):
        return NOTHING
    change = cells.difference(shown, method, test)
    paper = "" if change is None else f"paper {cells.say_number(score.mean - change)}, {cells.say_change(change)}"
    return _Cell(score.mean, cells.say(score), score.worst, paper.replace("-", "−"))


def _fill_average(shown: Shown, method: str) -> _Cell:
    mean = cells.average_of(shown, method)
    if len(shown.tests) < 2 or not _is_known(mean):
        return NOTHING
    return _Cell(mean, _number(mean), _average_worst(shown, method))


def _fill_worst(shown: Shown, method: str) -> _Cell:
    worst = _average_worst(shown, method) if shown.scores.get(method, {}).keys() >= shown.tests.keys() else None
    return _Cell(worst, _number(worst))


def _average_worst(shown: Shown, method: str) -> float | None:
    return _average([score.worst for score in shown.scores[method].values()])


def _fill_ms(shown: Shown, method: str) -> _Cell:
    cost = shown.costs.get(method)
    ms = cost.ms if cost else None
    return _Cell(ms, cells.say_ms(cost))


def _fill_passes(shown: Shown, method: str) -> _Cell:
    cost = shown.costs.get(method)
    both = None if cost is None or cost.forward is None else cost.forward + (cost.backward or 0)
    return _Cell(both, cells.say_passes(cost))


def _find_best(column: _Column, start: int, end: int, kind: str) -> str:
    """Of these rows, as it is shown, so that what looks the same is bold together; nobody's where all look the same."""
    seen = {value: cell.say(kind) for cell in column.cells[start:end] if _is_known(value := cell.get(kind))}
    if column.best is None or len(set(seen.values())) < 2:
        return ""
    return seen[column.best(seen)]


def _is_known(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _write_cell(cell: _Cell, best: Mapping[str, str]) -> str:
    values = {kind: cell.get(kind) for kind in best}
    sorts = "".join(f' data-{kind}="{value:.6g}"' for kind, value in values.items() if _is_known(value))
    mean = _embolden(cell.said, best["mean"]) + (f"<small>{cell.small}</small>" if cell.small else "")
    if cell.worst is None:
        return f"<td{sorts}>{mean}</td>"
    worst = _embolden(cell.say("worst"), best["worst"])
    return f'<td{sorts}><span class="mean">{mean}</span><span class="worst">{worst}</span></td>'


def _embolden(said: str, best: str) -> str:
    number, *rest = said.split(" ± ")
    return " ± ".join([f"<b>{number}</b>" if number == best else number, *rest])


def _explain(runs: Sequence[Shown]) -> str:
    """What the columns mean, and what must be known before comparing with the paper."""
    several = len(runs) > 1
    lines = []
    for shown in runs:
        if len(shown.tests) > 1:
            tests = ", ".join(_say(title) for title in shown.tests.values())
            lines.append(f"Average{_of(shown, several)}: over {tests}.")
    lines.append("Worst client: the lowest percent right of any client, test by test, and the average of these.")
    if any(cost.forward is not None for shown in runs for cost in shown.costs.values()):
        lines.append("Passes: forward (+ backward) through the network.")
    for shown in runs:
        if shown.paper and shown.paper.cells:
            lines.append(
                f"Small print{_of(shown, several)}: the paper's number ({_say(shown.paper.title)}), "
                "and ours minus the paper's."
            )
        lines += [f"{_prefix(shown, several)}{_say(remark)}" for remark in (shown.paper.remarks if shown.paper else ())]
    lines += [f"{_say(shown.name)}: no method has finished." for shown in runs if not _has_scores(shown)]
    return f'<div class="remarks">{_list_items(lines)}</div>'


# Where it comes from


def _show_provenance(runs: Sequence[Shown]) -> str:
    several = len(runs) > 1
    parts = []
    for shown in runs:
        known = shown.provenance
        title = f"<h3>{_say(shown.name)}</h3>" if several else ""
        pairs = [(_say(name), _say(value)) for name, value in known.get("environment", {}).items() if name != "command"]
        if known.get("seconds") is not None:
            pairs.append(("took", _say_duration(known["seconds"])))
        trainings = known.get("trainings", ())
        if trainings:
            took = sum(each.get("seconds") or 0 for each in trainings)
            pairs.append(("training", f"{_count(len(trainings), 'training')}, {_say_duration(took)}"))
        pairs += [
            (f"manifest, seed {_say(seed)}", f'<span class="hash">{_say(sha)}</span>')
            for seed, sha in known.get("manifests", {}).items()
        ]
        if known.get("command"):
            pairs.insert(0, ("command", f"<pre>{_say(known['command'])}</pre>"))
        if known.get("python"):
            pairs.insert(1, ("in Python", f"<pre>{_say(known['python'])}</pre>"))
        body = "<dl>" + "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in pairs) + "</dl>"
        if trainings:
            columns = list(dict.fromkeys(key for each in trainings for key in each))
            rows = [[_say_value(each.get(column)) for column in columns] for each in trainings]
            body += _fold("Trainings", _write_table(columns, rows))
        if known.get("config"):
            rows = [[_say(key), _say_value(value)] for key, value in known["config"].items()]
            body += _fold("Config", _write_table(["setting", "value"], rows))
        parts.append(title + body)
    return _frame("provenance", "Provenance", "\n".join(parts))


def _fold(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>{body}</details>"


def _write_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col" class="words">{_say(each)}</th>' for each in heads)
    body = "".join("<tr>" + "".join(f'<td class="words">{cell}</td>' for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _say_value(value: object) -> str:
    if value is None:
        return cells.NOTHING
    if isinstance(value, (list, tuple)):
        return ", ".join(_say(each) for each in value) or cells.NOTHING
    if isinstance(value, float):
        return f"{value:g}"
    return _say(json.dumps(value) if isinstance(value, Mapping) else value)


def _say_duration(seconds: float) -> str:
    for length, unit in ((3600, "hours"), (60, "minutes")):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} seconds"


# What page.js draws


def _embed(values: object) -> str:
    """As JSON that can stand inside a script: without "<", and without numbers that JSON has not."""
    said = json.dumps(_drop_strange(values), separators=(",", ":"), allow_nan=False)
    return said.replace("<", "\\u003c")


def _drop_strange(value: Any) -> Any:
    """Numbers that are none become None. The others keep all digits, for rounding twice is not rounding once."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _drop_strange(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_drop_strange(each) for each in value]
    return value


def _pick_run(shown: Shown) -> dict[str, Any]:
    return {
        "name": _tidy(shown.name),
        "methods": _look_up_methods(shown.methods),
        "tests": _look_up_tests(shown.tests),
        "severity": _is_severity(shown),
        "scores": {m: {t: asdict(score) for t, score in scores.items()} for m, scores in shown.scores.items()},
        "classes": [_tidy(name) for name in shown.classes],
        "clients": {seed: asdict(clients) for seed, clients in shown.clients.items()},
        "weights": {m: {t: asdict(each) for t, each in tests.items()} for m, tests in shown.weights.items()},
        "losses": _join_losses(shown.losses, shown.methods),
        "curves": {m: {t: asdict(curve) for t, curve in tests.items()} for m, tests in shown.curves.items()},
        "examples": [asdict(example) for example in shown.examples],
    }


def _look_up_methods(methods: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Colours as in all other pictures; those without one are given some, with other dashes and symbols each turn."""
    strange = [method for method in methods if method not in METHODS]
    turns = TURNS | {method: 1 + i // len(OTHERS) for i, method in enumerate(strange)}
    return {
        method: {"name": _tidy(methods[method]), "colour": colour, "turn": turns.get(method, 0)}
        for method, (_, colour) in look_up(methods).items()
    }


def _look_up_tests(tests: Mapping[str, str]) -> dict[str, dict[str, str]]:
    return {test: {"name": _tidy(title), "colour": colour_of(test, tests)} for test, title in tests.items()}


def _join_losses(all_losses: Sequence[Losses], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """A line for every training: the mean over its seeds, thinned where it is long."""
    groups: dict[tuple[str, ...], list[Sequence[float]]] = {}
    for each in all_losses:
        if each.losses:
            groups.setdefault(tuple(each.methods), []).append(each.losses)
    lines = []
    for methods, group in groups.items():
        length = max(map(len, group))
        step = max(1, math.ceil(length / POINTS))
        rounds = sorted({*range(0, length, step), length - 1})
        means = [_average([losses[i] for losses in group if i < len(losses)]) for i in rounds]
        name = ", ".join(_tidy(names.get(method, method)) for method in methods)
        lines.append({"method": methods[0], "name": name, "rounds": [i + 1 for i in rounds], "losses": means})
    return lines


def _is_drawn(record: Mapping[str, Any]) -> bool:
    return str(record.get("id", "")).startswith(DRAWN)


def _name_undrawn(records: Sequence[Mapping[str, Any]]) -> str:
    names = [_say(record["id"]) for record in records if record.get("id") and not _is_drawn(record)]
    return f" Not drawn here: {', '.join(names)}; see their PNG files." if names else ""


def _pick_figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Those that page.js can draw."""
    picked = []
    for record in filter(_is_drawn, records):
        data = record["data"]
        methods = {method: name_method(method) for method in data.get("curves", ())}
        picked.append(
            {
                "id": record["id"],
                "title": _tidy(record["title"]),
                "settings": _tidy(describe_settings(record["config"])),
                "tests": _look_up_tests(record["tests"]),
                "methods": _look_up_methods(methods),
                "data": data,
            }
        )
    return picked
