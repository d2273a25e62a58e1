"""`fedthe methods`."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from .common import Json, make_table, print_rich

if TYPE_CHECKING:
    from ..methods.about import About
    from ..specs import Spec


def methods(
    name: Annotated[str | None, typer.Argument(help="A method, such as fedthe or mine.py:FedPer.")] = None,
    as_json: Json = False,
) -> None:
    """List all methods. With NAME, show its parts and its hyperparameters."""
    from dataclasses import asdict

    from ..methods import METHODS
    from ..methods.about import explain_method
    from ..specs import Spec, parse_spec

    if name is not None:
        spec = parse_spec(name)
        about = explain_method(spec)
        return print(json.dumps(asdict(about))) if as_json else _print_method(about, spec)
    listed = [explain_method(Spec(each)) for each in METHODS]
    if as_json:
        return print(json.dumps({each.id: asdict(each) for each in listed}))
    table = make_table("method", "what it is", collapse_padding=True, pad_edge=False)
    table.columns[0].no_wrap = True
    alike = Counter(each.what for each in listed)
    for each in listed:
        parts = f" [{', '.join(each.parts.values())}]" if alike[each.what] > 1 else ""
        table.add_row(each.id, f"{each.what}{parts}")
    print_rich(table)
    return print("`fedthe methods NAME` shows a method's hyperparameters and the link to its paper.")


def _print_method(about: About, spec: Spec) -> None:
    from ..specs import say_plain

    print_rich(about.name, style="bold")
    print_rich(about.what)
    if about.link:
        print(about.link)
    print_rich("\nParts: " + ", ".join(f"{place} {kind}" for place, kind in about.parts.items()))
    if about.needs:
        print_rich(f"Needs in a client's state: {', '.join(about.needs)}")
    forward, backward = about.passes
    views = f", over {about.views} augmented views" if about.views else ""
    print_rich(f"Per sample: {_count(forward, 'forward pass')}, {_count(backward, 'backward pass')}{views}")
    if not about.hyper:
        return print("It has no hyperparameters.")
    table = make_table("hyperparameter", "default", "of", "what it is", collapse_padding=True, pad_edge=False)
    for each in about.hyper:
        table.add_row(each.key, say_plain(each.default), each.part, each.about)
    print_rich(table)
    example = f"{about.hyper[-1].key}={say_plain(about.hyper[-1].default)}"
    print(f"For a whole run: hyper.{spec.name}.{example}")
    base = replace(spec, hyper=())
    return print(f"As a variant:    'methods={base},{base}({example})'")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 'es'}"
