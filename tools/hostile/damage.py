"""Ways to damage a file, as bad disks and bad copies do."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUMBER = re.compile(rb"(?<![\w.])\d")  # the first digit of a number in a text


def flip_bit(path: Path, rng: random.Random, others: list[Path]) -> str:
    held = bytearray(path.read_bytes() or b"\0")
    at, bit = rng.randrange(len(held)), rng.randrange(8)
    held[at] ^= 1 << bit
    path.write_bytes(held)
    return f"bit {bit} of byte {at} flipped"


def truncate(path: Path, rng: random.Random, others: list[Path]) -> str:
    held = path.read_bytes()
    size = rng.choice([0, len(held) // 2, max(0, len(held) - 1), rng.randrange(len(held) + 1)])
    path.write_bytes(held[:size])
    return f"cut to {size} of {len(held)} bytes"


def zero_range(path: Path, rng: random.Random, others: list[Path]) -> str:
    held = bytearray(path.read_bytes())
    at = rng.randrange(len(held) + 1)
    size = min(rng.choice([1, 16, 512, 4096]), len(held) - at)
    held[at : at + size] = bytes(size)
    path.write_bytes(held)
    return f"{size} bytes from {at} set to zero"


def change_digit(path: Path, rng: random.Random, others: list[Path]) -> str:
    """Change a number in a text."""
    held = path.read_bytes()
    found = [match.start() for match in NUMBER.finditer(held)]
    if path.suffix not in (".json", ".jsonl") or not found:
        return flip_bit(path, rng, others)
    at = rng.choice(found)
    digit = rng.choice([d for d in b"123456789" if d != held[at]])
    path.write_bytes(held[:at] + bytes([digit]) + held[at + 1 :])
    return f"the number at byte {at} changed from {chr(held[at])}... to {chr(digit)}..."


def swap(path: Path, rng: random.Random, others: list[Path]) -> str:
    if not others:
        return flip_bit(path, rng, others)
    other = rng.choice(others)
    ours, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(ours)
    return f"swapped with {other.name}"


def replace(path: Path, rng: random.Random, others: list[Path]) -> str:
    if not others:
        return truncate(path, rng, others)
    other = rng.choice(others)
    shutil.copyfile(other, path)
    return f"replaced by {other.name}"


def swap_pair(path: Path, rng: random.Random, others: list[Path]) -> str:
    """Swap all files of two trainings, or of two answers."""
    if not others:
        return truncate(path, rng, others)
    other = rng.choice(others)
    run = path.parent.parent
    for folder in (run / name for name in ("trainings", "answers", "samples", "examples")):
        for file in sorted(folder.glob(f"{path.stem}.*")) if folder.is_dir() else []:
            twin = file.with_name(f"{other.stem}{file.suffix}")
            if twin.exists():
                ours, theirs = file.read_bytes(), twin.read_bytes()
                file.write_bytes(theirs)
                twin.write_bytes(ours)
    return f"all of {path.stem} swapped with all of {other.stem}"


def delete(path: Path, rng: random.Random, others: list[Path]) -> str:
    path.unlink()
    return "deleted"


def make_folder(path: Path, rng: random.Random, others: list[Path]) -> str:
    path.unlink()
    path.mkdir()
    return "a folder in its place"


def make_fifo(path: Path, rng: random.Random, others: list[Path]) -> str:
    path.unlink()
    os.mkfifo(path)
    return "a FIFO in its place"


def make_link(path: Path, rng: random.Random, others: list[Path]) -> str:
    path.unlink()
    path.symlink_to("nowhere")
    return "a dangling link in its place"


def change_weights(path: Path, rng: random.Random, others: list[Path]) -> str:
    """Make a valid checkpoint with other weights, or another round number."""
    if path.suffix != ".safetensors":
        return edit_answer(path, rng, others)
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no dict
    if rng.random() < 0.3:
        facts = json.loads(metadata["fedthe"])
        facts["round"] -= 1
        metadata["fedthe"] = json.dumps(facts)
        done = "its round number lowered by one"
    else:
        name = rng.choice(sorted(kept))
        kept[name] = -3 * kept[name] if kept[name].is_floating_point() else kept[name] + 1
        done = f"its tensor {name} changed"
    save_file(kept, path, metadata=metadata)
    return done


def edit_answer(path: Path, rng: random.Random, others: list[Path]) -> str:
    """Make an answer of valid JSON whose rows are not those of the run."""
    value: Any = json.loads(path.read_bytes()) if path.suffix == ".json" else None
    if not (isinstance(value, dict) and isinstance(value.get("rows"), list)):
        return change_digit(path, rng, others)
    rows = value["rows"]
    way = rng.randrange(5)
    if way == 0:
        for row in rows:
            row["accuracy"] = 99.0
        done = "all accuracies set to 99"
    elif way == 1:
        rows.clear()
        done = "its rows emptied"
    elif way == 2:
        a, b = rng.sample([row for row in rows if row["test"] == rows[0]["test"]], 2)
        a["client"], b["client"] = b["client"], a["client"]
        done = "two clients' rows exchanged"
    elif way == 3:
        del rows[rng.randrange(len(rows))]
        done = "one row dropped"
    else:
        row = rng.choice(rows)
        row["right"] = (row["right"] + 1) % (row["samples"] + 1)
        row["accuracy"] = 100 * row["right"] / row["samples"]
        done = "one row's score changed, and consistent in itself"
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    return done


ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1e308,
    float("nan"),
    float("inf"),
    10**400,
    "",
    "\x1b[31m",
    [],
    {},
    [[]],
    {"": []},
)


def edit_json(path: Path, rng: random.Random, others: list[Path]) -> str:
    """Make valid JSON with a value of another type somewhere, or one missing."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        return zero_range(path, rng, others)
    inner, key = value, rng.choice(_list_keys(value) or [0])
    where = [key]
    while rng.random() < 0.8 and isinstance(inner[key], dict | list) and inner[key]:
        inner = inner[key]
        key = rng.choice(_list_keys(inner))
        where.append(key)
    odd, done = rng.choice(ODD), ".".join(map(str, where))
    if rng.random() < 0.3:
        del inner[key]
        done += " removed"
    else:
        inner[key] = odd
        done += f" became {str(odd)[:20]!r}"
    path.write_text(json.dumps(value), encoding="utf-8")
    return done


