"""From what runs, tables and figures leave behind to what a report shows."""

from __future__ import annotations

import base64
import io
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import records, store
from ..config import Config, make_config
from ..errors import InputError
from ..experiment import EXAMPLES, Results, read_results
from ..pictures import TITLES
from ..study.draw import describe_settings, name_method
from ..study.reproduce import (
    FORMAT,
    FREE,
    find_comparable,
    list_clients,
    list_unchecked,
    say_unchecked,
    time_samples,
)
from ..study.show import list_remarks
from ..study.tables import SEVERITY, Case, Table, find_table, load_tables, method_of, plan_cases
from ..text import clean
from .cells import number_names
from .data import BINS, Clients, Cost, Curve, Example, Losses, Page, Paper, Percents, Score, Shown, Weights

HEADS = ("global", "personal")
SHOWN_EXAMPLES = 9  # of every test, right and wrong ones by turns
ByClient = Mapping[str, Mapping[str, Mapping[str, Percents]]]  # by method, test and seed
Samples = Mapping[str, np.ndarray]  # by "test/client/column"


def gather(paths: Sequence[Path]) -> Page:
    """A page about folders of runs, records of tables and figures, and folders of such records."""
    shown: list[Shown] = []
    figures: list[Mapping[str, Any]] = []
    for path in paths:
        if (path / "config.json").exists():
            shown.append(show_results(read_results(path)))
            continue
        for record in _read_records(path):
            if "data" in record:
                figures.append(record)
            else:
                shown.append(show_record(record))
    names = [each.name for each in shown] or [str(each["title"]) for each in figures]
    several = f"{len(names)} {'experiments' if shown else 'figures'}"
    apart = [replace(each, name=name) for each, name in zip(shown, number_names(names), strict=False)]
    return Page(names[0] if len(names) == 1 else several, apart, figures)


