"""What came of a run: the scores of every client, and all that stands beside them; written to and read from its folder.

Scores are in results.jsonl, settings in config.json, versions in environment.json, and the rest in summary.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import records, store
from ..config import Config, make_config
from ..data.pool import Pool
from ..errors import InputError
from ..timeline import CURVE
from . import notebook, samples, tables, timelines
from .scores import GROUPS
from .scores import ClientScore as ClientScore
from .scores import Failure as Failure
from .tables import Cells, Means
from .tables import score_rows as score_rows

FILES = ("results.parquet", "results.jsonl", "trainings.json", "config.json", "environment.json", "summary.json")
NO_EXAMPLES = "none"  # in place of the name of a file of examples: data that are no pictures
ELSEWHERE = ("rows", "others", "config", "environment")  # fields of results that are not in summary.json


def _by_number(value: Mapping[str, Any]) -> dict[int, Any]:
    return {int(key): each for key, each in value.items()}


def _read_curves(value: Mapping[str, Any]) -> dict[int, Cells]:
    return {
        rounds: {method: {test: (mean, std) for test, (mean, std) in row.items()} for method, row in scores.items()}
        for rounds, scores in _by_number(value).items()
    }


def _drop_deviations(curves: Mapping[int, Cells]) -> dict[int, Cells]:
    return {
        rounds: {method: {test: (mean, None) for test, (mean, _) in row.items()} for method, row in scores.items()}
        for rounds, scores in curves.items()
    }


def _read_place(value: str | None) -> Path | None:
    return Path(value) if value else None


@dataclass(frozen=True, kw_only=True, repr=False)
class Results:
    """What a run measured. `fedthe.run` returns it, and `fedthe.read_results` reads it from the folder of a run.

    Tables are dicts by method and test: `table`, `std`, `worst`, `worst_tenth`, `weighted`, `nll` and `calibration`.
    `frame`, `samples`, `timeline` and `over_time` give data, `compare` compares two methods with intervals, and
    `report` writes a page. In a notebook, results show the table of accuracies.
    """

    # metadata: how a field is read from JSON, where that gives another type than it was written from
    rows: tuple[ClientScore, ...]
    others: tuple[ClientScore, ...] = field(default_factory=tuple)  # of clients in other groups, see `group`
    costs: Mapping[str, Mapping[str, float]]  # by method: forward and backward passes and peak memory, per sample
    failures: Mapping[str, str]  # by method, seed and rounds, as `Failure.who` says them: why there is no answer
    trainings: Mapping[str, Mapping[str, Any]]  # by id: the methods that deploy it, its rounds, seconds, bytes
    notes: tuple[str, ...] = field(metadata={"read": tuple})
    names: Mapping[str, str]  # by natural test: its title, which names its pool
    pools: Mapping[str, str]  # by natural test: the name of its pool
    digests: Mapping[str, str] = field(default_factory=dict)  # of decoded content: "pool", and by natural test
    curves: Mapping[int, Cells] = field(metadata={"read": _read_curves})  # by round
    answers: tuple[str, ...] = field(metadata={"read": tuple})  # the names of their files, also of those with samples
    examples: Mapping[str, Any]  # images to look at: the name of their "file", and their "seed"
    reused: int  # answers that were there before this run
    earlier: Path | None = field(metadata={"read": _read_place})  # where results of other settings were moved to
    manifests: Mapping[int, str] = field(metadata={"read": _by_number})  # by seed: the hash of who holds which rows
    folder: Path = field(metadata={"read": Path})
    shared: bool = field(default_factory=bool)  # whether trainings and answers are in the folder above, as in a sweep
    seconds: float
    config: Config
    environment: Mapping[str, Any]

    @property
    def store(self) -> Path:
        """The folder of trainings, answers, samples and examples."""
        return self.folder.parent if self.shared else self.folder

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(row.method for row in self.rows))

    @property
    def tests(self) -> list[str]:
        return list(dict.fromkeys(row.test for row in self.rows))

    @property
    def groups(self) -> list[str]:
        """Those of clients that there are results of, in this order: trained, joined, unlabeled."""
        return [name for name in GROUPS if any(row.group == name for row in (*self.rows, *self.others))]

    def group(self, name: str) -> Results:
        """The same results, whose tables are of one group of clients.

        Args:
            name: "trained" for clients that took part in training, as by default; with the setting unseen also
                "joined" for those that joined after it and personalized with their labels, and "unlabeled" for the
                same clients without labels. Methods that cannot do so are left out; `notes` say which, and why.
        """
        samples.check_known("group", name, self.groups)
        both = [(row.group == name, row) for row in (*self.rows, *self.others)]
        rows, others = (tuple(row for inside, row in both if inside == wanted) for wanted in (True, False))
        return replace(self, rows=rows, others=others)

    def table(self) -> Means:
        """Accuracy in percent, by method and test: the mean over clients, then over seeds."""
        return {method: {test: mean for test, (mean, _) in cells.items()} for method, cells in self.scores().items()}

    def worst(self) -> Means:
        """The worst client's accuracy, the mean over seeds."""
        return tables.find_worst(self.rows)

    def worst_tenth(self) -> Means:
        """The mean accuracy of the worst tenth of the clients (at least one), the mean over seeds."""
        return tables.find_worst_tenth(self.rows)

    def weighted(self) -> Means:
        """Accuracy weighted by samples: the share of all samples that are answered correctly, the mean over seeds."""
        return tables.weigh_by_samples(self.rows)

    def nll(self) -> Means:
        """The negative log-likelihood of the true classes in nats: the mean over clients, then over seeds.

        Results of earlier versions do not have it; then the table is empty.
        """
        return tables.average_nll(self.rows)

    def calibration(self) -> Means:
        """The expected calibration error in percent: 15 bins over all samples of a test, the mean over seeds.

        It reads the files of samples; methods whose files are missing or of an earlier version are left out.
        """
        return tables.find_calibration_errors(samples.read_samples(self))

    def rejection(self) -> Means:
        """How well the probability of the answer tells samples of known classes from those of an unknown one.

        The area under the ROC curve in percent, where 50 is chance: the mean over clients, then over seeds; of the
        test open_set, and empty without it.
        """
        return tables.average_auroc(self.rows)

    def std(self) -> dict[str, dict[str, float | None]]:
        """The standard deviation (n - 1) over seeds of what `table` gives; None where there is a single seed."""
        return {method: {test: std for test, (_, std) in cells.items()} for method, cells in self.scores().items()}

    def scores(self) -> Cells:
        """`table` and `std` together."""
        return score_rows(self.rows)

    def summary(self) -> dict[str, Any]:
        """The tables and every field of summary.json, as plain data."""
        shown = {
            "results": self.table(),
            "std_over_seeds": self.std(),
            "ddof": 1,  # standard deviations are with n - 1; files without this line have them with n
            "worst_client": self.worst(),
            "worst_tenth": self.worst_tenth(),
            "sample_weighted": self.weighted(),
            "nll": self.nll(),
            "rejection": self.rejection(),
        }
        return shown | {
            each.name: _make_plain(getattr(self, each.name)) for each in fields(self) if each.name not in ELSEWHERE
        }

    def compare(self, a: str, b: str) -> notebook.Comparison:
        """Two methods on every test that both answered: a - b, paired by client and seed, with 95 % intervals.

        The interval is a bootstrap over seeds and then over the clients of each; with one seed, over its clients. The
        p-values come from the same bootstrap and are corrected by Holm's method over the tests. The same results always
        give the same numbers.

        Raises:
            InputError: for a method that has no results, or if a and b are the same.
        """
        return notebook.compare_methods(self, a, b)

    def frame(self) -> Any:
        """One row per method, seed, test and client.

        With the columns `samples`, `right`, `accuracy` (%), `ms_per_sample`, `nll`, `unknown` (further samples, of a
        class that no client holds), `auroc` (%, of such a test; else NaN) and `group`. A pandas DataFrame if pandas is
        installed, else a dict of NumPy arrays.
        """
        names = [each.name for each in fields(ClientScore)]
        columns: dict[str, Any] = {name: [getattr(row, name) for row in self.rows] for name in names}
        for name in ("nll", "auroc"):
            columns[name] = np.array(columns[name], dtype=np.float64)  # None becomes NaN
        return notebook.make_frame(columns)

    def samples(self, method: str | None = None, test: str | None = None, seed: int | None = None) -> Any:
        """One row per sample, in the order of its stream; of all methods, tests and seeds, or of those named.

        Columns: `label` and `answer` (classes by number; -1: a class that no client holds), `right`, `probability` (of
        the answer), `truth` (the probability of the true class), `segment` (the number of the block in time), `origin`
        (a position in `fedthe.data.shifts.ORIGINS`), `shift` (the natural shift, if the data has several), `kind` (a
        position in `fedthe.corruptions.CORRUPTIONS`; -1: clean) and `severity` (0: clean); of an open set also
        `log_probability` (of the answer, in 64 bits); for two heads also `e` (the weight of the global head), `global`
        and `personal` (what each head answers alone), `global_probability` and `personal_probability` (what each gives
        to the answer). What a method does not have is NaN. A pandas DataFrame if pandas is installed, else a dict of
        NumPy arrays.

        Raises:
            InputError: for an unknown name, or if the files of samples are missing.
        """
        return notebook.make_frame(samples.select_samples(self, method, test, seed))

    def timeline(self, test: str) -> Any:
        """How every method takes a stream in time; one row per method, as the page on streams defines it.

        Columns (%): `accuracy`, `worst_window` and `forgetting`, with intervals (`_low`, `_high`), `worst_client`,
        `auroc`, `fpr95`, and for each phase P `accuracy P`, `steady P`, `recovery P` with `recovery_low P` and
        `recovery_high P` (samples), and `lost P` (samples). A pandas DataFrame if pandas is installed, else a dict of
        NumPy arrays.

        Raises:
            InputError: for an unknown test, or if the files of samples are missing.
        """
        return notebook.make_frame(timelines.tabulate_scores(self, test))

    def over_time(self, test: str, window: int = CURVE) -> Any:
        """Accuracy (%) along a stream, and its `std` over seeds; one row per method and position.

        Positions count from 0, like `sample` of `samples`. window: samples of the moving average, an odd number; it is
        centred and ends where a segment does. A pandas DataFrame if pandas is installed, else a dict of NumPy arrays.
        """
        return notebook.make_frame(timelines.tabulate_curves(self, test, window))

    def report(self, path: str | Path = "report.html") -> Path:
        """Write the report to one HTML file, and return its path."""
        # the only import from above: results know their report, so that a notebook needs one name
        from ..report.data import Page
        from ..report.gather import show_results
        from ..report.page import write_page

        shown = show_results(self)
        write_page(Page(shown.name, [shown]), Path(path))
        return Path(path)

    def __repr__(self) -> str:
        return notebook.lay_out(self).write_text()

    def _repr_html_(self) -> str:
        return notebook.lay_out(self).write_html()


