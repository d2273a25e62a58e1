"""Sweeps: the product of values of hyperparameters and settings, with shared trainings, as one table and one picture.

Values of a hyperparameter make variants of the methods that have it, all in one experiment. Values of a setting make
experiments, each a run in a folder of its own below the sweep's, where trainings and answers are shared.
"""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

from .. import store
from ..config import Config, make_config
from ..data.pool import Dataset
from ..errors import Failed, InputError, Stopped
from ..experiment.data import load
from ..experiment.notebook import make_frame
from ..experiment.results import Results, read_results
from ..experiment.run import run_prepared
from ..experiment.work import prepare
from ..methods.compose import Parts
from ..methods.make import Recipes, find_parts, list_hyper
from ..names import name_method
from ..progress.events import track
from ..specs import Spec, Value, say_plain
from ..text import find_nearest, flatten, quote

Swept: TypeAlias = Mapping[str, Any]  # by key, or by method and key: a list of values
FORMAT = 1
# Settings that are lists already, or change no number.
UNSWEPT = (
    *("name", "out", "methods", "seeds", "tests", "curve", "keep", "hyper", "streams"),
    *("threads", "checkpoint_seconds"),
)


@dataclass(frozen=True)
class Variant:
    """A method of the runs: the method that was varied, and the values it got."""

    method: str
    values: Mapping[str, Value]  # by swept key; only keys that this method has


@dataclass(frozen=True)
class Case:
    """One experiment of a sweep."""

    values: Mapping[str, Value]  # by swept setting
    config: Config

    @property
    def label(self) -> str:
        return say_values(self.values)


