"""Damaged files never give a traceback, a partly written page, or another number than was measured.

The short form runs with the tests. The long form: PYTHONPATH=src:tests python tests/report/test_damage.py 4000
"""

import contextlib
import io
import json
import os
import random
import re
import shutil
import sys
import warnings
from pathlib import Path

import pytest

from helpers import RESULTS

FIGURES = ("alpha-beta", "interpolation-heads", "curves-dir0.1")
COLUMNS = {"corrupted_ooc"}  # of the record
RUN = {"clients": 3, "rounds": 2, "curve": [1], "local_epochs": 1, "samples": 3, "seeds": [0, 1]}
STRANGE = (
    None,
    True,
    0,
    -1,
    1.5,
    10**9,
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "../../etc/passwd",
    "a\x00b\x1b[31m",
    "\ud800",
    "<script>alert(1)</script>",
    [],
    {},
    [[]],
    [None],
    [1, 2, 3],
    ["a", "b"],
    {"x": {"y": "z"}},
    {"0": None},
)


def make_files(folder):
    """What the commands read: a run, another one to compare it with, a record of a table, and figures."""
    import numpy as np

    import fedthe

    rng, labels = np.random.default_rng(0), np.arange(150) % 3
    for name in ("own", "shifted"):
        np.savez(folder / f"{name}.npz", images=rng.integers(0, 256, (150, 16, 16, 3), dtype=np.uint8), labels=labels)
    data = {"dataset": f"npz:{folder / 'own.npz'}", "natural": f"npz:{folder / 'shifted.npz'}"}
    fedthe.run(**RUN, **data, out=folder / "run", methods=["fedavg", "fedthe"])
    shutil.copytree(folder / "run", folder / "other")
    (folder / "records" / "figures").mkdir(parents=True)
    shutil.copy(RESULTS / "corrupted-ooc-cnn-dir1.json", folder / "records")
    for name in FIGURES:
        shutil.copy(RESULTS / "figures" / f"{name}.json", folder / "records" / "figures")


def list_targets(folder):
    """Files of the run and of the records, each kind as often as another."""
    kinds = {}
    for path in sorted([*(folder / "run").rglob("*"), *(folder / "records").rglob("*")]):
        if path.is_file() and path.suffix in (".json", ".jsonl", ".npz", ".safetensors"):
            kinds.setdefault((path.parent.name, re.sub(r"[-0-9].*", "", path.name)), []).append(path)
    return list(kinds.values())


# Ways to damage a file, of its bytes


def cut(data, rng):
    return data[: rng.randrange(len(data))]


def flip(data, rng):
    spoilt = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 20))):
        spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
    return bytes(spoilt)


def recode(data, rng):
    return data.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-32", "utf-8-sig")))


def replace_all(data, rng):
    return rng.choice((b"", b"null", b"[]", b"{}", b"0", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 5000, b"\0" * 1000))


# and of its values


def change_value(value, rng):
    """Some place in nested lists and dicts, and what to do there."""
    box, key = [value], 0
    for _ in range(rng.randrange(1, 9)):
        inside = box[key]
        if not isinstance(inside, dict | list) or not inside:
            break
        box, key = inside, rng.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
    rng.choice((_set_strange, _set_strange, _set_strange, _drop, _repeat, _set_long, _set_deep, _move))(box, key, rng)
    return value


def _set_strange(box, key, rng):
    box[key] = rng.choice(STRANGE)


def _drop(box, key, rng):
    del box[key]


def _repeat(box, key, rng):
    if isinstance(box, list):
        box.insert(key, box[key])
    else:
        box[f"{key}~"] = box[key]


def _set_long(box, key, rng):
    box[key] = "long " * 2_000_000 if rng.random() < 0.1 else "l" * 100_000


def _set_deep(box, key, rng):
    deep = 0
    for i in range(rng.choice((50, 900))):
        deep = [deep] if i % 2 else {"deep": deep}
    box[key] = deep


def _move(box, key, rng):
    """A number that could be one, and is not what was measured."""
    if isinstance(box[key], int | float) and not isinstance(box[key], bool):
        box[key] = box[key] + rng.choice((-1, 1, 7, 0.25))
    else:
        box[key] = rng.choice(STRANGE)


def change_json(data, rng):
    return json.dumps(change_value(json.loads(data), rng)).encode()


