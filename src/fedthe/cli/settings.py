"""`fedthe settings`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..errors import InputError
from .common import Json, make_table, print_rich


def settings(
    name: Annotated[str | None, typer.Argument(help="A setting, such as dirichlet.")] = None, as_json: Json = False
) -> None:
    """List every setting of `fedthe run`: its default, and what it does. With NAME, only that one.

    A config file sets them as KEY = VALUE, and the command line as KEY=VALUE.
    """
    from ..settings import list_settings
    from ..text import find_nearest

    listed = {each.key: each for each in list_settings()}
    if name is not None and name not in listed:
        raise InputError(f"there is no setting {name!r}; {find_nearest(name, listed)}")
    chosen = [listed[name]] if name is not None else list(listed.values())
    if as_json:
        return print(json.dumps({each.key: each.as_dict() for each in chosen}))
    if name is not None:
        (one,) = chosen
        print_rich(f"{one.key}: {one.kind}; default: {one.said_default}", style="bold")
        return print_rich(one.about)
    for section in dict.fromkeys(each.section for each in chosen):
        table = make_table(title=section, collapse_padding=True, pad_edge=False, show_header=False)
        table.add_column(no_wrap=True, min_width=18)
        table.add_column(width=11, overflow="fold")
        table.add_column()
        for each in chosen:
            if each.section == section:
                choices = f" ({each.kind})" if each.has_choices else ""
                table.add_row(each.key, each.said_default.replace(",", ", "), f"{each.about}{choices}")
        print_rich(table)
    print("KEY=none unsets a key that a config file sets.")
    return print("`fedthe methods NAME` lists a method's hyperparameters, set as hyper.NAME.KEY=VALUE.")