def _read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Those of a file or a folder, which may have its figures in a folder `figures`."""
    if not path.exists():
        raise InputError(f"{path} does not exist; name the folder of a run, or a record of `fedthe table`.")
    files = sorted([*path.glob("*.json"), *path.glob("figures/*.json")]) if path.is_dir() else [path]
    found = [record for file in files if _is_record(record := records.read_json(file))]
    if not found:
        raise InputError(f"{path} holds no run and no record of a table or a figure.")
    yield from found


def _is_record(value: Any) -> bool:
    table = {"format", "id", "columns", "rows", "cases", "compared", "changed", "names", "environment"}
    return isinstance(value, dict) and (
        table <= value.keys() or {"id", "title", "config", "tests", "data"} <= value.keys()
    )


def show_results(results: Results) -> Shown:
    """All that is known of a run."""
    config, folder = results.config, results.folder
    samples = {(file.method, file.seed): file.samples for file in _read_answers(results)}
    clients = list_clients(results)
    ms = time_samples(results)
    manifests = {seed: _read_manifest(folder, seed, digest) for seed, digest in results.manifests.items()}
    return Shown(
        name=clean(config.name if config.out is None else folder.name),
        sentence=_say_what_ran(config, results.methods, results.environment),
        methods={method: name_method(method) for method in results.methods},
        tests=_name_tests(results.tests, results.names),
        seeds=list(config.seeds),
        scores=_score(clients),
        costs={method: _describe_cost(ms.get(method), results.costs.get(method, {})) for method in results.methods},
        paper=find_paper(results),
        classes=next((manifest["pool"]["classes"] for manifest in manifests.values() if manifest), []),
        clients={
            str(seed): Clients(
                [client["classes"] for client in manifest["clients"]] if manifest else [],
                _pick_seed(clients, seed),
                {
                    method: heads
                    for method in results.methods
                    if (heads := _score_heads(samples.get((method, seed), {}), results.tests, config.clients))
                },
            )
            for seed, manifest in manifests.items()
        },
        weights={
            method: weights
            for method in results.methods
            if (weights := _spread_weights([kept for (name, _), kept in samples.items() if name == method]))
        },
        losses=[
            Losses(about["methods"], about["seed"], losses)
            for key, about in results.trainings.items()
            if (losses := records.read_losses(folder / "trainings" / f"{key}.safetensors"))
        ],
        curves=_draw_curves(results),
        examples=_pick_examples(results, samples),
        notes=[*results.notes, *_note_missing(samples)],
        failures=dict(results.failures),
        provenance=_trace(results),
    )


def _note_missing(samples: Mapping[tuple[str, int], Samples]) -> list[str]:
    """What a reader would look for in vain."""
    missing = [f"{method}, seed {seed}" for (method, seed), kept in samples.items() if not _has_labels(kept)]
    if not missing:
        return []
    return [
        f"Not known sample by sample: {'; '.join(missing)}. Their files in samples are missing, damaged or of an "
        "earlier version; without that folder the same command answers again, and trains nothing."
    ]


def _has_labels(samples: Samples) -> bool:
    return any(name.endswith("/label") for name in samples)


def show_record(record: Mapping[str, Any], results: Results | None = None) -> Shown:
    """A table of the paper, from its record; and all that is known of its run, if there was only one."""
    if record["format"] != FORMAT:
        raise InputError(
            f"the record of {record['id']} is of another version; `fedthe table {record['id']}` makes it anew."
        )
    table, cases = find_table(record["id"]), record["cases"]
    clients: dict[str, dict[str, Any]] = {}
    for case in cases:
        for method, tests in case["clients"].items():
            # a severity is a test of its own; else all that was tested, more than the paper's columns
            columns = case["columns"] if len(cases) > 1 else {test: test for test in tests}
            clients.setdefault(method, {}).update(
                {column: tests[test] for column, test in columns.items() if test in tests}
            )
    first = cases[0]
    config = make_config(first["config"])
    rows = {method_of(row): row for row in record["rows"]}
    methods = [method for method in config.methods if method in clients]
    tests = list(dict.fromkeys(test for method in methods for test in clients[method]))
    bare = Shown(
        name=table.id,
        sentence=_say_what_ran(config, methods, record["environment"], table.title),
        methods={
            method: rows[method] if rows.get(method, "").startswith("(") else name_method(method) for method in methods
        },
        tests=_name_tests(tests, record["names"]),
        seeds=list(config.seeds),
        scores=_score(clients),
        costs={method: _describe_cost(ms, {}) for method, ms in first["ms_per_sample"].items()},
        paper=_take_paper(table, record["compared"], list_remarks(record)),
        classes=[],
        clients={str(seed): Clients([], _pick_seed(clients, seed), {}) for seed in config.seeds},
        weights={},
        losses=[],
        curves={},
        examples=[],
        notes=list(dict.fromkeys(note for case in cases for note in case["notes"])),
        failures={who: why for case in cases for who, why in case["failures"].items()},
        provenance={
            "command": _find_command(record, config),
            "seconds": sum(case["seconds"] for case in cases) if all("seconds" in case for case in cases) else None,
            "environment": record["environment"],
            "config": first["config"],
            "manifests": first["manifests"],
            # cases share trainings: those that are the same to the second are one
            "trainings": list({json.dumps(each): each for case in cases for each in case["trainings"]}.values()),
        },
    )
    if results is None or len(cases) > 1:
        return bare
    known = show_results(results)
    return replace(
        bare,
        **{
            name: getattr(known, name)
            for name in ("costs", "classes", "clients", "weights", "losses", "curves", "examples")
        },
    )


def _find_command(record: Mapping[str, Any], config: Config) -> str:
    """What was typed; and where a record does not know, what would run its table."""
    command = str(record["environment"].get("command", ""))
    shift = [f"natural={config.natural}"] if config.natural else []
    return command if command not in ("", "fedthe") else shlex.join(["fedthe", "table", record["id"], *shift])


def find_paper(results: Results) -> Paper | None:
    """The paper's numbers for a run with the settings of one or several of its tables."""
    found: list[Paper] = []
    for table in load_tables().values():
        if (
            table.columns[0].startswith(SEVERITY)
            or table.setting["dataset"] != results.config.dataset.partition(":")[0]
        ):
            continue
        planned = plan_cases(table)[0].config
        if _settings(results.config) == _settings(planned):
            compared = find_comparable(
                table, [(Case(results.config, {test: test for test in table.tests}), results)], table.tests
            )
            found.append(_take_paper(table, compared, []))
    if not found:
        return None
    cells: dict[str, dict[str, tuple[float, float]]] = {}
    for paper in found:
        for method, row in paper.cells.items():
            cells[method] = {**row, **cells.get(method, {})}
    apart = [test for test in results.tests if not any(test in row for row in cells.values())]
    remarks = [f"Not in the paper, or not on its data, so not compared: {', '.join(apart)}."] if apart else []
    if cells and (unchecked := list_unchecked(results)):
        remarks.append(say_unchecked(unchecked))
    if results.config.seeds != (0, 1, 2):
        remarks.append("The paper's numbers are means of three seeds.")
    return replace(found[0], cells=cells, remarks=remarks)