def _list_keys(value: Any) -> list[Any]:
    return sorted(value) if isinstance(value, dict) else list(range(len(value)))


Damage = Callable[[Path, random.Random, list[Path]], str]
WAYS: tuple[Damage, ...] = (
    flip_bit,
    edit_answer,
    truncate,
    swap,
    change_weights,
    zero_range,
    replace,
    delete,
    change_digit,
    make_folder,
    swap_pair,
    make_fifo,
    make_link,
    edit_json,
)


def damage(folder: Path, files: list[Path], rng: random.Random, number: int) -> tuple[str, set[str]]:
    """Damage one of the files in one way; return what was done, and the paths that may have changed."""
    way = WAYS[number % len(WAYS)]
    if way is edit_answer:
        files = [file for file in files if file.parent.name == "answers"] or files
    elif way is change_weights:
        files = [file for file in files if file.suffix == ".safetensors"] or files
    elif way is swap_pair:
        files = [file for file in files if file.parent.name in ("trainings", "answers")] or files
    elif way is edit_json:
        files = [file for file in files if file.suffix == ".json"]
    kinds = sorted({_kind(file) for file in files})
    kind = rng.choice(kinds)
    path = rng.choice([file for file in files if _kind(file) == kind])
    others = [file for file in files if _kind(file) == kind and file != path]
    same = [file for file in others if file.stat().st_size and file.name.split("-")[0] != path.name.split("-")[0]]
    done = way(path, rng, rng.choice([others, same or others]))
    return f"{path.relative_to(folder)}: {done}", {str(path.relative_to(folder))}


def _kind(path: Path) -> tuple[str, str]:
    return path.parent.name, path.suffix
