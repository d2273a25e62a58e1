"""What else our records say of the paper's numbers: sentences for a page, with the numbers computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from textwrap import wrap
from typing import Any

from .. import store
from ..text import say_points
from .claims import Book, name_row, say_each, say_gap
from .deviations import PAIRS
from .paper_claims import CORRUPTED_OOC, MAIN, SETTINGS
from .reproduce import read_record
from .tables import MAIN_TESTS, find_table, load_tables

COMPARABLE = ("original", "corrupted", "ooc")  # measured on the paper's data
CLOSER = 0.3  # points that we would notice
EXACT = 0.02  # points: two rounded numbers that are the same


def list_ablations(book: Book) -> str:
    """What (1) to (16) are."""
    rows = sorted(find_table("ablation").rows, key=lambda row: int(row[1 : row.index(")")]))
    said = (
        "(1) to (16) are the rows of the paper's ablation ([all of it](#ablation-cnn-dir01)); FA is feature alignment, "
        f"EM entropy minimization, SLW similarity-guided loss weighting, e the weight of the global head: "
        f"{'; '.join(rows)}."
    )
    return "\n".join(wrap(said, 139, break_on_hyphens=False))


def say_covariate(book: Book) -> str:
    """How often FedTHE+ has the highest mean under a covariate shift."""
    cells = [(id, test) for id in SETTINGS.values() if id in book for test in ("corrupted", "natural")]
    ours = [(id, test) for id, test in cells if book[id].best(test, book[id].methods) == "fedthe_plus"]
    papers = [(id, test) for id, test in cells if book[id].papers_best(test, book[id].table.rows) == "fedthe_plus"]
    return (
        "**Covariate shift.** On corrupted and natural images, FedTHE+ has the highest mean in "
        f"{len(ours)} of {len(cells)} cells (settings times tests); in the paper, in {len(papers)}. Its lead on "
        "average comes from out-of-client samples."
    )


def say_ranks(book: Book) -> str:
    from scipy.stats import spearmanr

    found, moves = [], []
    for label, id in MAIN.items():
        if id in book:
            record = book[id]
            known = [method for method in record.methods if record.paper(method, "original") is not None]
            ours = [fmean(record.score(method, test) for test in COMPARABLE) for method in known]
            papers = [fmean(record.paper(method, test) or 0 for test in COMPARABLE) for method in known]
            found.append(f"{spearmanr(ours, papers).statistic:.2f} for {label} ({len(known)} methods)")
            ranks = [
                (sum(x > b for x in papers) + 1, sum(x > a for x in ours) + 1)
                for a, b in zip(ours, papers, strict=True)
            ]
            moved = {method: abs(paper - mine) for method, (paper, mine) in zip(known, ranks, strict=True)}
            third = sorted(moved.values())[-3]
            said = ", ".join(
                f"{name_row(method)} from {paper} to {mine}"
                for method, (paper, mine) in sorted(zip(known, ranks, strict=True), key=lambda each: -moved[each[0]])
                if moved[method] >= third
            )
            moves.append(f"for {label}, {said}")
    return (
        "**Ranks.** By the mean of original, corrupted and ooc, which are measured on the paper's data, the rank "
        f"correlation with the paper is {', '.join(found)}. The largest moves, from the paper's rank to ours: "
        f"{'; '.join(moves)}."
    )


def list_older(book: Book) -> str:
    """The tables that were measured before a mixture took every row once."""
    ids = (*load_tables(), "tiny-imagenet-20", *(f"standardized/{id}" for id in load_tables()))
    older = [id for id in ids if id in book and not _is_newer(book, id)]
    held = [f"`{id}`" for id in older if not id.startswith(("corrupted-ooc", "severity-corrupted"))]
    if not held:
        return ""
    said = (
        "**Two mixtures.** A mixture takes every row of a client once, clean or corrupted. The tables "
        f"{', '.join(held)} and all figures but that of the filter were measured before, when "
        "a row could occur both ways. On the same trained models, seeds 0 to 2 at Dir(0.1), the change moves the "
        "mixture by -0.5 (FedTHE+, MEMO (G)) to +0.3 points (FedAvg + FT), that of FedTHE by -0.4. No other column is "
        "affected."
    )
    return "\n".join(wrap(said, 139, break_on_hyphens=False))


def _is_newer(book: Book, id: str) -> bool:
    """Records say how many classes clients have since mixtures take every row once."""
    file = book.folder / id
    return bool(read_record(find_table(file.name), file.parent).get("effective_classes"))


def say_mixture(book: Book) -> str:
    """The paper's mixture of baselines is the mean of the other four columns."""
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for table in load_tables().values():
        if table.columns == MAIN_TESTS and table.id in SETTINGS.values():
            for row, cells in table.rows.items():
                gap = cells["mixture"][0] - fmean(cells[test][0] for test in MAIN_TESTS if test != "mixture")
                gaps[row.startswith("fedthe")].append(gap)
    equal = sum(abs(gap) <= EXACT for gap in gaps[False])
    record = book["main-dir0.1"]
    ours = {
        method: record.score(method, "mixture")
        - fmean(record.score(method, test) for test in MAIN_TESTS if test != "mixture")
        for method in record.methods
    }
    others = [gap for method, gap in ours.items() if not method.startswith("fedthe")]
    return (
        f"**The paper's mixture.** In its CIFAR-10 tables, {equal} of {len(gaps[False])} baselines have as mixture, to "
        f"{EXACT} points, the mean of their other four columns. A stream gives that only by chance, and not at all for "
        "T3A and TTT, which adapt to what they have seen: the baselines' mixtures were not streamed. FedTHE and "
        f"FedTHE+ are from {_span(gaps[True])} points off that mean. Here every method answers the same stream: "
        f"at Dir(0.1), baselines are from {_span(others)} off, FedTHE {say_points(ours['fedthe'], '+')}."
    )