@dataclass(frozen=True)
class Plan:
    config: Config  # without what is swept
    keys: tuple[str, ...]  # in the order given
    variants: Mapping[str, Variant]  # by id
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class SweepRow:
    """A method with one combination of values: its accuracy in percent by test, and over seeds its deviation."""

    method: str
    values: Mapping[str, Value]
    scores: Mapping[str, tuple[float, float | None]]
    worst: Mapping[str, float]

    @property
    def mean(self) -> float:
        return sum(mean for mean, _ in self.scores.values()) / len(self.scores)

    @property
    def label(self) -> str:
        return f"{name_method(self.method)}{', ' if self.values else ''}{say_values(self.values, ', ')}"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What came of a sweep."""

    plan: Plan
    runs: Mapping[str, Results]  # by the values of settings, such as "lr=0.1,rounds=5"; "" if no setting is swept
    failures: Mapping[str, str]  # by experiment, or experiment and method: why there is no result
    folder: Path

    @property
    def keys(self) -> tuple[str, ...]:
        return self.plan.keys

    @property
    def tests(self) -> list[str]:
        return list(dict.fromkeys(test for results in self.runs.values() for test in results.tests))

    @property
    def names(self) -> dict[str, str]:
        """The titles of natural tests."""
        return {test: title for results in self.runs.values() for test, title in results.names.items()}

    @property
    def rows(self) -> list[SweepRow]:
        """Method by method, in the order of the product."""
        rows = []
        for case in self.plan.cases:
            results = self.runs.get(case.label)
            scores, worst = (results.scores(), results.worst()) if results else ({}, {})
            for id, variant in self.plan.variants.items():
                if id in scores:
                    values = {**case.values, **variant.values}
                    inside = {key: values[key] for key in self.keys if key in values}
                    rows.append(SweepRow(variant.method, inside, scores[id], worst[id]))
        order = list(dict.fromkeys(variant.method for variant in self.plan.variants.values()))
        return sorted(rows, key=lambda row: order.index(row.method))

    def table(self) -> dict[str, dict[str, float]]:
        """Accuracy in percent by variant and test: the mean over clients, then over seeds."""
        rows = self.rows
        twice = {row.label for row in rows if sum(each.label == row.label for each in rows) > 1}
        names = [f"{row.label} ({row.method})" if row.label in twice else row.label for row in rows]
        return {
            name: {test: mean for test, (mean, _) in row.scores.items()} for name, row in zip(names, rows, strict=True)
        }

    def records(self) -> list[dict[str, Any]]:
        """One for each variant and test, as in sweep.csv."""
        return [
            {
                **{key: row.values.get(key) for key in self.keys},
                "method": row.method,
                "test": test,
                "accuracy": mean,
                "std_over_seeds": std,
                "worst_client": row.worst[test],
            }
            for row in self.rows
            for test, (mean, std) in row.scores.items()
        ]

    def frame(self) -> Any:
        """`records` as columns: a pandas DataFrame if pandas is installed, else a dict of NumPy arrays."""
        rows = self.records()
        return make_frame({name: [row[name] for row in rows] for name in rows[0]} if rows else {})

    def plot(self, path: Path | str) -> None:
        """Draw accuracy against the swept values, as a PNG."""
        from .draw_sweep import draw_sweep

        draw_sweep(self, Path(path))

    def summary(self) -> dict[str, Any]:
        """Everything in sweep.json."""
        return {
            "format": FORMAT,
            "keys": list(self.keys),
            "config": self.plan.config.as_dict(),
            "variants": {id: [each.method, dict(each.values)] for id, each in self.plan.variants.items()},
            "cases": [{"values": dict(case.values), "folder": _name_folder(case.values)} for case in self.plan.cases],
            "results": self.table(),
            "failures": dict(self.failures),
        }


def plan_sweep(config: Config, sweep: Swept, recipes: Recipes | None = None, net: Any = None) -> Plan:
    """The variants and experiments of a sweep. Refuse unknown keys and bad values before anything runs."""
    if not isinstance(sweep, Mapping) or not sweep:
        raise InputError(f"sweep must be a table, such as [sweep] alpha = [0.05, 0.1], not {quote(sweep)}.")
    swept = {key: _list_values(key, values) for key, values in _flatten(sweep)}
    parts = find_parts(config, recipes, net)
    settings = {key: values for key, values in swept.items() if key in _sweepable(key)}
    hyper = [key for key in swept if key not in settings]
    varied = {id: _find_keys(spec, parts[id], hyper) for id, spec in config.specs.items()}
    for key in hyper:
        if not any(key in keys for keys in varied.values()):
            raise _refuse(key, parts)
    variants: dict[str, Variant] = {}
    specs: list[str] = []
    for id, spec in config.specs.items():
        keys = [key for key in swept if key in varied[id]]
        for values in product(*(swept[key] for key in keys)):
            changed = spec.vary({varied[id][key]: value for key, value in zip(keys, values, strict=True)})
            variants[changed.id] = Variant(id, dict(zip(keys, values, strict=True)))
            specs.append(str(changed))
    whole = make_config(config.as_dict() | {"methods": specs})
    find_parts(whole, recipes, net)
    cases = []
    for values in product(*settings.values()):
        chosen = dict(zip(settings, values, strict=True))
        made = make_config(whole.as_dict() | chosen)
        chosen = {key: getattr(made, key) for key in settings}  # as plain values, which a Path is not
        place = {"out": str(config.folder / _name_folder(chosen))} if chosen else {}
        cases.append(Case(chosen, make_config(made.as_dict() | place)))
    return Plan(config, tuple(swept), variants, tuple(cases))


def run_sweep(plan: Plan, dataset: Dataset | None = None, *, net: Any = None, recipes: Recipes | None = None) -> Sweep:
    """Run all experiments of a plan, or read those that have run. One that fails does not stop the others."""
    folder, runs, failures = plan.config.folder, dict[str, Results](), dict[str, str]()
    loaded: dict[tuple[Any, ...], Dataset] = {}
    errors: list[InputError | Failed] = []
    cases = sorted(plan.cases, key=lambda case: case.config.rounds)  # more rounds continue from fewer
    for case in track("experiments", cases) if len(cases) > 1 else cases:
        config = case.config
        try:
            source = (config.dataset, config.natural, config.size, config.square, config.by_client)
            if dataset is None and source not in loaded:
                loaded = {source: load(config)}
            data = dataset or loaded[source]
            runs[case.label] = run_prepared(*prepare(config, data, net=net, recipes=recipes, folder=folder))
        except Stopped:
            raise
        except (InputError, Failed) as error:
            errors.append(error)
            failures[case.label] = str(error)
            warnings.warn(f"{case.label or plan.config.name} failed: {error}", stacklevel=2)
            continue
        before = f"{case.label}: " if case.label else ""
        failures |= {f"{before}{who}": why for who, why in runs[case.label].failures.items()}
    if not runs:
        raise errors[0]
    made = Sweep(plan=plan, runs=runs, failures=failures, folder=folder)
    write_sweep(made)
    return made


def write_sweep(sweep: Sweep) -> None:
    """sweep.csv, sweep.json and sweep.png."""
    rows, folder = sweep.records(), sweep.folder
    with store.whole_file(folder / "sweep.csv") as part, part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*sweep.keys, "method", "test", "accuracy", "std_over_seeds", "worst_client"])
        writer.writeheader()
        writer.writerows(rows)
    store.write_sealed(folder / "sweep.json", sweep.summary())
    if rows:
        try:
            sweep.plot(folder / "sweep.png")
        except Exception as error:  # after hours of work, a picture must not fail the command
            warnings.warn(f"sweep.png could not be drawn: {flatten(error, 200)}.", stacklevel=2)


def read_sweep(folder: Path | str) -> Sweep:
    """What `fedthe.run` returned for a sweep, from the folder that it left."""
    folder = Path(folder)
    found = store.read_sealed(folder / "sweep.json")
    if found is None:
        raise InputError(f"{folder} holds no finished sweep; `fedthe run ... sweep.KEY=VALUES` makes one.")
    try:
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']}")
        variants = {id: Variant(method, values) for id, (method, values) in found["variants"].items()}
        values = [case["values"] for case in found["cases"]]
        runs = {
            say_values(each): read_results(folder / _name_folder(each))
            for each in values
            if (folder / _name_folder(each) / "summary.json").exists()
        }
        configs = {label: results.config for label, results in runs.items()}
        config = make_config(found["config"])
        cases = tuple(Case(each, configs.get(say_values(each), config)) for each in values)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        why = flatten(error, 200)
        raise InputError(f"{folder / 'sweep.json'} is of another version, or damaged ({why}).") from None
    plan = Plan(config, tuple(found["keys"]), variants, cases)
    return Sweep(plan=plan, runs=runs, failures=found["failures"], folder=folder)


def list_runs(folder: Path) -> list[Path]:
    """The folders of runs that a folder holds: its own, and those of a sweep."""
    own = [folder] if (folder / "config.json").exists() else []
    if not (folder / "sweep.json").is_file():
        return own
    found = store.read_sealed(folder / "sweep.json") or {}
    places = [_name_folder(case["values"]) for case in found.get("cases", ())]
    return own + [folder / place for place in places if place and (folder / place / "config.json").exists()]


def say_values(values: Mapping[str, Value], comma: str = ",") -> str:
    return comma.join(f"{key}={say_plain(value)}" for key, value in values.items())


def _name_folder(values: Mapping[str, Value]) -> str:
    """A folder's name, on every file system; values that cannot be in one, such as paths, are told apart by a hash."""
    label = say_values(values)
    safe = re.sub(r"[^\w.+=,-]", "_", label)[:100]
    return safe if safe == label else f"{safe[:80]}-{store.content_hash(label)[:8]}"


