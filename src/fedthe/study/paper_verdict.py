"""The verdict on the paper in a paragraph, and its summary in the README, computed from the records."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from ..statistics import Interval
from ..text import say_points
from . import judged
from .claims import Book, Part, Record, is_ahead, is_no_worse, name_row, say_each, say_gap
from .paper_claims import GLOBAL, OTHERS, PERSONAL, SETTINGS, find_global, in_settings, on_tests
from .tables import AVERAGE, MAIN_TESTS

LABEL_SHIFT = ("logit_adjust", "em", "bbse", "fmapls")


def write_verdict(book: Book) -> str:
    """The page in a paragraph, from the same parts as the claims: what is open there is open here."""
    led = _count(in_settings("fedthe", PERSONAL, "ooc")(book))
    kept = _count(in_settings("fedthe", OTHERS, "original", is_no_worse)(book))
    covariate = ". ".join(
        f"{name_row(method)} is shown to be better than the best of these "
        + "; ".join(
            f"on {test} images in {_count(parts)} settings, and worse in {sum(part.holds is False for part in parts)}"
            for test, parts in _judge_covariate(book, method).items()
        )
        for method in ("fedthe", "fedthe_plus")
    )
    hundred = on_tests("clients100-dir0.1", "fedthe_plus", PERSONAL, MAIN_TESTS)(book)
    tenth = on_tests("participation0.1-dir0.1", "fedthe_plus", PERSONAL, MAIN_TESTS)(book)
    said = (
        f"**{say_shifts(book)}** Out of client, FedTHE is ahead of every other personalized method of the paper in "
        f"{led} settings (networks and degrees of skew; with ResNet20-GN and CCT4, the paper's tables have five other "
        f"methods, none of them global). {say_globals(book)} {say_label_shift(book)} In distribution it is less than a "
        f"point behind the best other method of the paper in {kept}. {covariate}; the rest is open. With 100 clients, "
        f"FedTHE+ is ahead of the best other personalized method of the paper on {_say_sides(hundred)}; with "
        f"a tenth of the clients per round, it is ahead on {_say_sides(tenth)}."
    )
    return "\n".join(wrap(said, 139, break_on_hyphens=False))


def say_shifts(book: Book) -> str:
    """The page in a sentence. Out of client, FedTHE helps if it is ahead of all other personalized methods."""
    label = [part.holds for part in in_settings("fedthe", PERSONAL, "ooc")(book)]
    covariate = [part.holds for parts in _judge_covariate(book, "fedthe").values() for part in parts]
    helps = "helps" if all(label) else "helps in some settings" if any(label) else "is not shown to help"
    under = (
        "in some settings it does" if any(covariate) else "it is not shown to" if None in covariate else "it does not"
    )
    return f"FedTHE {helps} under label shift; under covariate shift {under}."


def _judge_covariate(book: Book, method: str) -> dict[str, Sequence[Part]]:
    """A method against the best other one in every setting, by covariate shift."""
    return {test: in_settings(method, OTHERS, test)(book) for test in ("corrupted", "natural")}


def say_globals(book: Book) -> str:
    """FedTHE against the best global model of each setting that has one, out of client and on average."""
    gaps: dict[str, dict[str, Interval]] = {}
    for label, id in SETTINGS.items():
        if id in book and (rival := find_global(book[id])):
            gaps[label] = {test: book[id].gap(rival, "fedthe", test) for test in ("ooc", AVERAGE)}
    better = [gap["ooc"].mean for gap in gaps.values() if is_ahead(gap["ooc"])]
    by = f", by {say_points(min(better))} to {say_points(max(better))} points" if better else ""
    whole = ", ".join(f"{label} ({say_gap(gap[AVERAGE])})" for label, gap in gaps.items() if is_ahead(gap[AVERAGE]))
    on_average = f", and on the average of the five tests at {whole}" if whole else ""
    return (
        f"The best global model is better there in {len(better)} of {len(gaps)} settings that have one{by}{on_average}."
    )


def say_label_shift(book: Book) -> str:
    """Against methods that the paper lacks: label-shift baselines on FedTHE's own training."""
    records = [book[id] for id in judged.SETTINGS if id in book]
    if not records:
        return ""
    gaps = [record.gap("fedthe", record.best("ooc", LABEL_SHIFT), "ooc") for record in records]
    ahead = [gap.mean for gap in gaps if is_ahead(gap)]
    behind = [-gap.mean for gap in gaps if is_ahead(gap) is False]
    names = [name_row(method) for method in LABEL_SHIFT]
    return (
        f"The paper has no baselines that are made for label shift. The best of {', '.join(names[:-1])} and "
        f"{names[-1]}, on FedTHE's own training, is better than FedTHE out of client in {len(behind)} of {len(gaps)} "
        f"settings, by up to {say_points(max(behind, default=0.0))} points, and worse in {len(ahead)}, by up to "
        f"{say_points(max(ahead, default=0.0))} (seeds 31 to 38)."
    )


