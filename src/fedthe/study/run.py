"""`fedthe.run`: an experiment of names and objects, or a sweep of experiments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, overload

from ..config import Config, make_config
from ..data.plan import Federation
from ..errors import InputError
from ..experiment.data import settings_of
from ..experiment.results import Results
from ..experiment.run import run_prepared
from ..experiment.work import prepare
from ..experiment.workers import find_workers
from ..methods.compose import Recipe
from ..methods.given import Given, name_methods
from ..nets.net import Net
from ..progress.events import RoundListener, hearing_rounds
from ..text import quote
from .sweep import Sweep, Swept, plan_sweep, run_sweep


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

    Args:
        config: settings to begin with.
        methods: names, FILE.py:NAME, classes, parts or tuples of parts; ("mine", PARTS) gives parts a name, and
            ("fedthe", {"alpha": 0.2}) changes hyperparameters.
        federation: data in place of `dataset`. Its settings are those of the run, unless others are given here.
        net: a name, FILE.py:NAME, or a network.
        on_round: called with a `fedthe.Round` after every round of training. An exception in it stops the run.
        sweep: values by key: {"alpha": [0.05, 0.1]}. The result is a `fedthe.Sweep`.
        settings: keys of a config file, which override those of `config`. `fedthe settings` lists them.
    """
    if config is not None and not isinstance(config, Config):
        raise InputError(f"config must be a fedthe.Config, not {quote(config)}; `fedthe run FILE` reads a file.")
    if on_round is not None and not callable(on_round):
        raise InputError(f"on_round must be a function of a fedthe.Round, not {quote(on_round)}.")
    if on_round is not None and find_workers():
        raise InputError("on_round is for runs in this process; workers report progress a few times a second only.")
    if federation is not None and not isinstance(federation, Federation):
        raise InputError(f"federation must be a fedthe.Federation, not a {type(federation).__name__}.")
    recipes: dict[str, Recipe] = {}
    if methods is not None:
        settings["methods"], recipes = name_methods(methods)
    values = (
        (config.as_dict() if config else {})
        | (settings_of(federation) if federation else {})
        | _describe_net(net)
        | settings
    )
    given = None if isinstance(net, str) else net
    dataset = federation.source if federation else None
    for key in ("dataset", "natural", "size", "square", "by_client") if federation else ():
        if key in settings or (isinstance(sweep, Mapping) and key in sweep):
            raise InputError(f"{key} has no effect on a federation that is given; leave one of them out.")
    if given is not None and isinstance(sweep, Mapping) and "net" in sweep:
        raise InputError("net is given as an object, so it cannot be swept; sweep names, or FILE.py:NAME.")
    with hearing_rounds(on_round):
        if sweep is not None:
            plan = plan_sweep(make_config(values), sweep, recipes, given)
            return run_sweep(plan, dataset, net=given, recipes=recipes)
        return run_prepared(*prepare(make_config(values), dataset, net=given, recipes=recipes))


def _describe_net(net: Any) -> dict[str, Any]:
    """The name of a network, as a key of a config."""
    if net is None or isinstance(net, str):
        return {} if net is None else {"net": net}
    return {"net": net.name if isinstance(net, Net) else getattr(net, "__name__", type(net).__name__)}