def change_line(data, rng):
    lines = data.decode().splitlines()
    i = rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            del lines[i]
        case 1:
            lines.insert(i, lines[i])
        case _:
            lines[i] = json.dumps(change_value(json.loads(lines[i]), rng))
    return "\n".join(lines).encode()


def change_arrays(data, rng):
    import numpy as np

    with np.load(io.BytesIO(data)) as file:
        arrays = dict(file)
    name = rng.choice(list(arrays))
    array = arrays.pop(name)
    changes = (
        dict,
        lambda: {name: array[:-1]},
        lambda: {name: array.astype(str)},
        lambda: {name: array.astype(complex)},
        lambda: {name: array[..., None]},
        lambda: {name: np.full(array.shape, np.nan)},
        lambda: {name: np.full(array.shape, -(2**40))},
        lambda: {name: np.zeros(())},
        lambda: {name: np.roll(array, 1, 0) + 1},
        lambda: {"x" + name: array},
        lambda: {name + "/x": array},
        lambda: {name.replace("/", "-"): array},
        lambda: {name: np.array([object()], dtype=object)},
    )
    file = io.BytesIO()
    np.savez(file, **arrays, **rng.choice(changes)())
    return file.getvalue()


def damage(path, rng):
    """Damage a file in one way; says which."""
    data = path.read_bytes()
    ways = [cut, flip, flip]
    if path.suffix == ".json":
        ways += [recode, replace_all, *[change_json] * 8]
    elif path.suffix == ".jsonl":
        ways += [recode, replace_all, *[change_line] * 8]
    elif path.suffix == ".npz":
        ways += [replace_all, *[change_arrays] * 5]
    way = rng.choice(ways)
    path.write_bytes(way(data, rng))
    return way.__name__


# What must hold


def run_command(*arguments):
    """Exit code, standard output and standard error of the command in this process; a traceback is raised."""
    from fedthe import cli

    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["fedthe", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            cli.main()
    except SystemExit as stopped:
        return stopped.code or 0, out.getvalue(), err.getvalue()
    finally:
        sys.argv = before
    raise AssertionError("the command did not exit")


def read_page(path):
    """What is embedded in a page, which must be whole."""
    text = path.read_text(encoding="utf-8")
    assert text.endswith("</html>\n")
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1], parse_constant=lambda name: pytest.fail(f"{name} in the page"))


def take_scores(page):
    """By run. A record's are checked by its table's numbers alone, so only those count that the table has."""
    return [
        {method: {test: scores[test] for test in scores if run["name"] in ("run", "other") or test in COLUMNS}}
        for run in page["runs"]
        for method, scores in run["scores"].items()
    ]


def check_numbers(command, out, whole):
    """Those of a page are those of what is not damaged, or it says that they are left out."""
    if command in ("report", "records", "compare"):
        scores = take_scores(read_page(out))
        wanted = 2 * whole["report"] if command == "compare" else whole[command]
        text = out.read_text(encoding="utf-8")
        if "No per-sample data of" in text:  # calibration is from samples: absent without them, never another number
            for mine, theirs in zip(list_cells(scores), list_cells(wanted), strict=True):
                mine["ece"] = theirs["ece"] if mine["ece"] is None else mine["ece"]
        assert scores == wanted or ("is left out" in text and scores == []), "other numbers than were measured"


def list_cells(scores):
    return [cell for run in scores for tests in run.values() for cell in tests.values()]


def look(folder, command, out):
    """One command on damaged files. True where it shows something, False where it refuses."""
    run, other, records = folder / "run", folder / "other", folder / "records"
    asked = {
        "report": ["report", run, "-o", out],
        "records": ["report", records, "-o", out],
        "md": ["report", run, "--format", "md", "-o", out],
        "latex": ["report", run, records, "--format", "latex", "-o", out],
        "csv": ["report", run, "--format", "csv", "-o", out],
        "compare": ["compare", other, run, "-o", out],
        "compare --json": ["compare", other, run, "--json"],
        "watch": ["watch", run, "--once"],
    }[command]
    before = "what was there before"
    out.write_text(before)
    code, said, complaint = run_command(*asked)
    assert [each.name for each in out.parent.iterdir()] == [out.name]  # no part of a file is left
    assert code in (0, 2), complaint
    if code == 2:
        assert re.fullmatch(r"fedthe: [^\n]{10,600}\n", complaint), complaint[:2000]
        assert said == ""
        assert out.read_text() == before
        return False
    assert complaint == ""
    assert all(mark.isprintable() or mark == "\n" for mark in said)
    if command == "watch":
        assert re.search(r"answers \d+ of \d+", said)
    return True