def _make_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _make_plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_make_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def _fill_results(summary: Mapping[str, Any], **known: Any) -> Results:
    """From what `Results.summary` gave, and the fields that are known otherwise."""
    for each in fields(Results):
        if each.name not in known and (each.name in summary or each.default_factory is MISSING):
            read = each.metadata.get("read")
            known[each.name] = read(summary[each.name]) if read else summary[each.name]
    return Results(**known)


def name_shift(test: str, pool: Pool) -> str:
    """The title of a natural shift: the pool it comes from, and how many classes that has if not all."""
    present = len(np.unique(pool.labels))
    few = f"{present} classes" if present < len(pool.classes) else ""
    about = ", ".join(each for each in (pool.name if pool.name != test else "", few) if each)
    return f"{test} ({about})" if about else test


def write_results(results: Results, about: Mapping[str, Any]) -> None:
    """All files of results, and those of `about` by name. summary.json comes last and has the hashes of the others."""
    folder = results.folder
    rows = [asdict(row) for row in (*results.rows, *results.others)]
    with store.whole_file(folder / "results.jsonl") as part:
        part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    _write_parquet(folder / "results.parquet", rows)
    for name, value in {**about, "trainings.json": results.trainings}.items():
        store.write_json(folder / name, value)  # again, so that all are of one run
    names = ("results.jsonl", "results.parquet", "trainings.json", *about)
    files = {name: store.file_hash(folder / name) for name in names if (folder / name).exists()}
    store.write_sealed(folder / "summary.json", results.summary() | {"files": files})