def _settings(config: Config) -> dict[str, Any]:
    return {key: value for key, value in config.as_dict().items() if key not in FREE | {"seeds", "tests"}}


def _take_paper(table: Table, compared: Iterable[str], remarks: Sequence[str]) -> Paper:
    columns = list(compared)
    cells = {
        method_of(row): {column: cells[column] for column in columns if column in cells}
        for row, cells in table.rows.items()
    }
    return Paper(table.id, table.title, {method: row for method, row in cells.items() if row}, list(remarks))


def _say_what_ran(config: Config, methods: Sequence[str], environment: Mapping[str, Any], title: str = "") -> str:
    count = f"{len(methods)} method{'s' if len(methods) != 1 else ''}"
    where = f"; device {environment['device']}" if environment.get("device") else ""
    return f"{f'{title}: ' if title else ''}{count} on {describe_settings(config.as_dict())}{where}."


def _name_tests(tests: Iterable[str], names: Mapping[str, str]) -> dict[str, str]:
    return {test: clean(names.get(test, TITLES.get(test, test).replace("\n", " "))) for test in tests}


def _score(clients: ByClient) -> dict[str, dict[str, Score]]:
    return {method: {test: _sum_up(seeds) for test, seeds in tests.items()} for method, tests in clients.items()}


def _sum_up(seeds: Mapping[str, Percents]) -> Score:
    known = [[each for each in percents if each is not None] for percents in seeds.values()]
    means = [float(np.mean(percents)) for percents in known]
    worst = float(np.mean([min(percents) for percents in known]))
    return Score(float(np.mean(means)), float(np.std(means)) if len(means) > 1 else None, worst)


def _pick_seed(clients: ByClient, seed: int) -> dict[str, dict[str, Percents]]:
    return {
        method: {test: seeds[str(seed)] for test, seeds in tests.items() if str(seed) in seeds}
        for method, tests in clients.items()
    }


def _describe_cost(ms: float | None, costs: Mapping[str, float]) -> Cost:
    return Cost(ms, costs.get("forward"), costs.get("backward"), costs.get("peak_mib"))


class _Answers(NamedTuple):
    method: str
    seed: int
    samples: Samples


def _read_answers(results: Results) -> Iterator[_Answers]:
    for name in results.answers:
        method, seed, _ = name.rsplit("-", 2)
        yield _Answers(method, int(seed), records.read_samples(results.folder / "samples" / f"{name}.npz"))


def _read_manifest(folder: Path, seed: int, digest: str) -> dict[str, Any] | None:
    """The manifest of a seed, unless another run in the same folder has written its own there."""
    manifest = records.read_json(folder / f"manifest-{seed}.json")
    return manifest if isinstance(manifest, dict) and store.content_hash(manifest) == digest else None


def _score_heads(samples: Samples, tests: Sequence[str], clients: int) -> dict[str, dict[str, Percents]]:
    """By test and head: percent right of every client, where both heads' answers are known."""
    scored: dict[str, dict[str, Percents]] = {}
    for test in tests:
        heads: dict[str, Percents] = {
            head: [_rate(samples.get(f"{test}/{k}/{head}"), samples.get(f"{test}/{k}/label")) for k in range(clients)]
            for head in HEADS
        }
        if any(each is not None for percents in heads.values() for each in percents):
            scored[test] = heads
    return scored


