"""What a bundle says about itself to people, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..names import name_method
from ..text import clean
from .bundle import Bundle

MOST = 20  # classes that are listed


def write_card(bundle: Bundle) -> str:
    about = bundle.about
    joined = "a client that joined after training" if about.get("joined") else f"client {bundle.client}"
    who = joined if bundle.kind == "client" else "clients to join with"
    lines = [
        f"# {clean(name_method(bundle.name))} for {who}",
        "",
        "A bundle of fedthe: federated learning that stays accurate when the data shifts after deployment.",
        "",
        *_list_facts(bundle, about),
        "",
        *(_show_use(bundle)),
        "",
        *_show_classes(bundle, about),
        "## Limits",
        "",
        *_say_limits(bundle, about),
    ]
    return "\n".join(lines) + "\n"


def _list_facts(bundle: Bundle, about: Mapping[str, Any]) -> list[str]:
    takes = bundle.input
    kind = "pictures, uint8" if takes.is_picture else takes.dtype
    accuracy, rows = about.get("validation_accuracy"), about.get("validation_rows", 0)
    facts = {
        "Method": f"{clean(name_method(bundle.name))} (`{clean(bundle.name)}`)",
        "Input": f"{kind} {list(takes.shape)}",
        "Training": f"{about.get('rounds')} rounds on {clean(str(about.get('dataset')))}, seed {bundle.seed}",
        "Validation accuracy": f"{accuracy:.1f} % on {rows} rows of its own" if accuracy is not None else None,
        "Manifest of the data": f"`{about['manifest']}`" if about.get("manifest") else None,
        "Written by": f"fedthe {about.get('fedthe')}, torch {about.get('torch')}",
    }
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items() if value is not None)]


def _show_use(bundle: Bundle) -> list[str]:
    if bundle.kind == "global":
        return ["```", "fedthe personalize THIS_FOLDER --data my_images/ -o bundle/", "```"]
    return [
        "```python",
        "import fedthe",
        "",
        'p = fedthe.load_bundle("THIS_FOLDER")',
        "p.predict(sample)  # label, probabilities, weight of the global head, and why",
        "```",
    ]


def _show_classes(bundle: Bundle, about: Mapping[str, Any]) -> list[str]:
    counts = about.get("counts")
    names = [clean(name) for name in bundle.classes[:MOST]]
    more = [f"and {len(bundle.classes) - MOST} more", ""] if len(bundle.classes) > MOST else []
    if not counts:
        return ["## Classes", "", ", ".join(names), "", *more]
    rows = [f"| {name} | {count:.0f} |" for name, count in zip(names, counts, strict=False)]
    head = "estimated share of 1,000 rows" if about.get("estimated") else "rows it was trained on"
    return ["## Classes", "", f"| | {head} |", "|---|---:|", *rows, "", *more]


def _say_limits(bundle: Bundle, about: Mapping[str, Any]) -> list[str]:
    if bundle.kind == "global":
        return ["It holds no personal part: a client makes its own of it first."]
    said = ["Validation rows are from the client's own distribution; under shift, accuracy is lower."]
    if about.get("joined") == "unlabeled":
        said.append("The client had no labels: the global head stands in for the personal one.")
    if not bundle.parts["monitor"]:
        said.append("There were too few validation rows for the monitor to know a calm stream.")
    return [f"- {each}" for each in said]