def _write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return
    with store.whole_file(path) as part:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), part)


def read_results(folder: str | Path) -> Results:
    """What `fedthe.run` returned, from the folder that it left, such as `runs/quick`.

    Raises:
        InputError: if the folder holds no finished run, or its files are damaged.
    """
    folder = Path(folder)
    summary, config = store.read_sealed(folder / "summary.json"), records.read_json(folder / "config.json")
    if config is None:
        raise InputError(f"{folder} holds no run; `fedthe run` makes one.")
    if summary is None:
        raise InputError(f"{folder} holds a run that is not finished; the command that began it goes on with it.")
    try:
        for name in ("results.jsonl", "config.json", "environment.json"):
            if store.file_hash(folder / name) != summary["files"][name]:
                raise ValueError(f"{name} was changed")
        lines = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
        every = [ClientScore(**json.loads(line)) for line in lines]
        rows, others = (tuple(row for row in every if (row.group == "trained") == trained) for trained in (True, False))
        known: dict[str, Any] = {"rows": rows, "others": others, "config": make_config(config), "folder": folder}
        known["environment"] = records.read_json(folder / "environment.json")
        if isinstance(summary["examples"], str):  # the file alone, as in older summaries; it is of the first seed
            known["examples"] = {"seed": known["config"].seeds[0], "file": summary["examples"]}
        if "ddof" not in summary:  # an earlier version, whose standard deviations are with n
            known["curves"] = _drop_deviations(_read_curves(summary["curves"]))
        return _fill_results(summary, **known)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(
            f"{folder} is a run of another version, or damaged ({error}); run it again; nothing is retrained."
        ) from None