def say_em(book: Book) -> str:
    data, record = book.figure("interpolation-heads"), book["ablation"]
    personal = [data["shared"][test]["mean"][data["e"].index(0.0)] for test in ("original", "corrupted", "natural")]
    ours = [record.score("ablation_7", test) for test in ("original", "corrupted", "natural")]
    return (
        "**(7), EM alone.** e starts at 0.5, and the entropy of the mixture falls fastest towards the more confident "
        f"head, the personal one: (7) has {say_each(ours)} on original, corrupted and natural, the personal head alone "
        f"{say_each(personal)}. The paper's numbers require the global head; we do not know why."
    )


def say_hundred(book: Book) -> str:
    record, other = book["clients100-dir0.1"], book["standardized/clients100-dir0.1"]
    few, gap = book["main-dir0.1"], [record.paper("fedthe", test) for test in ("original", "ooc")]
    papers = [few.paper("fedthe", test) for test in ("original", "ooc")]
    gains = [other.score("fedthe", test) - record.score("fedthe", test) for test in ("ooc", "original")]
    return (
        f"**100 clients.** FedTHE has {say_points(record.score('fedthe', 'original'))} on original and "
        f"{say_points(record.score('fedthe', 'ooc'))} out of client, {say_less(record, 'original')} and "
        f"{say_less(record, 'ooc')} points below the paper. A client trains on 300 rows, so a round has 50 steps "
        "instead of 235, and training has progressed less after 100 rounds. The authors' inputs are worth "
        f"{say_points(gains[0])} points out of client and {say_points(gains[1])} on original. With five times as "
        f"many clients and a fifth of the rows each, the paper's FedTHE goes from {say_each(papers)} to "
        f"{say_each(gap)} on original and ooc; we do not see how. The effect of redrawn splits, "
        "where each row counts for more, was not measured."
    )


def say_less(record: Any, test: str) -> str:
    return say_points(record.paper("fedthe", test) - record.score("fedthe", test))


