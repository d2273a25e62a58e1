"""`fedthe.run`: an experiment of names and objects, or a sweep of experiments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, overload

from ..config import Config, make_config
from ..errors import InputError
from ..experiment.results import Results
from ..experiment.run import run_prepared
from ..experiment.work import prepare
from ..methods.compose import Recipe
from ..methods.given import Given, name_methods
from ..nets.make import Defaults
from ..progress.events import RoundListener, hearing_rounds
from ..text import clean
from .sweep import Sweep, Swept, plan_sweep, run_sweep

if TYPE_CHECKING:
    from ..data.plan import Federation


@overload
def run(
    config: Config | None = None,
    *,
    methods: Iterable[Given] | None = None,
    federation: Federation | None = None,
    net: Any = None,
    on_round: RoundListener | None = None,
    sweep: None = None,
    **settings: Any,
) -> Results: ...


@overload
def run(
    config: Config | None = None,
    *,
    methods: Iterable[Given] | None = None,
    federation: Federation | None = None,
    net: Any = None,
    on_round: RoundListener | None = None,
    sweep: Swept,
    **settings: Any,
) -> Sweep: ...


def run(
    config: Config | None = None,
    *,
    methods: Iterable[Given] | None = None,
    federation: Federation | None = None,
    net: Any = None,
    on_round: RoundListener | None = None,
    sweep: Swept | None = None,
    **settings: Any,
) -> Results | Sweep:
    """Run an experiment, or continue it: `fedthe.run(methods=["fedthe", FedPer], rounds=10)` or `fedthe.run(config)`.

    methods: names, FILE.py:NAME, classes, parts or tuples of parts; ("mine", PARTS) gives parts a name, and
        ("fedthe", {"alpha": 0.2}) changes hyperparameters.
    federation: data in place of `dataset`. Its settings are those of the run, unless others are given here.
    net: a name, FILE.py:NAME, or a network.
    on_round: called with a `fedthe.Round` after every round of training. An exception in it stops the run.
    sweep: values by key: {"alpha": [0.05, 0.1]}. The result is a `fedthe.Sweep`.
    settings: keys of a config file, which override those of `config`. `fedthe settings` lists them.
    """
    recipes: dict[str, Recipe] = {}
    if methods is not None:
        settings["methods"], recipes = name_methods(methods)
    values = (config.as_dict() if config else {}) | _describe_data(federation) | _describe_net(net) | settings
    given = None if isinstance(net, str) else net
    dataset = federation.dataset if federation else None
    for key in ("dataset", "natural", "size") if federation else ():
        if key in settings or (isinstance(sweep, Mapping) and key in sweep):
            raise InputError(f"{key} has no effect on a federation that is given; leave one of them out.")
    if given is not None and isinstance(sweep, Mapping) and "net" in sweep:
        raise InputError("net is given as an object, so it cannot be swept; sweep names, or FILE.py:NAME.")
    with hearing_rounds(on_round):
        if sweep is not None:
            plan = plan_sweep(make_config(values), sweep, recipes, given)
            return run_sweep(plan, dataset, net=given, recipes=recipes)
        config = make_config(values)
        return run_prepared(config, *prepare(config, dataset, net=given, recipes=recipes))


def _describe_data(federation: Federation | None) -> dict[str, Any]:
    """The settings of a federation, as keys of a config."""
    if federation is None:
        return {}
    names = {each.name for each in fields(Config)}
    known: Mapping[str, Any] = vars(federation.settings)
    same = {key: value for key, value in known.items() if key in names}
    return same | {"dataset": clean(federation.pool.name), "seeds": [federation.settings.seed]}


def _describe_net(net: Any) -> dict[str, Any]:
    """The name of a network, and the optimizer it asks for, as keys of a config."""
    if net is None or isinstance(net, str):
        return {} if net is None else {"net": net}
    defaults = getattr(net, "defaults", None)
    if defaults is not None and not isinstance(defaults, Defaults):
        raise InputError(f"the network {type(net).__name__} has defaults that are no fedthe.nets.make.Defaults.")
    keys = ("optimizer", "lr", "momentum", "weight_decay")
    return {"net": type(net).__name__} | ({key: getattr(defaults, key) for key in keys} if defaults else {})