def try_damage(folder, whole, seed, scratch):
    """Damage a file, ask all commands that read it, and put it back. Returns what was done and how many refused."""
    rng = random.Random(seed)
    path = rng.choice(rng.choice(list_targets(folder)))
    kept = path.read_bytes()
    scratch.mkdir(exist_ok=True)
    out = scratch / "out.html"
    way = damage(path, rng)
    place = f"{way} {path.relative_to(folder)}, seed {seed}"
    commands = ["report", rng.choice(("md", "latex", "csv", "compare", "compare --json", "watch"))]
    if folder / "records" in path.parents:
        commands = ["records", "latex"]
    elif path.parent.name == "answers":
        commands = ["report", "watch"]
    elif path.name == "progress.json":
        commands = ["watch"]  # the others do not read it
    shown = 0
    try:
        for command in commands:
            try:
                if look(folder, command, out):
                    shown += 1
                    check_numbers(command, out, whole)
            except BaseException as error:
                error.__notes__ = [f"{command}: {place}"]
                raise
    finally:
        path.write_bytes(kept)
    return place, shown, len(commands)


def take_whole(folder, scratch):
    """The numbers of what is not damaged."""
    scratch.mkdir(exist_ok=True)
    whole = {}
    for command in ("report", "records"):
        assert look(folder, command, scratch / "out.html")
        whole[command] = take_scores(read_page(scratch / "out.html"))
    return whole


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damage")
    make_files(folder)
    return folder


def test_damage_is_left_out_or_refused(files, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("fedthe.report.page._load_plotly", str)  # it is large, and nobody looks at these pages
    whole = take_whole(files, tmp_path / "out")
    outcomes = [try_damage(files, whole, seed, tmp_path / "out") for seed in range(100)]
    shown = sum(each for _, each, _ in outcomes)
    assert 0.2 < shown / sum(asked for _, _, asked in outcomes) < 0.9  # both happen


def test_damage_that_the_long_form_found(files, tmp_path, monkeypatch):
    """A number of too many digits, and a column of samples that is shorter than the others."""
    import numpy as np

    monkeypatch.setattr("fedthe.report.page._load_plotly", str)
    folder = tmp_path / "files"
    shutil.copytree(files, folder)
    out = tmp_path / "out" / "out.html"
    out.parent.mkdir()
    for path in (folder / "run" / "samples").iterdir():
        with np.load(path) as file:
            arrays = {name: each[:-1] if name.endswith("/label") else each for name, each in file.items()}
        np.savez(path, **arrays)
    assert look(folder, "report", out)
    assert "No per-sample data of fedavg, seed 0" in out.read_text(encoding="utf-8")
    path = folder / "run" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"dirichlet": 10**400}))
    assert not look(folder, "report", out)


def run_long(number, first=0):
    """Every mutation, whatever happens; prints those that are not as they must be, and the counts."""
    import collections
    import tempfile
    import traceback

    from fedthe.report import page

    os.environ["COLUMNS"] = "120"
    page._load_plotly = str
    counts = collections.Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_files(folder)
        whole = take_whole(folder, folder / "out")
        for seed in range(first, first + number):
            try:
                _, shown, asked = try_damage(folder, whole, seed, folder / "out")
                counts["shown"] += shown
                counts["refused"] += asked - shown
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    break
                last = traceback.extract_tb(error.__traceback__)[-1]
                kind = "wrong" if isinstance(error, AssertionError) else "traceback"
                counts[kind] += 1
                where = f"{Path(last.filename).name}:{last.lineno} {last.name}"
                print(
                    f"{seed}: {kind}: {type(error).__name__}: {str(error)[:150]!r} at {where}",
                    *getattr(error, "__notes__", ()),
                )
                for part in (folder / "out").iterdir():
                    part.unlink()
    print(dict(counts))


if __name__ == "__main__":
    run_long(*map(int, sys.argv[1:]))