def say_their_code(book: Book) -> str:
    """How far methods are from the paper as ours and as the authors' code has them."""
    record, paper = book["deviations"], find_table("main-dir0.1").rows

    def miss(method: str, ours: str) -> float:
        return fmean(abs(record.score(method, test) - paper[ours][test][0]) for test in COMPARABLE)

    misses = {ours: (miss(ours, ours), miss(theirs, ours)) for ours, theirs in PAIRS.items() if ours in paper}
    mine, theirs = (fmean(each[i] for each in misses.values()) for i in (0, 1))
    closer = [name_row(ours) for ours, (before, after) in misses.items() if before - after >= CLOSER]
    ours, coded = ([record.score(method, test) for test in COMPARABLE] for method in ("ditto", PAIRS["ditto"]))
    return (
        "**The authors' code** (seeds 0 to 2 at Dir(0.1)). Their Ditto adds its proximal term after the step, where it "
        f"has no effect. Run so, it has {say_each(coded)} on original, corrupted and ooc, ours {say_each(ours)}, the "
        f"paper {say_each([paper['ditto'][test][0] for test in COMPARABLE])}: out of client, theirs is below the paper "
        "like the other methods, ours far above it. That was not tried at Dir(1.0) and Dir(10). "
        "[Their other deviations](methods.md#deviations) do not explain the gap: over "
        f"{', '.join(map(name_row, misses))}, the mean distance to the paper on these tests is {say_points(mine)} "
        f"points for our versions and {say_points(theirs)} for theirs. Closer by at least {CLOSER:g}: "
        f"{', '.join(closer) or 'none'}."
    )


def say_above(book: Book) -> str:
    """The cells in which we are far above the paper."""
    found = []
    for label, id in MAIN.items():
        record = book[id]
        cells = {
            method: [
                f"{test} {say_points(gap, '+')}"
                for test in COMPARABLE
                if (paper := record.paper(method, test)) is not None and (gap := record.score(method, test) - paper) > 3
            ]
            for method in record.methods
        }
        found.append(f"{label}: " + "; ".join(f"{name_row(m)} {', '.join(of)}" for m, of in cells.items() if of))
    apfl = [say_each([book[id].paper("apfl", test) for id in MAIN.values()]) for test in ("original", "ooc")]
    return (
        f"**More than three points above the paper.** {'. '.join(found)}. For Ditto, see the authors' code. The "
        f"paper's APFL has {apfl[0]} on original and {apfl[1]} out of client at Dir(0.1), Dir(1.0) and Dir(10), though "
        "it mixes a local model with FedAvg's, which gets better from one to the next. We do not know why."
    )


def say_networks(book: Book) -> str:
    found, leads = [], []
    for label in ("ResNet20-GN", "CCT4"):
        record = book[SETTINGS[label]]
        leads.append((record.paper("fedthe", "original") or 0) - (record.paper("fedrod", "original") or 0))
        gaps = {
            method: [record.score(method, test) - (record.paper(method, test) or 0) for test in COMPARABLE]
            for method in ("fedthe", "fedrod")
        }
        found.append(f"{label}: FedTHE {say_each(gaps['fedthe'], '+')}, FedRoD {say_each(gaps['fedrod'], '+')}")
    return (
        "**ResNet20-GN and CCT4.** Differences to the paper on original, corrupted and ooc: "
        f"{'; '.join(found)}. FedRoD and FedTHE deploy the same trained network here, so FedTHE cannot be "
        f"{say_each(leads, between=' and ')} points ahead on original as in the paper."
    )


def say_shifted_row(book: Book) -> str:
    record = book[CORRUPTED_OOC["ResNet20-GN"]]
    printed = [record.paper(method, "corrupted_ooc") or 0 for method in ("memo_p", "fedthe", "fedthe_plus")]
    ours = [record.score(method, "corrupted_ooc") for method in ("memo_p", "fedthe", "fedthe_plus")]
    return (
        f"**Corrupted out-of-client with ResNet20-GN.** The paper prints {say_each(printed)} for MEMO (P), FedTHE and "
        f"FedTHE+. The row seems to be rotated by one cell; {say_each([printed[2], *printed[:2]])} would be in line "
        f"with ours, {say_each(ours)}."
    )