def _count(parts: Sequence[Part]) -> str:
    return f"{sum(part.holds is True for part in parts)} of {len(parts)}"


def _say_sides(parts: Sequence[Part]) -> str:
    ahead, behind = ([part.where for part in parts if part.holds is each] for each in (True, False))
    return f"{', '.join(ahead) or 'no test'} and behind it on {', '.join(behind) or 'none'}"


def write_summary(book: Book) -> str:
    """For the README: the main methods, the best other one, and what that means."""
    record, tests = book["main-dir0.1"], (*MAIN_TESTS, "corrupted_ooc")
    others = [method for method in record.methods if not method.startswith("fedthe")]
    best = [record.best(test, others) for test in tests]
    shown = {"FedAvg": ["fedavg"] * 6, "FedAvg+FT": ["fedavg_ft"] * 6, "the best other method": best}
    shown |= {"FedTHE": ["fedthe"] * 6, "FedTHE+": ["fedthe_plus"] * 6}
    titles = ["original", "corrupted", "ooc", "natural (Tiny-ImageNet, 7 classes)", "mixture", "corrupted ooc"]
    lines = [f"| | {' | '.join(titles)} |", "|---|" + "---|" * 6]
    for title, methods in shown.items():
        scores = [record.score(method, test) for method, test in zip(methods, tests, strict=True)]
        lines.append(f"| {title} | {say_each(scores, between=' | ')} |")
    local = [method for method in others if method not in GLOBAL]
    rival, seeds = record.best("ooc", local), len(record.clients["fedthe"]["ooc"])
    leads = {method: say_gap(record.gap("fedthe", method, "ooc")).lstrip("+") for method in ("fedavg_ft", rival)}
    kept = [f"{name_row(each)} is {say_gap(record.gap('fedthe', each, 'original'))}" for each in ("fedavg_ft", best[0])]
    said = (
        f"The best other method is, column by column, {', '.join(map(name_row, best))}. These are means over {seeds} "
        f"seeds. Out of client (ooc), FedTHE is ahead of FedAvg+FT by {leads['fedavg_ft']} points (95 % interval) and "
        f"of the best other personalized method of the paper, {name_row(rival)}, by {leads[rival]}. "
        f"{_say_global(record)} {say_label_shift(book)} On its own client's data, FedTHE's difference to "
        f"{', and to '.join(kept)}. {_say_shifted(record, others)} Over all settings: {say_shifts(book)}"
    )
    return "\n".join([*lines, "", *wrap(said, 139, break_on_hyphens=False)])


def _say_global(record: Record) -> str:
    """FedTHE against the best global model, out of client and in distribution."""
    rival = find_global(record)
    if rival is None:
        return ""
    gap, lead = record.gap(rival, "fedthe", "ooc"), record.gap("fedthe", rival, "original")
    found = {True: "is better there", False: "is worse there", None: "may be better there, which is open"}[
        is_ahead(gap)
    ]
    said = f"The best global model, {name_row(rival)}, {found} ({say_gap(gap)})"
    return f"{said}; on original, FedTHE's difference to it is {say_gap(lead)}."


def _say_shifted(record: Record, others: Sequence[str]) -> str:
    """FedTHE against the best other method under a covariate shift."""
    gaps = {test: record.gap("fedthe", record.best(test, others), test) for test in ("corrupted", "natural")}
    words = {True: "better", False: "worse", None: "not shown to be better"}
    said = " and ".join(f"{words[is_ahead(gap)]} on {test} images ({say_gap(gap)})" for test, gap in gaps.items())
    return f"Against the best other method, it is {said}."