def _rate(answers: np.ndarray | None, labels: np.ndarray | None) -> float | None:
    return None if answers is None or labels is None else round(100 * float((answers == labels).mean()), 3)


def _spread_weights(seeds: Sequence[Samples]) -> dict[str, Weights]:
    """By test: how much the personal head counts, over all clients and seeds."""
    found: dict[str, list[np.ndarray]] = {}
    for samples in seeds:
        for name, values in samples.items():
            test, _, column = name.split("/")
            if column == "e":
                found.setdefault(test, []).append(1 - values)
    spread = {}
    for test, parts in found.items():
        weights = np.concatenate(parts)
        counts, _ = np.histogram(weights.clip(0, 1), BINS, (0, 1))
        spread[test] = Weights((counts / len(weights)).round(5).tolist(), float(weights.mean()))
    return spread


def _draw_curves(results: Results) -> dict[str, dict[str, Curve]]:
    if not results.curves:
        return {}
    last = results.scores()
    points = {**results.curves, results.config.rounds: last}
    curves: dict[str, dict[str, Curve]] = {}
    for method, tests in last.items():
        for test in tests:
            at = {rounds: scores[method][test] for rounds, scores in points.items() if test in scores.get(method, {})}
            curves.setdefault(method, {})[test] = Curve(
                list(at), [mean for mean, _ in at.values()], [std for _, std in at.values()]
            )
    return curves


def _pick_examples(results: Results, samples: Mapping[tuple[str, int], Samples]) -> list[Example]:
    """Some samples of every test, those that the last method answers right and wrong by turns."""
    seed = int(results.examples.partition("-")[0])
    images = records.read_samples(results.folder / "examples" / f"{results.examples}.npz")
    known = {method: kept for (method, where), kept in samples.items() if where == seed}
    labelled = [kept for kept in known.values() if _has_labels(kept)]
    if not labelled:  # answers of earlier versions
        return []
    judge = labelled[-1]
    picked = []
    for test in results.tests:
        places = [
            (k, i)
            for i in range(EXAMPLES)  # the first of every client before the second of any
            for k in range(results.config.clients)
            if f"{test}/{k}" in images and f"{test}/{k}/label" in judge and i < len(judge[f"{test}/{k}/label"])
        ]
        right = [(k, i) for k, i in places if judge[f"{test}/{k}/right"][i]]
        wrong = [place for place in places if place not in right]
        turns = [place for pair in zip_longest(right, wrong) for place in pair if place is not None]
        for k, i in turns[:SHOWN_EXAMPLES]:
            said = {method: _take_sample(kept, f"{test}/{k}/", i) for method, kept in known.items()}
            picked.append(
                Example(
                    test=test,
                    client=k,
                    seed=seed,
                    image=_encode(images[f"{test}/{k}"][i]),
                    label=int(judge[f"{test}/{k}/label"][i]),
                    answers={method: int(each["answer"]) for method, each in said.items() if "answer" in each},
                    heads={
                        method: {head: int(each[head]) for head in HEADS}
                        for method, each in said.items()
                        if each.keys() >= {*HEADS}
                    },
                    weights={method: 1 - float(each["e"]) for method, each in said.items() if "e" in each},
                )
            )
    return picked


def _take_sample(samples: Samples, where: str, i: int) -> dict[str, Any]:
    return {name: samples[where + name][i] for name in ("answer", *HEADS, "e") if where + name in samples}


def _encode(image: np.ndarray) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image.squeeze()).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def _trace(results: Results) -> dict[str, Any]:
    return {
        "command": results.environment.get("command", ""),
        "python": write_call(results.config),
        "seconds": results.seconds,
        "environment": dict(results.environment),
        "config": results.config.as_dict(),
        "manifests": {str(seed): digest for seed, digest in results.manifests.items()},
        "trainings": list(results.trainings.values()),
    }


def write_call(config: Config) -> str:
    """The call that runs the same again, with the settings that are not as they would be without a word."""
    default = Config()
    given = {
        each.name: value
        for each in fields(Config)
        if each.name != "out" and (value := getattr(config, each.name)) != getattr(default, each.name)
    }
    return f"fedthe.run({', '.join(f'{name}={value!r}' for name, value in given.items())})"