def say_small_training(book: Book) -> str:
    half, more = book["train-size0.5-dir0.1"], book["train-size0.75-dir0.1"]
    cells, memo = half.table.rows["fedthe"], more.table.rows["memo_p"]
    rest = [test for test in MAIN_TESTS if test not in ("mixture", "ooc")]
    streamed = [
        of
        for table in load_tables().values()
        for row, of in table.rows.items()
        if row.startswith("fedthe") and set(MAIN_TESTS) <= of.keys()
    ]
    alike = [of for of in streamed if abs(of["mixture"][0] - fmean(of[test][0] for test in (*rest, "ooc"))) <= EXACT]
    mean = fmean(cells[test][0] for test in (*rest, "ooc"))
    implied = 4 * memo["mixture"][0] - sum(memo[test][0] for test in rest)
    return (
        f"**Less training data.** The paper has {say_points(cells['ooc'][0])} out of client for FedTHE with half of "
        f"the data, where ours has {say_points(half.score('fedthe', 'ooc'))}, and {say_points(memo['ooc'][0])} for "
        f"MEMO (P) with three quarters, where ours has {say_points(more.score('memo_p', 'ooc'))}. The two were not "
        f"merely exchanged: the mixture of the first row is the mean of its other columns "
        f"({cells['mixture'][0]:.2f} and {mean:.2f}). That is so for baselines, and for {len(alike)} of "
        f"{len(streamed)} rows of FedTHE and FedTHE+, both with half of the data: they may be of another method. "
        f"The mixture of the second row implies {say_points(implied)} out of client."
    )


def say_tiny(book: Book) -> str:
    record = book["tiny-imagenet-20"]
    tests = ("original", "corrupted", "ooc", "mixture")
    seeds = len(next(iter(record.clients["fedthe"].values())))
    rivals = [method for method in record.methods if not method.startswith("fedthe")]
    gaps = [say_gap(record.gap("fedthe_plus", record.best(test, rivals), test)) for test in tests]
    named = dict.fromkeys(name_row(record.best(test, rivals)) for test in tests)
    return (
        f"FedTHE+ against the best other method ({', '.join(named)}): "
        f"{', '.join(f'{test} {gap}' for test, gap in zip(tests, gaps, strict=True))}. "
        f"{seeds} seed{'s' if seeds > 1 else ''} with 60 test rows per client cannot rank methods that differ by "
        "less. With 180 training images per client, no method has converged."
    )


def write_inputs(book: Book) -> str:
    """A table: ours, with the authors' inputs, with their splits too, and the paper's; over the seeds that all have."""
    figure = store.read_sealed(book.folder / "standardized" / "figures" / "leak.json") or {}
    seeds, drawn = figure["config"]["seeds"], figure["data"]["reshuffled"]
    record, other = book["main-dir0.1"], book["standardized/main-dir0.1"]
    lines = ["| | ours | their inputs | their inputs and splits | the paper |", "|---|---:|---:|---:|---:|"]
    for method in ("fedavg", "fedavg_ft", "fedthe"):
        cells = [
            [record.score(method, test, seeds) for test in COMPARABLE],
            [other.score(method, test, seeds) for test in COMPARABLE],
            [drawn[method][test]["mean"] for test in COMPARABLE],
            [record.paper(method, test) or 0 for test in COMPARABLE],
        ]
        lines.append(f"| {method} | " + " | ".join(say_each(cell, between=" / ") for cell in cells) + " |")
    return "\n".join([*lines, "", f"Seeds {', '.join(map(str, seeds))}."])


def _span(numbers: Sequence[float]) -> str:
    return say_each([min(numbers), max(numbers)], "+", " to ")


Say = Callable[[Book], str]
FINDINGS: tuple[Say, ...] = (say_covariate, say_ranks, say_mixture)
DIFFERENCES: tuple[Say, ...] = (
    say_their_code,
    say_above,
    say_em,
    say_hundred,
    say_networks,
    say_shifted_row,
    say_small_training,
)


def write_notes(notes: Sequence[Say], book: Book) -> str:
    return "\n".join(f"- {note(book)}" for note in notes)
