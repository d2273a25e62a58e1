"""Random arguments and TOML files, up to where training would start."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

from .trial import Ground, Kind, Verdict, judge_words, say

# Values that a setting must accept, and what config.json then holds.
VALID: dict[str, dict[str, Any]] = {
    "rounds": {"1": 1, "7": 7, "250": 250},
    "clients": {"1": 1, "2": 2, "5": 5},
    "dirichlet": {"0.1": 0.1, "1": 1.0, "1e2": 100.0},
    "lr": {"0.1": 0.1, "1e-3": 0.001, "none": None},
    "momentum": {"0": 0.0, "0.9": 0.9},
    "weight_decay": {"0": 0.0, "5e-4": 0.0005},
    "participation": {"1": 1.0, "0.5": 0.5},
    "batch": {"1": 1, "64": 64},
    "local_epochs": {"1": 1, "3": 3},
    "personal_epochs": {"1": 1, "2": 2},
    "samples": {"1": 1, "none": None},
    "severity": {"1": 1, "5": 5},
    "seeds": {"0": [0], "3,4": [3, 4]},
    "methods": {"fedavg": ["fedavg"], "fedthe,ditto": ["fedthe", "ditto"]},
    "tests": {"original": ["original"], "ooc,mixture": ["ooc", "mixture"], "none": None},
    "partition": {"balanced": "balanced", "unbalanced": "unbalanced"},
    "net": {"cnn": "cnn", "resnet20_gn": "resnet20_gn"},
    "flip": {"true": True, "false": False},
    "standardize": {"true": True, "false": False},
    "crop": {"0": 0, "2": 2},
    "train_fraction": {"0.5": 0.5, "1": 1.0},
    "test_fraction": {"0.5": 0.5, "1": 1.0},
    "checkpoint_seconds": {"0": 0.0, "5": 5.0},
    "keep": {"1": [1], "": []},
    "optimizer": {"sgd": "sgd", "adam": "adam", "none": None},
    "engine": {"auto": "auto", "loop": "loop"},
}
# Values that every numeric setting must refuse.
NEVER = ("nan", "inf", "-inf", "1e400", "-1e400", "-1", "-0.5", "1.5.2", "3 apples", "--5", "1e", "0x10", "[1]", "{}")
NUMBERS = ("rounds", "clients", "dirichlet", "lr", "batch", "local_epochs", "samples", "severity", "participation")
ODD = (
    "",
    " ",
    ",",
    ",,",
    "none",
    "None",
    "null",
    "0",
    "00012",
    "1_000",
    "9" * 30,
    "9" * 5000,
    "1" + "0" * 400,
    "-0",
    "1e308",
    "5e-324",
    "٣",
    "\x1b[31mred",
    "\u202etxet",
    "💥",
    "\udcff\udcfe",
    "a" * 5000,
    "a=b=c",
    "'",
    '"',
    "\\",
    "%s%n",
    "{0}",
    "[bold]x[/]",
    "[/]",
    "true",
    "fedthe",
    "npz:",
    ":",
    "a\nb",
    "a\tb",
)
PLACES = ("", ".", "a/b/c", "../x", "tiny.npz", "tiny.npz/x", "b" * 300, "\x1b[31m", "[bold]", "c d", "\udcff", "run")
DATASETS = ("npz:tiny.npz", "npz:nowhere.npz", "npz:.", "npz:tiny.toml", "folder:.", "glyph", "cifar10", "npz", ":", "")
WHERE = {"out": PLACES, "name": PLACES, "dataset": DATASETS, "natural": (*DATASETS, "none"), "frost": PLACES}
METHODS = ("fedthe", "fedthe_plus", "fedthe_regime", "fedthe_regime_lda", "ditto", "fedavg", "nobody", "")
HYPER = (
    *("alpha", "beta", "lam", "then.lr", "search.lr", "search.steps", "net", "net.classes", "", ".", "__class__"),
    *("own", "start", "regimes.own", "discriminant", "leave"),
)
TOML = (
    "",
    "rounds = ",
    "rounds = 1\nrounds = 2\n",
    "[rounds]\nx = 1\n",
    "[hyper]\nfedthe = 3\n",
    "[hyper.fedthe]\nalpha = [1, 2]\n",
    "[hyper.fedthe.alpha]\nx.y.z = 1\n",
    "[[hyper]]\na = 1\n",
    "seeds = [[0]]\n",
    "seeds = [true]\n",
    "seeds = [1979-05-27]\n",
    "rounds = 1979-05-27T07:32:00Z\n",
    "rounds = 9223372036854775808\n",
    "rounds = " + "9" * 5000 + "\n",
    "lr = nan\n",
    "lr = inf\n",
    "methods = [1, 'fedavg']\n",
    "methods = {a = 1}\n",
    "name = 1979-05-27\n",
    "name = ''\n",
    "\ufeffrounds = 2\n",
    "rounds = 2\r\n\0",
    "'rounds ' = 2\n",
    '"\\u001b[31m" = 2\n',
    "x = " + "[" * 2000 + "]" * 2000 + "\n",
    "x = " + "[" * 50000 + "\n",
    "x" + ".x" * 5000 + " = 1\n",
    "clients = 3.0\n",
    "flip = 1\n",
    "tests = []\n",
    "curve = [1]\n",
    "keep = [0]\n",
    "dirichlet = -0.0\n",
    "crop = 16\n",
    "size = 0\n",
    "size = 100000\n",
    "clients = 1000000000000\n",
    "batch = 1000000000000\n",
    "local_epochs = 1000000000000\n",
    "width = 100000\n",
    "head_layers = 1000000\n",
    "seeds = [" + "0, " * 20000 + "]\n",
    "lr = 1" + "0" * 400 + "\n",
    "dirichlet = 1e-320\n",
    "checkpoint_seconds = 1" + "0" * 400 + "\n",
    "[hyper.fedthe]\nalpha = 1" + "0" * 400 + "\n",
    "[hyper.fedthe_regime]\nown = [0.1, 'a']\n",
    "[hyper.fedthe_regime]\nown = [[0.1], 0.9]\n",
    "[hyper.fedthe_regime]\nown = []\nstart = []\n",
    "[hyper.fedthe_regime]\nown = [0.1, 0.9]\nstart = [0.5, 0.6]\n",
    "streams = 'own'\n",
    "streams = []\n",
    "[streams]\nx = 3\n",
    "[streams]\nx = ''\n",
    "[streams]\nx = 'own 1e400%'\n",
    "[streams]\nx = 'own -1'\n",
    "[streams]\nx = 'nobody 10'\n",
    "[streams]\nx = 'own 99999999999999999999'\n",
    "[streams]\noriginal = 'own'\n",
    "[streams]\n'a/b' = 'own'\n",
    "[streams]\n'' = 'own'\n",
    "[streams]\nx = '" + "own 1, " * 20000 + "own 1'\n",
    "[streams.x]\ny = 'own'\n",
    "unknown = -1\n",
    "unknown = [1]\n",
    "unknown = 'nobody'\n",
    "unknown = ''\n",
    "unseen = 2\n",
    "unseen = 1.0\n",
    "unseen = nan\n",
    "unseen = -0.1\n",
    "tests = ['open_set']\n",
    "tests = ['switch10', 'switch10']\n",
)
# Whole files, because BASE has these keys already.
WHOLE = (
    'dataset = "npz:\\u0000"\nout = "new"\n',
    'dataset = "npz:tiny.npz"\nout = "a\\u0000b"\n',
    'dataset = "npz:tiny.npz"\nname = "a\\u0000b"\n',
    'dataset = "npz:tiny.npz"\nname = "\\u001b[31m\\n"\n',
    'dataset = "npz:tiny.npz"\nnatural = "folder:\\u0000"\nout = "new"\n',
    'dataset = "npz:tiny.npz"\nfrost = "\\u0000"\nout = "new"\n',
    'dataset = ["npz:tiny.npz"]\nout = "new"\n',
    'dataset = "npz:tiny.npz"\nout = 3\n',
    'dataset = "folder:"\nout = "new"\n',
)
BASE = 'dataset = "npz:tiny.npz"\nout = "new"\n'


def attempt(ground: Ground, rng: random.Random, number: int, place: Path) -> tuple[str, Verdict]:
    work = ground.copy(place / "a" / "b" / "c" / "work", run=False)
    words: list[str] = []
    file, text = "case.toml", BASE
    if number % 4 == 0:
        file, text = _make_file(work, rng, number)
    else:
        (work / file).write_text(text, encoding="utf-8")
    while len(words) < rng.randrange(1, 5) or (file == "case.toml" and text == BASE and not words):
        words.append(_draw_word(rng))
    if rng.random() < 0.05:
        words.append(rng.choice(["--nothing", "-", "--", "-o", "--json=3"]))
    command = ["run", file]
    if number % 4 == 1:  # it has its dataset, and --plan runs nothing
        command = ["table", "main-dir0.1", "--plan", "out=new"]
        words = [word for word in words if not word.startswith(("dataset=", "natural=", "out="))]
    said = say([*command, *words], work, before=stop_before_training)
    shown = " ".join(repr(word)[:80] for word in [*command, *words])
    what = f"{shown}; file {text[:60]!r}..." if file != "case.toml" or text != BASE else shown
    verdict = judge_words(said)
    if verdict is None and command[0] == "run":
        verdict = judge_settings(work, words)
    return what, verdict or Verdict("same")


def stop_before_training() -> None:
    """End a run successfully where training would start: `recording` is entered before the first round."""
    from fedthe.experiment import run

    def stop(*given: Any, **named: Any) -> Any:
        raise SystemExit(0)

    if not hasattr(run, "recording"):
        raise RuntimeError("experiment.run.recording was renamed; adapt stop_before_training")
    run.recording = stop


def judge_settings(work: Path, words: list[str]) -> Verdict:
    """Whether the accepted settings are those that were typed."""
    last = {key: value for key, _, value in (word.partition("=") for word in words)}
    for key, value in last.items():
        if key in NUMBERS and value in NEVER:
            return Verdict("silent", f"{key}={value} is accepted")
    try:
        found = json.loads((work / "new" / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Verdict("same")  # it went elsewhere, as it was told
    for key, value in last.items():
        if value in VALID.get(key, {}) and found[key] != VALID[key][value]:
            return Verdict("silent", f"{key}={value} became {found[key]!r}")
    return Verdict("same")


def _draw_word(rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.6:
        key = rng.choice(sorted(VALID))
        return f"{key}={rng.choice(sorted(VALID[key]))}"
    if draw < 0.7:
        return f"{rng.choice(NUMBERS)}={rng.choice(NEVER)}"
    if draw < 0.75:
        key = rng.choice(sorted(WHERE))
        return f"{key}={rng.choice(WHERE[key])}"
    if draw < 0.85:
        return f"hyper.{rng.choice(METHODS)}.{rng.choice(HYPER)}={rng.choice((*ODD, *NEVER, '0.2'))}"
    if draw < 0.97:
        return f"{rng.choice([*VALID, 'curve', 'size', 'width', 'device', 'nothing', ''])}={rng.choice(ODD)}"
    return rng.choice(ODD)


def _make_file(work: Path, rng: random.Random, number: int) -> tuple[str, str]:
    """A settings file, or something in its place; its name, and what it holds."""
    path = work / "case.toml"
    draw = number // 4 % (len(TOML) + len(WHOLE) + 6)
    if draw < len(TOML) + len(WHOLE):
        text = (TOML + WHOLE)[draw]
        path.write_text(BASE * (draw < len(TOML) and rng.random() < 0.7) + text, encoding="utf-8")
        return path.name, text
    way = draw - len(TOML) - len(WHOLE)
    if way == 0:
        path.mkdir()
    elif way == 1:
        os.mkfifo(path)
    elif way == 2:
        path.symlink_to(path.name)
    elif way == 3:
        path.write_bytes(rng.randbytes(300))
    elif way == 4:
        path.write_bytes((BASE + "rounds = 3\n").encode("utf-16"))
    elif way == 5:
        return rng.choice(["nowhere.toml", "/dev/null", "x" * 300, "\x1b[31m.toml", "a\nb.toml"]), ""
    return path.name, ("a folder", "a FIFO", "a link to itself", "random bytes", "UTF-16")[way]


KIND = Kind("settings", 800, 20, attempt)