def _flatten(sweep: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """[sweep.fedthe] alpha = [...] is fedthe.alpha."""
    for key, values in sweep.items():
        if isinstance(values, Mapping):
            yield from _flatten(values, f"{before}{key}.")
        else:
            yield f"{before}{key}", values


def _list_values(key: str, values: Any) -> list[Any]:
    listed = list(values) if isinstance(values, list | tuple) else [values]
    said = [say_plain(value) for value in listed]
    if not listed or len(set(said)) != len(said):
        raise InputError(f"sweep.{key} must have at least one value, each only once, but is {quote(listed)}.")
    return listed


def _sweepable(key: str) -> Sequence[str]:
    if key in UNSWEPT:
        raise InputError(f"{key} cannot be swept; sweep a hyperparameter, or a setting with a single value such as lr.")
    return [each.name for each in fields(Config)]


def _find_keys(spec: Spec, parts: Parts, keys: Sequence[str]) -> dict[str, str]:
    """Of the swept keys, those that vary this method: its hyperparameters, unless the spec sets them itself."""
    found = {}
    for key in keys:
        method, _, rest = key.partition(".")
        inner = rest if rest and method == spec.name else key
        if _has(parts, inner) and inner not in dict(spec.hyper):
            found[key] = inner
    return found


def _has(parts: Parts, key: str) -> bool:
    return any(f".{path}".endswith(f".{key}") for path in list_hyper(parts))


def _refuse(key: str, parts: Mapping[str, Parts]) -> InputError:
    method, _, inner = key.rpartition(".")
    own = [each for id, each in parts.items() if id.partition("(")[0] == method]
    known = {path.rsplit(".", 1)[-1] for each in own or parts.values() for path in list_hyper(each)}
    if own:
        return InputError(f"sweep.{key}: {method} has no such hyperparameter; {find_nearest(inner, sorted(known))}")
    settings = [each.name for each in fields(Config) if each.name not in {*UNSWEPT, *known}]
    near = find_nearest(inner, [*sorted(known), *settings])
    return InputError(f"sweep.{key}: neither a setting nor a hyperparameter of the run's methods has this name; {near}")
