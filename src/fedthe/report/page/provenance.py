"""How to repeat a run: its command, versions, durations, manifests and settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ...experiment.tables import say_messages
from ...study.show import say_duration
from .. import cells
from ..data import Shown
from .markup import escape, fold, frame, write_table


def show_provenance(runs: Sequence[Shown]) -> str:
    parts = []
    for shown in runs:
        title = f"<h3>{escape(shown.name)}</h3>" if len(runs) > 1 else ""
        facts = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in _list_facts(shown))
        parts.append(f"{title}<dl>{facts}</dl>{_fold_tables(shown)}")
    return frame("provenance", "Provenance", "\n".join(parts))


def _list_facts(shown: Shown) -> list[tuple[str, str]]:
    known = shown.provenance
    calls = {"command": known.get("command"), "in Python": known.get("python")}
    facts = [(name, f"<pre>{escape(call)}</pre>") for name, call in calls.items() if call]
    environment = known.get("environment", {}).items()
    facts += [(escape(name), escape(value)) for name, value in environment if name != "command"]
    if known.get("seconds") is not None:
        facts.append(("duration", say_duration(known["seconds"])))
    if trainings := known.get("trainings", ()):
        seconds = sum(each.get("seconds") or 0 for each in trainings)
        facts.append(("trainings", f"{len(trainings)} in {say_duration(seconds)}"))
        if size := say_messages(trainings):
            facts.append(("messages", size))
    for seed, digest in known.get("manifests", {}).items():
        facts.append((f"manifest, seed {escape(seed)}", f'<span class="hash">{escape(digest)}</span>'))
    return facts


def _fold_tables(shown: Shown) -> str:
    folded = ""
    if trainings := shown.provenance.get("trainings"):
        columns = list(dict.fromkeys(key for each in trainings for key in each))
        rows = [[_say_value(each.get(column)) for column in columns] for each in trainings]
        folded += fold("Trainings", write_table(columns, rows))
    if config := shown.provenance.get("config"):
        rows = [[escape(key), _say_value(value)] for key, value in config.items()]
        folded += fold("Config", write_table(["setting", "value"], rows))
    return folded


def _say_value(value: object) -> str:
    if value is None:
        return cells.NOTHING
    if isinstance(value, (list, tuple)):
        return ", ".join(escape(each) for each in value) or cells.NOTHING
    if isinstance(value, float):
        return f"{value:g}"
    return escape(json.dumps(value) if isinstance(value, Mapping) else value)
