"""Folders of runs and records of tables are damaged; then commands report, compare and watch them."""

from __future__ import annotations

import csv
import io
import json
import random
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from . import damage, runs
from .trial import DAMAGE, Ground, Kind, Said, Verdict, find_loss, judge_words, say, take_stock

ROOT = Path(__file__).parents[2]
RECORDS = ("main-dir0.1.json", "train-size0.5-dir0.1.json", "severity-corrupted-dir1.json", "arch-cct4.json")
DATA = re.compile(r'<script id="data" type="application/json">(.*?)</script>', re.DOTALL)
TIMES = ("ms", "ms_per_sample", "seconds", "time")
COMMANDS = {
    "report as csv": ("report", "{}", "--format", "csv"),
    "report as md": ("report", "{}", "--format", "md"),
    "report as html": ("report", "{}", "--out", "page.html"),
    "compare": ("compare", "{other}", "{}", "--json"),
    "watch": ("watch", "{}", "--once"),
}
Numbers = Counter[tuple[str, str]]


def prepare(ground: Ground, place: Path) -> None:
    """What every command shows of every undamaged run and record."""
    work = ground.copy(place / "work")
    for shown in ("run", *RECORDS):
        add_untouched(work, shown)
        for how in list_commands(shown):
            said = say(list_words(how, shown), work)
            right = read(how, work, said)
            if said.code != 0 or not right[0]:
                raise SystemExit(f"{how} of an untouched {shown} shows nothing to compare with: {said.err}")
            ground.expected[how, shown] = right
    shutil.rmtree(work)


def add_untouched(work: Path, shown: str) -> None:
    """The record, if it is one, and a copy to compare it with."""
    if shown == "run":
        shutil.copytree(work / "run", work / "untouched", symlinks=True)
    else:
        for name in (shown, "untouched.json"):
            shutil.copyfile(ROOT / "results" / shown, work / name)


def list_commands(shown: str) -> list[str]:
    return [how for how in COMMANDS if shown == "run" or how != "watch"]


def list_words(how: str, shown: str) -> list[str]:
    other = "untouched" if shown == "run" else "untouched.json"
    return [word.format(shown, other=other) for word in COMMANDS[how]]


def attempt(ground: Ground, rng: random.Random, number: int, place: Path) -> tuple[str, Verdict]:
    work = ground.copy(place / "work")
    shown = "run" if rng.random() < 0.6 else rng.choice(RECORDS)
    add_untouched(work, shown)
    how = rng.choice(list_commands(shown))
    files = runs.list_files(work) if shown == "run" else [work / shown]
    done, spare = damage.damage(work, files, rng, number)
    before = take_stock(work)
    verdict = judge(how, work, say(list_words(how, shown), work), ground.expected[how, shown])
    if verdict.outcome in ("same", "refused"):
        lost = find_loss(before, take_stock(work), spare | {"page.html"}, refused=True)
        verdict = Verdict("lost", lost) if lost else verdict
    return f"{done}; {how}", verdict


def judge(how: str, work: Path, said: Said, right: tuple[Numbers, int]) -> Verdict:
    """No number may change or disappear without a message."""
    verdict = judge_words(said)
    if verdict and (work / "page.html").exists():
        return Verdict("silent", f"a page is left, and it said: {verdict.why}")
    if verdict:
        return verdict
    try:
        numbers, complaints = read(how, work, said)
    except (OSError, ValueError, LookupError, TypeError) as error:
        return Verdict("silent", f"exit 0, but what it wrote cannot be read: {error}")
    wrong, gone = numbers - right[0], right[0] - numbers
    said_so = said.sentences or complaints > right[1]
    if wrong and ("csv" in how or not said_so):  # without a damaged file, means over the others are other means
        (where, value), _ = wrong.most_common(1)[0]
        return Verdict("silent", f"{where} is {value}")
    if gone and not said_so:
        return Verdict("silent", f"{next(iter(gone))[0]} is left out without a word")
    return Verdict("refused", "what is damaged is left out, and named") if wrong or gone else Verdict("same")


def read(how: str, work: Path, said: Said) -> tuple[Numbers, int]:
    """All numbers except times that a command showed, by position, and how often it mentions damage."""
    text = (work / "page.html").read_text(encoding="utf-8") if "html" in how else said.out
    found: Numbers = Counter()
    if "csv" in how:
        for *where, percent in csv.reader(io.StringIO(text)):
            found[", ".join(where), percent] += 1
    elif "md" in how:
        found.update(_read_markdown(text))
    elif "html" in how:
        data = DATA.search(text)
        found.update(_list_numbers(json.loads(data[1])["runs"] if data else None))
        text = text[: data.start()] if data else text  # what plotly says of damage is not ours
        text = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    elif how == "compare":
        found.update(_list_numbers(json.loads(text)))
    else:
        table = text.partition("accuracy (%)")[2].split("\n\n")[0]
        lines = [line.split() for line in table.splitlines() if re.search(r"\d\.\d", line)]
        found.update((f"{name} {i}", number) for name, *numbers in lines for i, number in enumerate(numbers))
    return found, len(DAMAGE.findall(text + said.err))


def _read_markdown(text: str) -> list[tuple[str, str]]:
    found, head, title = [], [""], ""
    for line in text.splitlines():
        if line.startswith("|"):
            cells = [cell.strip().strip("*") for cell in line.strip("|").split("|")]
            if cells[0] == "":
                head = cells
            elif not cells[0].startswith("-"):
                found += [
                    (f"{title[:20]}: {cells[0]}, {column}", cell)
                    for column, cell in zip(head[1:], cells[1:], strict=True)
                    if column not in TIMES
                ]
        elif line and not line.startswith("- "):
            title = line
            found += [(line.partition(".")[0][:20], number) for number in re.findall(r"\d[\d.]*", line)]
    return found


def _list_numbers(value: Any, where: str = "") -> list[tuple[str, str]]:
    """Every number of a JSON value and its path, without times."""
    if isinstance(value, dict):
        pairs = [(f"{where}.{key}", each) for key, each in value.items() if key not in TIMES]
    elif isinstance(value, list):
        pairs = [(f"{where}[{i}]", each) for i, each in enumerate(value)]
    else:
        return [(where, repr(value))] if isinstance(value, int | float) else []
    return [pair for path, each in pairs for pair in _list_numbers(each, path)]


KIND = Kind("reports", 400, 14, attempt, prepare)
